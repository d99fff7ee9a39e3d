"""Background responses streamed while they are generated, by any process, through crashes of engine and core."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from emberline.api.batch_loader import BatchService
from emberline.api.openai.responses.output import ResponseBuilder
from emberline.api.openai.responses.request import ResponsesRequest
from emberline.jobs.queue.attempt import JobAttempt, StopReason
from emberline.jobs.queue.job import Lease
from emberline.jobs.queue.transcript import TranscriptPart
from emberline.protocol import token_ids as tokens
from emberline.protocol.errors import BadInput, EmberlineError, EngineLost, Unavailable
from emberline.protocol.events import Completed, Started, TokenDelta
from emberline.protocol.request import Principal, SamplingDefaults
from emberline.service.work import TaskEvents, Work
from tests.api.batch_fixtures import open_batch_service
from tests.api.fake_service import AGENT, AGENT_USAGE, MODEL, FakeService, Wire, app_of, client_of
from tests.api.openai.responses.test_background import ASK, events_in, made, streamed
from tests.databases import DatabaseLocation, mostly_sqlite, on_both_databases
from tests.jobs.queue.fakes import FakeAdmission, FakeGrant

database = mostly_sqlite

PATIENCE_S = 60.0


class Speaker(FakeService):
    """Generates one event of the agent's reply per token, each when the test allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.may_say = asyncio.Semaphore(0)
        self.began_at: list[int] = []  # the first token of every attempt
        self.begun = asyncio.Event()  # there was one
        self.dies = asyncio.Event()
        self.fault: EmberlineError = EngineLost("engine e went away")  # how it dies

    async def run(self, work: Work) -> TaskEvents:
        request, job = work.task, work.job
        assert job is not None
        assert job.on_delta is not None
        said = tokens.unpack(job.resume_from.token_ids) if job.resume_from is not None else []
        assert said == list(range(len(said)))
        self.began_at.append(len(said))
        self.begun.set()
        yield Started(AGENT_USAGE)
        for token in range(len(said), len(AGENT)):
            await self._wait()
            last = token == len(AGENT) - 1
            job.on_delta(TokenDelta(request.id, tokens.pack([token]), "stop" if last else None))
            yield AGENT[token]
        yield Completed(AGENT_USAGE)

    async def _wait(self) -> None:
        waits = [asyncio.create_task(self.may_say.acquire()), asyncio.create_task(self.dies.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self.dies.is_set():
            raise self.fault

    def say(self, n: int) -> None:
        for _ in range(n):
            self.may_say.release()


@pytest.fixture
def speaker() -> Speaker:
    return Speaker()


@pytest.fixture
async def processes(database: DatabaseLocation, speaker: Speaker, tmp_path: Path) -> AsyncIterator[list[BatchService]]:
    """Two batch services, each with its own connection to one store."""
    async with AsyncExitStack() as stack:
        services = []
        for _ in range(2):
            store = await database.open()
            stack.push_async_callback(store.close)
            services.append(await stack.enter_async_context(open_batch_service(store, speaker, tmp_path, **QUICK)))
        yield services


QUICK: dict[str, Any] = {"backoff_s": (0.0, 0.0), "transcript_s": 0.0, "transcript_retry_s": 0.01}


async def claimed(batches: BatchService, owner: str = "w") -> Lease:
    async with asyncio.timeout(PATIENCE_S):
        while not (found := await batches.queue.claim(owner, MODEL, 1)):
            await asyncio.sleep(0.01)
    return found[0]


def attempt_of(batches: BatchService, lease: Lease) -> JobAttempt:
    return JobAttempt(batches.queue, lease, FakeGrant(FakeAdmission()), lambda what, model: None)


async def ran(batches: BatchService, speaker: Speaker, owner: str = "w") -> None:
    await attempt_of(batches, await claimed(batches, owner)).run(speaker, Principal("local"))


async def watched(speaker: Speaker, batches: BatchService, response_id: str, until: int, after: int = -1) -> list[Any]:
    """Events up to sequence number `until`; then the client disconnects."""
    query = f"stream=true&starting_after={after}" if after >= 0 else "stream=true"
    wire = Wire(app_of(speaker, batches=batches), f"/v1/responses/{response_id}", b"", method="GET")
    wire.scope["query_string"] = query.encode()
    async with asyncio.timeout(PATIENCE_S):
        while not (events := events_in(wire.body.decode())) or events[-1]["sequence_number"] < until:
            await asyncio.sleep(0.005)
    wire.leave()
    await asyncio.wait([wire.task])
    return [event for event in events if event["sequence_number"] <= until]


@on_both_databases
async def test_output_is_streamed_at_once_by_every_process(processes: list[BatchService], speaker: Speaker) -> None:
    """Both processes stream the same events; a client that resumes at any number gets each once."""
    here, there = processes
    async with client_of(speaker, batches=here) as client:
        response = await made(client, tools=[{"type": "function", "name": "weather"}])
        running = asyncio.create_task(ran(here, speaker))
        n_told = 3  # created, queued, in progress
        seen: list[Any] = []
        for n_said in range(1, len(AGENT)):
            speaker.say(1)
            n_told = await _until_told(here, response["id"], n_said)
            new = await watched(speaker, processes[n_said % 2], response["id"], n_told - 1, len(seen) - 1)
            assert [event["sequence_number"] for event in new] == list(range(len(seen), n_told))
            seen += new
        assert (await client.get(f"/v1/responses/{response['id']}")).json()["status"] == "in_progress"
        speaker.say(1)
        await asyncio.wait_for(running, PATIENCE_S)
        whole = await streamed(client, response["id"])
        assert whole[: len(seen)] == seen
        assert whole[-1]["response"] == (await client.get(f"/v1/responses/{response['id']}")).json()
        deltas = [event for event in whole if event["type"] == "response.output_text.delta"]
        assert [event["delta"] for event in deltas] == ["Let me ", "look."]
    async with client_of(speaker, batches=there) as client:
        for after in range(len(whole)):
            assert await streamed(client, response["id"], starting_after=after) == whole[after + 1 :]


async def _until_told(batches: BatchService, response_id: str, n_said: int) -> int:
    """The number of events once `n_said` tokens are in the transcript."""
    body = ResponsesRequest(model="m")
    builder = ResponseBuilder(body, body.parse_tools(), "resp_k", 0, SamplingDefaults())
    async with asyncio.timeout(PATIENCE_S):
        while sum(len(part.token_ids) // 4 for part in await batches.queue.transcripts.read(response_id, 0)) < n_said:
            await asyncio.sleep(0.005)
    return 3 + sum(len(builder.add(piece)) for piece in AGENT[:n_said])


@pytest.mark.parametrize("death", ["engine", "core"])
@pytest.mark.parametrize("n_said", [0, 1, 4, len(AGENT) - 1, len(AGENT)])
async def test_another_attempt_resumes_after_the_last_token(
    processes: list[BatchService], speaker: Speaker, death: str, n_said: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = processes
    if death == "engine" and n_said == len(AGENT):
        pytest.skip("then it was done")
    async with client_of(speaker, batches=there) as client:
        response = await made(client)
        attempt = attempt_of(here, await claimed(here))
        if death == "core":  # it writes nothing any more
            monkeypatch.setattr(attempt, "_write_outcome", lambda task: asyncio.sleep(0))
        running = asyncio.create_task(attempt.run(speaker, Principal("local")))
        async with asyncio.timeout(PATIENCE_S):
            await speaker.begun.wait()
        speaker.say(n_said)
        n_told = await _until_told(here, response["id"], n_said)
        seen = await watched(speaker, there, response["id"], n_told - 1)
        if death == "engine":
            speaker.dies.set()
        else:
            attempt.stop(StopReason.LOST)
        await asyncio.wait_for(running, PATIENCE_S)
        speaker.dies.clear()
        if death == "core":
            await there.queue.reclaim_from("w")
        speaker.say(len(AGENT) - n_said)
        await asyncio.wait_for(ran(there, speaker, "v"), PATIENCE_S)
        assert speaker.began_at == [0, n_said]
        whole = await streamed(client, response["id"])
        assert whole[: len(seen)] == seen
        assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
        final = whole[-1]["response"]
        assert final["status"] == "completed"
        kinds = ["reasoning", "message", "function_call", "function_call"]
        assert [item["type"] for item in final["output"]] == kinds
        assert [event["item"] for event in whole if event["type"] == "response.output_item.done"] == final["output"]


@on_both_databases
async def test_an_attempt_without_its_lease_writes_nothing(processes: list[BatchService], speaker: Speaker) -> None:
    here, there = processes
    async with client_of(speaker, batches=here) as client:
        response = await made(client)
        lease = await claimed(here)
        said = here.queue.transcripts
        assert await said.append(lease, 0, TranscriptPart([AGENT[0]], tokens.pack([0])))
        assert await said.append(lease, 0, TranscriptPart([AGENT[0]], tokens.pack([0]))), (
            "an answer that was lost is asked for again"
        )
        assert not await said.append(lease, 0, TranscriptPart([AGENT[1]], tokens.pack([1])))
        await here.queue.reclaim_from("w")
        newer = await claimed(there, "v")
        assert newer.epoch > lease.epoch
        assert not await said.append(lease, 1, TranscriptPart([AGENT[1]], tokens.pack([1])))
        assert await there.queue.transcripts.append(newer, 1, TranscriptPart([AGENT[1]], tokens.pack([1])))
        parts = await said.read(response["id"], 0)
        assert [part.events for part in parts] == [[AGENT[0]], [AGENT[1]]]
        assert [part.events for part in await said.read(response["id"], 0, after=1)] == [[AGENT[1]]]


async def test_a_lost_attempt_stops(processes: list[BatchService], speaker: Speaker) -> None:
    here, there = processes
    async with client_of(speaker, batches=here) as client:
        response = await made(client)
        running = asyncio.create_task(ran(here, speaker))
        speaker.say(1)
        await _until_told(here, response["id"], 1)
        await there.queue.reclaim_from("w")
        speaker.say(1)
        await asyncio.wait_for(running, PATIENCE_S)
        assert (await here.queue.job(response["id"], 0)).state == "queued"


@on_both_databases
async def test_a_cancelled_response_keeps_its_output(processes: list[BatchService], speaker: Speaker) -> None:
    here, _ = processes
    async with client_of(speaker, batches=here) as client:
        response = await made(client)
        lease = await claimed(here)
        attempt = attempt_of(here, lease)
        running = asyncio.create_task(attempt.run(speaker, Principal("local")))
        speaker.say(3)
        n_told = await _until_told(here, response["id"], 3)
        seen = await watched(speaker, here, response["id"], n_told - 1)
        stopped = (await client.post(f"/v1/responses/{response['id']}/cancel")).json()
        assert stopped["status"] == "cancelled"
        told = await here.queue.heartbeat("w", [lease])
        assert told.stopped == {lease.key}
        attempt.stop(StopReason.CANCELLED)
        await asyncio.wait_for(running, PATIENCE_S)
        whole = await streamed(client, response["id"])
        assert whole[: len(seen)] == seen
        final = whole[-1]["response"]
        assert whole[-1]["type"] == "response.cancelled"
        assert [item["status"] for item in final["output"]] == ["completed", "incomplete"]
        assert final["output"][1]["content"][0]["text"] == "Let me "
        assert (await client.get(f"/v1/responses/{response['id']}")).json() == final


async def test_a_failed_response_keeps_its_output(processes: list[BatchService], speaker: Speaker) -> None:
    """The items that were begun end as incomplete before the failure is told."""
    here, _ = processes
    async with client_of(speaker, batches=here) as client:
        response = await made(client)
        attempt = attempt_of(here, await claimed(here))
        running = asyncio.create_task(attempt.run(speaker, Principal("local")))
        speaker.say(3)
        await _until_told(here, response["id"], 3)
        speaker.fault = BadInput("the grammar has come to a dead end")
        speaker.dies.set()
        await asyncio.wait_for(running, PATIENCE_S)
        whole = await streamed(client, response["id"])
        assert [event["type"] for event in whole[-2:]] == ["response.output_item.done", "response.failed"]
        assert [event["item"]["status"] for event in whole if event["type"] == "response.output_item.done"] == [
            "completed",
            "incomplete",
        ]
        assert whole[-1]["response"]["error"]["message"] == "the grammar has come to a dead end"


async def test_store_outage(processes: list[BatchService], speaker: Speaker, monkeypatch: pytest.MonkeyPatch) -> None:
    here, _ = processes
    add, n_calls = here.queue.transcripts.append, 0

    async def sometimes(lease: Lease, place: int, part: TranscriptPart) -> bool:
        nonlocal n_calls
        n_calls += 1
        if n_calls in (2, 3):
            raise Unavailable("gone")
        return await add(lease, place, part)

    monkeypatch.setattr(here.queue.transcripts, "append", sometimes)
    async with client_of(speaker, batches=here) as client:
        response = await made(client)
        running = asyncio.create_task(ran(here, speaker))
        for n_said in range(1, len(AGENT) + 1):
            speaker.say(1)
            await _until_told(here, response["id"], n_said)
        await asyncio.wait_for(running, PATIENCE_S)
        assert n_calls > 4
        final = (await client.get(f"/v1/responses/{response['id']}")).json()
        assert (await streamed(client, response["id"]))[-1]["response"] == final
        assert len(await here.queue.transcripts.read(response["id"], 0)) >= len(AGENT) - 2


async def test_a_stopping_http_process_ends_its_streams(processes: list[BatchService], speaker: Speaker) -> None:
    here, there = processes
    wire = Wire(app_of(speaker, batches=here), "/v1/responses", json.dumps(ASK | {"stream": True}).encode())
    await wire.until_sent(b"response.queued")
    here.closing.set()
    await asyncio.wait_for(wire.task, PATIENCE_S)
    first = events_in(wire.body.decode())
    speaker.say(len(AGENT))
    await ran(there, speaker)
    async with client_of(speaker, batches=there) as client:
        rest = await streamed(client, first[0]["response"]["id"], starting_after=first[-1]["sequence_number"])
    assert [event["sequence_number"] for event in first + rest] == list(range(len(first) + len(rest)))
    assert rest[-1]["type"] == "response.completed"
