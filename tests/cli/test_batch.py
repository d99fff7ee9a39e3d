"""`emberline batch` and `emberline queue` against a fake server."""

import json
from pathlib import Path

import pytest

from emberline.cli.batch import Throughput, format_progress
from emberline.cli.common import format_duration
from tests.cli.console import emberline
from tests.cli.fake_server import RESULTS, FakeServer


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text('{"custom_id":"c0","method":"POST","url":"/v1/completions","body":{}}\n' * 6)
    return path


def test_submit_uploads_the_file_and_prints_the_batch_id(fake_server: FakeServer, file: Path, tmp_path: Path) -> None:
    done = emberline("batch", "submit", str(file), "--port", fake_server.port, home=tmp_path)
    assert (done.returncode, done.stdout) == (0, "batch_1\n")
    (path, kind, form), (_, _, body) = fake_server.posts
    assert (path, kind.partition(";")[0]) == ("/v1/files", "multipart/form-data")
    assert file.read_bytes() in form
    assert b'name="purpose"\r\n\r\nbatch\r\n' in form
    assert json.loads(body) == {
        "input_file_id": "file-in",
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }


def test_watch_shows_progress_until_the_end(fake_server: FakeServer, file: Path, tmp_path: Path) -> None:
    done = emberline("batch", "submit", str(file), "--watch", "--port", fake_server.port, home=tmp_path)
    assert done.returncode == 0
    assert "1/6 done, 1 failed" in done.stderr
    assert "5 of 6 done, 1 failed" in done.stdout
    assert "emberline batch results batch_1" in done.stdout


@pytest.mark.parametrize("text", ["", "not json\n", "[1]\n"])
def test_invalid_file_is_refused_before_upload(fake_server: FakeServer, tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    done = emberline("batch", "submit", str(path), "--port", fake_server.port, home=tmp_path)
    assert done.returncode == 1
    assert "bad.jsonl" in done.stderr
    assert fake_server.posts == []


def test_status_ls_and_json(fake_server: FakeServer, tmp_path: Path) -> None:
    status = emberline("batch", "status", "batch_1", "--port", fake_server.port, home=tmp_path)
    assert "about 3 min" in status.stdout
    listed = emberline("batch", "ls", "--port", fake_server.port, home=tmp_path)
    assert listed.stdout.splitlines()[1].split()[:2] == ["batch_1", "in_progress"]
    plain = emberline("batch", "ls", "--json", "--port", fake_server.port, home=tmp_path)
    assert json.loads(plain.stdout)[0]["id"] == "batch_1"


def test_results_are_written_unchanged(fake_server: FakeServer, tmp_path: Path) -> None:
    early = emberline("batch", "results", "batch_1", "--port", fake_server.port, home=tmp_path)
    assert early.returncode == 1
    assert "no answers (yet)" in early.stderr
    fake_server.n_done = 6
    out = tmp_path / "out.jsonl"
    done = emberline("batch", "results", "batch_1", "-o", str(out), "--port", fake_server.port, home=tmp_path)
    assert (done.returncode, out.read_bytes()) == (0, RESULTS)
    assert (
        emberline("batch", "results", "batch_1", "--port", fake_server.port, home=tmp_path).stdout == RESULTS.decode()
    )


def test_queue_and_dead_letter_queue(fake_server: FakeServer, tmp_path: Path) -> None:
    shown = emberline("queue", "--port", fake_server.port, home=tmp_path).stdout
    assert shown.splitlines()[1].split() == ["m", "a", "5", "2", "1", "75", "s"]
    assert "\x1b" not in shown
    replayed = emberline("queue", "replay", "batch_1", "4", "--port", fake_server.port, home=tmp_path)
    assert replayed.stdout == "1 jobs returned to the queue\n"
    assert json.loads(fake_server.posts[-1][2]) == {"batch": "batch_1", "line": 4}
    assert emberline("queue", "replay", "--port", fake_server.port, home=tmp_path).returncode == 2


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_progress_line_fits_the_terminal(width: int) -> None:
    throughput = Throughput()
    throughput.add(0, 0.0)
    throughput.add(50_000, 10.0)
    counts = {"total": 100_000, "completed": 40_000, "failed": 10_000}
    line = format_progress({"status": "in_progress", "request_counts": counts}, throughput, width)
    assert len(line) < width
    if width >= 80:
        assert "40,000/100,000 done, 10,000 failed, 5000.0/s, 10 s left" in line


def test_throughput_covers_the_rate_window_only() -> None:
    throughput = Throughput()
    for second in range(100):
        throughput.add(min(second, 50) * 10, float(second))
    assert throughput.per_s == 0.0
    assert [format_duration(value) for value in (5, 200, 7200, 400_000)] == ["5 s", "3 min", "2.0 h", "5 d"]
