"""Deterministic finite automata (DFAs) over characters, for what expressions cannot say: intersection, complement and
bounded lengths."""

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from emberline.protocol.errors import BadInput
from emberline.protocol.grammar import Chars, Expression, OneOf, Repeat, Rule, Sequence, Text
from emberline.text.grammar.expressions.builder import EMPTY, NEVER, Builder, choice, lengths_in_chars, repeat, sequence
from emberline.text.grammar.expressions.characters import ANY, Ranges, overlapping, subtract, union
from emberline.text.grammar.expressions.characters import intersect as intersect_ranges

MAX_NFA_STATES = 40_000
MAX_STATES = 3_000
MAX_EDGES = 60_000
MAX_SUBSET_WORK = 500_000

State = TypeVar("State", bound=Hashable)


@dataclass(slots=True)
class CharacterDfa:
    """State 0 is the start. Edges of a state are (low, high, target): ascending, disjoint; without an edge the text is
    rejected."""

    edges: list[list[tuple[int, int, int]]]
    accepting: set[int] = field(default_factory=set)

    def step(self, state: int, code: int) -> int | None:
        for low, high, target in self.edges[state]:
            if low <= code <= high:
                return target
        return None

    def accepts(self, text: str) -> bool:
        state: int | None = 0
        for char in text:
            state = self.step(state, ord(char)) if state is not None else None
        return state in self.accepting

    def shortest(self) -> str | None:
        """A shortest accepted text, of letters and digits where possible; None where there is none."""
        queue: deque[tuple[int, str]] = deque([(0, "")])
        seen = {0}
        while queue:
            state, text = queue.popleft()
            if state in self.accepting:
                return text
            for low, high, target in self.edges[state]:
                if target not in seen:
                    seen.add(target)
                    queue.append((target, text + _readable(low, high)))
        return None

    def words(self, most: int) -> list[str] | None:
        """Every accepted text; None where there are more than `most`."""
        found: list[str] = []
        stack = [(0, "")]
        live = _live(self)
        if 0 not in live:
            return []
        steps = 0
        while stack:
            steps += 1
            state, text = stack.pop()
            if state in self.accepting:
                found.append(text)
            for low, high, target in self.edges[state]:
                if target in live:
                    if high - low > most:
                        return None
                    stack.extend((target, text + chr(code)) for code in range(low, high + 1))
            if len(found) > most or len(stack) > 4 * most + 64 or steps > 64 * most:
                return None
        return found


def _readable(low: int, high: int) -> str:
    for good in (97, 48, 65, 32):
        if low <= good <= high:
            return chr(good)
    return chr(low)


def _live(dfa: CharacterDfa) -> set[int]:
    """States from which an accepting state can be reached."""
    sources: list[list[int]] = [[] for _ in dfa.edges]
    for state, edges in enumerate(dfa.edges):
        for _, _, target in edges:
            sources[target].append(state)
    live, waiting = set(dfa.accepting), list(dfa.accepting)
    while waiting:
        for source in sources[waiting.pop()]:
            if source not in live:
                live.add(source)
                waiting.append(source)
    return live


class _Nfa:
    """Thompson's construction: states with epsilon and with labelled edges."""

    def __init__(self) -> None:
        self.epsilon: list[list[int]] = []
        self.labelled: list[list[tuple[Ranges, int]]] = []

    def state(self) -> int:
        if len(self.epsilon) >= MAX_NFA_STATES:
            raise BadInput("a pattern is too large to be combined with the other constraints: simplify one of them")
        self.epsilon.append([])
        self.labelled.append([])
        return len(self.epsilon) - 1

    def add(self, expression: Expression, start: int) -> int:
        """Adds the expression from the state `start` on; returns its last state."""
        match expression:
            case Text(text):
                for char in text:
                    end = self.state()
                    self.labelled[start].append((((ord(char), ord(char)),), end))
                    start = end
                return start
            case Chars(ranges):
                end = self.state()
                self.labelled[start].append((ranges, end))
                return end
            case Sequence(items):
                for item in items:
                    start = self.add(item, start)
                return start
            case OneOf(options):
                end = self.state()
                for option in options:
                    first = self.state()
                    self.epsilon[start].append(first)
                    self.epsilon[self.add(option, first)].append(end)
                return end
            case Repeat(item, least, most):
                return self._repeat(item, least, most, start)
        raise AssertionError(f"no dfa for {type(expression).__name__}")

    def _repeat(self, item: Expression, least: int, most: int | None, start: int) -> int:
        for _ in range(least):
            start = self.add(item, start)
        if most is None:
            loop = self.state()
            self.epsilon[start].append(loop)
            self.epsilon[self.add(item, loop)].append(loop)
            end = self.state()
            self.epsilon[loop].append(end)
            return end
        end = self.state()
        for _ in range(most - least):
            self.epsilon[start].append(end)
            start = self.add(item, start)
        self.epsilon[start].append(end)
        return end

    def closure(self, states: Iterable[int]) -> frozenset[int]:
        seen = set(states)
        waiting = list(seen)
        while waiting:
            for target in self.epsilon[waiting.pop()]:
                if target not in seen:
                    seen.add(target)
                    waiting.append(target)
        return frozenset(seen)


