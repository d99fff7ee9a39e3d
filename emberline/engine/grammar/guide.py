"""One sequence's grammar: the matcher says what may come, the closer how it can still end in time."""

import logging

import numpy as np
from numpy.typing import NDArray

from emberline.engine.grammar.closer import Closer
from emberline.engine.grammar.grammar_automaton import Automaton
from emberline.engine.grammar.matcher import Matcher, Prototype
from emberline.engine.grammar.vocabulary import Vocabulary

_log = logging.getLogger(__name__)


class GrammarGuide:
    """What the scheduler holds of a grammar (see `plan.Guide`)."""

    def __init__(self, prototype: Prototype, automaton: Automaton, vocabulary: Vocabulary, digest: str) -> None:
        self._matcher = Matcher(prototype, vocabulary.n_tokens)
        self._closer = Closer(automaton, vocabulary)
        self._n_beyond = 0  # tokens that only the matcher could follow
        self.n_words = vocabulary.n_words
        self.digest = digest

    @property
    def complete(self) -> bool:
        return self._matcher.complete if self._n_beyond else self._closer.complete

    @property
    def finished(self) -> bool:
        return self._matcher.finished if self._n_beyond else self._closer.finished

    def fill(self, bits: NDArray[np.uint32]) -> None:
        self._matcher.fill(bits)

    def accept(self, token_id: int) -> bool:
        if not self._matcher.accept(token_id):
            return False
        if self._n_beyond or not self._closer.accept(token_id):
            if not self._n_beyond:
                _log.warning("a text has too many readings in its grammar", extra={"grammar": self.digest})
            self._n_beyond += 1
        return True

    def rollback(self, n: int) -> None:
        self._matcher.rollback(n)
        beyond = min(n, self._n_beyond)
        self._n_beyond -= beyond
        self._closer.rollback(n - beyond)

    def fits(self, room: int) -> bool:
        return not self._n_beyond and self._closer.fits(room)

    def closing(self) -> list[int]:
        """The tokens that end the reply from here; only after `fits` has said that they do."""
        path = self._closer.closing()
        assert path is not None, "asked only where it fits"
        return path
