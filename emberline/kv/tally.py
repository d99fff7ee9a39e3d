"""Orders to all ranks, and reports of ranks, or of the parts of a transfer, as one.

Reports merge in one of two ways. Items, such as blocks, are done one by one, when every reporter has named them, and
lost if one has lost them: `Tally`. A whole order is answered when every reporter has answered it: `Answers`.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Order = TypeVar("Order")
Report = TypeVar("Report")
Answer = TypeVar("Answer")


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

    `merges` says how two answers become one, for the kinds whose answers differ between reporters.
    """

    def __init__(self, merges: Mapping[type, Callable[[Any, Any], Any]] | None = None) -> None:
        self._merges = merges or {}
        self._left: dict[tuple[type, int], int] = {}  # reporters that have not answered
        self._merged: dict[tuple[type, int], Any] = {}

    def expect(self, kind: type, number: int, n_reporters: int) -> None:
        """Wait for the answers of so many reporters to an order."""
        self._left[kind, number] = n_reporters

    def said(self, answer: Answer, number: int) -> Answer | None:
        """Take an answer. Returns all answers as one if it was the last, or None: others are awaited, or none is."""
        key = type(answer), number
        if key not in self._left:
            return None
        self._left[key] -= 1
        if key in self._merged and type(answer) in self._merges:
            answer = self._merges[type(answer)](self._merged[key], answer)
        self._merged[key] = answer
        if self._left[key]:
            return None
        del self._left[key], self._merged[key]
        return answer


class GroupPort(Generic[Order, Report]):
    """Connects rank 0's step loop to a feature's executors on all ranks: it gives them orders, and takes notices, which
    `merge` makes of their reports. An engine with one rank is a group of one."""

    def __init__(self, own: Any) -> None:
        """own: the executor of this rank."""
        self.own = own
        self.close = own.close
        self.order: Callable[[Order], None]  # gives an order to every rank, this one among them
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
