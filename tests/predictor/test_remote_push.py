"""Pushes over HTTP: off by default, archives of files alone, a quota of all models."""

import gzip
import io
import lzma
import random
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from emberline.config import PredictorsConfig
from emberline.predictor.fetch import locked
from emberline.predictor.remote_push import RemotePushes, pack, unpack
from emberline.predictor.versions import PredictorVersions
from emberline.protocol.errors import BadInput, Forbidden, TooLarge
from emberline.protocol.prediction import Resources, read_resources
from tests.predictor.conftest import write_project

SOURCE = "class Runner:\n    def run(self, a: str) -> str:\n        return a\n"
ALLOWED = PredictorsConfig(remote_push="admins")


def archive_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for member, content in members:
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type, found.linkname = kind, link
    return found


def test_a_project_is_packed_without_what_is_left_out(tmp_path: Path) -> None:
    folder = write_project(tmp_path / "p", SOURCE)
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("x")
    (folder / "start").write_text("#!/bin/sh")
    (folder / "start").chmod(0o700)
    unpack(pack(folder), tmp_path / "q", 1 << 20)
    assert sorted(path.name for path in (tmp_path / "q").iterdir()) == ["cog.yaml", "run.py", "start"]
    assert (tmp_path / "q" / "start").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "q" / "run.py").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    "hostile",
    [
        member("../escape"),
        member("/etc/escape"),
        member("a/../../escape"),
        member("link", tarfile.SYMTYPE, "/etc/passwd"),
        member("hard", tarfile.LNKTYPE, "/etc/passwd"),
        member("device", tarfile.CHRTYPE),
        member("pipe", tarfile.FIFOTYPE),
    ],
)
def test_archives_have_files_and_folders_alone(hostile: tarfile.TarInfo, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no file or folder inside of it"):
        unpack(archive_of((hostile, b"")), tmp_path / "q", 1 << 20)
    assert not (tmp_path / "escape").exists()


def test_bytes_that_are_no_archive(tmp_path: Path) -> None:
    packed = pack(write_project(tmp_path / "p", SOURCE))
    whole = lzma.compress(archive_of((member("a"), random.Random(0).randbytes(1 << 18).hex().encode())))
    broken = whole[: len(whole) // 2] + bytes(100) + whole[len(whole) // 2 + 100 :]
    for data in (b"", b"x" * 2000, packed[:60], broken):
        with pytest.raises(BadInput, match="is not a tar archive"):
            unpack(data, tmp_path / "q", 1 << 20)


def test_an_archive_that_grows_takes_little_memory(tmp_path: Path) -> None:
    n_bytes = 64 << 20
    file, header = member("a"), member("a", tarfile.XHDTYPE)
    file.size = header.size = n_bytes
    content = gzip.compress(bytes(n_bytes), 1)
    tracemalloc.start()
    try:
        unpack(gzip.compress(file.tobuf()) + content, tmp_path / "q", 2 * n_bytes)
        with pytest.raises(BadInput, match="header of 64 MiB"):
            unpack(gzip.compress(header.tobuf()) + content, tmp_path / "r", 2 * n_bytes)
        assert tracemalloc.get_traced_memory()[1] < n_bytes // 4
    finally:
        tracemalloc.stop()
    assert (tmp_path / "q" / "a").stat().st_size == n_bytes


def test_it_is_off_by_default_and_has_a_quota(versions_of_nothing: PredictorVersions, tmp_path: Path) -> None:
    archive = archive_of((member("cog.yaml"), b"x" * (2 << 20)))
    with pytest.raises(Forbidden, match="remote_push"):
        RemotePushes(tmp_path, PredictorsConfig(), versions_of_nothing).push(archive, "x", Resources())
    small = PredictorsConfig(remote_push="admins", max_bytes=1 << 20)
    with pytest.raises(TooLarge, match="1 MiB more on this server"):
        RemotePushes(tmp_path, small, versions_of_nothing).push(archive, "x", Resources())
    with pytest.raises(TooLarge, match="1,000 bytes more on this server"):
        unpack(archive, tmp_path / "rest", 1000)
    with pytest.raises(BadInput, match="is not a Cog project"):
        RemotePushes(tmp_path, ALLOWED, versions_of_nothing).push(archive_of((member("a"), b"")), "x", Resources())


@pytest.mark.slow
def test_a_push_over_http_is_a_version(versions: PredictorVersions, tmp_path: Path) -> None:
    pushes = RemotePushes(tmp_path / "home", ALLOWED, versions)
    pushed = pushes.push(pack(write_project(tmp_path / "p", SOURCE)), "thing", Resources())
    assert (pushed.id, pushed.version) == ("@me/thing", 1)
    assert [each.version for each in versions.list("@me/thing")] == [1]


def test_a_push_that_was_killed_takes_no_quota(versions_of_nothing: PredictorVersions) -> None:
    root = versions_of_nothing.root
    for folder in (root / "killed", root / "running"):
        (folder / ".push-1" / "src").mkdir(parents=True)
        (folder / ".push-1" / "src" / "weights").write_bytes(bytes(1000))
        (folder / ".lock").touch()
    with locked(root / "running"):
        assert versions_of_nothing.used_bytes() == 1000
    assert not (root / "killed" / ".push-1").exists()
    assert (root / "running" / ".push-1").exists()


def test_messages_have_no_paths_of_the_server(versions_of_nothing: PredictorVersions, tmp_path: Path) -> None:
    pushes = RemotePushes(tmp_path, ALLOWED, versions_of_nothing)
    configs = b"", b"a: [", b"[]", b'run: "gone.py:Runner"', b"x" * (2 << 20), b"a: &a [*a]", b'train: "train.py:train"'
    for config in configs:
        with pytest.raises(BadInput) as found:
            pushes.push(archive_of((member("cog.yaml"), config)), "x", Resources())
        assert "/" not in found.value.message, config


def test_bounds_come_from_the_query() -> None:
    assert read_resources({"name": "x", "cpus": "2", "memory_bytes": "1024"}) == Resources(cpus=2.0, memory_bytes=1024)
    wrongs = ({"cpus": "0"}, {"cpus": "many"}, {"memory_bytes": "-1"}, {"cpus": "nan"}, {"predict_s": "inf"})
    for wrong in (*wrongs, {"memory_bytes": "1" + "0" * 20}, {"setup_s": "1e10"}):
        with pytest.raises(BadInput):
            read_resources(wrong)


@pytest.fixture
def versions_of_nothing(tmp_path: Path) -> PredictorVersions:
    return PredictorVersions(tmp_path / "home")
