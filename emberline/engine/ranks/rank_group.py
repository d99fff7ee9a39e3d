"""A rank group as one of its processes sees it: rank 0, which decides what a step computes, or a follower.

A group lives and dies as one: the first rank that is gone, fails or hangs ends all of them within a second. Whoever
supervises rank 0 starts it anew, and the streams move to another worker meanwhile.
"""

import contextlib
import logging
import os
import select
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NoReturn

import msgspec

from emberline.engine.core.plan import Admission, DeviceLost, StepPlan
from emberline.engine.ranks import messages
from emberline.engine.ranks.flags import STEP_TIMEOUT_S
from emberline.engine.ranks.follower_processes import FollowerProcesses
from emberline.engine.ranks.messages import (
    Agreed,
    End,
    KVReport,
    Launch,
    Loaded,
    RankFailed,
    Ready,
    StepMessage,
    StepResult,
)
from emberline.engine.ranks.plan_channel import ConnectionReader, PlanReader, PlanWriter
from emberline.engine.ranks.plan_ring import RingClosed
from emberline.kernels.collectives import ParallelGroups
from emberline.kv.transfer.connection import PeerConnection, PeerConnectionLost
from emberline.kv.transfer.manager import dialed
from emberline.protocol.block_hash import KVGroup
from emberline.protocol.errors import BadInput
from emberline.protocol.frames import MAX_FRAME_BYTES
from emberline.protocol.parallel_layout import Layout, Position
from emberline.protocol.request import RankEndpoint

END_S = 5.0
LOAD_S = 3600.0  # for a rank to load its weights
_WATCH_S = 0.2
_REASON_S = 0.5
_EXIT_S = 2.0  # for the exit status of a follower whose connection is closed
_EXIT_STATUS = 1

_log = logging.getLogger(__name__)


