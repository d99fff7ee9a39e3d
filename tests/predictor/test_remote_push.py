"""Pushes over HTTP: off by default, archives of files alone, a quota of all models."""

import gzip
import io
import lzma
import random
import tarfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from emberline.catalog.model_card import pushed_id
from emberline.catalog.model_store import ModelStore
from emberline.config import PredictorsConfig
from emberline.predictor.environments import Environment
from emberline.predictor.fetch import locked
from emberline.predictor.remote_push import RemotePushes, pack, unpack
from emberline.predictor.versions import PredictorVersions
from emberline.protocol.errors import BadInput, Conflict, Forbidden, ModelNotFound, TooLarge, Unsupported
from emberline.protocol.prediction import Resources, read_resources
from tests.predictor.conftest import write_project

SOURCE = "class Runner:\n    def run(self, a: str) -> str:\n        return a\n"
ACCOUNTS = st.from_regex(r"[ABab][ABab_-]{0,5}", fullmatch=True) | st.just("")
NAMES = st.from_regex(r"[ab][ab._-]{0,5}", fullmatch=True)
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


def record(name: bytes, value: bytes) -> bytes:
    """A record of a pax header: its length, which counts its own digits, and the field."""
    rest = b" %s=%s\n" % (name, value)
    n_digits = next(n for n in range(1, 9) if len(str(len(rest) + n)) == n)
    return b"%d%s" % (len(rest) + n_digits, rest)


def pax(records: bytes, kind: bytes = tarfile.XHDTYPE) -> bytes:
    """A header that adds to the next one."""
    header = member("x", kind)
    header.size = len(records)
    return header.tobuf(tarfile.GNU_FORMAT) + records + bytes(-len(records) % tarfile.BLOCKSIZE)


def sparse(size: int) -> bytes:
    """A sparse file that claims a size."""
    header = bytearray(member("s", tarfile.GNUTYPE_SPARSE).tobuf(tarfile.GNU_FORMAT))
    header[483:495] = size.to_bytes(12, "big", signed=True)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def sized(size: int) -> bytes:
    header = member("n")
    header.size = size
    return header.tobuf(tarfile.GNU_FORMAT)


FILE = member("f").tobuf()


@pytest.mark.parametrize(
    ("hostile", "problem"),
    [
        (sparse(-(1 << 40)), "sparse file"),
        (pax(record(b"GNU.sparse.size", b"-1000")), "sparse file"),
        (pax(record(b"GNU.sparse.major", b"1") + record(b"GNU.sparse.minor", b"0")), "sparse file"),
        (pax(record(b"size", b"-9999")), "8 GiB"),
        (sized(-1024), "below 0"),
        (pax(b"2 " * (50 << 10)), "pax header that is not valid"),
        (pax(record(b"path", b"a") + b"7 path=a\n"), "pax header that is not valid"),
        (pax(record(b"path", b"a")) * 2000, "is not a tar archive"),
    ],
)
def test_no_header_changes_what_the_bounds_count(hostile: bytes, problem: str, tmp_path: Path) -> None:
    large = random.Random(0).randbytes(2 << 20)
    archive = hostile + FILE + archive_of((member("large"), large))
    began_s = time.process_time()
    with pytest.raises(BadInput, match=problem):
        unpack(archive, tmp_path / "q", 1 << 20)
    assert time.process_time() - began_s < 1
    assert not (tmp_path / "q" / "large").exists()


