"""Counts of reports: something is done once every rank, or every part of a transfer, has said so."""

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


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
