"""Load reports correct the ledger; they do not replace it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.balancer.balancer import Balancer
from emberline.balancer.load_reports import MAX_FOREIGN_S, REJECT_S, SETTLE_S, implausible
from emberline.protocol.errors import Overloaded
from emberline.protocol.frames import EngineLoad
from tests.balancer.balancing import fleet, keys, request, send, serve


def busy(n: int, tokens: int, **more: int) -> EngineLoad:
    return EngineLoad(running=n, waiting_tokens=tokens, kv_used_blocks=1, kv_total_blocks=10_000, **more)


def wait_s(balancer, name: str, now_s: float) -> float:  # type: ignore[no-untyped-def]
    return next(worker.wait_s for worker in balancer.snapshot(now_s).workers if worker.name == name)


def test_own_requests_do_not_count_twice() -> None:
    balancer = fleet("both")
    send(balancer, request(tokens=20_000), 0.0)
    alone_s = wait_s(balancer, "e0", 0.0)
    balancer.fleet.report("e0", EngineLoad(), 0.01)  # it has not received the request yet
    assert wait_s(balancer, "e0", 0.01) == alone_s
    balancer.fleet.report("e0", busy(1, 20_000), 1.0)  # it has
    assert wait_s(balancer, "e0", 1.0) == alone_s


def test_the_work_of_other_cores_counts_and_decays() -> None:
    balancer = fleet("both", "both")
    balancer.fleet.report("e0", busy(2, 200_000), 0.0)
    there_s = wait_s(balancer, "e0", 0.0)
    assert there_s > 5
    assert wait_s(balancer, "e0", 2.0) == pytest.approx(there_s - 2)
    assert send(balancer, request(tokens=100), 0.0).decode == "e1"
    balancer.fleet.report("e0", busy(0, 0), 3.0)
    assert wait_s(balancer, "e0", 3.0) == 0


def test_reported_progress_on_the_first_prompt_counts_until_it_is_done() -> None:
    balancer = fleet("both", ahead_s=1e9)
    first, second = request(tokens=30_000), request(tokens=30_000)
    send(balancer, first, 0.0)
    send(balancer, second, 0.0)
    whole_s = wait_s(balancer, "e0", 0.0)
    balancer.fleet.report("e0", busy(2, 40_000), 1.0)
    assert wait_s(balancer, "e0", 1.0) == pytest.approx(whole_s * 2 / 3)
    before = balancer.fleet.workers["e0"].in_flight.work_us
    balancer.first_token(first.id, 2.0)
    worker = balancer.fleet.workers["e0"]
    assert worker.in_flight.work_us == before // 2
    assert worker.reports.done_tokens == 0


def test_a_report_reduces_no_more_than_the_first_prompt() -> None:
    balancer = fleet("both", ahead_s=1e9)
    for _ in range(4):
        send(balancer, request(tokens=10_000), 0.0)
    whole_s = wait_s(balancer, "e0", 0.0)
    balancer.fleet.report("e0", busy(4, 0), 1.0)  # nothing pending: not believed before the first tokens
    assert wait_s(balancer, "e0", 1.0) == pytest.approx(whole_s * 3 / 4)


def test_reports_of_no_work_are_rejected_while_prompts_are_pending() -> None:
    balancer = fleet("both", ahead_s=1e9)
    send(balancer, request(tokens=10_000), 0.0)
    whole_s = wait_s(balancer, "e0", 0.0)
    for tenth in range(1, 60):
        balancer.fleet.report("e0", EngineLoad(), tenth / 10)
    [worker] = balancer.snapshot(6.0).workers
    assert worker.rejected_reports > 0
    assert "no work" in worker.problem
    assert worker.wait_s == whole_s  # by the ledger alone


@pytest.mark.parametrize(
    "lie",
    [
        EngineLoad(running=-1),
        EngineLoad(running=1, waiting_tokens=-5),
        EngineLoad(running=1 << 40),
        EngineLoad(running=1, waiting_tokens=1 << 60),
        EngineLoad(waiting_tokens=100_000_000),
        EngineLoad(kv_used_blocks=5, kv_total_blocks=4),
        EngineLoad(utilisation=float("nan")),
        EngineLoad(utilisation=7.0),
        EngineLoad(steps=-3),
        EngineLoad(running=1, running_batch=2),
        EngineLoad(waiting=1, waiting_batch=2),
        EngineLoad(running_batch=-1),
        EngineLoad(problem="x" * 501),
    ],
)
def test_implausible_reports_are_rejected_and_counted(lie: EngineLoad) -> None:
    assert implausible(lie)
    balancer = fleet("both")
    send(balancer, request(tokens=1000), 0.0)
    before_s = wait_s(balancer, "e0", 0.0)
    balancer.fleet.report("e0", lie, 1.0)
    [worker] = balancer.snapshot(1.0).workers
    assert worker.rejected_reports == 1
    assert worker.problem
    assert worker.wait_s == before_s
    balancer.fleet.report("e0", busy(9, 500_000), 2.0)  # rejected for a while, plausible or not
    assert wait_s(balancer, "e0", 2.0) == before_s
    balancer.fleet.report("e0", busy(9, 500_000), 2.0 + REJECT_S)
    assert wait_s(balancer, "e0", 2.0 + REJECT_S) > before_s


def test_exaggerated_load_is_bounded_and_goes_stale() -> None:
    balancer = fleet("both", "both")
    balancer.fleet.report("e0", busy(1000, 10_000_000_000), 0.0)
    assert wait_s(balancer, "e0", 0.0) <= MAX_FOREIGN_S
    assert {serve(balancer, request(tokens=10), 1.0 + i).decode for i in range(20)} == {"e1"}
    assert {serve(balancer, request(tokens=10), 70.0 + i).decode for i in range(20)} == {"e0", "e1"}


def test_a_worker_that_reports_no_load_does_not_attract_all_requests() -> None:
    """One of two workers always reports no load: the ledger keeps the balance."""
    balancer = fleet("both", "both", ahead_s=1e9, max_running=64)
    sent = {"e0": 0, "e1": 0}
    for i in range(40):
        now_s = i / 10
        balancer.fleet.report("e0", EngineLoad(), now_s)
        account = balancer.fleet.workers["e1"].in_flight
        balancer.fleet.report("e1", busy(account.active, account.prefill_tokens), now_s)
        sent[send(balancer, request(keys((f"k{i}", 100))), now_s).decode] += 1
    assert 15 <= sent["e0"] <= 25


def test_prefill_for_another_worker_is_not_taken_for_foreign_work() -> None:
    balancer = fleet("prefill", "decode", ahead_s=1e9)
    assert send(balancer, request(tokens=20_000), 0.0).prefill == "e0"
    before_s = wait_s(balancer, "e0", 0.0)
    balancer.fleet.report("e0", busy(1, 20_000), 1.0)
    assert wait_s(balancer, "e0", 1.0) == before_s
    assert balancer.snapshot(1.0).workers[0].foreign_active == 0


def test_a_prefill_worker_that_is_done_may_report_no_work() -> None:
    """The prompt is pending until the decode worker's first token, which may be waiting for that worker's restart."""
    balancer = fleet("prefill", "decode")
    assert send(balancer, request(tokens=20_000), 0.0).prefill == "e0"
    for now_s in (3.0, 6.0, 9.0):
        balancer.fleet.report("e0", EngineLoad(), now_s)
    assert not next(worker.problem for worker in balancer.snapshot(9.0).workers if worker.name == "e0")


def foreign(balancer: Balancer, now_s: float) -> int:
    return balancer.snapshot(now_s).workers[0].foreign_active


@pytest.mark.parametrize("told", [True, False], ids=["told apart", "not told apart"])
def test_jobs_just_dispatched_are_not_taken_for_foreign_work(told: bool) -> None:
    """The engine may report jobs sooner than the settling time."""
    balancer = fleet("both", max_running=2)
    for i in range(3):
        balancer.dispatch_job(request(id=f"b{i}", engine="e0", priority="batch", tokens=32), 0.0)
    queued = {"running_batch": 2, "waiting_batch": 1} if told else {}
    balancer.fleet.report("e0", busy(2, 32, waiting=1, **queued), SETTLE_S / 2)
    assert foreign(balancer, SETTLE_S / 2) == 0
    assert send(balancer, request(tokens=32, priority="flex", reject_if_busy=True), SETTLE_S / 2).decode == "e0"


def test_jobs_of_other_cores_are_preemptible() -> None:
    balancer = fleet("both", max_running=2)
    balancer.fleet.report("e0", busy(2, 0, waiting=9, running_batch=2, waiting_batch=9), 0.0)
    assert foreign(balancer, 0.0) == 0
    assert send(balancer, request(tokens=32, priority="flex", reject_if_busy=True)).decode == "e0"
    balancer.fleet.report(
        "e0", busy(2, 0, waiting=9, waiting_batch=9), 1.0
    )  # ours, and a request of another core, which is not preemptible
    with pytest.raises(Overloaded):
        balancer.enqueue(request(tokens=32, priority="flex", reject_if_busy=True), 1.0)


def test_aborted_jobs_that_the_engine_still_reports_are_preemptible() -> None:
    balancer = fleet("both", max_running=2)
    for i in range(2):
        balancer.dispatch_job(request(id=f"b{i}", engine="e0", priority="batch", tokens=32), 0.0)
        balancer.ended(f"b{i}", 1.0, "cancelled")
    balancer.fleet.report("e0", busy(2, 0, running_batch=2), 1.0)
    assert send(balancer, request(tokens=32, priority="flex", reject_if_busy=True), 1.0).decode == "e0"


def test_a_request_with_a_first_token_is_not_taken_for_foreign_work() -> None:
    """Until then a report may have counted another core's in its place; the first token decides it."""
    balancer = fleet("both", max_running=2)
    balancer.fleet.report("e0", EngineLoad(), 0.0)
    ours = [request(tokens=32) for _ in range(2)]
    for one in ours:
        send(balancer, one, 1.0)
    balancer.fleet.report("e0", busy(2, 64), 1.0 + SETTLE_S / 2)
    assert foreign(balancer, 1.0 + SETTLE_S / 2) == 2
    for one in ours:
        balancer.first_token(one.id, 1.0 + SETTLE_S)
        balancer.ended(one.id, 1.0 + SETTLE_S, "finished", 1)
    assert foreign(balancer, 1.0 + SETTLE_S) == 0
    assert send(balancer, request(tokens=32, priority="flex", reject_if_busy=True), 1.0 + SETTLE_S).decode == "e0"


