"""The KV pool's processes on this machine: Mooncake's master, unless one is configured, and the memory that is lent."""

import contextlib
import ctypes
import importlib.util
import socket
from collections.abc import Callable, Iterator, Mapping

import msgspec

from emberline.config import KVConfig
from emberline.engine.memory import free_host_bytes
from emberline.protocol.errors import BadInput
from emberline.protocol.kv_store import StoreSettings
from emberline.supervisor.process import MIN_BACKOFF_S, ProcessGroup, ProcessSpec, SupervisedProcess

LIBRARIES = {"libibverbs.so.1": "libibverbs1", "librdmacm.so.1": "librdmacm1"}  # and Debian's packages of them
MAX_LENT_BYTES = 2 << 30  # unless it is configured


def check_installed(libraries: Mapping[str, str] = LIBRARIES) -> None:
    """Check that Mooncake Store can run on this machine: the package, and `libraries` (with Debian's packages of them).
    Raises BadInput that says what to install.
    """
    if importlib.util.find_spec("mooncake") is None:
        raise BadInput(
            "--kv-store mooncake needs Mooncake, which is not installed: pip install 'emberline[mooncake]' "
            "(on a GPU host with RDMA: pip install mooncake-transfer-engine)",
            param="kv.store",
        )
    missing = []
    for library, package in libraries.items():
        try:
            ctypes.CDLL(library)
        except OSError:
            missing.append(package)
    if missing:
        raise BadInput(
            f"--kv-store mooncake needs system libraries that are missing: apt install {' '.join(missing)}",
            param="kv.store",
        )


class PoolPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Part of this machine in the pool. Ports stay the same over restarts."""

    store: StoreSettings
    lend_bytes: int  # 0: none
    starts_master: bool


def plan_pool(config: KVConfig, check: Callable[[], None] = check_installed) -> PoolPlan | None:
    """Plan how this machine takes part in the pool. Returns None if no pool is configured. Raises BadInput if the pool
    cannot run here; `check` raises it if something is not installed.
    """
    if not config.store:
        if config.pool_master:
            raise BadInput("kv.pool_master is set, but no pool is wanted: add --kv-store mooncake", param="kv.store")
        return None
    check()
    lent = config.pool_bytes if config.pool_bytes is not None else min(free_host_bytes() // 8, MAX_LENT_BYTES)
    host, device = config.pool_host, config.pool_device
    protocol = "rdma" if device else "tcp"
    if config.pool_master:
        metrics = config.pool_metrics
        store = StoreSettings(config.pool_master, host, protocol, device, metrics)
        return PoolPlan(store=store, lend_bytes=lent, starts_master=False)
    with _free_ports(host, 2) as (port, metrics_port):
        store = StoreSettings(f"{host}:{config.pool_port or port}", host, protocol, device, f"{host}:{metrics_port}")
    return PoolPlan(store=store, lend_bytes=lent, starts_master=True)


@contextlib.contextmanager
def _free_ports(host: str, n: int) -> Iterator[list[int]]:
    with contextlib.ExitStack() as stack:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sockets = [stack.enter_context(socket.socket(family)) for _ in range(n)]
        try:
            for each in sockets:
                each.bind((host.strip("[]"), 0))
        except OSError as error:
            raise BadInput(
                f"kv.pool_host: {host} is not an address of this machine: {error}", param="kv.pool_host"
            ) from None
        yield [each.getsockname()[1] for each in sockets]


class PoolProcesses(ProcessGroup):
    """`start` returns when the master answers; the memory is lent a moment later, and again after every restart."""

    def __init__(self, plan: PoolPlan, backoff_s: float = MIN_BACKOFF_S) -> None:
        """`backoff_s`: before the first restart of a process that died."""

        def supervised(spec: ProcessSpec) -> SupervisedProcess:
            return SupervisedProcess(msgspec.structs.replace(spec, backoff_s=backoff_s))

        self._master = supervised(_master_spec(plan)) if plan.starts_master else None
        self._memory = supervised(_memory_spec(plan)) if plan.lend_bytes else None
        super().__init__(process for process in (self._master, self._memory) if process is not None)

    async def start(self) -> None:
        if self._master is not None:
            await self._master.start()
            await self._master.wait_ready()
        if self._memory is not None:
            await self._memory.start()
            await self._memory.wait_ready()


def _master_spec(plan: PoolPlan) -> ProcessSpec:
    host, _, port = plan.store.master.rpartition(":")
    arguments = ("--host", host, "--port", port, "--metrics-port", plan.store.metrics.rpartition(":")[2])
    return ProcessSpec(name="kv-pool-master", module="emberline.kv.tiers.pool.mooncake_master", arguments=arguments)


def _memory_spec(plan: PoolPlan) -> ProcessSpec:
    arguments = ("--kv-store", plan.store.url, "--bytes", str(plan.lend_bytes))
    return ProcessSpec(name="kv-pool-memory", module="emberline.kv.tiers.pool.pool_memory", arguments=arguments)