def test_long_headers_are_not_kept(tmp_path: Path) -> None:
    n_bytes, name = 200_000, "ü" * 60 + "b" * 40
    long = pax(record(b"comment", b"a" * n_bytes)) + pax(record(b"path", name.encode()))
    long = pax(b"l" * n_bytes, tarfile.GNUTYPE_LONGLINK) + long
    archive = lzma.compress((long + FILE) * 100, preset=0)
    tracemalloc.start()
    try:
        unpack(archive, tmp_path / "q", 1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 20 * n_bytes
    finally:
        tracemalloc.stop()
    assert [path.name for path in (tmp_path / "q").iterdir()] == [name]


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


OPEN = PredictorsConfig(remote_push="accounts", account_bytes=8 << 20)


@pytest.fixture
def pushes(tmp_path: Path) -> RemotePushes:
    """Accounts may push; the environment of every model is the same folder."""
    home = tmp_path / "home"
    shared = home / "predictors" / ".environments" / "shared"

    def build(root: Path, requirements: Sequence[str], python: str, on_line: Callable[[str], None]) -> Environment:
        (shared / "bin").mkdir(parents=True, exist_ok=True)
        for name in ("lock.txt", "bin/python"):
            (shared / name).write_text("x")
        return Environment("shared", str(shared / "bin" / "python"), (str(shared),))

    return RemotePushes(home, OPEN, PredictorVersions(home, build))


def project(tmp_path: Path, config: str = "", size: int = 0) -> bytes:
    folder = write_project(tmp_path / "project", SOURCE, config=config)
    (folder / "data").write_bytes(random.Random(0).randbytes(size))
    return pack(folder)


@pytest.mark.parametrize(("setting", "account"), [("off", ""), ("off", "alice"), ("admins", "alice")])
def test_who_may_push_is_the_operators_to_say(setting: Any, account: str, tmp_path: Path) -> None:
    pushes = RemotePushes(tmp_path, PredictorsConfig(remote_push=setting))
    acts: list[Callable[[], Any]] = [
        lambda: pushes.push(b"", "thing", Resources(), account),
        lambda: pushes.versions(account, "thing"),
        lambda: pushes.log(account, "thing", None, 1),
        lambda: pushes.roll_back(account, "thing", 1),
        lambda: pushes.remove(account, "thing"),
    ]
    for act in acts:
        with pytest.raises(Forbidden, match="remote_push"):
            act()


def test_models_of_accounts_are_their_own(pushes: RemotePushes, tmp_path: Path) -> None:
    archive, store = project(tmp_path), ModelStore(tmp_path / "home")
    for account in ("", "alice", "Alice", "alice", "bob"):
        assert pushes.push(archive, "thing", Resources(), account).id == "@me/thing"
    assert [entry.card.id for entry in store.entries()] == [
        *("@accounts/a.lice/thing", "@accounts/alice/thing", "@accounts/bob/thing", "@me/thing")
    ]
    assert [row.served for row in pushes.versions("alice", "@me/thing")] == [False, True]
    assert [row.served for row in pushes.roll_back("alice", "thing", None)] == [True, False]
    assert [row.version for row in pushes.versions("bob", "thing")] == [1]
    with pytest.raises(BadInput, match="no version before 1"):
        pushes.roll_back("bob", "thing", None)
    with pytest.raises(ModelNotFound, match="no version 2"):
        pushes.roll_back("bob", "thing", 2)
    for name in ("../bob/thing", "@accounts/bob/thing", "bob/thing", ""):
        with pytest.raises(BadInput, match="cannot be a model's name"):
            pushes.remove("alice", name)
    pushes.remove("alice", "thing")
    with pytest.raises(ModelNotFound, match="no model @me/thing was pushed here"):
        pushes.versions("alice", "thing")
    left = [entry.card.id for entry in store.entries()]
    assert left == ["@accounts/a.lice/thing", "@accounts/bob/thing", "@me/thing"]
    environment = tmp_path / "home" / "predictors" / ".environments" / "shared"
    for account in ("", "Alice", "bob"):
        assert environment.exists(), "others use it"
        pushes.remove(account, "thing")
    assert not environment.exists()


def test_an_account_has_a_quota_and_bounds(pushes: RemotePushes, tmp_path: Path) -> None:
    for number in range(2):
        pushes.push(project(tmp_path, size=3 << 20), f"thing-{number}", Resources(), "alice")
    with pytest.raises(TooLarge, match=r"more on this server \(\[predictors\] account_bytes\)"):
        pushes.push(project(tmp_path, size=3 << 20), "thing-2", Resources(), "alice")
    pushes.push(project(tmp_path, size=3 << 20), "thing-0", Resources(), "bob")
    pushes.remove("alice", "thing-0")
    pushes.push(project(tmp_path, size=3 << 20), "thing-2", Resources(), "alice")
    for wrong in (Resources(memory_bytes=4 << 30), Resources(cpus=2), Resources(predict_s=1e5)):
        with pytest.raises(Forbidden, match="of an account's model is at most"):
            pushes.push(project(tmp_path), "large", wrong, "alice")
        pushes.push(project(tmp_path), "large", wrong)
    with pytest.raises(Forbidden, match="no GPU"):
        pushes.push(project(tmp_path, "build:\n  gpu: true\n"), "fast", Resources(), "bob")


def test_a_push_that_runs_keeps_its_packages(tmp_path: Path) -> None:
    """Whatever others remove meanwhile, in this process or another; and its account starts no other push."""
    home = tmp_path / "home"
    shared = home / "predictors" / ".environments" / "shared"
    elsewhere = RemotePushes(home, OPEN)
    seen: list[bool] = []

    def build(root: Path, requirements: Sequence[str], python: str, on_line: Callable[[str], None]) -> Environment:
        (shared / "bin").mkdir(parents=True, exist_ok=True)
        for name in ("lock.txt", "bin/python"):
            (shared / name).write_text("x")
        if seen:
            with pytest.raises(Conflict, match="another push of this account"):
                elsewhere.push(archive, "other", Resources(), "alice")
            elsewhere.remove("bob", "thing")
        seen.append(shared.exists())
        return Environment("shared", str(shared / "bin" / "python"), (str(shared),))

    pushes, archive = RemotePushes(home, OPEN, PredictorVersions(home, build)), project(tmp_path)
    for account in ("bob", "alice"):
        pushes.push(archive, "thing", Resources(), account)
    assert seen == [True, True]
    pushes.remove("alice", "thing")
    assert not shared.exists()


def test_packages_count_in_the_quota_of_an_account(tmp_path: Path) -> None:
    home = tmp_path / "home"
    shared = home / "predictors" / ".environments" / "shared"

    def build(root: Path, requirements: Sequence[str], python: str, on_line: Callable[[str], None]) -> Environment:
        shared.mkdir(parents=True)
        (shared / "lock.txt").write_bytes(bytes(9 << 20))
        return Environment("shared", str(shared / "lock.txt"), (str(shared),))

    pushes = RemotePushes(home, OPEN, PredictorVersions(home, build))
    with pytest.raises(TooLarge, match=r"would take 9,[0-9,]+ bytes with their packages and weights, of the 8 MiB"):
        pushes.push(project(tmp_path), "thing", Resources(), "alice")
    assert ModelStore(home).entries() == []
    assert not shared.exists()
    weights = "weights:\n  - name: w\n    target: /src/w\n    source:\n      uri: hf://org/name\n"
    with pytest.raises(Unsupported, match="was not granted"):
        pushes.push(project(tmp_path, weights), "thing", Resources(), "alice")
    assert not shared.exists(), "a push that fails leaves no packages"


@given(st.lists(st.tuples(ACCOUNTS, NAMES), min_size=2, max_size=2, unique=True))
@example([("a--b", "c"), ("a", "b--c")])
@example([("Alice", "x"), ("alice", "x")])
@example([("a", "x"), ("", "a--x")])
@example([("me", "x"), ("", "x")])
def test_no_two_models_of_accounts_share_a_folder(pair: list[tuple[str, str]]) -> None:
    store, versions = ModelStore(Path("/home")), PredictorVersions(Path("/home"))
    first, second = (pushed_id(*each) for each in pair)
    assert first.lower() == first
    assert first != second
    assert store.folder(first) != store.folder(second)
    assert versions.folder(first) != versions.folder(second)
