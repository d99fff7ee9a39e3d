"""Forced tokens: where a grammar leaves one text only, its tokens are proposed.

The mask may still leave several tokens, because a text can be cut into tokens in several ways. The usual ones are
proposed and verified like any other draft, so the output stays what the model would have written. Where the mask leaves
one token, the draw can only confirm it.
"""

from collections.abc import Callable, Iterable, Mapping

from emberline.engine.core.queues import Selection
from emberline.engine.core.rows import Cell
from emberline.engine.core.sequence import Flag, Sequence
from emberline.engine.speculation.drafter import MOST, Draft

INNER, LAST = 0, 1  # cells: the last token may become another one with the text after it


class GrammarDrafter:
    """Proposes what `forced_ids` says must follow a sequence, given by its number."""

    name = "grammar"

    def __init__(self) -> None:
        self.forced_ids: Callable[[int], bytes] = lambda number: b""  # u32 LE; set by the engine that has grammars

    def propose(self, seqs: Selection, before: Mapping[int, Draft]) -> Iterable[tuple[Sequence, Draft]]:
        """Propose the forced tokens of guided sequences for which no other drafter proposes any."""
        for seq in seqs.where(seqs.cells(Cell.FLAGS) & Flag.GUIDED != 0) if seqs.flags & Flag.GUIDED else ():
            if seq.number not in before and (ids := self.forced_ids(seq.number)):
                cells = [INNER] * (len(ids) // 4 - 1) + [LAST]
                yield seq, Draft(ids[: 4 * MOST], cells[:MOST])

    def prior(self, cell: int) -> float:
        """Probability that a forced token is drawn in this spelling."""
        return 0.9 if cell == INNER else 0.7

    def ended(self, seq: Sequence) -> None:
        """Do nothing: the grammar's owner forgets the sequence."""

    def forget(self, tenant: bytes | None) -> None:
        """Do nothing: only sequences that run have a grammar."""
