"""Speculation: asks the drafters, lets the length policy choose, and counts what became of drafts."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from emberline.engine.core.feature import Speculation
from emberline.engine.core.plan import UNKNOWN_DRAFT, Sampled, StepPlan
from emberline.engine.core.queues import Selection
from emberline.engine.core.rows import Cell
from emberline.engine.core.sequence import Sequence
from emberline.engine.speculation import suffix_index
from emberline.engine.speculation.drafter import MAX_CELLS, Draft, Drafter
from emberline.engine.speculation.grammar_drafter import GrammarDrafter
from emberline.engine.speculation.head_drafter import HeadDrafter, ModelDrafter
from emberline.engine.speculation.length_policy import LengthPolicy
from emberline.engine.speculation.suffix_drafter import DEFAULT_BYTES, SuffixDrafter
from emberline.protocol.errors import BadInput
from emberline.protocol.events import DraftUsage
from emberline.protocol.frames import DraftStats, EngineLoad

AUTO, OFF = "auto", "off"
SETTINGS = (AUTO, OFF, "suffix", "grammar", HeadDrafter.name, ModelDrafter.name)
CPU_MARGINAL, GPU_MARGINAL = 0.4, 0.02  # see LengthPolicy; on a GPU until it has measured its steps
GPU_WAIT_S = 0.0005  # that a GPU waits for the host, which plans a step with drafts late; before it was measured
MAX_IN_FLIGHT = 16  # steps of which it is known how many tokens the head proposes; more are never in flight
_WAITING_STEPS = 4  # for which what a head has proposed may wait at a sequence
_FADE = 0.9  # weight of a sequence's earlier drafts, with every new one
_LEAST_TRUST, _MOST_TRUST = 0.2, 1.3
_log = logging.getLogger(__name__)


class _InFlight(msgspec.Struct, gc=False):
    """A draft that is being verified."""

    cells: Many[int]
    n_guessed: int  # leading tokens of it that its row does not have
    expected: float  # tokens of it that the policy expects to be drawn


class Grammars(Protocol):
    """The grammars of sequences, by the number of the sequence."""

    def mask(self, number: int) -> NDArray[np.uint32] | None:
        """The tokens that may be drawn next: bit i % 32 of word i // 32. Returns None if there is no mask."""

    def forced_ids(self, number: int) -> bytes:
        """Tokens (u32 LE) that must follow; empty if several may."""


@dataclass(slots=True)
class _Drafting:
    """State of a sequence's drafts."""

    in_flight: deque[_InFlight] = field(default_factory=deque)
    n_expected: float = 0.0  # of earlier drafts, weighted
    n_accepted: float = 0.0
    n_drafted: int = 0  # draft tokens verified so far
    n_drafts_accepted: int = 0  # of those
    trust: float = 1.0  # how much better or worse its drafts fare than others in the same situations


class Proposal(Draft):
    """Tokens that drafters propose for a sequence; the first n_sampling stand for tokens that are being sampled."""

    speculator: "Speculator"
    seq: Sequence

    def take(self, most: int) -> bytes:
        """Choose how many of the tokens are verified."""
        n_sampling, allowed = self.seq.n_sampling, self.seq.request.speculation.max_draft_tokens
        cells = self.cells[: n_sampling + (most if allowed is None else min(most, allowed))]
        if len(cells) <= n_sampling:
            return b""
        n_chosen = self.speculator.choose(self.seq, cells, n_sampling)
        return self.ids[4 * n_sampling : 4 * (n_sampling + n_chosen)]


class DeviceProposal(msgspec.Struct, gc=False):
    """Tokens that the device will have proposed for a sequence, once the steps in flight are done."""

    speculator: "Speculator"
    seq: Sequence
    n_tokens: int

    def take(self, most: int) -> bytes:
        """Choose how many of the tokens are verified."""
        allowed = self.seq.request.speculation.max_draft_tokens
        n = min(most, self.n_tokens) if allowed is None else min(most, self.n_tokens, allowed)
        return self.speculator.choose(self.seq, range(n), 0) * UNKNOWN_DRAFT if n else b""


def open_speculator(
    setting: str, device: str, max_bytes: int = DEFAULT_BYTES, head: HeadDrafter | None = None, n_ranks: int = 1
) -> "Speculator | None":
    """A speculator with the drafters of a setting: all that there are, or the one that it names. Returns None if there
    are none. head: what the runner has, a head or a draft model. n_ranks: of the worker."""
    drafters: list[Drafter] = []
    if setting == AUTO and device != "cpu":
        if head is not None:
            setting = head.name  # alone: its drafts stay on the device, which then never waits for the host
        elif n_ranks > 1:
            _log.info("no drafts: what they cost a rank group on GPUs was not measured; --speculation names a drafter")
            return None
    if setting in (AUTO, GrammarDrafter.name):
        drafters.append(GrammarDrafter())
    if setting in (AUTO, SuffixDrafter.name):
        if suffix_index.available():
            drafters.append(SuffixDrafter(max_bytes))
        elif setting != AUTO:
            raise BadInput("suffix decoding needs a C compiler: install gcc (or set CC)", param="speculation")
    if head is not None and setting in (AUTO, head.name):
        drafters.append(head)
    if not drafters:
        return None
    if device == "cpu":
        return Speculator(drafters, CPU_MARGINAL)
    return Speculator(drafters, GPU_MARGINAL, GPU_WAIT_S, on_device=True)


