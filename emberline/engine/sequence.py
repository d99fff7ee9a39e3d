"""One request on its way through the engine: plain data, changed only by the scheduler."""

from dataclasses import dataclass, field

from emberline.engine.plan import Guide, PendingGuide
from emberline.kv.cache import BlockTable
from emberline.protocol.errors import EmberlineError
from emberline.protocol.events import Usage
from emberline.protocol.request import EngineRequest, Priority

WAITING = -1  # in place of a slot


@dataclass(slots=True, eq=False)
class Sequence:
    request: EngineRequest
    number: int  # order of arrival, unique
    seed: int
    root: bytes  # of its content keys
    max_tokens: int
    stop_ids: frozenset[int]  # end tokens included, unless ignored
    deadline_s: float | None  # on the monotonic clock
    n_prompt: int
    ids: bytearray  # prompt and output, u32 LE
    table: BlockTable
    keys: list[bytes] = field(default_factory=list)  # content keys of the full blocks of ids
    n_computed: int = 0  # tokens whose KV is in the table, or will be when the planned steps are done
    n_drawing: int = 0  # tokens that planned steps draw and nobody has seen yet
    slot: int = WAITING
    admission: int = -1  # serial number of its stay in the slot
    planned_step: int = -1  # the last step it has a row in
    waits_since: int = 0  # the step at which it began to wait for its slot
    cached_by_tier: dict[str, int] | None = None  # set at first admission
    pending: PendingGuide | None = None  # its grammar, until that is compiled
    guide: Guide | None = None
    closes: bool = False  # its grammar can be ended within max_tokens, and will be
    thinks: bool = False  # a thinking limit is still to come
    failure: EmberlineError | None = None  # of its guide; it ends with the next step
    urgency: Priority = field(init=False)  # its class, or a better one once it has waited for long

    def __post_init__(self) -> None:
        self.urgency = self.request.priority

    @property
    def id(self) -> str:
        return self.request.id

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
        return self.max_tokens - self.n_output

    @property
    def n_tokens(self) -> int:
        return len(self.ids) >> 2

    @property
    def n_due(self) -> int:
        """Tokens to be computed, one that is still being drawn included."""
        return (len(self.ids) >> 2) + self.n_drawing - self.n_computed

    @property
    def n_output(self) -> int:
        return (len(self.ids) >> 2) - self.n_prompt

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.n_prompt,
            completion_tokens=self.n_output,
            cached_by_tier=dict(self.cached_by_tier or {}),
        )
