import msgspec
from hypothesis import given
from hypothesis import strategies as st

from emberline.balancer.balancer import Balancer
from emberline.balancer.endpoint import Capacity
from emberline.balancer.grants import QUIET_S, Grants
from emberline.balancer.worker import Worker
from emberline.protocol.frames import EngineLoad
from tests.balancer.balancing import MODEL, endpoint, request


class Bench:
    """Workers that take a step every `step_s` of a clock that the test turns; requests go to e0."""

    def __init__(self, n: int = 1, max_running: int = 32, share: float = 0.5) -> None:
        self.now_s = 100.0
        self.balancer = Balancer()
        self.capacity = Capacity(max_running=max_running)
        for i in range(n):
            self.balancer.fleet.join(endpoint(f"e{i}"), self.capacity, self.now_s)
        self.workers: list[Worker] = self.balancer.fleet.workers_of(MODEL)
        self.grants = Grants(self.balancer.fleet, share, lambda: self.now_s)
        self.requests: list[str] = []

    def report(self, load: EngineLoad, worker: int = 0) -> None:
        self.balancer.fleet.report(f"e{worker}", load, self.now_s)

    def run(self, seconds: float, step_s: float = 0.02, most: int = 0) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 0.25
            for i, worker in enumerate(self.workers):
                steps = worker.load.steps + round(0.25 / step_s)
                self.report(msgspec.structs.replace(worker.load, steps=steps), i)
            for grant in self.grants.issue(MODEL, most):
                grant.release()

    def start(self, n: int = 1) -> None:
        """Requests that run on e0, however full it is."""
        e0 = self.workers[0]
        for worker in self.workers:
            worker.capacity = Capacity(max_running=1000)
            worker.drained = worker is not e0
        self.balancer.fleet.pool_of(MODEL).refresh()
        for _ in range(n):
            wanted = request(tokens=1)
            self.balancer.enqueue(wanted, self.now_s)
            self.balancer.dispatch(self.now_s)
            self.balancer.first_token(wanted.id, self.now_s)
            self.requests.append(wanted.id)
        for worker in self.workers:
            worker.capacity = self.capacity
            worker.drained = False
        self.balancer.fleet.pool_of(MODEL).refresh()
        assert e0.in_flight.active == len(self.requests)

    def end(self, n: int = 1) -> None:
        for _ in range(n):
            self.balancer.ended(self.requests.pop(), self.now_s, "finished")

    def free(self) -> int:
        grants = self.grants.issue("m", 1000)
        for grant in grants:
            grant.release()
        return len(grants)


def test_without_requests_jobs_fill_the_worker_and_a_little_more() -> None:
    bench = Bench(max_running=32)
    assert bench.free() == 32 + 4
    held = bench.grants.issue("m", 10)
    assert len(held) == 10
    assert bench.free() == 26


def test_jobs_keep_their_share_beside_requests() -> None:
    bench = Bench(max_running=32, share=0.25)
    bench.start()
    assert bench.free() == 8
    bench.start(28)
    assert bench.free() == 3  # the sequences that are free
    bench.end(29)
    bench.run(QUIET_S / 2)
    assert bench.free() == 8  # not quiet for long enough yet
    bench.run(QUIET_S)
    assert bench.free() == 36


def test_a_minimum_is_always_granted() -> None:
    bench = Bench(max_running=32)
    bench.start(132)
    bench.report(EngineLoad(waiting=50))
    assert bench.free() == 2
    held = bench.grants.issue("m", 10)
    assert bench.free() == 0
    held[0].release()
    assert bench.free() == 1


def test_only_the_minimum_is_granted_while_requests_wait_in_the_engine() -> None:
    bench = Bench(max_running=32)
    bench.report(EngineLoad(running=10, waiting=3, waiting_batch=3))
    assert bench.free() > 2  # only jobs wait there
    bench.report(EngineLoad(running=10, waiting=3, waiting_batch=2))
    assert bench.free() == 2


def test_jobs_of_other_cores_are_not_taken_for_requests() -> None:
    bench = Bench(max_running=32)
    bench.report(EngineLoad(running=20, running_batch=20))
    assert bench.free() == 36 - 20  # no request to protect, but less room
    bench.run(QUIET_S)
    assert bench.free() == 36 - 20
    bench.report(EngineLoad(running=32, running_batch=32, waiting=16, waiting_batch=16))
    assert bench.free() == 2  # the minimum: the queue is shared, so none of its jobs starves
    bench.report(EngineLoad(running=21, running_batch=20))  # one request of another core
    assert bench.free() == 2  # they have the whole share of jobs


def test_a_worker_that_does_not_report_jobs_runs_ours() -> None:
    bench = Bench(max_running=32)
    held = bench.grants.issue("m", 20)
    for n in range(20):
        bench.balancer.dispatch_job(request(id=f"b{n}", engine="e0", priority="batch"), bench.now_s)
    bench.report(EngineLoad(running=20))
    assert bench.free() == 16
    assert len(held) == 20


def test_a_full_kv_cache_gets_no_more_jobs() -> None:
    bench = Bench(max_running=32)
    held = bench.grants.issue("m", 20)
    bench.report(EngineLoad(kv_used_blocks=95, kv_total_blocks=100))
    assert bench.free() == 0
    bench.report(EngineLoad(kv_used_blocks=50, kv_total_blocks=100))
    assert bench.free() == 16
    assert len(held) == 20


