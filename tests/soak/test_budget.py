"""A short, seeded run of `scripts/soak --budget`."""

from tests.examples import EVERY_EXAMPLE, n_examples
from tests.soak.budget import main


def test_a_budget_is_never_exceeded_and_every_bill_is_right() -> None:
    n, n_kills = n_examples(160), 2 if EVERY_EXAMPLE else 1
    report = main(["--requests", str(n), "--kills", str(n_kills), "--clients", "8", "--seed", "3", "--mean-s", "0.2"])
    assert report["problems"] == []
    assert sum(report["kills"].values()) == n_kills
    assert report["refused_for_the_budget"] > 0
    assert report["finished"] > 10