class Leader:
    """Rank 0. Its watching thread ends the process when the group cannot go on, whatever the main thread does."""

    rank = 0

    def __init__(
        self,
        layout: Layout,
        groups: ParallelGroups,
        connections: Sequence[PeerConnection],
        plans: PlanWriter,
        processes: FollowerProcesses | None = None,
        folder: Path | None = None,
        step_timeout_s: float = STEP_TIMEOUT_S,
    ) -> None:
        self.layout, self.groups = layout, groups
        self._connections, self._plans = connections, plans
        self._processes, self._folder = processes, folder
        self._step_timeout_s = step_timeout_s
        self._results: SimpleQueue[StepResult] = SimpleQueue()
        self._steps: deque[float] = deque()  # when the steps in flight were launched
        self._closing = self._started = False
        self.end_s = END_S  # for followers to end by themselves
        self.slices: tuple[tuple[KVGroup, ...], ...] = ()  # of every rank, once they have agreed
        self.endpoints: tuple[RankEndpoint, ...] = ()  # where they receive KV; empty: some do not
        self.on_report: Callable[[int, KVReport], None] = lambda rank, report: None  # called by the watching thread

    @property
    def position(self) -> Position:
        return Position()

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the followers that this process has started, by rank."""
        return {} if self._processes is None else self._processes.pids()

    def agree(self, kv_groups: Sequence[KVGroup], n_blocks: list[int], token: str = "", pem: str = "") -> list[int]:
        """The blocks of each KV group for which every rank has memory. Waits until all have loaded. token, pem: of this
        worker in a cluster, for the other ranks to receive and send KV."""
        least, kv = list(n_blocks), _names(kv_groups)
        endpoints = [RankEndpoint("", tuple(kv_groups))]
        for rank, connection in enumerate(self._connections, 1):
            loaded = self._receive(rank, connection, LOAD_S)
            if not isinstance(loaded, Loaded):
                raise BadInput(f"rank {rank}: {getattr(loaded, 'message', 'it did not say what it has loaded')}")
            if loaded.kv != kv:
                raise BadInput(f"rank {rank} cannot join rank 0: KV groups {loaded.kv} there, {kv} here")
            least = [min(pair) for pair in zip(least, loaded.n_blocks)]
            endpoints.append(RankEndpoint(_reached(loaded.address, connection.peer_host), loaded.slices))
        self.slices = tuple(endpoint.kv_groups for endpoint in endpoints)
        self.endpoints = tuple(endpoints) if all(endpoint.address for endpoint in endpoints[1:]) else ()
        for connection in self._connections:
            connection.send(Agreed(least, self.slices, token, pem))
        return least

    def start(self) -> None:
        """Wait until every rank is ready for steps, then watch them."""
        for rank, connection in enumerate(self._connections, 1):
            answer = self._receive(rank, connection, LOAD_S)
            if not isinstance(answer, Ready):
                raise BadInput(f"rank {rank}: {getattr(answer, 'message', 'it is not ready')}")
        self._started = True
        if self._connections:
            threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def _receive(self, rank: int, connection: PeerConnection, timeout_s: float) -> messages.ToLeader:
        limit_s = time.monotonic() + timeout_s
        while not connection.wait(timeout_s=_WATCH_S):
            if self._processes is not None:
                self._processes.check()
            if time.monotonic() > limit_s:
                raise BadInput(f"rank {rank} was not ready within {timeout_s:g} seconds")
        try:
            message: messages.ToLeader = connection.receive(messages.to_leader)
            return message
        except PeerConnectionLost as error:
            if self._processes is not None:
                self._processes.exit_of(rank, _EXIT_S)
                self._processes.check()  # which says why
            raise BadInput(f"rank {rank} is gone: {error}") from None

    # --- steps ------------------------------------------------------------------------------------------------------

    def publish(self, message: StepMessage) -> None:
        """DeviceLost: the followers do not take it."""
        try:
            self._plans.write(message)
        except (RingClosed, PeerConnectionLost) as error:
            raise DeviceLost(f"the followers do not take plans: {error}") from None

    def publish_plan(self, plan: StepPlan) -> None:
        """Send a plan to all followers, without the pixels of images: rank 0 embeds their patches."""
        if any(admission.request.images for admission in plan.admissions):
            plan = replace(plan, admissions=[_without_pixels(admission) for admission in plan.admissions])
        self.publish(Launch(plan))

    def step_began(self) -> None:
        self._steps.append(time.monotonic())

    def step_ended(self) -> None:
        self._steps.popleft()

    def result(self, number: int) -> StepResult:
        """Wait for what the last stage sampled in a step, which must be the oldest in flight."""
        while True:
            try:
                result = self._results.get(timeout=_WATCH_S)
            except Empty:
                continue  # the watching thread ends a step that takes too long
            if result.number == number:
                return result

    def wait_for_reason(self) -> None:
        """After a step has failed here: if that is because another rank has, the watching thread says so and ends the
        process meanwhile."""
        if self._connections and self._started:
            time.sleep(_REASON_S)

    # --- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the group in good order, or what is left of it."""
        self._closing = True
        with contextlib.suppress(RingClosed, PeerConnectionLost, OSError):
            self._plans.write(End())
        if self._processes is not None:
            self._processes.end(self.end_s if self._started else 0.0)
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _watch(self) -> None:
        waiting = {connection.fileno(): (rank, connection) for rank, connection in enumerate(self._connections, 1)}
        poller = select.poll()
        for descriptor in waiting:
            poller.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in poller.poll(1000 * _WATCH_S):
                rank, connection = waiting[descriptor]
                if self._closing:
                    return
                try:
                    message = connection.receive(messages.to_leader, MAX_FRAME_BYTES)
                except PeerConnectionLost:
                    self._end_group(f"rank {rank} is gone: {self._exit_of(rank)}")
                if isinstance(message, RankFailed):
                    self._end_group(f"rank {rank} failed: {message.message}")
                if isinstance(message, StepResult):
                    self._results.put(message)
                elif isinstance(message, KVReport):
                    self.on_report(rank, message)
            began_s = self._steps[0] if self._steps else None
            if began_s is not None and time.monotonic() - began_s > self._step_timeout_s:
                behind = [str(rank) for rank, n in enumerate(self._plans.n_unread(), 1) if n]
                who = f"rank {', '.join(behind)} has not finished it" if behind else "all followers have finished it"
                self._end_group(f"a step has taken {self._step_timeout_s:g} seconds: {who}")

    def _exit_of(self, rank: int) -> str:
        if self._processes is None:
            return "its connection is closed"
        return self._processes.exit_of(rank, _EXIT_S)

    def _end_group(self, reason: str) -> NoReturn:
        """The main thread may hang in a collective: end the process from here."""
        _log.error("the rank group ends: %s", reason)
        if self._processes is not None:
            self._processes.kill()
        self._remove_folder()
        os._exit(_EXIT_STATUS)


