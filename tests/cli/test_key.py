"""`emberline account`, `key` and `audit` on the store of this machine, as where no server runs."""

import json
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from emberline.accounts.api_key import is_well_formed
from emberline.accounts.operator_ticket import is_operator_ticket
from emberline.accounts.secret import Secret
from emberline.cli.key import duration_s
from emberline.cli.main import main
from emberline.protocol.errors import BadInput
from tests.cli.fake_server import FakeServer

Run = Callable[..., tuple[int, str, str]]  # exit status, output, errors


@pytest.fixture
def emberline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process."""
    for name in [name for name in os.environ if name.startswith("EMBERLINE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("EMBERLINE_HOME", str(tmp_path))
    monkeypatch.setenv("EMBERLINE_PORT", "1")  # where no server runs

    def run(*words: str) -> tuple[int, str, str]:
        status = main(words)
        return status, *capsys.readouterr()

    return run


def test_keys_accounts_and_the_audit_log_without_a_server(emberline: Run, tmp_path: Path) -> None:
    words = ("--account", "acme", "--rpm", "60", "--budget", "20/month", "--models", "a/*, b", "--expires", "30d")
    status, output, note = emberline("key", "create", *words)
    assert status == 0, note
    key = output.strip()
    assert is_well_formed(key)
    assert "not shown again" in note
    (listed,) = json.loads(emberline("key", "ls", "--json")[1])
    assert (listed["account"], listed["budget"], listed["budget_period"]) == ("acme", "20.00", "month")
    assert (listed["requests_per_minute"], listed["models"]) == (60, ["a/*", "b"])
    table = emberline("key", "ls")[1]
    assert "60 rpm, 20.00/month" in table
    assert key not in table
    rotated = emberline("key", "rotate", listed["id"], "--overlap", "1h", "--json")
    assert json.loads(rotated[1])["id"] == listed["id"]
    revoked = emberline("key", "revoke", listed["id"])
    assert revoked[1] == f"{listed['id']} of account acme is revoked\n"
    limited = emberline("account", "limit", "acme", "--tpm", "500")
    assert limited[1] == "acme: active, limits: 500 tpm\n"
    checked = json.loads(emberline("audit", "--verify", "--json")[1])
    assert (checked["intact"], checked["entries"]) == (True, 4)
    with sqlite3.connect(tmp_path / "emberline.db") as store:
        store.execute("UPDATE audit_log SET actor = 'nobody' WHERE number = 2")
    broken = emberline("audit", "--verify")
    assert (broken[0], "row 2 was changed" in broken[1]) == (1, True)


def test_errors_are_one_line(emberline: Run) -> None:
    status, _, error = emberline("key", "create", "--account", "../x")
    assert (status, error.count("\n")) == (1, 1)
    assert "account names are" in error


def test_a_server_that_is_named_is_asked_with_a_ticket(
    emberline: Run, tmp_path: Path, fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = Secret.open(tmp_path)
    fake_server.error = (409, "there is an account acme already")
    status, _, error = emberline("account", "create", "acme", "--rpm", "5", "--port", fake_server.port)
    assert (status, error) == (1, "emberline: there is an account acme already\n")
    (path, _, raw) = fake_server.posts[-1]
    assert (path, json.loads(raw)) == ("/api/accounts", {"id": "acme", "requests_per_minute": 5})
    sent = fake_server.headers[-1]["Authorization"].removeprefix("Bearer ")
    assert is_operator_ticket(secret, sent, time.time())
    assert not (tmp_path / "emberline.db").exists()
    monkeypatch.setenv("EMBERLINE_AUTH_KEY", "the-admin-key")
    emberline("account", "create", "acme", "--port", fake_server.port)
    assert fake_server.headers[-1]["Authorization"] == "Bearer the-admin-key"


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("2m", 120), ("24h", 86_400), ("7d", 604_800)])
def test_durations(text: str, seconds: int) -> None:
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "1w", "-1h", "1.5h", "9" * 30])
def test_bad_durations(text: str) -> None:
    with pytest.raises(BadInput):
        duration_s(text)
