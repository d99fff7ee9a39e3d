"""The transcript of a streamed job: an event log that is durable before clients see its events.

A running attempt appends a part about every `QueueLimits.transcript_s`. After a crash the next attempt loads the parts
and resumes after their last token, so nothing a client has seen is taken back. Parts are rows of `bodies`, deleted with
the job.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec

from emberline.jobs.limits import QueueLimits
from emberline.jobs.queue.job import Lease
from emberline.protocol.errors import Unavailable
from emberline.protocol.events import (
    ChoiceDone,
    Completed,
    FinishReason,
    Opaque,
    OutputIds,
    PromptEcho,
    ReasoningDelta,
    Started,
    TextDelta,
    TextEvent,
    TokenDelta,
    TokenLogprobs,
    ToolCallDelta,
    ToolCallStarted,
)
from emberline.store import Database, Query, Sql, Transaction

TranscriptEvent = TextDelta | ReasoningDelta | ToolCallStarted | ToolCallDelta | ChoiceDone | PromptEcho | OutputIds
# Stored by their index: append only.
_EVENT_TYPES: tuple[type[TranscriptEvent], ...] = (
    TextDelta,
    ReasoningDelta,
    ToolCallStarted,
    ToolCallDelta,
    ChoiceDone,
    PromptEcho,
    OutputIds,
)
_FIRST_KIND = 2  # bodies.kind of the first part
_LEASED = "SELECT 1 FROM lines WHERE batch_id = ? AND number = ? AND epoch = ? AND owner = ? AND state = 'leased'"
# The lock makes a new claim of the job wait, which then finds this part too.
_LOCK_LEASED = Sql(_LEASED, postgres=f"{_LEASED} FOR SHARE")
_APPEND = """
    INSERT INTO bodies (batch_id, number, kind, data, blob) VALUES (?, ?, ?, ?, NULL)
    ON CONFLICT (batch_id, number, kind) DO UPDATE SET data = bodies.data RETURNING data
