"""A real Ray on a loopback address: replicas are placed, restarted in place, found after the head was killed, ended."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from emberline.protocol.credential import Credential
from emberline.protocol.errors import Conflict, Unavailable
from emberline.protocol.parallel_layout import Layout
from emberline.supervisor.cluster.certificate_authority import CertificateAuthority
from emberline.supervisor.cluster.launcher import ReplicaOrder
from emberline.supervisor.cluster.ray_launcher import PlacedReplica, RayLauncher
from emberline.supervisor.cluster.ray_node import RayNodes, end_all, session_processes
from emberline.supervisor.cluster.ray_probe import check_guarded
from emberline.supervisor.cluster.ray_settings import NodeCredential, NodeSettings, tls_context, write_credential
from tests.lazy_modules import skip_without

skip_without("ray")
pytestmark = pytest.mark.slow

ADDRESS = "127.0.0.2"  # Ray replaces 127.0.0.1 by another address of the machine
NOWHERE = "http://127.0.0.1:9"  # the discard port: a worker that joins there keeps trying
STANDIN = "standins.standin_engine"
KEY = bytes(range(32))
PATIENCE_S = 120.0


def free_port() -> int:
    with socket.create_server((ADDRESS, 0)) as sock:
        return int(sock.getsockname()[1])


def credential(name: str) -> str:
    return Credential(name=name, cluster="c", key=KEY).encode()


def order(name: str, **more: object) -> ReplicaOrder:
    return ReplicaOrder(name=name, model="m", path=Path("/m.gguf"), **more)  # type: ignore[arg-type]


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[RayNodes]:
    folder = tmp_path / "ray"
    authority = CertificateAuthority(bytes(32), "c")
    write_credential(
        NodeCredential(address=ADDRESS, cluster="c", token="t" * 64, pem=authority.node_pem(ADDRESS)), folder
    )
    common = dict(address=ADDRESS, head=ADDRESS, port=free_port(), folder=folder, health_failures=60)
    settings = (
        NodeSettings(**common, is_head=True),  # type: ignore[arg-type]
        NodeSettings(**common, cpu_replicas=2, region="eu"),  # type: ignore[arg-type]
    )
    found = RayNodes(settings, folder)
    try:
        await found.start()
        yield found
    finally:
        sessions = [node.session for node in found.nodes if node.session is not None]
        await found.stop()
        end_all(folder)
        assert not any(session_processes(leader) for leader in sessions)


async def until(
    launcher: RayLauncher, condition: Callable[[dict[str, PlacedReplica]], bool]
) -> dict[str, PlacedReplica]:
    end_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            found = {each.name: each for each in await launcher.placed()}
            if condition(found):
                return found
        except Unavailable:  # while the head is away
            found = {}
        assert time.monotonic() < end_s, found
        await asyncio.sleep(0.2)


async def soon(condition: Callable[[], Awaitable[bool]]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not await condition():
        assert time.monotonic() < end_s
        await asyncio.sleep(0.2)


def workers() -> list[int]:
    """The stand-in workers of this test, by their model."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if (
            STANDIN.encode() in words
            and b"m" in words
            and any(word.startswith(b"tcp:" + ADDRESS.encode()) for word in words)
        ):
            found.append(int(path.parent.name))
    return found


async def test_replicas_on_a_real_ray(nodes: RayNodes, tmp_path: Path) -> None:
    head, node = nodes.nodes
    check_guarded(ADDRESS, head.settings.port, tls_context(head.settings.folder))
    launcher = RayLauncher(node.settings, (NOWHERE,), credential, module=STANDIN)
    try:
        assert [(offer.gpu, offer.n_free) for offer in await launcher.offers()] == [("cpu", 2)]
        await launcher.start(order("one", region="eu"))
        with pytest.raises(Conflict, match="one was started already"):
            await launcher.start(order("one"))
        with pytest.raises(Unavailable, match="region us"):
            await launcher.start(order("far", region="us"))
        with pytest.raises(Unavailable, match="3 places on CPUs are needed"):
            await launcher.start(order("large", layout=Layout(tp=3)))
        found = await until(launcher, lambda found: found["one"].state == "running")
        assert found["one"].addresses == (ADDRESS,)
        assert [(each.name, each.state) for each in await launcher.replicas()] == [("one", "running")]

        async def one_free() -> bool:
            return (await launcher.offers())[0].n_free == 1

        await soon(one_free)

        # It is restarted in place.
        (pid,) = workers()
        os.kill(pid, signal.SIGKILL)
        await until(launcher, lambda found: found["one"].n_restarts == 1)

        # The head is killed: the worker runs on, and is found again.
        async def one_worker() -> bool:
            return len(workers()) == 1

        await soon(one_worker)
        (pid,) = workers()
        assert head.session is not None
        for each in session_processes(head.session):
            os.kill(each, signal.SIGKILL)
        found = await until(launcher, lambda found: head.n_restarts == 1 and "one" in found)
        await until(launcher, lambda found: found["one"].state == "running")
        assert workers() == [pid]

        # Another launcher finds it, too, and ends it.
        other = RayLauncher(node.settings, (NOWHERE,), credential, module=STANDIN)
        try:
            assert [each.name for each in await other.replicas()] == ["one"]
            await other.stop("one")
            assert not await other.replicas()
            assert not workers()
            await other.stop("one")  # no error
        finally:
            await other.close()

        # Nothing that is secret was written anywhere.
        secret = credential("one").splitlines()[1].encode()
        for folder in (tmp_path, head.settings.temp_folder, node.settings.temp_folder):
            for path in folder.rglob("*"):
                if path.is_file():
                    assert secret not in path.read_bytes(), path
    finally:
        await launcher.close()
