"""A trace, a fleet and a router, in virtual time."""

from math import log
from random import Random

from msgspec.structs import replace

from emberline.protocol.errors import BadInput
from emberline.simulator.arrivals import Start, starts
from emberline.simulator.baselines import Dynamo, LeastLoaded, RoundRobin, SGLang
from emberline.simulator.emberline_router import Ours, cost_of
from emberline.simulator.fleet import Fleet
from emberline.simulator.job import Job, Keys
from emberline.simulator.outcome import BINS, Outcome
from emberline.simulator.plan import PEER_POLICIES, Plan
from emberline.simulator.router import Router
from emberline.simulator.trace import Trace
from emberline.simulator.virtual_clock import Clock
from emberline.simulator.worker import Worker


def simulate(trace: Trace, plan: Plan) -> Outcome:
    """The same plan gives the same outcome, to the last digit."""
    if plan.model.kv_tokens < plan.model.context_len + 2 * trace.block_tokens:
        raise BadInput(
            f"workers hold {plan.model.kv_tokens} tokens of KV, less than a context of {plan.model.context_len} needs",
            param="kv-tokens",
        )
    return _Simulation(trace, plan).run()


class _Simulation:
    def __init__(self, trace: Trace, plan: Plan) -> None:
        self._trace, self._plan = trace, plan
        self._clock = Clock()
        self._rng = Random(plan.seed)
        self._fleet = Fleet(
            plan.roles,
            plan.model,
            plan.chunking,
            self._clock,
            trace.block_tokens,
            plan.wire,
            self._ended,
            self._stepped,
        )
        self._fleet.routers = [self._router(core) for core in range(plan.cores)]
        self._known: set[int] = set()  # segments that somebody has asked for
        self._live: dict[int, tuple[Start, int, int]] = {}  # job -> its session's start, number and turn
        self._jobs: list[Job] = []  # those that are measured
        self._n_jobs = 0
        self._intervals: dict[int, int] = {}  # tokens by bin of the time since the one before

    def run(self) -> Outcome:
        plan, clock = self._plan, self._clock
        for number, start in enumerate(starts(self._trace, plan.load, plan.end_s, self._rng)):
            clock.at(max(0.0, start.at_s), self._ask, start, number, start.turn)
        clock.run(plan.warm_s)
        workers = self._fleet.workers
        before = [(worker.busy_at(clock.now_s), worker.computed, worker.n_written) for worker in workers]
        clock.run(plan.end_s)
        after = [(worker.busy_at(clock.now_s), worker.computed, worker.n_written) for worker in workers]
        limit_s = plan.end_s + plan.drain_s
        while clock.now_s < limit_s and not clock.empty and any(job.ended_s < 0 for job in self._jobs):
            clock.run(min(limit_s, clock.now_s + 10.0))
        return Outcome(
            plan=plan,
            trace=self._trace.name,
            jobs=self._jobs,
            busy_s=[b[0] - a[0] for a, b in zip(before, after)],
            prompt_tokens=[b[1] - a[1] for a, b in zip(before, after)],
            output_tokens=[b[2] - a[2] for a, b in zip(before, after)],
            preemptions=sum(worker.n_preempted for worker in workers),
            refused=sum(router.refused() for router in self._fleet.routers),
            transferred_bytes=self._fleet.links.n_bytes,
            intervals=self._intervals,
            now_s=clock.now_s,
        )

    def _router(self, core: int) -> Router:
        plan, fleet = self._plan, self._fleet
        workers, send = fleet.workers, fleet.send
        match plan.policy:
            case "plain_round_robin":
                return RoundRobin(workers, send)
            case "plain_least_loaded":
                return LeastLoaded(workers, send)
            case "sglang":
                return SGLang(workers, send)
            case "dynamo":
                return Dynamo(workers, send, plan.seed)
        assert plan.policy not in PEER_POLICIES
        stride = max(1, plan.key_tokens // self._trace.block_tokens)
        settings = replace(
            plan.settings,
            policy=plan.policy,
            cost=cost_of(plan.model, plan.wire.bytes_per_s),
            block_tokens=stride * self._trace.block_tokens,
        )
        return Ours(workers, send, self._clock, settings, Keys(stride), plan.named, plan.delay_s)

    # --- sessions ----------------------------------------------------------------------------------------------------

    def _ask(self, start: Start, number: int, place: int) -> None:
        turn = start.session.turns[place]
        kind, n_common = start.session.common
        path = tuple(start.base + segment if segment >= n_common else _COMMON * kind + segment for segment in turn.path)
        now_s = self._clock.now_s
        job = Job(
            id=f"j{self._n_jobs}",
            number=self._n_jobs,
            session=number,
            tenant=number % self._plan.tenants,
            path=path,
            lengths=turn.lengths,
            n_prompt=turn.n_prompt,
            n_output=turn.n_output,
            block_tokens=self._trace.block_tokens,
            asked_s=now_s,
            reply=(start.base + turn.reply[0], turn.reply[1]),
        )
        self._n_jobs += 1
        job.known_tokens = self._known_tokens(job)
        self._live[job.number] = (start, number, place)
        if self._plan.warm_s <= now_s < self._plan.end_s:
            self._jobs.append(job)
        self._fleet.routers[number % len(self._fleet.routers)].arrived(job)

    def _known_tokens(self, job: Job) -> int:
        """What a cache without bounds, shared by all, would have of the prompt."""
        known, n_blocks = self._known, 0
        for segment, length in zip(job.path, job.lengths):
            if segment not in known:
                break
            n_blocks += length
        known.update(job.path)
        return min(n_blocks * job.block_tokens, job.n_prompt - 1)

    def _ended(self, job: Job) -> None:
        start, number, place = self._live.pop(job.number)
        turns = start.session.turns
        follows = place + 1
        if follows < len(turns) and turns[follows].beside:
            self._follow(start, number, follows)
        if turns[place].beside:
            return
        while follows < len(turns) and turns[follows].beside:
            follows += 1
        if follows < len(turns):
            self._follow(start, number, follows)

    def _follow(self, start: Start, number: int, place: int) -> None:
        at_s = self._clock.now_s + start.session.turns[place].wait_s
        if at_s <= self._plan.end_s:
            self._clock.at(at_s, self._ask, start, number, place)

    def _stepped(self, worker: Worker, seconds: float, n_tokens: int) -> None:
        if n_tokens and self._plan.warm_s <= self._clock.now_s < self._plan.end_s:
            place = int(log(seconds) * BINS)
            self._intervals[place] = self._intervals.get(place, 0) + n_tokens


_COMMON = 1 << 12  # numbers below all copies': more segments than a kind of sessions has in common
