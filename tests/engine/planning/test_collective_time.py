"""Times of collectives: published ones are met, measured ones are taken, more bytes never take less."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.engine.planning.collective_time import Link
from emberline.engine.planning.hardware import GPUS, AllReduceTime

H100 = GPUS["H100"]
MEASURED = msgspec.structs.replace(H100, all_reduce=(AllReduceTime(8, 1024, 20), AllReduceTime(8, 16, 8)))


def test_the_link_is_fitted_to_published_all_reduces():
    assert Link(H100, 4).all_reduce_s(0.5e6) == pytest.approx(10e-6, rel=0.15)
    assert 15e-6 < Link(H100, 8).all_reduce_s(2e6) < 30e-6, "NCCL's"


def test_measured_times_are_taken_and_interpolated():
    link = Link(MEASURED, 8)
    assert link.all_reduce_s(16 << 10) == pytest.approx(8e-6)
    assert link.all_reduce_s(1 << 20) == pytest.approx(20e-6)
    assert link.all_reduce_s(1 << 17) == pytest.approx((8 * 20) ** 0.5 * 1e-6), "half way on logarithmic scales"
    assert link.all_reduce_s(100) == pytest.approx(8e-6)
    assert link.all_reduce_s(4 << 20) == pytest.approx(80e-6)
    assert Link(MEASURED, 4).all_reduce_s(1 << 20) == Link(H100, 4).all_reduce_s(1 << 20), "of another size"


def test_one_rank_says_nothing():
    link = Link(H100, 1)
    assert link.all_reduce_s(1e9) == link.all_gather_s(1e9) == link.exchange_s(1e9) == 0


def test_between_machines_it_takes_longer():
    assert Link(H100, 16).all_reduce_s(1e6) > 3 * Link(H100, 8).all_reduce_s(1e6)


@given(st.sampled_from([H100, MEASURED]), st.sampled_from([2, 4, 8, 16]), st.floats(1, 1e9), st.floats(1, 1e3))
def test_more_bytes_never_take_less(gpu, ranks, n_bytes, times):
    link = Link(gpu, ranks)
    for seconds in (link.all_reduce_s, link.all_gather_s, link.exchange_s, link.send_s):
        assert 0 < seconds(n_bytes) <= seconds(n_bytes * times) * (1 + 1e-9)
