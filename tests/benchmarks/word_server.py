"""A fake OpenAI server for the tests of the benchmarks: its tokens are words, its reply is r0 r1 r2 …

The stand-in OpenAI server counts characters; here prompts must have an exact number of tokens.
Usage: python -m tests.benchmarks.word_server PORT
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any


def count(messages: Sequence[dict[str, str]]) -> int:
    return sum(len(message["content"].split()) for message in messages)


class WordServer:
    """Streams `max_tokens` words. Each session's previous prompt counts as cached."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.running = 0
        self.most_running = 0
        self._known: dict[str, int] = {}

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines[1:] if line)}
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        self.requests.append((headers, body))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        for n in range(body["max_tokens"]):
            await asyncio.sleep(0.005)
            writer.write(_event(choices=[{"delta": {"content": f" r{n}"}, "finish_reason": None}]))
        self.running -= 1
        writer.write(_event(choices=[{"delta": {}, "finish_reason": "length"}]))
        writer.write(_event(choices=[], usage=self._usage(headers, body)) + b"data: [DONE]\n\n")
        writer.close()

    def _usage(self, headers: dict[str, str], body: dict[str, Any]) -> dict[str, Any]:
        session = headers.get("x-session-affinity", "")
        n_prompt = count(body["messages"])
        cached = self._known.get(session, 0) if session else 0
        self._known[session] = n_prompt
        details = {"cached_tokens": cached}
        return {"prompt_tokens": n_prompt, "completion_tokens": body["max_tokens"], "prompt_tokens_details": details}


def _event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


async def _serve(port: int) -> None:
    async with await asyncio.start_server(WordServer(), "127.0.0.1", port) as listening:
        await listening.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
