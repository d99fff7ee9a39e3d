"""What a stand-in says: words that follow from the prompt, so that two of them say the same."""

import asyncio
import time
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import msgspec

CHUNK_CHARS = 64  # of a prompt: one block of its cache, 16 tokens
TOKENS_PER_BLOCK = 16

encode = msgspec.json.Encoder().encode


class Prompt:
    """The prompt's text, and how much of the reply it already holds (a reply to be continued)."""

    def __init__(self, body: dict[str, Any]) -> None:
        messages = body.get("messages")
        said = ""
        if isinstance(messages, list):
            if body.get("continue_final_message") and messages and messages[-1].get("role") == "assistant":
                said = messages[-1].get("content") or ""
                messages = messages[:-1]
            self.text = "\n".join(f"{message.get('role')}: {_content(message)}" for message in messages)
        else:
            self.text = str(body.get("prompt"))
            self.text, mark, rest = self.text.partition(" w0-")
            said = mark + rest
        self.n_said = said.count(" w")
        self.salt = str(body.get("cache_salt", ""))

    @property
    def n_tokens(self) -> int:
        return len(self.text) // 4 + 1 + self.n_said

    def blocks(self) -> list[bytes]:
        chain, found = blake2b(self.salt.encode(), digest_size=16).digest(), []
        for start in range(0, len(self.text) - CHUNK_CHARS + 1, CHUNK_CHARS):
            piece = self.text[start : start + CHUNK_CHARS].encode()
            chain = blake2b(piece, key=chain, digest_size=16).digest()
            found.append(chain)
        return found

    def words(self, n: int) -> Iterator[str]:
        mark = blake2b(self.text.encode(), digest_size=2).hexdigest()
        for number in range(self.n_said, n):
            yield f" w{number}-{mark}"


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else encode(content).decode()


class Cache:
    """A prefix cache of block hashes, without end."""

    def __init__(self) -> None:
        self._blocks: set[bytes] = set()

    def cached_tokens(self, prompt: Prompt) -> int:
        """How many were known; all of them are, from now on."""
        known = 0
        blocks = prompt.blocks()
        for block in blocks:
            if block not in self._blocks:
                break
            known += 1
        self._blocks.update(blocks)
        return known * TOKENS_PER_BLOCK


class Meetings:
    def __init__(self, lease_s: float, meet_s: float) -> None:
        self.lease_s = lease_s
        self.meet_s = meet_s
        self._held: dict[str, tuple[float, int]] = {}  # name → (end of lease, prompt tokens)
        self._arrivals: dict[str, asyncio.Event] = {}
        self.fetched: list[str] = []
        self.reused: list[str] = []  # names that came twice

    @property
    def leased(self) -> list[str]:
        now_s = time.monotonic()
        return [name for name, (end_s, _) in self._held.items() if end_s > now_s]

    def hold(self, name: str, n_tokens: int) -> None:
        if name in self._held or name in self.fetched:
            self.reused.append(name)
        self._held[name] = (time.monotonic() + self.lease_s, n_tokens)
        self._arrivals.setdefault(name, asyncio.Event()).set()

    def fetch(self, name: str) -> int | None:
        """The prompt's tokens, once; None where there is nothing under that name."""
        end_s, n_tokens = self._held.pop(name, (0.0, 0))
        if end_s <= time.monotonic():
            return None
        self.fetched.append(name)
        return n_tokens

    async def wait(self, name: str) -> int | None:
        """As `fetch`, but prefill may come later."""
        try:
            async with asyncio.timeout(self.meet_s):
                await self._arrivals.setdefault(name, asyncio.Event()).wait()
        except TimeoutError:
            return None
        return self.fetch(name)

    async def fetched_by(self, name: str) -> bool:
        """Prefill's side: wait until decode has it."""
        end_s = time.monotonic() + self.meet_s
        while time.monotonic() < end_s:
            if name in self.fetched:
                return True
            await asyncio.sleep(0.002)
        return False


class Script(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    tokens: int = 50  # of a reply, at most
    canned: bool = False  # the same bytes to everybody, at once: for load
    ttft_ms: float = 0.0
    itl_ms: float = 0.0
    split: int = 0  # cut what is sent into pieces of so many bytes
    lies: str = ""  # what decode says of its cached tokens: "all" (all but one), else none
    status: int = 0  # answer with this status
    message: str = "scripted"  # of that answer
    hang: bool = False  # take the request, say nothing
    garbage: bool = False  # answer what is no HTTP
    bad_json: bool = False  # a stream with a line that is no JSON, a whole answer that is none
    cut_after: int = -1  # close the connection after so many tokens
    error_after: int = -1  # tell an error inside the stream after so many tokens
    die_after: int = -1  # end the process after so many tokens
    no_params: bool = False  # prefill without kv_transfer_params
    no_done: bool = False  # end the stream without [DONE]
    times: int = -1  # how many requests fail so; then all is well; -1: all of them
    lease_s: float = 30.0
    meet_s: float = 5.0  # how long one leg waits for the other
    sick: bool = False  # /health and all other questions fail

    @property
    def faulty(self) -> bool:
        return self.times != 0


def parse(text: str) -> Script:
    pairs = [item.partition("=") for item in text.split(",") if item]
    return msgspec.convert({key: _value(value) for key, _, value in pairs}, Script, strict=False)


def _value(text: str) -> str | bool:
    return True if text == "" else text
