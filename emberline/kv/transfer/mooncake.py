"""Mooncake's Transfer Engine, where it is installed: bytes go by its TCP, or by RDMA and what else it knows."""

import ctypes
import importlib
from collections.abc import Sequence
from typing import Any

from emberline.kv.host_memory import HostMemory
from emberline.kv.transfer.messages import Opened
from emberline.kv.transfer.transport import Move, TransportClosed

NAME = "mooncake"
_ADDRESS_BYTES = 8


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class Engine:
    """One per process; our pools are registered with it. `how` is PROTOCOL or PROTOCOL:DEVICE, `host` our address."""

    def __init__(self, memory: HostMemory, host: str, how: str) -> None:
        try:
            library = importlib.import_module("mooncake.engine")
        except (ImportError, OSError) as error:
            raise TransportClosed(f"Mooncake's Transfer Engine cannot be loaded: {error}") from None
        protocol, _, device = how.partition(":")
        self._engine: Any = library.TransferEngine()
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, device):
            raise TransportClosed(f"Mooncake's Transfer Engine does not start on {host} with {how}")
        self.memory = memory
        self.name = f"{host}:{self._engine.get_rpc_port()}"
        self.pools = [(_address(pool), len(pool)) for pool in memory.pools]
        for pointer, n_bytes in self.pools:
            if self._engine.register_memory(pointer, n_bytes):
                raise TransportClosed("Mooncake's Transfer Engine does not take our memory")

    def write(self, to: str, sources: list[int], targets: list[int], sizes: list[int]) -> None:
        if self._engine.batch_transfer_sync_write(to, sources, targets, sizes):
            raise TransportClosed(f"Mooncake's Transfer Engine did not reach {to}")


class MooncakeInlet:
    name = NAME
    linger_s = 2.0  # its own threads write our blocks, from a connection that is not ours

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def handles(self) -> tuple[list[bytes], list[int]]:
        return [self._engine.name.encode(), *(p.to_bytes(_ADDRESS_BYTES, "little") for p, _ in self._engine.pools)], []


class MooncakeOutlet:
    batch_bytes = 64 << 20

    def __init__(self, engine: Engine, opened: Opened) -> None:
        self._engine = engine
        name, *pools = opened.handles or [b""]
        if len(pools) != len(engine.pools) or any(len(raw) != _ADDRESS_BYTES for raw in pools):
            raise TransportClosed(f"{len(pools)} pools can be reached, {len(engine.pools)} are needed")
        self._name = name.decode(errors="replace")
        self._targets = [int.from_bytes(raw, "little") for raw in pools]

    def put(self, epoch: int, moves: Sequence[Move]) -> None:
        sizes = [self._engine.memory.block_bytes[move.group] for move in moves]
        self._engine.write(
            self._name,
            [self._engine.pools[move.group][0] + move.source * size for move, size in zip(moves, sizes)],
            [self._targets[move.group] + move.target * size for move, size in zip(moves, sizes)],
            sizes,
        )

    def close(self) -> None:
        pass
