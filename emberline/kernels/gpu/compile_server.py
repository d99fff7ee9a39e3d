# mypy: disable-error-code="no-untyped-call"
"""Compiling kernels in several processes, for the first start of a model.

Half of a compilation is Python, so threads of one process leave most cores idle. A server imports the kernels while the
engine reads its configuration, and forks a process for each compilation. It compiles for a given target, touches no
device, and leaves the result in Triton's cache on disk, where the engine's process finds it.

    engine: thread ── job ──▶ server ── fork ──▶ triton.compile ──▶ cache on disk ──▶ engine: the same call, at once
"""

import ast
import gc
import hashlib
import importlib
import logging
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

_MODULES = ("backend.triton_backend", "sampler", "decode_inputs")  # which import all others
_READY = b"ready\n"  # the server's first line, before its results
_log = logging.getLogger(__name__)
MIN_CORES = 4  # with fewer, the processes would only compete with the threads that read weights


class CompileServer:
    """A server process of `n_processes` compilations at a time. note: a file that tells that it has done its work."""

    def __init__(self, n_processes: int, note: Path | None = None) -> None:
        self._note = note
        command = [sys.executable, "-m", __name__, str(n_processes)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._began_s = time.perf_counter()
        self._ready_s = self._asked_s = self._last_s = 0.0  # since then: imported, first asked, last result
        self._compiled: dict[int, float] = {}  # seconds of each job
        self._names: dict[int, str] = {}
        self._jobs: dict[int, Future[None]] = {}
        self._lock = threading.Lock()
        self._closed = False
        threading.Thread(target=self._read_results, daemon=True).start()

    def compile(self, source: Any, target: Any, options: dict[str, Any], **more: Any) -> Any:
        """Compile a kernel of Triton or Gluon, as `triton.compile` does. Blocks, so call it on a thread."""
        import triton

        function, where = source.fn, (target.backend, target.arch, target.warp_size)
        parts = dict(source.signature), dict(source.constants), dict(source.attrs), where, dict(options)
        language = type(source).__module__, type(source).__qualname__
        self._submit((function.__module__, function.fn.__qualname__, language, *parts)).result()
        return triton.compile(source, target=target, options=options, **more)

    def _submit(self, job: tuple[Any, ...]) -> Future[None]:
        """Submit a job. Its future ends when the result is in the cache, or the job has failed: the engine's own call
        then tells why."""
        done: Future[None] = Future()
        with self._lock:
            number = len(self._jobs)
            self._jobs[number] = done
            self._names[number] = job[1]
            self._asked_s = self._asked_s or time.perf_counter() - self._began_s
            try:
                assert self._process.stdin is not None
                self._process.stdin.write(f"{number} {job!r}\n".encode())
                self._process.stdin.flush()
            except OSError:
                self._closed = True
            if self._closed:
                done.set_result(None)
        return done

    def _read_results(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._last_s = time.perf_counter() - self._began_s
            if line == _READY:
                self._ready_s = self._last_s
                continue
            number, seconds = line.split()
            self._compiled[int(number)] = float(seconds)
            self._jobs[int(number)].set_result(None)
        with self._lock:
            self._closed = True
            for job in self._jobs.values():
                if not job.done():
                    job.set_result(None)

    def close(self) -> None:
        if self._compiled:
            times = {"server_ready_s": self._ready_s, "first_asked_s": self._asked_s, "last_s": self._last_s}
            times |= {"sum_s": sum(self._compiled.values()), "kernels": len(self._compiled)}
            longest = sorted(self._compiled, key=lambda number: -self._compiled[number])[:5]
            slow = {f"{self._names[number]} {number}": round(self._compiled[number], 2) for number in longest}
            rounded = {key: round(s, 3) for key, s in times.items()}
            _log.info("kernels were compiled in other processes", extra={**rounded, "longest_s": slow})
            if self._note is not None:
                with suppress(OSError):  # the cache cannot be written, or is gone
                    self._note.touch()
        self._process.kill()
        self._process.wait()


def hash_compiler() -> threading.Thread:
    """Compute Triton's hash of itself, a part of every kernel's key, which takes a second or two, on a thread."""

    def run() -> None:
        with suppress(ImportError):
            from triton.runtime.cache import triton_key

            triton_key()

    return _on_thread(run)


def load_driver() -> threading.Thread:
    """Load Triton's interface to the device, which a C compiler builds at first, on a thread. Once torch is there."""

    def run() -> None:
        with suppress(ImportError, RuntimeError):  # the first launch will fail again
            from triton.runtime import driver

            driver.active.get_current_device()

    return _on_thread(run)


def _on_thread(run: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def start_server(model: str) -> CompileServer | None:
    """A server, if kernels of this model were never compiled here and there are cores for it. model: its fingerprint.

    A note in Triton's cache tells, for these sources; where it is wrong, kernels are compiled by threads, or a server
    has nothing to do.
    """
    n_cores = len(os.sched_getaffinity(0))
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    facts = [model, *(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in sources)]
    note = folder / f"compiled-{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}"
    return CompileServer(n_cores, note) if n_cores >= MIN_CORES and not note.exists() else None


# --- the server's process ---------------------------------------------------------------------------------------------


def _compile(
    module: str, name: str, language: tuple[str, str], signature: Any, constants: Any, attrs: Any, where: Any,
    options: Any,
) -> None:  # fmt: skip
    """Compile one kernel. language: the class of the source, Triton's or Gluon's, by module and name."""
    import triton
    from triton.backends.compiler import GPUTarget

    function = getattr(importlib.import_module(module), name)
    source = getattr(importlib.import_module(language[0]), language[1])(function, signature, constants, attrs)
    triton.compile(source, target=GPUTarget(*where), options=options)


def _serve(jobs: IO[bytes], results: IO[bytes], n_processes: int) -> None:
    """Fork for each job, and tell its number when the process has ended, however it ended."""
    gc.disable()  # imports stay, and the forked processes, which share them, are short-lived
    hashing = hash_compiler()  # the forked processes inherit the result
    for module in _MODULES:
        importlib.import_module(f"{__package__}.{module}")
    hashing.join()
    results.write(_READY)
    results.flush()
    warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads, which hold no locks here
    writing = threading.Lock()

    def run(number: bytes, job: bytes) -> None:
        began_s = time.perf_counter()
        with suppress(OSError):  # no process more: the engine compiles this one itself
            process = os.fork()
            if process == 0:
                with suppress(BaseException):
                    _compile(*ast.literal_eval(job.decode()))
                os._exit(0)
            os.waitpid(process, 0)
        with writing:
            results.write(number + f" {time.perf_counter() - began_s:.3f}\n".encode())
            results.flush()

    with ThreadPoolExecutor(n_processes) as pool:
        for line in jobs:
            pool.submit(run, *line.split(maxsplit=1))


if __name__ == "__main__":
    # Triton prints a kernel that the assembler rejects: that must not come between the results.
    with os.fdopen(os.dup(1), "wb") as results:
        os.dup2(2, 1)
        _serve(sys.stdin.buffer, results, int(sys.argv[1]))
