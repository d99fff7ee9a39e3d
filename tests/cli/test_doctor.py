"""`emberline doctor`: each check and its remedy."""

import json
import socket
from pathlib import Path

import pytest

from emberline.cli import doctor
from emberline.cli.doctor import DoctorCheck
from emberline.cli.main import main
from emberline.config import Config, resolve


def config(home: Path, **flags: object) -> Config:
    return resolve({name.replace("__", "."): value for name, value in flags.items()}, {}, home)


@pytest.fixture(autouse=True)
def _no_torch_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_probe_torch", lambda: {"version": "2.13.0", "cuda": False, "gpus": []})


def test_json_has_every_check_and_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMBERLINE_HOME", str(tmp_path))
    tmp_path.chmod(0o700)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    status = main(["doctor", "--json", "--port", str(port)])
    report = json.loads(capsys.readouterr().out)
    names = [check["name"] for check in report["checks"]]
    for name in (
        "configuration",
        "python",
        "torch",
        "gpu",
        "cpu kernels",
        "pip",
        "memory",
        "data folder",
        "disk",
        "port",
    ):
        assert name in names
    assert report["ok"] is (status == 0)
    assert report["ok"], report


def test_invalid_configuration_is_a_failed_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMBERLINE_HOME", str(tmp_path))
    (tmp_path / "emberline.toml").write_text("[server]\nprot = 1\n")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "fail  configuration" in out
    assert "prot" in out


@pytest.mark.parametrize("version", ["2.10.1", "2.14.0+cpu"])
def test_unsupported_torch_version(version: str) -> None:
    found = doctor.torch_version({"version": version})
    assert found.status == "fail"
    assert "pip install torch==2.13.0" in found.fix
    assert doctor.torch_version({"version": "2.11.0+cu130"}).status == "ok"
    assert doctor.torch_version("No module named 'torch'").status == "fail"


def test_torch_is_needed_only_with_a_gpu() -> None:
    assert doctor.torch_version(doctor.NOT_INSTALLED).status == "ok"
    assert doctor.torch_version(doctor.NOT_INSTALLED, n_gpus=1).status == "fail"


def test_gpu_without_cuda_build() -> None:
    found = doctor.gpu({"gpus": []}, 2)
    assert found.status == "warn"
    assert "CUDA" in found.detail
    assert doctor.gpu({"gpus": ["H200"]}, 2) == DoctorCheck("gpu", "ok", "H200")


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    found = doctor.compiler()
    assert found.status == "warn"
    assert "gcc" in found.fix


def test_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        found = doctor.port(config(tmp_path, server__port=taken.getsockname()[1]), probe_timeout_s=0.2)
    assert found.status == "fail"
    assert "--port" in found.fix


def test_data_folder_permissions(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    assert doctor.data_folder(config(tmp_path)).status == "ok"
    (tmp_path / "secret").write_text("x")
    (tmp_path / "secret").chmod(0o644)
    found = doctor.data_folder(config(tmp_path))
    assert (found.status, found.fix) == ("warn", f"chmod 600 {tmp_path / 'secret'}")
    tmp_path.chmod(0o777)
    assert doctor.data_folder(config(tmp_path)).fix == f"chmod 700 {tmp_path}"


def test_damaged_model(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "cf--x--y"
    folder.mkdir(parents=True)
    card = {
        "id": "@cf/x/y",
        "aliases": ["y"],
        "description": "",
        "author": "x",
        "context_window": 1,
        "created_at": "",
        "source": {
            "type": "wheel",
            "files": {"y.gguf": "0" * 64},
            "wheels": [
                {"requirement": "y==1", "bytes": 4, "parts": [{"file": "y.gguf", "member": "y", "bytes": 4}]},
            ],
        },
    }
    (folder / "card.json").write_text(json.dumps({"card": card, "path": "y.gguf"}))
    (folder / "y.gguf").write_bytes(b"GGUF")
    (found,) = doctor.models(config(tmp_path))
    assert found.status == "fail"
    assert "emberline rm @cf/x/y && emberline pull y" in found.fix
