"""`emberline batch` and `emberline queue` against a fake server."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from emberline.cli.batch import Throughput, format_progress
from emberline.cli.common import format_duration
from tests.cli.console import emberline

RESULTS = b'{"custom_id":"c0"}\n{"custom_id":"c1"}\n'


class FakeBatchServer(ThreadingHTTPServer):
    """A server with one batch, which advances by two requests at each poll."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.daemon_threads = True
        self.requests: list[tuple[str, str, bytes]] = []
        self.done = 0
        self.replayed: list[Any] = []

    @property
    def port(self) -> str:
        return str(self.server_address[1])

    def batch(self) -> dict[str, Any]:
        self.done = min(6, self.done + 2)
        over = self.done == 6
        counts = {"total": 6, "completed": max(0, self.done - 1), "failed": 1}
        return {
            "id": "batch_1",
            "status": "completed" if over else "in_progress",
            "request_counts": counts,
            "created_at": 1,
            "output_file_id": "file-out" if over else None,
            "error_file_id": None,
            "queue": {"position": 3, "estimated_wait_s": 200.0},
        }


class _Handler(BaseHTTPRequestHandler):
    server: FakeBatchServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        waiting = [{"model": "@cf/x/m", "account": "a", "queued": 5, "running": 2, "quarantined": 1, "age_s": 75.0}]
        dead = {"batch": "batch_1", "line": 4, "custom_id": "c4\x1b[2J", "model": "@cf/x/m"}
        bodies: dict[str, Any] = {
            "/v1/batches/batch_1": self.server.batch,
            "/v1/batches?limit=20": lambda: {"data": [self.server.batch()], "has_more": False},
            "/v1/files/file-out/content": lambda: RESULTS,
            "/api/queue": lambda: {"waiting": waiting, "n_dead": 1, "dead": [dead]},
        }
        self._answer(bodies[self.path]())

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append((self.path, self.headers["Content-Type"], raw))
        if self.path == "/v1/files":
            self._answer({"id": "file-in"})
        elif self.path == "/api/queue/replay":
            self._answer({"replayed": 1})
        else:
            self._answer(self.server.batch())

    def _answer(self, body: Any) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


@pytest.fixture
def batches() -> Iterator[FakeBatchServer]:
    server = FakeBatchServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text('{"custom_id":"c0","method":"POST","url":"/v1/completions","body":{}}\n' * 6)
    return path


def test_submit_uploads_the_file_and_prints_the_batch_id(batches: FakeBatchServer, file: Path, tmp_path: Path) -> None:
    done = emberline("batch", "submit", str(file), "--port", batches.port, home=tmp_path)
    assert (done.returncode, done.stdout) == (0, "batch_1\n")
    (path, kind, form), (_, _, body) = batches.requests
    assert (path, kind.partition(";")[0]) == ("/v1/files", "multipart/form-data")
    assert file.read_bytes() in form
    assert b'name="purpose"\r\n\r\nbatch\r\n' in form
    assert json.loads(body) == {
        "input_file_id": "file-in",
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }


def test_watch_shows_progress_until_the_end(batches: FakeBatchServer, file: Path, tmp_path: Path) -> None:
    done = emberline("batch", "submit", str(file), "--watch", "--port", batches.port, home=tmp_path)
    assert done.returncode == 0
    assert "2/6 done" in done.stderr
    assert "5 of 6 done, 1 failed" in done.stdout
    assert "emberline batch results batch_1" in done.stdout


@pytest.mark.parametrize("text", ["", "not json\n", "[1]\n"])
def test_invalid_file_is_refused_before_upload(batches: FakeBatchServer, tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    done = emberline("batch", "submit", str(path), "--port", batches.port, home=tmp_path)
    assert done.returncode == 1
    assert "bad.jsonl" in done.stderr
    assert batches.requests == []


def test_status_ls_and_json(batches: FakeBatchServer, tmp_path: Path) -> None:
    status = emberline("batch", "status", "batch_1", "--port", batches.port, home=tmp_path)
    assert "about 3 min" in status.stdout
    listed = emberline("batch", "ls", "--port", batches.port, home=tmp_path)
    assert listed.stdout.splitlines()[1].split()[:2] == ["batch_1", "in_progress"]
    plain = emberline("batch", "ls", "--json", "--port", batches.port, home=tmp_path)
    assert json.loads(plain.stdout)[0]["id"] == "batch_1"


def test_results_are_written_unchanged(batches: FakeBatchServer, tmp_path: Path) -> None:
    early = emberline("batch", "results", "batch_1", "--port", batches.port, home=tmp_path)
    assert early.returncode == 1
    assert "no answers (yet)" in early.stderr
    batches.done = 6
    out = tmp_path / "out.jsonl"
    done = emberline("batch", "results", "batch_1", "-o", str(out), "--port", batches.port, home=tmp_path)
    assert (done.returncode, out.read_bytes()) == (0, RESULTS)
    assert emberline("batch", "results", "batch_1", "--port", batches.port, home=tmp_path).stdout == RESULTS.decode()


def test_queue_and_dead_letter_queue(batches: FakeBatchServer, tmp_path: Path) -> None:
    shown = emberline("queue", "--port", batches.port, home=tmp_path).stdout
    assert shown.splitlines()[1].split() == ["m", "a", "5", "2", "1", "75", "s"]
    assert "\x1b" not in shown
    replayed = emberline("queue", "replay", "batch_1", "4", "--port", batches.port, home=tmp_path)
    assert replayed.stdout == "1 jobs returned to the queue\n"
    assert json.loads(batches.requests[-1][2]) == {"batch": "batch_1", "line": 4}
    assert emberline("queue", "replay", "--port", batches.port, home=tmp_path).returncode == 2


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_progress_line_fits_the_terminal(width: int) -> None:
    throughput = Throughput()
    throughput.add(0, 0.0)
    throughput.add(50_000, 10.0)
    counts = {"total": 100_000, "completed": 40_000, "failed": 10_000}
    line = format_progress({"status": "in_progress", "request_counts": counts}, throughput, width)
    assert len(line) < width
    if width >= 80:
        assert "50,000/100,000 done, 10,000 failed, 5000.0/s, 10 s left" in line


def test_throughput_covers_the_rate_window_only() -> None:
    throughput = Throughput()
    for second in range(100):
        throughput.add(min(second, 50) * 10, float(second))
    assert throughput.per_s == 0.0
    assert [format_duration(value) for value in (5, 200, 7200, 400_000)] == ["5 s", "3 min", "2.0 h", "5 d"]
