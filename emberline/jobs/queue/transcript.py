"""What a line has said so far, for those who watch it run: on disk before anybody is shown it.

A running attempt adds a part every moment. Whatever dies, the next attempt takes the parts up and goes on behind their
last token, so that nothing anybody has seen is ever taken back. Parts are bodies of the line, gone when it goes.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec

from emberline.jobs.queue.job import Lease
from emberline.protocol.errors import Unavailable
from emberline.protocol.events import (
    ChoiceDone,
    Completed,
    FinishReason,
    ReasoningDelta,
    Started,
    TextDelta,
    TextEvent,
    TokenDelta,
    TokenLogprobs,
    ToolCallDelta,
    ToolCallStarted,
)
from emberline.store import Database, Sql, Step, Work

Piece = TextDelta | ReasoningDelta | ToolCallStarted | ToolCallDelta | ChoiceDone
_KINDS: tuple[type[Piece], ...] = (TextDelta, ReasoningDelta, ToolCallStarted, ToolCallDelta, ChoiceDone)

_FIRST = 2  # kinds of bodies from here on are parts, in order
_HELD = "SELECT 1 FROM lines WHERE batch_id = ? AND number = ? AND epoch = ? AND owner = ? AND state = 'leased'"
# Whoever claims the line anew waits for us, and then finds this part too.
_HELD_BY_US = Sql(_HELD, postgres=f"{_HELD} FOR SHARE")
_ADD = """
    INSERT INTO bodies (batch_id, number, kind, data, blob) VALUES (?, ?, ?, ?, NULL)
    ON CONFLICT (batch_id, number, kind) DO UPDATE SET data = bodies.data RETURNING data
"""
_AFTER = f"SELECT data FROM bodies WHERE batch_id = ? AND number = ? AND kind >= {_FIRST} + ? ORDER BY kind"


class TranscriptPart(msgspec.Struct, array_like=True):
    """What some tokens said. The tokens are kept too: they are where another attempt goes on."""

    pieces: list[Piece] = []
    token_ids: bytes = b""  # u32 little-endian
    logprobs: list[TokenLogprobs] | None = None
    finish: FinishReason | None = None  # set: the engine was done with these


class _Stored(msgspec.Struct, array_like=True):
    pieces: list[tuple[int, msgspec.Raw]]  # each with its place among the kinds
    token_ids: bytes
    logprobs: list[TokenLogprobs] | None
    finish: FinishReason | None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Stored)
_piece_decoders = [msgspec.msgpack.Decoder(kind) for kind in _KINDS]


class Transcripts:
    def __init__(self, store: Database) -> None:
        self._store = store

    async def add(self, lease: Lease, place: int, part: TranscriptPart) -> bool:
        """The next part. False: the line is no longer the caller's, and nothing was written."""
        row = (*lease.key, _FIRST + place, _encode(part))

        def work() -> Work[bool]:
            if not (yield Step(_HELD_BY_US, (*lease.key, lease.epoch, lease.owner))):
                return False
            ((kept,),) = yield Step(_ADD, row)  # what was there before, where an answer of the store was lost
            return kept == row[-1]

        added = await self._store.run(work)
        await self._store.notify("batches", lease.batch_id)
        return added

    async def read(self, batch_id: str, number: int, after: int = 0) -> list[TranscriptPart]:
        """All parts but the first `after`."""
        rows = await self._store.read(_AFTER, (batch_id, number, after))
        return [_decode(data) for (data,) in rows if isinstance(data, bytes)]


def joined_tokens(parts: Sequence[TranscriptPart], request_id: str) -> TokenDelta | None:
    """All tokens of the parts, as if an engine had given them at once."""
    if not parts:
        return None
    logprobs = [entry for part in parts for entry in part.logprobs or ()]
    ids = b"".join(part.token_ids for part in parts)
    return TokenDelta(request_id, ids, parts[-1].finish, None, logprobs or None)


def _encode(part: TranscriptPart) -> bytes:
    told = [(_KINDS.index(type(piece)), piece) for piece in part.pieces]
    return _encoder.encode((told, part.token_ids, part.logprobs, part.finish))


def _decode(data: bytes) -> TranscriptPart:
    stored = _decoder.decode(data)
    pieces = [_piece_decoders[kind].decode(raw) for kind, raw in stored.pieces]
    return TranscriptPart(pieces, stored.token_ids, stored.logprobs, stored.finish)


EVERY_S = 0.1  # at most so often: a part costs a commit
_RETRY_S = 0.5  # of a store that does not answer

log = logging.getLogger("emberline.jobs")


class TranscriptWriter:
    """Owns the parts of one line while its lease lasts. What earlier attempts said is taken up first."""

    def __init__(self, transcripts: Transcripts, lease: Lease, on_lost: Callable[[], None]) -> None:
        self._transcripts = transcripts
        self._lease = lease
        self._on_lost = on_lost
        self._before: list[TranscriptPart] = []
        self._place = 0  # of the next part
        self._part = TranscriptPart([])  # what is not written yet
        self._stirred = asyncio.Event()
        self._ended = asyncio.Event()  # nothing follows
        self._patient = True  # what was said is to be written, however long the store takes

    async def open(self) -> TokenDelta | None:
        """The tokens that were drawn already; None: none were."""
        self._before = await self._transcripts.read(*self._lease.key)
        self._place = len(self._before)
        return joined_tokens(self._before, self._lease.request_id)

    def heard(self, delta: TokenDelta) -> None:
        """What the engine gave; its events come right behind it."""
        part = self._part
        part.token_ids += delta.token_ids
        part.finish = delta.finish
        if delta.logprobs is not None:
            part.logprobs = (part.logprobs or []) + delta.logprobs
        self._stirred.set()

    async def follow(self, events: AsyncGenerator[TextEvent, None]) -> AsyncGenerator[TextEvent, None]:
        """The events of all attempts, the last of them once all before it is on disk."""
        for part in self._before:
            for piece in part.pieces:
                yield piece
        writing = asyncio.create_task(self._write())
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    if isinstance(event, Completed):
                        self._end()
                        await asyncio.shield(writing)
                    elif not isinstance(event, Started):
                        self._part.pieces.append(event)
                    yield event
        finally:
            self._patient = False
            self._end()
            await writing

    def _end(self) -> None:
        self._ended.set()
        self._stirred.set()

    async def _write(self) -> None:
        """Runs only while the attempt waits for its engine, so a delta and its events are always in one part."""
        while not self._ended.is_set():
            await self._stirred.wait()
            self._stirred.clear()
            await self._flush()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    await self._ended.wait()
        await self._flush()

    async def _flush(self) -> None:
        part, self._part = self._part, TranscriptPart([])
        while part.token_ids or part.pieces:
            try:
                kept = await self._transcripts.add(self._lease, self._place, part)
            except Unavailable as error:
                if not self._patient:
                    return
                log.warning("the store does not take what is said: %s", error.message)
                await asyncio.sleep(_RETRY_S * random.uniform(0.5, 1.5))
                continue
            self._place += 1
            if not kept:
                self._on_lost()
            return
