"""Features of the engine beside the core: each is one object whose methods the scheduler calls at fixed moments.

A moment comes once per step or once per event of one sequence, never once per row. The scheduler finds out at start
which feature implements which moment: one that no feature implements costs nothing. A feature keeps its own state, by
the number of the sequence, until `leave`. Threads never call features: they leave notices for `advance`.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Many
from typing import Any, ClassVar, NamedTuple, Protocol

from emberline.engine.core.limits import Limits
from emberline.engine.core.plan import Masks, Row, RowScores, Sampled, StepPlan
from emberline.engine.core.queues import Queues, Selection
from emberline.engine.core.rank import Executor
from emberline.engine.core.sequence import Sequence
from emberline.kv.cache import BlockTable, KVCache, PrefixHit
from emberline.kv.kv_events import TierChanges
from emberline.protocol.errors import EmberlineError
from emberline.protocol.events import DraftUsage, FinishReason, PromptLogprobs
from emberline.protocol.frames import EngineLoad, Vocabulary
from emberline.protocol.request import EngineRequest

NewBlocks = tuple[Sequence, int, int]  # a sequence; the first of its blocks, and the one after the last
Draws = list[tuple[Sequence, list[Sampled]]]  # sequences, and the draws of each that count


class Brought(NamedTuple):
    """Blocks of a sequence's prefix that a feature has put into the device pool for it."""

    blocks: Mapping[str, int]  # by source, as the request's usage names it
    cached: bool  # False: another engine has computed them for this request
    table: BlockTable | None = None  # references to them, which the sequence takes over


