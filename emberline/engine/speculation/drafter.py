"""A drafter: one kind of draft. It proposes the tokens that may follow a sequence; a step verifies them.

Drafters that need a model of their own (a smaller model, a head over the target's hidden states) fit here, too: what
they computed ahead, beside the step, is what they propose.
"""

from collections.abc import Sequence as Many
from typing import Protocol

import msgspec

from emberline.engine.core.sequence import Sequence

MAX_CELLS = 100  # that a drafter tells apart


class Draft(msgspec.Struct, gc=False):
    """Proposed tokens. A cell is the situation of a token, in which acceptance is measured: see `Drafter`."""

    ids: bytes  # u32 LE
    cells: Many[int]  # one per token

    @property
    def n_tokens(self) -> int:
        return len(self.cells)


class Drafter(Protocol):
    """One per engine, called by the step loop's thread: it must answer in microseconds."""

    name: str

    def begin_step(self) -> None:
        """A step is about to be planned."""

    def propose(self, seq: Sequence, most: int, after: bytes) -> Draft | None:
        """Up to `most` tokens that may follow the sequence's last one and the tokens `after` it (u32 LE), which
        another drafter proposed. Cells are below MAX_CELLS."""

    def prior(self, cell: int) -> float:
        """Probability that a token of the cell is drawn where all before it are, before any was measured."""

    def ended(self, seq: Sequence) -> None:
        """The sequence ends, with all its tokens."""