def test_slow_steps_lower_the_cap_and_fast_ones_raise_it() -> None:
    bench = Bench(max_running=32)
    bench.start()
    held = bench.grants.issue("m", 4)
    assert bench.free() == 12
    bench.run(5, step_s=0.1)
    assert bench.free() == 0
    bench.run(15, step_s=0.01)
    assert bench.free() == 12
    assert len(held) == 4


def test_slow_first_tokens_lower_the_cap() -> None:
    bench = Bench(max_running=32)
    bench.start()
    for _ in range(10):
        bench.grants.observe_ttft("e0", 0.1, mixed=False)
        bench.grants.observe_ttft("e0", 0.3, mixed=True)
    bench.grants.issue("m", 2)
    bench.run(5)
    assert bench.free() == 0
    for _ in range(30):
        bench.grants.observe_ttft("e0", 0.12, mixed=True)
    bench.run(15)
    assert bench.free() == 14


def test_jobs_get_what_requests_leave_of_the_devices_time() -> None:
    bench = Bench(max_running=32)
    bench.start()
    assert bench.free() == 16
    bench.report(EngineLoad(running=1, utilisation=0.25))
    assert bench.free() == 24  # requests leave three quarters of the time
    bench.report(EngineLoad(running=1, utilisation=0.95, jobs_utilisation=0.7))
    assert bench.free() == 24  # what jobs take is no reason to run fewer
    bench.report(EngineLoad(running=1, utilisation=1.0))
    assert bench.free() == 16  # requests have a part in every step: the share, and no less


def test_slow_steps_lower_the_cap_however_idle_the_device_is() -> None:
    bench = Bench(max_running=32)
    bench.start()
    bench.grants.issue("m", 4)
    bench.report(EngineLoad(running=1, utilisation=0.1))
    bench.run(5, step_s=0.1)
    assert bench.free() == 0


def test_a_lost_worker_gets_no_jobs() -> None:
    bench = Bench(n=2, max_running=8)
    assert bench.free() == 18
    bench.balancer.fleet.disconnected("e0", bench.now_s)
    assert {grant.engine for grant in bench.grants.issue("m", 100)} == {"e1"}


def test_queued_jobs_and_granted_room_are_told_to_whoever_loads_models() -> None:
    bench = Bench()
    bench.grants.queued({"m": 5.0, "other": 0.0})
    bench.now_s += 2.0
    assert (bench.grants.oldest_job_s("m"), bench.grants.oldest_job_s("other")) == (7.0, 2.0)
    assert bench.grants.oldest_job_s("third") is None
    bench.grants.queued({})
    assert bench.grants.oldest_job_s("m") is None
    (grant,) = bench.grants.issue("m", 1)
    assert (bench.grants.granted_on("e0"), bench.grants.granted_on("e9")) == (1, 0)
    grant.release()
    assert bench.grants.granted_on("e0") == 0


def test_a_worker_is_emptied_for_a_job_that_must_run_alone() -> None:
    bench = Bench(n=2, max_running=8)
    held = bench.grants.issue("m", 18)
    here = [grant for grant in held if grant.engine == "e0"]
    there = [grant for grant in held if grant.engine == "e1"]
    there.pop().release()
    assert bench.grants.issue_exclusive("m") is None
    assert bench.free() == 0  # e1 is being emptied
    for grant in there:
        grant.release()
    alone = bench.grants.issue_exclusive("m")
    assert alone is not None
    assert alone.engine == "e1"
    assert bench.grants.issue_exclusive("m") is None
    for grant in here:
        grant.release()
    assert bench.free() == 9
    bench.grants.cancel_exclusive("m")
    assert bench.free() == 9  # e0 again; e1 still runs its exclusive job
    alone.release()
    assert bench.free() == 18


def test_a_prefill_worker_gets_no_jobs() -> None:
    bench = Bench(n=2, max_running=8)
    bench.balancer.fleet.join(endpoint("e0", "prefill"), bench.capacity, bench.now_s)
    assert {grant.engine for grant in bench.grants.issue("m", 100)} == {"e1"}


@given(
    st.lists(st.tuples(st.sampled_from(["issue", "back", "sync", "end", "wait", "go"]), st.integers(1, 8)), max_size=40)
)
def test_grants_never_exceed_the_worker(acts: list[tuple[str, int]]) -> None:
    bench = Bench(max_running=8)
    held = []
    for act, n in acts:
        if act == "issue":
            held += bench.grants.issue("m", n)
        elif act == "back" and held:
            held.pop().release()
        elif act == "sync":
            bench.start(n)
        elif act == "end" and bench.requests:
            bench.end()
        elif act == "wait":
            bench.report(EngineLoad(waiting=n))
        else:
            bench.run(n)
        n_free = bench.free()
        assert bench.grants.granted_on("e0") == len(held)
        assert 1 <= n_free + len(held) <= 8 + 1
        if bench.requests:
            assert n_free <= 4  # half of the worker's sequences
        if bench.workers[0].load.waiting:
            assert n_free == (not held)
    for grant in held:
        grant.release()
    assert bench.free() >= 1
