"""One request on its way through the modelled fleet."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np


@dataclass(slots=True, eq=False)
class Job:
    """What is asked, when, and what became of it. Times are virtual seconds."""

    id: str
    number: int
    session: int
    tenant: int
    path: tuple[int, ...]  # segments, their numbers unique in the simulation
    lengths: tuple[int, ...]  # blocks of each
    n_prompt: int
    n_output: int
    block_tokens: int
    asked_s: float
    reply: tuple[int, int] = (0, 0)  # (segment, blocks) that the reply fills, if known
    known_tokens: int = 0  # that a shared cache without bounds would have had
    cached_tokens: int = 0  # that were not computed
    decode: str = ""  # the worker that wrote the reply
    prefill: str = ""  # the one that computed the prompt, if another
    first_s: float = -1.0  # when its first token was there
    ended_s: float = -1.0
    n_preempted: int = 0

    @property
    def time_per_token_s(self) -> float:
        return (self.ended_s - self.first_s) / max(1, self.n_output - 1)


@dataclass(slots=True, eq=False)
class Seq:
    """A job's stay on one worker."""

    job: Job
    rank: int  # arrival at the worker
    n_prompt: int  # to be computed here before the first token, or the next one after a preemption
    n_output: int  # to be written here; 0: a prefill worker's
    awaits: bool = False  # the prompt's blocks come from another worker
    done: int = 0  # prompt tokens that are there
    n_held: int = 0  # segments of the path that it holds in the cache
    n_full: int = 0  # of them, those that are there in full, and their blocks
    full_blocks: int = 0
    reserved: int = 0  # blocks beside those
    written: int = 0  # tokens of the reply, when it last began to decode
    began_step: int = -1  # the worker's count of steps at that time; -1: it does not decode


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
