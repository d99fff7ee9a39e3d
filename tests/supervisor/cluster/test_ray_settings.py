"""Settings, credentials and command lines of Ray nodes, and of the processes that actors start."""

import os
import socket
import stat
from pathlib import Path

import pytest

from emberline.protocol.credential import VARIABLE
from emberline.protocol.errors import BadInput
from emberline.protocol.parallel_layout import Layout
from emberline.supervisor.cluster.certificate_authority import CertificateAuthority
from emberline.supervisor.cluster.launcher import ReplicaOrder
from emberline.supervisor.cluster.ray_replica import Meeting, Node, RankTask, rank_spec
from emberline.supervisor.cluster.ray_settings import (
    PORTS_VARIABLE,
    NodeCredential,
    NodeSettings,
    gpu_kind,
    make_private,
    own_address,
    ray_command,
    ray_environment,
    tls_context,
    write_credential,
)


def node_credential(address: str = "10.0.0.2") -> NodeCredential:
    pem = CertificateAuthority(bytes(32), "c").node_pem(address)
    return NodeCredential(address=address, cluster="c", token="a-token", pem=pem)


def settings(folder: Path, **more: object) -> NodeSettings:
    write_credential(node_credential(), folder)
    return NodeSettings(address="10.0.0.2", head="10.0.0.1", port=6379, folder=folder, **more)  # type: ignore[arg-type]


def test_a_node_credential_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = node_credential()
    assert NodeCredential.parse(made.encode()) == NodeCredential(
        address=made.address, cluster="c", token="a-token", pem=made.pem.strip()
    )
    assert "a-token" not in repr(made)
    path = tmp_path / "node.credential"
    path.write_text(made.encode())
    path.chmod(0o644)
    with pytest.raises(BadInput, match="chmod 600"):
        NodeCredential.open(path)
    for text in ("", "hello", made.encode().partition("-----BEGIN PRIVATE")[0]):
        with pytest.raises(BadInput, match="credential"):
            NodeCredential.parse(text)


