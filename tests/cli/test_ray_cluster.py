"""`emberline cluster up` and `down`, as far as no Ray is started, and credentials of nodes."""

import asyncio
import json
import os
import stat
from pathlib import Path

import msgspec
import pytest

from emberline.cli.main import main
from emberline.config import resolve
from emberline.server.cluster_setup import open_ray_launcher
from emberline.supervisor.cluster import ray_cluster
from emberline.supervisor.cluster.cluster_file import ClusterFile
from emberline.supervisor.cluster.launcher import LEFT, ReplicaOrder
from emberline.supervisor.cluster.ray_launcher import PlacedReplica
from emberline.supervisor.cluster.ray_node import ProcessId, Record
from emberline.supervisor.cluster.ray_settings import NodeCredential, NodeSettings


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EMBERLINE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("EMBERLINE_SECRET", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def up(*flags: str) -> int:
    pytest.importorskip("ray")
    return main(["cluster", "up", *flags])


def refusal(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert up(*flags) == 1
    return capsys.readouterr().err


def test_a_node_credential_is_written_for_its_owner_alone(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "credential", "--node", "10.0.0.2"]) == 0
    path = Path("10.0.0.2.credential")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first = NodeCredential.open(path)
    assert main(["cluster", "credential", "--node", "10.0.0.3", "--out", "-"]) == 0
    second = NodeCredential.parse(capsys.readouterr().out)
    assert (first.address, second.address) == ("10.0.0.2", "10.0.0.3")
    assert (first.token, first.cluster) == (second.token, second.cluster)
    assert len(first.token) == 64
    capsys.readouterr()
    assert main(["cluster", "credential", "--node", "10.0.0.4", "--out", "kept"]) == 0
    assert "emberline cluster up --join HEAD --credential kept\n" in capsys.readouterr().err
    assert main(["cluster", "credential", "gpu7", "--out", "no/such/folder"]) == 1
    assert "cannot write no/such/folder" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["gpu7", "--node", "10.0.0.2"], ["--node", "10.0.0.2", "--no-tls"]])
def test_whose_credential_must_be_clear(home: Path, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "credential", *flags]) == 1
    assert capsys.readouterr().err


def test_a_node_without_a_credential_is_told_how_to_get_one(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(capsys, "--join", "127.0.0.2:9", "--address", "127.0.0.3")
    assert "emberline cluster credential --node 127.0.0.3" in message


def test_a_credential_for_another_machine_is_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["cluster", "credential", "--node", "127.0.0.2"])
    flags = ("--join", "127.0.0.2:9", "--credential", "127.0.0.2.credential", "--data-dir", "other")
    assert "is for 127.0.0.2, and this machine is 127.0.0.3" in refusal(capsys, *flags, "--address", "127.0.0.3")
    Path("127.0.0.2.credential").chmod(0o644)
    assert "chmod 600" in refusal(capsys, *flags, "--address", "127.0.0.2")


def test_a_head_that_is_not_there(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["cluster", "init"])
    assert "no Ray head answers at 127.0.0.2:9" in refusal(capsys, "--join", "127.0.0.2:9", "--address", "127.0.0.3")
    assert "give its address with --address" in refusal(capsys, "--address", "127.0.0.1")
    assert "no address of a head" in refusal(capsys, "--join", "h:x")


def test_the_cluster_file_is_checked_first(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home.mkdir()
    (home / "cluster.yaml").write_text("modles: []")
    assert "modles is no key" in refusal(capsys, "--address", "127.0.0.2")
    (home / "cluster.yaml").write_text("nodes: [{address: 127.0.0.2, gpus: 512}]")
    message = refusal(capsys, "--address", "127.0.0.2")
    assert "node 127.0.0.2 has 512 GPUs, and this machine has" in message
    assert "correct its `gpus`" in message
    (home / "cluster.yaml").write_text("models: [{name: not-pulled}]")
    assert "emberline pull not-pulled" in refusal(capsys, "--address", "127.0.0.2")
    assert "cannot read nowhere.yaml" in refusal(capsys, "--file", "nowhere.yaml")


def test_what_runs_already_is_not_started_again(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = home / "ray"
    folder.mkdir(parents=True)
    own = ProcessId.of(os.getpid())
    assert own is not None
    node = NodeSettings(address="127.0.0.2", head="127.0.0.2", port=9, folder=folder)
    Record(keeper=own, nodes=(node,)).write(folder)
    assert "emberline cluster down" in refusal(capsys, "--address", "127.0.0.2")


def test_down_without_anything(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "down"]) == 0
    assert "no Ray" in capsys.readouterr().out
    assert main(["cluster", "down", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ended": 0}


def test_replicas_have_the_settings_of_the_engine(tmp_path: Path) -> None:
    config = resolve({"engine.tp": 2, "engine.deterministic": True, "engine.kv_bytes": 4096}, {}, tmp_path)
    node = NodeSettings(address="127.0.0.2", head="127.0.0.2", port=9, folder=tmp_path / "ray")
    launcher = open_ray_launcher(config, ClusterFile(), [node])
    assert (launcher.n_ranks, launcher.arguments) == (2, ("--kv-bytes", "4096", "--deterministic"))


async def test_the_replicas_are_tended_whatever_happens() -> None:
    """One look fails; then one replica could not be started, one just now, one has left, and one runs."""
    looks = 0
    started: list[str] = []
    done = asyncio.Event()

    def lost(name: str, problem: str, age_s: float = 100.0) -> PlacedReplica:
        about = {"addresses": (), "n_ranks": 1, "model": "m", "role": "both", "waits": False, "n_restarts": 0}
        return msgspec.convert(
            {"name": name, "state": "lost", "problem": problem, "age_s": age_s, **about}, PlacedReplica
        )

    class Launcher:
        is_connected = True

        async def start(self, order: ReplicaOrder) -> None:
            started.append(order.name)

        async def placed(self) -> list[PlacedReplica]:
            nonlocal looks
            looks += 1
            if looks == 1:
                raise KeyError("odd")
            if looks == 2:
                running = msgspec.structs.replace(lost("d", ""), state="running")
                return [lost("a", "no weights"), lost("b", "no weights", 1.0), lost("c", LEFT), running]
            done.set()
            return []

    orders = [ReplicaOrder(name=name, model="m", path=Path("/m")) for name in "abcd"]
    tending = asyncio.create_task(ray_cluster.tend(Launcher(), orders, every_s=0.0))  # type: ignore[arg-type]
    async with asyncio.timeout(60):
        await done.wait()
    tending.cancel()
    await asyncio.gather(tending, return_exceptions=True)
    assert started == ["a", "b", "c", "d", "a"]
