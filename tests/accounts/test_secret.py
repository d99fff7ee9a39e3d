import os
from pathlib import Path

import pytest

from emberline.accounts.secret import Secret
from emberline.protocol.errors import BadInput


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EMBERLINE_SECRET", raising=False)


def test_the_secret_is_created_once_and_private(tmp_path: Path) -> None:
    first = Secret.open(tmp_path / "data").derive("kv", "alice")
    path = tmp_path / "data" / "secret"
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert len(path.read_text()) == 64
    assert [entry.name for entry in path.parent.iterdir()] == ["secret"]
    assert Secret.open(tmp_path / "data").derive("kv", "alice") == first
    assert Secret.open(tmp_path / "other").derive("kv", "alice") != first


def test_a_key_per_purpose_and_context() -> None:
    secret = Secret("x" * 32)
    keys = {
        secret.derive("kv"),
        secret.derive("kv", "alice"),
        secret.derive("kv", "bob"),
        secret.derive("kva", "lice"),
        secret.derive("kv", "ali", "ce"),
        secret.derive("webhook", "alice"),
    }
    assert len(keys) == 6
    assert keys
    assert all(len(key) == 16 for key in keys)
    assert len(secret.derive("kv", size=32)) == 32


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_world_readable_secret_is_refused(tmp_path: Path, mode: int) -> None:
    Secret.open(tmp_path)
    (tmp_path / "secret").chmod(mode)
    with pytest.raises(BadInput, match="chmod 600"):
        Secret.open(tmp_path)


def test_the_environment_takes_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBERLINE_SECRET", "e" * 40)
    assert Secret.open(tmp_path).derive("kv") == Secret("e" * 40).derive("kv")
    assert not (tmp_path / "secret").exists()
    monkeypatch.setenv("EMBERLINE_SECRET", "short")
    with pytest.raises(BadInput, match="at least 32"):
        Secret.open(tmp_path)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").touch(0o600)
    with pytest.raises(BadInput, match="0 characters"):
        Secret.open(tmp_path)


def test_an_unusable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot use the root secret"):
        Secret.open(tmp_path / "file")
