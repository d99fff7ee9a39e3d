"""Search for the settings of a fleet that serve recorded traffic best, by simulating them.

`emberline tune` replays the last day through the simulator, whose step times are those that the workers have measured
(`StepCost` of their load reports), and compares settings by one figure, the *strain*: the larger of p90 TTFT and p90
inter-token latency, each divided by its target. 1 is just within both targets. The search begins with the present
setting and with the split of roles that rate matching proposes, and changes one setting at a time for as long as that
lowers the strain. The gain is told with its interval over parts of the recorded time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, exp, log

import msgspec

from emberline.balancer.step_capacity import decode_rate, prefill_rate
from emberline.protocol.errors import BadInput
from emberline.protocol.frames import StepCost
from emberline.simulator.coefficients import Coefficients, FixedTokenBudget, LatencyTargetBudget, PrefillPolicy
from emberline.simulator.experiment import (
    SLO_TPOT_S,
    SLO_TTFT_S,
    SimulationConfig,
    SimulationResult,
    interval,
    percentile,
)
from emberline.simulator.fleet import LinkSpec
from emberline.simulator.request import SimRequest
from emberline.simulator.simulation import simulate
from emberline.simulator.tiers import TierSpec
from emberline.simulator.trace import TraceTurn, TrafficTrace

PARTS = 5  # of the recorded time, over which the gain's interval is taken
MAX_ROUNDS = 4  # of the search, each over all settings
WORTH_IT = 0.02  # a change must lower the strain by this part of it
TOKEN_BUDGETS = (256, 512, 1024, 2048, 4096, 8192, 16_384)
MAX_DRAFTS = 8


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that `tune` may change. Sizes of tiers are in tokens of a worker; 0: no such tier."""

    layout: str = ""  # of a worker; a key of the fleet's models
    prefill_workers: int = 0  # 0: all workers do both
    token_budget: int = 0  # per step; 0: the engine's default
    draft_tokens: int = 0  # per row and step; 0: no speculation
    host_tokens: int = 0
    disk_tokens: int = 0


HOST_BYTES_PER_S, DISK_BYTES_PER_S = 20e9, 3e9  # of tiers that have not measured their own


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedFleet:
    """Workers, devices and targets, which all settings have in common."""

    models: Mapping[str, Coefficients]  # by layout: measured, or predicted from the measured one
    workers: Mapping[str, int]  # by layout: workers that the machine's devices make
    accepted: Sequence[float] = ()  # by position of a draft: probability that it and all before it are accepted
    max_host_tokens: int = 0  # of a worker
    max_disk_tokens: int = 0
    host_bytes_per_s: float = HOST_BYTES_PER_S
    disk_bytes_per_s: float = DISK_BYTES_PER_S
    link: LinkSpec = field(default_factory=LinkSpec)
    ttft_s: float = SLO_TTFT_S  # targets, at p90
    itl_s: float = SLO_TPOT_S


@dataclass(frozen=True, slots=True)
class Outcome:
    """One setting, simulated."""

    setting: Setting
    strain: float
    parts: tuple[float, ...]  # strain by part of the recorded time; 0: no request came in it
    ttft_p90_s: float
    itl_p90_s: float
    hit_ratio: float
    busy: float


@dataclass(frozen=True, slots=True)
class Proposal:
    """The best setting found. `gain`: part of the strain that it takes away, with half its 95 % interval."""

    now: Outcome
    best: Outcome
    gain: float
    uncertainty: float
    n_simulated: int

    @property
    def is_worth_it(self) -> bool:
        """True if the gain is larger than what is uncertain about it."""
        return self.gain > max(WORTH_IT, self.uncertainty)


def measured_model(cost: StepCost, known: Coefficients) -> Coefficients:
    """Coefficients with the step times that workers have measured; all else as in `known`."""
    source = f"measured by its workers in {cost.n_steps:,} steps, ± {cost.error:.0%}"
    return msgspec.structs.replace(
        known,
        source=source,
        step_s=cost.step_s,
        row_s=cost.row_s,
        context_s=cost.context_s,
        token_s=cost.token_s,
        pair_s=cost.pair_s,
        tile=1,
    )


