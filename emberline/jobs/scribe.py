"""Writes down what one attempt says, as it says it."""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncGenerator, Callable

from emberline.jobs.line import Lease
from emberline.jobs.transcript import Part, Transcripts, so_far
from emberline.protocol.errors import Unavailable
from emberline.protocol.events import Completed, Started, TextEvent, TokenDelta

EVERY_S = 0.1  # at most so often: a part costs a commit
_RETRY_S = 0.5  # of a store that does not answer

log = logging.getLogger("emberline.jobs")


class Scribe:
    """Owns the parts of one line while its lease lasts. What earlier attempts said is taken up first."""

    def __init__(self, transcripts: Transcripts, lease: Lease, on_lost: Callable[[], None]) -> None:
        self._transcripts = transcripts
        self._lease = lease
        self._on_lost = on_lost
        self._before: list[Part] = []
        self._place = 0  # of the next part
        self._part = Part([])  # what is not written yet
        self._stirred = asyncio.Event()
        self._ended = asyncio.Event()  # nothing follows
        self._patient = True  # what was said is to be written, however long the store takes

    async def open(self) -> TokenDelta | None:
        """The tokens that were drawn already; None: none were."""
        self._before = await self._transcripts.read(*self._lease.key)
        self._place = len(self._before)
        return so_far(self._before, self._lease.request_id)

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
        part, self._part = self._part, Part([])
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
