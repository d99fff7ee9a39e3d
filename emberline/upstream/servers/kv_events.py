"""KV events of upstream servers, translated into our block keys.

A server names blocks by its own hashes, which we never reproduce: stored blocks come with their token ids, from which
our chain of keys is computed; the server's hash only finds those keys again when the block is removed.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from emberline.protocol import token_ids as tokens
from emberline.protocol.block_hash import BLOCK_BYTES, DIGEST_BYTES, root, split
from emberline.protocol.frames import KVEvents

MAX_BLOCKS = 4 << 20  # of one server; beyond that its events are rejected
REPLAY_TIMEOUT_S = 5.0
END = (1 << 64) - 1  # -1 as 8 bytes: the replay is over
_HIGH_WATER_MARK = 100_000  # messages
_RETRY_S = 5.0
_DEVICE = (None, "GPU", "gpu")
_STORED_FIELDS = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
_REMOVED_FIELDS = ("type", "block_hashes", "medium")


log = logging.getLogger("emberline.balancer")


class BadKVEvents(Exception):
    """The message cannot be read; the text says why."""


class _Block(NamedTuple):
    chain: bytes  # our key of the last full block of 16 tokens up to its end
    rest: bytes  # token ids behind that, fewer than 16
    keys: bytes  # keys that this block added


def key_root(kind: str, model: str) -> bytes:
    """The root of a model's keys. It has no tenant salt: events do not say which tenant's tokens they are about."""
    return root(f"{kind}:{model}", b"")


def chain_keys(chain_root: bytes, token_ids: bytes) -> bytes:
    """The keys of a prompt's full blocks, concatenated."""
    return _extend(chain_root, token_ids)[0]


class KVEventDecoder:
    """Turns one server's messages into KVEvents; blocks whose parent is unknown are left out."""

    def __init__(self, chain_root: bytes) -> None:
        self._root = chain_root
        self._blocks: dict[Any, _Block] = {}  # by the server's hash
        self._n_holding: Counter[bytes] = Counter()  # our key → how many of the server's blocks hold it

    def __len__(self) -> int:
        return len(self._blocks)

    def decode(self, payload: bytes) -> KVEvents:
        stored: list[bytes] = []
        removed: list[bytes] = []
        whole = False
        for event in _events(payload):
            kind = event.get("type")
            if kind == "BlockStored":
                stored += self._store(event)
            elif kind == "BlockRemoved":
                removed += self._remove(event)
            elif kind == "AllBlocksCleared":
                self.reset()
                stored, removed, whole = [], [], True
        gone = {key for key in removed if not self._n_holding[key]}
        return KVEvents(
            stored=b"".join(key for key in stored if self._n_holding[key]),
            removed=b"".join(sorted(gone)),
            whole=whole,
        )

    def reset(self) -> None:
        self._blocks.clear()
        self._n_holding.clear()

    def _store(self, event: dict[str, Any]) -> list[bytes]:
        hashes, ids, size = event.get("block_hashes"), event.get("token_ids"), event.get("block_size")
        if not isinstance(hashes, list) or not isinstance(ids, list) or not isinstance(size, int) or size < 1:
            raise BadKVEvents("a BlockStored without block_hashes, token_ids or block_size")
        if event.get("lora_id") is not None or event.get("lora_name") or event.get("medium") not in _DEVICE:
            return []
        parent = event.get("parent_block_hash")
        if parent is None:
            above = _Block(self._root, b"", b"")
        elif (known := self._blocks.get(_name(parent))) is not None:
            above = known
        else:
            return []  # it was stored before we subscribed
        fresh: list[bytes] = []
        for number, block_hash in enumerate(hashes):
            above = self._add(_name(block_hash), above, ids[number * size : (number + 1) * size], fresh)
        if len(self._blocks) > MAX_BLOCKS:
            raise BadKVEvents(f"more than {MAX_BLOCKS} blocks stored and not removed")
        return fresh

    def _add(self, name: Any, above: _Block, ids: list[Any], fresh: list[bytes]) -> _Block:
        if (known := self._blocks.get(name)) is not None:
            return known
        try:
            packed = above.rest + tokens.pack(ids)
        except (TypeError, OverflowError):
            raise BadKVEvents("a BlockStored whose token_ids are no token ids") from None
        keys, chain, rest = _extend(above.chain, packed)
        block = self._blocks[name] = _Block(chain, rest, keys)
        for key in split(keys):
            self._n_holding[key] += 1
            if self._n_holding[key] == 1:
                fresh.append(key)
        return block

    def _remove(self, event: dict[str, Any]) -> list[bytes]:
        hashes = event.get("block_hashes")
        if not isinstance(hashes, list):
            raise BadKVEvents("a BlockRemoved without block_hashes")
        if event.get("medium") not in _DEVICE:
            return []
        lost: list[bytes] = []
        for block_hash in hashes:
            block = self._blocks.pop(_name(block_hash), None)
            for key in split(block.keys) if block is not None else ():
                self._n_holding[key] -= 1
                if not self._n_holding[key]:
                    del self._n_holding[key]
                    lost.append(key)
        return lost


