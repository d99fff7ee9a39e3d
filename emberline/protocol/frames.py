"""Frames between a front door and an engine: a u32 little-endian length, then one msgpack message.

A connection begins with Hello and is answered by Welcome (or Refused, and closed). After that the client sends Submit
and Abort as it likes, and the engine sends one Step per step that concerns the client.
"""

import struct

import msgspec

from emberline.protocol.errors import ErrorInfo
from emberline.protocol.events import TokenDelta
from emberline.protocol.layout import KVGroup
from emberline.protocol.request import EngineRequest

VERSION = 2
MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine serves; sent once, in Welcome."""

    model: str
    fingerprint: str  # of the weights; roots the block hashes
    context_len: int  # most tokens of a sequence, prompt and reply together
    vocab_size: int
    eos_ids: tuple[int, ...]
    kv_groups: tuple[KVGroup, ...] = ()
    kv_tokens: int = 0  # capacity of the device pool
    device: str = "cpu"
    backend: str = ""
    max_running: int = 0
    role: str = "both"


class EngineLoad(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An engine's own account of its load; rides on every Step. Totals count from the engine's start."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0  # uncached prompt tokens not yet computed
    kv_used_blocks: int = 0  # referenced by running sequences, not merely cached
    kv_total_blocks: int = 0
    steps: int = 0
    prompt_tokens: int = 0  # total computed
    cached_tokens: int = 0  # total taken from the cache
    output_tokens: int = 0
    preemptions: int = 0
    waiting_batch: int = 0  # of `waiting`, those of the batch class
    utilisation: float | None = None  # of the accelerator, 0 to 1, where it is known


class Hello(msgspec.Struct, tag="hello"):
    token: str  # the secret to join
    version: int = VERSION


class Vocabulary(msgspec.Struct, tag="vocabulary"):
    """What the model's tokens stand for. Sent once per connection, before the first request that has a grammar."""

    tokens: list[bytes]  # by id; empty: never part of text (special tokens, holes)
    special: dict[int, str] = {}  # special tokens by id


class Submit(msgspec.Struct, tag="submit"):
    requests: list[EngineRequest]


class Abort(msgspec.Struct, tag="abort"):
    ids: list[str]


class Drain(msgspec.Struct, tag="drain"):
    """Take no new work; exit when what runs has finished, or after `limit_s`."""

    limit_s: float


class Welcome(msgspec.Struct, tag="welcome"):
    info: EngineInfo
    load: EngineLoad


class Refused(msgspec.Struct, tag="refused"):
    error: ErrorInfo


class Step(msgspec.Struct, tag="step"):
    deltas: list[TokenDelta]
    load: EngineLoad


ToEngine = Hello | Vocabulary | Submit | Abort | Drain
FromEngine = Welcome | Refused | Step

_encoder = msgspec.msgpack.Encoder()
to_engine_decoder = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder = msgspec.msgpack.Decoder(FromEngine)


class FrameTooLarge(ValueError):
    """A peer announced a frame beyond MAX_FRAME_BYTES; the connection is not to be trusted."""


def encode(message: msgspec.Struct) -> bytes:
    """One whole frame, length included."""
    payload = _encoder.encode(message)
    return _LENGTH.pack(len(payload)) + payload


class FrameBuffer:
    """Cuts a byte stream into frames. Feed it what the socket gives, take whole payloads out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        self._buffer += data
        frames: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= 4:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > MAX_FRAME_BYTES:
                raise FrameTooLarge(f"frame of {length} bytes, at most {MAX_FRAME_BYTES} allowed")
            if len(self._buffer) - start - 4 < length:
                break
            frames.append(bytes(self._buffer[start + 4 : start + 4 + length]))
            start += 4 + length
        if start:
            del self._buffer[:start]
        return frames
