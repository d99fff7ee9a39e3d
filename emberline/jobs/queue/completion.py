"""The outcome of leased jobs: they end or return to the queue, and all counters change in the same transaction."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence

import msgspec

from emberline.accounts.budget_leases import insert_rows
from emberline.jobs.batches.batch import Batch
from emberline.jobs.batches.files import add_stored_bytes
from emberline.jobs.limits import QueueLimits
from emberline.jobs.queue import sql
from emberline.jobs.queue.enqueue import RESULT, add_to_lanes
from emberline.jobs.queue.finalize import finalize_if_done
from emberline.jobs.queue.job import JobKey, JobOutcome, JobState
from emberline.jobs.webhooks.events import EVENTS_CHANNEL
from emberline.store import BulkQuery, Database, Query, Transaction

MINUTE_US = 60_000_000
CANCEL, EXPIRE = 1, 2  # the reason in lines.stopping
_MAX_GROUP = 256
_COUNTER_OF = {  # a batch's counter, by the state its job ended in
    "succeeded": "completed",
    "failed": "failed",
    "dead": "failed",
    "cancelled": "cancelled",
    "expired": "expired",
}


class StateChange(msgspec.Struct, frozen=True, kw_only=True):
    """A job's transition, as the counters need it."""

    batch_id: str
    account: str
    model: str
    before: str
    after: str
    cost: int
    outcome: JobOutcome | None = None
    took_us: int = 0  # since it was claimed


class OutcomeWriter:
    """Writes outcomes with group commit: those that arrive during a transaction share the next one."""

    def __init__(self, store: Database, limits: QueueLimits) -> None:
        self._store = store
        self._limits = limits
        self._waiting: list[tuple[JobOutcome, asyncio.Future[bool]]] = []
        self._task: asyncio.Task[None] | None = None

    async def write(self, outcome: JobOutcome) -> bool:
        """False: the job is no longer leased under the outcome's epoch, and nothing was written."""
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((outcome, done))
        if self._task is None:
            self._task = asyncio.create_task(self._drain())
        return await done

    async def close(self) -> None:
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _drain(self) -> None:
        try:
            while self._waiting:
                await self._write_group()
        finally:
            self._task = None

    async def _write_group(self) -> None:
        """A second outcome of the same job waits for the next group."""
        group: dict[JobKey, tuple[JobOutcome, asyncio.Future[bool]]] = {}
        later: list[tuple[JobOutcome, asyncio.Future[bool]]] = []
        for outcome, done in self._waiting:
            if outcome.key in group or len(group) >= _MAX_GROUP:
                later.append((outcome, done))
            else:
                group[outcome.key] = outcome, done
        self._waiting = later
        outcomes, now_us = [outcome for outcome, _ in group.values()], self._store.now_us()
        try:
            written = await self._store.run(lambda: apply_outcomes(outcomes, now_us, self._limits))
            for batch_id in {batch_id for batch_id, _ in written}:
                await self._store.notify("batches", batch_id)
            await self._store.notify(EVENTS_CHANNEL)
        except Exception as error:
            for _, done in group.values():
                if not done.done():
                    done.set_exception(error)
            return
        for key, (_, done) in group.items():
            if not done.done():
                done.set_result(key in written)


def apply_outcomes(outcomes: Sequence[JobOutcome], now_us: int, limits: QueueLimits) -> Transaction[set[JobKey]]:
    """Returns the jobs that were still leased as their outcomes say; the others are not changed."""
    by_key = {outcome.key: outcome for outcome in outcomes}
    updates = [
        (o.state, o.ready_us, o.attempts, o.kills, now_us, *o.key, o.epoch, o.owner)
        for o in sorted(by_key.values(), key=lambda outcome: outcome.key)
    ]
    rows = yield BulkQuery(sql.FINISH_JOB, updates)
    changes: list[StateChange] = []
    written: list[JobOutcome] = []
    for batch_id, number, state, model, account, cost, started_us in rows:
        outcome = by_key[str(batch_id), int(number or 0)]
        written.append(outcome)
        change = StateChange(
            batch_id=str(batch_id),
            account=str(account),
            model=str(model),
            before="leased",
            after=str(state),
            cost=int(cost or 0),
            outcome=outcome,
            took_us=max(0, now_us - int(started_us or now_us)),
        )
        changes.append(change)
    results = [(*o.key, RESULT, o.data, o.blob) for o in written if o.data is not None or o.blob is not None]
    if results:
        yield BulkQuery(sql.INSERT_BODY, results)
    yield from insert_rows([outcome.usage for outcome in written if outcome.usage is not None])
    yield from _update_counters(changes, now_us, limits)
    return {outcome.key for outcome in written}


