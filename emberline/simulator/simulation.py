"""Runs a trace against a simulated fleet and a router in virtual time, and searches for a load."""

from dataclasses import replace
from math import log
from random import Random

import msgspec

from emberline.protocol.errors import BadInput
from emberline.simulator.baselines import (
    DYNAMO_DEFAULTS,
    SGLANG_DEFAULTS,
    DynamoKnobs,
    DynamoRouter,
    LeastLoadedRouter,
    RoundRobinRouter,
    SGLangKnobs,
    SGLangRouter,
    SimRouter,
)
from emberline.simulator.emberline_router import EmberlineRouter
from emberline.simulator.experiment import BASELINE_POLICIES, LOG_BINS, SimulationConfig, SimulationResult
from emberline.simulator.faults import random_faults
from emberline.simulator.fleet import Fleet
from emberline.simulator.request import BlockKeys, SimRequest
from emberline.simulator.trace import SessionStart, TrafficTrace, session_starts
from emberline.simulator.virtual_clock import VirtualClock
from emberline.simulator.worker import SimWorker

_COMMON_SPAN = 1 << 12  # segment numbers per kind of common prefix, all below those of sessions
BUSY_TOLERANCE = 0.01
MAX_SEARCH_RUNS = 12


def simulate(trace: TrafficTrace, config: SimulationConfig) -> SimulationResult:
    """The same configuration gives the same result, to the last digit."""
    model = config.model
    if model.kv_tokens < model.context_len + 2 * trace.block_tokens:
        raise BadInput(
            f"workers hold {model.kv_tokens} tokens of KV, less than a context of {model.context_len} needs",
            param="kv-tokens",
        )
    return _Simulation(trace, config).run()