def _events(payload: bytes) -> list[dict[str, Any]]:
    """The events of `[ts, [events], dp_rank?]`, each a map or an array that begins with its type."""
    try:
        batch = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadKVEvents(f"not msgpack: {error}") from None
    if isinstance(batch, dict):
        batch = [batch.get("ts"), batch.get("events")]
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise BadKVEvents("not of the form [time, [events]]")
    return [_event(event) for event in batch[1]]


def _event(event: Any) -> dict[str, Any]:
    if isinstance(event, dict):
        return event
    if not isinstance(event, list) or not event:
        raise BadKVEvents("an event that is neither a map nor an array")
    fields = _REMOVED_FIELDS if event[0] == "BlockRemoved" else _STORED_FIELDS
    return dict(zip(fields, event, strict=False))


def _name(block_hash: Any) -> Any:
    if isinstance(block_hash, int | bytes | str):
        return block_hash
    raise BadKVEvents("a block hash that is neither a number nor bytes")


def _extend(chain: bytes, packed: bytes) -> tuple[bytes, bytes, bytes]:
    """The keys that the token ids add, the last of the chain, and the ids that fill no block."""
    keys = bytearray()
    n_full = len(packed) // BLOCK_BYTES * BLOCK_BYTES
    for start in range(0, n_full, BLOCK_BYTES):
        chain = blake2b(packed[start : start + BLOCK_BYTES], key=chain, digest_size=DIGEST_BYTES).digest()
        keys += chain
    return bytes(keys), chain, packed[n_full:]


class KVSubscriber:
    """Follows one server's events; a gap is replayed where the server can, else all that is known is dropped."""

    def __init__(
        self, name: str, address: str, replay: str, chain_root: bytes, on_events: Callable[[KVEvents], None]
    ) -> None:
        self._name = name
        self._address = address
        self._replay = replay
        self._on_events = on_events
        self.decoder = KVEventDecoder(chain_root)
        self.problem = ""
        self.n_gaps = 0
        self._next: int | None = None  # the number that the next message should have

    async def run(self) -> None:
        """Follow the events until cancelled. Errors of the server are logged and followed by another attempt."""
        try:
            import zmq
            import zmq.asyncio
        except ImportError:
            self.problem = "KV events need pyzmq: pip install 'emberline[kv-events]'"
            log.error("endpoint %s: %s", self._name, self.problem)
            return
        context = zmq.asyncio.Context.instance()
        while True:
            socket = context.socket(zmq.SUB)
            socket.set(zmq.RCVHWM, _HIGH_WATER_MARK)
            socket.set(zmq.LINGER, 0)
            try:
                socket.connect(self._address)
                socket.subscribe(b"")
                while True:
                    await self._received(context, await socket.recv_multipart())
            except zmq.ZMQError as error:
                self._drop(f"KV events of {self._address}: {error}")
                await asyncio.sleep(_RETRY_S)
            finally:
                socket.close()

    async def _received(self, context: Any, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8:
            return self._drop("a KV event is not [topic, number, message]")
        number = int.from_bytes(frames[1], "big")
        expected = self._next
        if expected is not None and number != expected:
            self.n_gaps += 1
            if number < expected:
                self._drop(f"KV events restart at {number}: the server was restarted")
            elif not await self._replay_gap(context, expected, number):
                self._drop(f"KV events {expected} to {number - 1} are missing")
        self._next = number + 1
        self._absorb(frames[2])

    def _absorb(self, payload: bytes) -> None:
        try:
            events = self.decoder.decode(payload)
        except BadKVEvents as error:
            return self._drop(f"KV events: {error}")
        if events.stored:  # chains have roots again
            self.problem = ""
        if events.stored or events.removed or events.whole:
            self._on_events(events)

    async def _replay_gap(self, context: Any, first: int, end: int) -> bool:
        """Replay the events first..end-1. Returns True if all were replayed."""
        if not self._replay:
            return False
        try:
            async with asyncio.timeout(REPLAY_TIMEOUT_S):
                async with contextlib.aclosing(_replay(context, self._replay, first)) as messages:
                    async for number, payload in messages:
                        if number != first or number >= end:
                            break
                        self._absorb(payload)
                        first += 1
        except TimeoutError:
            log.warning("endpoint %s: no replay of KV events within %g s", self._name, REPLAY_TIMEOUT_S)
        return first == end

    def _drop(self, why: str) -> None:
        if why != self.problem:
            log.warning("endpoint %s: %s; its cache contents are unknown", self._name, why)
        self.problem = why
        self.decoder.reset()
        self._on_events(KVEvents(whole=True))


async def _replay(context: Any, address: str, first: int) -> AsyncGenerator[tuple[int, bytes], None]:
    import zmq

    socket = context.socket(zmq.DEALER)
    socket.set(zmq.LINGER, 0)
    try:
        socket.connect(address)
        await socket.send_multipart([b"", first.to_bytes(8, "big")])
        while True:
            frames = await socket.recv_multipart()
            number = int.from_bytes(frames[-2], "big") if len(frames) >= 2 else END
            if number == END:
                return
            yield number, frames[-1]
    finally:
        socket.close()