def stop_jobs(
    batch: Batch, first: int, end: int, state: JobState, now_us: int, limits: QueueLimits
) -> Transaction[None]:
    """Cancel or expire jobs `first` up to `end`: waiting ones end at once, the workers of running ones are asked to.

    They are locked first, so that a concurrent release, claim or return of a job comes entirely before or after.
    """
    jobs = (batch.id, first, end)
    yield Query(sql.LOCK_OPEN_JOBS, jobs)
    changes: list[StateChange] = []
    for before in ("held", "queued"):
        for model, account, cost in (yield Query(sql.STOP_JOBS, (state, now_us, *jobs, before))):
            change = StateChange(
                batch_id=batch.id,
                account=str(account),
                model=str(model),
                before=before,
                after=state,
                cost=int(cost or 0),
            )
            changes.append(change)
    yield Query(sql.REQUEST_STOP, (CANCEL if state == "cancelled" else EXPIRE, *jobs))
    yield from _update_counters(changes, now_us, limits)


def replay_dead(batch: Batch, numbers: list[int], deadline_us: int) -> Transaction[int]:
    """Move dead letters back to the queue. An ended batch stays ended; its counts follow when the jobs end again."""
    replayed: list[tuple[str, int]] = []
    for number in numbers:
        for model, _, cost in (yield Query(sql.REPLAY_JOB, (deadline_us, batch.id, number))):
            replayed.append((str(model), int(cost or 0)))
            yield Query(sql.DELETE_RESULT, (batch.id, number))
    if replayed:
        yield from add_to_lanes(batch.account, replayed)
        yield Query(sql.COUNT_ENDED, (0, -len(replayed), *[0] * 7, batch.id))
    return len(replayed)


def _update_counters(changes: Sequence[StateChange], now_us: int, limits: QueueLimits) -> Transaction[None]:
    """Lanes, paces, batches, holdings: always in this order, so that transactions cannot deadlock."""
    yield from _update_lanes(changes)
    done, busy_us, stored = Counter[str](), Counter[str](), Counter[str]()
    for change in changes:
        if change.before == "leased" and change.after in ("succeeded", "failed"):
            done[change.model] += 1
            busy_us[change.model] += change.took_us
        if change.outcome is not None:
            stored[change.account] += change.outcome.n_bytes
    for model in sorted(done):
        yield Query(sql.COUNT_COMPLETIONS, (model, now_us // MINUTE_US, done[model], busy_us[model]))
    finished = yield from _update_batches(changes)
    for account in sorted(stored):
        if stored[account]:
            yield add_stored_bytes(account, stored[account])
    for _, batch_id in sorted(finished):
        yield from finalize_if_done(batch_id, now_us, limits)


def _update_lanes(changes: Sequence[StateChange]) -> Transaction[None]:
    """A job is charged its estimated cost when it is claimed, and the difference to the real one when it ends."""
    lanes: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for change in changes:
        lane = lanes[change.model, change.account]
        lane[change.before] -= 1
        lane[change.after] += 1
        if change.before == "queued":
            lane["cost"] -= change.cost
        if change.after == "queued":
            lane["cost"] += change.cost
        if change.outcome is not None:
            lane["served"] += change.outcome.input_tokens + change.outcome.output_tokens - change.cost
    for (model, account), lane in sorted(lanes.items()):
        delta = (lane["queued"], lane["leased"], lane["cost"], lane["served"])
        if any(delta):
            yield Query(sql.UPDATE_LANE, (*delta, model, account))


def _update_batches(changes: Sequence[StateChange]) -> Transaction[list[tuple[str, str]]]:
    """The batches of which no job is left, as (account, id)."""
    counted: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for change in changes:
        if change.after not in _COUNTER_OF:
            continue
        batch, outcome = counted[change.batch_id, change.account], change.outcome
        batch[_COUNTER_OF[change.after]] += 1
        if outcome is None:
            continue
        batch["bytes"] += outcome.n_bytes
        if change.after == "succeeded":
            batch["input"] += outcome.input_tokens
            batch["output"] += outcome.output_tokens
            batch["cached"] += outcome.cached_tokens
            batch["reasoning"] += outcome.reasoning_tokens
    finished: list[tuple[str, str]] = []
    for (batch_id, account), n in sorted(counted.items()):
        ended = (n["completed"], n["failed"], n["cancelled"], n["expired"], n["bytes"])
        tokens = (n["input"], n["output"], n["cached"], n["reasoning"])
        rows = yield Query(sql.COUNT_ENDED, (*ended, *tokens, batch_id))
        if rows and rows[0] == (0, 0):
            finished.append((account, batch_id))
    return finished
