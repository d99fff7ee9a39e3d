"""Deterministic automata over characters: for what expressions alone cannot say (and, not, counted lengths)."""

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from emberline.protocol.errors import BadInput
from emberline.protocol.grammar import Chars, Expression, OneOf, Repeat, Rule, Sequence, Text
from emberline.text.grammar.builder import EMPTY, NEVER, Builder, choice, repeat, sequence
from emberline.text.grammar.ranges import ANY, Ranges, union
from emberline.text.grammar.regex import lengths

MAX_NODES = 40_000
MAX_STATES = 3_000
MAX_EDGES = 60_000
MAX_WORK = 500_000

State = TypeVar("State", bound=Hashable)


@dataclass(slots=True)
class Automaton:
    """State 0 is the start; of each state the edges are (low, high, target), ascending and apart; no edge: dead end."""

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
        """A shortest text; None where there is none. Letters and digits are preferred."""
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
        """All texts; None where there are more than `most`."""
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


def _live(automaton: Automaton) -> set[int]:
    """States from which the end can be reached."""
    sources: list[list[int]] = [[] for _ in automaton.edges]
    for state, edges in enumerate(automaton.edges):
        for _, _, target in edges:
            sources[target].append(state)
    live, waiting = set(automaton.accepting), list(automaton.accepting)
    while waiting:
        for source in sources[waiting.pop()]:
            if source not in live:
                live.add(source)
                waiting.append(source)
    return live


class _Net:
    """Thompson's construction: nodes with silent and with labelled edges."""

    def __init__(self) -> None:
        self.silent: list[list[int]] = []
        self.labelled: list[list[tuple[Ranges, int]]] = []

    def node(self) -> int:
        if len(self.silent) >= MAX_NODES:
            raise BadInput("a pattern is too large to be combined with the constraints beside it: simplify one of them")
        self.silent.append([])
        self.labelled.append([])
        return len(self.silent) - 1

    def add(self, expression: Expression, start: int) -> int:
        """Wires the expression from `start` on; returns its last node."""
        match expression:
            case Text(text):
                for char in text:
                    end = self.node()
                    self.labelled[start].append((((ord(char), ord(char)),), end))
                    start = end
                return start
            case Chars(ranges):
                end = self.node()
                self.labelled[start].append((ranges, end))
                return end
            case Sequence(items):
                for item in items:
                    start = self.add(item, start)
                return start
            case OneOf(options):
                end = self.node()
                for option in options:
                    first = self.node()
                    self.silent[start].append(first)
                    self.silent[self.add(option, first)].append(end)
                return end
            case Repeat(item, least, most):
                return self._repeat(item, least, most, start)
        raise AssertionError(f"no automaton for {type(expression).__name__}")

    def _repeat(self, item: Expression, least: int, most: int | None, start: int) -> int:
        for _ in range(least):
            start = self.add(item, start)
        if most is None:
            loop = self.node()
            self.silent[start].append(loop)
            self.silent[self.add(item, loop)].append(loop)
            end = self.node()
            self.silent[loop].append(end)
            return end
        end = self.node()
        for _ in range(most - least):
            self.silent[start].append(end)
            start = self.add(item, start)
        self.silent[start].append(end)
        return end

    def closure(self, nodes: Iterable[int]) -> frozenset[int]:
        seen = set(nodes)
        waiting = list(seen)
        while waiting:
            for target in self.silent[waiting.pop()]:
                if target not in seen:
                    seen.add(target)
                    waiting.append(target)
        return frozenset(seen)


def from_expression(expression: Expression) -> Automaton:
    net = _Net()
    end = net.add(expression, net.node())

    work = 0

    def edges_of(state: frozenset[int]) -> list[tuple[int, int, frozenset[int]]]:
        nonlocal work
        work += len(state)
        if work > MAX_WORK:
            raise BadInput("a pattern is too complex to be combined with the constraints beside it: simplify it")
        pairs = [(low, high, target) for node in state for ranges, target in net.labelled[node] for low, high in ranges]
        return [(low, high, net.closure(targets)) for low, high, targets in _split(pairs)]

    return _explore(net.closure([0]), edges_of, lambda state: end in state)


