"""A conversation's digests: one for each message, over it and all before it.

Two conversations share a digest exactly when they share the messages up to there: role, text, name, reasoning and
parsed tool calls, each typed and length-prefixed, under a keyed hash.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from emberline.protocol.request import Message, Tool, ToolCall

DIGEST_BYTES = 16
_canonical = msgspec.json.Encoder(order="deterministic")


def chain_digests(
    messages: Sequence[Message], template_kwargs: Mapping[str, Any] | None = None, tools: Sequence[Tool] = ()
) -> list[bytes]:
    """The digest after each message. `template_kwargs` and tools decide what the template writes: they root the
    chain."""
    root = _canonical.encode([template_kwargs or {}, tools])
    digest = blake2b(root, key=b"emberline.messages", digest_size=DIGEST_BYTES)
    digests: list[bytes] = []
    parent = digest.digest()
    for message in messages:
        parent = extend(parent, message)
        digests.append(parent)
    return digests


def extend(parent: bytes, message: Message) -> bytes:
    digest = blake2b(key=parent, digest_size=DIGEST_BYTES)
    fields = [b"r", message.role, b"c", message.content]
    if message.name is not None:
        fields += [b"n", message.name]
    if message.tool_call_id is not None:
        fields += [b"i", message.tool_call_id]
    if message.reasoning is not None:
        fields += [b"g", message.reasoning]
    for call in message.tool_calls:
        fields += [b"t", call.id, call.name, _arguments(call)]
    for field in fields:
        data = field if isinstance(field, bytes) else field.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


class TextHash:
    """A digest of text that grows: `after(piece)` is the digest of all pieces so far."""

    def __init__(self) -> None:
        self.n_chars = 0
        self._hash = blake2b(key=b"emberline.text", digest_size=DIGEST_BYTES)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TextHash) and self._hash.digest() == other._hash.digest()

    def after(self, piece: str) -> bytes:
        self.n_chars += len(piece)
        self._hash.update(piece.encode("utf-8", "surrogatepass"))
        return self._hash.digest()

    def copy(self) -> "TextHash":
        """To go on from here more than once."""
        other = TextHash()
        other.n_chars, other._hash = self.n_chars, self._hash.copy()
        return other


def _arguments(call: ToolCall) -> bytes:
    """Arguments as parsed: clients write the same JSON with other spaces and another order of keys."""
    try:
        return b"j" + _canonical.encode(msgspec.json.decode(call.arguments))
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return b"x" + call.arguments.encode("utf-8", "surrogatepass")
