"""Servers that answer a streaming request with plain JSON: their reply is used, as the stream that was asked for."""

from typing import Any

import msgspec
import pytest

from emberline.upstream.dialects.sse import MalformedLine, StreamEditor, StreamError
from emberline.upstream.dialects.whole_reply import stream_lines
from standins.openai_script import ServerScript
from tests.upstream.providers.conftest import SAYS, Opener, events, said
from tests.upstream.providers.test_openai_providers import MODEL, REPLY, StartServer, acme

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
MESSAGE = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]}
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def reply(**more: Any) -> bytes:
    choice = {"index": 0, "message": MESSAGE, "finish_reason": "tool_calls"}
    body = {"id": "x", "object": "chat.completion", "model": "m", "choices": [choice], "usage": USAGE}
    return msgspec.json.encode(body | more)


async def test_every_api_uses_the_reply(gateway: Opener, openai_server: StartServer) -> None:
    server = await openai_server(ServerScript(plain_json=True))
    made = await gateway(acme(server))
    for stream in (True, False):
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer = await made.post("/v1/chat/completions", {"model": MODEL, "messages": SAYS, **options})
        assert answer.status_code == 200, answer.text
        chunks = events(answer.text) if stream else []
        shown = said(chunks) if stream else answer.json()["choices"][0]["message"]["content"]
        assert shown == REPLY
        assert (chunks[-1] if stream else answer.json())["usage"]["completion_tokens"] == 50
    for path, body in (
        ("/v1/messages", {"messages": SAYS, "max_tokens": 100, "stream": True}),
        ("/v1/responses", {"input": SAYS[0]["content"]}),
        ("/v1/completions", {"prompt": "once", "max_tokens": 5, "stream": True}),
    ):
        answer = await made.post(path, {"model": MODEL, **body})
        assert answer.status_code == 200, answer.text
    assert [row[1] for row in await made.rows()] == ["finished"] * 5


async def test_json_that_cannot_be_read_is_the_servers_fault(gateway: Opener, openai_server: StartServer) -> None:
    server = await openai_server(ServerScript(plain_json=True, bad_json=True))
    made = await gateway(acme(server))
    answer = await made.post("/v1/chat/completions", {"model": MODEL, "messages": SAYS, "stream": True})
    assert answer.status_code == 503
    assert "JSON that cannot be read" in answer.json()["error"]["message"]


def test_a_reply_with_calls() -> None:
    first, last, usage = events(stream_lines(reply()).decode())
    (choice,) = first["choices"]
    assert first["object"] == "chat.completion.chunk"
    assert choice["delta"] == MESSAGE | {"tool_calls": [{"index": 0, **CALL}]}
    assert choice["finish_reason"] is None
    assert last["choices"] == [{"index": 0, "delta": {}, "finish_reason": "tool_calls", "logprobs": None}]
    assert usage["choices"] == []
    assert usage["usage"] == USAGE


def test_a_reply_without_usage_or_reason_is_complete() -> None:
    lines = stream_lines(reply(usage=None, choices=[{"message": {"content": "Hi"}}]))
    editor = StreamEditor()
    assert editor.feed(lines) == lines
    assert editor.finished
    assert editor.ended


def test_an_error_is_an_error() -> None:
    with pytest.raises(StreamError, match="no quota"):
        StreamEditor().feed(stream_lines(b'{"error": {"message": "no quota", "code": 429}}'))


@pytest.mark.parametrize("body", [b"{}", b"[]", b"null", b"{", b'{"choices": []}', b'{"choices": [5]}', b"[" * 100_000])
def test_other_json_is_refused(body: bytes) -> None:
    with pytest.raises(MalformedLine):
        stream_lines(body)
