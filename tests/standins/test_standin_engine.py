"""The stand-in engine as a process: protocol, scripts and faults; and what every engine process has in common."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from emberline.engine.addresses import PARENT_VARIABLE
from emberline.protocol.frames import Abort, Drain
from tests.engine.client import Client, engine, start, wait_until
from tests.engine.fakes import request

STANDIN = "standins.standin_engine"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with engine(STANDIN, "--socket", tmp_path_factory.mktemp("standin") / "a.sock", "--eos-ids", 2) as (_, address):
        yield address


def test_needs_no_torch():
    check = f"import sys, {STANDIN}; assert not {{'torch', 'numpy.testing'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_scripted_tokens(address):
    with Client(address) as client:
        client.submit(
            request("echo", [7, 2, 8], max_tokens=9, ignore_eos=False),
            request("count", [7], max_tokens=4, session="standin:say=count"),
            request("ids", [7], max_tokens=9, ignore_eos=False, session="standin:say=40.41"),
        )
        client.finish("echo", "count", "ids")
        assert client.tokens("echo") == [7, 8, 2]
        assert client.tokens("count") == [0, 1, 3, 4]
        assert client.tokens("ids") == [40, 41, 2]
        assert client.deltas["echo"][-1].finish == "stop"


def test_cached_tokens_are_counted(address):
    with Client(address) as client:
        prompt = list(range(100, 150))
        client.submit(request("one", prompt, max_tokens=20))
        client.finish("one")
        client.submit(request("two", prompt + client.tokens("one") + [9], max_tokens=2))
        client.finish("two")
        assert client.deltas["two"][0].usage.cached_by_tier == {"device": 64}


def test_scripted_latency(address):
    with Client(address) as client:
        began = time.monotonic()
        client.submit(request("a", [1, 3, 4], max_tokens=3, session="standin:ttft_ms=80,itl_ms=30"))
        client.step()
        assert time.monotonic() - began >= 0.08
        client.finish("a")
        assert time.monotonic() - began >= 0.08 + 0.055


def test_faults_of_one_request(address):
    with Client(address) as client:
        client.submit(
            request("error", [1, 3, 4], session="standin:error_after=2"),
            request("refused", [1], session="standin:refuse=1"),
            request("wrong", [1], session="standin:nonsense=1"),
            request("fine", [1, 3, 4, 5]),
        )
        assert client.finish("error").error.kind == "internal"
        assert client.tokens("error") == [1, 3]
        assert client.finish("refused").error.kind == "overloaded"
        assert client.deltas["refused"][-1].error.retry_after_s == 1
        assert client.finish("wrong").error.kind == "bad_input"
        assert client.finish("fine").finish == "length"


def test_dropped_connection_affects_only_its_client(address):
    with Client(address) as client, Client(address) as other:
        client.submit(request("a", [1, 3, 4], session="standin:drop_after=2"))
        with pytest.raises(ConnectionError):
            client.finish("a")
        assert client.tokens("a") == [1, 3]
        other.submit(request("b", [1, 3, 4]))
        assert other.finish("b").finish == "length"


def test_scripted_exit(tmp_path):
    with engine(STANDIN, "--socket", tmp_path / "a.sock", "--script", "die_after=2") as (process, address):
        with Client(address) as client:
            client.submit(request("a", [1, 3, 4, 5]))
            with pytest.raises(ConnectionError):
                client.finish("a")
            assert client.tokens("a") == [1, 3]
        assert process.wait(60) == 1


def test_scripted_hang_ignores_sigterm(tmp_path):
    with engine(STANDIN, "--socket", tmp_path / "a.sock") as (process, address), Client(address) as client:
        client.submit(request("a", [1, 3, 4, 5], session="standin:hang_after=1"))
        client.step()
        client.sock.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.step()
        process.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)


# --- common to all engine processes -----------------------------------------------------------------------------


def test_tcp_on_a_free_port(monkeypatch):
    with engine(STANDIN, "--socket", "tcp:127.0.0.1:0") as (_, address), Client(address) as client:
        assert not address.endswith(":0")
        client.submit(request("a", [1, 3]))
        assert client.finish("a").usage.completion_tokens == 4


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_drains_and_exits_zero(tmp_path, monkeypatch, number):
    monkeypatch.setenv("EMBERLINE_LOG_LEVEL", "debug")
    path = tmp_path / "a.sock"
    with engine(STANDIN, "--socket", path, "--script", "itl_ms=20") as (process, address), Client(address) as client:
        client.submit(request("a", list(range(3, 30)), max_tokens=20), request("long", [7], max_tokens=2000))
        client.step()
        process.send_signal(number)
        wait_until(lambda: client.step().load.draining)
        client.submit(request("b", [1]))
        assert client.finish("b").error.kind == "unavailable"
        assert client.finish("a").finish == "length"
        client.send(Abort(["long"]))
        assert process.wait(60) == 0
        lines = [json.loads(line) for line in process.stderr.read().splitlines()]
        assert any(line["request_id"] == "a" and line["message"] == "finished: length" for line in lines)
    assert not path.exists()


def test_idle_engine_stops_at_once_and_second_signal_aborts(tmp_path):
    with engine(STANDIN, "--socket", tmp_path / "a.sock") as (process, address), Client(address) as client:
        client.send(Drain(30))
        assert process.wait(60) == 0
    slow = engine(STANDIN, "--socket", tmp_path / "a.sock", "--script", "itl_ms=20")
    with slow as (process, address), Client(address) as client:
        client.submit(request("a", list(range(3, 30)), max_tokens=2000))
        client.step()
        process.send_signal(signal.SIGINT)
        wait_until(lambda: client.step().load.draining)
        process.send_signal(signal.SIGINT)
        assert client.finish("a").error.kind == "unavailable"
        assert process.wait(60) == 0


def test_idle_costs_no_cpu(tmp_path):
    with engine(STANDIN, "--socket", tmp_path / "a.sock") as (process, address), Client(address) as client:
        client.submit(request("a", [1]))
        client.finish("a")

        def ticks():
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            return int(fields[11]) + int(fields[12])

        def switches():
            status = Path(f"/proc/{process.pid}/status").read_text()
            return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])

        def is_idle():
            before = ticks(), switches()
            time.sleep(0.5)
            return (ticks(), switches()) == before

        wait_until(is_idle)  # the heartbeats of other threads add up to a tick now and then


@pytest.mark.parametrize("state", ["idle", "stopped", "hanging"])
def test_engine_exits_with_its_parent(tmp_path, state):
    path = tmp_path / "a.sock"
    code = (
        "import subprocess, sys, os\n"
        f"os.environ['{PARENT_VARIABLE}'] = str(os.getpid())\n"
        f"child = subprocess.Popen([sys.executable, '-m', '{STANDIN}', '--socket', {str(path)!r}, *sys.argv[1:]])\n"
        "print(child.pid, flush=True)\n"
        "sys.stdin.read()\n"
        "os._exit(9)\n"
    )
    flags = ("--parent-gone-s", "0.2") if state == "hanging" else ()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    parent = subprocess.Popen([sys.executable, "-c", code, *flags], **pipes, text=True)
    pid = int(parent.stdout.readline())
    assert json.loads(parent.stdout.readline())["ready"]
    if state == "stopped":
        os.kill(pid, signal.SIGSTOP)
    elif state == "hanging":
        with Client(f"unix:{path}", token="") as client:
            client.submit(request("r", [7], max_tokens=4, session="standin:say=count,hang_after=1"))
            while "hangs" not in parent.stderr.readline():
                pass
    parent.stdin.close()
    parent.wait(60)
    parent.stdout.close()
    parent.stderr.close()
    wait_until(lambda: _gone(pid))
    if state == "hanging":
        assert path.exists(), "its step loop noticed that the parent is gone, so it did not hang"
    else:
        wait_until(lambda: not path.exists())


def test_a_worker_that_was_started_by_hand_outlives_its_shell(tmp_path):
    path = tmp_path / "a.sock"
    start_it = f"{sys.executable} -m {STANDIN} --socket {path} > {tmp_path}/ready 2>&1 < /dev/null & echo $!; read end"
    (tmp_path / "ready").touch()
    with subprocess.Popen(["sh", "-c", start_it], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as shell:
        pid = int(shell.stdout.readline())
        wait_until(lambda: "ready" in (tmp_path / "ready").read_text())  # the shell ends after the worker has started
    try:
        with Client(f"unix:{path}", token="") as client:
            client.submit(request("r", [7], max_tokens=1))
            client.finish("r")
    finally:
        os.kill(pid, signal.SIGTERM)
    wait_until(lambda: _gone(pid))


def _gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # it may end after the file was opened
        return True


def test_failed_start_is_reported(tmp_path):
    process, ready = start(STANDIN, "--socket", "tcp:127.0.0.1:0", token="")
    assert ready == {"ready": False, "error": ready["error"]}
    assert "EMBERLINE_WORKER_TOKEN" in ready["error"]
    assert process.wait(60) == 1
    process.communicate()
    (tmp_path / "file").write_text("not a socket")
    process, ready = start(STANDIN, "--socket", tmp_path / "file")
    assert ready["ready"] is False
    assert (tmp_path / "file").read_text() == "not a socket"
    process.communicate()