class Admitting(Protocol):
    """Admission, as features see it: `AdmissionPolicy`."""

    @property
    def now_s(self) -> float:
        """Time of the step that is planned."""

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens per second, as measured; 0: unknown."""

    def match(self, seq: Sequence) -> PrefixHit:
        """Look up the prefix of a sequence in the cache."""

    def fits(self, seq: Sequence) -> bool:
        """True if there is room for a waiting sequence with all its tokens."""

    def was_refused(self, seq: Sequence) -> bool:
        """True if the sequence did not fit and no block was released since."""

    def would_overtake(self, seq: Sequence) -> bool:
        """True if the first waiting sequence, of a better rank, did not fit: no blocks are taken for this one."""

    def is_computing(self, key: bytes) -> bool:
        """True if a plan in flight computes the block with this content key."""

    def reserved_for_running(self) -> list[int]:
        """Blocks of each group that whoever takes some for others than running sequences must leave."""


class Core(Protocol):
    """The scheduler, as features see it."""

    cache: KVCache
    limits: Limits
    queues: Queues

    @property
    def admission(self) -> Admitting: ...

    def order(self, feature: str, order: Any) -> None:
        """Give an order to the feature's executor on every rank, with a plan of this step or the next one. Any thread
        may call this."""

    def has(self, seq: Sequence) -> bool:
        """True if the sequence has not ended."""

    def sequence_of(self, row: Row) -> Sequence | None:
        """The sequence of a planned row. Returns None if it has left its slot since."""

    def park(self, seq: Sequence, hold: int) -> None:
        """Take a running or waiting sequence out of its queue, with its slot and blocks, until `unpark`."""

    def unpark(self, seq: Sequence, hold: int) -> None:
        """Let a parked sequence wait again."""

    def preempt(self, seq: Sequence) -> None:
        """Take the slot of a running sequence, which waits again; ignore what steps in flight sample for it."""

    def append(self, seq: Sequence, entries: Many[Sampled], finish: FinishReason | None, n_accepted: int) -> None:
        """Add tokens to the output of a sequence, and end it if `finish` says why. n_accepted: drafts among them."""

    def tell_usage(self, seq: Sequence) -> None:
        """Tell the client what was cached of a sequence that does not sample."""

    def tell_prompt(self, seq: Sequence, logprobs: PromptLogprobs) -> None:
        """Tell the client the log-probabilities of the next tokens of its prompt."""

    def end(self, seq: Sequence, finish: FinishReason) -> None:
        """End a sequence without more tokens."""

    def fail(self, seq: Sequence, error: EmberlineError) -> None:
        """End a sequence with an error."""


class Feature:
    """Base class: every moment, none implemented."""

    core: Core
    name: ClassVar[str] = ""  # key of its orders in a plan
    executor: Executor | None = None  # carries out these orders on rank 0
    sources: Many[TierChanges] = ()  # KV events beside those of the device pool
    transfers_kv: ClassVar[bool] = False  # it serves requests that send or await KV

    def attach(self, core: Core) -> None:
        """Keep the scheduler, which calls this once, at start."""
        self.core = core

    def learn(self, vocabulary: Vocabulary) -> None:
        """Take in what tokens stand for."""

    # --- a sequence, from its request to its end ---------------------------------------------------------------------

    def check(self, request: EngineRequest) -> None:
        """Raise an EmberlineError to refuse a new request. If no feature does, `enter` follows at once."""

    def enter(self, seq: Sequence, now_s: float) -> None:
        """Take note of a new sequence, and hold it if it cannot be admitted yet."""

    def queued(self, seq: Sequence) -> None:
        """Take note of a sequence that has begun to wait: new, preempted or no longer parked."""

    def precedes(self, seq: Sequence) -> bool:
        """True if a parked sequence goes first: neither this one nor those after it are admitted."""
        raise NotImplementedError

    def admits(self, seq: Sequence, n_hit: int) -> bool:
        """True if a waiting sequence that fits, with n_hit cached blocks, may be admitted now; others may pass it."""
        raise NotImplementedError

    def gives_back(self, seq: Sequence) -> bool:
        """Give back blocks that are held for a sequence that waits after this one. Returns False if there are none."""
        raise NotImplementedError

    def bring(self, seq: Sequence) -> Brought | None:
        """Say which blocks of a sequence that is being admitted the feature has brought. Returns None if none."""

    def admitted(self, seq: Sequence, n_hit: int) -> None:
        """Take note of a sequence whose table has its n_hit cached blocks; it gets a slot unless it is held now."""

    def chunk(self, plan: StepPlan, seq: Sequence, n: int) -> int:
        """Say how many tokens of a prompt with images, of n that are left or fit, the plan's next chunk may have. It
        must not be 0 in a plan without rows."""
        raise NotImplementedError

    def computed(self, seq: Sequence, n_tokens: int) -> None:
        """Take note of the tokens that steps have computed of a running sequence that does not sample."""

    def published(self, new: Many[NewBlocks]) -> None:
        """Take note of blocks of sequences, which the prefix index has gained. The tables still have them."""

    def discarded(self, seq: Sequence) -> None:
        """Forget the blocks of a sequence, whose content is invalid."""

    def leave(self, seq: Sequence) -> None:
        """Forget a sequence that has ended, and give back what is held for it."""

    # --- a step ------------------------------------------------------------------------------------------------------

    def advance(self, now_s: float, device_waits: bool) -> None:
        """Handle notices and timeouts. device_waits: leave what the next plan does not depend on to `catch_up`."""

    def before_plan(self) -> None:
        """Act on waiting sequences, whose prefixes have been looked up."""

    def planned(self, plan: StepPlan) -> None:
        """Complete a plan whose rows are known, unless all of them are columns and no head drafts after them."""

    def masks(self, plan: StepPlan) -> Masks | None:
        """After the launch of a plan that is `masked`: say which tokens the feature's sequences may sample."""

    def scored(self, plan: StepPlan, scores: Many[RowScores]) -> None:
        """Before a step's draws are absorbed: take in the log-probabilities of prompt tokens that its plan asks for."""

    def absorb(self, draws: Draws) -> None:
        """Take in a step's draws for guided sequences, whose output the feature decides."""

    def catch_up(self) -> None:
        """At the end of a step, while the device computes the next one: do what no plan has to wait for."""

    def purged(self, owner: bytes | None) -> None:
        """Forget what is remembered of the texts of an account, or (None) of all; of sequences that run it is kept."""

    def close(self) -> None:
        """End the threads of the feature, when the engine ends."""
        if self.executor is not None:
            self.executor.close()

    # --- what the engine's owner asks --------------------------------------------------------------------------------

    def busy(self) -> bool:
        """True if the feature has work though there is no sequence."""
        raise NotImplementedError

    def has_notices(self) -> bool:
        """True if threads have left notices, which `advance` is to handle."""
        raise NotImplementedError

    def has_work(self) -> bool:
        """True if the next step has something to do for the feature, though no notice comes."""
        raise NotImplementedError

    def wake_s(self) -> float:
        """Time at which a step is due even if nothing can be computed and no notice comes; inf if never."""
        raise NotImplementedError

    def report(self, load: EngineLoad) -> None:
        """Add the feature's part to a load report."""

    def report_s(self) -> float:
        """Time at which a load report is due though no step was made; inf if nothing has changed."""
        raise NotImplementedError


