"""Drafts of a draft head or a draft model: the runner has computed them behind the last step."""

from emberline.engine.core.sequence import Sequence
from emberline.engine.speculation.drafter import Draft

MAX_DEPTH = 4  # tokens of a head's draft
MODEL_DEPTH = 8  # of a draft model's: each is as good as the one before
PRIOR = 0.6


class HeadDrafter:
    """A cell is the position of a token in the draft."""

    name = "eagle3"
    depth = MAX_DEPTH

    def begin_step(self) -> None:
        pass

    def propose(self, seq: Sequence, most: int, after: bytes = b"") -> Draft | None:
        ids = seq.proposed_ids
        if not ids or seq.proposed_at != seq.n_tokens or after != ids[: len(after)]:
            return None
        n_after = len(after) // 4
        ids = ids[len(after) : len(after) + 4 * most]
        return Draft(ids, list(range(n_after, n_after + len(ids) // 4))) if ids else None

    def prior(self, cell: int) -> float:
        return PRIOR

    def ended(self, seq: Sequence) -> None:
        pass


class ModelDrafter(HeadDrafter):
    """The same with a smaller model in the place of a head."""

    name = "draft_model"
    depth = MODEL_DEPTH