def from_expression(expression: Expression) -> CharacterDfa:
    """The DFA of an expression, by the subset construction."""
    nfa = _Nfa()
    end = nfa.add(expression, nfa.state())
    work = 0

    def edges_of(state: frozenset[int]) -> list[tuple[int, int, frozenset[int]]]:
        nonlocal work
        work += len(state)
        if work > MAX_SUBSET_WORK:
            raise BadInput("a pattern is too complex to be combined with the other constraints: simplify it")
        pairs = [(low, high, target) for each in state for ranges, target in nfa.labelled[each] for low, high in ranges]
        return [(low, high, nfa.closure(targets)) for low, high, targets in _split(pairs)]

    return explore(nfa.closure([0]), edges_of, lambda state: end in state)


def _split(pairs: list[tuple[int, int, int]]) -> list[tuple[int, int, list[int]]]:
    """Overlapping labelled ranges cut into disjoint ones, each with all its targets."""
    if len(pairs) == 1:
        return [(pairs[0][0], pairs[0][1], [pairs[0][2]])]
    opening: dict[int, list[int]] = {}
    closing: dict[int, list[int]] = {}
    for low, high, target in pairs:
        opening.setdefault(low, []).append(target)
        closing.setdefault(high + 1, []).append(target)
    active: dict[int, int] = {}
    pieces: list[tuple[int, int, list[int]]] = []
    previous = 0
    for bound in sorted({*opening, *closing}):
        if active:
            pieces.append((previous, bound - 1, list(active)))
        for target in closing.get(bound, ()):
            active[target] -= 1
            if not active[target]:
                del active[target]
        for target in opening.get(bound, ()):
            active[target] = active.get(target, 0) + 1
        previous = bound
    return pieces


def explore(
    start: State,
    edges_of: Callable[[State], list[tuple[int, int, State]]],
    accepting: Callable[[State], bool],
) -> CharacterDfa:
    """The DFA of all reachable states; adjacent ranges with one target are joined."""
    numbers = {start: 0}
    order = [start]
    edges: list[list[tuple[int, int, int]]] = []
    n_edges = 0

    def number_of(state: State) -> int:
        number = numbers.setdefault(state, len(order))
        if number == len(order):
            order.append(state)
        return number

    while len(edges) < len(order):
        following = edges_of(order[len(edges)])
        row = _joined((low, high, number_of(state)) for low, high, state in following)
        edges.append(row)
        n_edges += len(row)
        if len(order) > MAX_STATES or n_edges > MAX_EDGES:
            raise BadInput("a pattern and the other constraints are too large together: simplify one of them")
    return _trim(CharacterDfa(edges, {number for state, number in numbers.items() if accepting(state)}))


def _trim(dfa: CharacterDfa) -> CharacterDfa:
    """The same DFA without edges to states from which nothing is accepted."""
    live = _live(dfa)
    kept = [[edge for edge in row if edge[2] in live] for row in dfa.edges]
    return CharacterDfa(kept, dfa.accepting)


def complement(dfa: CharacterDfa) -> CharacterDfa:
    dead = len(dfa.edges)
    edges: list[list[tuple[int, int, int]]] = []
    for row in [*dfa.edges, []]:
        gaps = subtract(ANY, union((low, high) for low, high, _ in row))
        valid = ((low, high, to) for first, last, to in row for low, high in intersect_ranges(((first, last),), ANY))
        edges.append(sorted([*valid, *((low, high, dead) for low, high in gaps)]))
    return _trim(CharacterDfa(edges, set(range(dead + 1)) - dfa.accepting))


def intersect(first: CharacterDfa, second: CharacterDfa) -> CharacterDfa:
    def edges_of(state: tuple[int, int]) -> list[tuple[int, int, tuple[int, int]]]:
        return [
            (max(left[0], right[0]), min(left[1], right[1]), (left[2], right[2]))
            for left, right in overlapping(first.edges[state[0]], second.edges[state[1]])
        ]

    return explore((0, 0), edges_of, lambda state: state[0] in first.accepting and state[1] in second.accepting)


def unite(first: CharacterDfa, second: CharacterDfa) -> CharacterDfa:
    return complement(intersect(complement(first), complement(second)))


def of_length(dfa: CharacterDfa, least: int, most: int | None) -> CharacterDfa:
    """Only texts of these lengths. Where counting would need too many states, the longest are left out."""
    size = max(1, len(dfa.edges))
    reach = MAX_STATES // size - 1
    if most is None and least <= reach:
        return _counted(dfa, least, None)
    shortest = dfa.shortest()
    floor = max(least, len(shortest or ""))
    return _counted(dfa, least, min(most if most is not None else floor + 64, max(floor + 1, reach)))


