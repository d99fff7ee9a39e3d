"""What queued work brings along when it asks to be generated."""

from collections.abc import Callable
from dataclasses import dataclass

from emberline.accounts.usage_ledger import UsageRow
from emberline.protocol.events import TokenDelta


@dataclass(frozen=True, slots=True)
class JobContext:
    """The engine that it was granted: there or nowhere, for an engine that dies under it is to be noticed.

    `book` gets its usage row when it ends. The queue writes it together with the result, so that an attempt whose
    result nobody sees costs nothing.

    A reply that an attempt before had begun goes on behind `so_far`, whose events are not told again. `heard` gets all
    that the engine gives, right before the events that are made of it.
    """

    engine: str
    book: Callable[[UsageRow], None]
    so_far: TokenDelta | None = None
    heard: Callable[[TokenDelta], None] | None = None
