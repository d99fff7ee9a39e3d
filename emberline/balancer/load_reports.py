"""Load reports of one worker: checked for plausibility, and used only for what the core cannot know itself.

The ledger is exact and immediate, but does not see what other cores send, how far a worker has come, nor how much KV
its sequences share. A report corrects just these: sequences and prompt tokens that are not ours, progress on our first
pending prompt and on replies, and the KV in use. So nothing counts twice, and a report can take off no more than that
one prompt.
"""

import math
from dataclasses import dataclass, field

from emberline.balancer.ledger import PROGRESS_UNIT, InFlightLoad, InFlightRequest
from emberline.protocol.frames import MAX_PROBLEM_CHARS, EngineLoad

SETTLE_S = 0.05  # a dispatched request may take so long to appear in the worker's reports
STALE_S = 5.0  # after which a report says nothing about other cores any more
REJECT_S = 60.0  # reports are ignored for so long after an implausible one
STUCK_S = 2.0  # a worker that has pending prompts of ours may report no work at all for so long
MAX_FOREIGN_S = 60.0  # of other cores' work that is believed
MAX_SEQUENCES = 1 << 20
MAX_TOKENS = 1 << 24  # of a sequence


@dataclass(slots=True, eq=False)
class LoadReports:
    load: EngineLoad = field(default_factory=EngineLoad)  # the last accepted report,
    at_s: float = -math.inf  # and when it came
    foreign_tokens: int = 0  # prompt tokens of other cores that are still to be computed
    done_tokens: int = 0  # computed of our first pending prompt
    progress: int = 0  # thousandths of a token that a sequence which always ran has generated; never falls
    n_rejected: int = 0
    problem: str = ""  # what was wrong with the last rejected report
    _rejected_until_s: float = -math.inf
    _foreign_active: int = 0
    _foreign_least: int = 0
    _denied_s: float | None = None  # since when it reports no work although prompts of ours are pending

    def accept(self, load: EngineLoad, in_flight: InFlightLoad, now_s: float) -> bool:
        """False: the report is implausible, and rejected. `in_flight`: what we know to be on the worker."""
        problem = implausible(load) or self._denies_work(load, in_flight, now_s)
        if problem:
            self.n_rejected += 1
            self.problem = problem
            self._rejected_until_s = now_s + REJECT_S
        if self.rejecting(now_s):
            self.foreign_tokens = self.done_tokens = self._foreign_active = self._foreign_least = 0
            return not problem
        if self.load.running and load.running and self.is_fresh(now_s):
            n_tokens = max(0, load.output_tokens - self.load.output_tokens)
            self.progress += n_tokens * PROGRESS_UNIT // load.running
        self.load, self.at_s = load, now_s
        known_tokens, n_unsettled = _settled(in_flight, now_s)
        self._foreign_least = _foreign(load, in_flight)
        self._foreign_active = _foreign(load, in_flight, n_unsettled)
        ahead = load.waiting_tokens - known_tokens
        self.foreign_tokens = max(0, ahead) if self._foreign_active else 0
        first = next(iter(in_flight.pending.values()), None)
        self.done_tokens = min(max(0, -ahead), first.uncached_tokens) if first is not None else 0
        return True

    def prefilled(self, record: InFlightRequest, n_sequences: int) -> None:
        """One of our prompts is done, and what was reported as done belonged to it. If the last report may or may not
        have counted the request, it did: so the request was not another core's."""
        self.done_tokens = max(0, self.done_tokens - record.uncached_tokens)
        if not record.is_job and self.at_s - SETTLE_S < record.dispatched_s <= self.at_s:
            self._foreign_active = max(self._foreign_least, self._foreign_active - n_sequences)

    def foreign_s(self, now_s: float, token_s: float) -> float:
        """Seconds that other cores' prompts still take; they are worked off as time passes."""
        if not self.foreign_tokens:
            return 0.0
        return max(0.0, min(MAX_FOREIGN_S, self.foreign_tokens * token_s) - (now_s - self.at_s))

    def foreign_active(self, now_s: float) -> int:
        return self._foreign_active if self._foreign_active and self.is_fresh(now_s) else 0

    def is_fresh(self, now_s: float) -> bool:
        return now_s - self.at_s < STALE_S

    def own_share(self, own_tokens: int) -> float:
        """Return the share of the worker's prefill time that this core's prompts get."""
        return own_tokens / (own_tokens + self.foreign_tokens) if own_tokens > 0 else 1.0

    def rejecting(self, now_s: float) -> bool:
        return now_s < self._rejected_until_s

    def reset(self) -> None:
        """The worker starts anew."""
        self.load, self._denied_s = EngineLoad(), None
        self.foreign_tokens = self.done_tokens = self._foreign_active = self._foreign_least = 0

    def _denies_work(self, load: EngineLoad, in_flight: InFlightLoad, now_s: float) -> str:
        # A prompt for another worker counts as pending until that one's first token: this one may be done with it.
        first = next((record for record in in_flight.pending.values() if record.decode is in_flight), None)
        if load.running or load.waiting or first is None or now_s - first.dispatched_s < STUCK_S:
            self._denied_s = None
            return ""
        if self._denied_s is None:
            self._denied_s = now_s
        if now_s - max(self._denied_s, first.dispatched_s) < STUCK_S:
            return ""
        return "it reports no work, but has had prompts of ours for seconds"


def implausible(load: EngineLoad) -> str:
    """Why a report cannot be true by itself; empty when it can."""
    counts = (load.running, load.waiting, load.waiting_tokens, load.kv_used_blocks, load.kv_total_blocks)
    batch = (load.running_batch, load.waiting_batch)
    if min(*counts, *batch, load.steps, load.prompt_tokens, load.cached_tokens, load.output_tokens) < 0:
        return "a count is negative"
    if load.running_batch > load.running or load.waiting_batch > load.waiting:
        return "it counts more jobs than sequences"
    sequences = load.running + load.waiting
    if sequences > MAX_SEQUENCES or load.waiting_tokens > sequences * MAX_TOKENS:
        return "it claims more work than an engine can have"
    if load.kv_used_blocks > load.kv_total_blocks:
        return "more KV blocks are in use than there are"
    if load.utilisation is not None and not 0 <= load.jobs_utilisation <= load.utilisation <= 1:
        return "its utilisation is not between 0 and 1"
    if not 0 <= load.busy_s < math.inf:
        return "the time it has computed is not a number of seconds"
    if len(load.problem) > MAX_PROBLEM_CHARS:
        return "its problem is too long a text"
    return ""


def _foreign(load: EngineLoad, in_flight: InFlightLoad, n_unsettled: int = 0) -> int:
    """Sequences of other cores that are not preemptible; `n_unsettled`: of ours, those that the report may not count
    yet. All jobs are preemptible: ours need no such correction, and those of other cores do not count."""
    theirs = load.running + load.waiting - in_flight.active - in_flight.pushes + n_unsettled
    their_jobs = load.running_batch + load.waiting_batch - in_flight.batch_active
    return max(0, theirs - max(0, their_jobs))


def _settled(in_flight: InFlightLoad, now_s: float) -> tuple[int, int]:
    """Our prompt tokens that the report must count, and the number of our sequences that it may not count yet."""
    tokens, n_unsettled = in_flight.prefill_tokens, 0
    for record in reversed(in_flight.pending.values()):
        if record.dispatched_s <= now_s - SETTLE_S:
            break
        tokens -= record.uncached_tokens
        n_unsettled += 0 if record.is_job else record.n_on(in_flight)
    return tokens, n_unsettled
