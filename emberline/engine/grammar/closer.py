"""How a reply could end from here, for one sequence: the automaton's states, token by token."""

from emberline.engine.grammar.grammar_automaton import DEAD, END, Automaton, State, TooComplex
from emberline.engine.grammar.vocabulary import MAX_PIECE_BYTES, Spelling, Vocabulary

MAX_CLOSING_BYTES = 8192  # that are spelled to see whether they fit; it takes a step's time


class Closer:
    """Knows the fewest bytes to a valid end after every token."""

    def __init__(self, automaton: Automaton, vocabulary: Vocabulary) -> None:
        self._automaton = automaton
        self._vocabulary = vocabulary
        self._states: list[State] = [automaton.start]
        self._path: tuple[State, list[int] | None] = (DEAD, None)
        self._spellings: list[Spelling] = []  # of the last closing's texts, the last first: the next are their endings
        self._byte_by_byte = automaton.closing_bytes <= vocabulary.bytes  # a closing can always be spelled so

    @property
    def fewest_bytes(self) -> int:
        """To the end; a special token counts as one."""
        return self._states[-1].cost

    @property
    def complete(self) -> bool:
        return self._states[-1].cost == 0

    @property
    def finished(self) -> bool:
        """Complete, and nothing may follow."""
        return self._states[-1] is END

    def accept(self, token_id: int) -> bool:
        """False, and nothing has changed, where the grammar forbids it or the text then has too many readings."""
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
        assert 0 <= n < len(self._states), "no more tokens can be taken back than were accepted"
        del self._states[len(self._states) - n :]

    def closing(self) -> list[int] | None:
        """The tokens of the shortest text to the end; None where the vocabulary cannot spell it."""
        state = self._states[-1]
        if self._path[0] is not state:
            self._path = (state, self._spell(state))
        return self._path[1]

    def fits(self, room: int) -> bool:
        """Whether the reply can be ended with so many tokens more."""
        cost = self._states[-1].cost
        if cost <= room and self._byte_by_byte:
            return True
        if cost > max(room, min(room * MAX_PIECE_BYTES, MAX_CLOSING_BYTES)):
            return False
        path = self.closing()
        return path is not None and len(path) <= room

    def _next(self, state: State, token_id: int) -> State:
        if token_id in self._vocabulary.special:
            return self._automaton.token(state, token_id)
        text = self._vocabulary.tokens[token_id] if token_id < len(self._vocabulary.tokens) else b""
        return self._automaton.feed(state, text) if text else DEAD

    def _spell(self, state: State) -> list[int] | None:
        pieces: list[list[int] | None] = []
        n_texts = 0
        for piece in reversed(self._automaton.closing(state)):
            if isinstance(piece, int):
                pieces.append([piece])
            else:
                pieces.append(self._spelled(n_texts, piece))
                n_texts += 1
        return None if None in pieces else [token_id for ids in reversed(pieces) for token_id in ids or ()]

    def _spelled(self, n: int, text: bytes) -> list[int] | None:
        """The n-th text from the end."""
        if n == len(self._spellings):
            self._spellings.append(self._vocabulary.spelling(text))
        elif not self._spellings[n].text.endswith(text):
            self._spellings[n] = self._vocabulary.spelling(text)
        return self._spellings[n].ids(text)
