"""Runs a trace against a simulated fleet and a router in virtual time, and searches for a load."""

from collections.abc import Callable, Sequence
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
from emberline.simulator.elastic_fleet import ElasticFleet, FleetSchedule
from emberline.simulator.emberline_router import EmberlineRouter
from emberline.simulator.experiment import BASELINE_POLICIES, LOG_BINS, SimulationConfig, SimulationResult
from emberline.simulator.faults import random_faults
from emberline.simulator.fleet import Fleet
from emberline.simulator.planner import SimPlanner
from emberline.simulator.request import BlockKeys, SimRequest
from emberline.simulator.tiers import Segment
from emberline.simulator.trace import SessionStart, TraceSession, TraceTurn, TrafficTrace, session_starts
from emberline.simulator.virtual_clock import VirtualClock
from emberline.simulator.worker import SimWorker

_COMMON_SPAN = 1 << 12  # segment numbers per kind of common prefix, all below those of sessions
HOLD_S = 60.0  # that requests wait for a first worker, besides two starts
BUSY_TOLERANCE = 0.01
MAX_SEARCH_RUNS = 12
PROGRESS_STEPS = 20

Progress = Callable[[SimulationConfig, float], None]  # called with the share of a run's virtual time that has passed


def simulate(trace: TrafficTrace, config: SimulationConfig, progress: Progress | None = None) -> SimulationResult:
    """The same configuration gives the same result, to the last digit."""
    model = config.model
    if model.kv_tokens < model.context_len + 2 * trace.block_tokens:
        raise BadInput(
            f"workers hold {model.kv_tokens} tokens of KV, less than a context of {model.context_len} needs",
            param="kv-tokens",
        )
    return _Simulation(trace, config, progress).run()


