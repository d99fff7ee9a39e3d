"""A store in memory that keeps objects as Mooncake does, and lies, forgets, hangs and fails when it is told to."""

import time
from collections.abc import Sequence

from emberline.kv.tiers.pool.pool_client import PoolUnavailable
from emberline.kv.tiers.pool.pool_master import PoolUsage
from emberline.kv.tiers.pool.pool_process import Operation

NOT_FOUND, TOO_LARGE = -704, -600


class LyingStore:
    """A `pool_tier.PoolStore` over `memory`. `objects` can be changed behind its back."""

    def __init__(self, memory: memoryview, objects: dict[str, bytes] | None = None) -> None:
        self.memory = memory
        self.objects = {} if objects is None else objects  # shared by the stores of several workers
        self.problem = ""
        self.generation = 1
        self.full = False
        self.hang_s = 0.0  # before every answer
        self.unreachable: set[str] = set()  # objects of a peer that is gone
        self.calls: list[Operation] = []

    def call(
        self,
        operation: Operation,
        names: Sequence[str],
        starts: Sequence[int] = (),
        sizes: Sequence[int] = (),
        *,
        limit_s: float,
    ) -> list[int]:
        self.calls.append(operation)
        if self.hang_s > limit_s:
            self.problem = "it did not answer"
        else:
            time.sleep(self.hang_s)
        if self.problem:
            raise PoolUnavailable(self.problem)
        if operation == "exist":
            return [int(name in self.objects) for name in names]
        if operation == "remove":
            return [0 if self.objects.pop(name, None) is not None else NOT_FOUND for name in names]
        if operation == "put":
            return [self._put(*each) for each in zip(names, starts, sizes)]
        return [self._get(*each, head=operation == "get_head") for each in zip(names, starts, sizes)]

    def _put(self, name: str, start: int, size: int) -> int:
        if self.full:
            return -200
        self.objects.setdefault(name, bytes(self.memory[start : start + size]))
        return 0

    def _get(self, name: str, start: int, size: int, head: bool) -> int:
        if name in self.unreachable:
            return -800
        if (data := self.objects.get(name)) is None:
            return NOT_FOUND
        if head:
            data = data[:size]
        if len(data) > size:
            return TOO_LARGE
        self.memory[start : start + len(data)] = data
        return len(data)

    def close(self) -> None:
        self.problem = "closed"


class Listing:
    """A `pool_tier.PoolMaster` of such objects."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self._objects = objects

    def usage(self) -> PoolUsage:
        return PoolUsage(sum(map(len, self._objects.values())), 1 << 30, len(self._objects))

    def names(self) -> list[str]:
        return list(self._objects)