def test_foreign_requests_stay_counted_after_our_first_token() -> None:
    balancer = fleet("both", max_running=16)
    settled, fresh = request(tokens=32), request(tokens=32)
    send(balancer, settled, 0.0)
    send(balancer, fresh, 1.0)
    balancer.fleet.report("e0", busy(7, 64), 1.0 + SETTLE_S / 2)
    assert foreign(balancer, 1.0 + SETTLE_S / 2) == 6
    balancer.first_token(settled.id, 1.0 + SETTLE_S)
    assert foreign(balancer, 1.0 + SETTLE_S) == 6
    balancer.first_token(fresh.id, 1.0 + SETTLE_S)
    assert foreign(balancer, 1.0 + SETTLE_S) == 5


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 3))
def test_own_and_foreign_sequences_are_separated_exactly(
    ours: int, queued: int, theirs: int, their_queued: int, n_waiting: int
) -> None:
    """Once the engine has received all that we sent."""
    balancer = fleet("both", max_running=100, ahead_s=1e9)
    for _ in range(ours):
        send(balancer, request(tokens=8))
    for i in range(queued):
        balancer.dispatch_job(request(id=f"b{i}", engine="e0", priority="batch", tokens=8), 0.0)
    n_batch = queued + their_queued
    waiting = min(n_waiting, n_batch)
    running = ours + theirs + n_batch - waiting
    load = busy(running, 0, running_batch=n_batch - waiting, waiting=waiting, waiting_batch=waiting)
    balancer.fleet.report("e0", load, 1.0)
    assert foreign(balancer, 1.0) == theirs
