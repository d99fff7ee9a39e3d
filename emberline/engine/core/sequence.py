"""One request in the engine: plain data that only the scheduler and its policies change."""

import secrets
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from math import inf
from typing import Literal, NamedTuple

from emberline.engine.core.limits import Limits
from emberline.engine.core.rows import Cell, Rows
from emberline.kv.cache import BlockTable, PrefixHit
from emberline.protocol import block_hash
from emberline.protocol.block_hash import BLOCK_TOKENS
from emberline.protocol.events import DraftUsage, Usage
from emberline.protocol.request import EngineRequest, Priority

NO_SLOT = -1
ALL_REUSABLE = 1 << 62
_U64 = (1 << 64) - 1


SequenceState = Literal["running", "waiting", "transferring", "fetching"]


class Hold:
    """Reasons why a sequence cannot be admitted: bits of `Sequence.holds`."""

    LOOK_UP = 1  # the cache was not asked for all of its prefix yet
    GRAMMAR = 2  # its grammar is being compiled
    JOB = 4  # a thread takes in what was drawn for it: tokens may still join it
    TRANSFER = 8  # its KV is sent to another engine, or received from one
    FETCH = 16  # its KV is read from tiers
    PARKED = TRANSFER | FETCH  # it is in neither queue


class Flag:
    """Unusual properties of a sequence: bits of `Sequence.flags`. Most sequences have none."""

    BANS = 1  # some tokens must not be sampled, at least for some time
    AWAITS_LAST = 2  # which tokens are banned next depends on the last one
    LOGPROBS = 4  # its client wants probabilities
    DRAFT_REPORTS = 8  # every delta says what became of drafts so far
    THINKING = 16  # a thinking limit may still apply
    GUIDED = 32  # a feature decides what it may sample and what becomes of its draws
    SLOW = 64  # that feature is slow: no step waits for it, and no row is planned ahead of it
    PREFILL_ONLY = 128  # nothing is sampled after its last token
    NEW = 256  # it has no token of its own yet
    UNTRIED = 512  # no step with it has succeeded yet
    FAILED = 1024  # a step with it has failed since one succeeded
    NO_DRAFTS = 2048  # its request forbids drafts
    MASKED = 4096  # its request allows some tokens only: each of its draws has a mask
    IMAGES = 8192  # its prompt has images: a feature bounds its chunks
    SUSPECT = UNTRIED | FAILED
    PLAIN = LOGPROBS | DRAFT_REPORTS | NO_DRAFTS | IMAGES  # flags that make no difference to a plan


class SequenceSnapshot(NamedTuple):
    """A sequence as plain data, for tests and benchmarks."""

    id: str
    number: int  # order of arrival
    state: SequenceState
    requested_class: Priority
    effective_class: Priority  # a better one than requested once the sequence has starved
    ids: bytes  # prompt and output, u32 LE
    n_computed: int  # tokens whose KV is in the blocks, or will be when the planned steps are done
    blocks: tuple[tuple[int, ...], ...]  # block table of each KV group; NULL_BLOCK where a window has passed
    n_unpublished: int  # full blocks that are computed and not in the prefix index


class _Progress:
    """A property of a running sequence that is kept in a row of `Rows`; 0 while the sequence waits."""

    def __init__(self, row: int) -> None:
        self._row = row

    def __get__(self, seq: "Sequence", kind: type) -> int:
        return seq.rows.views[self._row][seq.slot]

    def __set__(self, seq: "Sequence", value: int) -> None:
        seq.rows.views[self._row][seq.slot] = value


