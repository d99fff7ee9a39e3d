"""An engine worker that tells which experts its steps touched: `python -m benchmarks.gpu.counting_worker FILE FLAGS`.

When it ends it writes FILE, {tokens of a captured step: experts a layer of its last replay touched, on average}. The
ids of a captured step's experts are kept in memory of their own for each layer, in place of the workspace's, which the
next layer overwrites: a step has no launch more than in the worker that users run.
"""

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emberline.engine.worker import main as worker
from emberline.kernels.gpu.backend import moe_block
from emberline.kernels.gpu.moe_routing import Permutation, make_permutation

_ARENA_INTS = 1 << 24
UNUSED = -1  # also the expert of a step's padding


class ChosenExperts:
    """Ids of the experts that captured steps choose."""

    def __init__(self) -> None:
        self._arena: Tensor | None = None
        self._used = 0
        self._by_tokens: dict[int, list[Tensor]] = {}

    def make_permutation(self, memory: Tensor, *shape: Any) -> Permutation:
        to = make_permutation(memory, *shape)
        if not torch.cuda.is_current_stream_capturing():  # every step runs once before it is captured
            if self._arena is None:
                self._arena = torch.full((_ARENA_INTS,), UNUSED, dtype=torch.int32, device=memory.device)
            return to
        return self.keep(to)

    def keep(self, to: Permutation) -> Permutation:
        """The same permutation with ids of its own, while there is room."""
        assert self._arena is not None
        start = self._used
        if start + to.ids.numel() > _ARENA_INTS:
            return to
        self._used += -(-to.ids.numel() // 4) * 4  # aligned as the kernels expect
        ids = self._arena[start : start + to.ids.numel()].view_as(to.ids)
        self._by_tokens.setdefault(to.tokens, []).append(ids)
        return replace(to, ids=ids)

    def touched(self) -> dict[int, float]:
        """By the number of tokens: different experts of a layer, on average. Of steps with little padding.

        (Requests of a batch may end a step apart.)
        """
        found = dict[int, float]()
        for tokens, layers in self._by_tokens.items():
            chosen = [ids.flatten().tolist() for ids in layers]
            counts = [len(set(each) - {UNUSED}) for each in chosen if each.count(UNUSED) <= len(each) // 8]
            if counts:
                found[tokens] = statistics.mean(counts)
        return found


def main() -> int:
    chosen = ChosenExperts()
    moe_block.make_permutation = chosen.make_permutation  # type: ignore[attr-defined]
    status = worker.main(sys.argv[2:])
    Path(sys.argv[1]).write_text(json.dumps(chosen.touched()))
    return status


if __name__ == "__main__":
    raise SystemExit(main())
