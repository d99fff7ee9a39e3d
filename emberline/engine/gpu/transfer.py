"""KV pushed from device to device: pools that others may write, and copies that no step waits for."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from emberline.engine.gpu.stream import mark, pinned
from emberline.engine.torch_runner import pool_shape
from emberline.kernels.gpu.elementwise import copy_blocks
from emberline.kv.transfer import cuda_ipc
from emberline.kv.transfer.connection import Link
from emberline.kv.transfer.cuda_ipc import CudaInlet, Span
from emberline.kv.transfer.manager import TransferManager
from emberline.kv.transfer.messages import Opened
from emberline.kv.transfer.transport import Move, ReceiveTransport, SendTransport, TransportClosed
from emberline.protocol.block_hash import KVGroup

MAX_MOVES = 1024  # in one launch


def exported_pools(layouts: Sequence[KVGroup], n_blocks: Sequence[int], device: str) -> tuple[list[Tensor], list[Span]]:
    """Zeroed blocks in memory of their own, which another process can be given."""
    pools, spans = [], []
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # the driver's context is there now
        for layout, n in zip(layouts, n_blocks):
            spans.append(Span(cuda_ipc.allocate(n * layout.block_bytes), n * layout.block_bytes))
            pool = torch.as_tensor(spans[-1], device=device).view(getattr(torch, layout.dtype))
            pools.append(pool.zero_().view(pool_shape(layout, n)))
    return pools, spans


def gpu_hub(
    name: str, fingerprint: str, layouts: Sequence[KVGroup], pools: Sequence[Tensor], spans: Sequence[Span]
) -> TransferManager:
    """It sends from its pools; it can be written where they are exported (`spans`)."""
    words = [_words(pool, layout) for pool, layout in zip(pools, layouts)]

    def open_outlet(way: str, opened: Opened, link: Link) -> SendTransport:
        if way != cuda_ipc.NAME:
            raise TransportClosed(f"no way is called {way!r} here")
        device = words[0].device
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # the thread has the device's context from here on
        opened_at = cuda_ipc.opened_pools(opened, len(words))
        targets = [_opened(pointer, size, own) for (pointer, size), own in zip(opened_at, words)]
        return DeviceOutlet(words, targets, [pointer for pointer, _ in opened_at])

    inlets: list[ReceiveTransport] = [CudaInlet(spans, [pool.nbytes for pool in pools])] if spans else []
    return TransferManager(name, fingerprint, layouts, None, inlets, (cuda_ipc.NAME,), open_outlet)


class DeviceOutlet:
    """Copies on a stream of its own. `put` returns when the copies are done: only then may the other side read."""

    batch_bytes = 1 << 30  # a millisecond

    def __init__(self, sources: Sequence[Tensor], targets: Sequence[Tensor], opened: Sequence[int]) -> None:
        self._sources, self._targets = sources, targets
        self._opened = opened  # pointers that are closed in the end
        self._device = sources[0].device
        self._stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
        self._pairs = pinned(2 * MAX_MOVES, torch.int32, self._device)
        self._shipped = torch.zeros(2 * MAX_MOVES, dtype=torch.int32, device=self._device)
        torch.cuda.synchronize(self._device)
        self._done = mark(self._device)

    def put(self, epoch: int, moves: Sequence[Move]) -> None:
        for start in range(0, len(moves), MAX_MOVES):
            self._put(moves[start : start + MAX_MOVES])

    def _put(self, moves: Sequence[Move]) -> None:
        moves = sorted(moves, key=lambda move: move.group)
        numbers = np.array([(move.source, move.target) for move in moves], np.int32)
        self._pairs[: numbers.size].numpy()[:] = numbers.reshape(-1)
        with torch.cuda.stream(self._stream), torch.inference_mode():
            self._shipped[: numbers.size].copy_(self._pairs[: numbers.size], non_blocking=True)
            pairs = self._shipped[: numbers.size].view(-1, 2)
            first = 0
            for group, (source, target) in enumerate(zip(self._sources, self._targets)):
                n = sum(move.group == group for move in moves)
                copy_blocks(source, target, pairs[first : first + n])
                first += n
            self._done.record()
        self._done.wait()

    def close(self) -> None:
        self._stream.synchronize()
        self._targets = []
        for pointer in self._opened:
            cuda_ipc.close_handle(pointer)


def _words(pool: Tensor, layout: KVGroup) -> Tensor:
    """A pool as [blocks, words of 8 bytes]."""
    return pool.view(-1).view(torch.int64).view(-1, layout.block_bytes // 8)


def _opened(pointer: int, size: int, own: Tensor) -> Tensor:
    n_words = own.shape[1]
    if size % (8 * n_words):
        raise TransportClosed(f"a pool of {size} bytes is not one of blocks of {8 * n_words}")
    return torch.as_tensor(Span(pointer, size), device=own.device).view(torch.int64).view(-1, n_words)
