"""Disaggregation between worker processes of several ranks: the tokens of one rank, whatever the two layouts."""

import os
import signal
from pathlib import Path

import pytest

from emberline.protocol.frames import transfer_ranks
from tests.engine.client import Client
from tests.engine.ranks.test_rank_worker import MIXTRAL, PROMPT, followers, request, run, worker, write_checkpoint
from tests.engine.transfer.test_prefill_decode import halves

REQUESTS = [
    request("greedy", PROMPT, max_tokens=10),
    request("sampled", PROMPT[::-1][:50], temperature=0.9, seed=2, max_tokens=10),
    request("short", PROMPT[:9]),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("mixtral"), MIXTRAL)


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    folder = tmp_path_factory.mktemp("one")
    with worker(model, folder / "socket") as (_, ready), Client(ready["address"]) as client:
        client.sock.settimeout(120)
        return run(client, *REQUESTS)


def transferred(prefill: Client, decode: Client, address: str) -> list[list[int]]:
    ranks = transfer_ranks(prefill.greeting.info, decode.greeting.info)
    for each in REQUESTS:
        first, second = halves(each, address, f"t-{each.id}", ranks=ranks)
        decode.submit(second)
        prefill.submit(first)
    decode.finish(*(each.id for each in REQUESTS))
    prefill.finish(*(f"{each.id}-p" for each in REQUESTS))
    for each in REQUESTS:
        assert decode.deltas[each.id][-1].error is None
    return [decode.tokens(each.id) for each in REQUESTS]


def check_idle(client: Client) -> None:
    run(client, request("last", [5]))
    load = client.steps[-1].load
    assert (load.kv_used_blocks, load.quarantined, load.awaiting, load.pushing) == (0, 0, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second", "transport"),
    [
        (("--tp", "2"), (), "shm"),
        ((), ("--tp", "2"), "tcp"),
        (("--tp", "2"), ("--tp", "2"), "shm"),
        (("--tp", "2"), ("--pp", "2"), "tcp"),
        (("--pp", "2"), ("--pp", "2"), "shm"),
    ],
)
def test_prefill_and_decode_have_layouts_of_their_own(
    model: Path,
    expected: list[list[int]],
    tmp_path: Path,
    first: tuple[str, ...],
    second: tuple[str, ...],
    transport: str,
) -> None:
    to = str(tmp_path / "d") if transport == "shm" else "tcp:127.0.0.1:0"
    with (
        worker(model, tmp_path / "p", "--role", "prefill", *first) as (_, p),
        worker(model, to, "--role", "decode", *second) as (_, d),
    ):
        assert p.get("ready"), p
        assert d.get("ready"), d
        with Client(p["address"]) as prefill, Client(d["address"]) as decode:
            prefill.sock.settimeout(120)
            decode.sock.settimeout(120)
            assert decode.greeting.info.transfers[0] == transport
            assert transferred(prefill, decode, d["address"]) == expected
            assert decode.deltas["greedy"][0].usage.cached_by_tier == {"device": 0, "pushed": 64}
            check_idle(prefill)
            check_idle(decode)


@pytest.mark.slow
@pytest.mark.parametrize("second", [("--tp", "2"), ("--pp", "2"), ()])
def test_ranks_send_by_mooncake(
    model: Path, expected: list[list[int]], tmp_path: Path, second: tuple[str, ...]
) -> None:
    """Every rank has an engine of its own; between two layouts it writes what the other rank needs of each block."""
    pytest.importorskip("mooncake.engine", exc_type=ImportError)
    both = ("--mooncake", "tcp")
    with (
        worker(model, tmp_path / "p", "--role", "prefill", "--tp", "2", *both) as (_, p),
        worker(model, "tcp:127.0.0.1:0", "--role", "decode", *second, *both) as (_, d),
    ):
        assert p.get("ready"), p
        assert d.get("ready"), d
        with Client(p["address"]) as prefill, Client(d["address"]) as decode:
            prefill.sock.settimeout(120)
            decode.sock.settimeout(120)
            assert decode.greeting.info.transfers == ("mooncake", "tcp")
            assert transferred(prefill, decode, d["address"]) == expected
            assert decode.deltas["greedy"][0].usage.cached_by_tier == {"device": 0, "pushed": 64}
            check_idle(prefill)
            check_idle(decode)


@pytest.mark.slow
def test_a_rank_that_dies_during_a_transfer_ends_it_and_the_other_worker_goes_on(
    model: Path,
    expected: list[list[int]],
    tmp_path: Path,
) -> None:
    with (
        worker(model, tmp_path / "p", "--role", "prefill", "--tp", "2") as (process, p),
        worker(model, tmp_path / "d", "--role", "decode", "--tp", "2") as (_, d),
        Client(p["address"]) as prefill,
        Client(d["address"]) as decode,
    ):
        prefill.sock.settimeout(120)
        decode.sock.settimeout(120)
        assert transferred(prefill, decode, d["address"]) == expected
        (follower,) = followers(process)
        os.kill(follower, signal.SIGSTOP)  # so that its part stays open
        ranks = transfer_ranks(prefill.greeting.info, decode.greeting.info)
        first, second = halves(request("open", PROMPT[::-1]), d["address"], "open", ranks=ranks)
        decode.submit(second)
        prefill.submit(first)
        os.kill(follower, signal.SIGKILL)
        assert process.wait(60) == 1
        end = decode.finish("open")
        assert end.error is not None
        assert end.error.kind == "unavailable"
        check_idle(decode)
