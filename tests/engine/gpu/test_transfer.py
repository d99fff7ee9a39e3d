"""KV from process to process on a CUDA device."""

import pytest

pytestmark = pytest.mark.gpu


def test_blocks_are_intact_in_the_other_process():
    from benchmarks.gpu.transfer import bandwidth

    assert bandwidth()["identical"]
