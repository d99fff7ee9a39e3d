"""What the scheduler asks of speculation, and which draws of a row with drafts count.

A draft is verified by the model's own draws: the noise of a draw depends on seed, position and token id alone, so what
is drawn after accepted drafts is what would have been drawn without any. A draft can cost time, never a wrong token.
"""

from collections.abc import Sequence as Many
from typing import Protocol

from emberline.engine.core.plan import UNKNOWN_DRAFT, Draws, Row, Sampled, StepPlan
from emberline.engine.core.sequence import Sequence
from emberline.protocol.frames import DraftStats
from emberline.protocol.token_ids import unpack

_UNKNOWN = int.from_bytes(UNKNOWN_DRAFT, "little")


class Speculation(Protocol):
    """Proposes drafts and learns what becomes of them. All calls come from the step loop's thread."""

    def begin_step(self, n_running: int) -> int:
        """A step is planned, in which so many sequences may have a row. Returns how many tokens a draft head is to
        propose behind each of them; 0: none, or there is no head. A draft model is asked like a head."""

    @property
    def drafts(self) -> bool:
        """Whether the step being planned may have drafts. Else nothing else is asked for it."""

    def propose(self, seq: Sequence, n: int) -> bytes:
        """Up to n token ids (u32 LE) that may follow `seq.ids`; none where drafting would not pay."""

    @property
    def runs_ahead(self) -> bool:
        """All drafts are the device's own: it can verify them before the host knows them, or what came before."""

    def propose_ahead(self, seq: Sequence, n: int) -> int:
        """How many of the n tokens that the device will have proposed, once the steps in flight are done, are worth
        verifying."""

    def head_failed(self) -> None:
        """The draft head, or the draft model, gave invalid numbers."""

    def verified(self, seq: Sequence, n_drafted: int, n_accepted: int) -> None:
        """So many of the drafts of the sequence's last row were drawn. It does not have these tokens yet."""

    def appended(self, seq: Sequence, n: int) -> None:
        """So many tokens join the output without a draw: its grammar leaves one each."""

    def catch_up(self) -> None:
        """At the end of every step, mostly while the device computes: what need not be done before a launch."""

    def ended(self, seq: Sequence) -> None:
        """The sequence ends, with the tokens it has. It may be told so by `catch_up`."""

    def measured(self, plan: StepPlan, seconds: float) -> None:
        """A step, whose drafts were just verified, took so long, from the end of the one before it."""

    @property
    def stats(self) -> tuple[DraftStats, ...]:
        """Draft tokens by drafter and position."""


def n_accepted(drawn: Many[int], draft_ids: bytes) -> int:
    """How many drafts of a row are accepted: as long as the draw before a draft is the draft. Of its draws, which are
    one more than its drafts, as many count, and the first.

    A draw that is not valid ends the run: the next step draws it again. So do draws behind a wrong draft whose id only
    the device knows.
    """
    last, n = drawn[0], 0
    for draft in unpack(draft_ids):
        token_id = drawn[n + 1]
        if (last != draft and draft != _UNKNOWN) or token_id < 0:
            return n
        last = token_id
        n += 1
    return n


def drawn_ids(draws: Many[Sampled]) -> list[int]:
    return draws.token_ids if isinstance(draws, Draws) else [draw.token_id for draw in draws]


def known_tokens(row: Row, draws: Many[Sampled]) -> list[int]:
    """The row's tokens that are known once it has drawn: its own, accepted drafts, and the last one drawn. Without
    draws: its own."""
    tokens = list(unpack(row.token_ids))
    if draws:
        drawn = drawn_ids(draws)
        tokens += drawn[: 1 + n_accepted(drawn, row.draft_ids)]
    return tokens
