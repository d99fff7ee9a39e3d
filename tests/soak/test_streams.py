"""A short, seeded run of `scripts/soak --streams`."""

import pytest

from tests.examples import EVERY_EXAMPLE
from tests.soak.streams import main


@pytest.mark.parametrize("roles", [pytest.param("both", marks=pytest.mark.slow), "disaggregated"])
def test_no_stream_is_lost_doubled_or_corrupted(roles: str) -> None:
    n, n_kills = (120, 6) if EVERY_EXAMPLE else (20, 3)
    report = main(f"--kills {n_kills} --requests {n} --seed 5 --mean-s 0.2 --roles {roles}".split())
    assert report["problems"] == []
    assert (report["requests"], report["kills"]) == (n, n_kills)
    assert report["moves"] > 0
