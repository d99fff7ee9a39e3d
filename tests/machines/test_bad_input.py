"""Workers and cores that must not be let in, machines that misbehave, and clocks that differ."""

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import pytest

from emberline.protocol.credential import Credential
from tests.cluster_processes import ApiError, CoreProcess, wait_until
from tests.machines.deployment import CLI, Deployment, is_connected
from tests.machines.machines import Machine
from tests.machines.postgres_machine import PostgresMachine

OTHER_VERSION = """
from emberline.engine.worker import announcer
from standins import standin_engine
announcer.VERSION = 99
raise SystemExit(standin_engine.main())
"""
HOUR_S = 3600


@pytest.fixture
def other_cluster(machines: dict[str, Machine], database: PostgresMachine, smollm2: Path, tmp_path: Path) -> Deployment:
    """Made on another machine, without a core yet."""
    other = Deployment(tmp_path, database.new_database(), smollm2)
    other.init(machines["three"])
    return other


def test_a_worker_of_another_cluster_version_or_model_is_refused(
    cluster: Deployment, machines: dict[str, Machine], other_cluster: Deployment
) -> None:
    three = machines["three"]
    cluster.start_worker("good", three)
    cluster.wait_connected("good")
    refused = {
        "foreign": (
            cluster.start_worker("foreign", three, credential=other_cluster.credential("foreign")),
            "make a credential on that core's machine",
        ),
        "newer": (
            cluster.start_worker("newer", three, engine=(sys.executable, "-c", OTHER_VERSION)),
            "install the same release of Emberline on both",
        ),
        "unknown": (cluster.start_worker("unknown", three, "--name", "no/such-model"), "emberline pull no/such-model"),
        "weights": (
            cluster.start_worker("weights", three, "--fingerprint", "other"),
            "pull the same revision on both machines",
        ),
        "renamed": (
            cluster.start_worker("renamed", three, "--id", "another"),
            "drop --id, or make a credential with `emberline cluster credential another`",
        ),
    }
    for name, (process, message) in refused.items():
        assert process.wait(60) == 1
        assert message in cluster.log_of(name)
    for core in cluster.cores.values():
        assert not set(refused) & set(core.members())
        assert core.chat(cluster.model)["choices"]


def test_a_credential_that_others_may_read_or_that_was_changed_is_refused(
    cluster: Deployment, machines: dict[str, Machine]
) -> None:
    path = cluster.credential("open")
    path.chmod(0o644)
    process = cluster.start_worker("open", machines["three"])
    assert process.wait(60) == 1
    assert f"chmod 600 {path}" in cluster.log_of("open")
    victim = Credential.parse(cluster.credential("victim").read_text())
    swapped = cluster.folder / "swapped.credential"  # the key and certificate of one name, used for another
    swapped.touch(0o600)
    swapped.write_text(msgspec.structs.replace(victim, name="forged").encode())
    process = cluster.start_worker("forged", machines["three"], credential=swapped)
    assert process.wait(60) == 1
    assert "the credential of forged is not of this cluster" in cluster.log_of("forged")
    for core in cluster.cores.values():
        assert not {"open", "forged", "victim"} & set(core.members())


def test_two_clusters_cannot_share_a_database(
    cluster: Deployment, machines: dict[str, Machine], smollm2: Path, tmp_path: Path
) -> None:
    other = Deployment(tmp_path, cluster.store_url, smollm2)
    other.init(machines["three"])
    process = other.start_serve(machines["three"])
    assert process.wait(120) == 1
    assert process.stdout is not None
    process.stdout.close()
    assert "each cluster a database of its own" in other.log_of("three")
    cluster.start_worker("unharmed", machines["three"])
    cluster.wait_connected("unharmed")


