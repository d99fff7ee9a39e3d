"""Closes a reply in time: tracks the shortest completion of one sequence, token by token."""

from emberline.engine.grammar.grammar_automaton import DEAD, END, Automaton, State, TooComplex
from emberline.engine.grammar.vocabulary import MAX_PIECE_BYTES, Spelling, Vocabulary

MAX_CLOSING_BYTES = 8192  # of a completion that is tokenized to see whether it fits: that takes the time of a step


class Closer:
    """Knows the fewest bytes to a valid end of the reply after every token."""

    def __init__(self, automaton: Automaton, vocabulary: Vocabulary) -> None:
        self._automaton = automaton
        self._vocabulary = vocabulary
        self._states: list[State] = [automaton.start]
        self._completion: tuple[State, list[int] | None] = (DEAD, None)
        self._spellings: list[Spelling] = []  # of the last completion, last text first: reused for suffixes
        self._byte_by_byte = automaton.completion_bytes <= vocabulary.bytes  # then cost bounds the number of tokens

    @property
    def fewest_bytes(self) -> int:
        """Bytes of the cheapest completion; a special token counts as one byte."""
        return self._states[-1].cost

    @property
    def complete(self) -> bool:
        return self._states[-1].cost == 0

    @property
    def finished(self) -> bool:
        """Complete, and nothing may follow."""
        return self._states[-1] is END

    def accept(self, token_id: int) -> bool:
        """False, without effect, where the grammar forbids the token or the text then has too many parses."""
        state = self._states[-1]
        found = state.next.get(-1 - token_id)
        if found is None:
            try:
                found = self._next(state, token_id)
            except TooComplex:
                return False
            state.next[-1 - token_id] = found
        if found is DEAD:
            return False
        self._states.append(found)
        return True

    def rollback(self, n: int) -> None:
        assert 0 <= n < len(self._states), "cannot roll back more tokens than were accepted"
        del self._states[len(self._states) - n :]

    def closing(self) -> list[int] | None:
        """The tokens of the shortest completion; None where the vocabulary cannot spell it."""
        state = self._states[-1]
        if self._completion[0] is not state:
            self._completion = (state, self._spell(state))
        return self._completion[1]

    def forced(self) -> list[bytes | int]:
        """Texts and ids of special tokens that must follow. Empty if several things may."""
        try:
            return self._automaton.forced(self._states[-1])
        except TooComplex:
            return []

    def fits(self, room: int) -> bool:
        """True if the reply can be completed within `room` tokens."""
        cost = self._states[-1].cost
        if cost <= room and self._byte_by_byte:
            return True
        if cost > max(room, min(room * MAX_PIECE_BYTES, MAX_CLOSING_BYTES)):
            return False
        tokens = self.closing()
        return tokens is not None and len(tokens) <= room

    def _next(self, state: State, token_id: int) -> State:
        if token_id in self._vocabulary.special:
            return self._automaton.token(state, token_id)
        text = self._vocabulary.tokens[token_id] if token_id < len(self._vocabulary.tokens) else b""
        return self._automaton.feed(state, text) if text else DEAD

    def _spell(self, state: State) -> list[int] | None:
        pieces: list[list[int] | None] = []
        n_texts = 0
        for piece in reversed(self._automaton.completion(state)):
            if isinstance(piece, int):
                pieces.append([piece])
            else:
                pieces.append(self._spelled(n_texts, piece))
                n_texts += 1
        return None if None in pieces else [token_id for ids in reversed(pieces) for token_id in ids or ()]

    def _spelled(self, n: int, text: bytes) -> list[int] | None:
        """Tokens of the n-th text from the end."""
        if n == len(self._spellings):
            self._spellings.append(self._vocabulary.spelling(text))
        elif not self._spellings[n].text.endswith(text):
            self._spellings[n] = self._vocabulary.spelling(text)
        return self._spellings[n].ids(text)
