"""Environments of predictors, shared by all versions with the same lock: wheels alone, whose installing runs no code.

The first step resolves the requirements to exact versions with hashes, the second installs exactly those. A package may
leave code that runs when an interpreter starts: from then on, the environment's interpreter starts in the sandbox only.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from emberline.protocol.errors import BadInput, Unavailable, Unsupported

COG = "cog==0.23.1"  # Cog's server, the only version that is tested here
RESOLVE_S, INSTALL_S = 600.0, 1800.0
STAGING = ".building-"  # of an environment whose requirements are resolved; its name goes on
_PROBE = "import json, sys; print(json.dumps([sys.version_info[:2], sys.base_prefix, sys.executable]))"


class Interpreter(NamedTuple):
    path: str
    version: str  # "3.11"
    prefix: str  # the folder that it was installed into


class Environment(NamedTuple):
    """A built environment."""

    key: str
    interpreter: str
    folders: tuple[str, ...]  # that a program needs to see


def find_interpreter(version: str, beside: Path = Path(sys.base_prefix).parent) -> Interpreter:
    """An interpreter of that version on this machine; empty: our own. `beside`: the folder with other interpreters in
    folders of their own, as pyenv and uv install them. Raises Unsupported by name."""
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    candidates = [os.path.join(sys.base_prefix, "bin", f"python{own}")] if version in ("", own) else []
    candidates += [found for name in [f"python{version or own}"] if (found := shutil.which(name))]
    candidates += sorted(map(str, beside.glob(f"*/bin/python{version or own}")), reverse=True)
    if uv := shutil.which("uv"):
        asked = subprocess.run([uv, "python", "find", version or own], capture_output=True, text=True, check=False)
        candidates += [asked.stdout.strip()] if asked.returncode == 0 else []
    for candidate in candidates:
        try:
            probed = subprocess.run([candidate, "-I", "-c", _PROBE], capture_output=True, text=True, timeout=30)
            (major, minor), prefix, path = json.loads(probed.stdout)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            continue
        if f"{major}.{minor}" == (version or own):
            return Interpreter(os.path.realpath(path), f"{major}.{minor}", os.path.realpath(prefix))
    raise Unsupported(
        f"the project wants Python {version}, which is not on this machine: install it (`uv python install {version}`),"
        f" or set `build.python_version` to {own}",
        param="python_version",
    )


def build(
    root: Path, requirements: Sequence[str], python: str, on_line: Callable[[str], None] = lambda line: None
) -> Environment:
    """The environment of these requirements, built if no version had them before. Blocks, for minutes at worst.

    Raises BadInput for what cannot be resolved to wheels."""
    interpreter = find_interpreter(python)
    root.mkdir(parents=True, exist_ok=True)
    with _lock(root), tempfile.TemporaryDirectory(dir=root, prefix=STAGING) as staging:
        on_line(f"resolving {len(requirements)} requirements for Python {interpreter.version}")
        lock = _resolve(Path(staging), interpreter, [*requirements, COG])
        key = hashlib.sha256(f"{interpreter}\n{sys.platform}\n{lock}".encode()).hexdigest()[:32]
        folder = root / key
        if not (folder / "lock.txt").exists():
            on_line(f"installing {len(lock.splitlines())} packages")
            _install(folder, interpreter, lock)
    return Environment(key, str(folder / "bin" / "python"), (str(folder), interpreter.prefix))


def remove_unused(root: Path, used: Collection[str]) -> None:
    """Remove the environments that no version uses."""
    if root.is_dir():
        with _lock(root):
            for folder in root.iterdir():
                if (folder / "lock.txt").exists() and str(folder) not in used:
                    shutil.rmtree(folder, ignore_errors=True)


def _resolve(staging: Path, interpreter: Interpreter, requirements: Sequence[str]) -> str:
    """Lines of a lock file: every package with its version and hash."""
    wanted, report = staging / "requirements.txt", staging / "report.json"
    wanted.write_text("\n".join(requirements) + "\n")
    _make_empty(staging / "env", interpreter)
    _pip(
        staging / "env",
        ["install", "--dry-run", "--ignore-installed", "--report", str(report), "--requirement", str(wanted)],
        RESOLVE_S,
    )
    found: dict[str, Any] = json.loads(report.read_text())
    return "\n".join(sorted(_locked(item) for item in found["install"])) + "\n"


def _locked(item: dict[str, Any]) -> str:
    name, version = item["metadata"]["name"], item["metadata"]["version"]
    info = item["download_info"]
    digest = (info.get("archive_info", {}).get("hashes") or {}).get("sha256")
    if digest is None:
        digest = hashlib.sha256(Path(info["url"].removeprefix("file://")).read_bytes()).hexdigest()
    return f"{name}=={version} --hash=sha256:{digest}"


def _install(folder: Path, interpreter: Interpreter, lock: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _make_empty(folder, interpreter)
    unverified = folder / "lock.partial"
    unverified.write_text(lock)
    _pip(folder, ["install", "--require-hashes", "--no-deps", "--requirement", str(unverified)], INSTALL_S)
    link = folder / "bin" / "python"
    assert link.exists()
    _compile(folder, interpreter)
    unverified.rename(folder / "lock.txt")


def _compile(folder: Path, interpreter: Interpreter) -> None:
    """Compile the packages, which are read-only later: else every start of the predictor would compile them anew.

    The compiler runs without the environment's `site`, so that no code of a package does."""
    command = [interpreter.path, "-I", "-S", "-m", "compileall", "-q", "-j", "1", str(folder / "lib")]
    subprocess.run(command, capture_output=True, check=False, timeout=INSTALL_S)  # some packages have broken files


def _make_empty(folder: Path, interpreter: Interpreter) -> None:
    command = [interpreter.path, "-I", "-m", "venv", "--without-pip", "--symlinks", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"no environment can be made with Python {interpreter.version}; is its `venv` installed?")


def _pip(folder: Path, arguments: Sequence[str], limit_s: float) -> None:
    """Run our pip for the environment in `folder`."""
    command = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), *arguments]
    command += ["--only-binary", ":all:", "--no-input", "--quiet", "--disable-pip-version-check", "--no-compile"]
    command = [each for each in command if each != "--no-compile" or "--dry-run" not in arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"pip did not end within {limit_s:g} s") from None
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines()[-3:]
        why = " ".join(errors).replace(f"{folder.parent}/", "")  # callers do not learn our paths
        raise BadInput(
            f"the requirements cannot be installed from wheels: {why[-800:]}. Name versions that have wheels for this "
            "Python and processor, or another `build.python_version`",
            param="python_requirements",
        )


@contextmanager
def _lock(root: Path) -> Iterator[None]:
    """Exclusive among all processes that build environments there."""
    with (root / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
