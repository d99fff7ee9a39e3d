"""KV over Mooncake's Transfer Engine, on loopback, where it is installed."""

import pytest

from tests.engine.client import Client
from tests.engine.transfer.test_faults import ask, at_rest, ends_well, hand_over, standin

try:
    import mooncake.engine  # noqa: F401
except (ImportError, OSError):
    pytest.skip("Mooncake's Transfer Engine is not installed", allow_module_level=True)


def test_blocks_arrive_as_they_are(tmp_path):
    with (
        standin("tcp:127.0.0.1:0", "prefill", "--mooncake", "tcp") as (_, p),
        standin("tcp:127.0.0.1:0", "decode", "--mooncake", "tcp") as (_, d),
        Client(p) as prefill,
        Client(d) as decode,
    ):
        assert decode.greeting.info.transfers == ("mooncake", "tcp")
        for n in range(6):
            hand_over(prefill, decode, d, ask(f"r{n}", 100 + 200 * n, n % 3))
        for n in range(6):
            ends_well(decode, f"r{n}")
        at_rest(prefill)
        at_rest(decode)
        assert decode.steps[-1].load.blocks_received > 50
