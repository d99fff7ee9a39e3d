"""How much code one streamed chat token crosses: `python -m benchmarks.token_path [--part PART] [--list] [--json]`.

Functions of the package that are called while a request is answered are recorded. Their source lines, docstrings and
comments included, are what one has to read to follow it; the number of lines and of the files that hold them is the
result. Three parts:

server  `emberline serve` with one engine worker and the default model. Both processes record a chat completion (OpenAI
        API, streamed, no tools): the whole request, from its first byte to its last event, and a token alone, from the
        engine's step to the event that carries it, in the middle of a stream.
core    the core's event loop alone, for a local, a relayed and a gateway request (`benchmarks.core_calls`)
gpu     a decode token in the engine's step loop over the GPU runner, on a device that computes nothing

Functions that were not called in each of several windows are work in the background and do not count. Neither do
start-up, the first request (it fills caches), other packages, and module-level statements such as struct definitions.
"""

import argparse
import ast
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

Calls = set[tuple[str, int]]  # path and first line of functions

REPOSITORY = Path(__file__).parent.parent
PACKAGE = REPOSITORY / "emberline"
WAIT_S = 120.0
REQUESTS = 5
WARM_STEPS = 20  # of the step loop, before a token is recorded
FIRST_EVENT, LAST_EVENT = 4, 8  # between which a token alone is recorded: briefly, as timers of the background run, too
LONG_REPLY = 160  # tokens, so that a client that a busy machine delays still reads those events in the middle
BODY = {
    "model": "smollm2",
    "stream": True,
    "max_tokens": 32,
    "ignore_eos": True,
    "temperature": 0,
    "messages": [{"role": "user", "content": "Name a color."}],
}

# Names of the variables that reach every process of the server. The supervisor passes a variable on to a child process
# unless its name looks like a credential's, as one with the word TOKEN does.
FOLDER_VARIABLE, PACKAGE_VARIABLE = "CALL_RECORDER_FOLDER", "CALL_RECORDER_PACKAGE"
# Put on the path of every process of the server. A function is recorded while the file `on` exists; what was recorded
# is written by the first call after it has gone. A window is named by the time at which its file was made.
RECORDER = f"""
import os, sys, threading
folder, package = os.environ["{FOLDER_VARIABLE}"], os.environ["{PACKAGE_VARIABLE}"]
flag, seen = os.path.join(folder, "on"), set()
def record(frame, event, argument):
    if event != "call" or not frame.f_code.co_filename.startswith(package):
        return
    try:
        seen.add((os.stat(flag).st_mtime_ns, frame.f_code.co_filename, frame.f_code.co_firstlineno))
    except OSError:
        if seen:
            found = "".join(f"{{window}}\\t{{path}}\\t{{line}}\\n" for window, path, line in list(seen))
            seen.clear()
            with open(os.path.join(folder, f"{{os.getpid()}}-{{threading.get_ident()}}.calls"), "a") as file:
                file.write(found)
sys.setprofile(record)
threading.setprofile(record)
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="only this one (repeatable)")
    parser.add_argument("--list", action="store_true", help="print every file with its lines")
    parser.add_argument("--json", action="store_true", help="print JSON alone")
    options = parser.parse_args(argv)
    paths: dict[str, dict[str, int]] = {}
    for part in options.part or PARTS:
        paths |= {name: lines_by_file(calls) for name, calls in PARTS[part]().items()}
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


# --- the server ------------------------------------------------------------------------------------------------------


def recorder_environment(folder: Path) -> dict[str, str]:
    """The environment of a server whose processes record their calls in `folder`."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(folder), str(REPOSITORY))),
        FOLDER_VARIABLE: str(folder),
        PACKAGE_VARIABLE: str(PACKAGE),
        "EMBERLINE_HOME": os.environ.get("EMBERLINE_HOME", str(folder / "home")),
    }


def server_calls() -> dict[str, Calls]:
    """Functions that both processes of a server call, for a whole request and for a token."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(RECORDER)
        command = [sys.executable, "-m", "emberline.cli.main", "serve", "--port", "0", "--json", "--kv-bytes", "64M"]
        command += ["--log-level", "warning"]
        environment = recorder_environment(folder)
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


def windows(folder: Path, record: Callable[[], None]) -> Calls:
    """Functions that were called in each of several windows."""
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
    body = BODY if events is None else BODY | {"max_tokens": LONG_REPLY}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode())
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
    """Send a request and read its reply to the end."""
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(BODY).encode())
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        assert answer.read().endswith(b"data: [DONE]\n\n")


def read_calls(folder: Path, n_processes: int) -> Calls:
    """Wait until every process has written its windows; functions that were called in all of them."""
    deadline = time.monotonic() + WAIT_S
    while len({path.name.partition("-")[0] for path in folder.glob("*.calls")}) < n_processes:
        assert time.monotonic() < deadline, "a process recorded nothing"
        time.sleep(0.1)
    time.sleep(1.0)  # threads that write a little later
    windows: dict[str, Calls] = {}
    for path in folder.glob("*.calls"):
        for window, file, line in (row.split("\t") for row in path.read_text().splitlines()):
            windows.setdefault(window, set()).add((file, int(line)))
    assert len(windows) == REQUESTS
    return set.intersection(*windows.values())


# --- in this process --------------------------------------------------------------------------------------------------


def core_calls() -> dict[str, Calls]:
    """Functions that the core's event loop calls for one request of each kind."""
    from benchmarks.core_calls import request_profiles
    from benchmarks.emberline_contender import default_gguf
    from emberline.text.text_model import TextModel

    with tempfile.TemporaryDirectory() as folder:
        profiles = asyncio.run(request_profiles(TextModel.load(default_gguf()), Path(folder)))
    return {
        f"core's event loop, a {name} request": profiles[name].functions for name in ("local", "relayed", "gateway")
    }


def gpu_calls() -> dict[str, Calls]:
    """Functions that the step loop calls for a decode token of one sequence over the GPU runner."""
    from benchmarks.draft_steps import Device, open_loop, submit

    loop, runner = open_loop(1, Device(step_s=0.0))
    submit(loop, runner, "0", prompt=range(1, 100), reply=range(1, 100))
    for _ in range(WARM_STEPS):
        loop.step(time.monotonic())
    recorded = []
    for _ in range(REQUESTS):
        calls: Calls = set()

        def record(frame: FrameType, event: str, argument: Any, calls: Calls = calls) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
                calls.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

        sys.setprofile(record)
        try:
            deltas = loop.step(time.monotonic())
        finally:
            sys.setprofile(None)
        assert [len(delta.token_ids) // 4 for delta in deltas] == [1], "a decode step makes one token"
        recorded.append(calls)
    return {"step loop and GPU runner, a decode token": set.intersection(*recorded)}


PARTS: dict[str, Callable[[], dict[str, Calls]]] = {"server": server_calls, "core": core_calls, "gpu": gpu_calls}


# --- lines ------------------------------------------------------------------------------------------------------------


def lines_by_file(calls: Calls) -> dict[str, int]:
    """The number of lines of each file that belong to functions that were called."""
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
