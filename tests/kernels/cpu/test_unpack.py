"""Blocks of GGUF's formats unpacked by the CPU kernels: the same codes, scales and offsets as numpy makes of them."""

import numpy as np
import pytest

from emberline.kernels.cpu.native_backend import BLOCK_KINDS, NativeBackend
from emberline.weights.tensors import FORMATS, Weight

# Bytes of a block at which half-precision numbers stand.
HALVES = {"q6_k": (208,), "q4_0": (0,), "q5_0": (0,), "q8_0": (0,)}


def weight_of(kind: str, rows: int, cols: int) -> Weight:
    """Random blocks with finite scales."""
    random, block = np.random.default_rng(7), FORMATS[kind]
    raw = random.integers(0, 256, (rows * cols // block.block, block.block_bytes), np.uint8)
    for at in HALVES.get(kind, (0, 2)):
        raw[:, at : at + 2] = random.normal(0, 0.02, len(raw)).astype("<f2")[:, None].view(np.uint8)
    raw[0, slice(*((208, 210) if kind == "q6_k" else (0, 2)))] = 0  # a group of equal numbers
    return Weight("w", (rows, cols), kind, raw.reshape(rows, -1))


@pytest.fixture(scope="module")
def backend() -> NativeBackend:
    return NativeBackend(2)


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_the_same_as_numpy(backend: NativeBackend, kind: str) -> None:
    weight = weight_of(kind, 48, 512)
    expected, found = weight.affine(), weight.affine(backend.unpack)
    assert expected is not None
    assert found is not None
    assert found.bits == expected.bits
    np.testing.assert_array_equal(found.codes, expected.codes)
    np.testing.assert_array_equal(found.scale, expected.scale.astype(np.float16))
    np.testing.assert_array_equal(found.offset, expected.offset.astype(np.float16))


def test_reordered_rows_are_unpacked_in_their_order(backend: NativeBackend) -> None:
    plain = weight_of("q4_k", 16, 256)
    order = np.arange(16)[::-1].copy()
    turned = Weight("w", plain.shape, plain.kind, plain.raw, order)
    first, second = plain.affine(backend.unpack), turned.affine(backend.unpack)
    assert first is not None
    assert second is not None
    np.testing.assert_array_equal(second.codes, first.codes[::-1])


@pytest.mark.parametrize("rows", [65_535, 65_536, 151_936])
def test_matrices_of_more_rows_than_a_job_has_tasks(backend: NativeBackend, rows: int) -> None:
    """The output matrix of a large vocabulary has so many."""
    weight = weight_of("q8_0", rows, 32)
    expected, found = weight.affine(), weight.affine(backend.unpack)
    assert expected is not None
    assert found is not None
    np.testing.assert_array_equal(found.codes, expected.codes)


def test_every_block_format_is_unpacked() -> None:
    assert set(BLOCK_KINDS) == {kind for kind, block in FORMATS.items() if block.unpack is not None}
