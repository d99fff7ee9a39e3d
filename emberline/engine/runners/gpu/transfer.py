"""KV transfer between devices: pools that other processes may write, and copies on a stream of their own."""

import logging
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emberline.engine.runners.cpu.runner import pool_shape
from emberline.engine.runners.gpu.staged_transfer import StagedPools, StagedTcpSendTransport
from emberline.engine.runners.gpu.stream import device_event, pinned
from emberline.kernels.gpu.elementwise import COPY_WORDS, copy_block_runs, copy_blocks
from emberline.kv.slices import ByteRun
from emberline.kv.transfer import cuda_ipc
from emberline.kv.transfer.connection import PeerConnection
from emberline.kv.transfer.cuda_ipc import (
    PROBE_BYTES,
    PROBE_ROWS,
    PROBE_WORDS,
    CudaIpcReceiveTransport,
    DeviceSpan,
    new_probe,
    probed_gpu,
)
from emberline.kv.transfer.manager import TransferManager
from emberline.kv.transfer.messages import TransportOpened
from emberline.kv.transfer.mooncake import (
    MOONCAKE,
    MooncakeEngine,
    MooncakeReceiveTransport,
    MooncakeSendTransport,
    Pool,
)
from emberline.kv.transfer.transport import (
    TCP,
    BlockCopy,
    ReceiveTransport,
    SendTransport,
    Target,
    TcpReceiveTransport,
    TransportUnavailable,
)
from emberline.protocol.block_hash import KVGroup

MAX_COPIES = 1024  # blocks per launch
WORD_BYTES = 8  # of int64
PROBE_ATTEMPTS = 3  # two senders may have chosen the same row

_ADVICE = ": peer access between these GPUs does not work (an IOMMU or PCIe ACS may be in its way)"

_log = logging.getLogger(__name__)


def exported_pools(
    layouts: Sequence[KVGroup], n_blocks: Sequence[int], device: str
) -> tuple[list[Tensor], list[DeviceSpan]]:
    """Zeroed pools in memory that can be exported to another process, with room for a probe behind each."""
    pools, spans = [], []
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # creates the driver's context
        for layout, n in zip(layouts, n_blocks):
            n_bytes = n * layout.block_bytes
            spans.append(DeviceSpan(cuda_ipc.allocate(n_bytes + PROBE_BYTES), n_bytes + PROBE_BYTES))
            pool = torch.as_tensor(spans[-1], device=device).zero_()[:n_bytes]
            pools.append(pool.view(getattr(torch, layout.dtype)).view(pool_shape(layout, n)))
    return pools, spans


def device_pools(pools: Sequence[Tensor], layouts: Sequence[KVGroup]) -> list[Pool]:
    """The pools in device memory, to be registered with Mooncake's Transfer Engine."""
    return [Pool(pool.data_ptr(), pool.nbytes, layout.block_bytes) for pool, layout in zip(pools, layouts)]


def device_transfers(
    fingerprint: str,
    layouts: Sequence[KVGroup],
    pools: Sequence[Tensor],
    spans: Sequence[DeviceSpan],
    mooncake: MooncakeEngine | None = None,
) -> TransferManager:
    """Transfers of pools in device memory: send from them, and receive into them if they can be exported (`spans`).

    mooncake: has registered them; None: it cannot, and KV for other machines passes through pinned host memory."""
    words = [pool_words(pool, layout) for pool, layout in zip(pools, layouts)]
    blocks = [each.view(torch.uint8) for each in words]

    def open_transport(
        name: str, opened: TransportOpened, connection: PeerConnection, target: Target | None
    ) -> SendTransport:
        if name == TCP:
            return StagedTcpSendTransport(blocks, connection, target)
        if name == MOONCAKE and mooncake is not None:
            return MooncakeSendTransport(mooncake, opened, target)
        if name != cuda_ipc.CUDA_IPC:
            raise TransportUnavailable(f"unknown transport {name!r}")
        return open_cuda_ipc(words, opened, target)

    send = [cuda_ipc.CUDA_IPC, *([MOONCAKE] if mooncake is not None else ()), TCP]
    if not spans:
        return TransferManager(fingerprint, layouts, None, (), send, open_transport)
    receive: list[ReceiveTransport] = []
    try:
        receive.append(exporting(pools, spans))
    except TransportUnavailable as error:
        _log.warning("this worker receives KV through host memory: %s", error)
    if mooncake is not None:
        receive.append(MooncakeReceiveTransport(mooncake))
    receive.append(TcpReceiveTransport())
    staged = StagedPools(blocks)
    return TransferManager(fingerprint, layouts, staged, receive, send, open_transport)


