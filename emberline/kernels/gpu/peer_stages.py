# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Messages from stage to stage of a pipeline over memory that both have mapped: one kernel on each side, no host, safe
in CUDA graphs.

Every stage has a region of device memory that its neighbors write:

    arrived i64           the last message that the stage before has put here
    read i64              the last message of ours that the next stage has read
    data [2, MAX_BYTES]   of the stage before: this message, and the one before it

A sender waits until the message before the last was read, so a stage is at most two messages ahead of the next one, and
what it sends from may be overwritten by what is queued behind. Messages are counted on the device, as in
`peer_collectives`. The last program of a kernel to end speaks for all of them, so the two sides may differ in programs.

A program that waits keeps its place on an SM. Stages may share a GPU, so there are few. None waits in a circle: a stage
receives what those before it have computed, and is ahead of those behind it by messages that they will receive.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.gpu.launch import cdiv

BLOCK = 2048  # elements that a program moves at once
N_PROGRAMS = 32  # at most
MAX_BYTES = 8 << 20  # of a message
DATA_AT = 256  # bytes of a region before its data


def region_bytes() -> int:
    return DATA_AT + 2 * MAX_BYTES


def new_counts(device: torch.device | str) -> Tensor:
    """Make the counters of one direction: messages, and programs of the present message that have ended."""
    return torch.zeros(2, dtype=torch.int64, device=device)


@triton.jit
def _send(x, regions, counts, n, RANK: tl.constexpr, MAX_BYTES: tl.constexpr, DATA_AT: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    message = tl.load(counts) + 1
    own, following = tl.load(regions + RANK), tl.load(regions + RANK + 1)
    while tl.atomic_add((own + 8).to(tl.pointer_type(tl.int64)), 0, sem="acquire", scope="sys") < message - 2:
        pass
    tl.debug_barrier()  # no thread writes before one of them has seen that it may
    data_at = DATA_AT + (message & 1) * MAX_BYTES
    data = tl.multiple_of((following + data_at).to(tl.pointer_type(x.dtype.element_ty)), 16)
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(data + at, tl.load(x + at, mask=at < n), mask=at < n)
    tl.debug_barrier()  # every thread has written
    if tl.atomic_add(counts + 1, 1, sem="acq_rel") == tl.num_programs(0) - 1:  # and every program
        tl.store(counts + 1, 0)
        tl.store(counts, message)
        tl.atomic_xchg(following.to(tl.pointer_type(tl.int64)), message, sem="release", scope="sys")


@triton.jit
def _recv(x, regions, counts, n, RANK: tl.constexpr, MAX_BYTES: tl.constexpr, DATA_AT: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    message = tl.load(counts) + 1
    own, before = tl.load(regions + RANK), tl.load(regions + RANK - 1)
    while tl.atomic_add(own.to(tl.pointer_type(tl.int64)), 0, sem="acquire", scope="sys") < message:
        pass
    tl.debug_barrier()
    data_at = DATA_AT + (message & 1) * MAX_BYTES
    data = tl.multiple_of((own + data_at).to(tl.pointer_type(x.dtype.element_ty)), 16)
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        part = tl.load(data + at, mask=at < n, cache_modifier=".cg")  # what L1 has is of an earlier message
        tl.store(x + at, part, mask=at < n)
    tl.debug_barrier()  # every thread has read
    if tl.atomic_add(counts + 1, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(counts + 1, 0)
        tl.store(counts, message)
        tl.atomic_xchg((before + 8).to(tl.pointer_type(tl.int64)), message, sem="release", scope="sys")


def send(x: Tensor, regions: Tensor, counts: Tensor, rank: int) -> None:
    """To the next stage, in as many messages as x takes. x: contiguous; regions: int64 [stages], addresses of regions
    that were zero before the first message; counts: `new_counts` of what is sent."""
    _in_messages(_send, x, regions, counts, rank)


def recv(x: Tensor, regions: Tensor, counts: Tensor, rank: int) -> None:
    """Receive a tensor of the size that the stage before sends. `counts` are those of the receiving direction."""
    _in_messages(_recv, x, regions, counts, rank)


def _in_messages(kernel, x: Tensor, regions: Tensor, counts: Tensor, rank: int) -> None:
    for part in torch.split(x.view(-1), MAX_BYTES // x.element_size()):
        n_programs = min(cdiv(part.numel(), BLOCK), N_PROGRAMS)
        if n_programs:
            kernel[(n_programs,)](
                part, regions, counts, part.numel(), RANK=rank, MAX_BYTES=MAX_BYTES, DATA_AT=DATA_AT, BLOCK=BLOCK,
                num_warps=8,
            )  # fmt: skip