class Tuner:
    """Simulates settings of a fleet over a trace, each once."""

    def __init__(self, trace: TrafficTrace, fleet: TunedFleet, told: Callable[[Outcome], None] | None = None) -> None:
        if not trace.sessions:
            raise BadInput("there is no recorded request to replay: let the server work for a while, then ask again")
        self.fleet = fleet
        self._trace, self._told = trace, told
        self._known: dict[Setting, Outcome] = {}
        self._span_s = max(session.start_s for session in trace.sessions) + 1.0

    @property
    def n_simulated(self) -> int:
        """Number of settings that were simulated."""
        return len(self._known)

    def outcome(self, setting: Setting) -> Outcome:
        """Simulate a setting, unless it was before."""
        if setting not in self._known:
            self._known[setting] = found = self._simulate(setting)
            if self._told is not None:
                self._told(found)
        return self._known[setting]

    def propose(self, now: Setting) -> Proposal:
        """Search for a better setting than the present one."""
        present = self.outcome(now)
        best = present
        for seed in self._matched_splits(now):
            best = min(best, self.outcome(seed), key=lambda each: each.strain)
        for _ in range(MAX_ROUNDS):
            before = best
            for knob in ("layout", "prefill_workers", "token_budget", "draft_tokens", "host_tokens", "disk_tokens"):
                for setting in self._variants(best.setting, knob):
                    found = self.outcome(setting)
                    if found.strain < (1 - WORTH_IT) * best.strain:
                        best = found
            if best is before:
                break
        gain, uncertainty = self._gain(present, best)
        return Proposal(present, best, gain, uncertainty, self.n_simulated)

    def _gain(self, now: Outcome, best: Outcome) -> tuple[float, float]:
        if best is now:
            return 0.0, 0.0
        ratios = [after / before for before, after in zip(now.parts, best.parts) if before and after]
        _, half = interval(ratios) if ratios else (0.0, 1.0)
        return 1 - best.strain / now.strain, half

    # --- settings ----------------------------------------------------------------------------------------------------

    def _variants(self, setting: Setting, knob: str) -> list[Setting]:
        """Settings that differ in one knob."""
        fleet = self.fleet
        values: Sequence[int | str]
        match knob:
            case "layout":
                values = [*fleet.models]
            case "prefill_workers":
                values = range(fleet.workers[setting.layout])
            case "token_budget":
                values = TOKEN_BUDGETS
            case "draft_tokens":
                values = range(len(fleet.accepted[:MAX_DRAFTS]) + 1) if fleet.accepted else (setting.draft_tokens,)
            case "host_tokens":
                values = _sizes(fleet.max_host_tokens, setting.host_tokens)
            case _:
                values = _sizes(fleet.max_disk_tokens, setting.disk_tokens)
        return [found for value in values if self._is_valid(found := msgspec.structs.replace(setting, **{knob: value}))]

    def _is_valid(self, setting: Setting) -> bool:
        return setting.prefill_workers < self.fleet.workers[setting.layout]

    def _matched_splits(self, now: Setting) -> list[Setting]:
        """The split that the rates of prefill and decode ask for, in each layout: where the search begins, too."""
        found = []
        turns = [turn for session in self._trace.sessions for turn in session.turns]
        n_output = sum(turn.n_output for turn in turns)
        for layout, model in self.fleet.models.items():
            n_workers = self.fleet.workers[layout]
            if n_workers < 2:
                continue
            fresh = sum(_fresh_tokens(session.turns) for session in self._trace.sessions)
            context = sum(turn.n_prompt for turn in turns) // len(turns)
            cost = StepCost(model.step_s, model.row_s, model.context_s, model.token_s, model.pair_s)
            prefill_s = fresh / prefill_rate(cost, model.token_budget)
            decode_s = n_output / decode_rate(cost, self.fleet.itl_s, context, model.max_running)
            n_prefill = round(n_workers * prefill_s / (prefill_s + decode_s))
            n_prefill = min(max(1, n_prefill), n_workers - 1)
            found.append(msgspec.structs.replace(now, layout=layout, prefill_workers=n_prefill))
        return found

    # --- one setting -------------------------------------------------------------------------------------------------

    def _simulate(self, setting: Setting) -> Outcome:
        fleet, n_workers = self.fleet, self.fleet.workers[setting.layout]
        yielded = 1 + sum(fleet.accepted[: setting.draft_tokens])
        model = fleet.models[setting.layout]
        budget = setting.token_budget or model.token_budget
        model = msgspec.structs.replace(
            model,
            token_budget=budget,
            row_s=model.row_s + setting.draft_tokens * model.token_s,
            max_running=min(model.max_running, budget),
        )
        policy: PrefillPolicy = LatencyTargetBudget() if model.paced else FixedTokenBudget(budget)
        tiers = [
            TierSpec(name, n_tokens, rate)
            for name, n_tokens, rate in (
                ("host", setting.host_tokens, fleet.host_bytes_per_s),
                ("disk", setting.disk_tokens, fleet.disk_bytes_per_s),
            )
            if n_tokens and not setting.prefill_workers  # the simulator has no tiers behind separate roles
        ]
        config = SimulationConfig(
            model=model,
            load=1.0,
            workers=0 if setting.prefill_workers else n_workers,
            prefill_workers=setting.prefill_workers,
            decode_workers=n_workers - setting.prefill_workers if setting.prefill_workers else 0,
            prefill_policy=policy,
            link=fleet.link,
            warmup_s=0.1 * self._span_s,
            measured_s=0.9 * self._span_s,
            session_affinity=True,
            tiers=tuple(tiers),
            key_tokens=max(256, self._trace.block_tokens),
        )
        result = simulate(_with_drafts(self._trace, yielded), config)
        return self._judge(setting, result, yielded)

    def _judge(self, setting: Setting, result: SimulationResult, yielded: float) -> Outcome:
        from_s, span_s = result.config.measured_from_s, result.config.measured_s
        parts: list[list[tuple[SimRequest, float]]] = [[] for _ in range(PARTS)]
        pairs = list(zip(result.requests, result.ttft_s()))
        for request, ttft_s in pairs:
            parts[min(PARTS - 1, int(PARTS * (request.arrival_s - from_s) / span_s))].append((request, ttft_s))
        ttft, itl = _p90s(pairs, yielded)
        strains = tuple(self._strain(*_p90s(part, yielded)) if part else 0.0 for part in parts)
        return Outcome(setting, self._strain(ttft, itl), strains, ttft, itl, result.hit_ratio, result.busy)

    def _strain(self, ttft_s: float, itl_s: float) -> float:
        """The larger of both latencies, by their targets; the smaller one counts a little, to tell equals apart."""
        high, low = max(a := ttft_s / self.fleet.ttft_s, b := itl_s / self.fleet.itl_s), min(a, b)
        return exp(0.9 * log(max(high, 1e-9)) + 0.1 * log(max(low, 1e-9)))


