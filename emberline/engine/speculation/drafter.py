"""A drafter: one kind of draft. It proposes the tokens that may follow sequences; a step verifies them.

Drafters that need a model of their own (a smaller model, a head over the target's hidden states) fit here, too: what
they computed ahead, beside the step, is what they propose.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from typing import Protocol

import msgspec

from emberline.engine.core.queues import Selection
from emberline.engine.core.sequence import Sequence

MAX_CELLS = 100  # that a drafter tells apart
MOST = 16  # tokens of a draft, however few of them a step may verify


class Draft(msgspec.Struct, gc=False):
    """Proposed tokens. A cell is the situation of a token, in which acceptance is measured: see `Drafter`."""

    ids: bytes  # u32 LE
    cells: Many[int]  # one per token

    @property
    def n_tokens(self) -> int:
        """Number of proposed tokens."""
        return len(self.cells)


class Drafter(Protocol):
    """One per engine, called by the step loop's thread: it must answer in microseconds."""

    name: str

    def propose(self, seqs: Selection, before: Mapping[int, Draft]) -> Iterable[tuple[Sequence, Draft]]:
        """Propose up to MOST tokens that may follow the last ones of the sequences that a step may draft for.

        `before` has, by sequence number, what another drafter proposes: the tokens follow that. Cells are below
        MAX_CELLS. Sequences for which there is nothing to propose are left out.
        """

    def prior(self, cell: int) -> float:
        """Probability that a token of the cell is drawn where all before it are, before any was measured."""

    def ended(self, seq: Sequence) -> None:
        """Take note of a sequence that ends, with all its tokens."""

    def forget(self, tenant: bytes | None) -> None:
        """Forget the sequences of a tenant that have ended, or (None) of all tenants."""
