"""Block formats and weights against the reference implementation, on random blocks."""

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from emberline.weights.tensors import FORMATS, GROUP, Weight, dequantize

HALVES = {  # where a block keeps its half-precision numbers
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q8_0": (0,),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
}
EXACT = [kind for kind in HALVES if kind != "q6_k"]

GGUF_KINDS = [kind for kind in FORMATS if kind not in ("fp8", "int4", "mxfp4", "u8", "i64")]


def random_rows(kind: str, n_rows: int, n_blocks: int, seed: int = 0) -> np.ndarray:
    """Rows of random bytes whose scales are random numbers, not random bits."""
    random = np.random.default_rng(seed)
    fmt = FORMATS[kind]
    blocks = random.integers(0, 256, (n_rows * n_blocks, fmt.block_bytes), np.uint8)
    for at in HALVES.get(kind, ()):
        blocks[:, at : at + 2] = random.standard_normal((len(blocks), 1)).astype("<f2").view(np.uint8)
    if kind in ("f32", "f16", "bf16"):
        numbers = random.standard_normal((n_rows, n_blocks)).astype("<f4")
        parts = {"f32": numbers, "f16": numbers.astype("<f2"), "bf16": numbers.view("<u2").reshape(n_rows, -1)[:, 1::2]}
        return np.ascontiguousarray(parts[kind]).view(np.uint8)
    return blocks.reshape(n_rows, -1)


def weight(kind: str, n_rows: int, n_blocks: int, seed: int = 0) -> Weight:
    raw = random_rows(kind, n_rows, n_blocks, seed)
    return Weight("w", (n_rows, n_blocks * FORMATS[kind].block), kind, raw)


@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_dequantize_matches_the_reference_bit_for_bit(kind: str) -> None:
    raw = random_rows(kind, 5, 4)
    reference = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind.upper()])
    np.testing.assert_array_equal(dequantize(kind, raw), reference)


@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_block_sizes_match_the_reference(kind: str) -> None:
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]] == FORMATS[kind][:2]


@pytest.mark.parametrize("kind", EXACT)
@given(seed=st.integers(0, 2**32 - 1))
def test_affine_form_is_exact(kind: str, seed: int) -> None:
    w = weight(kind, 3, 2, seed)
    affine = w.affine()
    assert affine is not None
    assert affine.codes.shape == w.shape
    assert affine.scale.shape == affine.offset.shape == (3, w.shape[1] // GROUP)
    assert affine.codes.max() < 1 << affine.bits
    assert affine.bits == (4 if kind in ("q4_0", "q4_1", "q4_k") else 8)
    np.testing.assert_array_equal(affine.dense(), w.dense())


def test_q6_k_is_requantized_within_half_a_step() -> None:
    w = weight("q6_k", 8, 3)
    affine = w.affine()
    assert affine is not None
    assert affine.bits == 8
    error = np.abs(affine.dense() - w.dense()).reshape(8, -1, GROUP).max(axis=2)
    assert (error <= affine.scale * 0.501).all()


def test_requantizing_a_constant_group() -> None:
    raw = np.zeros((1, FORMATS["q6_k"].block_bytes), np.uint8)  # scale 0 everywhere
    affine = Weight("w", (1, 256), "q6_k", raw).affine()
    assert affine is not None
    np.testing.assert_array_equal(affine.dense(), np.zeros((1, 256), np.float32))


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_float_kinds_have_no_affine_form(kind: str) -> None:
    assert weight(kind, 2, 64).affine() is None


@pytest.mark.parametrize("kind", GGUF_KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensor_equals_dense_in_another_dtype(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emberline.weights.tensors._CHUNK_WEIGHTS", 512)  # several chunks, the last one short
    w = weight(kind, 7, 2)
    w = Weight(w.name, w.shape, w.kind, w.raw, order=np.arange(7)[::-1])
    assert torch.equal(w.tensor(dtype, "cpu"), torch.from_numpy(w.dense()).to(dtype))


def test_row_order_applies_to_every_form() -> None:
    plain = weight("q4_1", 4, 2)
    reordered = Weight("w", plain.shape, "q4_1", plain.raw, order=np.array([2, 0, 3, 1]))
    np.testing.assert_array_equal(reordered.dense(), plain.dense()[[2, 0, 3, 1]])
    affine = reordered.affine()
    assert affine is not None
    np.testing.assert_array_equal(affine.dense(), reordered.dense())


def test_shift_is_added() -> None:
    raw = np.array([[0.5], [-1.0]], "<f2").view(np.uint8)
    w = Weight("norm", (2,), "f16", raw, shift=1.0)
    assert w.dense().tolist() == [1.5, 0.0]
    assert w.tensor(torch.float32).tolist() == [1.5, 0.0]


def test_rows_that_repeat_in_memory() -> None:
    """As of generated weights: bytes of one row for all of them."""
    row = np.arange(4, dtype="<f4").view(np.uint8)[None]
    repeated = Weight("w", (3, 4), "f32", np.broadcast_to(row, (3, 16)))
    assert torch.equal(repeated.tensor(torch.float32), torch.arange(4.0).expand(3, 4))
