"""Byte planes: every bit pattern survives, the C kernel and its twin agree, and the checksum notices what it should."""

import numpy as np
import pytest

from emberline.kernels import byte_planes


def patterns(width: int) -> byte_planes.Bytes:
    """All 65,536 patterns of 16 bits: as numbers, and as halves or pairs of others."""
    every = np.arange(1 << 16, dtype="<u2")
    if width == 4:
        every = np.stack([every, every[::-1], every, np.zeros_like(every)], axis=1)
    return every.reshape(-1).view(np.uint8)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("n", [0, 1, 3, 5, 1021, None])
def test_every_pattern_survives_in_the_kernel_and_in_its_twin(width: int, n: int | None) -> None:
    numbers = patterns(width) if n is None else patterns(width)[: n * width]
    planes, twin = byte_planes.split_planes(numbers, width), byte_planes.split_planes_reference(numbers, width)
    assert np.array_equal(planes.top, twin.top)
    assert np.array_equal(planes.rest, twin.rest)
    assert planes.checksum == twin.checksum
    for join in (byte_planes.join_planes, byte_planes.join_planes_reference):
        joined, checksum = join(planes.top, planes.rest, width)
        assert np.array_equal(joined, numbers)
        assert checksum == planes.checksum


def test_the_top_plane_is_the_exponent() -> None:
    numbers = np.array([1.0, -1.0, 2.0, 0.0, -0.0, np.inf, np.nan], "<f4")
    for width, words in ((4, numbers.view("<u4")), (2, (numbers.view("<u4") >> 16).astype("<u2"))):
        assert byte_planes.split_planes(words.view(np.uint8), width).top.tolist() == [127, 127, 128, 0, 0, 255, 255]


def test_the_checksum_notices_each_flipped_bit_and_a_changed_order() -> None:
    numbers = patterns(2)[:4096].copy()
    checksum = byte_planes.split_planes(numbers, 2).checksum
    for bit in range(0, 8 * numbers.size, 97):
        numbers[bit // 8] ^= 1 << bit % 8
        assert byte_planes.split_planes(numbers, 2).checksum != checksum
        numbers[bit // 8] ^= 1 << bit % 8
    assert byte_planes.split_planes(np.roll(numbers, 8), 2).checksum != checksum


@pytest.mark.parametrize("columns", [4, 3, 64])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_rows_are_joined_apart_from_each_other(width: int, columns: int) -> None:
    numbers = patterns(width)[: 16 * columns * width]
    planes, around = byte_planes.split_planes(numbers, width), np.full((16, (columns + 5) * width), 7, np.uint8)
    inside = slice(3 * width, (3 + columns) * width)
    joined, checksum = byte_planes.join_planes(planes.top, planes.rest, width, around[:, inside])
    assert checksum == planes.checksum
    assert np.array_equal(joined.reshape(-1), numbers)
    around[:, inside] = 7
    assert (around == 7).all()
