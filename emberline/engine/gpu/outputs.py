"""What a step draws: on the device, then in pinned memory, then as plain objects."""

from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from emberline.engine.gpu.stream import Mark, mark, pinned

MAX_TOP = 20


@dataclass(slots=True)
class Drawn:
    """A token per row; the rest is filled where a slot asks for logprobs."""

    token_ids: Tensor  # int32 [rows]; negative: the model produced invalid numbers
    logprob: Tensor  # float32 [rows]
    top_ids: Tensor  # int32 [rows, MAX_TOP]
    top_logprobs: Tensor  # float32 [rows, MAX_TOP]

    def first(self, n: int) -> "Drawn":
        return Drawn(self.token_ids[:n], self.logprob[:n], self.top_ids[:n], self.top_logprobs[:n])


class Draw(msgspec.Struct, gc=False):
    token_id: int
    logprob: float | None = None
    top: list[tuple[int, float]] = []


def drawn_on(n_rows: int, device: torch.device) -> Drawn:
    return Drawn(
        torch.zeros(n_rows, dtype=torch.int32, device=device),
        torch.zeros(n_rows, dtype=torch.float32, device=device),
        torch.zeros(n_rows, MAX_TOP, dtype=torch.int32, device=device),
        torch.zeros(n_rows, MAX_TOP, dtype=torch.float32, device=device),
    )


class Outputs:
    """One step's results on their way to the host."""

    def __init__(self, n_rows: int, device: torch.device) -> None:
        n_top = n_rows * MAX_TOP
        self._host = Drawn(
            pinned(n_rows, torch.int32, device),
            pinned(n_rows, torch.float32, device),
            pinned(n_top, torch.int32, device).view(n_rows, MAX_TOP),
            pinned(n_top, torch.float32, device).view(n_rows, MAX_TOP),
        )
        self.began: Mark = mark(device)
        self.done: Mark = mark(device)

    def fetch(self, drawn: Drawn, n: int, logprobs: bool) -> None:
        """Queue the copy of the first n rows."""
        names = ("token_ids", "logprob", "top_ids", "top_logprobs") if logprobs else ("token_ids",)
        for name in names:
            getattr(self._host, name)[:n].copy_(getattr(drawn, name)[:n], non_blocking=True)
        self.done.record()

    def read(self, order: list[int], logprobs: list[int | None] | None) -> list[Draw]:
        """Wait, then the draws in the asked order; `logprobs`: how many alternatives each wants."""
        self.done.wait()
        token_ids = self._host.token_ids.tolist()
        if logprobs is None:
            return [Draw(token_ids[i]) for i in order]
        return [self._with_logprobs(token_ids[i], i, k) for i, k in zip(order, logprobs)]

    def _with_logprobs(self, token_id: int, row: int, k: int | None) -> Draw:
        if k is None or token_id < 0:
            return Draw(token_id)
        top = zip(self._host.top_ids[row, :k].tolist(), self._host.top_logprobs[row, :k].tolist())
        return Draw(token_id, float(self._host.logprob[row]), list(top))
