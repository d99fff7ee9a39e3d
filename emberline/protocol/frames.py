"""Frames between processes: a u32 little-endian length, then one msgpack message; and those of an engine worker.

Whatever bytes arrive, `decode` and `FrameBuffer` raise FrameError and nothing else.

The client opens with Hello; the worker answers Welcome, or Refused and closes. Then the client sends Submit, Abort and
CalledTools at any time, and the worker sends one Step for each engine step that has output for this client. After
WatchKV it also sends KVEvents. A Hello with `peer` set comes from another worker and starts a KV transfer, which has
its own messages.

Both sides of a connection speak the version that Hello names: of two releases the older one's. A new version may add
messages, which are not sent to older ones, and fields with defaults, which older ones ignore. Nothing else changes.
"""

import hmac
import socket
import struct
from collections.abc import Iterator
from typing import Literal, TypeVar

import msgspec

from emberline.protocol.block_hash import KVGroup
from emberline.protocol.encoding import Task
from emberline.protocol.errors import ErrorInfo
from emberline.protocol.events import TokenDelta
from emberline.protocol.images import ImageProcessor
from emberline.protocol.parallel_layout import Layout
from emberline.protocol.request import EngineRequest, RankEndpoint

VERSION = 6
OLDEST_VERSION = 5  # that is still spoken: the previous release's
MAX_FRAME_BYTES = 256 << 20  # above images.MAX_PIXEL_BYTES
MAX_HELLO_BYTES = 4 << 10  # of the first frame, which is read before its sender is authenticated
LENGTH = struct.Struct("<I")


WorkerRole = Literal["prefill", "decode", "both"]


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Static facts about an engine; sent once, in Welcome."""

    model: str
    fingerprint: str  # of the weights; roots the block hashes
    context_len: int  # maximum tokens of a sequence, prompt and output together
    vocab_size: int
    eos_ids: tuple[int, ...]
    kv_groups: tuple[KVGroup, ...] = ()
    kv_tokens: int = 0  # capacity of the device pool
    device: str = "cpu"
    backend: str = ""
    max_running: int = 0
    role: WorkerRole = "both"
    transfers: tuple[str, ...] = ()  # KV transports it can receive over, best first
    heartbeat_s: float = 0.0  # between two heartbeats to clients that ask for them; 0: it sends none
    task: Task = "generate"
    layout: Layout = Layout()  # of its ranks
    ranks: tuple[RankEndpoint, ...] = ()  # where each receives KV, if there are several
    predicts: bool = False  # a predictor that a user brought along: it has neither tokens nor a KV cache
    images: ImageProcessor | None = None  # how the model wants images; None: it takes none


def predictor_info(model: str, digest: str, slots: int) -> EngineInfo:
    """Facts of a predictor's worker, which has neither tokens nor a KV cache."""
    return EngineInfo(
        model=model, fingerprint=digest, context_len=1, vocab_size=1, eos_ids=(), max_running=slots, predicts=True
    )


class TierStats(msgspec.Struct, omit_defaults=True):
    """One KV cache tier below the device pool. Totals count from its opening."""

    name: str  # "host", "disk", "pool"
    used_bytes: int = 0
    capacity_bytes: int = 0
    blocks: int = 0
    hits: int = 0  # blocks that were asked for and returned
    misses: int = 0  # blocks that were asked for and are absent or not verified
    read_bytes: int = 0
    written_bytes: int = 0
    dropped: int = 0  # blocks that were not written: full, failing, or too slow
    evicted: int = 0  # blocks
    read_rate: float = 0.0  # bytes per second, measured while reading; 0: unknown
    oldest_s: float = 0.0  # age of the block that was not used for longest
    state: str = "ok"  # or "degraded: why"
    extra: dict[str, float] = {}


class DraftStats(msgspec.Struct, frozen=True, array_like=True):
    """Draft tokens of one drafter, by their position in a draft, from 0. Totals count from the engine's start."""

    drafter: str
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]


class StepCost(msgspec.Struct, frozen=True, array_like=True):
    """Duration of a step by what it computes, as the engine has measured it: step + row·sequences that decode +
    context·their context + token·tokens of chunks + pair·Σ token × tokens before it."""

    step_s: float
    row_s: float
    context_s: float
    token_s: float
    pair_s: float
    n_steps: int = 0  # measured
    error: float = 0.0  # mean relative error of the last predictions

    def seconds(self, n_rows: float, context: float, n_tokens: float = 0.0, pairs: float = 0.0) -> float:
        """Expected duration of a step."""
        decode_s = self.step_s + self.row_s * n_rows + self.context_s * context
        return decode_s + self.token_s * n_tokens + self.pair_s * pairs


class DeviceUse(msgspec.Struct, frozen=True, array_like=True):
    """Memory and power of an engine's device, a second old at most. On a CPU the memory is the process's own."""

    memory_used_bytes: int = 0
    memory_bytes: int = 0  # in all
    power_w: float | None = None  # None: the device does not tell
    power_limit_w: float | None = None


