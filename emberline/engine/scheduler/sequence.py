"""One request on its way through the engine: plain data, changed only by the scheduler."""

import secrets
from dataclasses import InitVar, dataclass, field
from math import inf

from emberline.engine.scheduler.limits import Limits
from emberline.engine.scheduler.plan import Guide, PendingGuide
from emberline.kv.cache import BlockTable
from emberline.protocol import block_hash as blockhash
from emberline.protocol.block_hash import BLOCK_TOKENS
from emberline.protocol.errors import EmberlineError
from emberline.protocol.events import Usage
from emberline.protocol.request import EngineRequest, Priority

WAITING = -1  # in place of a slot
_U64 = (1 << 64) - 1


@dataclass(slots=True, eq=False)
class Sequence:
    request: EngineRequest
    number: int  # order of arrival, unique
    limits: InitVar[Limits]
    fingerprint: InitVar[str]  # of the model
    table: BlockTable
    now_s: InitVar[float]
    pending: PendingGuide | None = None  # its grammar, until that is compiled
    came_step: int = 0  # steps that had been planned when it came,
    began_step: float = inf  # and when its first token was seen
    seed: int = field(init=False)
    root: bytes = field(init=False)  # of its content keys
    max_tokens: int = field(init=False)  # of the reply, what it began with included
    stop_ids: frozenset[int] = field(init=False)  # end tokens included, unless ignored
    deadline_s: float | None = field(init=False)  # on the monotonic clock
    n_prompt: int = field(init=False)
    n_given: int = field(init=False)  # tokens of the reply that another engine drew
    ids: bytearray = field(init=False)  # prompt and output, u32 LE
    keys: list[bytes] = field(init=False)  # content keys of the full blocks of ids
    urgency: Priority = field(init=False)  # its class, or a better one once it has waited for long
    away: bool = False  # neither waits nor runs: its KV travels (engine/traffic.py)
    n_arrived: int = 0  # tokens whose KV has come from elsewhere and is held for it
    n_computed: int = 0  # tokens whose KV is in the table, or will be when the planned steps are done
    n_drawing: int = 0  # tokens that planned steps draw and nobody has seen yet
    slot: int = WAITING
    admission: int = -1  # serial number of its stay in the slot
    planned_step: int = -1  # the last step it has a row in
    waits_since: int = 0  # the step at which it began to wait for its slot
    cached_by_tier: dict[str, int] | None = None  # set at first admission
    guide: Guide | None = None
    closes: bool = False  # its grammar can be ended within max_tokens, and will be
    thinks: bool = False  # a thinking limit is still to come
    failure: EmberlineError | None = None  # of its guide; it ends with the next step

    def __post_init__(self, limits: Limits, fingerprint: str, now_s: float) -> None:
        request, sampling = self.request, self.request.sampling
        self.urgency = request.priority
        self.seed = secrets.randbits(64) if sampling.seed is None else sampling.seed & _U64
        self.root = blockhash.root(fingerprint, request.salt)
        self.n_prompt, self.n_given = len(request.prompt_ids) // 4, len(request.output_ids) // 4
        self.max_tokens = limits.room(request)
        self.stop_ids = frozenset(sampling.stop_ids + (() if sampling.ignore_eos else limits.eos_ids))
        self.deadline_s = None if request.deadline_s is None else now_s + request.deadline_s
        self.ids = bytearray(request.prompt_ids + request.output_ids)
        if request.push is not None:
            self.n_given = 0
            self.ids = bytearray(request.prompt_ids[: 4 * BLOCK_TOKENS * self.n_pushable])
        self.keys = blockhash.split(request.keys)

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def pushes(self) -> bool:
        """Its prompt's full blocks are computed and pushed; nothing is drawn."""
        return self.request.push is not None

    @property
    def n_pushable(self) -> int:
        """Blocks of the prompt that can come from elsewhere: the last token is computed where the reply is drawn."""
        return (self.n_prompt - 1) // BLOCK_TOKENS

    @property
    def most_cached(self) -> int:
        """Blocks that a hit may have: at least one token must be computed, for its logits."""
        return (self.n_tokens - (not self.pushes)) // BLOCK_TOKENS

    @property
    def n_prefill(self) -> int:
        """Tokens to be computed before the next is drawn."""
        return self.n_due if self.pushes else self.n_due - 1

    @property
    def rank(self) -> tuple[int, int]:
        """Smaller goes first."""
        return self.urgency, self.number

    @property
    def promoted(self) -> bool:
        return self.urgency != self.request.priority

    @property
    def room(self) -> int:
        """Tokens that the reply may still get."""
        return self.max_tokens + self.n_prompt - (len(self.ids) >> 2)

    @property
    def n_tokens(self) -> int:
        return len(self.ids) >> 2

    @property
    def n_due(self) -> int:
        """Tokens to be computed, one that is still being drawn included."""
        return (len(self.ids) >> 2) + self.n_drawing - self.n_computed

    @property
    def n_fresh(self) -> int:
        """Tokens that were not in the cache when it was first admitted."""
        return self.n_tokens - sum((self.cached_by_tier or {}).values())

    @property
    def n_output(self) -> int:
        return (len(self.ids) >> 2) - self.n_prompt

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.n_prompt,
            completion_tokens=0 if self.pushes else self.n_output,
            cached_by_tier=dict(self.cached_by_tier or {}),
        )
