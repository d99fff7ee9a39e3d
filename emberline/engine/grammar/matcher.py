"""Token masks of one sequence: a thin wrapper of llguidance's matcher.

Matchers of one grammar share llguidance's table of lexer states, which only grows: in counted strings (`maxLength`)
every position is another state. When the table is full, the grammar is compiled afresh and the sequence's tokens are
replayed.
"""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emberline.protocol.errors import BadInput

# Limits of one grammar. Fuel is time: about 50 units per microsecond initially, 14 per step. A state takes about 1 kB.
LIMITS: dict[str, Any] = {
    "max_items_in_row": 500,  # an ambiguous row is quadratic: 500 take 0.05 s
    "initial_lexer_fuel": 20_000_000,
    "step_lexer_fuel": 500_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}


_log = logging.getLogger(__name__)


class MatcherFailed(BadInput):
    """llguidance stopped at one of its limits."""


class MatcherTemplate:
    """A compiled grammar that sequences copy; `make` compiles it again."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._current = make()

    def copy(self, exhausted: Any = None) -> tuple[Any, Any]:
        """A matcher in its initial state, and its origin; compiled afresh if the origin is `exhausted`."""
        if exhausted is not None and self._current is exhausted:
            self._current = self._make()
        return self._current.deep_copy(), self._current


class Matcher:
    def __init__(self, prototype: MatcherTemplate, n_tokens: int) -> None:
        self._prototype = prototype
        self._matcher, self._origin = prototype.copy()
        self._accepted: list[int] = []
        self._n_words = (n_tokens + 32) // 32
        self._last_word = np.uint32((1 << n_tokens % 32) - 1)  # without llguidance's own end token

    @property
    def complete(self) -> bool:
        return bool(self._matcher.is_accepting())

    @property
    def finished(self) -> bool:
        return bool(self._matcher.is_stopped())

    def fill(self, bits: NDArray[np.uint32]) -> None:
        """`bits`: one contiguous row of 32-bit words over the vocabulary. End tokens are not included."""
        self._fill(bits)
        if self._matcher.is_error():
            self._recompile()
            self._fill(bits)
            self._check()
        bits[-1] &= self._last_word

    def accept(self, token_id: int) -> bool:
        """Advance by the token. Returns False, without any effect, if the grammar does not allow it."""
        accepted = bool(self._matcher.try_consume_tokens([token_id]) == 1)
        if not accepted and self._exhausted(token_id):
            self._recompile()
            accepted = bool(self._matcher.try_consume_tokens([token_id]) == 1)
            self._check()
        if accepted:
            self._accepted.append(token_id)
        return accepted

    def rollback(self, n: int) -> None:
        if n:
            self._matcher.rollback(n)
            del self._accepted[len(self._accepted) - n :]
            if self._matcher.is_error():
                self._recompile()

    def _fill(self, bits: NDArray[np.uint32]) -> None:
        if self._matcher.is_stopped():
            bits[:] = 0
        else:
            self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)

    def _exhausted(self, token_id: int) -> bool:
        """True if a limit, not the grammar, has rejected a token: llguidance does not tell the two apart."""
        if not self._matcher.is_error():
            bits = np.zeros(self._n_words, np.uint32)
            self._fill(bits)
            if not self._matcher.is_error():
                return bool(bits[token_id >> 5] >> (token_id & 31) & 1)
        return True

    def _recompile(self) -> None:
        """Recompiles and replays, in case the limit was used up by states of other sequences."""
        self._matcher, self._origin = self._prototype.copy(exhausted=self._origin)
        self._matcher.consume_tokens(self._accepted)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            _log.warning("grammar matcher failed: %s", self._matcher.get_error()[:500])
            raise MatcherFailed("the grammar is too complex; use a simpler schema", param="grammar")
