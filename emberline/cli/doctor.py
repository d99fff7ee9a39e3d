"""`emberline doctor`: checks this machine and says how to fix what is wrong.

Each check examines one thing and never raises; its status is ok, warn or fail, with the remedy.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from emberline.cli import common
from emberline.cli import http_client as client
from emberline.cli.common import format_size
from emberline.config import FILE_NAME, Config, ConfigError, needs_keys
from emberline.engine.memory import free_host_bytes
from emberline.protocol.errors import EmberlineError
from emberline.server.address import ServerAddress
from emberline.supervisor import machine

if TYPE_CHECKING:
    from emberline.catalog.model_store import ModelEntry, ModelStore

MIN_PYTHON = (3, 11)
TORCH_RANGE = ((2, 11), (2, 14))  # from, and below
NEED_DISK_BYTES = 1 << 30
NEED_MEMORY_BYTES = 1 << 30
GPU_PROBE = (sys.executable, "-m", "emberline.engine.planning.gpu_check")
GPUS_LIMIT_S = 420.0  # of all checks of GPUs; a minute is usual
_TORCH_PROBE = """
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({"version": torch.__version__, "cuda": cuda,
                  "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else []}))
"""
NOT_INSTALLED = "not installed"
_MARKS = {"ok": ("✓", "\x1b[32m"), "warn": ("!", "\x1b[33m"), "fail": ("✗", "\x1b[31m")}


class DoctorCheck(msgspec.Struct, frozen=True):
    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    fix: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "also check every GPU: kernels against their references, bandwidth, peer access and NCCL between every two"
    parser.add_argument("--gpus", action="store_true", help=text)
    common.add_client_options(parser)


def run(args: argparse.Namespace) -> int:
    """Exit status 1 when a check fails."""
    config: Config | None
    try:
        config = common.config_of(args)
        first = DoctorCheck("configuration", "ok", f"{config.home}, {ServerAddress.of(config).url}")
    except ConfigError as error:
        config, first = None, DoctorCheck("configuration", "fail", error.message, "correct or remove that key")
    checks = []
    for check in chain([first], examine(config), gpus() if args.gpus else ()):
        checks.append(check)
        if not args.json:
            _print(check)
    failed = any(check.status == "fail" for check in checks)
    if args.json:
        common.print_json({"ok": not failed, "checks": msgspec.to_builtins(checks)})
    return 1 if failed else 0


def _print(check: DoctorCheck) -> None:
    mark, color = _MARKS[check.status]
    label = f"{color}{mark} {check.status:<4}\x1b[0m" if sys.stdout.isatty() else f"{mark} {check.status:<4}"
    print(f"{label}  {check.name:<14} {check.detail}")
    if check.fix:
        print(f"{'':<8}{'':<14} → {check.fix}")


def examine(config: Config | None) -> Iterator[DoctorCheck]:
    """Every check; without a valid configuration, only those that do not need one."""
    yield python()
    torch = _probe_torch()
    n_gpus = machine.n_gpus_installed()
    yield torch_version(torch, n_gpus)
    yield gpu(torch, n_gpus)
    yield compiler()
    yield pip()
    yield memory()
    if config is not None:
        yield data_folder(config)
        yield disk(config)
        yield key(config)
        yield from models(config)
        yield port(config)


def python() -> DoctorCheck:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < MIN_PYTHON:
        return DoctorCheck("python", "fail", f"{version} is too old", "install Python 3.11 or newer and set up again")
    return DoctorCheck("python", "ok", f"{version} ({sys.executable})")


def _probe_torch() -> dict[str, Any] | str:
    """Version and devices of torch, or why it cannot be imported. In a separate process: a broken torch may crash."""
    if importlib.util.find_spec("torch") is None:
        return NOT_INSTALLED
    probe = [sys.executable, "-c", _TORCH_PROBE]
    try:
        done = subprocess.run(probe, capture_output=True, text=True, timeout=120, check=False)
        report: dict[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return "importing it takes more than two minutes"
    except ValueError:
        lines = done.stderr.strip().splitlines()
        return lines[-1] if lines else f"importing it ends the process (status {done.returncode})"
    return report


def torch_version(torch: dict[str, Any] | str, n_gpus: int = 0) -> DoctorCheck:
    install = f"{sys.executable} -m pip install torch==2.13.0"
    if torch == NOT_INSTALLED and not n_gpus:
        uses = "embeddings, reranking, `plan`, draft heads and models without CPU kernels need it"
        return DoctorCheck("torch", "ok", f"{NOT_INSTALLED}; {uses}")
    if isinstance(torch, str):
        return DoctorCheck("torch", "fail", torch, install)
    low, high = TORCH_RANGE
    release = tuple(int(part) for part in torch["version"].split("+")[0].split(".")[:2])
    if not low <= release < high:
        return DoctorCheck("torch", "fail", f"{torch['version']} is not supported (2.11 to 2.13)", install)
    return DoctorCheck("torch", "ok", str(torch["version"]))


def gpu(torch: dict[str, Any] | str, n_installed: int) -> DoctorCheck:
    if isinstance(torch, dict) and torch["gpus"]:
        return DoctorCheck("gpu", "ok", ", ".join(torch["gpus"]))
    if n_installed:
        return DoctorCheck(
            "gpu",
            "warn",
            f"{n_installed} in this machine, but torch cannot use CUDA",
            "install a CUDA build of torch, or a driver new enough for it; until then the CPU is used",
        )
    return DoctorCheck("gpu", "ok", f"none; the CPU's {machine.cores()} cores are used")


def gpus(probe: Sequence[str] = GPU_PROBE, limit_s: float = GPUS_LIMIT_S) -> Iterator[DoctorCheck]:
    """Check every GPU in a process of its own: a broken driver may crash it, or hang."""
    try:
        done = subprocess.run(probe, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        problem = f"the checks took more than {limit_s:.0f} s"
        yield DoctorCheck("gpus", "fail", problem, "a GPU or its driver hangs: see `nvidia-smi` and `dmesg`")
        return
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    for line in lines:
        yield msgspec.json.decode(line, type=DoctorCheck)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        yield DoctorCheck(
            "gpus", "fail", f"the checks ended early: {last}", "`nvidia-smi` shows whether the driver works"
        )


def compiler() -> DoctorCheck:
    from emberline.kernels import native_library

    try:
        library = native_library.library_path()
    except native_library.BuildError as error:
        return DoctorCheck(
            "cpu kernels",
            "warn",
            f"{error}; the slower PyTorch path is used, if PyTorch is installed",
            "install a C compiler (Debian, Ubuntu: apt install gcc libc6-dev)",
        )
    origin = "of the package" if library.parent == native_library.PREBUILT else "compiled"
    return DoctorCheck("cpu kernels", "ok", f"{origin}, {library}")


def pip() -> DoctorCheck:
    done = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, text=True, check=False)
    if done.returncode:
        return DoctorCheck(
            "pip",
            "warn",
            "not installed; `emberline pull` needs it for the built-in models, which are wheels",
            f"{sys.executable} -m ensurepip",
        )
    return DoctorCheck("pip", "ok", " ".join(done.stdout.split()[:2]))


def memory() -> DoctorCheck:
    free = free_host_bytes()
    detail = f"{format_size(free)} free"
    if free < NEED_MEMORY_BYTES:
        return DoctorCheck("memory", "warn", detail, "free some, or use a smaller KV cache: --kv-bytes 128M")
    return DoctorCheck("memory", "ok", detail)


def data_folder(config: Config) -> DoctorCheck:
    home = config.home
    existing = next(path for path in (home, *home.parents) if path.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        return DoctorCheck(
            "data folder",
            "fail",
            f"{existing} is not writable",
            "make it writable for this user, or use --data-dir DIR",
        )
    if not home.exists():
        return DoctorCheck("data folder", "ok", f"{home}, created at the first start")
    if home.stat().st_mode & 0o022:
        return DoctorCheck("data folder", "warn", f"others may write to {home}", f"chmod 700 {home}")
    exposed = [path for path in _private_files(config) if path.exists() and path.stat().st_mode & 0o077]
    if exposed:
        names = " ".join(map(str, exposed))
        return DoctorCheck("data folder", "warn", f"others may read {names}", f"chmod 600 {names}")
    return DoctorCheck("data folder", "ok", str(home))


def _private_files(config: Config) -> list[Path]:
    files = [config.home / "secret"]
    return [*files, config.home / FILE_NAME] if config.auth.key and "EMBERLINE_AUTH_KEY" not in os.environ else files


def disk(config: Config) -> DoctorCheck:
    existing = next(path for path in (config.home, *config.home.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < NEED_DISK_BYTES:
        return DoctorCheck(
            "disk", "warn", f"{format_size(free)} free at {existing}", "make room, or move the data: --data-dir DIR"
        )
    return DoctorCheck("disk", "ok", f"{format_size(free)} free")


def key(config: Config) -> DoctorCheck:
    if not needs_keys(config):
        return DoctorCheck("key", "ok", "none needed; the server is reachable from this machine only")
    admin = "an admin key is set" if config.auth.key else "no admin key"
    return DoctorCheck("key", "ok", f"clients of {config.server.host} need an API key; {admin}")


def models(config: Config) -> Iterator[DoctorCheck]:
    """One check per installed model: whether its files are intact."""
    from emberline.catalog.model_store import ModelStore

    store = ModelStore(config.home)
    entries = store.entries()
    if not entries:
        yield DoctorCheck("models", "ok", "none yet; `emberline serve` downloads the default one")
    for entry in entries:
        name, problem = entry.card.id, _damage(entry, store)
        if problem:
            again = f"emberline rm {name} && emberline pull {entry.card.aliases[0] if entry.card.aliases else name}"
            yield DoctorCheck("models", "fail", f"{name}: {problem}", again)
        else:
            yield DoctorCheck("models", "ok", f"{name}, {format_size(entry.card.weight_bytes)}")


def _damage(entry: "ModelEntry", store: "ModelStore") -> str:
    """Describe the damage to a model's files; empty if there is none. Files that were pulled are hashed."""
    from emberline.catalog.model_card import describe_path
    from emberline.cli.models import load_text

    folder, files = store.folder(entry.card.id), store.pulled_files(entry.card)
    try:
        for name, sha256 in files.items():
            with (folder / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                    return f"{folder / name} differs from what was pulled"
        if not files and describe_path(entry.path).fingerprint != entry.card.fingerprint:
            return f"{entry.path} differs from what was pulled"
        load_text(entry)
    except (OSError, EmberlineError) as error:
        return str(error)
    return ""


def port(config: Config, probe_timeout_s: float = client.PROBE_TIMEOUT_S) -> DoctorCheck:
    address = ServerAddress.of(config)
    if client.is_running(address, probe_timeout_s):
        return DoctorCheck("port", "ok", f"an Emberline server runs at {address.url}")
    with socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.server.host.strip("[]"), config.server.port))
        except OSError as error:
            reason = f"cannot listen at {config.server.host}:{config.server.port}: {error.strerror}"
            return DoctorCheck("port", "fail", reason, "stop what uses it, or choose another: --port 8687")
    return DoctorCheck("port", "ok", f"{config.server.port} is free")
