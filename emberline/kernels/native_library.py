"""The C kernels as a library: one that came with the package and fits this processor, else one that is compiled here
once, into a cache.

Wheels bring a library for each processor level, so that a machine needs no compiler. A source tree has none, and the
sources compile in seconds. The cache key
covers everything that determines the result, so a changed processor, compiler or source never loads a stale library.
Its name can be predicted, so nothing is loaded that another user could have written: neither file nor folder.
"""

import atexit
import ctypes
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).parent / "cpu"
PREBUILT = Path(__file__).parent / "prebuilt"
FLAGS = ("-O3", "-std=gnu11", "-pthread", "-fno-strict-aliasing", "-fno-math-errno", "-fPIC", "-shared", "-Wno-psabi")


class ProcessorLevel(NamedTuple):
    """A set of instructions that a prebuilt library needs."""

    name: str  # of the library's file
    machine: str  # as `uname -m` has it
    flags: frozenset[str]  # of /proc/cpuinfo
    target: str  # the compiler's name for it: zig's -mcpu


# The best first.
LEVELS = (
    ProcessorLevel(
        "x86_64-v4-vnni",
        "x86_64",
        frozenset(
            ["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni", "avx2", "fma", "f16c", "bmi2"]
        ),
        "x86_64_v4+avx512vnni",
    ),
    ProcessorLevel("x86_64-v3", "x86_64", frozenset(["avx2", "fma", "f16c", "bmi2"]), "x86_64_v3"),
    ProcessorLevel(
        "aarch64-v8.2", "aarch64", frozenset(["asimddp", "asimdhp", "fphp"]), "generic+v8_2a+dotprod+fullfp16"
    ),
)

_log = logging.getLogger(__name__)


class BuildError(RuntimeError):
    """Says why the kernels cannot be compiled here, and how to fix it."""


def cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("EMBERLINE_KERNEL_CACHE") or Path(base) / "emberline" / "kernels")


def private_cache_dir() -> Path:
    """The cache folder, or a folder of this process if other users can write to the cache folder."""
    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if _is_private(folder):
            return folder.resolve()
    except OSError as error:
        _log.warning("no kernels are cached: %s", error)
    else:
        _log.warning("no kernels are cached: %s may be written by other users; chmod 700 makes it private", folder)
    return _process_folder()


@cache
def _process_folder() -> Path:
    try:
        folder = Path(tempfile.mkdtemp(prefix="emberline-kernels-"))
    except OSError as error:
        raise BuildError(f"the CPU kernels need a folder to be compiled into: {error}") from error
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _is_private(path: Path) -> bool:
    """True if only this user, and root, can write to a file or folder. The folders above it are not checked."""
    found = path.stat()
    return found.st_uid in (os.getuid(), 0) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_trusted(library: Path) -> bool:
    return library.is_file() and not library.is_symlink() and _is_private(library)


def compiler() -> str:
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and (path := shutil.which(name)):
            return path
    raise BuildError("no C compiler found: install gcc (or set CC) to use Emberline's fast CPU kernels")


def _target_flag() -> str:
    return "-mcpu=native" if platform.machine() == "aarch64" else "-march=native"


def _processor() -> str:
    """Description of the processor, on which -march=native depends: hosts that share a home folder may differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part", "CPU variant")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def prebuilt_path(folder: Path = PREBUILT) -> Path | None:
    """The best library of the package that this processor runs. Returns None if there is none."""
    if not folder.is_dir() or os.environ.get("EMBERLINE_KERNEL_BUILD") == "native":
        return None
    flags = set(_processor().replace("\t", " ").split())
    fitting = (level for level in LEVELS if level.machine == platform.machine() and level.flags <= flags)
    paths = (folder / f"{level.name}.so" for level in fitting)
    return next((path for path in paths if path.is_file()), None)


def library_path(target: str | None = None) -> Path:
    """Path of the library for `target`, a compiler flag (default: this processor, for which the package may have one).
    Compiles the library if missing.

    Raises BuildError if the library cannot be compiled.
    """
    if target is None and (prebuilt := prebuilt_path()) is not None:
        return prebuilt
    cc, target = compiler(), target or _target_flag()
    version = subprocess.run([cc, "--version"], capture_output=True, text=True, check=False).stdout
    key = blake2b(digest_size=12)
    for part in (version, target, *FLAGS, _processor(), *(f.read_text() for f in sorted(SOURCES.glob("*.[ch]")))):
        key.update(part.encode())
    library = private_cache_dir() / f"emberline-{key.hexdigest()}.so"
    if not _is_trusted(library):
        _compile(cc, target, library)
    return library


def _compile(cc: str, target: str, library: Path) -> None:
    try:
        with tempfile.TemporaryDirectory(dir=library.parent) as work:
            output = Path(work) / "kernels.so"
            command = [cc, *FLAGS, target, str(SOURCES / "kernels.c"), "-o", str(output), "-lm"]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode:
                raise BuildError(f"the CPU kernels did not compile with {cc}: {result.stderr.strip()[-600:]}")
            output.chmod(0o700)
            output.replace(library)  # atomic: another process never loads a partial library
    except OSError as error:
        raise BuildError(f"the CPU kernels could not be written to {library.parent}: {error}") from error


@cache
def host_library() -> ctypes.PyDLL | None:
    """Load the compiled functions that serve the step loop. Returns None if they cannot be built or loaded.

    Calls keep the interpreter's lock: they take microseconds, and to get it back could take a switch interval.
    """
    try:
        return ctypes.PyDLL(str(library_path()))
    except (BuildError, OSError) as error:
        _log.warning("%s; steps take longer, and there is no suffix decoding", error)
        return None


@cache
def load_library(target: str | None = None) -> ctypes.CDLL:
    """Load the compiled kernels. Raises BuildError or OSError if they cannot be built or loaded."""
    return ctypes.CDLL(str(library_path(target)))
