"""Ray places real workers on machines; its nodes and its head are killed while requests run."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster_processes import wait_until
from tests.machines.deployment import Deployment
from tests.machines.machines import Machine
from tests.machines.streams import stream

pytest.importorskip("ray")

HEAD_ABSENT_S = 60.0
PATIENCE_S = 300.0  # for Ray, and for an engine that loads torch
_CLI = (sys.executable, "-m", "emberline.cli.main", "cluster")


class RayMachines:
    """`emberline cluster up` on each: the head beside PostgreSQL, nodes on `two` and `three`."""

    def __init__(self, deployment: Deployment, machines: dict[str, Machine], weights: Path) -> None:
        self._deployment = deployment
        self._machines = machines
        self._ups: dict[str, subprocess.Popen[str]] = {}
        self._file = deployment.folder / "cluster.yaml"
        self._file.write_text(
            json.dumps(  # which is YAML, too
                {
                    "head": machines["db"].address,
                    "cores": [core.url for core in deployment.cores.values()],
                    "nodes": [
                        {"address": machines[name].address, "cpu_replicas": n}
                        for name, n in (("db", 0), ("two", 2), ("three", 2))
                    ],
                    "models": [{"name": deployment.model, "path": str(weights), "replicas": 2, "gpu": "cpu"}],
                }
            )
        )

    def start_head(self) -> None:
        self._up("db", "--file", str(self._file))

    def start_node(self, name: str) -> None:
        address = self._machines[name].address
        credential = self._deployment.folder / f"{name}.node"
        if not credential.exists():
            first = self._machines["one"]  # where the root secret is
            env = {"EMBERLINE_HOME": str(self._deployment.folder / "one")}
            first.run(*_CLI, "credential", "--node", address, "--out", credential, env=env)
        join = ("--join", self._machines["db"].address, "--credential", str(credential))
        self._up(name, "--file", str(self._file), *join)

    def kill(self, name: str) -> None:
        """kill -9 of all that `emberline cluster up` has started there, and of itself."""
        up = self._ups.pop(name)
        record = json.loads((self._home(name) / "ray" / "processes.json").read_text())
        leaders = {up.pid, *(session[0] for session in record["sessions"].values())}
        os.kill(up.pid, signal.SIGKILL)
        while pids := [pid for pid in self._machines[name].pids() if _session(pid) in leaders]:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        up.wait()

    def close(self) -> None:
        for name in sorted(self._ups, reverse=True):
            self._ups[name].send_signal(signal.SIGTERM)
        for up in self._ups.values():
            up.wait(120)

    def log(self, name: str) -> str:
        return (self._deployment.folder / f"{name}.ray.log").read_text()

    def _up(self, name: str, *flags: str) -> None:
        home = self._home(name)
        home.mkdir(exist_ok=True)
        if name == "db" and not (home / "secret").exists():
            (home / "secret").write_text((self._deployment.folder / "one" / "secret").read_text())
            (home / "secret").chmod(0o600)
        log = self._deployment.folder / f"{name}.ray.log"
        env = {"EMBERLINE_HOME": str(home)}
        machine = self._machines[name]
        self._ups[name] = machine.start("setsid", *_CLI, "up", "--foreground", *flags, env=env, log=log)

    def _home(self, name: str) -> Path:
        return self._deployment.folder / f"{name}-ray"


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


@pytest.fixture
def ray(deployment: Deployment, machines: dict[str, Machine], smollm2: Path) -> Iterator[RayMachines]:
    found = RayMachines(deployment, machines, smollm2)
    try:
        yield found
    finally:
        found.close()


def connected(cluster: Deployment) -> dict[str, int]:
    """The epochs of the members that all cores are connected to."""
    seen = [core.members() for core in cluster.cores.values()]
    return {name: m["epoch"] for name, m in seen[0].items() if all(s.get(name, {}).get("connected") for s in seen)}


def addresses(cluster: Deployment) -> dict[str, str]:
    """Of the machines of connected members."""
    core = cluster.cores["one"]
    members = {name: member for name, member in core.members().items() if member["connected"]}
    return {name: member["address"].split(":")[1] for name, member in members.items()}


async def test_nodes_and_the_head_are_killed(
    cluster: Deployment, machines: dict[str, Machine], ray: RayMachines, capsys: pytest.CaptureFixture[str]
) -> None:
    ray.start_head()
    wait_until(lambda: "6379" in machines["db"].run("ss", "-ltn"), "no head", PATIENCE_S)
    for name in ("two", "three"):
        ray.start_node(name)
    wait_until(lambda: len(connected(cluster)) == 2, f"no replicas: {ray.log('db')[-2000:]}", PATIENCE_S)
    placed = connected(cluster)
    cores = list(cluster.cores.values())

    # The head is away for a minute: requests go on, workers stay the same.
    ray.kill("db")
    gone_s = time.monotonic()
    n_answered = 0
    while time.monotonic() - gone_s < HEAD_ABSENT_S:
        replies = await asyncio.gather(*(stream(core, cluster.model, 16) for core in cores))
        assert [reply.problem for reply in replies] == ["", ""]
        n_answered += len(replies)
    assert connected(cluster) == placed
    ray.start_head()
    wait_until(lambda: "6379" in machines["db"].run("ss", "-ltn"), "the head did not come back", PATIENCE_S)
    with capsys.disabled():
        print(f"\nRay's head away for {time.monotonic() - gone_s:.0f} s: {n_answered} requests, 0 failed")

    # A node with all its workers is killed: what it held is placed on the other one.
    held = {name: address for name, address in addresses(cluster).items() if name in placed}
    victim = next(name for name in ("two", "three") if machines[name].address in held.values())
    lost_s = time.monotonic()
    ray.kill(victim)
    while len(found := connected(cluster)) < 2 or machines[victim].address in addresses(cluster).values():
        assert time.monotonic() - lost_s < PATIENCE_S, (found, ray.log("db")[-2000:])
        await asyncio.sleep(0.5)
    with capsys.disabled():
        print(f"replicas of a killed node serve elsewhere after {time.monotonic() - lost_s:.1f} s")
    replies = await asyncio.gather(*(stream(core, cluster.model, 16) for core in cores))
    assert [reply.problem for reply in replies] == ["", ""]
