# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Collectives over memory that all ranks of one machine have mapped: one kernel each, no host, safe in CUDA graphs.

Every rank has a region of device memory that its peers read and write:

    flags [size, MAX_PROGRAMS] i64     flags[r, p]: the last message that program p of rank r has put into its own data
    data  [2, MAX_BYTES]               its part of this message, and of the one before

A program copies its part of x into its own region, tells every peer by a flag in the peer's region, waits until every
peer has told it, and reads their parts. Sums are taken in the order of the ranks: all ranks get the same bits. Messages
are counted on the device, so a replayed graph goes on where the last one ended.

A program that waits keeps its place on an SM. Ranks may share a GPU, and then each waits for programs of the others:
all of them must fit at once, so a group has few programs, each with as many blocks of the message as it takes.

Why two halves of data suffice: message n + 2 overwrites message n. Its kernel starts when that of n + 1 has ended, and
that one has waited for every peer's flag of n + 1, which a peer sets after its kernel of message n has ended. Kernels
of one rank therefore must not overlap: they have no programmatic dependent launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.gpu.launch import cdiv, sm_count

BLOCK = 2048  # elements that a program moves at once
MAX_PROGRAMS = 1024
MAX_BYTES = 4 * BLOCK * MAX_PROGRAMS  # of a message
REDUCE, GATHER, EXCHANGE = 0, 1, 2


def region_bytes(size: int) -> int:
    """Return the bytes of each rank's region in a group of `size` ranks."""
    return size * 8 * MAX_PROGRAMS + 2 * MAX_BYTES


def new_counts(device: torch.device | str) -> Tensor:
    """Messages, and programs of the present one that have ended."""
    return torch.zeros(2, dtype=torch.int64, device=device)


@triton.jit
def _peer_collective(
    x, out, regions, counts, n,
    RANK: tl.constexpr, SIZE: tl.constexpr, KIND: tl.constexpr,
    MAX_PROGRAMS: tl.constexpr, MAX_BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program, stride = tl.program_id(0), tl.num_programs(0) * BLOCK
    message = tl.load(counts) + 1
    data_at = SIZE * MAX_PROGRAMS * 8 + (message & 1) * MAX_BYTES

    mine = tl.load(regions + RANK)
    own = tl.multiple_of((mine + data_at).to(tl.pointer_type(x.dtype.element_ty)), 16)
    for start in range(program * BLOCK, n, stride):
        at = start + tl.arange(0, BLOCK)
        ok = at < n
        if KIND == 2:  # the program's part of every rank's slice
            for peer in tl.static_range(SIZE):
                tl.store(own + peer * n + at, tl.load(x + peer * n + at, mask=ok, other=0.0), mask=ok)
        else:
            tl.store(own + at, tl.load(x + at, mask=ok, other=0.0), mask=ok)
    tl.debug_barrier()  # every thread has written before one of them tells
    for peer in tl.static_range(SIZE):
        flags = tl.load(regions + peer).to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(flags + RANK * MAX_PROGRAMS + program, message, sem="release", scope="sys")
    own_flags = mine.to(tl.pointer_type(tl.int64))
    for peer in tl.static_range(SIZE):
        while tl.atomic_add(own_flags + peer * MAX_PROGRAMS + program, 0, sem="acquire", scope="sys") < message:
            pass
    tl.debug_barrier()

    for start in range(program * BLOCK, n, stride):
        at = start + tl.arange(0, BLOCK)
        ok = at < n
        total = tl.zeros([BLOCK], tl.float32)
        for peer in tl.static_range(SIZE):
            data = tl.multiple_of((tl.load(regions + peer) + data_at).to(tl.pointer_type(x.dtype.element_ty)), 16)
            if KIND == 2:
                data += RANK * n
            part = tl.load(data + at, mask=ok, other=0.0, cache_modifier=".cg")  # what L1 has is of an earlier message
            if KIND == 0:
                total += part.to(tl.float32)
            else:
                tl.store(out + peer * n + at, part, mask=ok)
        if KIND == 0:
            tl.store(out + at, total.to(out.dtype.element_ty), mask=ok)
    if tl.atomic_add(counts + 1, 1, sem="acq_rel") == tl.num_programs(0) - 1:  # all have read the count
        tl.store(counts + 1, 0)
        tl.store(counts, message)


def program_count(n: int, size: int) -> int:
    """Return the programs for a message of n elements. The ranks of a group on one GPU take half of its SMs' places at
    most."""
    return min(cdiv(n, BLOCK), MAX_PROGRAMS, max(1, 4 * sm_count() // size))


def max_elements(x: Tensor, kind: int, size: int) -> int:
    """Return the largest number of elements of a rank's part in one message."""
    n = min(BLOCK * MAX_PROGRAMS, MAX_BYTES // x.element_size())
    return n // size if kind == EXCHANGE else n


def peer_collective(x: Tensor, out: Tensor, regions: Tensor, counts: Tensor, rank: int, size: int, kind: int) -> None:
    """One message: all ranks call this in the same order, with tensors of the same shapes, contiguous.

    REDUCE: out, which may be x, gets the sum; GATHER: out [size, *x.shape] gets every rank's x; EXCHANGE: x, out
    [size, ...]: slice r of x goes to rank r. regions: int64 [size], the ranks' regions, whose flags were zero
    before the first message; counts: `new_counts`.
    """
    n = x.numel() // size if kind == EXCHANGE else x.numel()
    assert n <= max_elements(x, kind, size)
    if n:
        _peer_collective[(program_count(n, size),)](
            x, out, regions, counts, n, RANK=rank, SIZE=size, KIND=kind,
            MAX_PROGRAMS=MAX_PROGRAMS, MAX_BYTES=MAX_BYTES, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
