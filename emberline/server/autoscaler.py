"""The planner of `emberline serve`: which launcher it has, and how replicas that it starts on this machine join."""

import asyncio
import hashlib
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from emberline.accounts.secret import Secret
from emberline.catalog.model_store import ModelStore
from emberline.cluster.cluster import Cluster, cluster_id, join_key
from emberline.cluster.member_table import MemberTable
from emberline.cluster.planner_table import PlannerTable
from emberline.config import Config
from emberline.net.periodic import stop
from emberline.protocol.credential import Credential
from emberline.protocol.errors import Unavailable, Unsupported
from emberline.protocol.frames import WorkerRole
from emberline.protocol.member import Member
from emberline.store import Database
from emberline.supervisor.cluster import planner
from emberline.supervisor.cluster.certificate_authority import KEY_BYTES, CertificateAuthority
from emberline.supervisor.cluster.launcher import LOCAL, LaunchedReplica, Launcher, LocalLauncher, ReplicaOrder
from emberline.supervisor.cluster.planner import Deployment, Planner
from emberline.supervisor.cluster.ray_launcher import RayLauncher
from emberline.supervisor.cluster.replica_demand import NodeOffer
from emberline.supervisor.engine_workers import EngineWorkers, JoinSettings, layout_of

if TYPE_CHECKING:
    from emberline.service.core import LocalCore

LOOPBACK = "127.0.0.1"


def core_name(home: Path) -> str:
    """Name of the core with this data folder: unique in the cluster, and the same after a restart."""
    return f"{socket.gethostname()[:40]}-{hashlib.sha256(str(home).encode()).hexdigest()[:8]}"


class NoLauncher:
    """Launcher of a core that starts no engine workers: the planner drains and flips those that have joined."""

    async def offers(self) -> tuple[NodeOffer, ...]:
        return ()

    async def start(self, order: ReplicaOrder) -> None:
        raise Unsupported(f"{order.name} cannot be started: this core starts no engine workers")

    async def stop(self, name: str) -> None:
        pass

    async def replicas(self) -> tuple[LaunchedReplica, ...]:
        return ()


class FleetMembers:
    """The member table, changed by this core for all of them."""

    def __init__(self, cluster: Cluster, table: MemberTable, model_id: Callable[[str], str | None]) -> None:
        self._cluster, self._table, self._model_id = cluster, table, model_id

    async def all(self) -> list[Member]:
        """All members, their models by id: workers may have joined under another name of a model."""
        found = await self._table.all()
        return [msgspec.structs.replace(each, model=self._model_id(each.model) or each.model) for each in found]

    async def change(self, name: str, action: Literal["drain", "undrain", "leave"]) -> None:
        await self._cluster.change(name, action)

    async def set_role(self, name: str, role: WorkerRole) -> None:
        await self._cluster.set_role(name, role)

    async def forget(self, name: str) -> None:
        if (member := await self._table.find(name)) is not None:
            await self._table.forget(name, member.epoch)


def joining(config: Config, url: str) -> Callable[[str], JoinSettings]:
    """Return a function that makes the join settings of replicas started on this machine. Over loopback nothing is
    encrypted."""
    secret, address = Secret.open(config.home), config.cluster.address
    authority = None
    if address:
        authority = CertificateAuthority(secret.derive("cluster-ca", size=KEY_BYTES), cluster_id(secret))

    def join(name: str) -> JoinSettings:
        key = join_key(secret, name)
        if authority is None:
            credential = Credential(name=name, cluster=cluster_id(secret), key=key)
        else:
            credential = authority.worker_credential(name, key)
        host = f"[{address}]" if ":" in address else address or LOOPBACK
        return JoinSettings(cores=(url,), credential=credential.encode(), address=f"tcp:{host}:0")

    return join


class Planning:
    """The planner of this core, while it serves. It is one of several in a cluster, of which one plans."""

    def __init__(
        self,
        config: Config,
        core: "LocalCore",
        store: Database,
        paths: Mapping[str, Path],
        launcher: Launcher,
        launcher_name: str,
        round_s: float = planner.ROUND_S,
    ) -> None:
        """`paths`: the weights of models that were named, which need not be in the model store."""
        assert core.cluster is not None, "this process is a core of a cluster"
        assert core.scaling is not None
        models, layout, scaling = ModelStore(config.home), layout_of(config.engine), core.scaling
        table = PlannerTable(store)
        news = table.listen(round_s)
        can_start = not isinstance(launcher, NoLauncher)
        scaling.can_start = can_start and config.cluster.planner == "on"

        async def wait(seconds: float) -> None:
            await anext(news)
            news.skip()

        def deployment(model: str) -> Deployment | None:
            path = paths.get(model)
            if path is None and (entry := models.find(model)) is not None:
                path = entry.path
            return None if path is None else Deployment(path=path, layout=layout, region=config.cluster.region)

        self._planner = Planner(
            core_name(config.home),
            table,
            table.lock(),
            FleetMembers(core.cluster, MemberTable(store), scaling.model_id),
            launcher,
            lambda: scaling.bounds,
            deployment,
            mode="dry-run" if config.cluster.planner == "dry-run" else "on",
            launcher_name=launcher_name,
            can_start=can_start,
            wait=wait,
            round_s=round_s,
        )
        self._launcher = launcher
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._planner.run(), name="planner")

    async def close(self) -> None:
        await stop(self._task)
        if isinstance(self._launcher, RayLauncher):
            await self._launcher.close()


def open_launcher(config: Config, workers: EngineWorkers, url: str) -> tuple[Launcher, str]:
    """Open the launcher through which this core's planner starts replicas. Returns the launcher and its name. `url` is
    this core's."""
    cluster = config.cluster
    if cluster.launcher in ("auto", "ray") and (found := _ray_launcher(config)) is not None:
        return found, "ray"
    if cluster.launcher == "ray":
        raise Unavailable("[cluster] launcher is ray, and no Ray runs here: start it with `emberline cluster up`")
    if cluster.launcher == "none" or cluster.core_only:
        return NoLauncher(), "none"
    engine = msgspec.structs.replace(config.engine, models=())
    launcher = LocalLauncher(workers, engine, joining(config, url), cluster.local_replicas)
    return launcher, f"{LOCAL}{core_name(config.home)}"


def _ray_launcher(config: Config) -> Launcher | None:
    """None: no Ray of this data folder runs here."""
    from emberline.server.cluster_setup import CLUSTER_FILE, open_ray_launcher
    from emberline.supervisor.cluster.cluster_file import ClusterFile, read_cluster_file
    from emberline.supervisor.cluster.ray_cluster import FOLDER
    from emberline.supervisor.cluster.ray_node import Record

    record = Record.read(config.home / FOLDER)
    if record is None or not record.processes():
        return None
    path = config.home / CLUSTER_FILE
    file = read_cluster_file(path) if path.exists() else ClusterFile()
    return open_ray_launcher(config, file, list(record.nodes))
