"""Runners of a rank group: rank 0's sends every plan to the followers and computes its own part; theirs follow it.

Where tokens are sampled: in a pipeline by the first rank of the last stage, which tells rank 0; without stages, on CPUs
by rank 0, and on GPUs by every rank alike, from the same logits and seeds, because its next step may begin with that
token before any host has seen it. In a pipeline that step is one of other sequences. Where a draft head or model runs,
all ranks of the last stage sample, to draft what follows their token.
"""

import contextlib
import select
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread

import numpy as np

from emberline.engine.core.plan import DeviceLost, Handle, Masks, RowScores, Runner, Sampled, StepPlan
from emberline.engine.core.rank import Executor, Rank
from emberline.engine.ranks.messages import (
    End,
    KVReport,
    Launch,
    Prepare,
    RankFailed,
    SampleStep,
    StepMessage,
    StepResult,
    orders_of,
)
from emberline.engine.ranks.plan_channel import PlanReader
from emberline.engine.ranks.rank_group import Leader, Member
from emberline.kv.transfer.connection import PeerConnectionLost

_CLOSE_S = 5.0  # for the thread that reports
_IDLE_S = 3600.0  # between two messages: the end of rank 0 is noticed by another thread


@dataclass(slots=True, frozen=True)
class ReportedToken:
    """A draw of the last stage."""

    token_id: int
    logprob: float | None
    top: list[tuple[int, float]]


class RankStep:
    """A step that all ranks compute."""

    def __init__(self, runner: "LeaderRunner", plan: StepPlan, own: Handle) -> None:
        self._runner, self._plan, self._own = runner, plan, own
        self._drafts: Sequence[bytes] = ()  # that the last stage has reported

    def sample(self, masks: Masks | None = None) -> None:
        runner = self._runner
        if self._plan.masked and runner.followers_sample:
            rows, bits = ([], b"") if masks is None else (masks.rows, masks.bits.tobytes())
            runner.leader.publish(SampleStep(rows, bits))
        if not runner.pipelined:
            self._own.sample(masks)

    def result(self) -> Sequence[Sampled]:
        """DeviceLost: this rank could not compute its part, and the others wait for it or have gone on without."""
        leader = self._runner.leader
        try:
            sampled = self._own.result()
        except Exception as error:
            leader.wait_for_reason()
            raise DeviceLost(f"rank 0 could not compute its part of a step: {error!r}") from error
        if self._runner.pipelined:
            result = leader.result(self._plan.number)
            sampled, self._drafts = [ReportedToken(*each) for each in result.sampled], result.drafts
        leader.step_ended()
        return sampled

    def drafts(self) -> Sequence[bytes]:
        return self._drafts if self._runner.pipelined else self._own.drafts()

    def scores(self) -> Sequence[RowScores]:
        return self._own.scores()


class LeaderRunner:
    """The runner of rank 0, over the one that computes its own part.

    pipelined: the last stage samples and reports; followers_sample: some follower needs the masks of grammars.
    """

    def __init__(self, leader: Leader, own: Runner, *, pipelined: bool = False, followers_sample: bool = False) -> None:
        self.leader, self._own = leader, own
        self.pipelined, self.followers_sample = pipelined, followers_sample

    def launch(self, plan: StepPlan) -> RankStep:
        """Launch rank 0's part of a plan that was published."""
        self.leader.step_began()
        return RankStep(self, plan, self._own.launch(plan))

    def idle_task(self, own: Callable[[], bool]) -> Callable[[], bool]:
        """The same for all ranks together."""

        def task() -> bool:
            self.leader.publish(Prepare())
            return own()

        return task


