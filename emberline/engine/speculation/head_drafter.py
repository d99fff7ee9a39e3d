"""Drafts of a draft head or a draft model: the runner has computed them after the last step."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many

from emberline.engine.core.feature import Core
from emberline.engine.core.plan import Sampled, StepPlan, drawn_ids, n_accepted
from emberline.engine.core.queues import Selection
from emberline.engine.core.sequence import Sequence
from emberline.engine.speculation.drafter import MOST, Draft

MAX_DEPTH = 4  # tokens of a head's draft
MODEL_DEPTH = 8  # of a draft model's: each is as good as the one before
PRIOR = 0.6


class HeadDrafter:
    """A cell is the position of a token in the draft."""

    name = "eagle3"
    depth = MAX_DEPTH

    def __init__(self) -> None:
        self._proposed: dict[int, tuple[int, bytes]] = {}  # by sequence number: the position, the ids (u32 LE)

    def take(self, core: Core, plan: StepPlan, sampled: Many[Sampled], drafts: Iterable[bytes]) -> bool:
        """Keep what the head proposes after the last token that each sampling row has drawn.

        Returns False if it proposes nothing for a row with a valid draw: its numbers are invalid.
        """
        drawn, at, is_valid = drawn_ids(sampled), 0, True
        for row, ids in zip((row for row in plan.rows if row.samples), drafts):
            first, at = at, at + 1 + row.n_drafts
            if (seq := core.sequence_of(row)) is not None:
                end = seq.n_tokens if row.n_ahead else row.end
                self._proposed[seq.number] = end + 1 + n_accepted(drawn[first:at], row.draft_ids), ids
                is_valid = is_valid and (bool(ids) or drawn[first] < 0)
        return is_valid

    def proposal(self, number: int) -> tuple[int, bytes]:
        """The head's proposal for a sequence: the position of the first token, and the token ids (u32 LE)."""
        return self._proposed.get(number, (0, b""))

    def propose(self, seqs: Selection, before: Mapping[int, Draft]) -> Iterable[tuple[Sequence, Draft]]:
        """Propose what the head has, if it follows the newest token and begins like what another drafter proposes."""
        for seq in seqs:
            at, ids = self.proposal(seq.number)
            if not ids or at != seq.n_tokens:
                continue
            if (draft := before.get(seq.number)) is None:
                yield seq, Draft(ids[: 4 * MOST], range(min(MOST, len(ids) // 4)))
            elif len(draft.ids) < len(ids) and ids.startswith(draft.ids):
                yield seq, Draft(ids[len(draft.ids) :], range(draft.n_tokens, len(ids) // 4))

    def prior(self, cell: int) -> float:
        """Probability that a proposed token is drawn."""
        return PRIOR

    def ended(self, seq: Sequence) -> None:
        """Forget what the head proposes for the sequence."""
        self._proposed.pop(seq.number, None)

    def forget(self, tenant: bytes | None) -> None:
        """Do nothing: nothing is kept of sequences that have ended."""


class ModelDrafter(HeadDrafter):
    """The same with a smaller model in the place of a head."""

    name = "draft_model"
    depth = MODEL_DEPTH
