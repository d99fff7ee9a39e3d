"""A whole run of benchmarks.cpu over fake servers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import cpu, emberline_contender, report
from benchmarks.contender import Contender, Setup
from benchmarks.prompts import Prompts
from tests.benchmarks.word_server import count
from tests.engine.client import wait_until
from tests.supervisor.test_process import alive

SCRIPT = str(Path(__file__).with_name("word_server.py"))


def words(setup: Setup) -> list[Contender]:
    works = Contender("words", "0.1", "m", lambda port, streams: [sys.executable, SCRIPT, str(port)])
    broken = Contender(
        "broken", "0.1", "m", lambda port, streams: [sys.executable, "-c", "raise SystemExit('no luck')"]
    )
    return [works, broken]


@pytest.fixture
def _words_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cpu.PEERS, "words", words)
    monkeypatch.setattr(
        emberline_contender, "prompts_of", lambda gguf, seed: lambda name: Prompts([" a", " b"], count, name)
    )


@pytest.mark.usefixtures("_words_only")
def test_run_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.json"
    flags = ["--quick", "--only-peers", "--peers", "words", "--seed", "s", "--cache", str(tmp_path), "--json", str(out)]
    assert cpu.main([*flags, "--model", str(tmp_path / "m.gguf")]) == 0
    printed = capsys.readouterr().out
    assert "word_server.py" in printed  # the command line
    assert "| words " in printed
    assert "broken failed" in printed
    assert "no luck" in printed
    document = json.loads(out.read_text())
    assert document["seed"] == "s"
    figures = document["medians"]["words"]
    assert figures["memory_mb"] > 1
    assert set(report.RATIO_KEYS) <= set(figures)
    assert len(document["details"]) == 4
    assert all(detail["notes"] == [] for detail in document["details"])
    assert "broken" not in document["medians"]


def test_an_unknown_peer_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cpu.arguments(["--peers", "llama.cpp,nobody"])
    assert "nobody" in capsys.readouterr().err
    assert cpu.arguments(["--peers", ""]).peers == []


def test_sigterm_stops_the_measured_server(tmp_path: Path) -> None:
    """A measured server has its own process group: nothing else would stop it."""
    program = f"""
import asyncio, sys
from pathlib import Path
from benchmarks.process import Process, ended_by_sigterm

async def main():
    with Process([sys.executable, "-c", "import time; time.sleep(60)"], Path({str(tmp_path / "log")!r})) as server:
        print(server.pid, flush=True)
        while True:  # a signal right before the loop waits is handled when it wakes up
            await asyncio.sleep(0.1)

ended_by_sigterm()
asyncio.run(main())
"""
    root = Path(cpu.__file__).resolve().parents[1]
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=root) as bench:
        assert bench.stdout is not None
        server_pid = int(bench.stdout.readline())
        bench.terminate()
        assert bench.wait(60) != 0
    wait_until(lambda: not alive(server_pid))
