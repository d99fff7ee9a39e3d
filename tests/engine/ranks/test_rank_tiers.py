"""A worker of several ranks with KV tiers: a prefix comes from disk or the pool after a restart, with the tokens of one
rank."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from emberline.kv.tiers.disk.direct_file import PAGE, padded
from emberline.kv.tiers.pool.pool_tier import PoolTier
from emberline.protocol.request import EngineRequest
from tests.engine.client import Client
from tests.engine.ranks.test_rank_worker import (  # noqa: F401
    CONFIG,
    MIXTRAL,
    PROMPT,
    followers,
    is_gone,
    model,
    request,
    run,
    worker,
    write_checkpoint,
)
from tests.kv.tiers.pool import mooncake_pool

KV_KEY = "00" * 32
LONG = [(11 * at) % 199 + 2 for at in range(210)]
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [(("--tp", "2"), ()), ((), ("--tp", "2")), (("--tp", "2"), ("--tp", "2", "--pp", "2"))],
    ids=["tp2 to tp1", "tp1 to tp2", "tp2 to tp2 pp2"],
)
def test_a_prefix_comes_from_the_disk_of_another_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: tuple[str, ...], second: tuple[str, ...]
) -> None:
    mixtral = write_checkpoint(tmp_path, MIXTRAL)
    monkeypatch.setenv("EMBERLINE_KV_KEY", KV_KEY)
    disk = ("--kv-disk-bytes", str(4 << 20), "--kv-disk-path", str(tmp_path / "kv"))

    def replied(*flags: str) -> tuple[list[list[int]], int]:
        """Return the reply of a new worker, and the prompt tokens that it has read from disk."""
        with worker(mixtral, tmp_path / "socket", *flags) as (process, ready):
            assert ready.get("ready"), ready
            with Client(ready["address"]) as client:
                client.sock.settimeout(120)
                tokens = run(client, ASKED)
                n_cached = client.deltas["first"][0].usage.cached_by_tier.get("disk", 0)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            return tokens, n_cached

    expected, _ = replied()
    assert replied(*first, *disk) == (expected, 0)
    assert replied(*second, *disk) == (expected, 64)
    (blocks,) = (tmp_path / "kv").glob(f"{'*-rank1of2' if first else '[!-]' * 32}/0/*.blocks")
    (n_bytes,) = json.loads((blocks.parent / "format.json").read_text())["layouts"].values()
    os.truncate(blocks, 2 * (PAGE + padded(n_bytes)))
    assert replied(*second, *disk) == (expected, 32), "the other blocks lack a part, or all"


@pytest.mark.slow
@pytest.mark.parametrize("layout", [("--tp", "2"), ("--pp", "2")], ids=["tp2", "pp2"])
def test_a_prefix_comes_from_the_pool_for_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: tuple[str, str]
) -> None:
    mooncake_pool.require_mooncake()
    long_context = write_checkpoint(tmp_path, CONFIG | {"max_position_embeddings": 256})
    monkeypatch.setenv("EMBERLINE_KV_KEY", KV_KEY)
    pool = mooncake_pool.MooncakePool()
    try:
        flags, host = (*layout, "--kv-store", pool.settings.url), ("--kv-host-bytes", str(4 << 20))
        tier = pool.tier(bytes.fromhex(KV_KEY))
        short = (request(f"short {n}", [n + 2, *PROMPT[1:40]]) for n in range(100))
        long = [request(f"long {n}", [n + 2, *LONG[1:]], max_tokens=10) for n in range(4)]
        with (
            worker(long_context, tmp_path / "two", *flags, *host) as (process, ready),
            Client(ready["address"]) as client,
        ):
            wait_for_all_ranks(client, short, tier)
            before = tier.stats().blocks
            expected = [run(client, each) for each in long]
            mooncake_pool.until(lambda: tier.stats().blocks >= before + 2 * (len(LONG) // 16))  # of one at least
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        few = int(700 * ready["kv_bytes"] / ready["kv_tokens"])  # room for one prompt: each evicts the one before
        with (
            worker(long_context, tmp_path / "three", *flags, "--kv-bytes", str(few)) as (_, ready),
            Client(ready["address"]) as client,
        ):
            wait_for_all_ranks(client, short, tier)
            n_fetched, until_s = 0, time.monotonic() + 120
            while not n_fetched and time.monotonic() < until_s:  # a busy pool answers too late, once
                assert [run(client, each) for each in long] == expected
                n_fetched = max(client.deltas[each.id][0].usage.cached_by_tier.get("pool", 0) for each in long)
                client.deltas.clear()
            assert n_fetched >= 64
        with worker(long_context, tmp_path / "one") as (_, ready), Client(ready["address"]) as client:
            client.sock.settimeout(120)
            assert [run(client, each) for each in long] == expected
    finally:
        pool.close()


def wait_for_all_ranks(client: Client, prompts: Iterator[EngineRequest], tier: PoolTier) -> None:
    """Run prompts until the slices of both ranks of one are in the pool: each rank connects on its own."""
    client.sock.settimeout(120)
    for asked in prompts:
        before = tier.stats().blocks
        run(client, asked)
        with contextlib.suppress(AssertionError):
            mooncake_pool.until(lambda n=before + 2 * 2: tier.stats().blocks >= n, limit_s=4.0)
            return
    raise AssertionError("the ranks did not save their slices")
