"""How much code one streamed chat token crosses: `python -m benchmarks.token_path [--list] [--json]`.

Method. A server with one engine worker serves the default model. Both processes record every function of the package
that is called while a chat completion (OpenAI API, streamed, no tools) is answered. The functions' source lines,
docstrings and comments included, are what one has to read to follow it; their number and the number of files that
hold them are the result. It is counted twice: for the whole request, from its first byte to its last event (validation,
chat template, tokenizing, admission, prefill, decode, finalization), and for a token alone, from the engine's step to
the event that carries it, recorded in the middle of a stream.

What was not called in each of several such requests is work in the background and does not count. Neither do start-up,
the first request (it fills caches), other packages, and module-level statements such as the definitions of the structs
that travel.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
PACKAGE = REPOSITORY / "emberline"
WAIT_S = 120.0
REQUESTS = 5
FIRST_EVENT, LAST_EVENT = 4, 24  # between which a token alone is recorded
BODY = {
    "model": "smollm2",
    "stream": True,
    "max_tokens": 32,
    "ignore_eos": True,
    "temperature": 0,
    "messages": [{"role": "user", "content": "Name a color."}],
}

# Put on the path of every process of the server. A function is recorded while the file `on` exists; what was recorded
# is written by the first call after it has gone. A window is named by the time at which its file was made.
RECORDER = """
import os, sys, threading
folder, package = os.environ["TOKEN_PATH_FOLDER"], os.environ["TOKEN_PATH_PACKAGE"]
flag, seen = os.path.join(folder, "on"), set()
def record(frame, event, argument):
    if event != "call" or not frame.f_code.co_filename.startswith(package):
        return
    try:
        seen.add((os.stat(flag).st_mtime_ns, frame.f_code.co_filename, frame.f_code.co_firstlineno))
    except OSError:
        if seen:
            found = "".join(f"{window}\\t{path}\\t{line}\\n" for window, path, line in list(seen))
            seen.clear()
            with open(os.path.join(folder, f"{os.getpid()}-{threading.get_ident()}.calls"), "a") as file:
                file.write(found)
sys.setprofile(record)
threading.setprofile(record)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print every file with its lines")
    parser.add_argument("--json", action="store_true", help="print JSON alone")
    options = parser.parse_args()
    paths = {name: lines_by_file(calls) for name, calls in recorded_calls().items()}
    if options.json:
        rows = {
            name: {"files": len(lines), "lines": sum(lines.values()), "by_file": lines} for name, lines in paths.items()
        }
        print(json.dumps(rows, indent=1))
        return
    for name, lines in paths.items():
        if options.list:
            for path, n in sorted(lines.items(), key=lambda item: -item[1]):
                print(f"{n:6} {path}")
        print(f"{name}: {sum(lines.values())} lines in {len(lines)} files")


def recorded_calls() -> dict[str, set[tuple[str, int]]]:
    """Path and first line of each function of the package that was called, for a whole request and for a token."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(RECORDER)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((name, str(REPOSITORY))),
            "TOKEN_PATH_FOLDER": name,
            "TOKEN_PATH_PACKAGE": str(PACKAGE),
            "EMBERLINE_HOME": os.environ.get("EMBERLINE_HOME", str(folder / "home")),
        }
        command = [sys.executable, "-m", "emberline.cli.main", "serve", "--port", "0", "--json", "--kv-bytes", "64M"]
        with subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                url = json.loads(server.stdout.readline())["url"]
                return {
                    "one streamed chat request": windows(folder, lambda: recorded(folder, url, None)),
                    "one token of it": windows(folder, lambda: recorded(folder, url, (FIRST_EVENT, LAST_EVENT))),
                }
            finally:
                server.terminate()


def windows(folder: Path, record: Callable[[], None]) -> set[tuple[str, int]]:
    """What was called in each of several windows."""
    for path in folder.glob("*.calls"):
        path.unlink()
    for _ in range(REQUESTS):
        record()
    return read_calls(folder, n_processes=2)


def recorded(folder: Path, url: str, events: tuple[int, int] | None) -> None:
    """Record one request, or what happens between two of its events."""
    flag = folder / "on"
    ask(url)
    if events is None:
        flag.touch()
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(BODY).encode())
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        n_events = 0
        for line in answer:
            n_events += line.startswith(b"data:")
            if events is not None and n_events == events[0] and line.startswith(b"data:"):
                flag.touch()
            if events is not None and n_events == events[1]:
                flag.unlink(missing_ok=True)
    flag.unlink(missing_ok=True)
    ask(url)  # its calls make both processes write down what they recorded


def ask(url: str) -> None:
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(BODY).encode())
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        assert answer.read().endswith(b"data: [DONE]\n\n")


def read_calls(folder: Path, n_processes: int) -> set[tuple[str, int]]:
    deadline = time.monotonic() + WAIT_S
    while len({path.name.partition("-")[0] for path in folder.glob("*.calls")}) < n_processes:
        assert time.monotonic() < deadline, "a process recorded nothing"
        time.sleep(0.1)
    time.sleep(1.0)  # threads that write a little later
    windows: dict[str, set[tuple[str, int]]] = {}
    for path in folder.glob("*.calls"):
        for window, file, line in (row.split("\t") for row in path.read_text().splitlines()):
            windows.setdefault(window, set()).add((file, int(line)))
    assert len(windows) == REQUESTS
    return set.intersection(*windows.values())


def lines_by_file(calls: set[tuple[str, int]]) -> dict[str, int]:
    """How many lines of each file belong to functions that were called."""
    found: dict[str, int] = {}
    for path in sorted({path for path, _ in calls}):
        spans = function_spans(Path(path).read_text())
        covered: set[int] = set()
        for _, first in (call for call in calls if call[0] == path):
            covered.update(spans.get(first, ()))
        if covered:
            found[str(Path(path).relative_to(REPOSITORY))] = len(covered)
    return found


def function_spans(source: str) -> dict[int, range]:
    """The lines of every function by its first line (the first decorator's, as code objects count)."""
    spans: dict[int, range] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            assert node.end_lineno is not None
            spans[first] = range(first, node.end_lineno + 1)
    return spans


if __name__ == "__main__":
    main()
