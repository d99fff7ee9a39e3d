"""Orders to all ranks, and reports of ranks, or of the parts of a transfer, as one.

A `Tally` counts what every reporter has to name: blocks one by one, or an order that each of them answers once.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Order = TypeVar("Order")
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


class GroupPort(Generic[Order, Report]):
    """Connects rank 0's step loop to a feature's executors on all ranks: it gives them orders, and takes notices, which
    `merge` makes of their reports. An engine with one rank is a group of one."""

    def __init__(self, own: Any) -> None:
        """own: the executor of this rank."""
        self.own = own
        self.close = own.close
        self.order: Callable[[Order], None]  # set by the feature: gives an order to every rank, this one among them
        self.merged: list[Any] = []  # notices for the step loop
        self._reported: deque[tuple[int, Report]] = deque()  # by followers, with their rank

    def report(self, rank: int, reports: Iterable[Report]) -> None:
        """Take the reports of a follower, from any thread."""
        self._reported += [(rank, report) for report in reports]
        self.own.queue.wake()

    @property
    def has_notices(self) -> bool:
        """True if a rank has reported something."""
        return bool(self.own.queue or self._reported or self.merged)

    def notices(self) -> list[Any]:
        """Take in what ranks have reported. Returns what it means for all of them."""
        for report in self.own.reports():
            self.merge(0, report)
        while self._reported:
            self.merge(*self._reported.popleft())
        merged, self.merged = self.merged, []
        return merged

    def merge(self, rank: int, report: Report) -> None:
        """Take in the report of one rank."""
        raise NotImplementedError
