"""Two cores and stand-in workers as processes, over TLS, on one PostgreSQL database."""

import asyncio
import json
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from emberline import __version__
from emberline.engine.worker.announcer import Announcer
from emberline.protocol.credential import Credential
from emberline.protocol.frames import OLDEST_VERSION, VERSION
from emberline.protocol.member import Announcement
from tests.cli.console import emberline
from tests.cluster_processes import (
    ADMIN,
    PATIENCE_S,
    ApiError,
    ClusterProcesses,
    CoreProcess,
    cluster_processes,
    wait_until,
)
from tests.databases import drop_schema, make_schema


@pytest.fixture(scope="module")
def cluster(postgres: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcesses]:
    url = asyncio.run(make_schema(postgres))
    with cluster_processes(tmp_path_factory.mktemp("cluster"), url, tiny_model) as cluster:
        yield cluster
    asyncio.run(drop_schema(postgres, url))


@pytest.fixture(scope="module")
def cores(cluster: ClusterProcesses) -> list[CoreProcess]:
    return cluster.start_cores("core0", "core1")


@pytest.fixture(scope="module")
def worker(cluster: ClusterProcesses, cores: list[CoreProcess]) -> None:
    """One that joined at the first core, and is used by both."""
    cluster.start_worker("w0", cores[0])
    wait_for(cores, "w0")


def wait_for(cores: list[CoreProcess], *names: str) -> None:
    for core in cores:
        wait_until(
            lambda core=core: all(core.members().get(name, {}).get("connected") for name in names),
            f"{names} did not join: {core.members()}",
        )


def statuses(cores: list[CoreProcess], model: str, key: str, n: int) -> Counter[int]:
    """Of n requests, sent to the cores in turn."""
    found: Counter[int] = Counter()
    for i in range(n):
        try:
            cores[i % len(cores)].chat(model, key=key)
            found[200] += 1
        except ApiError as error:
            found[error.status] += 1
    return found


@pytest.mark.usefixtures("worker")
def test_what_is_stored_is_the_same_at_every_core(cluster: ClusterProcesses, cores: list[CoreProcess]) -> None:
    first, second = cores
    assert first.members()["w0"]["is_tls"]
    one = first.call("POST", "/v1/responses", {"model": cluster.model, "input": "Hello", "max_output_tokens": 16})
    body = {"model": cluster.model, "input": "And?", "previous_response_id": one["id"], "max_output_tokens": 16}
    assert second.call("POST", "/v1/responses", body)["previous_response_id"] == one["id"]

    chat = {"model": cluster.model, "messages": [{"role": "user", "content": "x" * 50_000}], "max_tokens": 4}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat}
    form = (
        '--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        '--b\r\ncontent-disposition: form-data; name="file"; filename="f.jsonl"\r\n\r\n'
        f"{json.dumps(line)}\r\n--b--\r\n"
    ).encode()
    multipart = {"content-type": "multipart/form-data; boundary=b"}
    file = first.call("POST", "/v1/files", form, **multipart)
    assert json.loads(second.call("GET", f"/v1/files/{file['id']}/content")) == line
    new = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = second.call("POST", "/v1/batches", new, **{"idempotency-key": "once"})
    assert first.call("POST", "/v1/batches", new, **{"idempotency-key": "once"})["id"] == batch["id"]

    open_states = ("validating", "queued", "in_progress", "finalizing")
    batch_path = f"/v1/batches/{batch['id']}"
    wait_until(lambda: first.call("GET", batch_path)["status"] not in open_states, "the batch did not end")
    done = second.call("GET", batch_path)
    assert done["request_counts"]["total"] == 1
    results = f"/v1/files/{done['output_file_id'] or done['error_file_id']}/content"
    assert first.call("GET", results) == second.call("GET", results)
    later = {"model": cluster.model, "input": "Hi", "background": True, "max_output_tokens": 16}
    path = f"/v1/responses/{first.call('POST', '/v1/responses', later)['id']}"
    wait_until(lambda: second.call("GET", path)["status"] not in open_states, "the background response did not end")


