"""The planner with Ray: load starts and stops replicas on other machines, down to none and back. No request fails."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster_processes import ADMIN, wait_until
from tests.machines import standin_replicas
from tests.machines.client_load import ClientLoad
from tests.machines.deployment import Deployment
from tests.machines.machines import Machine
from tests.machines.postgres_machine import PostgresMachine
from tests.machines.streams import stream

pytest.importorskip("ray")

RAY_PATIENCE_S = 420.0  # for Ray, an engine that loads torch, and a forecast that looks back for minutes
_CLI = (sys.executable, "-m", "emberline.cli.main", "cluster")
# A prompt takes 0.06 s for each 64 tokens: 1,000 tokens a second. Decoding keeps to 0.06 s a token beside it.
_ENGINE = "--token-budget 64 --max-running 16 --script say=count,chunk_ms=60,ttft_ms=60,itl_ms=10"
N_CLIENTS = 12


class PlannedCluster:
    """The head and a core that plans on `one`, another core on `two`, and nodes of Ray on `two` and `three`, each with
    room for one replica. No model is in the cluster file: the planner starts what there is."""

    def __init__(self, deployment: Deployment, machines: dict[str, Machine]) -> None:
        self.deployment = deployment
        self._machines = machines
        self._ups: list[subprocess.Popen[str]] = []
        home = deployment.folder / "one"
        file = {
            "head": machines["one"].address,
            "cores": [f"http://{machines[name].address}:8686" for name in ("one", "two")],
            "nodes": [
                {"address": machines[name].address, "cpu_replicas": n}
                for name, n in (("one", 0), ("two", 1), ("three", 1))
            ],
        }
        self._file = home / "cluster.yaml"  # where `up` and `serve` look for it
        self._file.write_text(json.dumps(file))

    def start_ray(self) -> None:
        self._up("one", self.deployment.folder / "one")
        for name in ("two", "three"):
            address = self._machines[name].address
            credential = self.deployment.folder / f"{name}.node"
            self.command("credential", "--node", address, "--out", str(credential))
            home = self.deployment.folder / f"{name}-ray"
            home.mkdir()
            join = ("--join", self._machines["one"].address, "--credential", str(credential))
            self._up(name, home, "--file", str(self._file), *join)

    def _up(self, name: str, home: Path, *flags: str) -> None:
        log = self.deployment.folder / f"{name}.ray.log"
        up = self._machines[name].start(
            *("setsid", *_CLI, "up", "--foreground", *flags), env={"EMBERLINE_HOME": str(home)}, log=log
        )
        self._ups.append(up)
        assert up.stdout is not None
        assert up.stdout.readline(), f"Ray did not start on {name}: {log.read_text()[-2000:]}"

    def command(self, *words: str) -> str:
        """`emberline cluster …` on the machine of the core that plans."""
        env = {"EMBERLINE_HOME": str(self.deployment.folder / "one"), "EMBERLINE_AUTH_KEY": ADMIN}
        return self._machines["one"].run(*_CLI, *words, env=env)

    def plan(self) -> str:
        return self.command("plan", "--limit", "50")

    def connected(self) -> set[str]:
        return {name for name, member in self._members().items() if member["connected"]}

    def computed(self, name: str) -> int:
        """Output tokens of a worker, of all cores."""
        engines = self.deployment.cores["one"].call("GET", "/api/ps")["engines"]
        return sum(engine["load"].get("output_tokens", 0) for engine in engines if engine["name"] == name)

    def placed(self) -> dict[str, Any]:
        """What Ray runs, by name."""
        found = json.loads(self.command("status", "--json"))
        return {each["name"]: each for each in found["ray"]["replicas"]}

    def _members(self) -> dict[str, Any]:
        return self.deployment.cores["one"].members()

    def close(self) -> None:
        for up in reversed(self._ups):
            up.terminate()
        for up in self._ups:
            up.wait(120)
            assert up.stdout is not None
            up.stdout.close()


@pytest.fixture
def planned(
    machines: dict[str, Machine], database: PostgresMachine, smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PlannedCluster]:
    deployment = Deployment(tmp_path_factory.mktemp("planned"), database.new_database(), smollm2)
    deployment.init(machines["one"])
    cluster = PlannedCluster(deployment, machines)
    try:
        cluster.start_ray()
        deployment.command = (sys.executable, "-m", "tests.machines.standin_replicas")
        deployment.start_cores(machines["one"], machines["two"], env={standin_replicas.ARGUMENTS: _ENGINE})
        yield cluster
    finally:
        deployment.close()
        cluster.close()


async def test_load_starts_and_stops_replicas(planned: PlannedCluster, capsys: pytest.CaptureFixture[str]) -> None:
    deployment = planned.deployment
    two = deployment.cores["two"]
    bounds = ("--min", "0", "--max", "2", "--grow-after-s", "2", "--shrink-after-s", "10", "--settle-s", "5")
    planned.command("bounds", deployment.model, *bounds, "--idle-s", "15", "--start-s", "20")
    wait_until(lambda: two.call("GET", "/api/cluster/plan")["models"], "the other core does not hear of the bounds")
    assert planned.connected() == set()

    # None runs: a request at the core that does not plan is held until the first one does.
    began_s = time.monotonic()
    held = await stream(two, deployment.model, 8)
    took_s = time.monotonic() - began_s
    assert held.problem == "", planned.plan()
    first = planned.connected()
    assert len(first) == 1
    assert first == set(planned.placed())
    with capsys.disabled():
        print(f"\na request was held for {took_s:.1f} s, until the planner had started a replica through Ray")

    # More than it can compute: a second one is started on the other machine, and used.
    load = ClientLoad(deployment, RAY_PATIENCE_S)
    grown_s = await load.run(
        N_CLIENTS, lambda: any(planned.computed(name) for name in planned.connected() - first), "no second one"
    )
    both = planned.placed()
    assert len({each["addresses"][0] for each in both.values()}) == 2, both
    with capsys.disabled():
        print(f"load of {N_CLIENTS} clients: the second replica answers after {grown_s:.1f} s")

    # Less than one can compute: one of them is drained and ended, while requests go on.
    shrunk_s = await load.run(
        1,
        lambda: len(planned.connected()) == 1 and len(planned.placed()) == 1,
        "none was stopped",
        n_words=40,
        pause_s=2.0,
    )
    assert load.problems == []
    with capsys.disabled():
        print(f"load of one client: a replica was drained and has ended after {shrunk_s:.1f} s")

    # No requests: none is left. The next request is held again.
    await load.run(0, lambda: not planned.connected() and not planned.placed(), "not scaled to zero")
    held = await stream(two, deployment.model, 8)
    assert held.problem == "", planned.plan()

    told = planned.plan()
    with capsys.disabled():
        print(f"{len(load.answers)} requests, 0 failed\n{told}")
    assert "no replica, and requests are expected or wait" in told
    assert "min_replicas is 0" in told
    assert "failed" not in told
