"""The lease of granted blocks: kept by a slow sender, lost by one that has stopped."""

import signal
from contextlib import contextmanager

import pytest

from tests.engine.client import Client, engine
from tests.engine.transfer.test_faults import SIZES, ask, assert_finished, assert_idle, is_transfer_error, transfer_kv

SLOW = "chunk_ms=2400"  # a chunk of 64 tokens; the lease is 1 s, and its grace period 1 s


@contextmanager
def short_lease(path, role, how="chatty", script=""):
    args = (how, "--socket", path, "--role", role, "--id", role, "--script", script, *SIZES)
    with engine("tests.engine.transfer.short_lease_standin", *args) as made:
        yield made


@pytest.mark.parametrize("how", ["chatty", "mute"])
def test_keep_alives_renew_the_lease_of_a_slow_sender(tmp_path, how):
    with (
        short_lease(tmp_path / "p.sock", "prefill", how, SLOW) as (_, p),
        short_lease(tmp_path / "d.sock", "decode") as (_, d),
        Client(p) as prefill,
        Client(d) as decode,
    ):
        transfer_kv(prefill, decode, d, ask("slow", 60))
        if how == "chatty":
            assert_finished(decode, "slow")
            assert decode.steps[-1].load.blocks_received == 3
        else:
            assert is_transfer_error(decode.finish("slow"))
        assert_idle(decode)


def test_a_stopped_sender_loses_its_lease(tmp_path):
    with (
        short_lease(tmp_path / "p.sock", "prefill", script=SLOW) as (process, p),
        short_lease(tmp_path / "d.sock", "decode") as (_, d),
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
