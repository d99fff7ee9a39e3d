"""Starting and stopping replicas: what the planner asks a machine, or an engine over many machines, to do.

A replica that a launcher has started joins the cluster by itself, under the name it was ordered with. From then on it
is a member like any other: the member table says whether it drains, and cores dial it. A launcher only knows whether
its process runs.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from emberline.config import EngineConfig
from emberline.engine.worker import cpu_share
from emberline.protocol.errors import Conflict, Unavailable
from emberline.protocol.frames import WorkerRole
from emberline.protocol.parallel_layout import Layout
from emberline.supervisor.cluster.replica_demand import NodeOffer
from emberline.supervisor.engine_workers import EngineWorkers, JoinSettings, layout_of, plan_workers
from emberline.supervisor.process import SupervisedProcess

LaunchState = Literal["starting", "running", "lost"]
LEFT = "it has left the cluster"  # why one is lost that an operator, or the planner, has told to leave
CPU = "cpu"  # the kind of a replica without a GPU
LOCAL = "local "  # a launcher of this name, followed by that of a core: its replicas end with the core

log = logging.getLogger("emberline.cluster")


class ReplicaOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One replica to start."""

    name: str  # under which it joins; unique in the cluster
    model: str  # its id
    path: Path  # of the weights
    role: WorkerRole = "both"
    gpu: str = ""  # kind, as a NodeOffer names it; empty: any
    region: str = ""
    account: str = ""  # that alone may use it; empty: all
    layout: Layout = Layout()


class LaunchedReplica(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    state: LaunchState  # running: its process serves, or is being restarted; lost: it is gone, and is not restarted
    age_s: float = 0.0  # since it became that
    problem: str = ""  # why it is lost


class Launcher(Protocol):
    async def offers(self) -> tuple[NodeOffer, ...]:
        """Return the nodes that could be started now."""

    async def start(self, order: ReplicaOrder) -> None:
        """Returns when it is being started: `replicas` shows what becomes of it. One of this name that is lost is
        started anew. Conflict: it runs already. Unavailable: there is no room for it."""

    async def stop(self, name: str) -> None:
        """End a replica, which was drained before, and forget it. One that is not known is no error."""

    async def replicas(self) -> tuple[LaunchedReplica, ...]:
        """All that were started and not stopped."""


class _Launched:
    def __init__(self, process: SupervisedProcess, slot: int) -> None:
        self.process = process
        self.slot = slot
        self.state: LaunchState = "starting"
        self.since_s = time.monotonic()
        self.problem = ""
        self.watching: asyncio.Task[None] | None = None

    def set(self, state: LaunchState, problem: str = "") -> None:
        self.state, self.problem, self.since_s = state, problem, time.monotonic()


class LocalLauncher:
    """Replicas on this machine, as processes of its supervisor, which restarts one that dies: on each GPU (or each set
    of as many as a replica has ranks) one, on a machine without GPUs as many as it has cores."""

    def __init__(
        self,
        workers: EngineWorkers,
        config: EngineConfig,
        join: Callable[[str], JoinSettings],
        n_replicas: int = 0,
        gpu: str = "",
    ) -> None:
        """`join`: how a worker of this name joins. `n_replicas`: at most; 0: see above. `gpu`: the kind of this
        machine's GPUs."""
        self._workers = workers
        hardware = workers.hardware
        gpus = hardware.gpus if config.device != "cpu" else ()
        n_slots = n_replicas or (len(gpus) // layout_of(config).n_ranks if gpus else hardware.cores)
        self._config = msgspec.structs.replace(
            config, replicas=n_slots, prefill_workers=0, decode_workers=0, gpu_memory_share=()
        )
        self._kind = (gpu or "cuda") if gpus else CPU
        self._join = join
        self._n_slots = n_slots
        self._launched: dict[str, _Launched] = {}

    async def offers(self) -> tuple[NodeOffer, ...]:
        n_ranks = layout_of(self._config).n_ranks
        return (NodeOffer(gpu=self._kind, n_free=len(self._free_slots()), cost=float(n_ranks)),)

    async def start(self, order: ReplicaOrder) -> None:
        known = self._launched.get(order.name)
        if known is not None and known.state != "lost":
            raise Conflict(f"{order.name} was started already")
        if order.gpu not in ("", self._kind):
            raise Unavailable(f"{order.name} needs a GPU of kind {order.gpu}, and this machine has {self._kind}")
        await self.stop(order.name)
        free = self._free_slots()
        if not free:
            raise Unavailable(f"this machine has no room for {order.name}: {self._n_slots} replicas run")
        config = _with_layout(self._config, order.layout)
        plan = msgspec.structs.replace(
            plan_workers(config, {order.model: order.path}, hardware=self._workers.hardware, is_scaled=True)[free[0]],
            name=order.name,
            role=order.role,
            number=cpu_share.MAX_WORKERS - 1 - free[0],  # workers that do not join count from below
        )
        settings = msgspec.structs.replace(self._join(order.name), region=order.region, account=order.account)
        process = self._workers.join(plan, config, settings)
        launched = self._launched[order.name] = _Launched(process, free[0])
        launched.watching = asyncio.create_task(self._watch(order.name, launched), name=f"launch {order.name}")
        log.info("starting replica %s of %s", order.name, order.model, extra={"role": order.role})

    async def stop(self, name: str) -> None:
        launched = self._launched.pop(name, None)
        if launched is None:
            return
        await self._workers.retire(name)
        assert launched.watching is not None
        launched.watching.cancel()
        await asyncio.gather(launched.watching, return_exceptions=True)
        log.info("stopped replica %s", name)

    async def replicas(self) -> tuple[LaunchedReplica, ...]:
        now_s = time.monotonic()
        return tuple(
            LaunchedReplica(name=name, state=each.state, age_s=now_s - each.since_s, problem=each.problem)
            for name, each in self._launched.items()
        )

    def _free_slots(self) -> list[int]:
        taken = {each.slot for each in self._launched.values() if each.state != "lost"}
        return [slot for slot in range(self._n_slots) if slot not in taken]

    async def _watch(self, name: str, launched: _Launched) -> None:
        try:
            await launched.process.start()
            await launched.process.wait_ready()
            launched.set("running")
            await launched.process.wait_ended()
            launched.set("lost", LEFT)
        except Exception as error:  # whatever it is, it is why there is no replica
            log.error("replica %s could not be started: %s", name, error)
            launched.set("lost", str(error))


def _with_layout(config: EngineConfig, layout: Layout) -> EngineConfig:
    return msgspec.structs.replace(config, tp=layout.tp, pp=layout.pp, ep=layout.ep, dcp=layout.dcp)
