"""Blocks are leased: to a sender that works, however slowly, not to one that is gone or stands still."""

import signal
from contextlib import contextmanager

import pytest

from tests.engine.client import Client, engine
from tests.engine.transfer.test_faults import SIZES, ask, at_rest, ends_well, hand_over, told_of_transfer

SLOW = "chunk_ms=1500"  # a chunk; the lease is 0.6 s


@contextmanager
def impatient(path, role, how="chatty", script=""):
    args = (how, "--socket", path, "--role", role, "--id", role, "--script", script, *SIZES)
    with engine("tests.engine.transfer.short_lease_standin", *args) as made:
        yield made


@pytest.mark.parametrize("how", ["chatty", "mute"])
def test_a_slow_sender_keeps_its_lease_by_signs_of_life(tmp_path, how):
    with (
        impatient(tmp_path / "p.sock", "prefill", how, SLOW) as (_, p),
        impatient(tmp_path / "d.sock", "decode") as (_, d),
        Client(p) as prefill,
        Client(d) as decode,
    ):
        hand_over(prefill, decode, d, ask("slow", 120))
        if how == "chatty":
            ends_well(decode, "slow")
            assert decode.steps[-1].load.blocks_received == 7
        else:
            assert told_of_transfer(decode.finish("slow"))
        at_rest(decode)


def test_a_sender_that_stands_still_loses_its_lease(tmp_path):
    with (
        impatient(tmp_path / "p.sock", "prefill", script=SLOW) as (process, p),
        impatient(tmp_path / "d.sock", "decode") as (_, d),
        Client(p) as prefill,
        Client(d) as decode,
    ):
        hand_over(prefill, decode, d, ask("still", 120))
        while "still-p" not in prefill.deltas:  # its first chunk is computed
            prefill.step()
        process.send_signal(signal.SIGSTOP)
        try:
            assert told_of_transfer(decode.finish("still"))
            decode.submit(ask("after", 2, max_tokens=1))
            decode.finish("after")
            assert decode.steps[-1].load.quarantined in (3, 7), "it may still write, once it wakes up"
        finally:
            process.send_signal(signal.SIGCONT)
        at_rest(decode)
