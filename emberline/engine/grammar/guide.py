"""One sequence's grammar: the matcher says what may come, the closer how it can still end in time."""

import logging

import numpy as np
from numpy.typing import NDArray

from emberline.engine.grammar.automaton import Automaton
from emberline.engine.grammar.closer import Closer
from emberline.engine.grammar.matcher import Matcher, Prototype
from emberline.engine.grammar.vocabulary import Vocabulary

_log = logging.getLogger(__name__)


class GrammarGuide:
    """What the scheduler holds of a grammar (see `plan.Guide`)."""

    def __init__(self, prototype: Prototype, automaton: Automaton, vocabulary: Vocabulary, digest: str) -> None:
        self._matcher = Matcher(prototype, vocabulary.n_tokens)
        self._closer = Closer(automaton, vocabulary)
        self.n_words = vocabulary.n_words
        self.digest = digest

    @property
    def complete(self) -> bool:
        return self._matcher.complete if self._closer.lost else self._closer.complete

    @property
    def finished(self) -> bool:
        return self._matcher.finished if self._closer.lost else self._closer.finished

    def fill(self, bits: NDArray[np.uint32]) -> None:
        self._matcher.fill(bits)

    def accept(self, token_id: int) -> bool:
        if not self._matcher.accept(token_id):
            return False
        if not self._closer.lost and not self._closer.accept(token_id):
            self._closer.lost = True
            _log.warning("a grammar is too ambiguous to be closed in time", extra={"grammar": self.digest})
        return True

    def rollback(self, n: int) -> None:
        self._matcher.rollback(n)
        if not self._closer.lost:
            self._closer.rollback(n)

    def fits(self, room: int) -> bool:
        return not self._closer.lost and self._closer.fits(room)

    def closing(self) -> list[int]:
        """The tokens that end the reply from here; only after `fits` has said that they do."""
        path = self._closer.closing()
        assert path is not None, "asked only where it fits"
        return path