def _split(pairs: list[tuple[int, int, int]]) -> list[tuple[int, int, list[int]]]:
    """Overlapping labelled ranges cut into separate ones, each with all its targets."""
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


def _explore(
    start: State,
    edges_of: Callable[[State], list[tuple[int, int, State]]],
    accepting: Callable[[State], bool],
) -> Automaton:
    """The automaton of every state that can be reached; neighbouring ranges with one target are joined."""
    numbers = {start: 0}
    order = [start]
    edges: list[list[tuple[int, int, int]]] = []
    count = 0
    while len(edges) < len(order):
        row: list[tuple[int, int, int]] = []
        for low, high, state in edges_of(order[len(edges)]):
            target = numbers.setdefault(state, len(order))
            if target == len(order):
                order.append(state)
            if row and row[-1][2] == target and row[-1][1] + 1 == low:
                row[-1] = (row[-1][0], high, target)
            else:
                row.append((low, high, target))
        edges.append(row)
        count += len(row)
        if len(order) > MAX_STATES or count > MAX_EDGES:
            raise BadInput("a pattern and the constraints beside it are too large together: simplify one of them")
    return _trim(Automaton(edges, {number for state, number in numbers.items() if accepting(state)}))


def _trim(automaton: Automaton) -> Automaton:
    """Without edges that lead nowhere."""
    live = _live(automaton)
    kept = [[edge for edge in row if edge[2] in live] for row in automaton.edges]
    return Automaton(kept, automaton.accepting)


def complement(automaton: Automaton) -> Automaton:
    dead = len(automaton.edges)
    edges: list[list[tuple[int, int, int]]] = []
    for row in [*automaton.edges, []]:
        full: list[tuple[int, int, int]] = []
        for first, last in ANY:
            start = first
            for low, high, target in row:
                low, high = max(low, first), min(high, last)
                if low > high:
                    continue
                if low > start:
                    full.append((start, low - 1, dead))
                full.append((low, high, target))
                start = high + 1
            if start <= last:
                full.append((start, last, dead))
        edges.append(full)
    return _trim(Automaton(edges, set(range(dead + 1)) - automaton.accepting))


def intersect(first: Automaton, second: Automaton) -> Automaton:
    def edges_of(state: tuple[int, int]) -> list[tuple[int, int, tuple[int, int]]]:
        found: list[tuple[int, int, tuple[int, int]]] = []
        left, right = first.edges[state[0]], second.edges[state[1]]
        i = j = 0
        while i < len(left) and j < len(right):
            low, high = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
            if low <= high:
                found.append((low, high, (left[i][2], right[j][2])))
            if left[i][1] < right[j][1]:
                i += 1
            else:
                j += 1
        return found

    return _explore((0, 0), edges_of, lambda state: state[0] in first.accepting and state[1] in second.accepting)


def unite(first: Automaton, second: Automaton) -> Automaton:
    return complement(intersect(complement(first), complement(second)))


def of_length(automaton: Automaton, least: int, most: int | None) -> Automaton:
    """Only texts of these lengths. Where counting far would need too many states, the longest are left out."""
    size = max(1, len(automaton.edges))
    reach = MAX_STATES // size - 1
    if most is None and least <= reach:
        return _counted(automaton, least, None)
    shortest = automaton.shortest()
    floor = max(least, len(shortest or ""))
    return _counted(automaton, least, min(most if most is not None else floor + 64, max(floor + 1, reach)))


def _counted(automaton: Automaton, least: int, most: int | None) -> Automaton:
    def edges_of(state: tuple[int, int]) -> list[tuple[int, int, tuple[int, int]]]:
        at, count = state
        if most is not None and count >= most:
            return []
        following = min(count + 1, least) if most is None else count + 1
        return [(low, high, (target, following)) for low, high, target in automaton.edges[at]]

    return _explore((0, 0), edges_of, lambda state: state[0] in automaton.accepting and state[1] >= least)


def of_words(words: Iterable[str]) -> Automaton:
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
    return Automaton([sorted((ord(char), ord(char), to) for char, to in node.items()) for node in trie], accepting)


