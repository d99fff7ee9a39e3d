"""How a reply could end from here, for one sequence: the automaton's states, token by token."""

from emberline.engine.grammar.automaton import DEAD, END, Automaton, State, TooComplex
from emberline.engine.grammar.vocabulary import Vocabulary


class Closer:
    """Knows the fewest bytes to a valid end after every token."""

    def __init__(self, automaton: Automaton, vocabulary: Vocabulary) -> None:
        self._automaton = automaton
        self._vocabulary = vocabulary
        self._states: list[State] = [automaton.start]
        self._path: tuple[State, list[int] | None] = (DEAD, None)

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
        if self._states[-1].cost <= room and self._vocabulary.spells_all:
            return True
        path = self.closing()
        return path is not None and len(path) <= room

    def _next(self, state: State, token_id: int) -> State:
        if token_id in self._vocabulary.special:
            return self._automaton.token(state, token_id)
        text = self._vocabulary.tokens[token_id] if token_id < len(self._vocabulary.tokens) else b""
        return self._automaton.feed(state, text) if text else DEAD

    def _spell(self, state: State) -> list[int] | None:
        found: list[int] = []
        for piece in self._automaton.closing(state):
            ids = [piece] if isinstance(piece, int) else self._vocabulary.spell(piece)
            if ids is None:
                return None
            found += ids
        return found
