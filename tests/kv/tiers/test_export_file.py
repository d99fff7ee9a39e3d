"""Export files: what was written is read again, by the same account, model and installation, or is refused by name."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emberline.kv.tiers.block_tag import BlockTagger
from emberline.kv.tiers.export_file import read_export, write_export
from emberline.kv.tiers.tier import BlockId, BlockMeta, layout_tag
from emberline.protocol.errors import BadInput, EmberlineError, Forbidden
from tests.kv.tiers.disk.disk_blocks import GROUP, KEY, OTHER, OWNER, block_id, content

LAYOUTS = {layout_tag(GROUP): GROUP.block_bytes}
TAGGER = BlockTagger(KEY)


def export(path: Path, numbers: list[int], missing: tuple[int, ...] = ()) -> int:
    blocks = [(block_id(n), BlockMeta(OWNER, b"s" * 16, n, block_id(n - 1).key)) for n in numbers]
    by_id = {block_id(n): n for n in numbers if n not in missing}

    def read(ids: list[BlockId]) -> list[memoryview | None]:
        return [memoryview(bytearray(content(by_id[one]))) if one in by_id else None for one in ids]

    return write_export(path, TAGGER, "model", OWNER, LAYOUTS, blocks, read, batch=3)


def read_all(path: Path) -> list[tuple[BlockId, bytes]]:
    found = [(one, meta, bytes(data)) for one, meta, data in read_export(path, TAGGER, "model", OWNER, LAYOUTS)]
    assert all((meta.owner, meta.session) == (OWNER, b"s" * 16) for _, meta, _ in found)
    return [(one, data) for one, _, data in found]


def test_blocks_come_back_without_those_that_are_gone(tmp_path: Path) -> None:
    assert export(tmp_path / "e", list(range(10)), missing=(4, 9)) == 8
    assert read_all(tmp_path / "e") == [(block_id(n), content(n)) for n in range(10) if n not in (4, 9)]


def test_others_are_refused_by_name(tmp_path: Path) -> None:
    export(tmp_path / "e", [0, 1])
    cases = [
        (BlockTagger(b"another root secret"), "model", OWNER, LAYOUTS, "another root secret"),
        (TAGGER, "other model", OWNER, LAYOUTS, "other weights"),
        (TAGGER, "model", OWNER, {b"12345678": 4}, "another layout"),
    ]
    for tagger, model, owner, layouts, why in cases:
        with pytest.raises(BadInput, match=why):
            list(read_export(tmp_path / "e", tagger, model, owner, layouts))
    with pytest.raises(Forbidden, match="another account"):
        list(read_export(tmp_path / "e", TAGGER, "model", OTHER, LAYOUTS))
    (tmp_path / "x").write_bytes(b"some other file")
    with pytest.raises(BadInput, match="no export"):
        read_all(tmp_path / "x")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.floats(0, 1), bit=st.integers(0, 7), cut=st.booleans())
def test_damage_is_found(tmp_path: Path, at: float, bit: int, cut: bool) -> None:
    path = tmp_path / "e"
    path.unlink(missing_ok=True)
    export(path, [0, 1, 2])
    data = bytearray(path.read_bytes())
    place = int(at * (len(data) - 1))
    if cut:
        del data[place:]
    else:
        data[place] ^= 1 << bit
    path.write_bytes(data)
    found = []
    with pytest.raises(EmberlineError):
        found.extend(read_export(path, TAGGER, "model", OWNER, LAYOUTS))
    assert all(bytes(block) == content(n) for n, (_, _, block) in enumerate(found))
