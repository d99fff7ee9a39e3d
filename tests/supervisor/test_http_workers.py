"""HTTP workers are watched, and the one for large requests starts with the first connection; scripts are workers."""

import asyncio
import contextlib
import os
import signal
import socket
import textwrap
import threading
from pathlib import Path

import pytest

from emberline.supervisor.http_workers import HttpWorkers, LargeRequestWorker
from emberline.supervisor.process import HeartbeatLimits, HeartbeatMonitor, ProcessFailed, send_heartbeats
from tests.supervisor.test_process import until

# Answers every connection with its plan and its process id; a line of the plan may make it fail.
WORKER = """
    import argparse, os, socket, sys, threading, time
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int)
    parser.add_argument("--name")
    plan = sys.stdin.read()
    if "broken" in plan and not os.path.exists("mended"):
        sys.exit(3)
    if "hangs" in plan and not os.path.exists("mended"):
        time.sleep(600)
    listener = socket.socket(fileno=parser.parse_args().fd)
    listener.setblocking(True)
    print('{"ready": true}', flush=True)

    def beat():
        while True:
            print('{"heartbeat": true}', flush=True)
            time.sleep(0.02)

    if "mute" not in plan:
        threading.Thread(target=beat, daemon=True).start()
    streams = []
    while True:
        connection, _ = listener.accept()
        connection.recv(100)
        connection.sendall(f"{plan} {os.getpid()}".encode())
        if "stream" in plan:
            streams.append(connection)
        else:
            connection.close()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "worker_script.py").write_text(textwrap.dedent(WORKER))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.chdir(tmp_path)
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
    worker = LargeRequestWorker(folder / "large.sock", "worker_script", b"secret", backoff_s=0.01)
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
    worker = LargeRequestWorker(folder / "large.sock", "worker_script", b"broken", backoff_s=0.01)
    worker.start()
    assert await ask(folder) == []
    (folder / "mended").touch()
    plan, _ = await ask(folder)
    assert plan == "broken"
    await worker.stop(5)


async def test_one_that_is_silent_once_it_is_ready_is_killed(folder: Path) -> None:
    limits = HeartbeatLimits(silent_s=0.3, check_s=0.1)
    worker = LargeRequestWorker(folder / "large.sock", "worker_script", b"mute", heartbeats=limits, backoff_s=0.01)
    worker.start()
    await ask(folder)
    await until(lambda: worker.process is not None and worker.process.n_restarts)
    await worker.stop(5)


async def test_one_that_is_stopped_is_killed(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    worker = LargeRequestWorker(
        folder / "large.sock",
        "worker_script",
        b"plan",
        heartbeats=HeartbeatLimits(silent_s=1.0, check_s=0.1),
        backoff_s=0.01,
    )
    worker.start()
    _, pid = await ask(folder)
    os.kill(int(pid), signal.SIGSTOP)
    while not (found := await ask(folder)):  # the killed process may have taken the connection with it
        pass
    assert (found[0], found[1] != pid) == ("plan", True)
    assert "killing http-large: it is stopped or hangs" in caplog.text
    await worker.stop(5)


async def test_streams_of_a_stopped_worker_end_and_others_go_on(folder: Path) -> None:
    """A client whose stream hung sees its connection end, and can retry; the other worker serves throughout."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        workers = HttpWorkers(
            2,
            listener,
            "worker_script",
            b"stream",
            heartbeats=HeartbeatLimits(silent_s=1.5, check_s=0.1),
            backoff_s=0.01,
        )
        await workers.start()
        await workers.wait_ready()
        streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
        by_pid: dict[int, list[asyncio.StreamReader]] = {}
        for reader, writer in streams:
            writer.write(b"x")
            pid = (await asyncio.wait_for(reader.read(100), 60)).decode().split()[1]
            by_pid.setdefault(int(pid), []).append(reader)
        stopped = next(iter(by_pid))
        os.kill(stopped, signal.SIGSTOP)
        for reader in by_pid[stopped]:
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), 60) == b""
        assert not any(reader.at_eof() for pid in by_pid if pid != stopped for reader in by_pid[pid])
        await until(lambda: sorted(each.n_restarts for each in workers.processes) == [0, 1])
        for _, writer in streams:
            writer.close()
        await workers.stop(0.1)


async def test_one_that_hangs_before_it_is_ready_is_killed(folder: Path) -> None:
    """The server's start fails with the reason; a restarted worker that hangs is restarted once more."""
    limits = HeartbeatLimits(silent_s=60, start_s=0.5, check_s=0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        never = HttpWorkers(1, listener, "worker_script", b"hangs", limits)
        await never.start()
        with pytest.raises(ProcessFailed, match=r"http-0 was killed by SIGKILL: .* did not start within 0.5 s"):
            await never.wait_ready()
    worker = LargeRequestWorker(folder / "large.sock", "worker_script", b"hangs", limits)
    worker.start()
    assert await ask(folder) == []
    (folder / "mended").touch()
    while not (found := await ask(folder)):  # a busy machine may not start it in time either
        pass
    assert found[0] == "hangs"
    await worker.stop(5)


async def test_heartbeats_that_nobody_reads_do_not_stop_the_event_loop() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    stuck = threading.Event()
    rescue = threading.Timer(5, lambda: (stuck.set(), os.read(reading, 1 << 20)))
    rescue.start()
    sending = asyncio.create_task(send_heartbeats(writing, interval_s=0.001))
    for _ in range(10):
        await asyncio.sleep(0.001)
    rescue.cancel()
    assert not stuck.is_set()
    assert not sending.done()
    while b"heartbeat" not in os.read(reading, 1 << 20):  # they go on once the supervisor reads again
        await asyncio.sleep(0.001)
    os.close(reading)
    await asyncio.wait_for(sending, 60)
    os.close(writing)


def silent_at(monitor: HeartbeatMonitor, times_s: range) -> list[bool]:
    return [bool(monitor.problem(float(now_s))) for now_s in times_s]


def test_silence_is_counted_from_the_start_and_from_each_heartbeat() -> None:
    monitor = HeartbeatMonitor(HeartbeatLimits(silent_s=5.0, start_s=50.0, check_s=1.0))
    assert silent_at(monitor, range(100, 151)) == [False] * 50 + [True]
    monitor.beat()
    assert silent_at(monitor, range(151, 157)) == [False] * 5 + [True]
    monitor.beat()
    assert silent_at(monitor, range(157, 158)) == [False]


def test_a_supervisor_that_was_starved_kills_nobody() -> None:
    """Its own absence counts as one check: heartbeats that were sent meanwhile lie unread."""
    monitor = HeartbeatMonitor(HeartbeatLimits(silent_s=5.0))
    monitor.beat()
    assert silent_at(monitor, range(60, 300, 60)) == [False] * 4
    monitor.beat()
    assert silent_at(monitor, range(900, 901)) == [False]