"""
_PARTS = f"SELECT data FROM bodies WHERE batch_id = ? AND number = ? AND kind >= {_FIRST_KIND} + ? ORDER BY kind"

log = logging.getLogger("emberline.jobs")


class TranscriptPart(msgspec.Struct, array_like=True):
    """Some tokens and the events made from them. The tokens are where the next attempt resumes."""

    events: list[TranscriptEvent] = []
    token_ids: bytes = b""  # u32 little-endian
    logprobs: list[TokenLogprobs] | None = None
    finish: FinishReason | None = None  # set in the last part


class _StoredPart(msgspec.Struct, array_like=True):
    events: list[tuple[int, msgspec.Raw]]  # with the index in _EVENT_TYPES
    token_ids: bytes
    logprobs: list[TokenLogprobs] | None
    finish: FinishReason | None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_StoredPart)
_event_decoders = [msgspec.msgpack.Decoder(kind) for kind in _EVENT_TYPES]


class Transcripts:
    def __init__(self, store: Database) -> None:
        self._store = store

    async def append(self, lease: Lease, index: int, part: TranscriptPart) -> bool:
        """Write part number `index`. False: the lease was lost, and nothing was written."""
        row = (*lease.key, _FIRST_KIND + index, _encode(part))

        def work() -> Transaction[bool]:
            if not (yield Query(_LOCK_LEASED, (*lease.key, lease.epoch, lease.owner))):
                return False
            ((stored,),) = yield Query(_APPEND, row)  # already there if the store's reply was lost
            return stored == row[-1]

        appended = await self._store.run(work)
        await self._store.notify("batches", lease.batch_id)
        return appended

    async def read(self, batch_id: str, number: int, after: int = 0) -> list[TranscriptPart]:
        """All parts but the first `after`."""
        rows = await self._store.read(_PARTS, (batch_id, number, after))
        return [_decode(data) for (data,) in rows if isinstance(data, bytes)]


def joined_tokens(parts: Sequence[TranscriptPart], request_id: str) -> TokenDelta | None:
    """The tokens of all parts as one delta of an engine."""
    if not parts:
        return None
    logprobs = [entry for part in parts for entry in part.logprobs or ()]
    ids = b"".join(part.token_ids for part in parts)
    return TokenDelta(request_id, ids, parts[-1].finish, None, logprobs or None)


def _encode(part: TranscriptPart) -> bytes:
    events = [(_EVENT_TYPES.index(type(event)), event) for event in part.events]
    return _encoder.encode((events, part.token_ids, part.logprobs, part.finish))


def _decode(data: bytes) -> TranscriptPart:
    stored = _decoder.decode(data)
    events = [_event_decoders[kind].decode(raw) for kind, raw in stored.events]
    return TranscriptPart(events, stored.token_ids, stored.logprobs, stored.finish)


class TranscriptWriter:
    """Appends to the transcript of one job during one lease."""

    def __init__(
        self, transcripts: Transcripts, lease: Lease, on_lost: Callable[[], None], limits: QueueLimits
    ) -> None:
        self._limits = limits
        self._transcripts = transcripts
        self._lease = lease
        self._on_lost = on_lost  # called when the lease turns out to be lost
        self._earlier: list[TranscriptPart] = []  # of earlier attempts
        self._next_index = 0
        self._part = TranscriptPart([])  # not written yet
        self._changed = asyncio.Event()
        self._ended = asyncio.Event()  # nothing follows
        self._keep_retrying = True  # while the store is unavailable

    async def load(self) -> TokenDelta | None:
        """The tokens that earlier attempts generated: the resume offset."""
        self._earlier = await self._transcripts.read(*self._lease.key)
        self._next_index = len(self._earlier)
        return joined_tokens(self._earlier, self._lease.request_id)

    def record(self, delta: TokenDelta) -> None:
        """Called with a delta of the engine right before the events made from it reach `follow`."""
        part = self._part
        part.token_ids += delta.token_ids
        part.finish = delta.finish
        if delta.logprobs is not None:
            part.logprobs = (part.logprobs or []) + delta.logprobs
        self._changed.set()

    async def follow(self, events: AsyncGenerator[TextEvent, None]) -> AsyncGenerator[TextEvent, None]:
        """The events of all attempts; Completed is passed on once everything before it is durable.

        Events without token ids, which upstream servers do not give, are written at completion only: the next attempt
        could not resume behind them, and would repeat them.
        """
        for part in self._earlier:
            for earlier in part.events:
                yield earlier
        writing = asyncio.create_task(self._write())
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    if isinstance(event, Completed):
                        self._end()
                        await asyncio.shield(writing)
                    elif not isinstance(event, Started | Opaque):
                        self._part.events.append(event)
                    yield event
        finally:
            self._keep_retrying = False
            if not self._part.token_ids and self._part.finish is None:
                self._part.events.clear()
            self._end()
            await writing

    def _end(self) -> None:
        self._ended.set()
        self._changed.set()

    async def _write(self) -> None:
        """Runs only while the attempt awaits its engine, so a delta and its events are always in one part."""
        while not self._ended.is_set():
            await self._changed.wait()
            self._changed.clear()
            await self._flush()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.transcript_s):
                    await self._ended.wait()
        await self._flush()

    async def _flush(self) -> None:
        part, self._part = self._part, TranscriptPart([])
        while part.token_ids or part.events:
            try:
                appended = await self._transcripts.append(self._lease, self._next_index, part)
            except Unavailable as error:
                if not self._keep_retrying:
                    return
                log.warning("a part of a transcript was not written: %s", error.message)
                await asyncio.sleep(self._limits.transcript_retry_s * random.uniform(0.5, 1.5))
                continue
            self._next_index += 1
            if not appended:
                self._on_lost()
            return