def test_a_ray_that_answers_without_its_token_is_refused(
    machines: dict[str, Machine], other_cluster: Deployment, tmp_path: Path
) -> None:
    """A real one, started as people do: neither is it joined, nor is anything started beside it."""
    pytest.importorskip("ray")
    two, three = machines["two"], machines["three"]
    up, log = ("cluster", "up", "--foreground"), tmp_path / "up.log"
    credential = tmp_path / "two.node"
    home = {"EMBERLINE_HOME": str(other_cluster.folder / "three")}
    three.run(*CLI, "cluster", "credential", "--node", two.address, "--out", credential, env=home)
    ray = (sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats")
    where = ("--port", "6379", "--node-ip-address", three.address, "--include-dashboard", "false")
    sizes = ("--object-store-memory", "80000000", "--num-cpus", "1")
    short = tempfile.TemporaryDirectory(prefix="r", dir="/tmp")  # its sockets have long names
    env = {"RAY_TMPDIR": short.name, "RAY_AUTH_MODE": "disabled"}
    ray_log = tmp_path / "ray.log"
    open_ray = three.start(*ray, *where, *sizes, env=env, log=ray_log)

    def listens() -> bool:
        assert open_ray.poll() is None, ray_log.read_text()[-2000:]
        return ":6379" in three.run("ss", "-ltn")

    try:
        wait_until(listens, "Ray did not start", 180)
        joins = two.start(
            *(*CLI, *up, "--join", three.address, "--credential", credential),
            env={"EMBERLINE_HOME": str(tmp_path / "two")},
            log=log,
        )
        begins = three.start(*CLI, *up, "--address", three.address, env=home, log=log)
        for process in (joins, begins):
            assert process.wait(120) == 1, log.read_text()
            assert process.stdout is not None
            process.stdout.close()
        refused = f"the Ray at {three.address}:6379 answers without a token"
        assert [line for line in log.read_text().splitlines() if refused in line and "RAY_AUTH_MODE=token" in line][1:]
        assert "ray" not in two.run("ss", "-ltnp")
    finally:
        three.kill()
        open_ray.wait()
        assert open_ray.stdout is not None
        open_ray.stdout.close()
        short.cleanup()


def test_a_worker_that_flaps_is_held_back(cluster: Deployment, machines: dict[str, Machine]) -> None:
    steady = cluster.start_worker("steady", machines["two"])
    cluster.wait_connected("steady")
    first = cluster.cores["one"]
    epochs = [0]

    def has_joined() -> bool:
        return first.members().get("flaps", {}).get("epoch", 0) > epochs[-1]

    for _ in range(5):  # each run dies as soon as it has joined
        flapping = cluster.start_worker("flaps", machines["three"])
        wait_until(has_joined, "it did not join")
        epochs.append(first.members()["flaps"]["epoch"])
        flapping.kill()
        flapping.wait()
        assert first.chat(cluster.model)["choices"]
    held = cluster.start_worker("flaps", machines["three"])
    wait_until(has_joined, "it did not join")
    assert first.members()["flaps"]["hold_s"] > 0 or "it is used in" in cluster.log_of("flaps")
    cluster.wait_connected("flaps")  # in the end
    assert held.poll() is None
    assert steady.poll() is None


def test_links_that_flap_lose_nothing(cluster: Deployment, machines: dict[str, Machine]) -> None:
    """The machine is away and back several times within the silence after which it counts as cut off, and beyond."""
    cluster.start_worker("flap-link", machines["three"])
    cluster.start_worker("flap-other", machines["two"])
    cluster.wait_connected("flap-link", "flap-other")
    epoch = cluster.cores["one"].members()["flap-link"]["epoch"]
    for away_s in (0.5, 1.0, 7.0, 0.5):
        machines["three"].cut()
        until_s = time.monotonic() + away_s
        while time.monotonic() < until_s:
            assert cluster.cores["two"].chat(cluster.model)["choices"]
        machines["three"].heal()
    cluster.wait_connected("flap-link")
    assert cluster.cores["one"].members()["flap-link"]["epoch"] == epoch  # the same run


@pytest.fixture(scope="module")
def shifted_clock(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A library to preload."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("a wall clock of a process is changed by a library, which needs a C compiler")
    library = tmp_path_factory.mktemp("clock") / "clock_offset.so"
    source = Path(__file__).with_name("clock_offset.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return str(library)


def test_clocks_an_hour_apart(
    machines: dict[str, Machine],
    database: PostgresMachine,
    smollm2: Path,
    shifted_clock: str,
    tmp_path: Path,
) -> None:
    """A core an hour ahead, a core an hour behind, and a worker with each of these clocks."""
    ahead, behind = ({"LD_PRELOAD": shifted_clock, "EMBERLINE_TEST_CLOCK_S": str(s)} for s in (HOUR_S, -HOUR_S))
    cluster = Deployment(tmp_path, database.new_database(), smollm2)
    cluster.init(machines["three"])
    # The cores of other tests are on `one` and `two`.
    (fast,) = cluster.start_cores(machines["db"], env=ahead)
    (slow,) = cluster.start_cores(machines["three"], env=behind)
    try:
        cluster.start_worker("w-ahead", machines["two"], env=ahead)
        cluster.start_worker("w-behind", machines["three"], env=behind)
        cluster.wait_connected("w-ahead", "w-behind")
        assert all(member["state"] == "joined" and member["is_tls"] for member in fast.members().values())
        limited = fast.call("POST", "/api/keys", {"account": "acme", "requests_per_minute": 4})["key"]
        wait_until(lambda: "smollm2" in str(slow.call("GET", "/v1/models", key=limited)), "the key is not known")
        body = {
            "model": cluster.model,
            "input": "hello " * 20,
            "background": True,
            "max_output_tokens": 16,
        }  # less than it would say
        job = fast.call("POST", "/v1/responses", body)
        path = f"/v1/responses/{job['id']}"
        wait_until(lambda: slow.call("GET", path)["status"] == "incomplete", "the job does not end")
        found = [_status(core, cluster.model, limited) for core in (fast, slow) * 4]
        assert found.count(200) <= 4
        assert set(found) == {200, 429}
        for core in (fast, slow):
            assert is_connected(core, "w-ahead", "w-behind")
            assert core.chat(cluster.model)["choices"]
    finally:
        cluster.close()


def _status(core: CoreProcess, model: str, key: str) -> int:
    try:
        core.chat(model, key=key)
    except ApiError as error:
        return error.status
    return 200
