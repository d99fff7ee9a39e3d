"""A runner whose draws are replaced by recorded replies: every engine then writes the same text, at its own speed.

The model computes and samples as ever. On a GPU the device goes on with its own draws where a row follows one that the
host has not seen yet: what it computes there is worth nothing, and takes as long.
"""

from collections.abc import Sequence
from typing import Any

from emberline.engine.core.plan import Handle, Masks, Runner, Sampled, StepPlan
from emberline.kernels.sampling import Sampled as Draw


class Replay:
    def __init__(self, runner: Runner, end_id: int) -> None:
        self._runner = runner
        self._end_id = end_id
        self._slots: dict[int, tuple[list[int], int]] = {}  # recorded reply and length of the prompt, by slot
        self.replies: dict[str, list[int]] = {}

    def launch(self, plan: StepPlan) -> "_Replayed":
        for admission in plan.admissions:
            request = admission.request
            self._slots[admission.slot] = self.replies[request.id], len(request.prompt_ids) // 4
        return _Replayed(
            self._runner.launch(plan), [draw for row in plan.rows if row.samples for draw in self._draws(row)]
        )

    def _draws(self, row: Any) -> list[int]:
        reply, n_prompt = self._slots[row.slot]
        at = row.end - n_prompt
        ids = reply[at : at + 1 + row.n_drafts]
        return ids + [self._end_id] * (1 + row.n_drafts - len(ids))


class _Replayed:
    def __init__(self, handle: Handle, token_ids: list[int]) -> None:
        self._handle = handle
        self._token_ids = token_ids

    def sample(self, masks: Masks | None = None) -> None:
        self._handle.sample(masks)

    def result(self) -> Sequence[Sampled]:
        self._handle.result()
        draws, first = [Draw(token_id) for token_id in self._token_ids], 0
        for n_drafts in self._left_out:  # of each row: a GPU has drawn once for it, and verified nothing
            draws[first + 1 : first + 1 + n_drafts] = [Draw(-1)] * n_drafts
            first += 1 + n_drafts
        return draws

    def drafts(self) -> Sequence[bytes]:
        return ()  # a draft head's would follow what the model has drawn

    @property
    def _left_out(self) -> Sequence[int]:
        batch = getattr(getattr(self._handle, "_launched", None), "batch", None)
        return getattr(batch, "left_out", None) or ()
