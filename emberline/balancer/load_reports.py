"""What an endpoint says of its load, and how far that is believed.

Our own account is exact and at once, but blind to what other cores send and to how far the engine has come. The
endpoint's report corrects it in just these two: work and streams that are not ours, and progress on the prompt that is
being computed. So nothing counts twice, and a report can take off no more than that one prompt.
"""

import math

from emberline.balancer.ledger import Account, Charge
from emberline.protocol.frames import EngineLoad

SETTLE_S = 0.05  # a request may take so long from us to the endpoint's own account
STALE_S = 5.0  # what others had there, without a newer report
DISTRUST_S = 60.0  # in which only our own account counts, after a report that cannot be
STUCK_S = 2.0  # prompts of ours are there, and the endpoint keeps saying that it has nothing
MOST_S = 60.0  # of other people's work that is believed
MOST_SEQUENCES = 1 << 20
MOST_TOKENS = 1 << 24  # of a sequence


class LoadReports:
    __slots__ = (
        "_denied_s",
        "_foreign_active",
        "_foreign_least",
        "at_s",
        "distrusted_until_s",
        "done_tokens",
        "foreign_tokens",
        "lies",
        "load",
        "problem",
    )

    def __init__(self) -> None:
        self.load = EngineLoad()  # the last that could be believed,
        self.at_s = -math.inf  # and when it came
        self.foreign_tokens = 0  # prompt tokens that others wait for
        self.done_tokens = 0  # of our first prompt there
        self.lies = 0
        self.problem = ""  # what was wrong with the last that could not be believed
        self.distrusted_until_s = -math.inf
        self._foreign_active = self._foreign_least = 0
        self._denied_s: float | None = None  # since when it says that it has nothing although we wait

    def hear(self, load: EngineLoad, account: Account, now_s: float) -> bool:
        """Whether the report can be believed."""
        problem = implausible(load) or self._denies(load, account, now_s)
        if problem:
            self.lies += 1
            self.problem = problem
            self.distrusted_until_s = now_s + DISTRUST_S
        if self.doubted(now_s):
            self.foreign_tokens = self.done_tokens = self._foreign_active = self._foreign_least = 0
            return not problem
        self.load, self.at_s = load, now_s
        known, unsure = _settled(account, now_s)
        self._foreign_least = _foreign(load, account)
        self._foreign_active = _foreign(load, account, unsure)
        ahead = load.waiting_tokens - known
        self.foreign_tokens = max(0, ahead) if self._foreign_active else 0
        first = next(iter(account.pending.values()), None)
        self.done_tokens = min(max(0, -ahead), first.uncached_tokens) if first is not None else 0
        return True

    def prefilled(self, charge: Charge) -> None:
        """One of our prompts is done; what had been done of it went with it. It is there: so if the last report may
        have counted it, it has, and it was not another's."""
        self.done_tokens = max(0, self.done_tokens - charge.uncached_tokens)
        if not charge.batch and self.at_s - SETTLE_S < charge.at_s <= self.at_s:
            self._foreign_active = max(self._foreign_least, self._foreign_active - _n(charge))

    def foreign_s(self, now_s: float, token_s: float) -> float:
        """What others' prompts there still take: they are worked off while we look on."""
        if not self.foreign_tokens:
            return 0.0
        return max(0.0, min(MOST_S, self.foreign_tokens * token_s) - (now_s - self.at_s))

    def foreign_active(self, now_s: float) -> int:
        return self._foreign_active if self._foreign_active and self.is_fresh(now_s) else 0

    def is_fresh(self, now_s: float) -> bool:
        return now_s - self.at_s < STALE_S

    def share(self, own_tokens: int) -> float:
        """Of the endpoint's time for prompts, what it spends on ours."""
        return own_tokens / (own_tokens + self.foreign_tokens) if own_tokens > 0 else 1.0

    def doubted(self, now_s: float) -> bool:
        return now_s < self.distrusted_until_s

    def forget(self) -> None:
        """The endpoint begins anew."""
        self.load, self._denied_s = EngineLoad(), None
        self.foreign_tokens = self.done_tokens = self._foreign_active = self._foreign_least = 0

    def _denies(self, load: EngineLoad, account: Account, now_s: float) -> str:
        first = next(iter(account.pending.values()), None)
        if load.running or load.waiting or first is None or now_s - first.at_s < STUCK_S:
            self._denied_s = None
            return ""
        if self._denied_s is None:
            self._denied_s = now_s
        if now_s - max(self._denied_s, first.at_s) < STUCK_S:
            return ""
        return "it says that it has no work, and has had prompts of ours for seconds"


def implausible(load: EngineLoad) -> str:
    """Why a report cannot be true by itself; empty when it can."""
    counts = (load.running, load.waiting, load.waiting_tokens, load.kv_used_blocks, load.kv_total_blocks)
    batch = (load.running_batch, load.waiting_batch)
    if min(*counts, *batch, load.steps, load.prompt_tokens, load.cached_tokens, load.output_tokens) < 0:
        return "a count is negative"
    if load.running_batch > load.running or load.waiting_batch > load.waiting:
        return "more of its work is queued work than there is"
    sequences = load.running + load.waiting
    if sequences > MOST_SEQUENCES or load.waiting_tokens > sequences * MOST_TOKENS:
        return "it claims more work than an engine can have"
    if load.kv_used_blocks > load.kv_total_blocks:
        return "more blocks are in use than there are"
    if load.utilisation is not None and not 0 <= load.utilisation <= 1:
        return "its utilisation is not between 0 and 1"
    return ""


def _foreign(load: EngineLoad, account: Account, unsure: int = 0) -> int:
    """Sequences that are not ours and do not make room; `unsure`: of ours, those that may not be among them yet.
    Queued work makes room, whoever sent it. So ours needs no such doubt, and theirs, where it is told, does not count.
    """
    theirs = load.running + load.waiting - account.active - account.pushes + unsure
    queued = load.running_batch + load.waiting_batch - account.batch_active
    return max(0, theirs - max(0, queued))


def _settled(account: Account, now_s: float) -> tuple[int, int]:
    """Our prompt tokens that the endpoint must know of by now, and the sequences that it may not know of yet."""
    tokens, unsure = account.prefill_tokens, 0
    for charge in reversed(account.pending.values()):
        if charge.at_s <= now_s - SETTLE_S:
            break
        tokens -= charge.uncached_tokens
        unsure += 0 if charge.batch else _n(charge)
    return tokens, unsure


def _n(charge: Charge) -> int:
    return charge.n if charge.decode is charge.prefill else 1