def _gpu_uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _is_on(device: torch.device, pointer: int) -> bool:
    """True if the memory is on this device. Of memory on another device torch makes a copy, if it can."""
    try:
        return bool(torch.as_tensor(DeviceSpan(pointer, WORD_BYTES), device=device).data_ptr() == pointer)
    except RuntimeError:
        return False


def exporting(pools: Sequence[Tensor], spans: Sequence[DeviceSpan]) -> CudaIpcReceiveTransport:
    """Make the receiving transport of `exported_pools`. Raises TransportUnavailable if the pools cannot be exported."""
    device = pools[0].device
    probe = new_probe(_gpu_uuid(device))
    written = torch.frombuffer(bytearray(probe), dtype=torch.uint8).to(device)
    for span in spans:
        torch.as_tensor(span, device=device)[-PROBE_BYTES:][: len(probe)] = written
    torch.cuda.synchronize(device)
    return CudaIpcReceiveTransport(spans, [pool.nbytes for pool in pools], probe)


def open_cuda_ipc(
    words: Sequence[Tensor], opened: TransportOpened, target: Target | None = None
) -> "CudaIpcSendTransport":
    """Open the sending transport, also between two GPUs: the driver enables peer access where there is any, and a probe
    shows that it works."""
    runs = None if target is None else [word_runs(each) for each in target.runs]
    block_bytes = [each.shape[1] * WORD_BYTES for each in words] if target is None else target.block_bytes
    device = words[0].device
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)  # makes the device's context current in this thread
    pointers: list[int] = []
    try:
        opened_at = cuda_ipc.opened_pools(opened, len(words))
        pointers = [pointer for pointer, _ in opened_at]
        targets = [peer_words(pointer, size, n, device) for (pointer, size), n in zip(opened_at, block_bytes)]
        transport = CudaIpcSendTransport(words, targets, pointers, runs)
        for pointer, size in opened_at:
            if opened.probe:
                transport.check(peer_words(pointer + size, PROBE_BYTES, PROBE_WORDS * WORD_BYTES, device), opened.probe)
            elif not _is_on(device, pointer):
                raise TransportUnavailable("the other engine, of an older release, is on another GPU")
        return transport
    except Exception as error:
        for pointer in pointers:
            cuda_ipc.close_handle(pointer)
        own, other = _gpu_uuid(device), probed_gpu(opened.probe)
        between = "" if other in ("", own) else f" (from GPU {own} to GPU {other})"
        raise TransportUnavailable(f"{error}{between}") from None


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
        self._sources, self.targets = sources, targets
        self._opened = opened  # pointers to close
        self._device = sources[0].device
        self._runs = None if runs is None else [each.to(self._device) for each in runs]
        self._stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
        self._pairs = pinned(2 * MAX_COPIES, torch.int32, self._device)
        self._uploaded = torch.zeros(2 * MAX_COPIES, dtype=torch.int32, device=self._device)
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            self._done = device_event(self._device)

    def check(self, probe: Tensor, expected: bytes) -> None:
        """By the kernel that copies blocks, and so by the same path: that we read what the receiver has written, and
        then what we have written. TransportUnavailable: not.

        probe: int64 [PROBE_ROWS, PROBE_WORDS], behind the blocks of a pool.
        """

        def copy(source: Tensor, target: Tensor, source_row: int, target_row: int) -> None:
            copy_blocks(source, target, torch.tensor([(source_row, target_row)], dtype=torch.int32).to(self._device))

        with torch.cuda.stream(self._stream), torch.inference_mode():
            ours = torch.zeros(2, PROBE_WORDS, dtype=torch.int64, device=self._device)
            copy(probe, ours, 0, 0)
            if ours[0].cpu().numpy().tobytes() != expected:
                raise TransportUnavailable(f"the memory of the other engine does not read as it was written{_ADVICE}")
            for _ in range(PROBE_ATTEMPTS):
                row = 1 + secrets.randbelow(PROBE_ROWS - 1)
                written = torch.frombuffer(bytearray(secrets.token_bytes(len(expected))), dtype=torch.int64)
                ours[0] = written.to(self._device)
                copy(ours, probe, 0, row)
                copy(probe, ours, row, 1)
                if torch.equal(ours[1].cpu(), written):
                    return
        raise TransportUnavailable(f"what is written to the memory of the other engine does not arrive{_ADVICE}")

    def write(self, epoch: int, copies: Sequence[BlockCopy]) -> None:
        for start in range(0, len(copies), MAX_COPIES):
            self._write(copies[start : start + MAX_COPIES])

    def _write(self, copies: Sequence[BlockCopy]) -> None:
        copies = sorted(copies, key=lambda copy: copy.group)
        if any(not 0 <= copy.target < len(self.targets[copy.group]) for copy in copies):
            raise TransportUnavailable("the other engine granted a block outside its pool")
        numbers = np.array([(copy.source, copy.target) for copy in copies], np.int32)
        self._pairs[: numbers.size].numpy()[:] = numbers.reshape(-1)
        with torch.cuda.stream(self._stream), torch.inference_mode():
            self._uploaded[: numbers.size].copy_(self._pairs[: numbers.size], non_blocking=True)
            pairs = self._uploaded[: numbers.size].view(-1, 2)
            first = 0
            for group, (source, target) in enumerate(zip(self._sources, self.targets)):
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
        self.targets = []
        for pointer in self._opened:
            cuda_ipc.close_handle(pointer)


