"""llama.cpp: its own `llama-server`, compiled for this machine, on the file as it is and requantized to Q4_0.

The source is the one inside llama-cpp-python's source package: that fixes a version anyone can get with pip. Its
Python server answers one request at a time, so the C++ server in the same package is built instead. A prebuilt wheel
(`xllamacpp`) needs no compiler but is made for a common denominator of CPUs; it is a row of its own.
"""

import re
import subprocess
import tarfile
from pathlib import Path
from platform import machine

from benchmarks.contender import THREADS, Contender, Setup
from benchmarks.peers.venv import SetupFailed, ensure_venv, run
from benchmarks.process import free_port

VERSION = "0.3.36"  # of llama-cpp-python, whose source package carries llama.cpp
TOOLS = ("cmake==4.4.4", "ninja==1.13.2")
PREBUILT = "xllamacpp==2026.10.11549"
SLOT_CONTEXT = 4096  # holds a replayed session of 1,000 + 6 × (200 + 64) tokens
SINGLE_CONTEXT = 8192

_CMAKE = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)


def native(setup: Setup) -> list[Contender]:
    """Two rows: the same file, and llama.cpp's best type."""
    binaries = _build(setup)
    requantized = _requantize(setup, binaries)
    build = f"llama-cpp-python {VERSION}'s source, compiled here: {_features(binaries)}"
    return [
        _contender("llama.cpp Q4_1", build, binaries / "llama-server", setup.gguf),
        _contender("llama.cpp Q4_0", build, binaries / "llama-server", requantized),
    ]


def prebuilt(setup: Setup) -> list[Contender]:
    python = ensure_venv(setup, "xllamacpp", [PREBUILT])
    script = Path(__file__).with_name("xllamacpp_server.py")
    features = run([str(python), "-c", "import xllamacpp; print(xllamacpp.get_system_info())"], setup.cache / "x.log")

    def command(port: int, streams: int) -> list[str]:
        sizes = [str(port), str(THREADS), str(streams), str(_context(streams))]
        return [str(python), str(script), str(setup.gguf), *sizes]

    return [Contender("xllamacpp Q4_1", f"{PREBUILT}, prebuilt: {_enabled(features)}", "default", command)]


def _contender(name: str, build: str, server: Path, gguf: Path) -> Contender:
    def command(port: int, streams: int) -> list[str]:
        threads = ["--threads", str(THREADS), "--threads-batch", str(THREADS)]
        sizes = ["--parallel", str(streams), "--ctx-size", str(_context(streams))]
        return [str(server), "--model", str(gguf), "--host", "127.0.0.1", "--port", str(port), *threads, *sizes]

    return Contender(name, build, "default", command)


def _context(streams: int) -> int:
    return SINGLE_CONTEXT if streams == 1 else SLOT_CONTEXT * streams


def _build(setup: Setup) -> Path:
    """The folder of `llama-server` and `llama-quantize`, compiled once."""
    home = setup.cache / f"llama.cpp-{VERSION}"
    binaries = home / "build" / "bin"
    if (binaries / "llama-server").exists() and (binaries / "llama-quantize").exists():
        return binaries
    python = ensure_venv(setup, "build", TOOLS)
    tools = python.parent
    log = setup.cache / "llama.cpp.log"
    source = _source(setup, python, home, log)
    setup.say(f"compiling llama.cpp for this machine, 10 to 15 minutes on two cores; log: {log}")
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"]
    flags = [f"-DCMAKE_CXX_FLAGS=-include {Path(__file__).with_name('amx.h')}"] if machine() == "x86_64" else []
    run([str(tools / "cmake"), "-S", str(source), "-B", str(home / "build"), *generator, *_CMAKE, *flags], log)
    targets = ["--target", "llama-server", "llama-quantize"]
    run([str(tools / "cmake"), "--build", str(home / "build"), "--parallel", *targets], log)
    return binaries


def _source(setup: Setup, python: Path, home: Path, log: Path) -> Path:
    setup.say(f"fetching llama-cpp-python {VERSION}'s source package with pip")
    home.mkdir(parents=True, exist_ok=True)
    pip = [str(python), "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python"]
    run([*pip, "--dest", str(home), f"llama-cpp-python=={VERSION}"], log)
    archive = next(home.glob("llama_cpp_python-*.tar.gz"), None)
    if archive is None:
        raise SetupFailed(f"pip left no source package of llama-cpp-python in {home}")
    with tarfile.open(archive) as package:
        package.extractall(home, filter="data")
    return home / archive.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"


def _requantize(setup: Setup, binaries: Path) -> Path:
    """The file in Q4_0, llama.cpp's fastest type where it has repacked kernels."""
    stem = re.sub(r"[._-]Q4_1$", "", setup.gguf.stem, flags=re.IGNORECASE)
    target = setup.cache / f"{stem}.requantized.Q4_0.gguf"
    if not target.exists():
        partial = target.with_suffix(".part")
        command = [str(binaries / "llama-quantize"), "--allow-requantize", str(setup.gguf), str(partial), "Q4_0"]
        run([*command, str(THREADS)], setup.cache / "llama.cpp.log")
        partial.rename(target)
    return target


def _features(binaries: Path) -> str:
    """What the build was compiled for, as the server prints it on its way to a model that is not there."""
    command = [
        str(binaries / "llama-server"),
        "--log-verbosity",
        "4",
        "--model",
        "/nonexistent",
        "--port",
        str(free_port()),
    ]
    said = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=30)
    return _enabled(said.stdout)


def _enabled(system_info: str) -> str:
    """`AVX = 1 | AVX512 = 0 | …` without what is off."""
    return " ".join(re.findall(r"\b([A-Z][A-Z0-9_]+) = 1\b", system_info)) or "features unknown"
