"""Start, memory and first word on a CPU, Emberline and llama.cpp in turn, same file: `python -m benchmarks.cold_start`.

- start: from the command until the first answer, of one token, has arrived over HTTP; files are in the page cache
- CPU: what all processes had used by then, which other work on the machine hardly changes
- memory: proportional set size (PSS) of all processes after an answer of 16 tokens
- first word: from the command of the CLI until the first text on its standard output, no server running

Figures are medians over the rounds. llama.cpp is that of the `xllamacpp` wheel, its CLI a script over the same library.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks import emberline_contender
from benchmarks.contender import THREADS, Contender, Setup
from benchmarks.peers import llama_cpp
from benchmarks.process import Process, cpu_s, ended_by_sigterm, free_port

PROMPT = "Say hello."
TARGETS = {"start": 1.7, "PSS": 1.5, "first word": 2.0}
UNITS = {"start": "s", "CPU": "s", "PSS": "MiB", "first word": "s"}
READY_S = 300.0


class Program(NamedTuple):
    """A server and the CLI of the same program."""

    server: Contender
    cli: Sequence[str]
    env: Mapping[str, str]


def ask(port: int, model: str, max_tokens: int) -> None:
    """Ask once. Raises OSError while the server does not answer."""
    messages = [{"role": "user", "content": PROMPT}]
    body = {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
    headers = {"content-type": "application/json"}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    with urllib.request.urlopen(
        urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=READY_S
    ) as answer:
        answer.read()


def serve(program: Program, log: Path) -> dict[str, float]:
    """Start a server, ask it and stop it."""
    port = free_port()
    with Process(program.server.command(port, 1), log, program.env) as process:
        until(lambda: ask(port, program.server.model, 1), process)
        found = {"start": time.perf_counter() - process.started_at}
        found["CPU"] = sum(map(cpu_s, process.tree()))
        ask(port, program.server.model, 16)
        found["PSS"] = process.pss_bytes() / 2**20
    return found


def until(attempt: Callable[[], None], process: Process) -> None:
    """Repeat an attempt until it succeeds."""
    end_s = time.perf_counter() + READY_S
    while True:
        process.check()
        try:
            return attempt()
        except OSError:
            if time.perf_counter() > end_s:
                raise
            time.sleep(0.01)


def first_word_s(program: Program, log: Path) -> float:
    """Seconds until the CLI prints the first text of its answer."""
    began_s = time.perf_counter()
    with log.open("ab") as sink:
        process = subprocess.Popen(
            program.cli,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=sink,
            env={**os.environ, **program.env},
        )
        assert process.stdout is not None
        while not (text := os.read(process.stdout.fileno(), 4096)).strip():
            assert text, f"{program.cli[0]} printed nothing; see {log}"
        took_s = time.perf_counter() - began_s
        process.stdout.read()
        assert process.wait() == 0
    return took_s


def emberline(setup: Setup) -> Program:
    server = emberline_contender.contender(setup)
    data = str(setup.cache / "emberline-data")
    cli = [sys.executable, "-m", "emberline.cli.main", "run", server.model, PROMPT, "--max-tokens", "8"]
    config = {
        "EMBERLINE_HOME": data,
        "EMBERLINE_ENGINE_THREADS": str(THREADS),
        "EMBERLINE_SERVER_PORT": str(free_port()),
    }
    return Program(server, cli, config)


def llama(setup: Setup) -> Program:
    [server] = llama_cpp.prebuilt(setup)
    python = server.command(0, 1)[0]
    script = Path(llama_cpp.__file__).with_name("xllamacpp_cli.py")
    cli = [python, str(script), str(setup.gguf), str(THREADS), str(llama_cpp.SINGLE_CONTEXT), "8", PROMPT]
    return Program(server, cli, {})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cold_start", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gguf", type=Path, help="the model (default: the catalog's default model)")
    parser.add_argument(
        "--cache", type=Path, default=Path(".cache/bench"), help="environments and data of the programs"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every single figure")
    args = parser.parse_args(argv)
    ended_by_sigterm()
    gguf = args.gguf or emberline_contender.default_gguf()
    setup = Setup(gguf, args.cache.resolve(), lambda text: print(text, file=sys.stderr))
    setup.cache.mkdir(parents=True, exist_ok=True)
    # Python keeps its bytecode, as it does for users, whatever the caller's environment says.
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(setup.cache / "bytecode")}
    programs = {"Emberline": emberline(setup), "llama.cpp": llama(setup)}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in programs}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds + 1):
            for name, program in programs.items():
                log = Path(folder) / f"{name}.log"
                figures = {**serve(program, log), "first word": first_word_s(program, log)}
                if number:  # the first round fills caches
                    found[name].append(figures)
    for name, program in programs.items():
        print(f"{name}: {program.server.build}")
    print(f"\n| median of {args.rounds} | Emberline | llama.cpp | ratio | target |\n|---|---|---|---|---|")
    for figure, unit in UNITS.items():
        ours, theirs = (median(each[figure] for each in found[name]) for name in programs)
        target = f"≤ {TARGETS[figure]}" if figure in TARGETS else "–"
        print(f"| {figure}, {unit} | {ours:.2f} | {theirs:.2f} | {ours / theirs:.2f} | {target} |")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
