"""Rank 0's runner and its followers, with runners that compute nothing: what each rank is told, and what comes back."""

import contextlib
import queue
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from emberline.engine.core.plan import (
    BLOCKS,
    LAST_SAMPLED,
    NO_BLOCK,
    TOKEN,
    Admission,
    Columns,
    DeviceLost,
    Masks,
    Row,
    Sampled,
    StepPlan,
)
from emberline.engine.core.rank import Rank
from emberline.engine.ranks.messages import Launch, RankFailed, StepResult, encoder, step_messages, to_leader
from emberline.engine.ranks.plan_channel import ConnectionReader, PlanWriter
from emberline.engine.ranks.rank_group import Leader, Member
from emberline.engine.ranks.rank_runner import FollowerLoop, LeaderRunner, OrderReports, ReportedToken
from emberline.kernels.collectives import NoCollectives, ParallelGroups
from emberline.kv.notice_queue import NoticeQueue
from emberline.kv.transfer.connection import PeerConnection, PeerConnectionLost
from emberline.protocol.parallel_layout import Layout
from emberline.protocol.request import EngineRequest, SamplingParams
from emberline.protocol.token_ids import pack

GROUPS = ParallelGroups(NoCollectives(), NoCollectives(), NoCollectives())


@dataclass
class FakeStep:
    """Every row samples the number of its sequence."""

    plan: StepPlan
    masks: list[Masks | None]
    computed: threading.Event
    error: Exception | None = None
    sampled: list[Sampled] = field(default_factory=list)

    def sample(self, masks: Masks | None = None) -> None:
        self.masks.append(masks)
        self.sampled = [ReportedToken(row.number, -0.5, [(1, -0.1)]) for row in self.plan.rows]

    def result(self) -> Sequence[Sampled]:
        assert self.computed.wait(60.0)
        if self.error is not None:
            raise self.error
        return self.sampled

    def drafts(self) -> Sequence[bytes]:
        return ()


@dataclass
class FakeRunner:
    """Its device has computed what was launched, unless `computed` is cleared."""

    error: Exception | None = None
    plans: list[StepPlan] = field(default_factory=list)
    masks: list[Masks | None] = field(default_factory=list)
    launched: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    computed: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.computed.set()

    def launch(self, plan: StepPlan) -> FakeStep:
        self.plans.append(plan)
        self.launched.release()
        return FakeStep(plan, self.masks, self.computed, self.error)


def plan(number: int, *, masked: bool = False) -> StepPlan:
    request = EngineRequest(id="a", prompt_ids=bytes(8), sampling=SamplingParams(temperature=0.0))
    rows = [Row(7, 0, 0, bytes(8), [[1, 2]], [0], True), Row(9, 1, 40, bytes(4), None, [0], True)]
    return StepPlan([Admission(0, request, 2**63 + 1, b"", [[]])], rows, n_tokens=3, number=number, masked=masked)


def leading(runner: LeaderRunner) -> Rank:
    return Rank(runner, publish=runner.leader.publish_plan)


class Pair:
    """A leader and one follower in a thread, connected by a socket."""

    def __init__(self, layout: Layout, runner: FakeRunner, samples: bool) -> None:
        ours, theirs = map(PeerConnection, socket.socketpair())
        self.connection = ours
        self.leader = Leader(layout, GROUPS, [ours], PlanWriter(None, [ours]))
        member = Member(layout, 1, GROUPS, theirs, None)
        self._thread = threading.Thread(target=self._follow, args=(member, theirs, runner, samples), daemon=True)
        self._thread.start()

    @staticmethod
    def _follow(member: Member, connection: PeerConnection, runner: FakeRunner, samples: bool) -> None:
        with contextlib.suppress(RuntimeError):  # it is reported
            FollowerLoop(member, runner, samples, reports=member.layout.pp > 1).run(ConnectionReader(connection))

    def end(self) -> None:
        self.leader.close()
        self._thread.join(60.0)


def test_columns_of_a_plan_reach_followers_as_they_are() -> None:
    cells = np.arange(14, dtype=np.int32).reshape(7, 2)
    cells[TOKEN, 0] = LAST_SAMPLED
    cells[BLOCKS, 1] = NO_BLOCK
    sent = StepPlan([], [Row(3, 9, 8, bytes(8), [[1]], [0], False)], 4, columns=Columns(cells), before=[1])
    received = step_messages.decode(encoder.encode(Launch(sent))).plan
    assert received == sent
    assert [row.number for row in received.rows] == [0, 3, 1]
    assert received.rows[0] == Row(0, 4, 6, b"", [[10]], [12], True, (), 2, follows=True)
    assert received.rows[2] == Row(1, 5, 7, pack([9]), None, [13], True, (), 3)


