"""Frames between a front door and an engine: a u32 little-endian length, then one msgpack message.

A connection begins with Hello and is answered by Welcome (or Refused, and closed). After that the client sends Submit
and Abort as it likes, and the engine sends one Step per step that concerns the client. Who asked with WatchKV is also
told what the engine's cache gains and loses. An engine that names itself in its Hello comes to push KV: what follows on
that connection is the transfer's business.
"""

import struct
from typing import Literal

import msgspec

from emberline.protocol.block_hash import KVGroup
from emberline.protocol.errors import ErrorInfo
from emberline.protocol.events import TokenDelta
from emberline.protocol.request import EngineRequest

VERSION = 3
MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")


WorkerRole = Literal["prefill", "decode", "both"]


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
    role: WorkerRole = "both"
    transfers: tuple[str, ...] = ()  # ways in which others may push KV to it, best first


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
    running_batch: int = 0  # of `running`, the same: they make room for all others
    utilisation: float | None = None  # of the accelerator, 0 to 1, where it is known
    prefill_rate: float = 0.0  # prompt tokens a second in steps that had enough of them; 0: not measured yet
    awaiting: int = 0  # requests whose KV comes from elsewhere and is not all there; not among `waiting`
    awaiting_tokens: int = 0  # that are to come so
    pushing: int = 0  # requests whose KV goes elsewhere; while computed they run or wait, too
    blocks_pushed: int = 0  # total
    blocks_received: int = 0
    quarantined: int = 0  # blocks that a writer who was told to stop may still write


class Hello(msgspec.Struct, tag="hello"):
    token: str  # the secret to join
    version: int = VERSION
    peer: str = ""  # another engine's name: it comes to push KV


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


class WatchKV(msgspec.Struct, tag="watch_kv"):
    """Tell this connection what the cache holds, and from then on what it gains and loses."""


class Welcome(msgspec.Struct, tag="welcome"):
    info: EngineInfo
    load: EngineLoad


class Refused(msgspec.Struct, tag="refused"):
    error: ErrorInfo


class Step(msgspec.Struct, tag="step"):
    deltas: list[TokenDelta]
    load: EngineLoad


class KVEvents(msgspec.Struct, tag="kv_events", omit_defaults=True):
    """What the prefix cache gained and lost, content keys end to end. In order; the first of a connection is whole."""

    stored: bytes = b""
    removed: bytes = b""
    whole: bool = False  # `stored` is all there is: forget what was known before


ToEngine = Hello | Vocabulary | Submit | Abort | Drain | WatchKV
FromEngine = Welcome | Refused | Step | KVEvents

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

    @property
    def has_rest(self) -> bool:
        """Bytes of a frame that is not whole yet."""
        return bool(self._buffer)

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
