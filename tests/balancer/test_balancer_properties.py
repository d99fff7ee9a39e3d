"""In any order of events: every request is handed out and ends once, and everything it was charged is released."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from emberline.balancer.endpoint import Capacity
from emberline.balancer.ledger import ORPHAN_RUNNING_S, ORPHAN_S, InFlightLoad, InFlightRequest
from emberline.protocol.errors import EmberlineError
from emberline.protocol.frames import EngineLoad
from tests.balancer.balancing import endpoint, fleet, keys, nothing_left, open_ids, request
from tests.examples import n_examples

NAMES = ["e0", "e1", "e2", "e3"]
CHAINS = [keys(("system", 20), (f"s{i}", 30 * i)) for i in range(4)]
SOME = st.integers(0, 9)


class Life(RuleBasedStateMachine):
    @initialize(
        roles=st.sampled_from(
            [("both",) * 4, ("prefill", "decode", "decode", "both"), ("prefill",) * 2 + ("decode",) * 2]
        ),
        policy=st.sampled_from(["sticky", "sticky", "affinity", "prefix", "least_loaded"]),
        events=st.booleans(),
    )
    def begin(self, roles: tuple[str, ...], policy: str, events: bool) -> None:
        self.roles = roles
        self.capacity = Capacity(max_running=2, kv_tokens=4000, events=events)
        self.balancer = fleet(
            *roles, max_running=2, kv_tokens=4000, events=events, policy=policy, max_waiting=3, ahead_s=0.05
        )
        self.now_s = 0.0
        self.waiting: dict[str, InFlightRequest] = {}
        self.running: dict[str, InFlightRequest] = {}
        self.lost: dict[str, InFlightRequest] = {}  # admitted, but refused another worker
        self.handed_out: set[InFlightRequest] = set()
        self.gone: set[str] = set()
        self.n = 0

    def pick(self, number: int, of: dict[str, InFlightRequest]) -> str:
        return list(of)[number % len(of)] if of else "nobody"

    def pump(self) -> None:
        for record in self.balancer.dispatch(self.now_s):
            assert record not in self.handed_out
            self.handed_out.add(record)
            assert (record.route is None) != (record.error is None)
            assert self.waiting.pop(record.request.id) is record
            if record.route is not None:
                self.running[record.request.id] = record
            elif record.admitted:  # it stays on record until its owner ends it
                self.lost[record.request.id] = record
            if record.route is not None:
                for name in {record.route.decode, record.route.prefill} - {""}:
                    assert name not in self.gone

    @rule(
        chain=st.sampled_from(CHAINS), tenant=SOME, priority=st.sampled_from(["priority", "default", "flex"]), mood=SOME
    )
    def enqueue(self, chain: bytes, tenant: int, priority: str, mood: int) -> None:
        self.n += 1
        wanted = request(
            chain,
            id=f"q{self.n}",
            account=f"t{tenant % 3}",
            priority=priority,
            n=1 + (mood == 1),
            reject_if_busy=mood == 2,
            deadline_s=1.0 if mood == 3 else None,
            wait_s=2.0 if mood > 5 else 0.0,
            affinity="x" if mood == 4 else None,
        )
        try:
            self.waiting[wanted.id] = self.balancer.enqueue(wanted, self.now_s)
        except EmberlineError:
            assert wanted.id not in open_ids(self.balancer)
        self.pump()

    @rule(which=SOME)
    def again(self, which: int) -> None:
        """Failover: its worker is lost, it asks for another."""
        if (request_id := self.pick(which, self.running)) == "nobody":
            return
        before = self.running.pop(request_id)
        assert before.route is not None
        self.handed_out.discard(before)
        wanted = request(
            before.request.keys, id=request_id, account=before.request.account, lost=(before.route.decode,), wait_s=1.0
        )
        if before.is_job:  # its queue makes another attempt, while this one may still end
            self.running[request_id] = before
            return self.batch(before.route.decode, before.request.keys)
        try:
            self.waiting[request_id] = self.balancer.enqueue(wanted, self.now_s)
            assert self.waiting[request_id] is before
        except EmberlineError:
            self.lost[request_id] = before
            assert before.phase == "waiting"
        self.pump()

    @rule(which=SOME, cached=st.none() | st.integers(0, 400))
    def began(self, which: int, cached: int | None) -> None:
        self.balancer.first_token(self.pick(which, self.running), self.now_s, cached)
        self.pump()

    @rule(
        which=SOME,
        of=st.sampled_from(["waiting", "running", "lost"]),
        outcome=st.sampled_from(["finished", "cancelled", "client_error", "engine_failed"]),
    )
    def ended(self, which: int, of: str, outcome: str) -> None:
        requests: dict[str, InFlightRequest] = getattr(self, of)
        request_id = self.pick(which, requests)
        for _ in range(2):  # ending twice changes nothing
            self.balancer.ended(request_id, self.now_s, outcome, 40)  # type: ignore[arg-type]
        requests.pop(request_id, None)
        assert request_id not in open_ids(self.balancer)
        self.pump()

    @rule(name=st.sampled_from(NAMES), chain=st.sampled_from(CHAINS))
    def batch(self, name: str, chain: bytes) -> None:
        self.n += 1
        self.job(f"q{self.n}", name, chain)

    def job(self, request_id: str, name: str, chain: bytes) -> None:
        wanted = request(chain, id=request_id, engine=name, priority="batch")
        try:
            route = self.balancer.dispatch_job(wanted, self.now_s)
        except EmberlineError:
            return
        record = self.balancer.ledger.get(wanted.id)
        assert record is not None
        assert record.route == route
        self.running[wanted.id] = record

    @rule(name=st.sampled_from(NAMES), how=st.sampled_from(["disconnected", "remove", "drain"]))
    def lose(self, name: str, how: str) -> None:
        getattr(self.balancer.fleet, how)(name, self.now_s)
        self.gone.add(name)
        self.pump()

    @rule(name=st.sampled_from(NAMES))
    def join(self, name: str) -> None:
        self.gone.discard(name)
        self.balancer.fleet.join(endpoint(name, self.roles[NAMES.index(name)]), self.capacity, self.now_s)
        self.pump()

    @rule(
        name=st.sampled_from(NAMES),
        running=st.integers(-1, 4),
        waiting=st.integers(0, 2),
        tokens=st.sampled_from([0, 500, 5000, -1, 1 << 50]),
    )
    def report(self, name: str, running: int, waiting: int, tokens: int) -> None:
        load = EngineLoad(running=running, waiting=waiting, waiting_tokens=tokens, steps=self.n)
        self.balancer.fleet.report(name, load, self.now_s)
        self.pump()

    @rule(
        name=st.sampled_from(NAMES),
        chain=st.sampled_from(CHAINS),
        what=st.sampled_from(["stored", "removed", "replaced"]),
    )
    def cached(self, name: str, chain: bytes, what: str) -> None:
        getattr(self.balancer.fleet, what)(name, chain, self.now_s)

    @rule(seconds=st.sampled_from([0.01, 0.3, 3.0, 61.0]))
    def wait(self, seconds: float) -> None:
        self.now_s = min(self.now_s + seconds, ORPHAN_S - 1.0)
        self.pump()

    @invariant()
    def every_open_request_has_one_record(self) -> None:
        assert open_ids(self.balancer) == {*self.waiting, *self.running, *self.lost}
        assert len(self.balancer.queue) == len(self.waiting)
        queues = [self.balancer.queue.waiting_for(name) for name in ("", *self.balancer.fleet.workers)]
        assert sum(map(len, queues)) == len(self.waiting)  # none is in the queue of a worker that was removed

    @invariant()
    def loads_are_the_sums_of_the_records(self) -> None:
        for worker in self.balancer.fleet.workers.values():
            account = worker.in_flight
            mine = [record for record in self.balancer.ledger if record.decode is account]
            assert {record.request.id for record in mine} <= set(self.running)
            assert account.active == sum(record.request.n for record in mine)
            assert account.decode_tokens == sum(r.total_tokens * r.request.n for r in mine)
            requests = [record for record in mine if not record.is_job]
            assert account.kv_tokens == sum(r.total_tokens + r.reply_tokens for r in requests)
            assert account.reply_tokens == sum(record.reply_tokens for record in requests)
            assert account.decoding == sum(r.request.n for r in requests if r.first_token_s is not None)
            assert account.prefill_tokens == sum(charge.uncached_tokens for charge in account.pending.values())
            if not worker.connected:
                assert account == InFlightLoad()
        assert all(tenant.n_open >= 0 for tenant in self.balancer.tenants)

    def teardown(self) -> None:
        if not hasattr(self, "balancer"):
            return
        for request_id in [*self.waiting, *self.running, *self.lost]:
            self.balancer.ended(request_id, self.now_s, "cancelled")
        assert nothing_left(self.balancer, self.now_s)
        assert self.balancer.dispatch(self.now_s + 1) == []


Life.TestCase.settings = settings(max_examples=n_examples(80), stateful_step_count=40, deadline=None)
TestLife = Life.TestCase


def test_orphaned_requests_are_no_load_but_stay_on_record_until_their_owner_ends_them() -> None:
    balancer = fleet("both")
    silent, running = request(tokens=100), request(tokens=100)
    for wanted in (silent, running):
        balancer.enqueue(wanted, 0.0)
    assert len(balancer.dispatch(0.0)) == 2
    balancer.first_token(running.id, 1.0)
    balancer.dispatch(400.0)
    assert balancer.snapshot(400.0).workers[0].active == 1
    balancer.dispatch(ORPHAN_RUNNING_S + 2.0)
    assert balancer.snapshot(ORPHAN_RUNNING_S + 2.0).workers[0].active == 0
    assert open_ids(balancer) == {silent.id, running.id}
    for wanted in (silent, running):
        balancer.ended(wanted.id, ORPHAN_RUNNING_S + 3.0, "cancelled")
    assert nothing_left(balancer, ORPHAN_RUNNING_S + 3.0)
