"""What queued work brings along when it asks to be generated."""

from collections.abc import Callable
from dataclasses import dataclass

from emberline.accounts.usage import UsageRow


@dataclass(frozen=True, slots=True)
class Errand:
    """The engine that it was granted: there or nowhere, for an engine that dies under it is to be noticed.

    `book` gets its usage row when it ends. The queue writes it together with the result, so that an attempt whose
    result nobody sees costs nothing.
    """

    engine: str
    book: Callable[[UsageRow], None]