class Member:
    """A follower: rank 1 and up."""

    def __init__(
        self, layout: Layout, rank: int, groups: ParallelGroups, connection: PeerConnection, plans: PlanReader | None
    ) -> None:
        self.layout, self.rank, self.groups = layout, rank, groups
        self._connection, self._plans = connection, plans
        self._sending = threading.Lock()  # threads of transfers and tiers report, too
        self.slices: tuple[tuple[KVGroup, ...], ...] = ()  # of every rank, once they have agreed
        self.token = self.pem = ""  # the worker's join token, and its certificates

    @property
    def position(self) -> Position:
        return self.layout.position(self.rank)

    def agree(self, kv_groups: Sequence[KVGroup], n_blocks: list[int], address: str = "") -> list[int]:
        """`address`: where this rank receives KV."""
        self._connection.send(Loaded(_names(kv_groups), n_blocks, tuple(kv_groups), address))
        answer = self._connection.receive(messages.to_follower)
        if not isinstance(answer, Agreed):
            raise BadInput("rank 0 did not say how many KV blocks there are")
        self.slices, self.token, self.pem = answer.slices, answer.token, answer.pem
        return answer.n_blocks

    def start(self) -> PlanReader:
        """Tell rank 0 that steps may come. From now on this process ends when rank 0 does."""
        self._connection.send(Ready())
        if self._plans is None:
            return ConnectionReader(self._connection, _exit_without_leader)
        threading.Thread(target=self._exit_with_leader, name="rank 0", daemon=True).start()
        return self._plans

    def send(self, message: StepResult | KVReport | RankFailed) -> None:
        with self._sending:
            self._connection.send(message)

    def close(self) -> None:
        self._connection.close()

    def _exit_with_leader(self) -> None:
        try:
            self._connection.receive(messages.to_follower)
        except PeerConnectionLost as error:
            _exit_without_leader(error)


def _reached(address: str, host: str) -> str:
    """Where a rank is reached that says where it listens. `host`: its machine; empty: this one."""
    if not address or not host:
        return address
    return dialed(address, f"tcp:[{host}]:0" if ":" in host else f"tcp:{host}:0")


def _without_pixels(admission: Admission) -> Admission:
    """The admission of a sequence without the pixels of its images."""
    request = admission.request
    images = tuple(msgspec.structs.replace(image, pixels=b"") for image in request.images)
    return replace(admission, request=msgspec.structs.replace(request, images=images))


def _names(kv_groups: Sequence[KVGroup]) -> tuple[str, ...]:
    return tuple(f"{group.name}:{group.dtype}" for group in kv_groups)


def _exit_without_leader(error: PeerConnectionLost) -> NoReturn:
    """The main thread may hang in a collective."""
    _log.error("this rank ends: rank 0 is gone: %s", error)
    os._exit(_EXIT_STATUS)


RankGroup = Leader | Member
