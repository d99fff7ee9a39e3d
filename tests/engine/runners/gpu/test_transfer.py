"""KV from process to process on CUDA devices, and between ranks that have other slices of each block."""

import ctypes
import json
import logging
import threading
from contextlib import ExitStack, contextmanager, nullcontext

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from emberline.engine.runners.gpu import transfer
from emberline.engine.runners.gpu.transfer import (
    CudaIpcSendTransport,
    device_transfers,
    exported_pools,
    peer_words,
    pool_words,
    word_runs,
)
from emberline.kernels.gpu.elementwise import COPY_WORDS
from emberline.kv.slices import ByteRun, routes
from emberline.kv.transfer import cuda_ipc
from emberline.kv.transfer.messages import TransportOpened
from emberline.kv.transfer.transport import TCP, BlockCopy, TransportUnavailable
from emberline.protocol.frames import transfer_ranks
from emberline.supervisor import machine
from tests.engine.client import Client, wait_until
from tests.engine.client import engine as process
from tests.kv.transfer.rank_groups import GROUP, LAYOUTS, N_BLOCKS, Group, check_received, pair, part


@pytest.mark.gpu
def test_blocks_are_intact_in_the_other_process():
    from benchmarks.gpu.transfer import bandwidth

    assert bandwidth()["identical"]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_blocks_are_intact_on_the_other_gpu():
    """Which this process sees, and the other process does not see ours. GPUs without peer access fail here."""
    from benchmarks.gpu.transfer import bandwidth

    assert bandwidth(machine.gpus()[1])["identical"]


def test_memory_of_another_device_is_not_copied(monkeypatch):
    """torch would copy it to our device, where writes would be lost; here host memory stands for both devices."""
    monkeypatch.setattr(torch, "as_tensor", pytest.fail)
    theirs = torch.arange(8)
    words = peer_words(theirs.data_ptr(), 64, 32, torch.device("cpu"))
    assert words.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    words[1, 2] = 9
    assert theirs[6] == 9


@pytest.mark.parametrize(("size", "block_bytes"), [(64, 48), (64, 4)])
def test_pools_that_do_not_consist_of_blocks_are_refused(size, block_bytes):
    with pytest.raises(TransportUnavailable, match=f"no blocks of {block_bytes}"):
        peer_words(0, size, block_bytes, torch.device("cpu"))


@pytest.mark.parametrize("target", [-1, 3])
def test_blocks_outside_the_pool_of_the_receiver_are_not_written(target, monkeypatch):
    monkeypatch.setattr(transfer, "copy_blocks", pytest.fail)
    send = CudaIpcSendTransport.__new__(CudaIpcSendTransport)
    send._sources = send.targets = [torch.zeros(3, 4, dtype=torch.int64)]
    with pytest.raises(TransportUnavailable, match="outside its pool"):
        send.write(1, [BlockCopy((0, 0), 1, target)])


def test_runs_are_in_words_that_one_program_copies():
    most = 8 * COPY_WORDS
    runs = [ByteRun(16, 0, 24), ByteRun(64, 24, most), ByteRun(most + 64, 2 * most, most + 8)]
    assert word_runs(runs).tolist() == [
        [2, 0, 3],
        [8, 3, COPY_WORDS],
        [COPY_WORDS + 8, 2 * COPY_WORDS, COPY_WORDS],
        [2 * COPY_WORDS + 8, 3 * COPY_WORDS, 1],
    ]
    assert word_runs([]).shape == (0, 3)


@pytest.mark.parametrize("runs", [ByteRun(4, 0, 8), ByteRun(0, 4, 8), ByteRun(0, 0, 12)])
def test_runs_that_divide_words_are_refused(runs):
    """Two ranks may write neighboring runs at once."""
    with pytest.raises(TransportUnavailable, match="words of 8 bytes"):
        word_runs([runs])


class DeviceGroup(Group):
    """A rank group of one process whose pools are on one device."""

    device = "cpu"

    def open_rank(self, slices, shared):
        pools, spans = exported_pools(slices, [N_BLOCKS] * len(slices), self.device)
        return pool_words(pools[0], slices[0]), device_transfers("fake", slices, pools, spans)

    def fill(self, block, content):
        for words, expected in zip(self.pools, self._words(content)):
            words[block] = expected.to(words.device)

    def has(self, block, content):
        return all(
            torch.equal(words[block].cpu(), expected) for words, expected in zip(self.pools, self._words(content))
        )

    def others_are_zero(self, *blocks):
        others = [block for block in range(N_BLOCKS) if block not in blocks]
        return not any(words[others].any() for words in self.pools)

    def _words(self, content):
        slices = (part(content, group, self.whole) for (group,) in self.slices)
        return [torch.from_numpy(each.reshape(-1).view(np.int64)) for each in slices]


