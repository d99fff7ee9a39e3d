"""A worker of several ranks with KV tiers: a prefix comes from disk after a restart, with the tokens of one rank."""

import signal
from pathlib import Path

import pytest

from tests.engine.client import Client
from tests.engine.ranks.test_rank_worker import PROMPT, followers, is_gone, model, request, run, worker  # noqa: F401

KV_KEY = "00" * 32
ASKED = request("first", PROMPT, max_tokens=10)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [("--tp", "2"), ("--pp", "2")], ids=["tp2", "pp2"])
def test_a_prefix_comes_from_every_ranks_disk_after_a_restart(
    model: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layout: tuple[str, str],
) -> None:
    monkeypatch.setenv("EMBERLINE_KV_KEY", KV_KEY)
    with worker(model, tmp_path / "one") as (_, ready), Client(ready["address"]) as client:
        client.sock.settimeout(120)
        expected = run(client, ASKED)
    flags = (*layout, "--kv-disk-bytes", str(4 << 20), "--kv-disk-path", str(tmp_path / "kv"))
    with worker(model, tmp_path / "two", *flags, "--kv-host-bytes", str(1 << 20)) as (process, ready):
        assert ready.get("ready"), ready
        with Client(ready["address"]) as client:
            client.sock.settimeout(120)
            assert run(client, ASKED) == expected
        (follower,) = followers(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert is_gone(follower)
    assert len(list((tmp_path / "kv").glob("*of2/0/*.blocks"))) == 2
    with worker(model, tmp_path / "three", *flags) as (process, ready):
        assert ready.get("ready"), ready
        with Client(ready["address"]) as client:
            client.sock.settimeout(120)
            assert run(client, ASKED) == expected
            cached = client.deltas["first"][0].usage.cached_by_tier
            assert cached.get("disk") == 64, cached
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    for blocks in (tmp_path / "kv").glob("*rank1of2/0/*"):  # what rank 1 has stored is lost
        if blocks.name != "lock":
            blocks.unlink()
    with worker(model, tmp_path / "four", *flags) as (_, ready):
        assert ready.get("ready"), ready
        with Client(ready["address"]) as client:
            client.sock.settimeout(120)
            assert run(client, ASKED) == expected
            assert not client.deltas["first"][0].usage.cached_by_tier.get("disk")