class StepReports:
    """A thread that tells rank 0 what was sampled as soon as it is: steps are launched meanwhile."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._launched: SimpleQueue[tuple[StepPlan, Handle] | None] = SimpleQueue()
        self._thread = Thread(target=self._report_all, name="step-reports", daemon=True)
        self._thread.start()

    def launched(self, plan: StepPlan, handle: Handle) -> None:
        self._launched.put((plan, handle))

    def close(self) -> None:
        """Once all that was launched is reported."""
        self._launched.put(None)
        self._thread.join()

    def _report_all(self) -> None:
        while (launched := self._launched.get()) is not None:
            plan, handle = launched
            try:
                drawn = [(each.token_id, each.logprob, each.top) for each in handle.result()]
                drafts = list(handle.drafts()) if plan.depth else []
            except Exception as error:  # which ends the group
                self._member.send(failure(error))
                raise
            self._member.send(StepResult(plan.number, drawn, drafts))


class OrderReports:
    """A thread that tells rank 0 what has become of its orders here."""

    def __init__(self, member: Member, executors: Mapping[str, Executor]) -> None:
        self._member, self._executors = member, executors
        self._stopped, self._stop = socket.socketpair()
        self._thread = Thread(target=self._report_all, name="order-reports", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, then the executors, which write what was saved."""
        self._stop.close()  # `_stopped` becomes readable
        self._thread.join(_CLOSE_S)
        for executor in self._executors.values():
            executor.close()

    def _report_all(self) -> None:
        with contextlib.suppress(OSError, ValueError, PeerConnectionLost):  # this process ends, or rank 0 has
            try:
                self._report_until_stopped()
            except (OSError, ValueError, PeerConnectionLost):
                raise
            except Exception as error:  # rank 0 would wait for what is not reported any more
                self._member.send(failure(error))
                raise

    def _report_until_stopped(self) -> None:
        queues = {executor.queue.wakeup: executor.queue for executor in self._executors.values()}
        while self._stopped not in (woken := select.select([self._stopped, *queues], [], [])[0]):
            for wakeup in woken:
                queues[wakeup].clear_wakeup()  # before what has come is taken: none is missed
            reports = {feature: executor.reports() for feature, executor in self._executors.items()}
            if any(reports.values()):
                self._member.send(KVReport(**reports))


@dataclass(slots=True)
class FollowerLoop:
    """A follower's life: compute what rank 0 plans, until it ends the group. A step that fails here ends it, too."""

    member: Member
    runner: Runner
    samples: bool  # this rank needs, or reports, what the step samples
    reports: bool = False  # rank 0 waits for what this rank samples
    steps_in_flight: int = 1
    prepare: Callable[[], bool] | None = None
    executors: Mapping[str, Executor] = field(default_factory=dict)  # by feature
    _in_flight: deque[tuple[StepPlan, Handle]] = field(default_factory=deque)
    _reports: StepReports | None = field(init=False, default=None)
    _rank: Rank = field(init=False)

    def __post_init__(self) -> None:
        self._rank = Rank(self.runner, self.executors)

    def run(self, plans: PlanReader | None = None) -> None:
        plans = plans or self.member.start()
        self._reports = StepReports(self.member) if self.reports else None
        of_orders = OrderReports(self.member, self.executors)
        try:
            while not isinstance(message := _next(plans), End):
                if isinstance(message, Prepare) and self.prepare is not None:
                    self.prepare()
                elif isinstance(message, Launch):
                    self._run(message.plan, plans)
            while self._in_flight:
                self._absorb_oldest()
            if self._reports is not None:
                self._reports.close()
            of_orders.close()
        except Exception as error:
            self.member.send(failure(error))
            raise

    def _run(self, plan: StepPlan, plans: PlanReader) -> None:
        if plan.orders:
            self._settle(plan.after)
            plan.orders = orders_of(plan)
        handle = self._rank.run(plan)
        if handle is None:
            return
        if self.samples:
            handle.sample(_masks(_next(plans)) if plan.masked else None)
        if self._reports is not None:
            self._reports.launched(plan, handle)
            return
        self._in_flight.append((plan, handle))
        while len(self._in_flight) >= self.steps_in_flight:
            self._absorb_oldest()

    def _settle(self, number: int) -> None:
        """Wait for the steps up to a number, which rank 0 has absorbed."""
        while self._in_flight and self._in_flight[0][0].number <= number:
            self._absorb_oldest()

    def _absorb_oldest(self) -> None:
        self._in_flight.popleft()[1].result()


def failure(error: Exception) -> RankFailed:
    return RankFailed(f"{type(error).__name__}: {error}")


def _next(plans: PlanReader) -> StepMessage:
    while (message := plans.read(_IDLE_S)) is None:
        pass
    return message


def _masks(message: StepMessage) -> Masks | None:
    assert isinstance(message, SampleStep), "masks follow the plan that needs them"
    if not message.rows:
        return None
    return Masks(message.rows, np.frombuffer(message.bits, np.uint32).reshape(len(message.rows), -1))
