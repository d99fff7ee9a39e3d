"""The log file of `emberline serve`, and `emberline logs`."""

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline import log
from emberline.catalog.model_store import ModelStore
from emberline.catalog.predictor_cards import publish
from emberline.cli.log_file import LogFile, follow, lines_backward, log_path, older_files
from emberline.cli.main import main
from emberline.predictor.environments import Environment
from emberline.predictor.versions import PredictorVersions, PushSettings
from tests.cli.console import emberline
from tests.cli.fake_server import FakeServer
from tests.predictor.conftest import write_project


@pytest.fixture(autouse=True)
def own_logger() -> logging.Logger:
    logger = logging.getLogger("tests.logs")
    logger.propagate = False
    logger.setLevel(logging.DEBUG)
    logger.handlers.clear()
    return logger


def writing(logger: logging.Logger, path: Path, max_bytes: int = 1 << 20, **limits: Any) -> LogFile:
    handler = LogFile(path, max_bytes, **limits)
    handler.addFilter(log.ContextFilter("core"))
    logger.addHandler(handler)
    return handler


def test_lines_are_written_and_found(
    own_logger: logging.Logger, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMBERLINE_HOME", str(tmp_path))
    handler = writing(own_logger, log_path(tmp_path))
    for n in range(5):
        own_logger.info("finished", extra={"request_id": f"r{n}-abc", "ms": n})
    own_logger.warning("evil \x1b[2J", extra={"request_id": "r3-abc.2", "trace_id": "t" * 32})
    handler.close()
    assert log_path(tmp_path).stat().st_mode & 0o777 == 0o600
    assert main(["logs", "-n", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].endswith("core       finished ms=4 [r4-abc]")
    assert "evil \\x1b[2J" in lines[1]
    assert main(["logs", "--request", "r3", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [entry["request_id"] for entry in found] == ["r3-abc", "r3-abc.2"]
    assert main(["logs", "--request", "tttt", "--level", "warning"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert main(["logs", "--level", "error"]) == 0
    assert capsys.readouterr().out == ""


def test_no_log_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "--data-dir", str(tmp_path)]) == 1
    assert "emberline serve" in capsys.readouterr().err


def newest(path: Path) -> int:
    try:
        return int(json.loads(next(lines_backward(path), b'{"n": -1}'))["n"])
    except ValueError:  # a line that is being written
        return -1


def test_it_is_rotated_and_bounded(own_logger: logging.Logger, tmp_path: Path) -> None:
    path = log_path(tmp_path)
    handler = writing(own_logger, path, max_bytes=40_000, write_s=0.0)
    for n in range(1000):
        own_logger.info("%s", "x" * 100, extra={"n": n})
        if n % 20 == 0:
            while newest(path) < n:
                time.sleep(0.001)
    handler.close()
    files = [each for each in (path, *older_files(path)) if each.exists()]
    assert len(files) == 4
    assert sum(each.stat().st_size for each in files) <= 40_000
    numbers = [json.loads(line)["n"] for line in lines_backward(path)]
    assert numbers == list(range(999, 999 - len(numbers), -1)), "in order over all files, without a gap"
    assert handler.n_dropped == 0


@settings(max_examples=40)
@given(st.lists(st.binary(min_size=1, max_size=300).filter(lambda line: b"\n" not in line), max_size=60))
def test_backward_is_the_reverse_of_forward(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("log") / "emberline.log"
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    assert list(lines_backward(path, block_bytes=64)) == lines[::-1]


def test_following_through_a_rotation(tmp_path: Path) -> None:
    path = tmp_path / "emberline.log"
    path.write_bytes(b"old\n")
    new = follow(path, poll_s=0.001)
    assert next(new) is None
    with path.open("ab") as file:
        file.write(b"one\ntwo\nhal")
    assert [next(new), next(new), next(new)] == [b"one", b"two", None]
    with path.open("ab") as file:
        file.write(b"f\n")
    assert [next(new), next(new)] == [b"half", None]
    with path.open("ab") as file:
        file.write(b"last\n")
    path.rename(tmp_path / "emberline.log.1")
    assert [next(new), next(new)] == [b"last", None]
    path.write_bytes(b"three\n")
    assert [next(new), next(new)] == [b"three", None]
    with path.open("ab") as file:
        file.write(b"four\n")
    path.rename(tmp_path / "emberline.log.1")
    path.write_bytes(b"five\n")
    assert [next(new), next(new), next(new)] == [b"four", b"five", None]


def test_a_full_disk_loses_lines_and_nothing_else(own_logger: logging.Logger, tmp_path: Path) -> None:
    handler = writing(own_logger, tmp_path / "logs" / "emberline.log")
    (tmp_path / "logs").rmdir()
    own_logger.info("lost")
    handler.close()
    assert not (tmp_path / "logs").exists()


def test_stderr_and_the_file_share_one_formatting(own_logger: logging.Logger) -> None:
    record = own_logger.makeRecord("n", logging.INFO, "f", 1, "hello", (), None)
    first = log.JsonFormatter().format(record)
    record.msg = "changed"
    assert log.JsonFormatter().format(record) is first
    assert "json_line" not in log.fields(record)


def test_a_line_that_cannot_be_formatted_costs_itself_alone(
    own_logger: logging.Logger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    handler = writing(own_logger, log_path(tmp_path))
    own_logger.info("%d", "not a number")
    own_logger.info("next")
    handler.close()
    assert [json.loads(line)["message"] for line in lines_backward(log_path(tmp_path))] == ["next"]


def test_more_lines_than_can_be_written_are_dropped(own_logger: logging.Logger, tmp_path: Path) -> None:
    handler = writing(own_logger, log_path(tmp_path), max_queued=10, write_s=60.0)
    for _ in range(100):
        own_logger.info("x")
    handler.close()
    written = len(list(lines_backward(log_path(tmp_path))))
    assert 10 <= written <= 11
    assert written + handler.n_dropped == 100


def test_the_log_of_a_pushed_model_is_that_of_its_served_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMBERLINE_HOME", str(tmp_path))
    versions = PredictorVersions(tmp_path, lambda root, requirements, python, tell: Environment("none", "/bin/sh", ()))
    project = write_project(tmp_path / "project", "class Runner:\n    def run(self) -> str:\n        return ''\n")
    manifests = [versions.push(project, PushSettings(name="thing"), lambda line: None) for _ in range(2)]
    for manifest in manifests:
        versions.log_path(manifest).write_text(f"early\nevil \x1b[2J\nof {manifest.version}\n")
    publish(ModelStore(tmp_path), manifests[0], versions.path(manifests[0]))
    for words, shown in (
        (["thing"], "early\nevil \N{REPLACEMENT CHARACTER}[2J\nof 1\n"),
        (["@me/thing", "-n", "1"], "of 1\n"),
        (["thing", "--version", "2", "-n", "1"], "of 2\n"),
        (["thing", "-n", "0"], ""),
    ):
        assert main(["logs", "--model", *words]) == 0
        assert capsys.readouterr().out == shown
    for words, problem in (
        (["--model", "other"], "no model @me/other was pushed here"),
        (["--model", "thing", "--version", "3"], "@me/thing has no version 3; there are 1, 2"),
        (["--model", "thing", "-f", "--json"], "--follow, --json: only for the server's own log"),
        (["--model", "thing", "--level", "debug"], "--level: only for the server's own log"),
        (["--model", "thing", "--request", "3f", "--remote"], "--request: only for the server's own log"),
        (["--model", "thing", "--port", "1"], "--port: only with --remote"),
        (["--model", "thing", "--url", "http://x", "--api-key", "k"], "--url, --api-key: only with --remote"),
        (["--remote"], "give its --model NAME"),
        (["--version", "2"], "give its --model NAME"),
    ):
        assert main(["logs", *words]) == 1
        assert problem in capsys.readouterr().err


def test_no_lines_of_a_log_on_a_server_are_none(fake_server: FakeServer, tmp_path: Path) -> None:
    fake_server.answers["/api/models/logs"] = {"data": ["last"]}  # the server gives at least one
    for n_lines, shown in (("0", ""), ("1", "last\n")):
        words = ("--remote", "--port", fake_server.port, "-n", n_lines)
        done = emberline("logs", "--model", "thing", *words, home=tmp_path)
        assert (done.returncode, done.stdout) == (0, shown), done.stderr