@pytest.mark.usefixtures("worker")
def test_two_cores_share_limits_and_budgets(cluster: ClusterProcesses, cores: list[CoreProcess]) -> None:
    first, second = cores
    limited = first.call("POST", "/api/keys", {"account": "acme", "requests_per_minute": 5})["key"]
    wait_until(lambda: _is_known(second, limited), "the other core does not know the key")
    began_s = time.monotonic()
    found = statuses(cores, cluster.model, limited, 10)
    regained = (time.monotonic() - began_s) * 5 / 60
    assert 5 <= found[200] <= 5 + regained
    assert found[200] + found[429] == 10
    second.call("POST", "/api/prices", {"model": cluster.model, "input": "10000", "output": "10000"})
    spender = first.call("POST", "/api/keys", {"account": "spender", "budget": "5", "budget_period": "total"})["key"]
    for core in cores:  # which must hear of the key and the price
        wait_until(lambda core=core: statuses([core], cluster.model, spender, 1)[200], "the key cannot be used")
    found = statuses(cores, cluster.model, spender, 40)
    assert found[200]
    assert found[429]
    assert set(found) == {200, 429}
    report = first.call("GET", "/api/usage?account=spender")
    assert 0 < sum(float(row["cost"] or 0) for row in report["data"]) <= 5


def _is_known(core: CoreProcess, key: str) -> bool:
    try:
        core.call("GET", "/v1/models", key=key)
    except ApiError:
        return False
    return True


@pytest.mark.usefixtures("worker")
def test_kv_is_transferred_over_tls(cluster: ClusterProcesses, cores: list[CoreProcess]) -> None:
    core = cores[0]
    for role in ("prefill", "decode"):
        cluster.start_worker(role, *cores, flags=("--role", role))
    wait_for(cores, "prefill", "decode")
    core.call("POST", "/api/workers/drain", {"name": "w0"})

    def received() -> int:
        engines = {engine["name"]: engine for engine in core.call("GET", "/api/ps")["engines"]}
        return int(engines["decode"]["load"].get("blocks_received", 0))

    assert core.chat(cluster.model, "word " * 500)["usage"]["prompt_tokens"] > 2000
    wait_until(lambda: received() > 100, "no KV was transferred")
    for name in ("prefill", "decode"):
        core.call("POST", "/api/workers/leave", {"name": name})
    core.call("POST", "/api/workers/undrain", {"name": "w0"})
    wait_until(lambda: list(cores[1].members()) == ["w0"], "they did not leave")


@pytest.mark.usefixtures("worker")
def test_a_worker_with_an_old_epoch_ends_and_never_answers(
    cluster: ClusterProcesses, cores: list[CoreProcess], tmp_path: Path
) -> None:
    """It was stopped while another one joined under its name, and what it says since is of its old epoch."""
    first, second = cores
    journals = [tmp_path / name for name in ("old", "new")]

    def heard(journal: Path) -> int:
        return len(journal.read_text().splitlines()) if journal.exists() else 0

    old = cluster.start_worker("twin", *cores, flags=("--journal", str(journals[0])))
    wait_for(cores, "twin")
    first.call("POST", "/api/workers/drain", {"name": "w0"})
    wait_until(lambda: second.members()["w0"]["state"] == "draining", "w0 does not drain")
    for core in cores:
        assert core.chat(cluster.model)["choices"]
    n_heard = heard(journals[0])
    assert n_heard
    before = second.members()["twin"]
    old.send_signal(signal.SIGSTOP)
    try:
        cluster.start_worker("twin", *cores, flags=("--journal", str(journals[1])))
        for core in cores:
            wait_until(
                lambda core=core: core.members()["twin"]["epoch"] > before["epoch"] and is_used(core, "twin"),
                "the new one is not used",
            )
        current = second.members()["twin"]

        # Whoever has its key and says its epoch is not the current one, at any core, wherever he listens.
        credential = Credential(
            name="twin", cluster=first.call("GET", "/api/cluster")["id"], key=cluster.key_of("twin")
        )
        said = Announcement(
            challenge="",
            name="twin",
            instance="0" * 32,
            address="tcp:127.0.0.1:1",
            role="both",
            model=cluster.model,
            fingerprint=current["fingerprint"],
            version=VERSION,
            epoch=before["epoch"],
        )
        for core in cores:
            forger = Announcer([core.url], credential, said)
            standing = forger.announce()
            assert (standing.is_current, standing.epoch) == (False, current["epoch"])
            forger.announce(leaving=True)  # takes nobody off the list
            assert core.members()["twin"]["address"] == current["address"]
    finally:
        old.send_signal(signal.SIGCONT)
    end_s = time.monotonic() + PATIENCE_S
    while old.poll() is None:  # requests all the while
        assert time.monotonic() < end_s, "the old one did not end"
        for core in cores:
            assert core.chat(cluster.model)["choices"]
    assert old.returncode == 0, "a service manager does not start it again"
    for core in cores:
        assert core.chat(cluster.model)["choices"]
        assert core.members()["twin"]["epoch"] == current["epoch"]
    assert heard(journals[0]) == n_heard
    assert heard(journals[1]) >= 2
    first.call("POST", "/api/workers/undrain", {"name": "w0"})
    first.call("POST", "/api/workers/leave", {"name": "twin"})
    wait_until(lambda: list(second.members()) == ["w0"], "it did not leave")


