"""Helpers of the queue tests: jobs, answers, a manual clock, and an audit of all counters."""

from collections import Counter
from pathlib import Path

from emberline.accounts.usage_row import UsageRow
from emberline.jobs.batches.batch import NewBatch
from emberline.jobs.batches.blobs import BlobStore
from emberline.jobs.limits import QueueLimits
from emberline.jobs.queue.job import Lease, NewJob
from emberline.protocol.complete_response import Answer, AnswerChoice, ReasoningPart, TextPart, ToolCallPart
from emberline.protocol.events import Usage
from emberline.protocol.request import GenerateRequest, Message, SamplingParams
from emberline.store import Database
from tests.faulty_queue import FaultyQueue

MODEL = "m"


class ManualClock:
    """Replaces a store's clock; it advances only when told to."""

    def __init__(self, store: Database) -> None:
        self.us = store.now_us()
        self.follow(store)

    def follow(self, store: Database) -> None:
        store.now_us = lambda: self.us  # type: ignore[method-assign]

    def advance(self, seconds: float) -> None:
        self.us += int(seconds * 1e6)


def make_queue(store: Database, folder: Path, **limits: object) -> FaultyQueue:
    """A queue without a background sweeper."""
    return FaultyQueue(store, BlobStore(folder / "blobs"), QueueLimits(**limits))  # type: ignore[arg-type]


def new_job(i: int, model: str = MODEL, text: str = "", prefix: int = 0) -> NewJob:
    request = GenerateRequest(
        id="", model=model, messages=(Message("user", text or f"question {i}"),), sampling=SamplingParams(max_tokens=8)
    )
    return NewJob(f"c{i}", request, prefix=prefix)


def new_jobs(n: int, model: str = MODEL) -> list[NewJob]:
    return [new_job(i, model) for i in range(n)]


def new_batch(account: str = "a", **fields: object) -> NewBatch:
    return NewBatch(account=account, **{"kind": "openai", "model": MODEL, **fields})  # type: ignore[arg-type]


def answer(text: str = "yes", n_in: int = 5, n_out: int = 7) -> Answer:
    parts = [ReasoningPart("hm"), TextPart(text), ToolCallPart("call_1", "f", "{}")]
    return Answer([AnswerChoice(parts)], Usage(prompt_tokens=n_in, completion_tokens=n_out))


def usage(lease: Lease) -> UsageRow:
    return UsageRow(
        id=lease.request_id,
        account=lease.account,
        model=lease.model,
        model_version="v",
        status="finished",
        input_tokens=5,
        output_tokens=7,
        created_us=1,
        finished_us=2,
    )


_JOBS = "SELECT batch_id, number, account, model, state, cost, owner FROM lines"
_COUNTED = {"succeeded": 0, "failed": 1, "dead": 1, "cancelled": 2, "expired": 3}


async def audit(store: Database) -> None:
    """Every counter matches the jobs in the store, and every ended job has exactly one result."""
    rows = await store.read(_JOBS)
    shown = {row[0]: row for row in await store.read("SELECT id, status, ended, total, n_released FROM batches")}
    await _audit_lanes(store, rows)
    ended: dict[object, list[int]] = {batch_id: [0, 0, 0, 0] for batch_id in shown}
    total = Counter(row[0] for row in rows)
    for batch_id, _, _, _, state, _, owner in rows:
        assert (state == "leased") == bool(owner)
        if state in _COUNTED:
            ended[batch_id][_COUNTED[str(state)]] += 1
    counts = await store.read("SELECT id, completed, failed, cancelled, expired FROM batches")
    for batch_id, *counted in counts:
        status, over = str(shown[batch_id][1]), shown[batch_id][2]
        assert ended[batch_id] == counted, (batch_id, status)
        assert total[batch_id] == shown[batch_id][3]
        if status == "in_progress":
            assert sum(ended[batch_id]) < total[batch_id]
        assert bool(over) == (status in ("completed", "failed", "expired", "cancelled"))
    results = await store.read("SELECT batch_id, number FROM bodies WHERE kind = 1")
    assert len(set(results)) == len(results)
    assert set(results) == {row[:2] for row in rows if row[4] in ("succeeded", "failed", "dead")}
    await _audit_bytes(store)


async def _audit_lanes(store: Database, rows: list[tuple]) -> None:  # type: ignore[type-arg]
    queued, leased, cost = Counter(), Counter(), Counter()  # type: ignore[var-annotated]
    for _, _, account, model, state, tokens, _ in rows:
        queued[model, account] += state == "queued"
        leased[model, account] += state == "leased"
        cost[model, account] += tokens if state == "queued" else 0
    for model, account, n_queued, n_leased, queued_cost in await store.read(
        "SELECT model, account, n_queued, n_leased, queued_cost FROM lanes"
    ):
        lane = (model, account)
        assert (n_queued, n_leased, queued_cost) == (queued.pop(lane, 0), leased.pop(lane, 0), cost[lane]), lane
    assert not +queued
    assert not +leased


async def _audit_bytes(store: Database) -> None:
    held = dict(await store.read("SELECT account, n_bytes FROM holdings WHERE n_bytes <> 0"))
    kept = await store.read(
        "SELECT account, SUM(n_bytes) FROM (SELECT account, n_bytes FROM batches WHERE ended < 2 "
        "UNION ALL SELECT account, n_bytes FROM files) AS kept GROUP BY account HAVING SUM(n_bytes) <> 0"
    )
    assert held == dict(kept)
