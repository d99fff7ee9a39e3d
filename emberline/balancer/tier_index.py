"""Index of the KV tiers below the device: their slots in the fleet's prefix index, and the cost of fetching from them.

A worker has a slot for each of its own tiers. The cluster's pool has one slot for all: what it holds, every worker that
is connected to it can fetch.
"""

from emberline.balancer.prefix_index import FleetPrefixIndex
from emberline.balancer.worker import FetchCost, Worker
from emberline.protocol.frames import TierStats

POOL = "pool"
OK = "ok"
ASSUMED_RATES = {"host": 10e9, "disk": 1e9, POOL: 1e9}  # bytes per second, until a worker has measured one
MIN_RATE = 1e6


class TierIndex:
    """An empty tier name is the worker's prefix cache on the device."""

    def __init__(self, index: FleetPrefixIndex) -> None:
        self._index = index
        self._slots: dict[tuple[str, str], int] = {}  # by worker and tier; the pool has no worker
        self.min_token_s = 0.0  # of any worker's fetches; 0: no worker has a tier

    def stored(self, worker: Worker, tier: str, keys: bytes) -> None:
        self._index.stored(self._slot(worker, tier), keys)

    def removed(self, worker: Worker, tier: str, keys: bytes) -> None:
        self._index.removed(self._slot(worker, tier), keys)

    def replaced(self, worker: Worker, tier: str) -> None:
        """The worker is about to tell anew what the tier holds. Of the pool it knows a part only."""
        if tier != POOL:
            self._drop(_holder(worker, tier))

    def forget(self, worker: Worker) -> None:
        """The worker is gone; what its tiers hold is told anew when it is back."""
        worker.fetch_costs = ()
        for holder in [holder for holder in self._slots if holder[0] == worker.name]:
            self._drop(holder)

    def update(self, worker: Worker, tiers: tuple[TierStats, ...]) -> None:
        """Read the worker's tiers from a load report. A degraded tier is not counted on."""
        token_bytes = worker.capacity.kv_token_bytes
        costs = []
        for stats in tiers if token_bytes else ():
            if stats.state == OK:
                rate = max(stats.read_rate or ASSUMED_RATES.get(stats.name, MIN_RATE), MIN_RATE)
                costs.append(FetchCost(1 << self._slot(worker, stats.name), token_bytes / rate))
        worker.fetch_costs = tuple(costs)
        if costs:
            least = min(cost.token_s for cost in costs)
            self.min_token_s = min(self.min_token_s or least, least)

    def _slot(self, worker: Worker, tier: str) -> int:
        if not tier:
            return worker.slot
        holder = _holder(worker, tier)
        slot = self._slots.get(holder)
        if slot is None:
            slot = self._slots[holder] = self._index.take_slot()
        return slot

    def _drop(self, holder: tuple[str, str]) -> None:
        slot = self._slots.pop(holder, None)
        if slot is not None:
            self._index.drop_slot(slot)


def _holder(worker: Worker, tier: str) -> tuple[str, str]:
    return ("" if tier == POOL else worker.name), tier
