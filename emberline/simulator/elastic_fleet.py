"""A fleet whose nodes start, drain, leave, fail and change roles in virtual time, and the GPU time that it takes."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from emberline.protocol.frames import WorkerRole
from emberline.simulator.fleet import Fleet
from emberline.simulator.virtual_clock import VirtualClock
from emberline.simulator.worker import SimWorker

NodeState = Literal["starting", "running", "draining", "lost", "gone"]
POLL_S = 1.0  # between two looks at a node that drains


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    start_s: float = 180.0  # from the order of a node to its first request
    flip_s: float = 2.0  # of a role, once it has nothing to do in the old one
    drain_limit_s: float = 60.0  # after which running streams continue elsewhere; of workers of role both


@dataclass(slots=True, eq=False)
class SimNode:
    """One worker and what it costs: from its order until it has left."""

    worker: SimWorker
    state: NodeState
    ordered_s: float
    since_s: float  # when it became that
    ready_s: float = float("inf")  # when it first ran
    ended_s: float = float("inf")
    next_role: WorkerRole | None = None  # it drains to take this one

    @property
    def role(self) -> WorkerRole:
        return self.next_role or self.worker.role


class ElasticFleet:
    """Owns the nodes of a fleet. Its first ones run from the beginning."""

    def __init__(self, fleet: Fleet, clock: VirtualClock, spec: NodeSpec) -> None:
        self.spec = spec
        self.nodes = {
            worker.name: SimNode(worker, "running", clock.now_s, clock.now_s, ready_s=clock.now_s)
            for worker in fleet.workers
        }
        self._fleet, self._clock = fleet, clock

    @property
    def present(self) -> list[SimNode]:
        return [node for node in self.nodes.values() if node.state != "gone"]

    def n(self, *states: NodeState) -> int:
        return sum(node.state in states for node in self.nodes.values())

    def gpu_s(self, start_s: float, end_s: float) -> float:
        """GPU seconds of all nodes between two times, one GPU a node. Nodes that start or drain count."""
        spans = (min(end_s, node.ended_s) - max(start_s, node.ordered_s) for node in self.nodes.values())
        return sum(max(0.0, span) for span in spans)

    def served_s(self, name: str, start_s: float, end_s: float) -> float:
        """Seconds between two times in which the node was there for requests. Time in which it was lost counts."""
        node = self.nodes[name]
        return max(0.0, min(end_s, node.ended_s) - max(start_s, node.ready_s))

    def start(self, role: WorkerRole) -> SimNode:
        worker, now_s = self._fleet.add(role), self._clock.now_s
        node = self.nodes[worker.name] = SimNode(worker, "starting", now_s, now_s)
        self._clock.at(now_s + self.spec.start_s, self._started, node)
        return node

    def drain(self, name: str) -> None:
        node = self.nodes[name]
        self._become(node, "draining")
        self._fleet.drain(node.worker)
        self._clock.at(self._clock.now_s, self._drained, node, node.since_s)

    def undrain(self, name: str) -> None:
        node = self.nodes[name]
        self._become(node, "running")
        self._fleet.undrain(node.worker)

    def flip(self, name: str, role: WorkerRole) -> None:
        """Finish what it has, then take the other role with the cache it has."""
        node = self.nodes[name]
        is_flipping, node.next_role = node.next_role is not None, role
        if not is_flipping:
            self._fleet.drain(node.worker)
            self._clock.at(self._clock.now_s, self._emptied, node)

    def fail(self, name: str, down_s: float) -> None:
        """Kill a node if it runs. It comes back with an empty cache after down_s."""
        node = self.nodes[name]
        if node.state == "running" and node.next_role is None:
            self._become(node, "lost")
            self._fleet.lose(node.worker)
            self._clock.at(self._clock.now_s + down_s, self._started, node)

    def _become(self, node: SimNode, state: NodeState) -> None:
        node.state, node.since_s = state, self._clock.now_s

    def _started(self, node: SimNode) -> None:
        if node.state in ("starting", "lost"):
            self._become(node, "running")
            node.ready_s = min(node.ready_s, self._clock.now_s)
            self._fleet.join(node.worker)

    def _drained(self, node: SimNode, since_s: float) -> None:
        """`since_s`: of the drain that asked; it may have been taken back since."""
        if node.state != "draining" or node.since_s != since_s:
            return
        waited_s = self._clock.now_s - since_s
        must_leave = node.worker.role == "both" and waited_s >= self.spec.drain_limit_s
        if not node.worker.is_empty and not must_leave:
            self._clock.at(self._clock.now_s + POLL_S, self._drained, node, since_s)
            return
        self._become(node, "gone")
        node.ended_s = self._clock.now_s
        self._fleet.remove(node.worker)

    def _emptied(self, node: SimNode) -> None:
        if node.worker.is_empty:
            self._clock.at(self._clock.now_s + self.spec.flip_s, self._flipped, node)
        else:
            self._clock.at(self._clock.now_s + POLL_S, self._emptied, node)

    def _flipped(self, node: SimNode) -> None:
        if node.state == "gone":
            return
        assert node.next_role is not None
        node.worker.role, node.next_role = node.next_role, None
        self._fleet.join(node.worker)
        if node.state == "running":  # it may drain for good by now
            self._fleet.undrain(node.worker)


class FleetSchedule:
    """A number of workers of role both per minute, known in advance: nodes are ordered so that they run in time."""

    def __init__(self, fleet: ElasticFleet, clock: VirtualClock, counts: tuple[int, ...]) -> None:
        self._fleet, self._clock = fleet, clock
        start_s, now_s = fleet.spec.start_s, clock.now_s
        kept = kept_through(counts, int(-(-start_s // 60)))
        for minute, (before, wanted) in enumerate(pairwise(kept), start=1):
            at_s = now_s + 60.0 * minute
            for _ in range(wanted - before):
                clock.at(max(now_s, at_s - start_s), self._start)
            for _ in range(before - wanted):
                clock.at(at_s, self._drain)

    def _start(self) -> None:
        self._fleet.start("both")

    def _drain(self) -> None:
        running = [node for node in self._fleet.present if node.state == "running"]
        if len(running) > 1:
            idlest = min(running, key=lambda node: (node.worker.n_present, node.worker.name))
            self._fleet.drain(idlest.worker.name)


def kept_through(counts: tuple[int, ...], start_minutes: int) -> tuple[int, ...]:
    """The same counts without dips that are no longer than a start takes: to keep a node costs less than another."""
    n = start_minutes
    ahead = [max(counts[minute : minute + n + 1]) for minute in range(len(counts))]
    return tuple(min(ahead[max(0, minute - n) : minute + 1]) for minute in range(len(counts)))
