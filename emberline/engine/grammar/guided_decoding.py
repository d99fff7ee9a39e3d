"""Guided decoding: the grammars of sequences, applied in threads, and the masks of what they may draw next."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

import numpy as np

from emberline.engine.core.feature import Draws, Feature
from emberline.engine.core.plan import Masks, StepPlan
from emberline.engine.core.sequence import Flag, Hold, Sequence
from emberline.engine.grammar import guided_rules
from emberline.engine.grammar.guide_jobs import GuideJob, GuideThreads, GuideTimings
from emberline.engine.grammar.guided_rules import (
    Bits,
    Bound,
    DraftMasks,
    Guide,
    GuidedRun,
    GuidedTokens,
    Guides,
    PendingGuide,
)
from emberline.protocol.errors import BadInput, EmberlineError, Internal
from emberline.protocol.frames import Vocabulary
from emberline.protocol.request import EngineRequest

GRAMMAR_FAILED = "the engine could not apply this request's grammar"
MAX_APPENDED = 15  # tokens, of which a grammar leaves one each, that are appended to those of a step
TOO_SLOW = "the grammar takes too long to apply: use a simpler one, without ambiguous recursion or large counts"

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Guided:
    """The grammar of one sequence. While `job` is set, a thread owns the guide and `Hold.JOB` is set."""

    seq: Sequence
    pending: PendingGuide  # what its guide is made of
    guide: Guide | None = None
    can_close: bool = False  # the output can be completed within max_tokens, and will be
    mask: Bits | None = None  # of the next token; None while a job runs
    draft_masks: list[Bits] = field(default_factory=list)  # after each draft of the row in flight
    forced_ids: bytes = b""  # u32 LE; the usual tokens of the text that must follow, for a drafter
    job: GuideJob | None = None
    cpu_s: float = 0.0  # of all jobs


class GuidedDecoding(Feature):
    """Owns the grammars of sequences, from compilation to the end of the reply.

    A sequence with a job is not planned. What a step in flight samples for it had no mask and is ignored.
    """

    def __init__(
        self,
        grammars: Guides,
        drafts: bool = False,
        appends: bool = False,
        appended: Callable[[Sequence, int], None] | None = None,
        threads: GuideThreads | None = None,
    ) -> None:
        """drafts: forced tokens are wanted as drafts. appends: where a mask leaves one token, it is appended without a
        draw, and `appended` is told how many were."""
        self.grammars = grammars
        self._drafts, self._appends, self._appended = drafts, appends, appended
        self._threads = GuideThreads(GuideTimings()) if threads is None else threads
        self._timings = self._threads.timings
        self._checked: PendingGuide | None = None  # of the request that `check` has seen last
        self._guided: dict[int, Guided] = {}  # by sequence number
        self._compiling: dict[int, Guided] = {}  # those whose guide is not bound yet
        self._open: dict[int, Guided] = {}  # those with a job

    def close(self) -> None:
        """End the compilation of grammars."""
        self.grammars.close()

    @property
    def n_compiling(self) -> int:
        """Number of sequences whose grammar is being compiled."""
        return len(self._compiling)

    @property
    def jobs(self) -> list[GuideJob]:
        """Jobs that were not taken in yet."""
        return [guided.job for guided in self._open.values() if guided.job is not None]

    def mask(self, number: int) -> Bits | None:
        """The tokens that a sequence may draw next. Returns None if it has no grammar, or its grammar is busy."""
        guided = self._guided.get(number)
        return None if guided is None else guided.mask

    def forced_ids(self, number: int) -> bytes:
        """The usual tokens (u32 LE) of the text that must follow a sequence's output; empty if several texts may."""
        guided = self._guided.get(number)
        return b"" if guided is None else guided.forced_ids

    # --- moments ----------------------------------------------------------------------------------------------------

    def learn(self, vocabulary: Vocabulary) -> None:
        """Take in what tokens stand for."""
        self.grammars.learn(vocabulary)

    def check(self, request: EngineRequest) -> None:
        """Begin to compile the grammar of a request that will sample."""
        asks = request.grammar and request.push is None
        self._checked = self.grammars.request(request.grammar) if asks else None

    def enter(self, seq: Sequence, now_s: float) -> None:
        """Hold a sequence until its grammar is compiled."""
        if self._checked is not None:
            self._guided[seq.number] = self._compiling[seq.number] = Guided(seq, self._checked)
            seq.holds |= Hold.GRAMMAR

    def advance(self, now_s: float, device_waits: bool) -> None:
        """Bind grammars that are compiled now; take in tokens that no step has waited for."""
        for guided in self._compiling.values():
            if guided.job is None and guided.pending.ready:
                self._bind(guided)
        if self._open:
            self._threads.replace_stuck()
            ended = [each for each in self._open.values() if each.job is not None and (each.job.done or each.job.stuck)]
            for guided in ended:
                self._take_job(guided)

    def planned(self, plan: StepPlan) -> None:
        """Say whether some row samples under a grammar."""
        guided = self._guided
        if guided:
            plan.masked |= any(row.samples and row.number in guided for row in plan.others)

    def masks(self, plan: StepPlan) -> Masks | None:
        """Masks of the draws. Returns None if no row has a grammar. Draws after a forbidden draft have empty masks."""
        if plan.n_drafting:
            self._follow_drafts(plan)
        places: list[int] = []
        bits: list[Bits] = []
        for row, place in zip(plan.others, plan.first_draws()[0]):
            guided = self._guided.get(row.number) if row.samples else None
            if guided is not None and guided.mask is not None and guided.seq.admission == row.admission:
                places.append(place)
                bits.append(guided.mask)
                if row.draft_ids:
                    places += range(place + 1, place + 1 + row.n_drafts)
                    bits += guided.draft_masks
                    bits += [np.zeros_like(guided.mask)] * (row.n_drafts - len(guided.draft_masks))
                    guided.draft_masks = []
        return Masks(places, np.stack(bits)) if places else None

    def absorb(self, draws: Draws) -> None:
        """Let grammars take in sampled tokens, as far as that is done in time for the next step."""
        taking = [self._guided[seq.number] for seq, _ in draws]
        for guided, (seq, run) in zip(taking, draws):
            # A row in flight samples the next token already; a draw also tells the probability that a client asked for.
            most = MAX_APPENDED if self._appends and not seq.n_sampling and seq.may_append else 0
            assert guided.guide is not None
            tokens = GuidedRun(seq, guided.guide, guided.can_close, self.core.limits.eos_ids)
            self._start(guided, partial(tokens.take, run, most, self._drafts), seq.slow)
        self._wait(taking)
        for guided in taking:
            if guided.job is not None and guided.job.done:
                self._take_job(guided)
        for guided in taking:
            if guided.job is not None and guided.seq.n_sampling:
                self.core.preempt(guided.seq)  # a step in flight samples for it without a mask: that is ignored

    def leave(self, seq: Sequence) -> None:
        """Forget the grammar of a sequence that has ended; a thread may still be at it."""
        for known in (self._guided, self._compiling, self._open):
            known.pop(seq.number, None)

    def wake_s(self) -> float:
        """Now, while a grammar is being compiled."""
        return 0.0 if self._compiling else inf

    # --- jobs -------------------------------------------------------------------------------------------------------

    def _bind(self, guided: Guided) -> None:
        """Start the job from whose end on the sequence has a guide and a mask."""
        seq, pending, eos_ids, drafts = guided.seq, guided.pending, self.core.limits.eos_ids, self._drafts
        slow = bool(seq.request.output_ids)  # to be accepted first
        self._start(guided, lambda: guided_rules.bind(seq, pending.guide(), eos_ids, drafts), slow)

    def _follow_drafts(self, plan: StepPlan) -> None:
        """Let the grammars of the plan's rows go along their drafts, as far as a step may wait for that."""
        following: list[Guided] = []
        eos_ids = self.core.limits.eos_ids
        for row in plan.others:
            guided = self._guided.get(row.number) if row.draft_ids else None
            if guided is None or guided.seq.admission != row.admission or guided.seq.slow:
                continue
            seq, guide, mask = guided.seq, guided.guide, guided.mask
            if guide is not None and mask is not None:
                self._start(guided, partial(guided_rules.follow, seq, guide, mask, row.draft_ids, eos_ids), slow=False)
                following.append(guided)
        self._wait(following)
        for guided in following:
            assert guided.job is not None
            if guided.job.done and guided.job.error is None:
                guided.draft_masks = self._result(guided).after
            else:
                self.core.preempt(guided.seq)  # what the step samples for it is ignored

    def _take_job(self, guided: Guided) -> None:
        """Take in what an ended job has found out."""
        seq = guided.seq
        try:
            result = self._result(guided)
        except EmberlineError as error:
            self.core.fail(seq, error)
            return
        if isinstance(result, Bound):
            guided.guide, guided.can_close, guided.forced_ids = result.guide, result.can_close, result.forced_ids
            del self._compiling[seq.number]
            seq.set_flag(Flag.GUIDED, True)
            seq.holds &= ~Hold.GRAMMAR
        elif isinstance(result, GuidedTokens):
            guided.forced_ids = result.forced_ids
            seq.n_appended = result.n_appended
            seq.set_flag(Flag.THINKING, result.limits_thinking)
            if result.n_appended and self._appended is not None:
                self._appended(seq, result.n_appended)
            self.core.append(seq, result.entries, result.finish, result.n_accepted)
        # Draft masks come too late here: their row was ignored.

    def _result(self, guided: Guided) -> Any:
        """The record of an ended job, whose mask is the sequence's from now on. Raises the error of the request."""
        seq, job = guided.seq, guided.job
        assert job is not None
        guided.job = None
        del self._open[seq.number]
        seq.holds &= ~Hold.JOB
        if not job.done:
            raise BadInput(TOO_SLOW, param="grammar")
        seq.set_flag(Flag.SLOW, job.cpu_s > self._timings.slow_cpu_s)
        if job.error is not None:
            raise guide_failed(guided, job.error)
        guided.mask = job.result.mask
        if isinstance(job.result, DraftMasks):  # drafts are the engine's idea: their time is not the request's
            return job.result
        guided.cpu_s += job.cpu_s
        if guided.cpu_s > self._timings.cpu_limit_s(seq.n_output):
            extra = {"request_id": seq.id, "grammar": guided.pending.digest, "cpu_s": round(guided.cpu_s, 2)}
            _log.warning("a grammar is too slow", extra=extra)
            raise BadInput(TOO_SLOW, param="grammar")
        return job.result

    def _start(self, guided: Guided, work: Callable[[], Any], slow: bool) -> None:
        """Start a job. slow: no step waits for it."""
        guided.job = self._threads.start(work, slow)
        guided.mask = None
        guided.seq.holds |= Hold.JOB
        self._open[guided.seq.number] = guided

    def _wait(self, seqs: list[Guided]) -> None:
        """Wait for the jobs of these, as long as a step may."""
        if n_quick := sum(not guided.seq.slow for guided in seqs):
            self._threads.wait(n_quick)


def guide_failed(guided: Guided, error: Exception) -> EmberlineError:
    """The error to report to the client: its own as it is, any other as an internal one."""
    extra = {"request_id": guided.seq.id, "grammar": guided.pending.digest}
    if isinstance(error, EmberlineError):
        _log.warning("grammar failed: %s", error.message, extra=extra)
        return error
    _log.error("grammar failed", exc_info=error, extra=extra)
    return Internal(GRAMMAR_FAILED)