def to_expression(
    automaton: Automaton, builder: Builder, written: Callable[[Expression], Expression] = lambda plain: plain
) -> Expression:
    """A rule for each state that several lead to; the others, and loops of one state, are written in place."""
    if 0 not in _live(automaton):
        return NEVER
    automaton = _smallest(automaton)
    arrivals = [0] * len(automaton.edges)
    for state, row in enumerate(automaton.edges):
        for target in {target for _, _, target in row if target != state}:
            arrivals[target] += 1
    arrivals[0] += 1
    return _Writer(automaton, builder, arrivals, written).start()


def _smallest(automaton: Automaton) -> Automaton:
    """With states that the same texts complete made one."""
    groups = [int(state in automaton.accepting) for state in range(len(automaton.edges))]
    n_groups = 0
    while len(set(groups)) != n_groups:
        n_groups = len(set(groups))
        known: dict[tuple[int, tuple[tuple[int, int, int], ...]], int] = {}
        rows = [_joined((low, high, groups[to]) for low, high, to in row) for row in automaton.edges]
        groups = [known.setdefault((groups[state], row), len(known)) for state, row in enumerate(rows)]
    edges: list[list[tuple[int, int, int]]] = [[] for _ in range(n_groups)]
    for state, row in enumerate(automaton.edges):
        edges[groups[state]] = list(_joined((low, high, groups[to]) for low, high, to in row))
    return Automaton(edges, {groups[state] for state in automaton.accepting})


def _joined(row: Iterable[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    joined: list[tuple[int, int, int]] = []
    for low, high, target in row:
        if joined and joined[-1][2] == target and joined[-1][1] + 1 == low:
            joined[-1] = (joined[-1][0], high, target)
        else:
            joined.append((low, high, target))
    return tuple(joined)


class _Writer:
    MAX_INLINE = 24  # how deep states are written into each other

    def __init__(
        self, automaton: Automaton, builder: Builder, arrivals: list[int], written: Callable[[Expression], Expression]
    ) -> None:
        self._automaton, self._builder, self._arrivals, self._written = automaton, builder, arrivals, written
        self._rules: dict[int, int] = {}
        self._waiting: list[int] = []

    def start(self) -> Expression:
        first = self._state(0, 0)
        while self._waiting:
            state = self._waiting.pop()
            self._builder.define(self._rules[state], self._body(state, 0))
        return first

    def _state(self, state: int, depth: int) -> Expression:
        if not self._automaton.edges[state]:
            return EMPTY
        if self._arrivals[state] <= 1 and depth < self.MAX_INLINE and state not in self._rules:
            return self._body(state, depth)
        if state not in self._rules:
            self._rules[state] = self._builder.rule()
            self._waiting.append(state)
        return Rule(self._rules[state])

    def _body(self, state: int, depth: int) -> Expression:
        by_target: dict[int, list[tuple[int, int]]] = {}
        for low, high, target in self._automaton.edges[state]:
            by_target.setdefault(target, []).append((low, high))
        loop = by_target.pop(state, None)
        options = [
            sequence(self._written(_of(pairs)), self._state(target, depth + 1)) for target, pairs in by_target.items()
        ]
        if state in self._automaton.accepting:
            options.append(EMPTY)
        body = choice(options)
        return sequence(repeat(self._written(_of(loop))), body) if loop else body


def _of(pairs: list[tuple[int, int]]) -> Expression:
    ranges = union(pairs)
    return Text(chr(ranges[0][0])) if len(ranges) == 1 and ranges[0][0] == ranges[0][1] else Chars(ranges)


def tidy(
    expression: Expression, builder: Builder, written: Callable[[Expression], Expression] = lambda plain: plain
) -> Expression:
    """The same texts without a loop over something that may be empty: (a*)* has endless ways to read one text."""
    if _loops_over_nothing(expression):
        return to_expression(from_expression(expression), builder, written)
    return written(expression)


def _loops_over_nothing(expression: Expression) -> bool:
    match expression:
        case Sequence(items) | OneOf(items):
            return any(map(_loops_over_nothing, items))
        case Repeat(item, _, most):
            return ((most is None or most > 1) and lengths(item)[0] == 0) or _loops_over_nothing(item)
        case _:
            return False
