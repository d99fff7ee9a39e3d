"""Worker processes that are forked from one that has imported everything: a start takes a tenth of a second.

`python -m tests.engine.composition.forked_workers SOCKET` is that process. Each rank of a group is a fork of it, with
the command line that an operator would give it; ranks meet at a rendezvous, as if they were started by hand.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

WAIT_S = 60.0


class Forks:
    """The parent's side of the process that forks workers."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", __spec__.name if __spec__ else __name__, str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self._answers = self._ours.makefile("r")

    def start(self, folder: Path, name: str, flags: Sequence[str], env: dict[str, str]) -> "Group":
        """Start the ranks that the flags ask for, and wait until rank 0 is ready or has failed."""
        n_ranks = _value(flags, "--tp") * _value(flags, "--pp")
        shared = [*flags, *(() if "--socket" in flags else ("--socket", str(folder / name)))]
        if n_ranks > 1:
            shared += ["--rendezvous", f"unix:{folder / name}.ranks"]
        pids = []
        for rank in range(n_ranks):
            argv = [*shared, "--rank", str(rank)] if rank else shared
            pids.append(self._ask({"argv": argv, "out": str(folder / f"{name}.{rank}"), "env": env}))
        return Group(self, folder / name, pids)

    def kill(self, pids: Sequence[int]) -> None:
        """Kill workers, and wait until they are gone."""
        self._ask({"kill": list(pids)})

    def _ask(self, request: dict[str, Any]) -> int:
        self._ours.sendall(json.dumps(request).encode() + b"\n")
        return int(json.loads(self._answers.readline()))

    def close(self) -> None:
        self._answers.close()
        self._ours.close()
        self._process.wait(WAIT_S)


class Group:
    """The ranks of one worker."""

    def __init__(self, forks: Forks, path: Path, pids: list[int]) -> None:
        self._forks, self._path, self.pids = forks, path, pids

    @property
    def log(self) -> str:
        return "".join(Path(f"{self._path}.{rank}.log").read_text() for rank in range(len(self.pids)))

    def ready(self) -> dict[str, Any]:
        """Rank 0's ready line, or what it says in place of it."""
        until_s, out = time.monotonic() + WAIT_S, Path(f"{self._path}.0")
        while True:
            if out.exists() and (text := out.read_text()).endswith("\n"):
                found: dict[str, Any] = json.loads(text.splitlines()[0])
                return found
            assert time.monotonic() < until_s, f"rank 0 says nothing: {self.log}"
            time.sleep(0.01)

    def end(self) -> None:
        self._forks.kill(self.pids)


@contextlib.contextmanager
def running(
    forks: Forks, folder: Path, name: str, flags: Sequence[str], env: dict[str, str]
) -> Iterator[dict[str, Any]]:
    group = forks.start(folder, name, flags, env)
    try:
        ready = group.ready()
        assert ready.get("ready"), (ready, group.log)
        yield ready
    finally:
        group.end()


def _value(flags: Sequence[str], name: str) -> int:
    return int(flags[list(flags).index(name) + 1]) if name in flags else 1


# --- the process that forks -------------------------------------------------------------------------------------------


def serve(connection: socket.socket) -> None:
    import torch  # noqa: F401

    import emberline.engine.ranks.opening
    import emberline.engine.runners.cpu.torch_runner
    import emberline.engine.training.eagle_training
    import emberline.models.draft_head
    import emberline.models.draft_model
    import emberline.models.eagle3_files
    import emberline.models.registry  # noqa: F401
    from emberline.engine.worker.main import main

    for line in connection.makefile("r"):
        request = json.loads(line)
        if "kill" in request:
            for pid in request["kill"]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
            connection.sendall(b"0\n")
        elif pid := os.fork():
            connection.sendall(b"%d\n" % pid)
        else:
            connection.close()
            os.environ.update(request["env"])
            for descriptor, path in ((1, request["out"]), (2, request["out"] + ".log")):
                opened = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
                os.dup2(opened, descriptor)
                os.close(opened)
            os._exit(main(request["argv"]))


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
