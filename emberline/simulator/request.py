"""A request in the simulated fleet, its sequences on workers, and its block keys for the prefix index."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from emberline.kv.retention import Conversation

_SEGMENT_SPAN = 1 << 20  # more blocks than any segment has


@dataclass(slots=True, eq=False)
class SimRequest:
    """Times are virtual seconds."""

    id: str
    number: int
    session: int
    tenant: int
    path: tuple[int, ...]  # segments, numbered uniquely in the simulation
    lengths: tuple[int, ...]  # blocks of each
    n_prompt: int
    n_output: int
    block_tokens: int
    arrival_s: float
    called_tools: bool = False  # its reply ends with tool calls
    next_s: float = float("inf")  # from its end to the next turn of its conversation
    streamed: bool = True  # the router sees its first token when it comes, not at its end
    reply: tuple[int, int] = (0, 0)  # (segment, blocks) that the reply fills, if known
    known_tokens: int = 0  # prompt tokens that an unbounded shared cache would have had
    cached_tokens: int = 0  # prompt tokens that were not computed
    fetched: dict[str, int] | None = None  # of them, those that came from tiers
    decode_worker: str = ""
    prefill_worker: str = ""  # if another
    first_token_s: float = -1.0
    end_s: float = -1.0
    n_preempted: int = 0
    n_written: int = 0  # tokens of the reply that workers before this one have generated
    n_failovers: int = 0

    @property
    def time_per_token_s(self) -> float:
        return (self.end_s - self.first_token_s) / max(1, self.n_output - 1)


@dataclass(slots=True, eq=False)
class SimSequence:
    """A request on one worker."""

    request: SimRequest
    rank: int  # order of arrival at the worker
    n_prompt: int  # tokens to compute before the first token, or before the next one after a preemption
    n_output: int  # to generate here; 0 on a prefill worker
    awaits_kv: bool = False  # the prompt's blocks come from a prefill worker
    done: int = 0  # prompt tokens present
    n_held: int = 0  # segments of the path that it holds in the cache
    n_full: int = 0  # of them, those present in full, and their blocks
    full_blocks: int = 0
    reserved: int = 0  # blocks besides those
    written: int = 0  # output tokens when it last began to decode
    conversation: Conversation | None = None  # that it is a turn of, once it was admitted
    decode_start_step: int = -1  # the worker's step count at that time; -1: not decoding


class BlockKeys:
    """One key per `stride` blocks of a prompt: the fleet's index need not be finer than its decisions."""

    def __init__(self, stride: int = 1) -> None:
        self.stride = stride
        self._starts: dict[int, int] = {}  # segment -> blocks before it in its prompts, if any

    def of_prompt(self, path: Sequence[int], lengths: Sequence[int], n_blocks: int) -> bytes:
        """The keys of the first n_blocks of a prompt."""
        ends = list(accumulate(lengths))
        parts = []
        for segment, length, end in zip(path, lengths, ends):
            if end > length:
                self._starts[segment] = end - length
            upto = min(length, length - end + n_blocks)
            if upto <= 0:
                break
            parts.append(self._numbers(segment, 0, upto))
        return _pack(np.concatenate(parts)) if parts else b""

    def of_run(self, segment: int, start: int, end: int) -> bytes:
        """The keys of blocks start to end of a segment that an earlier `of_prompt` has placed."""
        return _pack(self._numbers(segment, start, end))

    def _numbers(self, segment: int, start: int, end: int) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
        before = self._starts.get(segment, 0)
        first = start + -(before + start + 1) % self.stride  # where a whole stride is complete
        base = segment * _SEGMENT_SPAN
        return np.arange(base + first, base + end, self.stride, dtype=np.uint64)


def _pack(numbers: "np.ndarray[tuple[int], np.dtype[np.uint64]]") -> bytes:
    keys = np.zeros((len(numbers), 2), dtype="<u8")
    keys[:, 0] = numbers * np.uint64(0x9E3779B97F4A7C15)  # spread over all bits, as a hash would be
    return keys.tobytes()
