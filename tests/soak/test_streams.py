"""A short, seeded run of `scripts/soak --streams`."""

import pytest

from tests.soak.streams import main


@pytest.mark.parametrize("roles", [pytest.param("both", marks=pytest.mark.slow), "disaggregated"])
def test_no_stream_is_lost_doubled_or_corrupted(roles: str) -> None:
    words = ["--kills", "6", "--requests", "60", "--seed", "5", "--mean-s", "0.2", "--roles", roles]
    report = main(words)
    assert report["problems"] == []
    assert (report["requests"], report["kills"]) == (60, 6)
    assert report["moves"] > 0
