"""The behaviour of the stand-in OpenAI server: its deterministic replies, prefix cache, KV handoffs and faults.

Replies follow from the prompt, so that two servers give the same one and a resumed reply can be checked.
"""

import asyncio
import time
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import msgspec

CHUNK_CHARS = 64  # one block of the prefix cache: 16 tokens of 4 characters
TOKENS_PER_BLOCK = 16
FIRST_WORD_ID = 1 << 21  # of a reply; characters of a prompt have lower token ids

encode = msgspec.json.Encoder().encode


class StandinPrompt:
    """The text of a prompt, and how many words of the reply it already contains (for a reply to be continued)."""

    def __init__(self, body: dict[str, Any]) -> None:
        messages = body.get("messages")
        partial = ""
        if isinstance(messages, list):
            if body.get("continue_final_message") and messages and messages[-1].get("role") == "assistant":
                partial = messages[-1].get("content") or ""
                messages = messages[:-1]
            self.text = "\n".join(f"{message.get('role')}: {_message_text(message)}" for message in messages)
        else:
            prompt = body.get("prompt")
            self.text = _decoded(prompt) if isinstance(prompt, list) else str(prompt)
            self.text, mark, rest = self.text.partition(" w0-")
            partial = mark + rest
        self.n_replied = partial.count(" w")
        self.token_ids = [ord(char) for char in self.text] + [FIRST_WORD_ID + n for n in range(self.n_replied)]
        self.salt = str(body.get("cache_salt", ""))

    @property
    def n_tokens(self) -> int:
        return len(self.text) // 4 + 1 + self.n_replied

    def blocks(self) -> list[bytes]:
        chain, found = blake2b(self.salt.encode(), digest_size=16).digest(), []
        for start in range(0, len(self.text) - CHUNK_CHARS + 1, CHUNK_CHARS):
            piece = self.text[start : start + CHUNK_CHARS].encode()
            chain = blake2b(piece, key=chain, digest_size=16).digest()
            found.append(chain)
        return found

    def words(self, n: int) -> Iterator[str]:
        """The reply behind what the prompt contains of it; word number N has the token id FIRST_WORD_ID + N."""
        for number in range(self.n_replied, n):
            yield _word(self.text, number)


def _word(text: str, number: int) -> str:
    return f" w{number}-{blake2b(text.encode(), digest_size=2).hexdigest()}"


def _decoded(ids: list[int]) -> str:
    text = "".join(chr(number) for number in ids if number < FIRST_WORD_ID)
    return text + "".join(_word(text, number - FIRST_WORD_ID) for number in ids if number >= FIRST_WORD_ID)


def _message_text(message: dict[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else encode(content).decode()


class StandinPrefixCache:
    """An unbounded prefix cache of block hashes."""

    def __init__(self) -> None:
        self._blocks: set[bytes] = set()

    def cached_tokens(self, prompt: StandinPrompt) -> int:
        """Tokens of the prompt that were cached; caches all of them."""
        known = 0
        blocks = prompt.blocks()
        for block in blocks:
            if block not in self._blocks:
                break
            known += 1
        self._blocks.update(blocks)
        return known * TOKENS_PER_BLOCK


class KVHandoffs:
    """KV that a prefill server holds under a lease until a decode server fetches it by name."""

    def __init__(self, lease_s: float, wait_s: float) -> None:
        self.lease_s = lease_s
        self.wait_s = wait_s
        self._held: dict[str, tuple[float, int]] = {}  # name → (end of lease, prompt tokens)
        self._offered: dict[str, asyncio.Event] = {}
        self.fetched: list[str] = []
        self.reused: list[str] = []  # names that were used twice

    @property
    def leased(self) -> list[str]:
        now_s = time.monotonic()
        return [name for name, (end_s, _) in self._held.items() if end_s > now_s]

    def hold(self, name: str, n_tokens: int) -> None:
        if name in self._held or name in self.fetched:
            self.reused.append(name)
        self._held[name] = (time.monotonic() + self.lease_s, n_tokens)
        self._offered.setdefault(name, asyncio.Event()).set()

    def fetch(self, name: str) -> int | None:
        """The number of prompt tokens, once; None if nothing is held under that name."""
        end_s, n_tokens = self._held.pop(name, (0.0, 0))
        if end_s <= time.monotonic():
            return None
        self.fetched.append(name)
        return n_tokens

    async def wait(self, name: str) -> int | None:
        """Wait for the prefill request, then do as `fetch` does."""
        try:
            async with asyncio.timeout(self.wait_s):
                await self._offered.setdefault(name, asyncio.Event()).wait()
        except TimeoutError:
            return None
        return self.fetch(name)

    async def fetched_by(self, name: str) -> bool:
        """Waits until the decode server has fetched it; False after `wait_s`."""
        end_s = time.monotonic() + self.wait_s
        while time.monotonic() < end_s:
            if name in self.fetched:
                return True
            await asyncio.sleep(0.002)
        return False


class ServerScript(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How the server replies and fails. `…_after` counts tokens of the reply before the fault; -1 is never."""

    tokens: int = 50  # maximum per reply
    says: str = ""  # reply with these words, whatever the prompt; empty: with words that follow from the prompt
    canned: bool = False  # the same precomputed bytes for every request: for load tests
    ttft_ms: float = 0.0
    itl_ms: float = 0.0
    event_tokens: int = 1  # tokens in one event of a stream
    split: int = 0  # send the stream in pieces of so many bytes
    reports_cached: str = ""  # cached tokens that a decode server reports: "all" (but one), else none
    status: int = 0  # reply with this HTTP status
    message: str = "scripted"  # of that answer
    retry_after: str = "3"  # the header of a 429; empty: none
    html: bool = False  # answer with a page of HTML, as a proxy in front of a server may
    plain_json: bool = False  # answer a streaming request with a whole body, as servers without streams do
    hang: bool = False  # accept the request and never reply
    garbage: bool = False  # reply with bytes that are not HTTP
    bad_json: bool = False  # invalid JSON in the stream or body
    cut_after: int = -1  # close the connection
    error_after: int = -1  # send an error event
    fault_ms: float = 0.0  # wait before a cut or an error: what was sent has been relayed by then
    die_after: int = -1  # exit the process
    stall_after: int = -1  # compute nothing any more, for any request, and go on answering health checks
    no_params: bool = False  # a prefill reply without kv_transfer_params
    no_done: bool = False  # end the stream without [DONE]
    times: int = -1  # how many requests fail; -1: all of them
    lease_s: float = 30.0
    handoff_wait_s: float = 5.0  # how long prefill and decode wait for each other
    unhealthy: bool = False  # /health, /metrics and the like fail
    dead_engine: bool = False  # only /health does
    slots: int = 0  # sequences computed at once, others wait; 0: any number

    def words(self, prompt: StandinPrompt, limit: int) -> list[str]:
        """The reply to a prompt as words of one token each, at most `limit` of them."""
        limit = min(prompt.n_replied + limit, self.tokens)
        if self.says:
            return self.says.split()[prompt.n_replied : limit]
        return list(prompt.words(limit))

    @property
    def has_fault(self) -> bool:
        flags = self.status or self.html or self.hang or self.garbage or self.bad_json or self.no_params or self.no_done
        return bool(flags) or max(self.cut_after, self.error_after, self.die_after, self.stall_after) >= 0


def parse_server_script(text: str) -> ServerScript:
    pairs = [item.partition("=") for item in text.split(",") if item]
    return msgspec.convert({key: value or True for key, _, value in pairs}, ServerScript, strict=False)