@dataclass(slots=True, eq=False)
class Sequence:
    """One request, from its arrival to its end."""

    n_computed = _Progress(
        Cell.N_COMPUTED
    )  # tokens whose KV is in the table, or will be when the planned steps are done
    n_sampling = _Progress(Cell.N_SAMPLING)  # tokens that steps in flight sample, at least
    n_drafting = _Progress(Cell.N_DRAFTING)  # drafts of its rows in flight, with which it samples more
    n_done = _Progress(Cell.N_DONE)  # tokens that absorbed steps have computed; full blocks of them can be published
    admission = _Progress(Cell.ADMISSION)  # serial number of its stay in the slot; -1: it has none
    planned_step = _Progress(Cell.PLANNED)  # number of the last plan that it has a row in
    request: EngineRequest
    number: int  # order of arrival, unique in this engine's life
    limits: InitVar[Limits]
    fingerprint: InitVar[str]  # of the model
    table: BlockTable
    rows: Rows  # where its progress is while it runs
    now_s: InitVar[float]
    arrival_step: int = 0  # steps planned before it arrived
    first_token_step: float = inf
    queued_step: int = 0  # when it last joined the waiting queue
    seed: int = field(init=False)
    most_tokens: int = field(init=False)  # of prompt and reply, resumed tokens included
    stop_ids: frozenset[int] = field(init=False)  # end tokens included, unless ignored
    arrived_s: float = field(init=False)  # on the monotonic clock
    waited_s: float = 0.0  # from its arrival to its first admission
    n_prompt: int = field(init=False)
    kept_ids: bytearray = field(init=False)  # prompt and output, u32 LE, without what `rows` has of them
    keys: list[bytes] = field(init=False)  # content keys of the full blocks of ids, as far as they are computed
    extras: Mapping[int, bytes] = field(init=False)  # what else the keys of some blocks depend on
    effective_class: Priority = field(init=False)  # its priority class, or a better one once it has starved
    flags: int = field(init=False)  # bits of Flag
    hit: PrefixHit = field(default_factory=PrefixHit)  # what the cache had of it when it was last asked
    holds: int = Hold.LOOK_UP  # bits of Hold: it is not admitted before none is left
    n_received: int = 0  # tokens whose KV a feature keeps in the device pool until it is admitted
    n_prefilled: int = 0  # prompt tokens whose KV it has had in its table, before it was last preempted
    slot: int = NO_SLOT
    last_planned: int = -1  # number of the last plan that it had a row in before it was preempted
    cached_by_tier: dict[str, int] | None = None  # set at first admission
    n_appended: int = 0  # tokens at the end of its output that a feature has appended without a draw
    n_reusable: int = ALL_REUSABLE  # leading tokens whose KV it may find in a cache; it computes the others itself

    def __post_init__(self, limits: Limits, fingerprint: str, now_s: float) -> None:
        request, sampling = self.request, self.request.sampling
        self.arrived_s = now_s
        self.effective_class = request.priority
        self.seed = secrets.randbits(64) if sampling.seed is None else sampling.seed & _U64
        self.table.owner = block_hash.root(fingerprint, request.salt), block_hash.session_digest(request.session)
        self.n_prompt = len(request.prompt_ids) // 4
        self.most_tokens = self.n_prompt + limits.max_output(request)
        self.stop_ids = frozenset(sampling.stop_ids + (() if sampling.ignore_eos else limits.eos_ids))
        self.flags = (
            Flag.BANS * (sampling.min_tokens > 0 or bool(sampling.bad_ids))
            | Flag.AWAITS_LAST * any(len(word) > 4 for word in sampling.bad_ids)
            | Flag.LOGPROBS * (sampling.logprobs is not None)
            | Flag.DRAFT_REPORTS * request.speculation.report
            | Flag.NO_DRAFTS * (request.speculation.max_draft_tokens == 0)
            | Flag.MASKED * bool(sampling.allowed_ids)
            | Flag.NEW
            | Flag.UNTRIED
        )
        self.kept_ids = bytearray(request.prompt_ids + request.output_ids)
        self.keys, self.extras = block_hash.split(request.keys), block_hash.NO_EXTRAS
        if request.images:
            self.extras = block_hash.extras_at((image.start, image.digest) for image in request.images)

    def snapshot(self) -> SequenceSnapshot:
        """The sequence as plain data."""
        return SequenceSnapshot(
            id=self.id,
            number=self.number,
            state=self.state,
            requested_class=self.request.priority,
            effective_class=self.effective_class,
            ids=bytes(self.ids),
            n_computed=self.n_computed,
            blocks=tuple(tuple(held.blocks) for held in self.table.groups),
            n_unpublished=self.n_done // BLOCK_TOKENS - self.table.n_published,
        )

    @property
    def id(self) -> str:
        """Id of its request."""
        return self.request.id

    @property
    def ids(self) -> bytearray:
        """Prompt and output (u32 LE)."""
        if self.slot != NO_SLOT and not self.flags & Flag.GUIDED:  # a thread may read one whose slot goes
            self.kept_ids += self.rows.take_recent(self.slot)
        return self.kept_ids

    @property
    def root_key(self) -> bytes:
        """Root of its chain of content keys."""
        return self.table.owner[0]

    @property
    def session_digest(self) -> bytes:
        """Digest of the client's session name; empty if it sent none."""
        return self.table.owner[1]

    @property
    def deadline_s(self) -> float | None:
        """When it must have ended, on the monotonic clock. Returns None if it may take any time."""
        limit_s = self.request.deadline_s
        return None if limit_s is None else self.arrived_s + limit_s

    @property
    def max_tokens(self) -> int:
        """Maximum tokens of its reply, resumed tokens included."""
        return self.most_tokens - self.n_prompt

    @property
    def samples(self) -> bool:
        """True if a token is sampled after its last one."""
        return not self.flags & Flag.PREFILL_ONLY

    @property
    def guided(self) -> bool:
        """True if a feature decides what it may sample and what becomes of its draws."""
        return self.flags & Flag.GUIDED != 0

    @property
    def slow(self) -> bool:
        """True if that feature is slow: no step waits for it, and no row is planned ahead of it."""
        return self.flags & Flag.SLOW != 0

    @property
    def limits_thinking(self) -> bool:
        """True if a thinking limit may still apply."""
        return self.flags & Flag.THINKING != 0

    def set_flag(self, flag: int, value: bool) -> None:
        """Set or clear flags."""
        self.flags = self.flags | flag if value else self.flags & ~flag
        if self.slot != NO_SLOT:
            self.rows.views[Cell.FLAGS][self.slot] = self.flags

    @property
    def suspicion(self) -> int:
        """0: a step with it succeeded; 1: it has not been in one; 2: one with it failed since."""
        return 2 if self.flags & Flag.FAILED else self.flags // Flag.UNTRIED & 1

    @property
    def n_transferable(self) -> int:
        """Blocks of the prompt that another engine can compute: the last token is computed where the reply is."""
        return (self.n_prompt - 1) // BLOCK_TOKENS

    @property
    def max_cached(self) -> int:
        """Blocks that a prefix hit may have: at least one token must be computed, for its logits."""
        return min(self.n_tokens - self.samples, self.n_reusable) // BLOCK_TOKENS

    @property
    def state(self) -> SequenceState:
        """The queue that holds the sequence, or why none does."""
        if self.is_parked:
            return "transferring" if self.holds & Hold.TRANSFER else "fetching"
        return "waiting" if self.slot == NO_SLOT else "running"

    @property
    def is_parked(self) -> bool:
        """True if it is neither waiting nor running."""
        return self.holds & Hold.PARKED != 0

    @property
    def n_prefill(self) -> int:
        """Tokens to compute before the next one is sampled."""
        return max(0, self.n_due - 1) if self.samples else self.n_due  # none are due: its grammar is late

    @property
    def rank(self) -> tuple[int, int]:
        """Priority class, then arrival; smaller goes first."""
        return self.effective_class, self.number

    @property
    def n_tokens(self) -> int:
        if self.slot == NO_SLOT or self.flags & Flag.GUIDED:  # guided ones, which threads read, keep all themselves
            return len(self.kept_ids) >> 2
        return self.rows.views[Cell.N_KNOWN][self.slot]

    @property
    def n_due(self) -> int:
        """Tokens to compute, those still being sampled included."""
        return self.n_tokens + self.n_sampling - self.n_computed

    @property
    def may_append(self) -> bool:
        """True if tokens may join the output without a draw: no probabilities are reported, and drafts are allowed."""
        return self.request.sampling.logprobs is None and self.request.speculation.max_draft_tokens != 0

    @property
    def n_uncached(self) -> int:
        """Tokens that were not in the cache when it was first admitted."""
        return self.n_tokens - sum((self.cached_by_tier or {}).values())

    @property
    def n_output(self) -> int:
        return self.n_tokens - self.n_prompt

    @property
    def n_output_left(self) -> int:
        return self.most_tokens - self.n_tokens

    def extend(self, packed: bytes) -> None:
        """Add tokens (u32 LE) to the output."""
        ids = self.ids
        ids += packed
        if self.slot != NO_SLOT and packed:
            self.rows.views[Cell.N_KNOWN][self.slot] = self.rows.views[Cell.N_KEPT][self.slot] = len(ids) >> 2
            self.rows.views[Cell.LAST][self.slot] = int.from_bytes(packed[-4:], "little")

    def extend_keys(self, n_blocks: int | None = None) -> None:
        """Compute the content keys of the first n_blocks blocks, or of all full ones."""
        block_hash.extend(self.keys, self.root_key, self.ids, n_blocks, self.extras)

    def vacated(self, n_computed: int) -> None:
        """Remember how much of the prompt was computed, before the table is released."""
        self.n_prefilled = max(self.n_prefilled, min(n_computed, self.n_prompt))

    def usage(self, drafts: DraftUsage | None = None, partial: bool = False) -> Usage:
        """Token counts for a delta. `partial`: of the prompt, only the tokens computed or found in a cache so far."""
        return Usage(
            prompt_tokens=self.n_prefilled if partial else self.n_prompt,
            partial=partial,
            completion_tokens=self.n_output if self.samples else 0,
            cached_by_tier=dict(self.cached_by_tier or {}),
            drafts=drafts,
        )
