"""Content keys of simulated blocks, as the balancer wants them: 16 bytes each, unique in the first eight."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

_WIDE = 1 << 20  # more blocks than a segment has


class Keys:
    """One key every `stride` blocks of a prompt: a fleet's index need not be finer than its decisions."""

    def __init__(self, stride: int = 1) -> None:
        self.stride = stride
        self._starts: dict[int, int] = {}  # segment -> blocks before it, where there are any

    def of_prompt(self, path: Sequence[int], lengths: Sequence[int], n_blocks: int) -> bytes:
        """Of the first n_blocks of a prompt."""
        ends = list(accumulate(lengths))
        parts = []
        for segment, length, end in zip(path, lengths, ends):
            if end > length:
                self._starts[segment] = end - length
            upto = min(length, length - end + n_blocks)
            if upto <= 0:
                break
            parts.append(self._numbers(segment, 0, upto))
        return _packed(np.concatenate(parts)) if parts else b""

    def of_run(self, segment: int, start: int, end: int) -> bytes:
        """Of blocks start to end of a segment; its place in prompts is known from those that were asked for."""
        return _packed(self._numbers(segment, start, end))

    def _numbers(self, segment: int, start: int, end: int) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
        before = self._starts.get(segment, 0)
        first = start + -(before + start + 1) % self.stride  # where a whole stride is complete
        return np.arange(segment * _WIDE + first, segment * _WIDE + end, self.stride, dtype=np.uint64)


def _packed(numbers: "np.ndarray[tuple[int], np.dtype[np.uint64]]") -> bytes:
    keys = np.zeros((len(numbers), 2), dtype="<u8")
    keys[:, 0] = numbers * np.uint64(0x9E3779B97F4A7C15)  # spread, so that no key is a prefix of its neighbour's bytes
    return keys.tobytes()
