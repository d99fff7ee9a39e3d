"""What a stand-in says: words that follow from the prompt, so that two of them say the same."""

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
