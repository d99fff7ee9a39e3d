"""KV transfer between devices: pools that other processes may write, and copies on a stream of their own."""

import logging
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from emberline.engine.gpu.stream import device_event, pinned
from emberline.engine.torch_runner import pool_shape
from emberline.kernels.gpu.elementwise import COPY_WORDS, copy_block_runs, copy_blocks
from emberline.kv.transfer import cuda_ipc
from emberline.kv.transfer.connection import PeerConnection
from emberline.kv.transfer.cuda_ipc import CudaIpcReceiveTransport, DeviceSpan
from emberline.kv.transfer.messages import TransportOpened
from emberline.kv.transfer.rank_transfers import RankTransfers
from emberline.kv.transfer.slices import Run
from emberline.kv.transfer.transport import BlockCopy, ReceiveTransport, SendTransport, Target, TransportUnavailable
from emberline.protocol.block_hash import KVGroup

MAX_COPIES = 1024  # blocks per launch
WORD_BYTES = 8  # of int64

_log = logging.getLogger(__name__)


def exported_pools(
    layouts: Sequence[KVGroup], n_blocks: Sequence[int], device: str
) -> tuple[list[Tensor], list[DeviceSpan]]:
    """Zeroed pools in memory that can be exported to another process."""
    pools, spans = [], []
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # creates the driver's context
        for layout, n in zip(layouts, n_blocks):
            spans.append(DeviceSpan(cuda_ipc.allocate(n * layout.block_bytes), n * layout.block_bytes))
            pool = torch.as_tensor(spans[-1], device=device).view(getattr(torch, layout.dtype))
            pools.append(pool.zero_().view(pool_shape(layout, n)))
    return pools, spans


def device_transfers(
    fingerprint: str,
    layouts: Sequence[KVGroup],
    pools: Sequence[Tensor],
    spans: Sequence[DeviceSpan],
    must_receive: bool = True,
) -> RankTransfers:
    """For pools in device memory: sends from them, and receives into them where they are exported (`spans`).
    TransportUnavailable: they cannot be, and `must_receive`."""
    words = [pool_words(pool, layout) for pool, layout in zip(pools, layouts)]

    def open_transport(
        name: str, opened: TransportOpened, connection: PeerConnection, target: Target | None
    ) -> SendTransport:
        if name != cuda_ipc.CUDA_IPC:
            raise TransportUnavailable(f"unknown transport {name!r}")
        runs = None if target is None else [word_runs(each) for each in target.runs]
        block_bytes = [layout.block_bytes for layout in layouts] if target is None else target.block_bytes
        device = words[0].device
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # makes the device's context current in this thread
        opened_at = cuda_ipc.opened_pools(opened, len(words))
        pointers = [pointer for pointer, _ in opened_at]
        try:
            targets = [peer_words(pointer, size, n, device) for (pointer, size), n in zip(opened_at, block_bytes)]
            return CudaIpcSendTransport(words, targets, pointers, runs)
        except Exception:
            for pointer in pointers:
                cuda_ipc.close_handle(pointer)
            raise

    receive: list[ReceiveTransport] = []
    if spans:
        try:
            receive.append(CudaIpcReceiveTransport(spans, [pool.nbytes for pool in pools]))
        except TransportUnavailable as error:
            if must_receive:
                raise
            _log.warning("this worker cannot receive KV, so its role cannot change: %s", error)
    return RankTransfers(fingerprint, layouts, None, receive, (cuda_ipc.CUDA_IPC,), open_transport)


class CudaIpcSendTransport:
    """`write` returns when the copies are done: only then may the receiver read.

    runs: per group, what we have of the receiver's blocks (`word_runs`); None: both have the same slices.
    """

    batch_bytes = 1 << 30  # about a millisecond

    def __init__(
        self,
        sources: Sequence[Tensor],
        targets: Sequence[Tensor],
        opened: Sequence[int],
        runs: Sequence[Tensor] | None = None,
    ) -> None:
        self._sources, self._targets = sources, targets
        self._opened = opened  # pointers to close
        self._device = sources[0].device
        self._runs = None if runs is None else [each.to(self._device) for each in runs]
        self._stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
        self._pairs = pinned(2 * MAX_COPIES, torch.int32, self._device)
        self._uploaded = torch.zeros(2 * MAX_COPIES, dtype=torch.int32, device=self._device)
        torch.cuda.synchronize(self._device)
        self._done = device_event(self._device)

    def write(self, epoch: int, copies: Sequence[BlockCopy]) -> None:
        for start in range(0, len(copies), MAX_COPIES):
            self._write(copies[start : start + MAX_COPIES])

    def _write(self, copies: Sequence[BlockCopy]) -> None:
        copies = sorted(copies, key=lambda copy: copy.group)
        if any(not 0 <= copy.target < len(self._targets[copy.group]) for copy in copies):
            raise TransportUnavailable("the other engine granted a block outside its pool")
        numbers = np.array([(copy.source, copy.target) for copy in copies], np.int32)
        self._pairs[: numbers.size].numpy()[:] = numbers.reshape(-1)
        with torch.cuda.stream(self._stream), torch.inference_mode():
            self._uploaded[: numbers.size].copy_(self._pairs[: numbers.size], non_blocking=True)
            pairs = self._uploaded[: numbers.size].view(-1, 2)
            first = 0
            for group, (source, target) in enumerate(zip(self._sources, self._targets)):
                n = sum(copy.group == group for copy in copies)
                if self._runs is None:
                    copy_blocks(source, target, pairs[first : first + n])
                else:
                    copy_block_runs(source, target, pairs[first : first + n], self._runs[group])
                first += n
            self._done.record()
        self._done.wait()

    def close(self) -> None:
        self._stream.synchronize()
        self._targets = []
        for pointer in self._opened:
            cuda_ipc.close_handle(pointer)


def pool_words(pool: Tensor, layout: KVGroup) -> Tensor:
    """A pool as int64 [blocks, words]."""
    return pool.view(-1).view(torch.int64).view(-1, layout.block_bytes // WORD_BYTES)


def peer_words(pointer: int, size: int, block_bytes: int, device: torch.device) -> Tensor:
    """A pool of the receiver as int64 [blocks, words]: its memory, not a copy."""
    if size % block_bytes or block_bytes % WORD_BYTES:
        raise TransportUnavailable(f"a pool of {size} bytes has no blocks of {block_bytes} in words of {WORD_BYTES}")
    words = torch.as_tensor(DeviceSpan(pointer, size), device=device)
    if words.data_ptr() != pointer:  # of memory on another device torch makes a copy, and writes would end there
        raise TransportUnavailable("the pool of the other engine is on another device: give both workers the same one")
    return words.view(torch.int64).view(-1, block_bytes // WORD_BYTES)


def word_runs(runs: Sequence[Run]) -> Tensor:
    """Runs in words, for `copy_block_runs`: int32 [n, 3]. Long ones are divided, so that programs share them."""
    if any(number % WORD_BYTES for run in runs for number in run):
        raise TransportUnavailable(f"CUDA IPC sends words of {WORD_BYTES} bytes, and the two layouts divide them")
    parts = [
        (run.source // WORD_BYTES + at, run.target // WORD_BYTES + at, min(COPY_WORDS, run.n_bytes // WORD_BYTES - at))
        for run in runs
        for at in range(0, run.n_bytes // WORD_BYTES, COPY_WORDS)
    ]
    return torch.tensor(parts, dtype=torch.int32).view(-1, 3)
