"""Byte planes: every bit pattern survives, the C kernel and its twin agree, and the checksum notices what it should."""

import numpy as np
import pytest
import zstandard

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
    assert twin.rest.data.c_contiguous, "the writer takes it as it is"
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


def stored(numbers: byte_planes.Bytes, width: int, level: int = 1) -> tuple[byte_planes.StoredPlanes, np.ndarray]:
    """One block's planes, and the table that says where it ends."""
    planes = byte_planes.split_planes(numbers, width)
    coded = zstandard.ZstdCompressor(level=level).compress(planes.top.tobytes())
    table = np.array([[len(coded), *planes.checksum]], "<u8")
    return byte_planes.StoredPlanes(np.frombuffer(coded, np.uint8), planes.rest), table


@pytest.mark.parametrize("columns", [4, 3, 64])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_block_is_decoded_into_rows_apart_from_each_other(width: int, columns: int) -> None:
    numbers, around = patterns(width)[: 16 * columns * width], np.full((16, (columns + 5) * width), 7, np.uint8)
    planes, table = stored(numbers, width)
    inside, grid = slice(3 * width, (3 + columns) * width), (16, columns, 16, columns)
    whole = byte_planes.Rectangle(0, 16, 0, columns)
    assert byte_planes.decode_blocks(planes, table, [0], grid, whole, width, around[:, inside]) == 1
    assert np.array_equal(around[:, inside].reshape(-1), numbers)
    around[:, inside] = 7
    assert (around == 7).all()
    part, some = byte_planes.Rectangle(5, 9, 1, columns - 1), np.zeros((4, (columns - 2) * width), np.uint8)
    assert byte_planes.decode_blocks(planes, table, [0], grid, part, width, some) == 1
    assert np.array_equal(some, numbers.reshape(16, -1)[5:9, width:-width])


def test_planes_may_begin_within_a_tensor() -> None:
    """Two blocks of which the second is in memory: a reader has read no other bytes of the file."""
    numbers = patterns(2)[: 2 * 4096 * 2]
    (first, table), (second, end) = stored(numbers[:8192], 2), stored(numbers[8192:], 2)
    table = np.concatenate([table, end + np.array([table[0, 0], 0, 0], "<u8")])
    planes = byte_planes.StoredPlanes(second.coded, second.rest, len(first.coded), len(first.rest))
    out, part = np.zeros((64, 128), np.uint8), byte_planes.Rectangle(64, 128, 0, 64)
    assert byte_planes.decode_blocks(planes, table, [1], (128, 64, 64, 64), part, 2, out) == 1
    assert np.array_equal(out.reshape(-1), numbers[8192:])


def contents() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    words = [rng.integers(97, 123, 5) for _ in range(50)]
    return {
        "exponents": rng.standard_normal(1 << 17).astype("<f4").view("<u4") >> 23 & 255,
        "few": rng.geometric(0.6, 5000),
        "one stream": rng.geometric(0.6, 200),
        "noise": rng.integers(0, 256, 70_000),
        "constant": np.full(1 << 17, 5),
        "text": np.concatenate([words[n] for n in rng.integers(0, 50, 9000)]),
        "rows": np.tile(rng.integers(0, 256, 1500), 60),
        "sparse": rng.integers(0, 256, 60_000) * (rng.random(60_000) < 0.01),
        "changing": np.concatenate([rng.integers(0, 2, 60_000), rng.geometric(0.1, 60_000) & 255]),
        "a byte": np.array([9]),
    }


@pytest.mark.parametrize("level", [1, 6, 12])
@pytest.mark.parametrize("name", contents())
def test_frames_of_zstd_are_decoded(name: str, level: int) -> None:
    """Huffman codes of one and four streams, their tables, sequences of all lengths, raw and repeated bytes."""
    content = contents()[name].astype(np.uint8)
    planes, table = stored(content, 1, level)
    out, n = np.zeros((1, content.size), np.uint8), content.size
    done = byte_planes.decode_blocks(planes, table, [0], (1, n, 1, n), byte_planes.Rectangle(0, 1, 0, n), 1, out)
    assert done == 1
    assert np.array_equal(out[0], content)


def test_a_damaged_frame_is_refused() -> None:
    """Whatever byte is changed, and wherever the frame is cut: never wrong numbers, and no memory beside them."""
    rng, n = np.random.default_rng(1), 5000
    for name in ("few", "text", "rows"):
        planes, table = stored(contents()[name].astype(np.uint8)[:n], 1)
        whole, around = byte_planes.Rectangle(0, 1, 0, n), np.full((1, n + 64), 7, np.uint8)
        for place in range(0, len(planes.coded), 3):
            damaged = planes.coded.copy()
            damaged[place] ^= rng.integers(1, 256)
            for coded, end in ((damaged, len(damaged)), (planes.coded[:place].copy(), place)):
                table[0, 0] = end
                done = byte_planes.decode_blocks(
                    planes._replace(coded=coded), table, [0], (1, n, 1, n), whole, 1, around[:, :n]
                )
                assert not done or np.array_equal(around[0, :n], contents_of(planes))
                assert (around[0, n:] == 7).all()


def contents_of(planes: byte_planes.StoredPlanes) -> np.ndarray:
    return np.frombuffer(zstandard.ZstdDecompressor().decompress(planes.coded.tobytes()), np.uint8)