def pool_words(pool: Tensor, layout: KVGroup) -> Tensor:
    """A pool as int64 [blocks, words]."""
    return pool.view(-1).view(torch.int64).view(-1, layout.block_bytes // WORD_BYTES)


def peer_words(pointer: int, size: int, block_bytes: int, device: torch.device) -> Tensor:
    """A pool of the receiver as int64 [blocks, words]: its memory, not a copy, for kernels on our device. It may be on
    another one, even one that is not visible here: torch is not asked which, and would copy it."""
    if size % block_bytes or block_bytes % WORD_BYTES:
        raise TransportUnavailable(f"a pool of {size} bytes has no blocks of {block_bytes} in words of {WORD_BYTES}")
    shape = size // block_bytes, block_bytes // WORD_BYTES
    storage: Any = torch._C._construct_storage_from_data_pointer(pointer, device, size)
    return torch.empty(0, dtype=torch.int64, device=device).set_(storage, 0, shape, (shape[1], 1))


def word_runs(runs: Sequence[ByteRun]) -> Tensor:
    """Runs in words, for `copy_block_runs`: int32 [n, 3]. Long ones are divided, so that programs share them."""
    if any(number % WORD_BYTES for run in runs for number in run):
        raise TransportUnavailable(f"CUDA IPC sends words of {WORD_BYTES} bytes, and the two layouts divide them")
    parts = [
        (run.source // WORD_BYTES + at, run.target // WORD_BYTES + at, min(COPY_WORDS, run.n_bytes // WORD_BYTES - at))
        for run in runs
        for at in range(0, run.n_bytes // WORD_BYTES, COPY_WORDS)
    ]
    return torch.tensor(parts, dtype=torch.int32).view(-1, 3)
