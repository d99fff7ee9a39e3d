"""A short, seeded run of `scripts/soak --budget`."""

from tests.soak.budget import main


def test_a_budget_is_never_exceeded_and_every_bill_is_right() -> None:
    report = main(["--requests", "80", "--kills", "2", "--clients", "8", "--seed", "3", "--mean-s", "0.2"])
    assert report["problems"] == []
    assert sum(report["kills"].values()) == 2
    assert report["refused_for_the_budget"] > 0
    assert report["finished"] > 20
