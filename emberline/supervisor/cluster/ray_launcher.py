"""Replicas on the machines of a Ray cluster: one detached, named actor per replica, or per rank of one that spans
machines. Whoever opens a launcher finds those that others have started, also after the head was away.

A worker's credential is made for its name when it is needed, and handed to its actor by a call between processes, over
TLS. An actor that Ray has started anew on another node has none, and gets one when `replicas` is next called: the
planner does that all the time, and so does the process of `emberline cluster up` at the head.
"""

import asyncio
import contextlib
import json
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from emberline.protocol.errors import Conflict, Unavailable
from emberline.supervisor.cluster.launcher import CPU, LaunchedReplica, ReplicaOrder
from emberline.supervisor.cluster.ray_driver import NodeState
from emberline.supervisor.cluster.ray_probe import check_guarded
from emberline.supervisor.cluster.ray_replica import WORKER, RankTask
from emberline.supervisor.cluster.ray_settings import NodeSettings, check_ray, host_port, ray_environment, tls_context
from emberline.supervisor.cluster.replica_demand import NodeOffer

CONNECT_S = 60.0
CALL_S = 75.0  # longer than what the driver waits for in one call: most to start one anew that was lost
MAX_LINE_BYTES = 8 << 20

log = logging.getLogger("emberline.cluster")


class PlacedReplica(msgspec.Struct, frozen=True, kw_only=True):
    """A replica, as its actors report it."""

    name: str
    state: str
    age_s: float
    problem: str
    waits: bool
    n_restarts: int  # of its process, in place
    addresses: tuple[str, ...]  # of its machines
    n_ranks: int
    model: str
    role: str


class RayLauncher:
    """Owned by a core's process, or by that of `emberline cluster up`. Its machine has a node of the same Ray."""

    def __init__(
        self,
        node: NodeSettings,
        cores: tuple[str, ...],
        credential: Callable[[str], str],
        n_ranks: int = 1,
        module: str = WORKER,
        arguments: tuple[str, ...] = (),
    ) -> None:
        """`cores`: URLs that workers join at. `credential`: made for a worker of this name, as text. `n_ranks`: of the
        replicas that `offers` counts. `arguments`: of every worker, besides those that follow from its order."""
        self._node = node
        self._cores = cores
        self._credential = credential
        self.n_ranks = n_ranks
        self._module = module
        self.arguments = arguments
        self._driver: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def offers(self) -> tuple[NodeOffer, ...]:
        return offers_of([msgspec.convert(node, NodeState) for node in await self.nodes()], self.n_ranks)

    async def start(self, order: ReplicaOrder) -> None:
        task = RankTask(order=order, cores=self._cores, module=self._module, arguments=self.arguments)
        await self._call("start", task=json.loads(task.encode()))
        log.info("starting replica %s of %s", order.name, order.model, extra={"role": order.role})

    async def stop(self, name: str) -> None:
        await self._call("stop", name=name)
        log.info("stopped replica %s", name)

    async def replicas(self) -> tuple[LaunchedReplica, ...]:
        return tuple(
            LaunchedReplica(
                name=each.name,
                state="lost" if each.state == "lost" else "running" if each.state == "running" else "starting",
                age_s=each.age_s,
                problem=each.problem,
            )
            for each in await self.placed()
        )

    async def placed(self, *, let_run: bool = True) -> list[PlacedReplica]:
        """All replicas. Those that are placed and have no credential yet get one, if `let_run`."""
        placed = [msgspec.convert(each, PlacedReplica) for each in await self._call("replicas")]
        for each in placed:
            if each.waits and let_run:
                try:
                    await self._call("run", name=each.name, credential=self._credential(each.name))
                except Unavailable as error:  # its node is gone again: at the next call
                    log.warning("replica %s could not be started: %s", each.name, error.message)
        return placed

    async def nodes(self) -> list[dict[str, Any]]:
        """Return the nodes on which replicas can be placed; see NodeState."""
        return list(await self._call("nodes"))

    async def close(self) -> None:
        """Replicas run on."""
        async with self._turn:
            await self._end_driver()

    async def _call(self, method: str, **arguments: Any) -> Any:
        """Unavailable: Ray does not answer. The next call connects anew."""
        async with self._turn:
            try:
                driver = await self._connected()
                assert driver.stdin is not None
                driver.stdin.write(json.dumps({"call": method, "arguments": arguments}).encode() + b"\n")
                return await self._answer(driver, CALL_S)
            except (OSError, ValueError, TimeoutError, asyncio.CancelledError) as error:
                await self._end_driver()  # its next answer would be that of this call
                if isinstance(error, asyncio.CancelledError):
                    raise
                raise Unavailable(f"Ray does not answer at {self._head}: is its head up?") from None

    @property
    def is_connected(self) -> bool:
        return self._driver is not None and self._driver.returncode is None

    @property
    def _head(self) -> str:
        return host_port(self._node.head, self._node.port)

    async def _answer(self, driver: asyncio.subprocess.Process, timeout_s: float) -> Any:
        assert driver.stdout is not None
        line = await asyncio.wait_for(driver.stdout.readline(), timeout_s)
        if not line:
            raise ConnectionError
        answer = json.loads(line)
        if "error" in answer:
            kind, message = answer["error"]["kind"], answer["error"]["message"]
            raise Conflict(message) if kind == Conflict.kind else Unavailable(message)
        return answer["result"]

    async def _connected(self) -> asyncio.subprocess.Process:
        if self._driver is not None and self.is_connected:
            return self._driver
        await self._end_driver()
        check_ray()
        environment = ray_environment(self._node)
        secure = tls_context(self._node.folder)
        await asyncio.to_thread(check_guarded, self._node.head, self._node.port, secure)
        self._driver = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "emberline.supervisor.cluster.ray_driver", self._head),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**environment, "EMBERLINE_LOG_LEVEL": "warning"},
            limit=MAX_LINE_BYTES,
            start_new_session=True,
        )
        await self._answer(self._driver, CONNECT_S)
        return self._driver

    async def _end_driver(self) -> None:
        driver, self._driver = self._driver, None
        if driver is None:
            return
        with contextlib.suppress(ProcessLookupError):
            driver.kill()
        await driver.wait()


def offers_of(nodes: Sequence[NodeState], n_ranks: int) -> tuple[NodeOffer, ...]:
    """Replicas of so many ranks for which there is room, by kind. Where there are GPUs, none is computed on CPUs; one
    that is larger than any machine is divided."""
    kinds = {node.kind for node in nodes}
    offers = []
    for kind in sorted(kinds - {CPU} or kinds):
        mine = [node for node in nodes if node.kind == kind]
        if any(node.n_total >= n_ranks for node in mine):
            n_free = sum(node.n_free // n_ranks for node in mine)
        else:
            n_free = sum(node.n_free for node in mine) // n_ranks
        offers.append(NodeOffer(gpu=kind, n_free=n_free, cost=float(n_ranks)))
    return tuple(offers)
