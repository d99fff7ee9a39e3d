"""A worker of the real server is stopped in the middle of streams: they go on elsewhere, and it is replaced."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

N_STREAMS = 4
MOVED_WITHIN_S = 12.0
BODY = {"model": "smollm2", "max_tokens": 80, "ignore_eos": True, "temperature": 0, "stream": True}


@pytest.fixture
def ready(smollm2: Path, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The ready line of a server with two workers."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / smollm2.parent.name).symlink_to(smollm2.parent)
    command = [sys.executable, "-m", "emberline.cli.main", "serve", "--port", "0", "--json", "--replicas", "2"]
    process = subprocess.Popen(
        [*command, "--kv-bytes", "64M", "--threads", "1", "--deterministic"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "EMBERLINE_HOME": str(tmp_path)},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the server did not start; its log is above"
    yield json.loads(line)
    process.terminate()
    assert process.wait(60) == 0


class Stream(threading.Thread):
    """One streamed chat; when each piece of its text came."""

    def __init__(self, url: str, n: int) -> None:
        super().__init__()
        self.text = ""
        self.times_s: list[float] = []
        self._url = url
        self._body = {**BODY, "messages": [{"role": "user", "content": f"{n} is a number. Tell me about it."}]}
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", f"{self._url}/v1/chat/completions", json=self._body, timeout=120) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        self.text += choice["delta"].get("content") or ""
                        self.times_s.append(time.monotonic())

    @property
    def longest_gap_s(self) -> float:
        return max(after - before for before, after in zip(self.times_s, self.times_s[1:], strict=False))


def engines_of(url: str) -> list[dict[str, Any]]:
    return list(httpx.get(f"{url}/api/ps", timeout=60).json()["engines"])


def wait_until(condition: Any, limit_s: float) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.05)


@pytest.mark.slow  # tests/service/test_standin.py stops a stand-in engine
def test_streams_of_a_stopped_worker_move_within_seconds_and_it_is_restarted(ready: dict[str, Any]) -> None:
    url = ready["url"]
    alone = []
    for n in range(N_STREAMS):
        stream = Stream(url, n)
        stream.join()
        alone.append(stream.text)
    streams = [Stream(url, n) for n in range(N_STREAMS)]
    wait_until(lambda: all(stream.times_s for stream in streams), 120)
    stopped = next(engine["name"] for engine in engines_of(url) if engine["in_flight"])
    pid = ready["workers"][int(stopped.rpartition("-")[2])]["pid"]
    os.kill(pid, signal.SIGSTOP)
    for stream in streams:
        stream.join()
    assert [stream.text for stream in streams] == alone
    assert max(stream.longest_gap_s for stream in streams) < MOVED_WITHIN_S
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), 120)  # it was killed
    wait_until(lambda: all(engine["ok"] for engine in engines_of(url)), 120)
