"""A real HTTP worker of `emberline serve --http-workers 2` is stopped with SIGSTOP, in the middle of streams."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from standins.openai_script import ServerScript
from standins.standin_openai import StandinServer

PATIENCE_S = 120.0
N_STREAMS = 8
CONFIG = """
[server]
drain_timeout_s = 0
[[endpoints]]
name = "far"
kind = "openai"
url = "{url}"
models = ["far"]
"""
ASKED = {"model": "far", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100_000, "stream": True}


class Stream:
    """A streamed request that is read until its connection ends."""

    def __init__(self, url: str) -> None:
        self.n_lines = 0
        self.reading = asyncio.create_task(self._read(url))

    async def _read(self, url: str) -> None:
        async with (
            httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client,
            client.stream("POST", "/v1/chat/completions", json=ASKED) as answer,
        ):
            async for _ in answer.aiter_lines():
                self.n_lines += 1


def http_workers(core_pid: int) -> dict[int, int]:
    """Process ids of the core's HTTP workers, with their numbers of open files."""
    children = Path(f"/proc/{core_pid}/task/{core_pid}/children").read_text().split()
    found = [
        int(pid) for pid in children if b"emberline.server.http_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return {pid: len(os.listdir(f"/proc/{pid}/fd")) for pid in found}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.05)


@pytest.mark.slow  # its cheaper twin: tests/supervisor/test_http_workers.py
async def test_streams_end_and_the_worker_is_replaced(tmp_path: Path) -> None:
    standin = await StandinServer("openai", "far", ServerScript(tokens=100_000, itl_ms=100)).start()
    (tmp_path / "emberline.toml").write_text(CONFIG.format(url=standin.url))
    command = [sys.executable, "-m", "emberline.cli.main", "serve", "--port", "0", "--json", "--http-workers", "2"]
    with (tmp_path / "stderr.log").open("w") as log:
        core = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, "EMBERLINE_HOME": str(tmp_path)}
        )
    assert core.stdout is not None
    streams: list[Stream] = []
    try:
        url = json.loads(await asyncio.to_thread(core.stdout.readline))["url"]
        streams += [Stream(url) for _ in range(N_STREAMS)]
        await until(lambda: all(stream.n_lines for stream in streams))
        before = http_workers(core.pid)
        assert len(before) == 2
        stopped = max(before, key=before.__getitem__)  # it has most of the streams
        os.kill(stopped, signal.SIGSTOP)
        await until(lambda: sum(stream.reading.done() for stream in streams) >= N_STREAMS / 2)
        errors = [stream.reading.exception() for stream in streams if stream.reading.done()]
        assert all(isinstance(error, httpx.TransportError) for error in errors), errors
        await until(lambda: stopped not in (now := http_workers(core.pid)) and len(now) == 2)
        running = [stream for stream in streams if not stream.reading.done()]
        n_lines = [stream.n_lines for stream in running]
        retried = Stream(url)  # what a client does whose connection has ended
        await until(lambda: retried.n_lines > 0)
        await until(lambda: all(stream.n_lines > n for stream, n in zip(running, n_lines, strict=True)))
        streams.append(retried)
    finally:
        for stream in streams:
            stream.reading.cancel()
        await asyncio.gather(*(stream.reading for stream in streams), return_exceptions=True)
        core.terminate()
        await asyncio.to_thread(core.wait, PATIENCE_S)
        core.stdout.close()
        await standin.close()
    assert "no heartbeat for 20 s; its connections end" in (tmp_path / "stderr.log").read_text()
