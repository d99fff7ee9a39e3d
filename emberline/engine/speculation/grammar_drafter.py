"""Forced tokens: where a grammar leaves one text only, its tokens are proposed.

The mask may still leave several tokens, because a text can be cut into tokens in several ways. The usual ones are
proposed and verified like any other draft, so the output stays what the model would have written. Where the mask leaves
one token, the draw can only confirm it.
"""

from collections.abc import Callable

from emberline.engine.core.sequence import Sequence
from emberline.engine.speculation.drafter import Draft

INNER, LAST = 0, 1  # cells: the last token may become another one with the text after it


class GrammarDrafter:
    """Proposes what `forced_ids` says must follow a sequence, given by its number."""

    name = "grammar"

    def __init__(self) -> None:
        self.forced_ids: Callable[[int], bytes] = lambda number: b""  # u32 LE; set by the engine that has grammars

    def begin_step(self) -> None:
        pass

    def propose(self, seq: Sequence, most: int, after: bytes = b"") -> Draft | None:
        ids = self.forced_ids(seq.number)
        if not ids or after:
            return None
        n = len(ids) // 4
        cells = [INNER] * (n - 1) + [LAST]
        return Draft(ids[: 4 * most], cells[:most])

    def prior(self, cell: int) -> float:
        return 0.9 if cell == INNER else 0.7

    def ended(self, seq: Sequence) -> None:
        pass
