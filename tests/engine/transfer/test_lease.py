"""The lease of granted blocks: kept by a slow sender, lost by one that has stopped."""

import signal
from contextlib import contextmanager

import pytest

from tests.engine.client import Client, engine
from tests.engine.transfer.test_faults import SIZES, ask, assert_finished, assert_idle, is_transfer_error, transfer_kv

KEEP_ALIVE_S = 0.05
NEVER_S = 1e6


@contextmanager
def short_lease(path, role, lease_s, keep_alive_s=KEEP_ALIVE_S, chunk_ms=0):
    """An engine that takes `chunk_ms` for a chunk of 64 tokens. A lease is lost after twice `lease_s`."""
    flags = ("--socket", path, "--role", role, "--id", role, "--script", f"chunk_ms={chunk_ms}", *SIZES)
    with engine("tests.engine.transfer.short_lease_standin", lease_s, keep_alive_s, *flags) as made:
        yield made


@pytest.mark.parametrize(("keep_alive_s", "lease_s", "chunk_ms"), [(KEEP_ALIVE_S, 0.5, 1300), (NEVER_S, 0.1, 1000)])
def test_keep_alives_renew_the_lease_of_a_slow_sender(tmp_path, keep_alive_s, lease_s, chunk_ms):
    with (
        short_lease(tmp_path / "p.sock", "prefill", lease_s, keep_alive_s, chunk_ms) as (_, p),
        short_lease(tmp_path / "d.sock", "decode", lease_s) as (_, d),
        Client(p) as prefill,
        Client(d) as decode,
    ):
        transfer_kv(prefill, decode, d, ask("slow", 60))
        if keep_alive_s != NEVER_S:
            assert_finished(decode, "slow")
            assert decode.steps[-1].load.blocks_received == 3
        else:
            assert is_transfer_error(decode.finish("slow"))
        assert_idle(decode)


def test_a_stopped_sender_loses_its_lease(tmp_path):
    with (
        short_lease(tmp_path / "p.sock", "prefill", 0.3, chunk_ms=400) as (process, p),
        short_lease(tmp_path / "d.sock", "decode", 0.3) as (_, d),
        Client(p) as prefill,
        Client(d) as decode,
    ):
        transfer_kv(prefill, decode, d, ask("still", 120))
        while "still-p" not in prefill.deltas:  # its first chunk is computed
            prefill.step()
        process.send_signal(signal.SIGSTOP)
        try:
            assert is_transfer_error(decode.finish("still"))
            decode.submit(ask("after", 2, max_tokens=1))
            decode.finish("after")
            assert decode.steps[-1].load.quarantined in (3, 7), "it may still write, once it wakes up"
        finally:
            process.send_signal(signal.SIGCONT)
        assert_idle(decode)
