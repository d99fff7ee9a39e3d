"""The GGUF file reader: valid files are read, malformed ones rejected, and no input crashes it."""

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emberline.weights.checkpoint import open_checkpoint
from emberline.weights.gguf import GGUFFile
from emberline.weights.model_config import BadCheckpoint
from tests.examples import n_examples
from tests.weights.tiny_gguf import tiny_gguf

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, n: int, items: bytes) -> bytes:
    return struct.pack("<IQ", kind, n) + items


def entry(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


def document(pairs: tuple[bytes, ...] = (), tensors: tuple[bytes, ...] = (), data: bytes = b"") -> bytes:
    counts = struct.pack("<IQQ", 3, len(tensors), len(pairs))
    body = b"GGUF" + counts + b"".join(pairs) + b"".join(tensors)
    return body + bytes(-len(body) % 32) + data


def opened(tmp_path: Path, content: bytes) -> GGUFFile:
    path = tmp_path / "file.gguf"
    path.write_bytes(content)
    return GGUFFile.open(path)


def test_metadata_of_every_type(tmp_path: Path) -> None:
    file = opened(
        tmp_path,
        document(
            (
                pair("a", U32, struct.pack("<I", 7)),
                pair("b", F32, struct.pack("<f", 0.5)),
                pair("c", BOOL, b"\1"),
                pair("d", STRING, text("Grüße")),
                pair("e", U64, struct.pack("<Q", 2**63)),
                pair("f", ARRAY, array(STRING, 2, text("x") + text(""))),
                pair("g", ARRAY, array(5, 3, struct.pack("<3i", 1, -2, 3))),
                pair("h", ARRAY, array(BOOL, 2, b"\0\2")),
            )
        ),
    )
    assert {key: file.metadata[key] for key in "abcdef"} == {
        "a": 7, "b": 0.5, "c": True, "d": "Grüße", "e": 2**63, "f": ["x", ""],
    }  # fmt: skip
    assert np.array_equal(file.metadata["g"], [1, -2, 3])
    assert np.array_equal(file.metadata["h"], [False, True])


def test_matches_the_reference_reader(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf")
    ours, theirs = GGUFFile.open(path), gguf.GGUFReader(path)
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        own = ours.tensors[tensor.name]
        assert own.shape == tuple(reversed(tensor.shape.tolist()))
        assert own.kind == tensor.tensor_type.name.lower()
        assert own.offset == tensor.data_offset
        assert ours.bytes_of(own).tobytes() == tensor.data.tobytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"GG", "needs 4 bytes"),
        (b"PK\3\4" + bytes(40), "not a GGUF"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "tensor count"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "metadata count"),
        (document((struct.pack("<Q", 2**63) + bytes(40),)), "metadata key"),
        (document((pair("k", STRING, struct.pack("<Q", 2**64 - 1)),)), "value of 'k'"),
        (document((pair("k", STRING, struct.pack("<Q", 2) + b"\xff\xfe"),)), "not UTF-8"),
        (document((pair("k", 99, bytes(8)),)), "unknown type 99"),
        (document((pair("k", ARRAY, array(U64, 2**61, b"")),)), "length of 'k'"),
        (document((pair("k", ARRAY, array(U64, 20, bytes(80))),)), "value of 'k'"),
        (document((pair("k", ARRAY, array(STRING, 2, text("a") + struct.pack("<Q", 999))),)), "reaches past the end"),
        (document((pair("k", ARRAY, array(STRING, 1, struct.pack("<Q", 2**64 - 8))),)), "reaches past the end"),
        (document((pair("k", ARRAY, array(ARRAY, 1, array(U32, 1, bytes(4)))),)), "array of arrays"),
        (document((pair("k", U32, bytes(4)), pair("k", U32, bytes(4)))), "appears twice"),
        (document((pair("general.alignment", U32, bytes(4)),)), "general.alignment"),
        (document((), (entry("t", (2,) * 5),), bytes(999)), "5 dimensions"),
        (document((), (entry("t", (2, 0)),), bytes(999)), "shape"),
        (document((), (entry("t", (8,), kind=2),), bytes(999)), "whole blocks"),
        (document((), (entry("t", (32,), kind=10),), bytes(999)), "type 10"),
        (document((), (entry("t", (2**40, 2**40)),), bytes(999)), "truncated or its tensor table"),
        (document((), (entry("t", (8,), offset=2**64 - 32),), bytes(999)), "truncated or its tensor table"),
        (document((), (entry("t", (8,), offset=1),), bytes(999)), "truncated or its tensor table"),
        (document((), (entry("t", (8,)), entry("t", (8,))), bytes(64)), "appears twice"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_malformed_file_is_rejected_with_a_reason(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(BadCheckpoint, match=message):
        opened(tmp_path, content)


def test_every_truncation_is_rejected(tmp_path: Path) -> None:
    whole = tiny_gguf(tmp_path / "tiny.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for length in [*range(0, 2000, 7), len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(BadCheckpoint):
            open_checkpoint(path)


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, Path]:
    folder = tmp_path_factory.mktemp("fuzz")
    return tiny_gguf(folder / "tiny.gguf").read_bytes(), folder / "mutated.gguf"


mutation = st.tuples(st.integers(0, 3000), st.binary(min_size=1, max_size=8))
# Numbers likely to overflow, which random bytes seldom produce.
extremes = st.sampled_from([2**64 - 1, 2**63, 2**32, 2**31 - 1, 0]).map(lambda n: struct.pack("<Q", n))
overflow = st.tuples(st.integers(0, 3000), extremes)


@settings(max_examples=n_examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mutations=st.lists(st.one_of(mutation, overflow), min_size=1, max_size=4), cut=st.integers(0, 200))
def test_mutated_bytes_open_or_are_rejected(
    fuzz: tuple[bytes, Path], mutations: list[tuple[int, bytes]], cut: int
) -> None:
    whole, path = fuzz
    content = bytearray(whole)
    for at, patch in mutations:
        content[at : at + len(patch)] = patch
    path.write_bytes(content[: len(content) - cut])
    tracemalloc.start()
    try:
        checkpoint = open_checkpoint(path)
        for name in checkpoint.names:
            checkpoint.weight(name).dense()
        checkpoint.close()
    except BadCheckpoint:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 40 * len(whole)