class _Simulation:
    def __init__(self, trace: TrafficTrace, config: SimulationConfig) -> None:
        self._trace, self._config = trace, config
        self._clock = VirtualClock()
        self._rng = Random(config.seed)
        self._streamed = Random(config.seed)  # which requests are; of its own, as that of the faults
        self._fleet = Fleet(
            config.roles,
            config.model,
            config.prefill_policy,
            self._clock,
            trace.block_tokens,
            config.link,
            self._on_finish,
            self._on_step,
        )
        self._fleet.routers = [self._make_router() for _ in range(config.balancers)]
        self._known: set[int] = set()  # segments of all requests so far
        self._live: dict[int, tuple[SessionStart, int, int]] = {}  # request -> its session's start, number and turn
        self._measured: list[SimRequest] = []
        self._n_requests = 0
        self._intervals: dict[int, int] = {}  # see SimulationResult

    def run(self) -> SimulationResult:
        config, clock = self._config, self._clock
        for number, start in enumerate(session_starts(self._trace, config.load, config.end_s, self._rng)):
            clock.at(max(0.0, start.at_s), self._send, start, number, start.turn)
        rng = Random(config.seed)  # of its own: the arrivals are the same without faults
        names = [worker.name for worker in self._fleet.workers]
        for fault in random_faults(config.faults, names, config.warmup_s, config.end_s, rng):
            self._fleet.inject(fault)
        clock.run(config.warmup_s)
        workers = self._fleet.workers
        before = [(worker.busy_at(clock.now_s), worker.computed, worker.n_output) for worker in workers]
        clock.run(config.end_s)
        after = [(worker.busy_at(clock.now_s), worker.computed, worker.n_output) for worker in workers]
        limit_s = config.end_s + config.drain_s
        while clock.now_s < limit_s and not clock.empty and any(request.end_s < 0 for request in self._measured):
            clock.run(min(limit_s, clock.now_s + 10.0))
        return SimulationResult(
            config=config,
            trace=self._trace.name,
            requests=self._measured,
            busy_s=[b[0] - a[0] for a, b in zip(before, after)],
            prompt_tokens=[b[1] - a[1] for a, b in zip(before, after)],
            output_tokens=[b[2] - a[2] for a, b in zip(before, after)],
            preemptions=sum(worker.n_preempted for worker in workers),
            rejected=sum(router.n_rejected() for router in self._fleet.routers),
            failovers=sum(request.n_failovers for request in self._measured),
            transferred_bytes=self._fleet.network.n_bytes,
            intervals=self._intervals,
            now_s=clock.now_s,
        )

    def _make_router(self) -> SimRouter:
        config, fleet = self._config, self._fleet
        workers, send = fleet.workers, fleet.send
        match config.policy:
            case "plain_round_robin":
                return RoundRobinRouter(workers, send)
            case "plain_least_loaded":
                return LeastLoadedRouter(workers, send)
            case "sglang":
                knobs = config.knobs if isinstance(config.knobs, SGLangKnobs) else SGLANG_DEFAULTS
                return SGLangRouter(workers, send, knobs)
            case "dynamo":
                weights = config.knobs if isinstance(config.knobs, DynamoKnobs) else DYNAMO_DEFAULTS
                return DynamoRouter(workers, send, config.seed, weights)
        assert config.policy not in BASELINE_POLICIES
        stride = max(1, config.key_tokens // self._trace.block_tokens)
        settings = msgspec.structs.replace(
            config.settings,
            policy=config.policy,
            block_tokens=stride * self._trace.block_tokens,
        )
        return EmberlineRouter(
            *(workers, send, self._clock, settings, BlockKeys(stride)),
            session_affinity=config.session_affinity,
            report_delay_s=config.report_delay_s,
            upstream=config.upstream,
        )

    # --- sessions ----------------------------------------------------------------------------------------------------

    def _send(self, start: SessionStart, session: int, place: int) -> None:
        """Send a turn of a session to its router."""
        turn = start.session.turns[place]
        kind, n_common = start.session.common
        path = tuple(
            start.base + segment if segment >= n_common else _COMMON_SPAN * kind + segment for segment in turn.path
        )
        now_s = self._clock.now_s
        request = SimRequest(
            id=f"r{self._n_requests}",
            number=self._n_requests,
            session=session,
            tenant=session % self._config.tenants,
            path=path,
            lengths=turn.lengths,
            n_prompt=turn.n_prompt,
            n_output=turn.n_output,
            block_tokens=self._trace.block_tokens,
            arrival_s=now_s,
            reply=(start.base + turn.reply[0], turn.reply[1]),
            streamed=self._streamed.random() >= self._config.unstreamed,
        )
        self._n_requests += 1
        request.known_tokens = self._known_tokens(request)
        self._live[request.number] = (start, session, place)
        if self._config.warmup_s <= now_s < self._config.end_s:
            self._measured.append(request)
        self._fleet.routers[session % len(self._fleet.routers)].on_request(request)

    def _known_tokens(self, request: SimRequest) -> int:
        """Prompt tokens that an unbounded cache shared by all workers would have."""
        known, n_blocks = self._known, 0
        for segment, length in zip(request.path, request.lengths):
            if segment not in known:
                break
            n_blocks += length
        known.update(request.path)
        return min(n_blocks * request.block_tokens, request.n_prompt - 1)

    def _on_finish(self, request: SimRequest) -> None:
        """Schedule the turns that wait for this one: a sub-agent's next, and the session's own."""
        start, session, place = self._live.pop(request.number)
        turns = start.session.turns
        following = place + 1
        if following < len(turns) and turns[following].is_sub_agent:
            self._schedule(start, session, following)
        if turns[place].is_sub_agent:
            return
        while following < len(turns) and turns[following].is_sub_agent:
            following += 1
        if following < len(turns):
            self._schedule(start, session, following)

    def _schedule(self, start: SessionStart, session: int, place: int) -> None:
        at_s = self._clock.now_s + start.session.turns[place].wait_s
        if at_s <= self._config.end_s:
            self._clock.at(at_s, self._send, start, session, place)

    def _on_step(self, worker: SimWorker, seconds: float, n_tokens: int) -> None:
        if n_tokens and self._config.warmup_s <= self._clock.now_s < self._config.end_s:
            place = int(log(seconds) * LOG_BINS)
            self._intervals[place] = self._intervals.get(place, 0) + n_tokens


# --- searching for a load --------------------------------------------------------------------------------------------


def load_at_utilization(trace: TrafficTrace, config: SimulationConfig, busy: float) -> float:
    """The load at which the workers are busy for that share of the time."""
    load, low, high = _initial_load(trace, config), 0.0, float("inf")
    for _ in range(MAX_SEARCH_RUNS):
        found = simulate(trace, replace(config, load=load)).busy
        if abs(found - busy) <= BUSY_TOLERANCE:
            break
        low, high = (load, high) if found < busy else (low, load)
        if high == float("inf"):
            load *= min(4.0, max(1.1, busy / max(found, 0.01)))
        elif found < 0.97:  # below saturation, utilization is nearly linear in load
            load = min(max(load * busy / found, low + 0.05 * (high - low)), high - 0.05 * (high - low))
        else:
            load = (low + high) / 2
    return load


def _initial_load(trace: TrafficTrace, config: SimulationConfig) -> float:
    """A first guess: the load that keeps all workers busy at half of the possible hit ratio."""
    turns = [turn for session in trace.sessions for turn in session.turns]
    model = config.model
    sample = turns[:: max(1, len(turns) // 500)]
    work_s = sum(
        model.prefill_s(t.n_prompt // 4, t.n_prompt - t.n_prompt // 4) / 2 + t.n_output * model.step_s for t in sample
    )
    requests_per_s = 0.5 * len(config.roles) / (work_s / len(sample))
    if trace.shared:
        last_s = max(session.start_s for session in trace.sessions)
        return requests_per_s * max(last_s, 1.0) / len(turns)
    return requests_per_s * len(trace.sessions) / len(turns)
