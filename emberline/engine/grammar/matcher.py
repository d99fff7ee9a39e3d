"""Which tokens a grammar allows next, for one sequence: a thin cover of the library's matcher."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


class MatcherFailed(Exception):
    """The library gave up: a limit, or a fault of ours."""


class Matcher:
    def __init__(self, prototype: Any, n_tokens: int) -> None:
        self._matcher = prototype.deep_copy()
        self._last_word = np.uint32((1 << n_tokens % 32) - 1)  # without the library's own end token

    @property
    def complete(self) -> bool:
        return bool(self._matcher.is_accepting())

    @property
    def finished(self) -> bool:
        return bool(self._matcher.is_stopped())

    def fill(self, bits: NDArray[np.uint32]) -> None:
        """`bits`: one row, contiguous, of the vocabulary's words. Ends are not among them."""
        if self._matcher.is_stopped():
            bits[:] = 0
        else:
            self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self._check()
        bits[-1] &= self._last_word

    def accept(self, token_id: int) -> bool:
        """Whether the grammar allows it; if not, nothing has changed."""
        taken = self._matcher.try_consume_tokens([token_id])
        self._check()
        return bool(taken == 1)

    def rollback(self, n: int) -> None:
        if n:
            self._matcher.rollback(n)
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise MatcherFailed(self._matcher.get_error()[:2000])