def is_used(core: CoreProcess, name: str) -> bool:
    return bool(core.members()[name]["connected"])


@pytest.mark.slow  # it starts another core
@pytest.mark.usefixtures("worker")
def test_a_killed_core_and_a_newer_worker(cluster: ClusterProcesses, cores: list[CoreProcess]) -> None:
    first, second = cores
    newer = cluster.start_worker("w1", second, first)
    wait_for(cores, "w0", "w1")
    first.call("POST", "/api/workers/leave", {"name": "w0"})
    wait_until(lambda: "w0" not in second.members(), "w0 did not leave")
    assert second.chat(cluster.model)["choices"]
    epoch = second.members()["w1"]["epoch"]
    replaced = cluster.start_worker("w1", first, second)
    assert newer.wait(60) is not None
    wait_until(lambda: second.members()["w1"]["epoch"] > epoch, "not replaced")
    wait_until(lambda: second.members()["w1"]["connected"], "the newer one is not used")
    assert second.chat(cluster.model)["choices"]
    first.kill()
    assert second.chat(cluster.model)["choices"]
    (again,) = cluster.start_cores("core0")
    wait_for([again], "w1")
    assert again.chat(cluster.model)["choices"]
    replaced.terminate()
    wait_until(lambda: not second.members(), "it did not take itself off the list")


class ServiceManager:
    """Starts a worker again when it ends with the status that asks for it, with the release that is installed now."""

    def __init__(self, cluster: ClusterProcesses, cores: list[CoreProcess], names: list[str]) -> None:
        self._cluster, self._cores = cluster, cores
        self.installed: tuple[str, ...] = ("--release", "0.0.9", "--protocol", str(OLDEST_VERSION))
        self._stopped = threading.Event()
        self._running = {name: self._start(name) for name in names}
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _start(self, name: str) -> "subprocess.Popen[str]":
        script = ("--script", "say=count,itl_ms=2", "--check-kv")
        return self._cluster.start_worker(name, *self._cores, flags=(*script, *self.installed))

    def _watch(self) -> None:
        while not self._stopped.wait(0.05):
            for name, process in self._running.items():
                if process.poll() is not None:
                    self._running[name] = self._start(name)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


@pytest.mark.parametrize("n_workers", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_rolling_upgrade_under_load_has_no_errors(
    cluster: ClusterProcesses, cores: list[CoreProcess], tmp_path: Path, n_workers: int, request: pytest.FixtureRequest
) -> None:
    """From workers that speak the previous version of the protocol to this one's."""
    names = [f"u{n}" for n in range(n_workers)]
    manager = ServiceManager(cluster, cores, names)
    request.addfinalizer(manager.stop)  # whatever fails: it would start workers for ever
    wait_for(cores, *names)
    others = [name for name in cores[0].members() if name not in names]
    for name in others:
        cores[0].call("POST", "/api/workers/drain", {"name": name})
    manager.installed = ()
    port = cores[0].url.rpartition(":")[2]
    with ThreadPoolExecutor(8) as pool:
        done = threading.Event()

        def load(number: int) -> int:
            n_asked = 0
            while not done.is_set():
                answer = cores[number % 2].chat(cluster.model, f"{number}.{n_asked} " + "word " * 50, max_tokens=30)
                assert answer["usage"]["completion_tokens"] == 30
                n_asked += 1
                done.wait(0.02)
            return n_asked

        asking = [pool.submit(load, number) for number in range(n_workers)]
        try:
            told = emberline("cluster", "upgrade", *names, "--port", port, home=tmp_path, EMBERLINE_AUTH_KEY=ADMIN)
        finally:
            done.set()
        assert told.returncode == 0, told.stderr
        assert told.stdout == f"{n_workers} workers were replaced\n"
        assert all(each.result() for each in asking)
    members = cores[1].members()
    assert {members[name]["version"] for name in names} == {VERSION}
    assert {members[name]["release"] for name in names} == {__version__}
    manager.stop()
    for name in others:
        cores[0].call("POST", "/api/workers/undrain", {"name": name})
    for name in names:
        cores[0].call("POST", "/api/workers/leave", {"name": name})
    wait_until(lambda: set(cores[1].members()) == set(others), "they did not leave")
