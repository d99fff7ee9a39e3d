"""Random sequences of operations: no job is lost, none has two results, and every counter is exact."""

import asyncio
import tempfile
from collections.abc import Coroutine, Iterable
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from emberline.jobs.queue.job import Job, JobKey, Lease, NewJob
from emberline.jobs.queue.queue import Queue
from emberline.protocol.errors import ErrorInfo
from emberline.store import Database
from tests.databases import DatabaseLocation, drop_database, make_database
from tests.examples import n_examples
from tests.jobs.queue.helpers import MODEL, ManualClock, answer, audit, make_queue, new_batch, new_job, usage

T = TypeVar("T")
OWNERS = st.sampled_from(["w1", "w2", "w3"])
ACCOUNTS = st.sampled_from(["a", "b"])
LEASE_S = 60
FINAL = ("succeeded", "failed", "cancelled", "expired", "dead")


class QueueMachine(RuleBasedStateMachine):
    """Compares the queue with a model: the results that were visible, and all leases ever granted."""

    server: str | None = None  # of PostgreSQL; None: SQLite

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory()
        self.shown: dict[tuple[str, int], object] = {}  # results that a client has seen
        self.leases: list[Lease] = []  # every lease ever granted
        self.account_of: dict[str, str] = {}
        self.total: dict[str, int] = {}

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    @initialize()
    def begin(self) -> None:
        where = f"{self.folder.name}/t.db"
        if self.server is not None:
            where = self.do(make_database(self.server))
        self.place = DatabaseLocation("", where)
        self.store: Database = self.do(self.place.open())
        self.time = ManualClock(self.store)
        self.queue = self._queue()

    def _queue(self) -> Queue:
        return make_queue(self.store, Path(self.folder.name), lease_s=LEASE_S, max_attempts=3)

    # --- what may happen ---------------------------------------------------------------------------------------------

    @rule(account=ACCOUNTS, n=st.integers(1, 6), bad=st.booleans(), window_s=st.sampled_from([120.0, 4000.0, 86400.0]))
    def submit(self, account: str, n: int, bad: bool, window_s: float) -> None:
        new_jobs = [new_job(i) for i in range(n)]
        if bad:
            new_jobs[0] = NewJob("bad", None, ErrorInfo("bad_input", "bad"))
        batch = self.do(self.queue.submit(new_batch(account, window_s=window_s), new_jobs))
        self.account_of[batch.id] = account
        self.total[batch.id] = n

    @rule(owner=OWNERS, n=st.integers(1, 5), alone=st.booleans())
    def claim(self, owner: str, n: int, alone: bool) -> None:
        leases = self.do(self.queue.claim(owner, MODEL, n, quarantined=alone))
        assert len({lease.key for lease in leases}) == len(leases) <= n
        known = {(lease.key, lease.epoch) for lease in self.leases}
        assert not known & {(lease.key, lease.epoch) for lease in leases}  # an epoch is granted once
        self.leases += leases

    def pick(self, data: st.DataObject) -> Lease:
        return data.draw(st.sampled_from(self.leases))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), text=st.sampled_from(["x", "y"]))
    def complete(self, data: st.DataObject, text: str) -> None:
        lease = self.pick(data)
        took = self.do(self.queue.complete(lease, answer(text), usage(lease)))
        found = self.do(self.queue.job(*lease.key))
        if took:
            assert (found.state, found.answer, found.epoch) == ("succeeded", answer(text), lease.epoch)
            assert not self.do(self.queue.complete(lease, answer("twice")))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), retry=st.booleans(), killed=st.booleans())
    def fail(self, data: st.DataObject, retry: bool, killed: bool) -> None:
        self.do(self.queue.fail(self.pick(data), ErrorInfo("internal", "x"), retry=retry, killed=killed))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.do(self.queue.release([self.pick(data)]))

    @rule(owner=OWNERS)
    def heartbeat(self, owner: str) -> None:
        """With all leases the owner ever had: exactly those it no longer holds are reported lost."""
        mine = {lease.key: lease for lease in self.leases if lease.owner == owner}
        told = self.do(self.queue.heartbeat(owner, mine.values()))
        for (key, lease), found in zip(mine.items(), self.do(self._jobs(mine)), strict=True):
            leased = (found.state, found.epoch, found.owner) == ("leased", lease.epoch, owner)
            assert (key in told.lost) != leased
        for key in told.stopped:
            self.do(self.queue.finish_stopped(mine[key]))

    @rule(owner=OWNERS)
    def leave(self, owner: str) -> None:
        self.do(self.queue.deregister(owner))

    @precondition(lambda self: self.total)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        batch_id = data.draw(st.sampled_from(sorted(self.total)))
        self.do(self.queue.cancel(self.account_of[batch_id], batch_id))

    @precondition(lambda self: self.total)
    @rule(data=st.data())
    def cancel_line(self, data: st.DataObject) -> None:
        batch_id = data.draw(st.sampled_from(sorted(self.total)))
        self.do(self.queue.cancel_job(self.account_of[batch_id], batch_id, 0))

    @rule(seconds=st.sampled_from([1.0, 30.0, 61.0, 200.0, 5000.0]))
    def wait(self, seconds: float) -> None:
        self.time.advance(seconds)
        self.do(self.queue.sweep())

    @precondition(lambda self: self.total)
    @rule(data=st.data())
    def replay(self, data: st.DataObject) -> None:
        batch_id = data.draw(st.sampled_from(sorted(self.total)))
        dead = {item.key for item in self.do(self._lines(batch_id)) if item.state == "dead"}
        assert self.do(self.queue.replay(batch_id)) == len(dead)
        for key in dead:
            self.shown.pop(key, None)  # its error is no longer final

    @rule()
    def restart(self) -> None:
        self.do(self.queue.close())
        self.do(self.store.close())
        self.store = self.do(self.place.open())
        self.time.follow(self.store)
        self.queue = self._queue()

    async def _jobs(self, keys: Iterable[JobKey]) -> list[Job]:
        return await asyncio.gather(*(self.queue.job(*key) for key in keys))

    # --- what holds ---------------------------------------------------------------------------------------------------

    async def _lines(self, batch_id: str) -> list[Any]:
        found = await self.queue.jobs(batch_id)
        assert [item.number for item in found] == list(range(self.total[batch_id]))
        return [_Keyed(item) for item in found]

    async def _all_lines(self) -> list[Any]:
        """Lines of all batches. Reading them concurrently wakes the event loop once for many reads."""
        return list(chain(*await asyncio.gather(*map(self._lines, self.total))))

    @invariant()
    def check(self) -> None:
        if hasattr(self, "queue"):
            self.do(self._check())

    async def _check(self) -> None:
        batches = await self.store.read("SELECT id, account, total FROM batches")  # `_drain` asks the queue for each
        assert {id: (account, total) for id, account, total in batches} == {
            id: (account, self.total[id]) for id, account in self.account_of.items()
        }, "a batch is lost"
        for item in await self._all_lines():
            if item.state in FINAL:
                seen = (item.state, item.answer, item.error)
                assert self.shown.setdefault(item.key, seen) == seen, "a result changed"
        sources = ("events", "batches WHERE ended = 1", "usage", "lines WHERE state = 'succeeded'")
        counts = (self.store.read(f"SELECT COUNT(*) FROM {source}") for source in sources)
        _, *found = await asyncio.gather(audit(self.store), *counts)
        n_events, n_ended, n_usage, n_done = (count for ((count,),) in found)
        assert n_events == n_ended
        assert n_usage == n_done

    def teardown(self) -> None:
        try:
            if hasattr(self, "queue"):
                self._drain()
                self.check()
        finally:
            if hasattr(self, "store"):
                self.do(self.store.close())
            if self.server is not None and hasattr(self, "place"):
                self.do(drop_database(self.server, self.place.where))
            self.loop.close()
            self.folder.cleanup()

    def _drain(self) -> None:
        """Everything ends once workers succeed: nothing is stuck."""
        for _ in range(40):
            self.time.advance(61)
            self.do(self.queue.sweep())
            for alone in (False, True):
                for lease in self.do(self.queue.claim("last", MODEL, 50, quarantined=alone)):
                    assert self.do(self.queue.complete(lease, answer("end"), usage(lease)))
            states = {item.state for item in self.do(self._all_lines())}
            if states <= set(FINAL):
                break
        for batch_id, account in self.account_of.items():
            assert self.do(self.queue.batch(account, batch_id)).ended, "a batch never ends"


class _Keyed:
    def __init__(self, item: Any) -> None:
        self.key = (item.batch_id, item.number)
        self.state, self.answer, self.error = item.state, item.answer, item.error


def run(server: str | None, examples: int, steps: int) -> None:
    machine = type("Machine", (QueueMachine,), {"server": server})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=steps))


def test_on_sqlite() -> None:
    run(None, examples=n_examples(60), steps=40)


def test_on_postgres(postgres: str) -> None:
    run(postgres, examples=n_examples(20), steps=30)
