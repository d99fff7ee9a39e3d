"""Replicas that are started and stopped at run time, with the stand-in engine."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from emberline.config import EngineConfig
from emberline.protocol.credential import VARIABLE, Credential
from emberline.protocol.errors import Conflict, Unavailable
from emberline.supervisor.cluster.launcher import LaunchedReplica, LocalLauncher, ReplicaOrder
from emberline.supervisor.engine_workers import EngineWorkers, JoinSettings, WorkerPlan
from emberline.supervisor.machine import Hardware
from emberline.supervisor.process import ProcessSpec
from tests.standin import standin_worker

NOWHERE = "http://127.0.0.1:9"  # the discard port: a worker that joins there keeps trying


def join(name: str) -> JoinSettings:
    return JoinSettings(cores=(NOWHERE,), credential=Credential(name=name, cluster="c", key=bytes(32)).encode())


def order(name: str, **more: object) -> ReplicaOrder:
    return ReplicaOrder(name=name, model="m", path=Path("/m.gguf"), **more)  # type: ignore[arg-type]


@pytest.fixture
async def workers() -> AsyncIterator[EngineWorkers]:
    found = EngineWorkers([], EngineConfig(), standin_worker(), hardware=Hardware((), 8, 16 << 30))
    yield found
    await found.stop(5.0)


async def until(launcher: LocalLauncher, condition: Callable[[dict[str, LaunchedReplica]], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition({each.name: each for each in await launcher.replicas()}):
            await asyncio.sleep(0.02)


async def test_a_replica_is_started_and_stopped(workers: EngineWorkers) -> None:
    launcher = LocalLauncher(workers, EngineConfig(), join, n_replicas=2)
    assert [(offer.gpu, offer.n_free) for offer in await launcher.offers()] == [("cpu", 2)]
    await launcher.start(order("one"))
    with pytest.raises(Conflict, match="one was started already"):
        await launcher.start(order("one"))
    await until(launcher, lambda found: found["one"].state == "running")
    assert (await launcher.offers())[0].n_free == 1
    (process,) = workers.processes
    assert process.pid is not None
    await launcher.stop("one")
    assert not await launcher.replicas()
    assert not workers.processes
    assert process.pid is None
    await launcher.stop("one")  # no error
    assert (await launcher.offers())[0].n_free == 2


async def test_a_worker_that_joins_gets_its_credential_and_no_token(workers: EngineWorkers) -> None:
    made: list[ProcessSpec] = []

    def spec(plan: WorkerPlan, config: EngineConfig, socket: Path, token: str) -> ProcessSpec:
        made.append(standin_worker()(plan, config, socket, "token"))
        return made[-1]

    workers._make_spec = spec
    launcher = LocalLauncher(workers, EngineConfig(), join, n_replicas=1)
    await launcher.start(order("gpu7", role="prefill", region="eu", account="acme"))
    (process,) = workers.processes
    arguments = process.spec.arguments
    assert arguments[arguments.index("--socket") + 1] == "tcp:127.0.0.1:0"
    assert arguments[-6:] == ("--join", NOWHERE, "--region", "eu", "--account", "acme")
    assert arguments[arguments.index("--role") + 1] == "prefill"
    assert set(process.spec.env) == {VARIABLE}
    assert made[0].env.keys() == {"EMBERLINE_WORKER_TOKEN"}
    await launcher.stop("gpu7")


async def test_no_room_and_a_gpu_that_is_not_there_are_refused(workers: EngineWorkers) -> None:
    launcher = LocalLauncher(workers, EngineConfig(), join, n_replicas=1)
    with pytest.raises(Unavailable, match="needs a GPU of kind H200, and this machine has cpu"):
        await launcher.start(order("one", gpu="H200"))
    await launcher.start(order("one"))
    with pytest.raises(Unavailable, match="no room for two: 1 replicas run"):
        await launcher.start(order("two"))


async def test_a_replica_that_cannot_start_is_lost_and_says_why(workers: EngineWorkers) -> None:
    workers._make_spec = standin_worker("--max-running", "0")
    launcher = LocalLauncher(workers, EngineConfig(), join, n_replicas=1)
    await launcher.start(order("one"))
    await until(launcher, lambda found: found["one"].state == "lost")
    (lost,) = await launcher.replicas()
    assert "exited with status 2" in lost.problem
    assert (await launcher.offers())[0].n_free == 1
    workers._make_spec = standin_worker()
    await launcher.start(order("one"))
    await until(launcher, lambda found: found["one"].state == "running")


async def test_a_worker_that_has_left_is_not_restarted_and_one_that_died_is(workers: EngineWorkers) -> None:
    launcher = LocalLauncher(workers, EngineConfig(), join, n_replicas=1)
    await launcher.start(order("one"))
    await until(launcher, lambda found: found["one"].state == "running")
    (process,) = workers.processes
    first = process.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    async with asyncio.timeout(60):
        while process.pid in (first, None) or process.ready_line.get("pid") != process.pid:
            await asyncio.sleep(0.02)
    os.kill(process.pid, signal.SIGTERM)  # as after `emberline cluster leave`, it ends with status 0
    await until(launcher, lambda found: found["one"].state == "lost")
    assert process.n_restarts == 1
    assert (await launcher.replicas())[0].problem == "it has left the cluster"


def test_one_replica_for_each_set_of_gpus() -> None:
    async def offers() -> list[tuple[str, int, float]]:
        hardware = Hardware(("0", "1", "2", "3", "4"), 8, 16 << 30)
        workers = EngineWorkers([], EngineConfig(), standin_worker(), hardware=hardware)
        launcher = LocalLauncher(workers, EngineConfig(tp=2), join, gpu="H200")
        found = [(offer.gpu, offer.n_free, offer.cost) for offer in await launcher.offers()]
        await workers.stop(0.0)
        return found

    assert asyncio.run(offers()) == [("H200", 2, 2.0)]
