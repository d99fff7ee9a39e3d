"""The transport over Mooncake's Transfer Engine, where it is installed: TCP, RDMA and what else it supports."""

import ctypes
import importlib
from collections.abc import Sequence
from typing import Any

from emberline.kv.host_memory import HostMemory
from emberline.kv.transfer.messages import TransportOpened
from emberline.kv.transfer.transport import BlockCopy, TransportUnavailable

MOONCAKE = "mooncake"
_ADDRESS_BYTES = 8


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class MooncakeEngine:
    """One per process; our pools are registered with it.

    protocol: PROTOCOL or PROTOCOL:DEVICE; host: the address at which others reach us.
    """

    def __init__(self, memory: HostMemory, host: str, protocol: str) -> None:
        try:
            library = importlib.import_module("mooncake.engine")
        except (ImportError, OSError) as error:
            raise TransportUnavailable(f"Mooncake's Transfer Engine cannot be loaded: {error}") from None
        name, _, device = protocol.partition(":")
        self._engine: Any = library.TransferEngine()
        if self._engine.initialize(host, "P2PHANDSHAKE", name, device):
            raise TransportUnavailable(f"Mooncake's Transfer Engine does not start on {host} with {protocol}")
        self.memory = memory
        self.address = f"{host}:{self._engine.get_rpc_port()}"
        self.pools = [(_address(pool), len(pool)) for pool in memory.pools]
        for pointer, n_bytes in self.pools:
            if self._engine.register_memory(pointer, n_bytes):
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
        pools = [pointer.to_bytes(_ADDRESS_BYTES, "little") for pointer, _ in self._engine.pools]
        return TransportOpened([self._engine.address.encode(), *pools]), []


class MooncakeSendTransport:
    batch_bytes = 64 << 20

    def __init__(self, engine: MooncakeEngine, opened: TransportOpened) -> None:
        self._engine = engine
        address, *pools = opened.handles or [b""]
        if len(pools) != len(engine.pools) or any(len(raw) != _ADDRESS_BYTES for raw in pools):
            raise TransportUnavailable(f"{len(pools)} pools are registered, {len(engine.pools)} are needed")
        self._address = address.decode(errors="replace")
        self._targets = [int.from_bytes(raw, "little") for raw in pools]

    def write(self, epoch: int, copies: Sequence[BlockCopy]) -> None:
        sizes = [self._engine.memory.block_bytes[copy.group] for copy in copies]
        self._engine.write(
            self._address,
            [self._engine.pools[copy.group][0] + copy.source * size for copy, size in zip(copies, sizes)],
            [self._targets[copy.group] + copy.target * size for copy, size in zip(copies, sizes)],
            sizes,
        )

    def close(self) -> None:
        pass