class Speculator(Speculation):
    """Drafters are given in the order of how sure they are; a later one goes on where an earlier one ends."""

    def __init__(self, drafters: Many[Drafter], marginal: float, fixed_s: float = 0.0, on_device: bool = False) -> None:
        """on_device: a draft head leaves its drafts there."""
        self.drafters = tuple(drafters)
        self._by_first_cell = tuple((MAX_CELLS * n, drafter) for n, drafter in enumerate(drafters))
        kinds = [isinstance(drafter, GrammarDrafter) for drafter in drafters]
        self._grammar = kinds.index(True) if True in kinds else 0  # whom appended tokens are counted for
        heads = [(n, drafter) for n, drafter in enumerate(drafters) if isinstance(drafter, HeadDrafter)]
        self._head = heads[0] if heads else None  # its place among the drafters, and itself
        self.runs_ahead = on_device and len(drafters) == 1 and self._head is not None
        self.policy = LengthPolicy(self._prior, marginal, 0.0 if self.runs_ahead else fixed_s)
        self._masks: Callable[[int], NDArray[np.uint32] | None] = lambda number: None
        self._drafting: dict[int, _Drafting] = {}  # by sequence number
        self._planned_depths: deque[tuple[int, int]] = deque(maxlen=MAX_IN_FLIGHT)  # numbers of plans, the head's depth
        self._counts: dict[int, tuple[list[int], list[int]]] = {}  # drafted and accepted by position, by drafter
        self._stats: tuple[DraftStats, ...] | None = ()
        self.drafts = False  # the step being planned may draft
        self._n_unasked = 0  # steps since the last one behind which the head was to propose
        self._n_accepted = 0  # since the last step time
        # What `catch_up` counts:
        self._verified: list[tuple[_Drafting, _InFlight, int, int]] = []  # and how many were drafted, and accepted
        self._steps: list[tuple[StepPlan, int, float]] = []  # drafts accepted and seconds
        self._ended: list[Sequence] = []

    def calibrate(self, step_s: Mapping[tuple[int, int], float]) -> None:
        """Take in measured step times, by rows and drafts: see `LengthPolicy.calibrate`."""
        self.policy.calibrate(step_s)

    def follow_grammars(self, grammars: Grammars) -> None:
        """Propose only what grammars allow, and what they force."""
        self._masks = grammars.mask
        for drafter in self.drafters:
            if isinstance(drafter, GrammarDrafter):
                drafter.forced_ids = grammars.forced_ids

    def begin_step(self, n_running: int) -> int:
        """Begin a step in which so many sequences may have a row; returns how many tokens the head is to propose."""
        self.drafts = self.policy.begin_step(n_running)
        if not self.drafts or self._head is None:
            return 0
        place, head = self._head
        depth = self.policy.depth([place * MAX_CELLS + n for n in range(head.depth)])
        self._n_unasked = 0 if depth else self._n_unasked + 1
        self.drafts = len(self.drafters) > 1 or self._n_unasked <= _WAITING_STEPS
        return depth

    def draft(self, seqs: Selection) -> Mapping[int, Proposal | DeviceProposal]:
        """Ask the drafters, one after the other."""
        found: dict[int, Proposal | DeviceProposal] = {}
        if self.runs_ahead:
            depths, sampling = dict(self._planned_depths), seqs.cells(Cell.N_SAMPLING) > 0
            for seq in seqs.where(sampling):
                if n_tokens := depths.get(seq.planned_step, 0):
                    found[seq.number] = DeviceProposal(self, seq, n_tokens)
            seqs = seqs.where(~sampling)
        if len(seqs):
            found.update(self._ask(seqs))
        return found

    def _ask(self, seqs: Selection) -> dict[int, Proposal]:
        """Proposals of the drafters, by sequence number."""
        proposed: dict[int, Proposal] = {}
        for first_cell, drafter in self._by_first_cell:
            for seq, draft in drafter.propose(seqs, proposed):
                cells = [first_cell + cell for cell in draft.cells] if first_cell else draft.cells
                if (known := proposed.get(seq.number)) is not None:
                    known.ids += draft.ids
                    known.cells = [*known.cells, *cells]
                elif not seq.guided or _may_follow(self._masks(seq.number), draft.ids):
                    proposed[seq.number] = Proposal(draft.ids, cells, self, seq)
        return proposed

    def choose(self, seq: Sequence, cells: Many[int], n_guessed: int) -> int:
        """How many tokens after the n_guessed first ones are worth verifying; they are then in flight."""
        state = self._drafting.get(seq.number)
        n_chosen, expected = self.policy.choose(cells, n_guessed, 1.0 if state is None else state.trust)
        if n_chosen:
            if state is None:
                state = self._drafting[seq.number] = _Drafting()
            elif not seq.n_drafting:
                state.in_flight.clear()  # what was never verified
            state.in_flight.append(_InFlight(cells, n_guessed, expected))
        return n_chosen

    def planned(self, plan: StepPlan) -> None:
        """Remember how many tokens the head proposes after the rows of a plan."""
        if self._head is not None:
            self._planned_depths.append((plan.number, plan.depth))

    def take_drafts(self, plan: StepPlan, sampled: Many[Sampled], drafts: Iterable[bytes]) -> None:
        """Keep what the head proposes, or give it up if its numbers are invalid."""
        if self._head is not None and not self._head[1].take(self.core, plan, sampled, drafts):
            kind = "model" if isinstance(self._head[1], ModelDrafter) else "head"
            self._head, self.runs_ahead = None, False
            _log.error("the draft %s gives invalid numbers: it is not used any more", kind)

    def verified(self, seq: Sequence, n_drafted: int, n_accepted: int) -> None:
        """Count what became of the drafts of a sequence's row."""
        state = self._drafting.get(seq.number)
        if state is None or not state.in_flight:
            return
        self._n_accepted += n_accepted
        state.n_drafted += n_drafted
        state.n_drafts_accepted += n_accepted
        self._verified.append((state, state.in_flight.popleft(), n_drafted, n_accepted))

    def catch_up(self) -> None:
        """Learn from verified drafts and step times, and tell the drafters which sequences have ended."""
        for state, draft, n_drafted, n_accepted in self._verified:
            guessed = draft.n_guessed
            state.n_expected = _FADE * state.n_expected + draft.expected
            state.n_accepted = _FADE * state.n_accepted + n_accepted
            state.trust = min(_MOST_TRUST, max(_LEAST_TRUST, (state.n_accepted + 1) / (state.n_expected + 1)))
            cells = draft.cells[: guessed + n_drafted]
            # Where no draft was drawn, the guess may have been wrong: the first of all is taken to be.
            self.policy.rates.add(cells, guessed + n_accepted if n_accepted or not guessed else 0)
            self._count([cell // MAX_CELLS for cell in cells[guessed:]], n_accepted)
        for plan, n_accepted, seconds in self._steps:
            n_rows = plan.n_rows
            if plan.n_tokens - plan.n_drafts == n_rows:  # it has no prompts
                self.policy.measured(n_rows, plan.n_drafts, n_rows + n_accepted, seconds, plan.depth)
        for seq in self._ended:
            for drafter in self.drafters:
                drafter.ended(seq)
        self._verified.clear()
        self._steps.clear()
        self._ended.clear()

    def appended(self, seq: Sequence, n: int) -> None:
        """Count tokens that join the output without a draw: its grammar leaves one each."""
        state = self._drafting.setdefault(seq.number, _Drafting())
        state.n_drafted += n
        state.n_drafts_accepted += n
        self._count([self._grammar] * n, n)

    def _count(self, drafters: list[int], n_accepted: int) -> None:
        """Draft tokens of a row, by the drafter of each."""
        for position, drafter in enumerate(drafters):
            drafted, accepted = self._counts.setdefault(drafter, ([], []))
            while len(drafted) <= position:
                drafted.append(0)
                accepted.append(0)
            drafted[position] += 1
            accepted[position] += position < n_accepted
        self._stats = None

    def usage(self, seq: Sequence) -> DraftUsage:
        """Number of draft tokens of a sequence that were verified, and accepted."""
        state = self._drafting.get(seq.number)
        return DraftUsage(0, 0) if state is None else DraftUsage(state.n_drafted, state.n_drafts_accepted)

    def report(self, load: EngineLoad) -> None:
        """Add draft tokens by drafter and position to a load report."""
        load.drafts = self.stats

    def leave(self, seq: Sequence) -> None:
        """Forget a sequence that has ended; `catch_up` tells the drafters."""
        self._drafting.pop(seq.number, None)
        self._ended.append(seq)

    def purged(self, owner: bytes | None) -> None:
        """Let the drafters forget the replies of an account, or (None) of all."""
        self.catch_up()  # else they would hear of replies later that have ended before
        for drafter in self.drafters:
            drafter.forget(owner)

    def measured(self, plan: StepPlan, seconds: float) -> None:
        """Take in how long a step took."""
        self._steps.append((plan, self._n_accepted, seconds))
        self._n_accepted = 0

    @property
    def stats(self) -> tuple[DraftStats, ...]:
        """Totals by drafter and position."""
        self.catch_up()
        if self._stats is None:
            self._stats = tuple(
                DraftStats(self.drafters[number].name, tuple(drafted), tuple(accepted))
                for number, (drafted, accepted) in sorted(self._counts.items())
            )
        return self._stats

    def _prior(self, cell: int) -> float:
        return self.drafters[cell // MAX_CELLS].prior(cell % MAX_CELLS)


def _may_follow(mask: NDArray[np.uint32] | None, ids: bytes) -> bool:
    """True if the mask, where there is one, allows the first of the tokens."""
    if mask is None:
        return True
    token_id = int.from_bytes(ids[:4], "little")
    return bool(mask[token_id >> 5] >> (token_id & 31) & 1)
