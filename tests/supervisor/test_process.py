"""A supervised process is started, restarted and stopped; small scripts are the process."""

import asyncio
import logging
import os
import signal
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from emberline.supervisor.process import ProcessFailed, ProcessSpec, SupervisedProcess, inherited_environment

READY = 'print(\'{"ready": true, "pid": %d}\' % os.getpid(), flush=True)'


@pytest.fixture
def script(tmp_path: Path) -> "ScriptMaker":
    return ScriptMaker(tmp_path)


class ScriptMaker:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(
        self, body: str, *arguments: str, env: dict[str, str] | None = None, backoff_s: float = 0.01
    ) -> SupervisedProcess:
        source = "import json, os, signal, sys, time\n" + textwrap.dedent(body)
        (self.folder / "script.py").write_text(source)
        spec = ProcessSpec(
            name="child",
            module="script",
            arguments=arguments,
            env={"PYTHONPATH": str(self.folder), **(env or {})},
            backoff_s=backoff_s,
        )
        return SupervisedProcess(spec)


async def until(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "timed out"
        await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it may end after the file was opened
        return False


async def test_ready_then_stopped_by_sigterm(script: ScriptMaker) -> None:
    child = script(f"{READY}\ntime.sleep(60)", env={"X": "1"})
    await child.start()
    await asyncio.wait_for(child.wait_ready(), 60)
    assert child.ready_line == {"ready": True, "pid": child.pid}
    pid = child.pid
    assert pid is not None
    await child.stop(grace_s=5)
    assert child.pid is None
    assert not alive(pid)


async def test_child_gets_arguments_and_environment_but_no_secrets(
    script: ScriptMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMBERLINE_AUTH_KEY", "secret")
    child = script(
        """
        print(json.dumps({"ready": True, "argv": sys.argv[1:], "x": os.environ["X"],
                          "key": os.environ.get("EMBERLINE_AUTH_KEY")}), flush=True)
        time.sleep(60)
        """,
        *("--a", "b"),
        env={"X": "1"},
    )
    await child.start()
    await asyncio.wait_for(child.wait_ready(), 60)
    assert child.ready_line == {"ready": True, "argv": ["--a", "b"], "x": "1", "key": None}
    await child.stop(grace_s=5)


def test_credentials_are_not_inherited() -> None:
    kept = {
        "PATH": "/bin",
        "PWD": "/srv",
        "EMBERLINE_LOG_LEVEL": "info",
        "TOKENIZERS_PARALLELISM": "false",
        "HTTPS_PROXY": "http://proxy:3128",
        "KEYBOARD": "de",
    }
    secret = {
        "EMBERLINE_STORE_URL": "postgresql:///emberline",
        "EMBERLINE_ENDPOINTS_MY_GPU_KEY": "k",
        "EMBERLINE_SECRET": "s",
        "OPENAI_API_KEY": "sk",
        "HF_TOKEN": "hf",
        "AWS_SECRET_ACCESS_KEY": "a",
        "PGPASSWORD": "p",
        "MYSQL_PWD": "p",
        "GOOGLE_APPLICATION_CREDENTIALS": "/key.json",
        "api_token": "t",
        "TAVILY_APIKEY": "k",
        "GITHUB_PAT": "t",
        "DATABASE_URL": "postgresql://me:pw@db/x",
    }
    assert inherited_environment({**kept, **secret}) == kept


async def test_failed_first_start_raises_with_the_log(script: ScriptMaker) -> None:
    child = script("print('no such weights: x.gguf', file=sys.stderr); sys.exit(3)")
    await child.start()
    with pytest.raises(ProcessFailed, match=r"child exited with status 3: no such weights: x\.gguf"):
        await asyncio.wait_for(child.wait_ready(), 60)
    assert child.n_restarts == 0
    await child.stop(grace_s=1)


async def test_error_of_the_ready_line_is_the_reason(script: ScriptMaker) -> None:
    child = script("print(json.dumps({'ready': False, 'error': 'no such device'}), flush=True); sys.exit(1)")
    await child.start()
    with pytest.raises(ProcessFailed, match="child exited with status 1: no such device"):
        await asyncio.wait_for(child.wait_ready(), 60)
    await child.stop(grace_s=1)


async def test_json_log_line_is_quoted_by_its_message(script: ScriptMaker) -> None:
    child = script("print(json.dumps({'level': 'error', 'message': 'out of memory'}), file=sys.stderr); os.abort()")
    await child.start()
    with pytest.raises(ProcessFailed, match="child was killed by SIGABRT: out of memory"):
        await asyncio.wait_for(child.wait_ready(), 60)
    await child.stop(grace_s=1)


async def test_crash_after_ready_restarts(script: ScriptMaker) -> None:
    child = script(f"{READY}\ntime.sleep(60)")
    await child.start()
    await asyncio.wait_for(child.wait_ready(), 60)
    first = child.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: child.ready_line.get("pid") != first and child.pid == child.ready_line["pid"])
    assert child.n_restarts == 1
    await child.stop(grace_s=5)


async def test_a_restart_that_fails_is_tried_again(script: ScriptMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    child = script(f"{READY}\ntime.sleep(60)")
    await child.start()
    await asyncio.wait_for(child.wait_ready(), 60)
    first, failures = child.pid, [OSError(11, "Resource temporarily unavailable")] * 2
    spawn = asyncio.create_subprocess_exec

    async def spawn_later(*args: object, **options: object) -> object:
        if failures:
            raise failures.pop()
        return await spawn(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", spawn_later)
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: child.ready_line.get("pid") != first and child.pid == child.ready_line["pid"])
    assert not failures
    assert child.n_restarts == 1
    await child.stop(grace_s=5)


async def test_stop_during_backoff_returns_at_once(script: ScriptMaker) -> None:
    child = script(f"{READY}\nsys.exit(1)", backoff_s=30.0)
    await child.start()
    await until(lambda: child.ready_line and child.pid is None)
    started_s = time.monotonic()
    await child.stop(grace_s=30)
    assert time.monotonic() - started_s < 25


async def test_child_ignoring_sigterm_is_killed_with_its_process_group(script: ScriptMaker) -> None:
    child = script(
        """
        import subprocess
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        grandchild = subprocess.Popen(["sleep", "60"])
        print(json.dumps({"ready": True, "grandchild": grandchild.pid}), flush=True)
        time.sleep(60)
        """
    )
    await child.start()
    await asyncio.wait_for(child.wait_ready(), 60)
    await child.stop(grace_s=0.1)
    assert child.pid is None
    await until(lambda: not alive(child.ready_line["grandchild"]))


async def test_log_lines_are_relayed(script: ScriptMaker, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    child = script(
        f"""
        print(json.dumps({{"level": "warning", "logger": "emberline.engine", "message": "low", "request_id": "r1",
                          "blocks": 3, "process": "engine"}}), file=sys.stderr)
        print("plain text", file=sys.stderr)
        print("x" * (2 << 20), file=sys.stderr)
        {READY}
        time.sleep(60)
        """
    )
    await child.start()
    await asyncio.wait_for(child.wait_ready(), 60)
    await until(lambda: {"low", "plain text"} <= {record.getMessage() for record in caplog.records})
    await child.stop(grace_s=5)
    by_message = {record.getMessage(): record for record in caplog.records}
    assert by_message["low"].levelname == "WARNING"
    assert by_message["low"].name == "emberline.engine"
    assert vars(by_message["low"])["request_id"] == "r1"
    assert vars(by_message["low"])["blocks"] == 3
    assert vars(by_message["low"])["process_name"] == "child"
    assert by_message["plain text"].levelname == "INFO"
