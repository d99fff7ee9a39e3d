"""KV over Mooncake's Transfer Engine, on loopback, where it is installed."""

import pytest

from tests.engine.client import Client
from tests.engine.transfer.test_faults import ask, assert_finished, assert_idle, standin, transfer_kv

try:
    import mooncake.engine  # noqa: F401
except (ImportError, OSError):
    pytest.skip("Mooncake's Transfer Engine is not installed", allow_module_level=True)


def test_blocks_are_intact_over_mooncake(tmp_path):
    with (
        standin("tcp:127.0.0.1:0", "prefill", "--mooncake", "tcp") as (_, p),
        standin("tcp:127.0.0.1:0", "decode", "--mooncake", "tcp") as (_, d),
        Client(p) as prefill,
        Client(d) as decode,
    ):
        assert decode.greeting.info.transfers == ("mooncake", "tcp")
        for n in range(6):
            transfer_kv(prefill, decode, d, ask(f"r{n}", 100 + 200 * n, n % 3))
        for n in range(6):
            assert_finished(decode, f"r{n}")
        assert_idle(prefill)
        assert_idle(decode)
        assert decode.steps[-1].load.blocks_received > 50
