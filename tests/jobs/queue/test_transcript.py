"""The transcript of a streamed job: what a failed attempt leaves is where the next one resumes."""

import asyncio
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from emberline.jobs.limits import QueueLimits
from emberline.jobs.queue.job import Lease
from emberline.jobs.queue.transcript import TranscriptPart, TranscriptWriter
from emberline.protocol import token_ids as tokens
from emberline.protocol.errors import EngineLost, Unavailable
from emberline.protocol.events import ChoiceDone, Completed, TextDelta, TextEvent, TokenDelta, TokenLogprobs, Usage
from emberline.protocol.request import GenerateRequest
from emberline.store import SqliteStore
from tests.jobs.queue.helpers import MODEL, make_queue, new_batch, new_jobs

PATIENCE_S = 60.0
RETRY_S = 0.02


class FakeTranscripts:
    """Parts in memory. The first `n_outages` calls of `append` find the store unavailable."""

    def __init__(self, n_outages: int = 0) -> None:
        self.parts: list[TranscriptPart] = []
        self.called_s: list[float] = []
        self._n_outages = n_outages

    async def append(self, lease: Lease, index: int, part: TranscriptPart) -> bool:
        self.called_s.append(time.monotonic())
        if len(self.called_s) <= self._n_outages:
            raise Unavailable("the store is away")
        assert index == len(self.parts)
        self.parts.append(part)
        return True

    async def read(self, batch_id: str, number: int, after: int = 0) -> list[TranscriptPart]:
        return self.parts[after:]


class Attempt:
    """One attempt at a job. `with_ids`: on an engine of ours, which gives token ids with its events."""

    def __init__(self, transcripts: FakeTranscripts, with_ids: bool) -> None:
        request = GenerateRequest(id="r", model="m")
        key, counts = {"batch_id": "b", "number": 0, "epoch": 1}, {"attempts": 1, "kills": 0, "prefix": 0}
        names = {"owner": "o", "account": "a", "key_id": "", "kind": "response", "model": "m"}
        lease = Lease(request=request, deadline_us=1, **key, **names, **counts)  # type: ignore[arg-type]
        limits = QueueLimits(transcript_retry_s=RETRY_S)
        self._writer = TranscriptWriter(transcripts, lease, lambda: None, limits)  # type: ignore[arg-type]
        self._with_ids = with_ids

    async def run(self, words: list[str], error: Exception | None = None) -> str:
        """The text as its reader gets it. An engine resumes behind the tokens it is given, others begin anew."""
        resume_from = await self._writer.load()
        n_resumed = len(resume_from.token_ids) // 4 if resume_from is not None else 0
        text = ""
        async for event in self._writer.follow(self._events(words[n_resumed:], error)):
            text += event.text if isinstance(event, TextDelta) else ""
        return text

    async def _events(self, words: list[str], error: Exception | None) -> AsyncGenerator[TextEvent, None]:
        for word in words:
            if self._with_ids:
                self._writer.record(TokenDelta("r", tokens.pack([7]), logprobs=[TokenLogprobs(7, -0.5)]))
            yield TextDelta(0, word)
        if error is not None:
            raise error
        yield ChoiceDone(0, "stop")
        yield Completed(Usage())


@pytest.mark.parametrize("with_ids", [True, False])
async def test_text_of_a_failed_attempt_is_not_repeated(with_ids: bool) -> None:
    transcripts = FakeTranscripts()
    with pytest.raises(EngineLost):
        await Attempt(transcripts, with_ids).run(["a", "b"], EngineLost("w"))
    assert await Attempt(transcripts, with_ids).run(["a", "b", "c"]) == "abc"
    stored = [event for part in transcripts.parts for event in part.events]
    assert "".join(event.text for event in stored if isinstance(event, TextDelta)) == "abc"
    assert isinstance(stored[-1], ChoiceDone)


async def test_a_failed_attempt_on_an_engine_leaves_its_text() -> None:
    transcripts = FakeTranscripts()
    with pytest.raises(EngineLost):
        await Attempt(transcripts, with_ids=True).run(["a", "b"], EngineLost("w"))
    logprobs = [TokenLogprobs(7, -0.5)] * 2
    assert transcripts.parts == [TranscriptPart([TextDelta(0, "a"), TextDelta(0, "b")], tokens.pack([7, 7]), logprobs)]


async def test_an_outage_of_the_store_is_waited_out() -> None:
    """The writer pauses between two attempts to append a part."""
    transcripts = FakeTranscripts(n_outages=2)
    assert await Attempt(transcripts, with_ids=True).run(["a", "b"]) == "ab"
    first, *later = transcripts.called_s
    assert len(later) >= 2
    assert all(pause > RETRY_S / 2.1 for pause in (later[0] - first, later[1] - later[0]))


async def test_a_new_part_wakes_those_who_wait_for_it(tmp_path: Path) -> None:
    """Readers are notified of an appended part, without polling the store."""
    store = await SqliteStore.open(tmp_path / "store.db")
    queue = make_queue(store, tmp_path)
    batch = await queue.submit(new_batch(), new_jobs(1))
    (lease,) = await queue.claim("w", MODEL, 1)
    waiting = asyncio.create_task(queue.wait_for_change(batch.id, 10 * PATIENCE_S))
    for index in range(10):  # the first ones may come before it listens
        assert await queue.transcripts.append(lease, index, TranscriptPart([TextDelta(0, "a")]))
    await asyncio.wait_for(waiting, PATIENCE_S)
    await queue.close()
    await store.close()