@pytest.fixture
def closed(monkeypatch):
    """Addresses that were closed. A process cannot open its own memory by CUDA IPC: its handles are addresses here."""
    pointers = []
    monkeypatch.setattr(cuda_ipc, "export", lambda pointer: pointer.to_bytes(64, "little"))
    monkeypatch.setattr(cuda_ipc, "open_handle", lambda raw: int.from_bytes(raw, "little"))
    monkeypatch.setattr(cuda_ipc, "close_handle", pointers.append)
    return pointers


@pytest.fixture
def host_as_device(monkeypatch):
    """Host memory stands for a device's; streams and events do nothing."""
    memory = []

    def allocate(n_bytes):
        memory.append(np.zeros(n_bytes, np.uint8))
        return memory[-1].ctypes.data

    def as_tensor(span, device):
        (n_bytes,) = span.__cuda_array_interface__["shape"]
        return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * n_bytes).from_address(span.pointer)))

    one = threading.Lock()  # Triton's interpreter runs one kernel at a time

    def locked(kernel):
        def call(*arguments):
            with one:
                kernel(*arguments)

        return call

    class Stream:
        def __init__(self, device, priority):
            pass

        def synchronize(self):
            pass

    monkeypatch.setattr(transfer, "_gpu_uuid", lambda device: f"gpu-{threading.current_thread().name[:5]}")
    monkeypatch.setattr(cuda_ipc, "allocate", allocate)
    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    for name in ("stream", "device"):
        monkeypatch.setattr(torch.cuda, name, lambda each: nullcontext())
    for name in ("set_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda device=None: None)
    for name in ("copy_blocks", "copy_block_runs"):
        monkeypatch.setattr(transfer, name, locked(getattr(transfer, name)))


def check_slices(whole, senders, receivers, folder):
    """How many handles were needed."""
    with ExitStack() as closing:
        sender, receiver, push = pair(whole, senders, receivers, folder, closing, kind=DeviceGroup)
        check_received(sender, receiver, push)
        assert receiver.others_are_zero(5, 2)
    return len(routes(sender.slices, receiver.slices))


def check_slices_by_ipc(whole, senders, receivers, folder, closed, monkeypatch):
    monkeypatch.setattr(transfer, "StagedTcpSendTransport", pytest.fail)
    n_handles = check_slices(whole, senders, receivers, folder)
    wait_until(lambda: len(closed) == n_handles)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the GPU")
@pytest.mark.parametrize(("whole", "senders", "receivers"), LAYOUTS)
def test_every_rank_receives_its_slices(tmp_path, closed, host_as_device, monkeypatch, whole, senders, receivers):
    check_slices_by_ipc(whole, senders, receivers, tmp_path, closed, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize(("whole", "senders", "receivers"), LAYOUTS)
def test_every_rank_receives_its_slices_on_a_gpu(tmp_path, closed, monkeypatch, whole, senders, receivers):
    monkeypatch.setattr(DeviceGroup, "device", "cuda:0")
    check_slices_by_ipc(whole, senders, receivers, tmp_path, closed, monkeypatch)


def no_peer_access(raw):
    raise TransportUnavailable("peer access is not supported between these two devices")


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the GPU")
@pytest.mark.parametrize(("whole", "senders", "receivers"), LAYOUTS)
def test_gpus_without_peer_access_send_through_host_memory(
    tmp_path, closed, host_as_device, monkeypatch, caplog, whole, senders, receivers
):
    monkeypatch.setattr(cuda_ipc, "open_handle", no_peer_access)
    caplog.set_level(logging.INFO)
    check_slices(whole, senders, receivers, tmp_path)
    (said, *_) = [record for record in caplog.records if record.message.startswith("sending KV")]
    assert said.levelname == "WARNING"
    assert "by tcp, not by cuda_ipc: peer access is not supported between these two devices" in said.message
    assert "(from GPU gpu-kv-to to GPU gpu-MainT)" in said.message


@pytest.mark.gpu
@pytest.mark.parametrize(("whole", "senders", "receivers"), LAYOUTS)
def test_slices_pass_through_host_memory_on_a_gpu(tmp_path, closed, monkeypatch, whole, senders, receivers):
    monkeypatch.setattr(DeviceGroup, "device", "cuda:0")
    monkeypatch.setattr(cuda_ipc, "open_handle", no_peer_access)
    check_slices(whole, senders, receivers, tmp_path)
    assert not closed


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the GPU")
def test_peer_access_that_reads_other_memory_is_not_used(tmp_path, closed, host_as_device, monkeypatch, caplog):
    """The driver has opened the handle, but what it has mapped is not the receiver's memory."""
    elsewhere = np.zeros(1 << 20, np.uint8)
    monkeypatch.setattr(cuda_ipc, "open_handle", lambda raw: elsewhere.ctypes.data)
    check_slices(GROUP, {"tp": 1}, {"tp": 1}, tmp_path)
    assert "does not read as it was written" in caplog.text
    assert closed == [elsewhere.ctypes.data]
    assert not elsewhere.any()


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the GPU")
def test_peer_access_that_loses_writes_is_not_used(tmp_path, closed, host_as_device, monkeypatch, caplog):
    copy_blocks, n_tried = transfer.copy_blocks, []

    def lossy(source, target, pairs):
        if len(target) == cuda_ipc.PROBE_ROWS:
            n_tried.append(pairs)
        else:
            copy_blocks(source, target, pairs)

    monkeypatch.setattr(transfer, "copy_blocks", lossy)
    check_slices(GROUP, {"tp": 1}, {"tp": 1}, tmp_path)
    assert len(n_tried) == transfer.PROBE_ATTEMPTS
    assert "does not arrive" in caplog.text
    assert len(closed) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the GPU")
def test_memory_that_kernels_cannot_access_is_not_used(tmp_path, closed, host_as_device, monkeypatch, caplog):
    def refuse(source, target, pairs):
        raise ValueError("Pointer argument cannot be accessed from Triton")

    monkeypatch.setattr(transfer, "copy_blocks", refuse)
    check_slices(GROUP, {"tp": 1}, {"tp": 1}, tmp_path)
    assert "by tcp, not by cuda_ipc: Pointer argument cannot be accessed" in caplog.text
    assert len(closed) == 1


@pytest.mark.parametrize("on_ours", [True, False])
def test_of_a_receiver_without_a_probe_only_our_own_gpu_is_opened(closed, host_as_device, monkeypatch, on_ours):
    """As one of release 0.1 is."""
    theirs = torch.zeros(8, dtype=torch.int64)
    monkeypatch.setattr(torch, "as_tensor", lambda span, device: theirs if on_ours else theirs.clone())
    handle = theirs.data_ptr().to_bytes(64, "little") + (64).to_bytes(8, "little")
    opened = TransportOpened([cuda_ipc.host_id().encode(), handle])
    ours = torch.zeros(2, 4, dtype=torch.int64)
    if on_ours:
        transfer.open_cuda_ipc([ours], opened).close()
    else:
        with pytest.raises(TransportUnavailable, match="of an older release, is on another GPU"):
            transfer.open_cuda_ipc([ours], opened)
    assert closed == [theirs.data_ptr()]


TEXTS = {  # of handles that cannot be opened: without peer access, or in containers that do not share enough
    101: "invalid device ordinal",
    201: "invalid device context",
    205: "mapping of buffer object failed",
    217: "peer access is not supported between these two devices",
    400: "invalid resource handle",
}


class Driver:
    """The driver's calls of CUDA IPC. `codes`: what each opening returns."""

    def __init__(self, codes):
        self.codes, self.flags, self.closed = list(codes), [], []

    def cuIpcOpenMemHandle_v2(self, pointer, handle, flags):
        pointer._obj.value = 0x1000 * (len(self.flags) + 1)
        self.flags.append(flags.value)
        return self.codes.pop(0)

    def cuIpcCloseMemHandle(self, pointer):
        self.closed.append(pointer.value)

    def cuGetErrorString(self, code, text):
        text._obj.value = TEXTS[code].encode()


def opened_by(monkeypatch, *codes):
    driver = Driver(codes)
    monkeypatch.setattr(cuda_ipc, "_driver", lambda: driver)
    handles = [bytes([number]) * 64 + (640).to_bytes(8, "little") for number in range(len(codes))]
    return driver, TransportOpened([cuda_ipc.host_id().encode(), *handles])


def test_handles_are_opened_with_peer_access(monkeypatch):
    """Their GPU may be another one, which this process does not see: the driver alone decides."""
    driver, opened = opened_by(monkeypatch, 0, 0)
    assert cuda_ipc.opened_pools(opened, 2) == [(0x1000, 640), (0x2000, 640)]
    assert driver.flags == [1, 1]


@pytest.mark.parametrize(("code", "text"), TEXTS.items())
def test_handles_before_one_that_cannot_be_opened_are_closed(monkeypatch, code, text):
    driver, opened = opened_by(monkeypatch, 0, code)
    with pytest.raises(TransportUnavailable, match=text):
        cuda_ipc.opened_pools(opened, 2)
    assert driver.closed == [0x1000]


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the GPU")
def test_a_worker_whose_memory_cannot_be_exported_receives_through_host_memory(
    tmp_path, closed, host_as_device, monkeypatch, caplog
):
    def refuse(pointer):
        raise TransportUnavailable("this memory cannot be exported: operation not supported")

    monkeypatch.setattr(cuda_ipc, "export", refuse)
    check_slices(GROUP, {"tp": 1}, {"tp": 2}, tmp_path)
    assert "receives KV through host memory: this memory cannot be exported" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the GPU")
def test_equal_layouts_send_whole_blocks(tmp_path, closed, host_as_device, monkeypatch):
    monkeypatch.setattr(transfer, "copy_block_runs", pytest.fail)
    check_slices_by_ipc(GROUP, {"tp": 2}, {"tp": 2}, tmp_path, closed, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("first", "second"),
    [((), ()), ((), ("--tp", "2")), (("--tp", "2"), ()), ((), ("--pp", "2")), (("--pp", "2"), ())],
    ids=["1to1", "1to2", "2to1", "1to2stages", "2stagesto1"],
)
def test_workers_of_any_layout_continue_each_other_s_prompts(tmp_path, monkeypatch, first, second):
    """Real workers on one GPU: the replies of one rank."""
    check_workers(tmp_path, monkeypatch, first, second)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_workers_on_two_gpus_continue_each_other_s_prompts(tmp_path, monkeypatch):
    """As `emberline serve` starts them: neither sees the other's GPU."""
    check_workers(tmp_path, monkeypatch, gpus=machine.gpus()[:2])


def check_workers(tmp_path, monkeypatch, first=(), second=(), gpus=()):
    """A prefill and a decode worker with these flags, on these GPUs or all that are visible."""
    from benchmarks.gpu.rank_processes import ONE_GPU, TINY, TINY_TOLERANCE
    from benchmarks.reply_comparison import TOP, compare
    from tests.benchmarks.test_reply_comparison import N_OUT, PROMPTS
    from tests.engine.ranks.test_rank_worker import request, run
    from tests.engine.transfer.test_prefill_decode import halves

    for name, value in ONE_GPU.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    requests = [request(f"r{n}", prompt, max_tokens=N_OUT, logprobs=TOP) for n, prompt in enumerate(PROMPTS)]

    def logprobs(client):
        return [[entry for delta in client.deltas[each.id] for entry in delta.logprobs or ()] for each in requests]

    @contextmanager
    def worker(name, *flags, gpu=None):
        if gpu is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpu)
        common = ("--device", "cuda", "--random-weights", "1", "--deterministic", "--speculation", "off")
        limits = ("--kv-bytes", 256 << 20, "--memory-share", "0.2", "--max-running", "4", "--token-budget", "256")
        place = ("--model", tmp_path, "--socket", tmp_path / name)
        with (
            process("emberline.engine.worker", *place, *common, *limits, *flags) as (started, address),
            Client(address) as client,
        ):
            yield started, address, client

    p_gpu, d_gpu = gpus or (None, None)
    with worker("one", gpu=p_gpu) as (*_, one):
        run(one, *requests)
        expected = logprobs(one)
    with (
        worker("p", "--role", "prefill", *first, gpu=p_gpu) as (sending, _, prefill),
        worker("d", "--role", "decode", *second, gpu=d_gpu) as (_, address, decode),
    ):
        assert decode.greeting.info.transfers == (cuda_ipc.CUDA_IPC, TCP)
        ranks = transfer_ranks(prefill.greeting.info, decode.greeting.info)
        for each in requests:
            sent, awaited = halves(each, address, f"t-{each.id}", ranks=ranks)
            decode.submit(awaited)
            prefill.submit(sent)
        decode.finish(*(each.id for each in requests))
        for each in requests:
            assert decode.deltas[each.id][-1].error is None
            n_pushed = (len(each.prompt_ids) // 4 - 1) // 16 * 16
            assert decode.deltas[each.id][0].usage.cached_by_tier == {"device": 0, "pushed": n_pushed}
        said = [line for line in sending.stderr if "sending KV to" in line]
        assert said
        assert all("by cuda_ipc" in line for line in said), said
        n_compared = [compare(*pair, TINY_TOLERANCE) for pair in zip(expected, logprobs(decode), strict=True)]
        assert sum(n_compared) > len(requests) * N_OUT / 2
