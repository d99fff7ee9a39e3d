"""Forming a rank group: who may join, and what the refused are told."""

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from emberline.engine.addresses import listening
from emberline.engine.ranks.formation import Rendezvous, join_group
from emberline.engine.ranks.messages import End, RankFacts, RankFailed, Refused, to_follower, to_leader
from emberline.engine.ranks.plan_channel import PlanWriter
from emberline.engine.ranks.plan_ring import RingWriter, is_supported
from emberline.kv.transfer.connection import PeerConnectionLost
from emberline.protocol.errors import BadInput
from emberline.protocol.parallel_layout import Layout

FACTS = RankFacts(
    version="1.0",
    torch="2.13",
    fingerprint="abc",
    layout=Layout(tp=3),
    bounds=(0, 30),
    device="cpu",
    deterministic=False,
    max_running=64,
    token_budget=512,
)


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    with listening(str(tmp_path / "ranks")) as both:
        yield both


@pytest.mark.skipif(not is_supported(), reason="futexes are Linux's")
def test_followers_join_and_share_the_plans(listener: tuple[socket.socket, str]) -> None:
    ring = RingWriter(2)
    rendezvous = Rendezvous(listener[0], FACTS, "token", "file:/store", ring)
    with ThreadPoolExecutor(2) as pool:
        joining = [pool.submit(join_group, listener[1], rank, "token", FACTS) for rank in (2, 1)]
        connections = rendezvous.wait(60.0)
        joined = [each.result() for each in joining]
    assert [welcome.store for _, welcome, _ in joined] == ["file:/store"] * 2
    PlanWriter(ring).write(End())
    for _, _, reader in joined:
        assert reader is not None
        assert isinstance(reader.read(60.0), End)
    for connection in [*connections, *(connection for connection, _, _ in joined)]:
        connection.close()
    os.close(ring.descriptor)


@pytest.mark.parametrize(
    ("rank", "token", "changed", "says"),
    [
        (1, "other", {}, "wrong join token"),
        (3, "token", {}, "no rank 3"),
        (0, "token", {}, "no rank 0"),
        (1, "token", {"version": "1.1"}, "version 1.1 there, 1.0 here"),
        (1, "token", {"fingerprint": "abd"}, "fingerprint abd there, abc here"),
        (2, "token", {"device": "NVIDIA H100"}, "device NVIDIA H100 there, cpu here"),
        (2, "token", {"layout": Layout(tp=2)}, "layout tp2 there, tp3 here"),
        (1, "token", {"kv_disk_bytes": 5}, "kv_disk_bytes 5 there, 0 here"),
        (2, "token", {"kv_host_bytes": 7}, "kv_host_bytes 7 there, 0 here"),
    ],
)
def test_what_differs_is_refused_with_both_values(
    listener: tuple[socket.socket, str], rank: int, token: str, changed: dict[str, object], says: str
) -> None:
    facts = msgspec.structs.replace(FACTS, **changed)
    rendezvous = Rendezvous(listener[0], FACTS, "token", "file:/store", None)

    def leave() -> None:
        if joining.done():
            raise BadInput("enough")

    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(join_group, listener[1], rank, token, facts)
        with pytest.raises(BadInput, match="enough"):
            rendezvous.wait(60.0, leave)
    with pytest.raises(BadInput, match=says):
        joining.result()


def test_a_group_that_is_not_complete_names_who_is_missing(listener: tuple[socket.socket, str]) -> None:
    with pytest.raises(BadInput, match="rank 1, 2 of 3 did not join"):
        Rendezvous(listener[0], FACTS, "token", "file:/store", None).wait(0.0)


def test_no_rank_0_at_the_address(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be reached"):
        join_group(str(tmp_path / "nobody"), 1, "token", FACTS, timeout_s=0.0)


@pytest.fixture
def port() -> Iterator[tuple[socket.socket, str]]:
    with listening("tcp:127.0.0.1:0") as both:
        yield both


def test_ranks_on_several_machines_are_encrypted(port: tuple[socket.socket, str]) -> None:
    """Large messages pass both ways at once, from several threads."""
    facts = msgspec.structs.replace(FACTS, layout=Layout(tp=2))
    with ThreadPoolExecutor(3) as pool:
        joining = pool.submit(join_group, port[1], 1, "token", facts)
        (leader,) = Rendezvous(port[0], facts, "token", "tcp:127.0.0.1:1", None).wait(60.0)
        follower, welcome, reader = joining.result()
        assert (welcome.store, reader) == ("tcp:127.0.0.1:1", None)
        assert (follower.local, follower.local_host, follower.peer_host) == (False, "127.0.0.1", "")
        failed = RankFailed("x" * (3 << 20))
        sent = [pool.submit(follower.send, failed), pool.submit(leader.send, Refused("y" * (3 << 20)))]
        assert leader.receive(to_leader) == failed
        assert follower.receive(to_follower) == Refused("y" * (3 << 20))
        assert [each.result() for each in sent] == [None, None]
    follower.close()
    with pytest.raises(PeerConnectionLost):
        leader.receive(to_leader)
    leader.close()


def test_connections_that_say_nothing_do_not_delay_a_group(port: tuple[socket.socket, str]) -> None:
    """Each may take ten seconds; in turn, they would take longer than the group waits here."""
    facts = msgspec.structs.replace(FACTS, layout=Layout(tp=2))
    with ExitStack() as idle, ThreadPoolExecutor(1) as pool:
        for _ in range(12):
            idle.enter_context(socket.create_connection(port[0].getsockname()))
        joining = pool.submit(join_group, port[1], 1, "token", facts)
        (leader,) = Rendezvous(port[0], facts, "token", "tcp:127.0.0.1:1", None).wait(8.0)
        follower, _, _ = joining.result()
    follower.close()
    leader.close()


def test_whoever_does_not_know_the_token_learns_and_tells_nothing(port: tuple[socket.socket, str]) -> None:
    facts = msgspec.structs.replace(FACTS, layout=Layout(tp=2))
    with ThreadPoolExecutor(1) as pool, socket.create_connection(port[0].getsockname()) as silent:
        silent.sendall(b"not TLS" * 100)
        joining = pool.submit(join_group, port[1], 1, "other", facts)

        def leave() -> None:
            if joining.done():
                raise BadInput("enough")

        with pytest.raises(BadInput, match="enough"):
            Rendezvous(port[0], facts, "token", "tcp:127.0.0.1:1", None).wait(60.0, leave)
    with pytest.raises(BadInput, match="wrong join token"):
        joining.result()
