"""Losslessly packed BF16 matrices: every bit comes back, and products equal those of the matrix that was packed."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("triton")

from emberline.kernels.gpu import launch
from emberline.kernels.gpu.lossless import LosslessMatrix, decode_rows
from emberline.kernels.gpu.lossless_gemm import (
    LosslessGemmTile,
    LosslessGemvTile,
    lossless_gemm,
    lossless_gemm_floats,
    lossless_gemv,
)
from emberline.kernels.gpu.lossless_packing import (
    PACKING_BYTES,
    LosslessPacker,
    Room,
    lossless_bytes,
    pack_lossless,
    pack_rows,
    pack_rows_reference,
)
from tests.kernels.gpu.batches import DEVICE, LIMIT, error, everyday, noise
from tests.kernels.gpu.test_matmul import CASES, WITHOUT_NORM, expected


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype == torch.bfloat16 and torch.equal(a.view(torch.int16), b.view(torch.int16))


def patterns() -> torch.Tensor:
    return torch.arange(65536, dtype=torch.int32, device=DEVICE).to(torch.int16).view(torch.bfloat16)


def normal(n: int, k: int, scale: float = 0.02, seed: int = 7) -> torch.Tensor:
    numbers = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * scale
    return numbers.to(DEVICE, torch.bfloat16)


def odd(n: int, k: int, raw: bool) -> torch.Tensor:
    """Normal weights with escapes of every kind and, with `raw`, rows that no window holds."""
    weight = normal(n, k)
    weight[1, 3], weight[n - 1, 5], weight[5, :2], weight[5, 9], weight[2, 0] = 1e-20, 0.0, 1e-9, 70.0, -0.0
    if raw:
        weight[7] = 0.0
        weight[n - 3] *= torch.exp2(torch.arange(k, device=DEVICE) % 40 - 20.0).bfloat16()
    return weight


MATRICES = {
    "every pattern, by row": lambda: patterns().view(64, 1024),
    "every pattern, in every row": lambda: patterns().view(256, 256).T.contiguous(),
    "normal": lambda: normal(70, 1024),
    "columns that fill no tile": lambda: normal(45, 700),
    "heavy tails": lambda: (normal(40, 512) / normal(40, 512, seed=8).abs().clamp(min=1e-3)).bfloat16(),
    "zeros": lambda: torch.zeros(5, 130, dtype=torch.bfloat16, device=DEVICE),
    "minus zeros": lambda: -torch.zeros(3, 5, dtype=torch.bfloat16, device=DEVICE),
    "one constant": lambda: torch.full((9, 64), 0.3, dtype=torch.bfloat16, device=DEVICE),
    "padded rows": lambda: torch.cat([normal(30, 128), torch.zeros(4, 128, dtype=torch.bfloat16, device=DEVICE)]),
    "NaN and infinities": lambda: (
        normal(8, 64).masked_fill_(torch.eye(8, 64, device=DEVICE) > 0, torch.nan)
        / torch.tensor([1.0, 0.0] * 4, dtype=torch.bfloat16, device=DEVICE)[:, None]
    ),
    "one weight": lambda: normal(1, 1),
    "no rows": lambda: normal(0, 64),
}


@pytest.mark.parametrize("name", MATRICES)
def test_every_bit_comes_back(name: str) -> None:
    weight = MATRICES[name]()
    matrix = pack_lossless(weight)
    assert same_bits(matrix.dense(), weight)
    out = torch.full_like(weight, 3.0)
    decode_rows(matrix, out)
    assert same_bits(out, weight)


@pytest.mark.parametrize("weight", [odd(9, 320, True), normal(6, 2304), patterns().view(256, 256)[:12]])
def test_kernels_pack_as_the_reference_does(weight: torch.Tensor) -> None:
    (n, k), first, found = weight.shape, 70_000, []
    for pack in (pack_rows_reference, pack_rows):
        packer = LosslessPacker(first + n, k, DEVICE, Room(n * k, n))
        for rows in (slice(n // 2, n), slice(n // 2)):  # so that escapes do not come in the order of rows
            pack(weight[rows], first + (rows.start or 0), packer.matrix, packer.apart)
        counts, used = packer.apart.counts, packer.apart.used
        matrix = packer.finish()
        used_up = slice(int(matrix.starts[-1])), slice(int((matrix.scale < 0).sum()))
        stored = matrix.places[used_up[0]], matrix.values[used_up[0]], matrix.raw[used_up[1]]
        found.append([counts, used, matrix.scale[first:], matrix.codes[first:], matrix.starts, *stored])
    for got, want in zip(found[1], found[0], strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(*(each.view(torch.int16) if each.dtype == torch.bfloat16 else each for each in (got, want)))


def packed_bytes(matrix: LosslessMatrix) -> int:
    tensors = (matrix.codes, matrix.scale, matrix.starts, matrix.places, matrix.values, matrix.raw)
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("weight", [normal(512, 1024), odd(400, 576, False)])
def test_a_quarter_of_the_memory_is_spared(weight: torch.Tensor) -> None:
    matrix = pack_lossless(weight)
    assert packed_bytes(matrix) < 0.76 * weight.nbytes
    assert packed_bytes(matrix) < lossless_bytes(*weight.shape)


def test_rows_are_packed_in_any_order() -> None:
    weight = odd(60, 256, True)
    packer = LosslessPacker(60, 256, DEVICE)
    for first in (40, 0, 20):
        packer.pack(weight[first : first + 20], first)
    assert same_bits(packer.finish().dense(), weight)


def test_rows_that_are_not_packed_yet_can_be_decoded() -> None:
    packer, weight = LosslessPacker(60, 256, DEVICE), odd(60, 256, True)
    for first in (40, 0):
        packer.pack(weight[first : first + 20], first)
        assert not packer.matrix.starts.any()
        assert (packer.matrix.scale >= -1).all()  # at most the first raw row, which exists
        decode_rows(packer.matrix, torch.empty_like(weight))


@pytest.mark.parametrize("raw", [False, True])
def test_rows_are_decoded_by_number(raw: bool) -> None:
    weight = odd(45, 320, raw)
    matrix, out = pack_lossless(weight), torch.full((35, 320), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    decode_rows(matrix, out, first=10)
    assert same_bits(out, weight[10:])
    ids = torch.tensor([5, 44, 5, 42, 7], dtype=torch.int32, device=DEVICE)
    decode_rows(matrix, out[:5], ids=ids, factor=2.0)
    assert same_bits(out[:5], weight[ids.long()] * 2)


@pytest.mark.parametrize(
    ("raw", "norm", "bias", "gate", "add"),
    everyday([(raw, *case) for raw in (False, True) for case in CASES], [(True, *CASES[0]), (False, *CASES[3])]),
)
def test_one_token(raw: bool, norm: bool, bias: bool, gate: int, add: bool) -> None:
    n, k = 19, 320
    w, more = odd(n * (2 if gate else 1), k, raw), noise(n, seed=5) if bias else None
    matrix, x, out = pack_lossless(w, more), noise(1, k, seed=1), noise(1, n, seed=3)
    weight = noise(k, seed=4).float() + 1 if norm else None
    want = expected(x, w.to(x.dtype), out, weight, more, gate, add)
    lossless_gemv(x, matrix, out, LosslessGemvTile(1, 1), norm=weight, eps=1e-5, gate=gate, add=add)
    assert error(out, want) < LIMIT


@pytest.mark.parametrize(
    ("m", "splits", "halves", "raw", "bias", "gate", "add"),
    everyday(
        [
            (m, splits, halves, raw, *case)
            for m, splits, halves in ((5, 1, 64), (19, 3, 32))
            for raw in (False, True)
            for case in WITHOUT_NORM
        ],
        [(19, 3, 32, True, *WITHOUT_NORM[1]), (5, 1, 64, False, *WITHOUT_NORM[0])],
    ),
)
def test_several_tokens(m: int, splits: int, halves: int, raw: bool, bias: bool, gate: int, add: bool) -> None:
    n, k = 24, 320
    w, more = odd(n * (2 if gate else 1), k, raw), noise(n, seed=5) if bias else None
    matrix, x, out = pack_lossless(w, more), noise(m, k, seed=1), noise(m, n, seed=3)
    want = expected(x, w.to(x.dtype), out, None, more, gate, add)
    tile = LosslessGemmTile(16, halves, 16, splits, 2, 4)
    partial = torch.full((lossless_gemm_floats(n, m, tile, bool(gate)),), torch.nan, device=DEVICE)
    counters = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    lossless_gemm(x, matrix, out, tile, partial, counters, gate=gate, add=add)
    assert error(out, want) < LIMIT
    assert not counters.any()


def test_a_matrix_that_does_not_compress_is_refused() -> None:
    packer = LosslessPacker(256, 256, DEVICE, Room(100, 3))
    packer.pack(patterns().view(256, 256), 0)
    with pytest.raises(ValueError, match=r"0 escapes and 4 raw rows, more than the 100 and 3.*does not compress"):
        packer.finish()


def test_a_row_too_long_for_the_format_is_refused() -> None:
    with pytest.raises(ValueError, match="longer than 65536"):
        LosslessPacker(1, 65537, "meta")


@pytest.mark.gpu
def test_threads_that_pack_take_the_memory_of_one_piece() -> None:
    """The KV cache is allocated while weights are packed, and takes all memory but a reserve."""
    weight, n_threads = normal(8192, 4096).cpu(), 8
    packers = [LosslessPacker(*weight.shape, DEVICE) for _ in range(n_threads)]

    def pack(packer: LosslessPacker) -> None:
        stream = torch.cuda.Stream()  # of the loader's thread
        with torch.cuda.stream(stream):
            packer.pack(weight, 0)
        stream.synchronize()

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    with ThreadPoolExecutor(n_threads) as threads:
        list(threads.map(pack, packers))
    assert torch.cuda.max_memory_reserved() - before < PACKING_BYTES
    assert all(same_bits(packer.finish().dense(), weight.to(DEVICE)) for packer in packers)


@pytest.mark.gpu
def test_weights_are_packed_while_another_thread_compiles() -> None:
    """Steps are prepared while weights are read: there kernels are only compiled, but not those of the loader."""
    weight = normal(300, 1024)
    with launch.compiling_only(), ThreadPoolExecutor(1) as thread:
        matrix = thread.submit(pack_lossless, weight).result()
    assert same_bits(matrix.dense(), weight)