def test_every_rank_gets_the_same_plans() -> None:
    follower = FakeRunner()
    pair = Pair(Layout(tp=2), follower, samples=False)
    own = FakeRunner()
    runner = leading(LeaderRunner(pair.leader, own))
    for number in range(3):
        step = runner.run(plan(number))
        step.sample()
        assert [each.token_id for each in step.result()] == [7, 9]
    pair.end()
    assert follower.plans == own.plans == [plan(0), plan(1), plan(2)]
    assert follower.masks == []  # rank 0 alone samples


def test_masks_reach_followers_that_sample() -> None:
    follower = FakeRunner()
    pair = Pair(Layout(tp=2), follower, samples=True)
    runner = leading(LeaderRunner(pair.leader, FakeRunner(), followers_sample=True))
    bits = np.arange(6, dtype=np.uint32).reshape(2, 3)
    for masked, masks in ((True, Masks([0, 1], bits)), (False, None), (True, None)):
        step = runner.run(plan(1, masked=masked))
        step.sample(masks)
        step.result()
    pair.end()
    first, *others = follower.masks
    assert first is not None
    assert first.rows == [0, 1]
    assert (first.bits == bits).all()
    assert others == [None, None]


def test_the_last_stage_tells_what_it_sampled() -> None:
    pair = Pair(Layout(pp=2), FakeRunner(), samples=True)
    runner = leading(LeaderRunner(pair.leader, FakeRunner(), pipelined=True, followers_sample=True))
    steps = [runner.run(plan(number)) for number in range(2)]
    for number, step in enumerate(steps):
        step.sample()
        result = pair.connection.receive(to_leader)
        assert isinstance(result, StepResult)
        assert result.number == number
        pair.leader._results.put(result)  # as the watching thread does
        assert step.result() == [ReportedToken(7, -0.5, [(1, -0.1)]), ReportedToken(9, -0.5, [(1, -0.1)])]
    pair.end()


def test_the_last_stage_launches_while_it_computes() -> None:
    last = FakeRunner()
    last.computed.clear()
    pair = Pair(Layout(pp=2), last, samples=True)
    runner = leading(LeaderRunner(pair.leader, FakeRunner(), pipelined=True, followers_sample=True))
    for number in range(3):
        runner.run(plan(number))
        assert last.launched.acquire(timeout=60.0), "it waits for a step before"
    last.computed.set()
    results = [pair.connection.receive(to_leader) for _ in range(3)]
    assert [each.number for each in results if isinstance(each, StepResult)] == [0, 1, 2]
    pair.end()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_last_stage_that_fails_says_so() -> None:
    pair = Pair(Layout(pp=2), FakeRunner(error=RuntimeError("out of memory")), samples=True)
    leading(LeaderRunner(pair.leader, FakeRunner(), pipelined=True, followers_sample=True)).run(plan(0))
    assert pair.connection.receive(to_leader) == RankFailed("RuntimeError: out of memory")
    pair.end()


def test_a_follower_that_fails_says_so() -> None:
    pair = Pair(Layout(tp=2), FakeRunner(error=RuntimeError("out of memory")), samples=False)
    leading(LeaderRunner(pair.leader, FakeRunner())).run(plan(0))
    assert pair.connection.receive(to_leader) == RankFailed("RuntimeError: out of memory")
    pair.end()


def test_a_step_that_fails_on_rank_0_ends_the_group() -> None:
    leader = Leader(Layout(), GROUPS, [], PlanWriter(None))
    step = leading(LeaderRunner(leader, FakeRunner(error=ValueError("bad")))).run(plan(0))
    step.sample()
    with pytest.raises(DeviceLost, match="bad"):
        step.result()


def test_rank_0_notices_that_a_follower_is_gone() -> None:
    ours, theirs = map(PeerConnection, socket.socketpair())
    leader = Leader(Layout(tp=2), GROUPS, [ours], PlanWriter(None, [ours]))
    theirs.close()
    with pytest.raises(DeviceLost, match="do not take plans"):
        leading(LeaderRunner(leader, FakeRunner())).run(plan(0))
    with pytest.raises(PeerConnectionLost):
        ours.receive(to_leader)


class Broken:
    """An executor whose reports fail, and the member that tells rank 0."""

    def __init__(self):
        self.queue, self.sent = NoticeQueue(), queue.SimpleQueue()
        self.send, self.close = self.sent.put, self.queue.close

    def reports(self):
        return {}["not there"]


def test_a_rank_that_cannot_report_any_more_ends_the_group(monkeypatch):
    """Else rank 0 would keep blocks for ever."""
    monkeypatch.setattr(threading, "excepthook", lambda failure: None)
    broken = Broken()
    reports = OrderReports(broken, {"tiers": broken})
    broken.queue.put("something")
    failed = broken.sent.get(timeout=60)
    assert isinstance(failed, RankFailed)
    assert "KeyError" in failed.message
    reports.close()
