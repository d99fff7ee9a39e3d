"""KV from process to process on a CUDA device."""

import pytest

pytestmark = pytest.mark.gpu


def test_every_block_arrives_in_the_other_process_as_it_is():
    from benchmarks.gpu.transfer import bandwidth

    assert bandwidth()["identical"]