class Draft(Protocol):
    """Tokens that may follow a sequence."""

    def take(self, most: int) -> bytes:
        """Ids (u32 LE) of the leading tokens, at most `most`, that the sequence's next row is to verify."""


class Speculation(Feature):
    """The feature that drafts: an engine has one at most. Base class: drafts nothing."""

    drafts = False  # the step being planned may have drafts; if False, nothing else is asked for it
    runs_ahead = False  # all drafts are the device's own: it can verify them before the host knows them

    def begin_step(self, n_running: int) -> int:
        """Begin a step in which so many sequences may have a row, and decide whether it `drafts`.

        Returns how many tokens a draft head or draft model is to propose after each row; 0: none, or there is no head.
        """
        return 0

    def draft(self, seqs: Selection) -> Mapping[int, Draft]:
        """Propose tokens for sequences that may have a row with drafts. Returns proposals by sequence number.

        A row may follow a token that is still being sampled: the first tokens that a drafter proposes stand for those,
        and are no part of what the row verifies.
        """
        return {}

    def take_drafts(self, plan: StepPlan, sampled: Many[Sampled], drafts: Iterable[bytes]) -> None:
        """Keep what a draft head proposes after the last token that each sampling row has drawn; before `absorb`."""

    def verified(self, seq: Sequence, n_drafted: int, n_accepted: int) -> None:
        """Count what became of the drafts of a sequence's row. The sequence does not have these tokens yet."""

    def appended(self, seq: Sequence, n: int) -> None:
        """Count tokens that join the output without a draw: its grammar leaves one each."""

    def measured(self, plan: StepPlan, seconds: float) -> None:
        """Take in how long a step took, from the end of the one before it; its drafts were just verified."""

    def usage(self, seq: Sequence) -> DraftUsage:
        """Number of draft tokens of a sequence that were verified, and accepted."""
        return DraftUsage(0, 0)


class Moments:
    """Bound methods of the features that implement each moment."""

    def __init__(self, features: Iterable[Feature]) -> None:
        known = tuple(features)

        def found(name: str) -> tuple[Any, ...]:
            has = (each for each in known if getattr(type(each), name) is not getattr(Feature, name))
            return tuple(getattr(each, name) for each in has)

        self.learn: tuple[Callable[[Vocabulary], None], ...] = found("learn")
        self.check: tuple[Callable[[EngineRequest], None], ...] = found("check")
        self.enter: tuple[Callable[[Sequence, float], None], ...] = found("enter")
        self.queued: tuple[Callable[[Sequence], None], ...] = found("queued")
        self.precedes: tuple[Callable[[Sequence], bool], ...] = found("precedes")
        self.admits: tuple[Callable[[Sequence, int], bool], ...] = found("admits")
        self.gives_back: tuple[Callable[[Sequence], bool], ...] = found("gives_back")
        self.bring: tuple[Callable[[Sequence], Brought | None], ...] = found("bring")
        self.admitted: tuple[Callable[[Sequence, int], None], ...] = found("admitted")
        self.chunk: tuple[Callable[[StepPlan, Sequence, int], int], ...] = found("chunk")
        self.computed: tuple[Callable[[Sequence, int], None], ...] = found("computed")
        self.published: tuple[Callable[[Many[NewBlocks]], None], ...] = found("published")
        self.discarded: tuple[Callable[[Sequence], None], ...] = found("discarded")
        self.leave: tuple[Callable[[Sequence], None], ...] = found("leave")
        self.advance: tuple[Callable[[float, bool], None], ...] = found("advance")
        self.before_plan: tuple[Callable[[], None], ...] = found("before_plan")
        self.planned: tuple[Callable[[StepPlan], None], ...] = found("planned")
        self.masks: tuple[Callable[[StepPlan], Masks | None], ...] = found("masks")
        self.scored: tuple[Callable[[StepPlan, Many[RowScores]], None], ...] = found("scored")
        self.absorb: tuple[Callable[[Draws], None], ...] = found("absorb")
        self.catch_up: tuple[Callable[[], None], ...] = found("catch_up")
        self.purged: tuple[Callable[[bytes | None], None], ...] = found("purged")
        self.busy: tuple[Callable[[], bool], ...] = found("busy")
        self.has_notices: tuple[Callable[[], bool], ...] = found("has_notices")
        self.has_work: tuple[Callable[[], bool], ...] = found("has_work")
        self.wake_s: tuple[Callable[[], float], ...] = found("wake_s")
        self.report: tuple[Callable[[EngineLoad], None], ...] = found("report")
        self.report_s: tuple[Callable[[], float], ...] = found("report_s")
