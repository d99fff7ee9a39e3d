"""Which tokens a grammar allows next, for one sequence: a thin cover of the library's matcher.

Matchers of one grammar share the library's table of lexer states, which only grows: where texts are counted (strings of
a greatest length), every place of a text is another state. When the table is full a fresh one takes its place, and the
sequence's tokens are read again.
"""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emberline.protocol.errors import BadInput

# What one grammar may cost. Fuel is time: about 50 units a microsecond at first, 14 later. A state has about 1 kB.
LIMITS: dict[str, Any] = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 20_000_000,
    "step_lexer_fuel": 500_000,
    "step_max_items": 100_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}


_log = logging.getLogger(__name__)


class MatcherFailed(BadInput):
    """The library gave up at one of its limits."""


class Prototype:
    """A compiled grammar, which sequences copy. `make` compiles it once more."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._current = make()

    def copy(self, worn_out: Any = None) -> tuple[Any, Any]:
        """A matcher at its start, and what it was copied from; afresh where that is worn out."""
        if worn_out is not None and self._current is worn_out:
            self._current = self._make()
        return self._current.deep_copy(), self._current


class Matcher:
    def __init__(self, prototype: Prototype, n_tokens: int) -> None:
        self._prototype = prototype
        self._matcher, self._origin = prototype.copy()
        self._accepted: list[int] = []
        self._n_words = (n_tokens + 32) // 32
        self._last_word = np.uint32((1 << n_tokens % 32) - 1)  # without the library's own end token

    @property
    def complete(self) -> bool:
        return bool(self._matcher.is_accepting())

    @property
    def finished(self) -> bool:
        return bool(self._matcher.is_stopped())

    def fill(self, bits: NDArray[np.uint32]) -> None:
        """`bits`: one row, contiguous, of the vocabulary's words. Ends are not among them."""
        self._fill(bits)
        if self._matcher.is_error():
            self._renew()
            self._fill(bits)
            self._check()
        bits[-1] &= self._last_word

    def accept(self, token_id: int) -> bool:
        """Whether the grammar allows it; if not, nothing has changed."""
        taken = bool(self._matcher.try_consume_tokens([token_id]) == 1)
        if not taken and self._worn_out(token_id):
            self._renew()
            taken = bool(self._matcher.try_consume_tokens([token_id]) == 1)
            self._check()
        if taken:
            self._accepted.append(token_id)
        return taken

    def rollback(self, n: int) -> None:
        if n:
            self._matcher.rollback(n)
            del self._accepted[len(self._accepted) - n :]
            if self._matcher.is_error():
                self._renew()

    def _fill(self, bits: NDArray[np.uint32]) -> None:
        if self._matcher.is_stopped():
            bits[:] = 0
        else:
            self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)

    def _worn_out(self, token_id: int) -> bool:
        """Whether a limit, and not the grammar, has refused a token: the library does not tell."""
        if not self._matcher.is_error():
            bits = np.zeros(self._n_words, np.uint32)
            self._fill(bits)
            if not self._matcher.is_error():
                return bool(bits[token_id >> 5] >> (token_id & 31) & 1)
        return True

    def _renew(self) -> None:
        """Once more from the start, in case it was the others' states that used up a limit."""
        self._matcher, self._origin = self._prototype.copy(worn_out=self._origin)
        self._matcher.consume_tokens(self._accepted)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            _log.warning("a grammar was given up: %s", self._matcher.get_error()[:500])
            raise MatcherFailed("the grammar is too complex to be followed; use a simpler schema", param="grammar")
