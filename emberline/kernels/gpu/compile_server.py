# mypy: disable-error-code="no-untyped-call"
"""Compiling kernels in several processes, for a start with an empty cache.

Half of a compilation is Python, so threads of one process leave most cores idle. A server imports the kernels while the
engine reads its configuration, and forks a process for each compilation. It compiles for a given target, touches no
device, and leaves the result in Triton's cache on disk, where the engine's process finds it.

    engine: thread ── job ──▶ server ── fork ──▶ triton.compile ──▶ cache on disk ──▶ engine: the same call, at once
"""

import ast
import importlib
import logging
import os
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

_MODULES = ("triton_backend", "sampler", "decode_inputs")  # which import all others
_log = logging.getLogger(__name__)
MIN_CORES = 4  # with fewer, the processes would only compete with the threads that read weights


class CompileServer:
    """A server process of `n_processes` compilations at a time."""

    def __init__(self, n_processes: int) -> None:
        command = [sys.executable, "-m", __name__, str(n_processes)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._began_s = time.perf_counter()
        self._times_s: list[float] = []  # since then, of each result
        self._jobs: dict[int, Future[None]] = {}
        self._lock = threading.Lock()
        self._closed = False
        threading.Thread(target=self._read_results, daemon=True).start()

    def compile(self, source: Any, target: Any, options: dict[str, Any], **more: Any) -> Any:
        """What `triton.compile` returns for a `triton.compiler.ASTSource`. Waits, so it belongs on a thread."""
        import triton

        function, where = source.fn, (target.backend, target.arch, target.warp_size)
        parts = dict(source.signature), dict(source.constants), dict(source.attrs), where, dict(options)
        self._submit((function.__module__, function.fn.__qualname__, *parts)).result()
        return triton.compile(source, target=target, options=options, **more)

    def _submit(self, job: tuple[Any, ...]) -> Future[None]:
        """Done when the result is in the cache, or the job has failed: the engine's own call then tells why."""
        done: Future[None] = Future()
        with self._lock:
            number = len(self._jobs)
            self._jobs[number] = done
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
            self._times_s.append(time.perf_counter() - self._began_s)
            self._jobs[int(line)].set_result(None)
        with self._lock:
            self._closed = True
            for job in self._jobs.values():
                if not job.done():
                    job.set_result(None)

    def close(self) -> None:
        if self._times_s:
            times = {"kernels": len(self._times_s), "first_s": self._times_s[0], "last_s": self._times_s[-1]}
            _log.info("kernels were compiled in other processes", extra={key: round(s, 3) for key, s in times.items()})
        self._process.kill()
        self._process.wait()


def hash_compiler() -> threading.Thread:
    """Compute Triton's hash of itself, a part of every kernel's key, which takes a second or two, on a thread."""

    def run() -> None:
        with suppress(ImportError):
            from triton.runtime.cache import triton_key

            triton_key()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def start_server() -> CompileServer | None:
    """A server, if there is much to compile and there are cores for it."""
    n_cores = len(os.sched_getaffinity(0))
    return CompileServer(n_cores) if n_cores >= MIN_CORES and _is_cache_empty() else None


def _is_cache_empty() -> bool:
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    return not folder.is_dir() or not any(folder.iterdir())


# --- the server's process ---------------------------------------------------------------------------------------------


def _compile(module: str, name: str, signature: Any, constants: Any, attrs: Any, where: Any, options: Any) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(module), name)
    source = ASTSource(function, signature, constants, attrs)
    triton.compile(source, target=GPUTarget(*where), options=options)


def _serve(jobs: IO[bytes], results: IO[bytes], n_processes: int) -> None:
    """Fork for each job, and tell its number when the process has ended, however it ended."""
    hashing = hash_compiler()  # the forked processes inherit the result
    for module in _MODULES:
        importlib.import_module(f"{__package__}.{module}")
    hashing.join()
    warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads, which hold no locks here
    writing = threading.Lock()

    def run(number: bytes, job: bytes) -> None:
        with suppress(OSError):  # no process more: the engine compiles this one itself
            process = os.fork()
            if process == 0:
                with suppress(BaseException):
                    _compile(*ast.literal_eval(job.decode()))
                os._exit(0)
            os.waitpid(process, 0)
        with writing:
            results.write(number + b"\n")
            results.flush()

    with ThreadPoolExecutor(n_processes) as pool:
        for line in jobs:
            pool.submit(run, *line.split(maxsplit=1))


if __name__ == "__main__":
    # Triton prints a kernel that the assembler rejects: that must not come between the results.
    with os.fdopen(os.dup(1), "wb") as results:
        os.dup2(2, 1)
        _serve(sys.stdin.buffer, results, int(sys.argv[1]))
