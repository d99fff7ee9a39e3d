"""The transport over Mooncake's Transfer Engine, where it is installed: TCP, RDMA and what else it supports."""

import ctypes
import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from emberline.kv.host_memory import HostMemory
from emberline.kv.slices import ByteRun
from emberline.kv.transfer.messages import TransportOpened
from emberline.kv.transfer.transport import BlockCopy, Target, TransportUnavailable

MOONCAKE = "mooncake"
_ADDRESS_BYTES = 8


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if view else 0


class Pool(NamedTuple):
    """Memory of the blocks of one KV group, of a host or a device."""

    address: int
    n_bytes: int  # 0: this rank has no part of these blocks
    block_bytes: int


def host_pools(memory: HostMemory) -> list[Pool]:
    """The pools in host memory, to be registered."""
    return [Pool(_address(pool), len(pool), size) for pool, size in zip(memory.pools, memory.block_bytes)]


class MooncakeEngine:
    """One per process, of each rank its own; its pools are registered with it.

    protocol: PROTOCOL or PROTOCOL:DEVICE; host: the address at which others reach us.
    """

    def __init__(self, pools: Sequence[Pool], host: str, protocol: str) -> None:
        try:
            library = importlib.import_module("mooncake.engine")
        except (ImportError, OSError) as error:
            raise TransportUnavailable(f"Mooncake's Transfer Engine cannot be loaded: {error}") from None
        name, _, device = protocol.partition(":")
        self._engine: Any = library.TransferEngine()
        if self._engine.initialize(host, "P2PHANDSHAKE", name, device):
            raise TransportUnavailable(f"Mooncake's Transfer Engine does not start on {host} with {protocol}")
        self.address = f"{host}:{self._engine.get_rpc_port()}"
        self.pools = list(pools)
        for pool in pools:
            if pool.n_bytes and self._engine.register_memory(pool.address, pool.n_bytes):
                raise TransportUnavailable("Mooncake's Transfer Engine cannot register our memory")

    def write(self, to: str, sources: list[int], targets: list[int], sizes: list[int]) -> None:
        if self._engine.batch_transfer_sync_write(to, sources, targets, sizes):
            raise TransportUnavailable(f"Mooncake's Transfer Engine did not reach {to}")


class MooncakeReceiveTransport:
    name = MOONCAKE
    linger_s = 2.0  # its threads write our blocks over a connection of their own

    def __init__(self, engine: MooncakeEngine) -> None:
        self._engine = engine

    def opened(self) -> tuple[TransportOpened, list[int]]:
        pools = [pool.address.to_bytes(_ADDRESS_BYTES, "little") for pool in self._engine.pools]
        return TransportOpened([self._engine.address.encode(), *pools]), []


class MooncakeSendTransport:
    batch_bytes = 64 << 20

    def __init__(self, engine: MooncakeEngine, opened: TransportOpened, target: Target | None = None) -> None:
        """target: what the receiver needs of our blocks; None: it has the same slices."""
        self._engine = engine
        sizes = [pool.block_bytes for pool in engine.pools]
        self._runs, self._target_bytes = (
            Target([[ByteRun(0, 0, n)] for n in sizes], sizes) if target is None else target
        )
        address, *pools = opened.handles or [b""]
        if len(pools) != len(engine.pools) or any(len(raw) != _ADDRESS_BYTES for raw in pools):
            raise TransportUnavailable(f"{len(pools)} pools are registered, {len(engine.pools)} are needed")
        self._address = address.decode(errors="replace")
        self._targets = [int.from_bytes(raw, "little") for raw in pools]

    def write(self, epoch: int, copies: Sequence[BlockCopy]) -> None:
        sources, targets, sizes = list[int](), list[int](), list[int]()
        for copy in copies:
            pool = self._engine.pools[copy.group]
            source = pool.address + copy.source * pool.block_bytes
            target = self._targets[copy.group] + copy.target * self._target_bytes[copy.group]
            for run in self._runs[copy.group]:
                if run.n_bytes:
                    sources.append(source + run.source)
                    targets.append(target + run.target)
                    sizes.append(run.n_bytes)
        if sizes:
            self._engine.write(self._address, sources, targets, sizes)

    def close(self) -> None:
        pass
