"""Sessions that return to a worker of another number of ranks: their KV is on disk, as slices of the former ranks."""

import logging
from contextlib import ExitStack
from pathlib import Path

import pytest

from emberline.engine.tiers.opening import KEY_VARIABLE
from tests.engine.ranks.rank_engine import RankEngine
from tests.engine.ranks.test_rank_kv_properties import TierScript

DISK_BLOCKS = 64
Contents = dict[tuple[int, bytes], bytes]  # by KV group and content key


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "ab" * 32)


@pytest.fixture
def contents() -> Contents:
    return {}


def served(n_ranks: int, folder: Path, contents: Contents, lose: bool = False) -> list[int]:
    """A turn of each session, with the tokens that are expected. Returns the prompt tokens that came from disk.

    contents: entries of all blocks that were saved so far, with which what is fetched is compared.
    lose: the last rank loses half of the blocks that it has stored by then.
    """
    with ExitStack() as closing:
        engine = RankEngine(n_ranks, n_blocks=20, host_blocks=0, closing=closing, disk=(folder, DISK_BLOCKS))
        engine.book.contents = contents
        script = TierScript(engine, 5)
        script.step_s = 0.0  # no fetch is late, however busy the machine is
        script.save_all()
        engine.flush()
        script.check()
        if lose:
            tier = engine.managers[-1].all_tiers[0]
            tier.remove(sorted(tier.held())[::2])
        return [script.ended[id].usage.cached_by_tier.get("disk", 0) for id in script.accepted]


@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2), (2, 4)])
def test_a_session_comes_from_the_slices_of_another_number_of_ranks(
    tmp_path: Path, contents: Contents, first: int, second: int
) -> None:
    assert served(first, tmp_path, contents) == [0] * 4
    assert served(second, tmp_path, contents) == [144] * 4
    assert served(first, tmp_path, contents) == [144] * 4, "they are there still"


@pytest.mark.parametrize(("first", "second"), [(2, 1), (2, 4)])
def test_what_one_rank_has_lost_is_computed_and_saved_again(
    tmp_path: Path, contents: Contents, first: int, second: int
) -> None:
    served(first, tmp_path, contents, lose=True)
    assert sum(served(second, tmp_path, contents)) < 4 * 144
    assert served(second, tmp_path, contents) == [144] * 4


def test_stages_of_another_pipeline_are_not_found_and_a_warning_names_them(
    tmp_path: Path, contents: Contents, caplog: pytest.LogCaptureFixture
) -> None:
    served(3, tmp_path, contents)
    caplog.set_level(logging.WARNING)
    assert served(1, tmp_path, contents) == [0] * 4
    (record,) = [each for each in caplog.records if "another number of ranks" in each.message]
    assert [folder.rpartition("-")[2] for folder in record.folders] == ["rank0of3", "rank1of3", "rank2of3"]