def _counted(dfa: CharacterDfa, least: int, most: int | None) -> CharacterDfa:
    def edges_of(state: tuple[int, int]) -> list[tuple[int, int, tuple[int, int]]]:
        at, count = state
        if most is not None and count >= most:
            return []
        following = min(count + 1, least) if most is None else count + 1
        return [(low, high, (target, following)) for low, high, target in dfa.edges[at]]

    return explore((0, 0), edges_of, lambda state: state[0] in dfa.accepting and state[1] >= least)


def of_words(words: Iterable[str]) -> CharacterDfa:
    trie: list[dict[str, int]] = [{}]
    accepting: set[int] = set()
    for word in words:
        at = 0
        for char in word:
            if char not in trie[at]:
                trie.append({})
                trie[at][char] = len(trie) - 1
            at = trie[at][char]
        accepting.add(at)
    return CharacterDfa([sorted((ord(char), ord(char), to) for char, to in node.items()) for node in trie], accepting)


def to_expression(
    dfa: CharacterDfa, builder: Builder, transform: Callable[[Expression], Expression] = lambda plain: plain
) -> Expression:
    """A rule for each state that several lead to; the others, and loops of one state, are inlined."""
    if 0 not in _live(dfa):
        return NEVER
    dfa = _minimized(dfa)
    arrivals = [0] * len(dfa.edges)
    for state, row in enumerate(dfa.edges):
        for target in {target for _, _, target in row if target != state}:
            arrivals[target] += 1
    arrivals[0] += 1
    return _Writer(dfa, builder, arrivals, transform).start()


def _minimized(dfa: CharacterDfa) -> CharacterDfa:
    """Minimized by partition refinement (Moore)."""
    groups = [int(state in dfa.accepting) for state in range(len(dfa.edges))]
    n_groups = 0
    while len(set(groups)) != n_groups:
        n_groups = len(set(groups))
        known: dict[tuple[int, tuple[tuple[int, int, int], ...]], int] = {}
        rows = [tuple(_joined((low, high, groups[to]) for low, high, to in row)) for row in dfa.edges]
        groups = [known.setdefault((groups[state], row), len(known)) for state, row in enumerate(rows)]
    edges: list[list[tuple[int, int, int]]] = [[] for _ in range(n_groups)]
    for state, row in enumerate(dfa.edges):
        edges[groups[state]] = _joined((low, high, groups[to]) for low, high, to in row)
    return CharacterDfa(edges, {groups[state] for state in dfa.accepting})


def _joined(row: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Adjacent ranges with one target made one."""
    joined: list[tuple[int, int, int]] = []
    for low, high, target in row:
        if joined and joined[-1][2] == target and joined[-1][1] + 1 == low:
            joined[-1] = (joined[-1][0], high, target)
        else:
            joined.append((low, high, target))
    return joined


class _Writer:
    MAX_INLINE = 24  # nesting of inlined states

    def __init__(
        self, dfa: CharacterDfa, builder: Builder, arrivals: list[int], transform: Callable[[Expression], Expression]
    ) -> None:
        self._dfa, self._builder, self._arrivals, self._transform = dfa, builder, arrivals, transform
        self._rules: dict[int, int] = {}
        self._waiting: list[int] = []

    def start(self) -> Expression:
        first = self._state(0, 0)
        while self._waiting:
            state = self._waiting.pop()
            self._builder.define(self._rules[state], self._body(state, 0))
        return first

    def _state(self, state: int, depth: int) -> Expression:
        if not self._dfa.edges[state]:
            return EMPTY
        if self._arrivals[state] <= 1 and depth < self.MAX_INLINE and state not in self._rules:
            return self._body(state, depth)
        if state not in self._rules:
            self._rules[state] = self._builder.rule()
            self._waiting.append(state)
        return Rule(self._rules[state])

    def _body(self, state: int, depth: int) -> Expression:
        by_target: dict[int, list[tuple[int, int]]] = {}
        for low, high, target in self._dfa.edges[state]:
            by_target.setdefault(target, []).append((low, high))
        loop = by_target.pop(state, None)
        options = [
            sequence(self._transform(_chars(pairs)), self._state(target, depth + 1))
            for target, pairs in by_target.items()
        ]
        if state in self._dfa.accepting:
            options.append(EMPTY)
        body = choice(options)
        return sequence(repeat(self._transform(_chars(loop))), body) if loop else body


def _chars(pairs: list[tuple[int, int]]) -> Expression:
    ranges = union(pairs)
    return Text(chr(ranges[0][0])) if len(ranges) == 1 and ranges[0][0] == ranges[0][1] else Chars(ranges)


def without_empty_loops(
    expression: Expression, builder: Builder, transform: Callable[[Expression], Expression] = lambda plain: plain
) -> Expression:
    """The same texts without a loop over what may be empty: (a*)* can match one text in infinitely many ways."""
    if _has_empty_loop(expression):
        return to_expression(from_expression(expression), builder, transform)
    return transform(expression)


def _has_empty_loop(expression: Expression) -> bool:
    match expression:
        case Sequence(items) | OneOf(items):
            return any(map(_has_empty_loop, items))
        case Repeat(item, _, most):
            return ((most is None or most > 1) and lengths_in_chars(item)[0] == 0) or _has_empty_loop(item)
        case _:
            return False