def test_the_files_of_a_credential_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "ray"
    write_credential(node_credential(), folder)
    write_credential(node_credential(), folder)  # again
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for name in ("token", "node.key", "node.pem", "ca.pem"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    assert tls_context(folder).get_ca_certs()
    folder.chmod(0o755)
    with pytest.raises(BadInput, match="chmod 700"):
        make_private(folder)


def test_a_link_that_another_user_has_put_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own"
    make_private(own)
    link = tmp_path / "link"
    link.symlink_to(own)
    make_private(link)
    lstat = Path.lstat
    fields = (*lstat(link)[:4], os.getuid() + 1, *lstat(link)[5:10])
    monkeypatch.setattr(Path, "lstat", lambda path: os.stat_result(fields) if path == link else lstat(path))
    with pytest.raises(BadInput, match="belongs to another user"):
        make_private(link)


def test_a_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    node = settings(tmp_path / "ray")
    node.token_file.chmod(0o640)
    with pytest.raises(BadInput, match=r"open to others .*chmod 600"):
        ray_environment(node)
    node.token_file.chmod(0o600)
    node.token_file.write_text("")
    with pytest.raises(BadInput, match="empty"):
        ray_environment(node)


def test_the_environment_of_ray(tmp_path: Path) -> None:
    outer = {
        "PATH": "/bin",
        "RAY_AUTH_MODE": "disabled",
        "RAY_ADDRESS": "elsewhere",
        "EMBERLINE_SECRET": "root",
        "AWS_SECRET_ACCESS_KEY": "x",
    }
    environment = ray_environment(settings(tmp_path / "ray"), outer)
    assert environment["RAY_AUTH_MODE"] == "token"
    assert environment["RAY_USE_TLS"] == "1"
    assert environment["RAY_USAGE_STATS_ENABLED"] == "0"
    assert environment["RAY_memory_monitor_refresh_ms"] == "0"
    assert [environment[f"RAY_health_check_{name}"] for name in ("period_ms", "timeout_ms", "failure_threshold")] == [
        "1000",
        "1000",
        "3",
    ]
    assert int(environment["RAY_gcs_rpc_server_reconnect_timeout_s"]) > 86_400
    assert environment["PATH"] == "/bin"
    assert not environment.keys() & {"RAY_ADDRESS", "EMBERLINE_SECRET", "AWS_SECRET_ACCESS_KEY", "RAY_gcs_storage"}
    assert "a-token" not in environment.values()
    head = ray_environment(settings(tmp_path / "head", is_head=True), outer)
    assert (head["RAY_gcs_storage"], head["RAY_gcs_storage_path"]) == ("rocksdb", str(tmp_path / "head" / "head-state"))


def test_the_command_of_a_head_and_of_a_node(tmp_path: Path) -> None:
    head = ray_command(settings(tmp_path / "a", is_head=True))
    assert {"--head", "--block", "--port=6379", "--include-dashboard=false", "--num-gpus=0"} <= set(head)
    assert "--resources={}" in head
    node = ray_command(settings(tmp_path / "a", n_gpus=8, gpu="h200", region="eu"))
    assert {"--address=10.0.0.1:6379", "--num-gpus=8", "--node-ip-address=10.0.0.2"} <= set(node)
    assert "--labels=emberline.gpu=h200,emberline.region=eu" in node
    assert "--resources={}" in node
    cpu = ray_command(settings(tmp_path / "a", cpu_replicas=2))
    assert {'--resources={"emberline_cpu": 2}', "--labels=emberline.gpu=cpu", "--num-gpus=0"} <= set(cpu)


def test_temporary_folders_are_short_and_differ(tmp_path: Path) -> None:
    head, node = (settings(tmp_path / ("x" * 200), is_head=is_head) for is_head in (True, False))
    assert head.temp_folder != node.temp_folder
    assert len(str(head.session_folder)) < 45  # beside which Ray's sockets have room


def test_the_kind_of_gpu_is_what_the_driver_says(tmp_path: Path) -> None:
    assert gpu_kind(tmp_path) == ""
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0" / "information").write_text("Model: \t\t NVIDIA H200 NVL\nIRQ: 1\n")
    assert gpu_kind(tmp_path) == "h200-nvl"


def test_the_own_address_towards_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(BadInput, match="--address"):
        own_address("nowhere")


# --- the processes that actors start --------------------------------------------------------------------------------

HERE = Node("10.0.0.2", "eu", 7100, 7199)


def task(**more: object) -> RankTask:
    order = ReplicaOrder(name="big-0", model="org/big", path=Path("/m"), layout=Layout(tp=2, pp=2), account="acme")
    return RankTask(order=order, cores=("http://10.0.0.1:8686",), **more)  # type: ignore[arg-type]


def test_a_task_survives_its_encoding() -> None:
    assert RankTask.decode(task(rank=2, is_group=True).encode()) == task(rank=2, is_group=True)


def test_a_replica_on_one_machine_starts_its_ranks_itself() -> None:
    spec = rank_spec(task(on_gpu=True), HERE, Meeting(id="1"), "the credential", "tcp:10.0.0.2:7101")
    words = " ".join(spec.arguments)
    assert "--model /m --device cuda --tp 2 --pp 2" in words
    assert "--socket tcp:10.0.0.2:7101" in words
    assert "--join http://10.0.0.1:8686 --region eu --account acme" in words
    assert "--rank" not in words
    assert "credential" not in words
    assert spec.env == {VARIABLE: "the credential"}
    assert spec.may_end


def test_ranks_on_several_machines_meet_at_rank_0() -> None:
    meeting = Meeting(id="1", rendezvous="tcp:10.0.0.2:7105", token="ranks")
    lead = rank_spec(task(is_group=True, on_gpu=True), HERE, meeting, "the credential", "tcp:10.0.0.2:7101")
    follower = rank_spec(task(is_group=True, on_gpu=True, rank=3), HERE, meeting, "", "tcp:10.0.0.3:7101")
    assert "--device cuda:0" in " ".join(lead.arguments)  # Ray shows each rank its own GPU only
    assert " ".join(lead.arguments).count("--rank 0 --rendezvous tcp:10.0.0.2:7105") == 1
    assert " ".join(follower.arguments).count("--rank 3 --rendezvous tcp:10.0.0.2:7105") == 1
    assert lead.env == {VARIABLE: "the credential", "EMBERLINE_WORKER_TOKEN": "ranks"}
    assert follower.env == {"EMBERLINE_WORKER_TOKEN": "ranks"}
    assert "--join" not in follower.arguments
    assert not any("ranks" in word for word in (*lead.arguments, *follower.arguments))
    assert "ranks" not in repr(meeting)


def test_flags_of_a_rank_are_those_of_the_worker() -> None:
    from emberline.engine.worker.main import parse_arguments

    meeting = Meeting(id="1", rendezvous="tcp:10.0.0.2:7105", token="ranks")
    for rank in (0, 3):
        spec = rank_spec(task(is_group=True, rank=rank), HERE, meeting, "c", "tcp:10.0.0.2:7101")
        parsed = parse_arguments(list(spec.arguments))
        assert (parsed.rank, parsed.tp, parsed.pp, parsed.device) == (rank, 2, 2, "cpu")


def test_a_node_tells_its_actors_where_they_are() -> None:
    environ = {"EMBERLINE_NODE_ADDRESS": "127.0.0.1", PORTS_VARIABLE: "20000-20001", "EMBERLINE_NODE_REGION": "eu"}
    node = Node.of(environ)
    assert node == Node("127.0.0.1", "eu", 20000, 20001)
    assert node.tcp(5) == "tcp:127.0.0.1:5"
    assert Node("fd00::1", "", 1, 2).tcp(5) == "tcp:[fd00::1]:5"


def test_a_free_port_is_one_of_the_range() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"no port from {port} to {port}"):
            Node("127.0.0.1", "", port, port).free_port()
