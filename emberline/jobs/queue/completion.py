"""What becomes of leased lines: ended, or back in the queue; and every counter with them, in one transaction."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import msgspec

from emberline.accounts.usage_ledger import insert_usage
from emberline.jobs.batches.batch import Batch
from emberline.jobs.limits import QueueLimits
from emberline.jobs.queue import sql
from emberline.jobs.queue.batch_end import finish_if_done
from emberline.jobs.queue.enqueue import RESULT, enter_lanes
from emberline.jobs.queue.job import JobKey, JobOutcome, JobState
from emberline.store import Many, Step, Value, Work

MINUTE_US = 60_000_000
_COUNTED = {
    "succeeded": "completed",
    "failed": "failed",
    "dead": "failed",
    "cancelled": "cancelled",
    "expired": "expired",
}


class StateChange(msgspec.Struct, frozen=True):
    """A line's change, as the counters see it."""

    batch_id: str
    account: str
    model: str
    before: str
    after: str
    cost: int
    n_bytes: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    took_us: int = 0  # since it was claimed


def settle(outcomes: Sequence[JobOutcome], now_us: int, limits: QueueLimits) -> Work[dict[JobKey, str]]:
    """The lines that were still leased as their outcomes say, and the states they have now. The rest is untouched."""
    by_key = {outcome.key: outcome for outcome in outcomes}
    rows = yield Many(sql.SETTLE, [_settle_row(by_key[key], now_us) for key in sorted(by_key)])
    states: dict[JobKey, str] = {}
    changes: list[StateChange] = []
    for batch_id, number, state, model, account, cost, started_us in rows:
        key = (str(batch_id), int(number or 0))
        states[key] = str(state)
        took_us = max(0, now_us - int(started_us or now_us))
        changes.append(_change(by_key[key], str(state), str(model), str(account), int(cost or 0), took_us))
    yield from _write_results([by_key[key] for key in states])
    usage = [insert_usage(by_key[key].usage) for key in states if by_key[key].usage is not None]  # type: ignore[arg-type]
    if usage:
        yield Many(usage[0].sql, [step.params for step in usage])
    yield from count(changes, now_us, limits)
    return states


def _settle_row(outcome: JobOutcome, now_us: int) -> tuple[Value, ...]:
    changed = (outcome.state, outcome.ready_us, outcome.attempts, outcome.kills, now_us)
    return (*changed, *outcome.key, outcome.epoch, outcome.owner)


def _change(outcome: JobOutcome, state: str, model: str, account: str, cost: int, took_us: int) -> StateChange:
    return StateChange(
        outcome.key[0],
        account,
        model,
        "leased",
        state,
        cost,
        outcome.n_bytes,
        outcome.input_tokens,
        outcome.output_tokens,
        outcome.cached_tokens,
        outcome.reasoning_tokens,
        took_us,
    )


def _write_results(outcomes: Sequence[JobOutcome]) -> Work[None]:
    results = [(*o.key, RESULT, o.data, o.blob) for o in outcomes if o.data is not None or o.blob is not None]
    if results:
        yield Many(sql.INSERT_BODY, results)


def count(changes: Sequence[StateChange], now_us: int, limits: QueueLimits) -> Work[None]:
    """Lanes, paces, batches, holdings: always in this order, so that no two transactions wait for each other."""
    yield from _move_lanes(changes)
    done, busy_us = Counter[str](), Counter[str]()
    for change in changes:
        if change.before == "leased" and change.after in ("succeeded", "failed"):
            done[change.model] += 1
            busy_us[change.model] += change.took_us
    for model in sorted(done):
        yield Step(sql.PACE, (model, now_us // MINUTE_US, done[model], busy_us[model]))
    finished = yield from _count_batches(changes)
    held: Counter[str] = Counter()
    for change in changes:
        held[change.account] += change.n_bytes
    for account in sorted(held):
        if held[account]:
            yield Step(sql.HOLD, (account, held[account]))
    for _, batch_id in sorted(finished):
        yield from finish_if_done(batch_id, now_us, limits)


def _move_lanes(changes: Sequence[StateChange]) -> Work[None]:
    """A line is charged its guessed cost when it is claimed; when it ends, what it really took."""
    lanes: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for change in changes:
        lane = lanes[change.model, change.account]
        lane[change.before] -= 1
        lane[change.after] += 1
        if change.before == "queued":
            lane["cost"] -= change.cost
        if change.after == "queued":
            lane["cost"] += change.cost
        if change.before == "leased":
            lane["served"] += change.input_tokens + change.output_tokens - change.cost
    for (model, account), lane in sorted(lanes.items()):
        moved = (lane["queued"], lane["leased"], lane["cost"], lane["served"])
        if any(moved):
            yield Step(sql.MOVE_LANE, (*moved, model, account))


def _count_batches(changes: Sequence[StateChange]) -> Work[list[tuple[str, str]]]:
    """The batches of which no line is left, as (account, id)."""
    counted: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for change in changes:
        if change.after not in _COUNTED:
            continue
        batch = counted[change.batch_id, change.account]
        batch[_COUNTED[change.after]] += 1
        batch["bytes"] += change.n_bytes
        if change.after == "succeeded":
            batch["input"] += change.input_tokens
            batch["output"] += change.output_tokens
            batch["cached"] += change.cached_tokens
            batch["reasoning"] += change.reasoning_tokens
    finished: list[tuple[str, str]] = []
    for (batch_id, account), n in sorted(counted.items()):
        ends = (n["completed"], n["failed"], n["cancelled"], n["expired"], n["bytes"])
        used = (n["input"], n["output"], n["cached"], n["reasoning"])
        rows = yield Step(sql.COUNT, (*ends, *used, batch_id))
        if rows and rows[0] == (0, 0):
            finished.append((account, batch_id))
    return finished


CANCEL, EXPIRE = 1, 2  # why a running line is to stop


def stop(batch: Batch, first: int, end: int, state: JobState, now_us: int, limits: QueueLimits) -> Work[None]:
    """Lines `first` up to `end`: those that wait end at once, the workers of those that run hear it by heartbeat.

    They are locked first: a line that is released, claimed or given back this moment is met after that, as it is then.
    """
    some = (batch.id, first, end)
    yield Step(sql.LOCK_OPEN, some)
    changes: list[StateChange] = []
    for before in ("held", "queued"):
        for model, account, cost in (yield Step(sql.STOP_LINES, (state, now_us, *some, before))):
            changes.append(StateChange(batch.id, str(account), str(model), before, state, int(cost or 0)))
    yield Step(sql.MARK_STOPPING, (CANCEL if state == "cancelled" else EXPIRE, *some))
    yield from count(changes, now_us, limits)


def replay(batch: Batch, numbers: list[int], deadline_us: int) -> Work[int]:
    """Back to the queue. A batch that has ended stays ended; its counts follow when the lines end again."""
    revived: list[tuple[str, int]] = []
    for number in numbers:
        for model, _, cost in (yield Step(sql.REPLAY_LINE, (deadline_us, batch.id, number))):
            revived.append((str(model), int(cost or 0)))
            yield Step(sql.DROP_BODY, (batch.id, number))
    if revived:
        yield from enter_lanes(batch.account, revived)
        yield Step(sql.COUNT, (0, -len(revived), *[0] * 7, batch.id))
    return len(revived)