MAX_PROBLEM_CHARS = 500


class EngineLoad(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The load report of an engine, part of every Step. Totals count from the engine's start."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0  # uncached prompt tokens not yet computed
    kv_used_blocks: int = 0  # referenced by running sequences, not merely cached
    kv_total_blocks: int = 0
    steps: int = 0
    prompt_tokens: int = 0  # total prefilled
    cached_tokens: int = 0  # total served from the prefix cache
    output_tokens: int = 0
    preemptions: int = 0
    waiting_batch: int = 0  # of `waiting`, those of priority BATCH
    running_batch: int = 0  # of `running`, those of priority BATCH: preempted for any other
    utilisation: float | None = None  # share of the last seconds in which the device computed; None: unknown
    prefill_rate: float = 0.0  # prompt tokens per second in prefill-heavy steps; 0: not measured yet
    awaiting: int = 0  # requests whose KV transfer is incomplete; not counted in `waiting`
    awaiting_tokens: int = 0  # of those transfers
    pushing: int = 0  # requests whose KV is sent to another worker; also counted in running or waiting
    blocks_pushed: int = 0  # total blocks sent
    blocks_received: int = 0  # total
    quarantined: int = 0  # blocks that an aborted transfer may still write to
    computed_tokens: int = 0  # total, of prompts and output: advances with every step, prefill chunks included
    draining: bool = False  # it finishes what it has, and refuses new requests
    fetching: int = 0  # requests whose KV is read from a tier; neither in `waiting` nor in `running`
    fetching_tokens: int = 0  # of those fetches
    tiers: tuple[TierStats, ...] = ()  # below the device pool, fastest first; a second old at most
    drafts: tuple[DraftStats, ...] = ()  # of speculative decoding
    jobs_utilisation: float = 0.0  # of `utilisation`, the share of steps that computed jobs alone
    busy_s: float = 0.0  # total in which the device computed
    step_cost: StepCost | None = None  # None: too few steps were measured
    device: DeviceUse | None = None  # None: unknown
    image_tiles_encoded: int = 0  # total of prompts
    image_tiles_reused: int = 0  # total whose rows or KV were cached
    problem: str = ""  # the latest failure of a predictor, if one of its last predictions failed


class Hello(msgspec.Struct, tag="hello"):
    token: str  # the join token, or a sender's ticket
    version: int = VERSION
    peer: str = ""  # name of the sending engine, when the connection is for KV transfer
    heartbeats: bool = False  # the client wants them


def transfer_ticket(join_token: str, sender: str) -> str:
    """With which the named engine may send KV to the one with this join token.

    The core derives it, so that no engine learns the join token of another: with that it could submit and drain.
    """
    return hmac.new(join_token.encode(), b"emberline.kv.sender\0" + sender.encode(), "sha256").hexdigest()


def transfer_ranks(prefill: EngineInfo | None, decode: EngineInfo | None) -> tuple[RankEndpoint, ...]:
    """Return where the decode worker's ranks receive KV, for `Push`. Empty if neither worker has several ranks."""
    if prefill is None or decode is None:
        return ()
    if decode.ranks or prefill.layout.n_ranks == 1:
        return decode.ranks
    return (RankEndpoint("", decode.kv_groups),)


def transfer_mismatch(prefill: EngineInfo | None, decode: EngineInfo | None) -> str:
    """Say why the prefill worker's KV is of no use to the decode worker: other KV groups, as of another drafter, or
    another data type. Empty if it is, however each is divided, or if one of the workers is not known yet."""
    if prefill is None or decode is None:
        return ""
    ours, theirs = (
        [f"{group.name} ({group.dtype}, keys by {group.keys})" for group in info.kv_groups]
        for info in (prefill, decode)
    )
    return "" if ours == theirs else f"KV of {', '.join(ours)} there, of {', '.join(theirs)} here"


class Vocabulary(msgspec.Struct, tag="vocabulary"):
    """The model's vocabulary. Sent once per connection, before the first request with a grammar."""

    tokens: list[bytes]  # text bytes by id; empty: never part of text (special tokens, unused ids)
    special: dict[int, str] = {}  # special tokens by id
    added: list[int] = []  # tokens that a tokenizer finds in text first, before it merges bytes


class Submit(msgspec.Struct, tag="submit"):
    requests: list[EngineRequest]


class Abort(msgspec.Struct, tag="abort"):
    ids: list[str]


class CalledTools(msgspec.Struct, tag="called_tools"):
    """The replies of these sequences, which have ended, were tool calls: their conversations will soon go on."""

    ids: list[str]


class Drain(msgspec.Struct, tag="drain"):
    """Accept no new requests; exit when the running ones have finished, or after `limit_s`."""

    limit_s: float
    restart: bool = False  # it is to be started again: the exit status says so. Since version 6


class CacheCommand(msgspec.Struct, tag="cache", omit_defaults=True):
    """An operation on cached KV that an operator asks for. Answered by one CacheResult with the same number.

    purge: forget the blocks of an account, of one of its sessions, or all. export: write an account's or a session's
    blocks into a new file. import: read blocks of the account from such a file.
    """

    number: int
    action: Literal["purge", "export", "import"]
    salt: bytes | None = None  # of the account; None: of all accounts
    session: bytes = b""  # digest (block_hash.session_digest); empty: of all sessions
    path: str = ""  # of the file, on the worker's machine


class SetRole(msgspec.Struct, tag="set_role"):
    """Serve another stage from now on. What runs goes on, and nothing is unloaded or forgotten. Since version 6."""

    role: WorkerRole


class WatchKV(msgspec.Struct, tag="watch_kv"):
    """Subscribe to KVEvents: a snapshot of the prefix cache, then its changes."""


class Welcome(msgspec.Struct, tag="welcome"):
    """The answer to Hello. Sent again when `info` has changed."""

    info: EngineInfo
    load: EngineLoad


class Refused(msgspec.Struct, tag="refused"):
    error: ErrorInfo


class Step(msgspec.Struct, tag="step"):
    deltas: list[TokenDelta]
    load: EngineLoad
    n_sent: int = -1  # output tokens in all deltas of this connection, these included; -1: an older worker's


class KVEvents(msgspec.Struct, tag="kv_events", omit_defaults=True):
    """Blocks added to and evicted from the prefix cache, or a tier below it, as concatenated content keys. The first of
    the prefix cache and of each tier is a snapshot; of the pool it is what the worker knows."""

    stored: bytes = b""
    removed: bytes = b""
    whole: bool = False  # a snapshot: `stored` replaces everything known before
    tier: str = ""  # "host", "disk" or "pool"; empty: the prefix cache on the device


class CacheResult(msgspec.Struct, tag="cache_result", omit_defaults=True):
    number: int
    blocks: dict[str, int] = {}  # by tier, "device" included
    error: ErrorInfo | None = None


class Heartbeat(msgspec.Struct, tag="heartbeat", omit_defaults=True):
    """Sent by a thread of its own, busy or not: without any, the process is stopped or the machine is cut off. A step
    that runs for long is told from one that hangs by `step_s`."""

    computed_tokens: int = 0  # as in EngineLoad
    in_step: bool = False  # a step is being computed
    preparing: bool = False  # kernels are compiled or captured ahead of requests
    n_prepared: int = 0  # parts of that which are done
    step_s: float = 0.0  # predicted duration of the step; 0: nothing like it was measured yet


ToEngine = Hello | Vocabulary | Submit | Abort | CalledTools | CacheCommand | Drain | SetRole | WatchKV
FromEngine = Welcome | Refused | Step | KVEvents | CacheResult | Heartbeat

_encoder = msgspec.msgpack.Encoder()
hello_decoder = msgspec.msgpack.Decoder(Hello)
to_engine_decoder = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder = msgspec.msgpack.Decoder(FromEngine)


T = TypeVar("T")


class FrameError(ValueError):
    """The other side violated the protocol, the text says how; the connection must be closed."""


def encode(message: msgspec.Struct) -> bytes:
    """One frame, length prefix included."""
    payload = _encoder.encode(message)
    return LENGTH.pack(len(payload)) + payload


def decode(decoder: msgspec.msgpack.Decoder[T], payload: bytes | bytearray) -> T:
    """One message. Malformed MessagePack, text that is not UTF-8 and deep nesting are all a FrameError."""
    try:
        return decoder.decode(payload)
    except Exception as error:  # a pure function of the bytes: whatever it raises is their fault
        raise FrameError(f"unreadable frame of {len(payload)} bytes: {error}") from None


_TCP_OPTIONS = {
    "TCP_NODELAY": 1,
    "TCP_KEEPIDLE": 4,  # seconds of silence before the first probe,
    "TCP_KEEPINTVL": 2,  # and before each of the others
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 10_000,  # milliseconds until sent data must be acknowledged
}


def detect_dead_peer(sock: socket.socket) -> None:
    """TCP keep-alive: a peer whose machine is cut off counts as gone after ten seconds, idle or not."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _TCP_OPTIONS.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class FrameBuffer:
    """Splits a byte stream into frames: feed it received bytes, it returns complete payloads.

    `max_bytes` of a payload may be changed between two of them: a server reads the first frame with a small limit.
    """

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    @property
    def has_partial_frame(self) -> bool:
        return bool(self._buffer)

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._buffer += data
        return self._payloads()

    def _payloads(self) -> Iterator[bytes]:
        while len(self._buffer) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._buffer)
            if length > self.max_bytes:
                raise FrameError(f"a frame of {length} bytes, at most {self.max_bytes} are accepted")
            end = LENGTH.size + length
            if len(self._buffer) < end:
                return
            payload = bytes(memoryview(self._buffer)[LENGTH.size : end])
            del self._buffer[:end]
            yield payload
