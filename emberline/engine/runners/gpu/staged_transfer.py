"""KV transfer over a connection for pools on a device: blocks pass through pinned host memory on both sides.

For workers whose GPUs do not reach each other's memory, or that are on different machines. Every thread that sends or
receives has a buffer and a stream of its own.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from emberline.engine.runners.gpu.stream import pinned
from emberline.kv.slices import ByteRun
from emberline.kv.transfer.connection import PeerConnection
from emberline.kv.transfer.transport import BlockCopy, Target, TcpSendTransport


class _Staging:
    """Pinned memory, and the stream of the copies from and to it."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.set_device(device)  # of this thread
        self._device = device
        self._buffer: Tensor | None = None
        self.stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def buffer(self, n_bytes: int) -> Tensor:
        if self._buffer is None or len(self._buffer) < n_bytes:
            self._buffer = pinned(n_bytes, torch.uint8, self._device)
        return self._buffer[:n_bytes]


class StagedPools:
    """The receiving side: a `BlockSink` of pools, uint8 [blocks, bytes] each."""

    def __init__(self, pools: Sequence[Tensor]) -> None:
        self.block_bytes = [pool.shape[1] for pool in pools]
        self._pools = pools
        self._of_thread = threading.local()

    def fill(
        self, group: int, block: int, runs: Sequence[ByteRun] | None, read_into: Callable[[memoryview], None]
    ) -> None:
        target = self._pools[group][block]
        if not hasattr(self._of_thread, "staging"):
            self._of_thread.staging = _Staging(target.device)
        staging: _Staging = self._of_thread.staging
        buffer = staging.buffer(len(target))
        view = _view(buffer)
        spans = [slice(0, len(target))] if runs is None else [slice(at, at + n_bytes) for _, at, n_bytes in runs]
        for span in spans:
            read_into(view[span])
        with torch.cuda.stream(staging.stream), torch.inference_mode():
            for span in spans:  # nothing else: other ranks write the rest of the block
                target[span].copy_(buffer[span], non_blocking=True)
        staging.stream.synchronize()


class _StagedBlocks:
    """A `BlockSource` of the blocks that were fetched last."""

    def __init__(self, pools: Sequence[Tensor]) -> None:
        self._pools = pools
        self._staging = _Staging(pools[0].device)
        self._fetched: dict[tuple[int, int], memoryview] = {}

    def fetch(self, blocks: Sequence[tuple[int, int]]) -> None:
        """By group and number, from the device."""
        sizes = [self._pools[group].shape[1] for group, _ in blocks]
        parts = torch.split(self._staging.buffer(sum(sizes)), sizes)
        with torch.cuda.stream(self._staging.stream), torch.inference_mode():
            for (group, block), part in zip(blocks, parts):
                part.copy_(self._pools[group][block], non_blocking=True)
        self._staging.stream.synchronize()
        self._fetched = {block: _view(part) for block, part in zip(blocks, parts)}

    def block(self, group: int, block: int) -> memoryview:
        return self._fetched[group, block]


def _view(host: Tensor) -> memoryview:
    array: Any = host.numpy()
    return memoryview(array)


class StagedTcpSendTransport(TcpSendTransport):
    """The sending side, of pools, uint8 [blocks, bytes] each. Made by the thread that uses it."""

    def __init__(self, pools: Sequence[Tensor], connection: PeerConnection, target: Target | None = None) -> None:
        self._blocks = _StagedBlocks(pools)
        super().__init__(self._blocks, connection, target)

    def write(self, epoch: int, copies: Sequence[BlockCopy]) -> None:
        self._blocks.fetch([(copy.group, copy.source) for copy in copies])
        super().write(epoch, copies)