class _Simulation:
    def __init__(self, trace: TrafficTrace, config: SimulationConfig, progress: Progress | None = None) -> None:
        self._trace, self._config, self._progress = trace, config, progress
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
            *(self._on_finish, self._on_step, config.retention, config.tiers),
        )
        self._known: set[int] = set()  # segments of all requests so far
        self._live: dict[int, tuple[SessionStart, int, int]] = {}  # request -> its session's start, number and turn
        self._measured: list[SimRequest] = []
        self._n_requests = 0
        self._elastic = ElasticFleet(self._fleet, self._clock, config.planner.nodes if config.planner else config.nodes)
        self._planner: SimPlanner | None = None
        self._intervals: dict[int, int] = {}  # see SimulationResult

    def _run_until(self, until_s: float) -> None:
        clock, config = self._clock, self._config
        while self._progress is not None and clock.now_s < until_s:
            self._progress(config, clock.now_s / config.end_s)
            clock.run(min(until_s, clock.now_s + config.end_s / PROGRESS_STEPS))
        clock.run(until_s)

    def run(self) -> SimulationResult:
        config, clock = self._config, self._clock
        starts = session_starts(self._trace, config.load, config.end_s - config.history_s, self._rng, config.profile)
        starts.sort(key=lambda start: start.has_ended)  # behind the others: their numbers are the same without history
        recorded = self._replay_history([*enumerate(starts)])
        self._fleet.routers = [self._make_router() for _ in range(config.balancers)]
        if config.planner is not None:
            self._planner = SimPlanner(self._elastic, self._fleet.routers, clock, config.planner, config.end_s)
        elif config.schedule:
            FleetSchedule(self._elastic, clock, config.schedule)
        for request, worker in recorded:
            self._announce(request, worker)
        for number, start in enumerate(starts):
            if not start.has_ended:
                clock.at(config.history_s + max(0.0, start.at_s), self._send, start, number, start.turn)
        rng = Random(config.seed)  # of its own: the arrivals are the same without faults
        names = [worker.name for worker in self._fleet.workers]
        for fault in random_faults(config.faults, names, config.measured_from_s, config.end_s, rng):
            self._fleet.inject(fault)
        self._run_until(config.measured_from_s)
        workers = self._fleet.workers
        before = [(worker.busy_at(clock.now_s), worker.computed, worker.n_output) for worker in workers]
        self._run_until(config.end_s)
        after = [(worker.busy_at(clock.now_s), worker.computed, worker.n_output) for worker in workers]
        before += [(0.0, 0, 0)] * (len(after) - len(before))
        span_s = (config.measured_from_s, config.end_s)
        worker_s = [self._elastic.served_s(worker.name, *span_s) for worker in workers[: len(after)]]
        gpu_s = self._elastic.gpu_s(*span_s)
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
            worker_s=worker_s,
            gpu_s=gpu_s,
            plans=self._planner.plans if self._planner else [],
            sizes=self._planner.sizes if self._planner else [],
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
            hold_s=2 * config.planner.nodes.start_s + HOLD_S if config.planner else 0.0,
        )

    # --- sessions ----------------------------------------------------------------------------------------------------

    def _send(self, start: SessionStart, session: int, place: int) -> None:
        """Send a turn of a session to its router."""
        request = self._request(start, session, place)
        request.streamed = self._streamed.random() >= self._config.unstreamed
        request.next_s = next_turn_s(start.session.turns, place)
        request.known_tokens = self._known_tokens(request)
        self._live[request.number] = (start, session, place)
        if self._config.measured_from_s <= request.arrival_s < self._config.end_s:
            self._measured.append(request)
        if self._planner is not None:
            self._planner.last_request_s = self._clock.now_s
        self._fleet.routers[session % len(self._fleet.routers)].on_request(request)

    def _request(self, start: SessionStart, session: int, place: int) -> SimRequest:
        turn = start.session.turns[place]
        self._n_requests += 1
        return SimRequest(
            id=f"r{self._n_requests - 1}",
            number=self._n_requests - 1,
            session=session,
            tenant=session % self._config.tenants,
            path=tuple(_segment(start, segment) for segment in turn.path),
            lengths=turn.lengths,
            n_prompt=turn.n_prompt,
            n_output=turn.n_output,
            block_tokens=self._trace.block_tokens,
            arrival_s=self._clock.now_s,
            reply=(start.base + turn.reply[0], turn.reply[1]),
            called_tools=turn.called_tools,
        )

    def _replay_history(self, starts: list[tuple[int, SessionStart]]) -> list[tuple[SimRequest, SimWorker]]:
        """Cache what sessions sent before time 0, each session's on one worker, all of it when its last turn ended.
        Returns the last request of each session that goes on, and its worker."""
        config, workers = self._config, self._fleet.workers
        past = [(number, start) for number, start in starts if -config.history_s <= start.past_s < 0]
        past.sort(key=lambda pair: pair[1].past_s)
        segments: dict[tuple[int, int], list[Segment]] = {}  # of a session's turns up to one
        for _, start in past:
            if (key := (id(start.session), start.turn)) not in segments:
                segments[key] = _segments_before(start.session, start.turn)
        blocks = [sum(n for _, n in segments[id(start.session), start.turn]) for _, start in past]
        n_after = list(blocks)  # that the same worker stored later
        for place in range(len(past) - 1, -1, -1):
            following = place + len(workers)
            n_after[place] = n_after[following] + blocks[following] if following < len(past) else 0
        found = []
        for place, (number, start) in enumerate(past):
            worker = workers[place % len(workers)]
            self._clock.run(config.history_s + start.past_s)
            turns = start.session.turns
            last = max(place for place, turn in enumerate(turns[: start.turn]) if not turn.is_sub_agent)
            request = self._request(start, number, last)
            request.next_s = float("inf") if start.has_ended else start.at_s - start.past_s
            before = [(_segment(start, each), length) for each, length in segments[id(start.session), start.turn]]
            self._known.update(segment for segment, _ in before)
            kept = {*request.path}
            worker.remember(request, [pair for pair in before if pair[0] not in kept], n_after[place])
            if not start.has_ended:
                found.append((request, worker))
        self._clock.run(config.history_s)
        return found

    def _announce(self, request: SimRequest, worker: SimWorker) -> None:
        """KV events of what is still there."""
        for router in self._fleet.routers:
            router.on_history(request, worker)
            for segment in request.path:
                if n := worker.present(segment):
                    router.on_kv_event(worker, True, segment, 0, n)

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
        if n_tokens and self._config.measured_from_s <= self._clock.now_s < self._config.end_s:
            place = int(log(seconds) * LOG_BINS)
            self._intervals[place] = self._intervals.get(place, 0) + n_tokens


def _segment(start: SessionStart, segment: int) -> int:
    """The number in the simulation of a segment of a session."""
    kind, n_common = start.session.common
    return start.base + segment if segment >= n_common else _COMMON_SPAN * kind + segment


def _segments_before(session: TraceSession, turn: int) -> list[Segment]:
    """Segments of all turns before that one."""
    return [*{s: n for before in session.turns[:turn] for s, n in zip(before.path, before.lengths)}.items()]


def next_turn_s(turns: Sequence[TraceTurn], place: int) -> float:
    """From the end of a turn to the next one of its conversation."""
    if turns[place].is_sub_agent:
        following = turns[place + 1 : place + 2]
        return following[0].wait_s if following and following[0].is_sub_agent else float("inf")
    return next((turn.wait_s for turn in turns[place + 1 :] if not turn.is_sub_agent), float("inf"))


# --- searching for a load --------------------------------------------------------------------------------------------


def load_at_utilization(
    trace: TrafficTrace, config: SimulationConfig, busy: float, progress: Progress | None = None
) -> float:
    """The load at which the workers are busy for that share of the time."""
    load, low, high = estimated_load(trace, config), 0.0, float("inf")
    for _ in range(MAX_SEARCH_RUNS):
        found = simulate(trace, replace(config, load=load), progress).busy
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


def estimated_load(trace: TrafficTrace, config: SimulationConfig) -> float:
    """An estimate of the load that keeps the workers busy about half of the time; it simulates nothing."""
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
