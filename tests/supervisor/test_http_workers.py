"""The HTTP worker for large requests starts with the first connection; small scripts are the worker."""

import asyncio
import os
import textwrap
from pathlib import Path

import pytest

from emberline.supervisor import http_workers, process
from emberline.supervisor.http_workers import LargeRequestWorker
from tests.supervisor.test_process import until

# Answers every connection with its plan and its process id; a line of the plan may make it fail.
WORKER = """
    import argparse, os, socket, sys, time
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int)
    parser.add_argument("--name")
    plan = sys.stdin.read()
    if "broken" in plan and not os.path.exists("mended"):
        sys.exit(3)
    listener = socket.socket(fileno=parser.parse_args().fd)
    listener.setblocking(True)
    print('{"ready": true}', flush=True)
    while True:
        connection, _ = listener.accept()
        asked = connection.recv(100)
        if "silent" in plan and asked.startswith(b"GET"):
            time.sleep(600)
        connection.sendall(f"{plan} {os.getpid()}".encode())
        connection.close()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "worker_script.py").write_text(textwrap.dedent(WORKER))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(process, "MIN_BACKOFF_S", 0.01)
    return tmp_path


async def ask(folder: Path) -> list[str]:
    reader, writer = await asyncio.open_unix_connection(str(folder / "large.sock"))
    writer.write(b"x")
    try:
        return (await asyncio.wait_for(reader.read(), 60)).decode().split()
    except ConnectionResetError:
        return []
    finally:
        writer.close()


async def test_the_first_connection_starts_it(folder: Path) -> None:
    worker = LargeRequestWorker(folder / "large.sock", "worker_script", b"secret")
    worker.start()
    assert worker.process is None
    assert (folder / "large.sock").stat().st_mode & 0o777 == 0o600
    answers = await asyncio.gather(*(ask(folder) for _ in range(3)))
    assert worker.process is not None
    assert answers == [["secret", str(worker.process.pid)]] * 3
    worker.process.kill("a test")
    await until(lambda: worker.process is not None and worker.process.n_restarts)
    plan, _ = await ask(folder)
    assert plan == "secret"  # again, from the pipe
    await worker.stop(5)
    with pytest.raises(ConnectionRefusedError):
        await ask(folder)


async def test_one_that_does_not_start_refuses_and_is_tried_again(folder: Path) -> None:
    worker = LargeRequestWorker(folder / "large.sock", "worker_script", b"broken")
    worker.start()
    assert await ask(folder) == []
    (folder / "mended").touch()
    plan, _ = await ask(folder)
    assert plan == "broken"
    await worker.stop(5)


async def test_one_that_does_not_answer_is_killed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_workers, "PING_INTERVAL_S", 0.01)
    monkeypatch.setattr(http_workers, "PING_TIMEOUT_S", 0.2)
    worker = LargeRequestWorker(folder / "large.sock", "worker_script", b"silent")
    worker.start()
    await ask(folder)
    await until(lambda: worker.process is not None and worker.process.n_restarts)
    await worker.stop(5)
