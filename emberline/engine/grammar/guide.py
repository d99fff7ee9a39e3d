"""The grammar state of one sequence: the matcher computes token masks, the closer the shortest completion."""

import logging
from contextlib import AbstractContextManager

import numpy as np
from numpy.typing import NDArray

from emberline.engine.grammar.closer import Closer
from emberline.engine.grammar.grammar_automaton import Automaton
from emberline.engine.grammar.matcher import Matcher, MatcherTemplate
from emberline.engine.grammar.vocabulary import Vocabulary

_log = logging.getLogger(__name__)


class GrammarGuide:
    """Implements `guided_rules.Guide`, for one thread at a time. Sequences of one grammar share its lock."""

    def __init__(
        self,
        prototype: MatcherTemplate,
        automaton: Automaton,
        vocabulary: Vocabulary,
        digest: str,
        lock: AbstractContextManager[object],
    ) -> None:
        self._lock = lock
        self._matcher = Matcher(prototype, vocabulary.n_tokens)
        self._closer = Closer(automaton, vocabulary)
        self._vocabulary = vocabulary
        self._n_untracked = 0  # tokens that only the matcher could follow (see TooComplex)
        self.n_words = vocabulary.n_words
        self.digest = digest

    @property
    def complete(self) -> bool:
        return self._matcher.complete if self._n_untracked else self._closer.complete

    @property
    def finished(self) -> bool:
        return self._matcher.finished if self._n_untracked else self._closer.finished

    def fill(self, bits: NDArray[np.uint32]) -> None:
        """Set the bits of the tokens that may follow.

        Where only one text may, that is its first token as the model's tokenizer cuts it. A mask of all its spellings
        would have a model that wants to write something else choose a short one, which it has never read.
        """
        with self._lock:
            pieces = self._forced_pieces()
            if pieces and isinstance(text := pieces[0], bytes):
                token_id = self._vocabulary.first_token(text, cut=len(pieces) == 1)
                if token_id is not None:
                    bits[:] = 0
                    bits[token_id >> 5] = 1 << (token_id & 31)
                    return
            self._matcher.fill(bits)

    def accept(self, token_id: int) -> bool:
        with self._lock:
            return self._accept(token_id)

    def _accept(self, token_id: int) -> bool:
        if not self._matcher.accept(token_id):
            return False
        if self._n_untracked or not self._closer.accept(token_id):
            if not self._n_untracked:
                _log.warning(
                    "text has too many parses to be closed in time",
                    extra={"grammar": self.digest},
                )
            self._n_untracked += 1
        return True

    def rollback(self, n: int) -> None:
        with self._lock:
            self._matcher.rollback(n)
        untracked = min(n, self._n_untracked)
        self._n_untracked -= untracked
        self._closer.rollback(n - untracked)

    def fits(self, room: int) -> bool:
        with self._lock:
            return not self._n_untracked and self._closer.fits(room)

    def forced(self) -> list[int]:
        """The usual tokens of what must follow; empty where several texts may."""
        with self._lock:
            ids: list[int] = []
            for piece in self._forced_pieces():
                ids += [piece] if isinstance(piece, int) else self._vocabulary.tokenize(piece)
            return ids

    def _forced_pieces(self) -> list[bytes | int]:
        return [] if self._n_untracked else self._closer.forced()

    def closing(self) -> list[int]:
        """The tokens that complete the reply. Only valid if `fits` returned True."""
        with self._lock:
            tokens = self._closer.closing()
        assert tokens is not None, "called only if it fits"
        return tokens