def _fresh_tokens(turns: Sequence[TraceTurn]) -> int:
    """Tokens of a session's prompts that no earlier turn of it had."""
    total = before = 0
    for turn in turns:
        total += max(0, turn.n_prompt - before) if turn.n_prompt >= before else turn.n_prompt
        before = turn.n_prompt
    return total


def _sizes(most: int, now: int) -> list[int]:
    """Sizes of a tier to try: none, the present one, and quarters of what the machine has."""
    return sorted({0, now, *(most * part // 4 for part in (1, 2, 4))} if most else {0, now})


def _with_drafts(trace: TrafficTrace, yielded: float) -> TrafficTrace:
    """The trace with replies of as many steps as they take with accepted drafts."""
    if yielded == 1:
        return trace
    sessions = [
        replace(each, turns=tuple(replace(turn, n_output=ceil(turn.n_output / yielded)) for turn in each.turns))
        for each in trace.sessions
    ]
    return replace(trace, sessions=sessions)


def _p90s(pairs: Sequence[tuple[SimRequest, float]], yielded: float) -> tuple[float, float]:
    ttft = sorted(ttft_s for _, ttft_s in pairs)
    itl = sorted(r.time_per_token_s / yielded for r, _ in pairs if r.end_s >= 0 and r.n_output > 1)
    return percentile(ttft, 90), percentile(itl, 90)
