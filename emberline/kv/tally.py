"""Reports of several ranks, or of several parts of a transfer, as one: how they merge, by what they are about."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Report = TypeVar("Report")


class Tally(Generic[Item]):
    """Items that several reporters work on. What one of them has lost is lost, once the others do not touch it any
    more."""

    def __init__(self, items: Iterable[Item] = (), n_reporters: int = 1) -> None:
        self._left: dict[Item, int] = dict.fromkeys(items, n_reporters)  # reporters that have not named the item
        self._lost: set[Item] = set()  # of these items, those that some reporter has lost

    def __bool__(self) -> bool:
        """True if something is not done."""
        return bool(self._left)

    def __iter__(self) -> Iterator[Item]:
        """Items that are not done."""
        return iter(self._left)

    def expect(self, items: Iterable[Item], n_reporters: int) -> None:
        """Add items, each of which so many reporters will name once."""
        self._left.update(dict.fromkeys(items, n_reporters))

    def said(self, done: Iterable[Item], lost: Iterable[Item] = ()) -> tuple[list[Item], list[Item]]:
        """Count a report, in which items that nobody expects are ignored.

        Returns the items of which it was the last report: those that no reporter has lost, and the others.
        """
        found = [item for item in done if self._is_last(item)]
        missing = []
        for item in lost:
            if item in self._left:
                self._lost.add(item)
                if self._is_last(item):
                    missing.append(item)
        if self._lost:
            missing += [item for item in found if item in self._lost]
            found = [item for item in found if item not in self._lost]
            self._lost.difference_update(missing)
        return found, missing

    def _is_last(self, item: Item) -> bool:
        left = self._left.get(item, 0)
        if left > 1:
            self._left[item] = left - 1
            return False
        return self._left.pop(item, None) is not None


class Answers:
    """Answers that each reporter gives once to an order, by their kind and the order's number.

    `merges` says for a kind of which answers differ how two of them become one; of other kinds the first one stays.
    """

    def __init__(self, merges: Mapping[type, Callable[[Any, Any], Any]] | None = None) -> None:
        self._merges = merges or {}
        self._left: dict[tuple[type, int], int] = {}  # reporters that have not answered
        self._merged: dict[tuple[type, int], Any] = {}

    def expect(self, kind: type, number: int, n_reporters: int) -> None:
        """Wait for the answers of so many reporters to an order."""
        self._left[kind, number] = n_reporters

    def said(self, report: Report, number: int) -> Report | None:
        """Take an answer. Returns all answers as one if it was the last, or None: others are awaited, or none is."""
        kind = type(report), number
        if kind not in self._left:
            return None
        self._left[kind] -= 1
        before = self._merged.get(kind)
        if before is None:
            merged = report
        else:
            merged = self._merges[type(report)](before, report) if type(report) in self._merges else before
        self._merged[kind] = merged
        if self._left[kind]:
            return None
        del self._left[kind], self._merged[kind]
        return merged
