"""The disk tier when things go wrong: it returns the bytes that were written or none, and never raises."""

import errno
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emberline.kv.retention import Retention
from emberline.kv.tiers.disk.direct_file import DirectFile
from emberline.kv.tiers.disk.disk_tier import DiskTier
from emberline.kv.tiers.disk.drive_health import DRIVE_TIMES, DriveTimes
from tests.kv.tiers.disk.disk_blocks import content, held, open_tier, read, write
from tests.kv.tiers.disk.disk_writer import N_SLOTS

NUMBERS = list(range(12))


def check_readable(tier: DiskTier, numbers: list[int] = NUMBERS) -> int:
    """How many blocks are there; whatever is returned is right."""
    found = read(tier, numbers)
    assert all(block in (None, content(n)) for n, block in zip(numbers, found))
    return sum(block is not None for block in found)


def wait_until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    until_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.005)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tier with blocks."""
    folder = tmp_path_factory.mktemp("written")
    tier = open_tier(folder, 16)
    write(tier, NUMBERS)
    tier.close()
    return folder


# --- damaged files ---------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    which=st.sampled_from(["*.blocks", "*.index", "format.json"]),
    damage=st.one_of(
        st.tuples(st.just("flip"), st.lists(st.tuples(st.floats(0, 1), st.integers(0, 7)), min_size=1, max_size=20)),
        st.tuples(st.just("truncate"), st.floats(0, 1)),
        st.tuples(st.just("overwrite"), st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=5000))),
        st.tuples(st.just("swap"), st.tuples(st.integers(0, 11), st.integers(0, 11))),
    ),
    while_open=st.booleans(),
)
def test_damaged_files(written: Path, which: str, damage: tuple[str, object], while_open: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(written, folder, dirs_exist_ok=True)
        tier = open_tier(Path(folder), 16) if while_open else None
        (path,) = Path(folder).rglob(which)
        damage_file(path, *damage)
        tier = tier or open_tier(Path(folder), 16)
        check_readable(tier)
        write(tier, NUMBERS)  # what was lost can be written again
        assert check_readable(tier) == len(NUMBERS)
        tier.purge()
        assert not path.read_bytes().strip(b"\0") or which != "*.blocks"
        tier.close()


def damage_file(path: Path, how: str, where: object) -> None:
    data = bytearray(path.read_bytes())
    if how == "flip":
        for share, bit in where:  # type: ignore[attr-defined]
            data[int(share * (len(data) - 1))] ^= 1 << bit
    elif how == "truncate":
        os.truncate(path, int(where * len(data)))  # type: ignore[operator]
        return
    elif how == "swap":  # whole slots change places: each is intact, but not where it belongs
        a, b = (n * len(data) // 12 for n in where)  # type: ignore[attr-defined]
        size = len(data) // 12
        data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]
    else:
        share, new = where  # type: ignore[misc]
        at = int(share * len(data))
        data[at : at + len(new)] = new[: len(data) - at]
    with path.open("r+b") as file:  # not replaced: a tier may have it open
        file.write(data)


def test_a_damaged_block_is_reported_once(written: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    (path,) = tmp_path.rglob("*.blocks")
    for n in range(3):
        damage_file(path, "overwrite", (n / 12 + 0.05, b"damage"))
    tier = open_tier(tmp_path, 16)
    assert check_readable(tier) == 9
    assert check_readable(tier) == 9
    assert caplog.text.count("did not verify") == 1
    assert len(held(tier, NUMBERS)) == 9
    assert tier.stats().state == "ok"
    tier.close()


@pytest.mark.parametrize("what", ["blocks", "index", "folder"])
def test_unlinked_files(tmp_path: Path, what: str, caplog) -> None:
    tier = open_tier(tmp_path, 16, times=DriveTimes(check_s=0.0))
    write(tier, NUMBERS)
    if what == "folder":
        shutil.rmtree(tmp_path / "0")
    else:
        for path in tmp_path.rglob(f"*.{what}"):
            path.unlink()
    check_readable(tier)
    write(tier, NUMBERS)
    assert check_readable(tier) == len(NUMBERS)
    assert ("starts anew" in caplog.text) == (what != "index")
    tier.close()
    again = open_tier(tmp_path, 16)
    assert check_readable(again) == (len(NUMBERS) if what != "index" else 0)
    again.close()


def test_an_order_of_removed_files_is_told_nothing_any_more(tmp_path: Path) -> None:
    tier, retention = open_tier(tmp_path, 16, times=DriveTimes(check_s=0.0)), Retention()
    tier.follow(retention)
    write(tier, NUMBERS)
    shutil.rmtree(tmp_path / "0")
    write(tier, NUMBERS)
    orders = [file.index.order for file in tier._files.values()]
    assert retention._listeners == tuple(orders)
    tier.close()


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """As root every file can be opened: the call itself refuses here."""
    real, allowed = os.open, False

    def refuse(path, *rest):
        if not allowed and str(path).startswith(str(tmp_path)):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path, *rest)

    monkeypatch.setattr(os, "open", refuse)
    now_s, pause_s = [0.0], DRIVE_TIMES.first_pause_s
    tier = open_tier(tmp_path, 16, clock=lambda: now_s[0])
    assert tier.stats().state == "degraded: Permission denied"
    write(tier, NUMBERS)
    assert (check_readable(tier), held(tier, NUMBERS)) == (0, [])
    assert caplog.text.count("out of use") == 1
    allowed = True
    write(tier, NUMBERS)
    assert held(tier, NUMBERS) == [], "not before the pause is over"
    now_s[0] += pause_s
    write(tier, NUMBERS)
    assert held(tier, NUMBERS) == NUMBERS
    assert tier.stats().state == "ok"
    tier.close()


# --- a full disk -----------------------------------------------------------------------------------------------------


def limit_space(monkeypatch: pytest.MonkeyPatch, where: str, is_full: Callable[[], bool]) -> None:
    """Let calls fail as on a full disk, while it is full."""
    real = getattr(DirectFile, where)

    def no_room(file: DirectFile, *rest: object) -> object:
        if is_full():
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, *rest)

    monkeypatch.setattr(DirectFile, where, no_room)


@pytest.mark.parametrize("where", ["allocate", "write"])
def test_full_disk(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    tier = open_tier(tmp_path, 16, times=DriveTimes(full_pause_s=-1.0), grow_bytes=1)
    write(tier, NUMBERS[:6])
    full = True
    limit_space(monkeypatch, where, lambda: full)
    write(tier, NUMBERS[6:])
    write(tier, NUMBERS[6:] if where == "write" else [])
    assert tier.stats().state == "degraded: the disk is full"
    assert caplog.text.count("is full") == 1
    assert check_readable(tier) == 6  # as many as there is room for
    assert held(tier, NUMBERS) == (NUMBERS[:6] if where == "write" else NUMBERS[6:])
    full = False
    write(tier, NUMBERS)
    assert check_readable(tier) == len(NUMBERS)
    assert tier.stats().state == "ok"
    tier.close()


def test_file_size_limit(tmp_path: Path) -> None:
    """The real error of a real call: the process may not write beyond 64 KiB."""
    script = f"""
import resource
from pathlib import Path
from tests.kv.tiers.disk.disk_blocks import *
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
tier = open_tier(Path({str(tmp_path)!r}), 64)
for n in range(10):
    write(tier, [n])
found = read(tier, list(range(10)))
assert all(block in (None, content(n)) for n, block in enumerate(found))
assert sum(block is not None for block in found) >= 4, found
assert tier.stats().state == "degraded: the disk is full"
tier.close()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


# --- a drive that fails or stalls ------------------------------------------------------------------------------------


class Gate:
    """Holds calls until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.n_waiting = 0

    def wrap(self, real: Callable[..., object]) -> Callable[..., object]:
        def held_call(*args: object) -> object:
            self.n_waiting += 1
            assert self.opened.wait(60)
            return real(*args)

        return held_call


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


@pytest.mark.parametrize("call", ["read", "write"])
def test_stall(tmp_path: Path, call: str, gate: Gate, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    caplog.set_level(logging.INFO)
    tier = open_tier(tmp_path, 16, times=DriveTimes(stall_s=0.05))
    write(tier, NUMBERS[:6])
    found: list[int] = []
    work = {"read": lambda: found.append(check_readable(tier)), "write": lambda: write(tier, NUMBERS)}[call]
    with monkeypatch.context() as patched:
        patched.setattr(DirectFile, call, gate.wrap(getattr(DirectFile, call)))
        thread = threading.Thread(target=work)
        thread.start()
        wait_until(lambda: gate.n_waiting > 0 and held(tier, NUMBERS) == [])
        assert tier.stats().state == "degraded: the drive does not answer"
        assert check_readable(tier) == 0  # at once: nobody waits for it
        gate.opened.set()
        thread.join()
    assert held(tier, NUMBERS)[:6] == NUMBERS[:6]
    assert found == ([6] if call == "read" else [])
    assert check_readable(tier) == (6 if call == "read" else 12)
    assert tier.stats().state == "ok"
    assert caplog.text.count("out of use") == 1
    tier.close()


def test_io_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    tier = open_tier(tmp_path, 16, times=DriveTimes(first_pause_s=0.01))
    write(tier, NUMBERS)

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(DirectFile, "read", broken)
        patched.setattr(DirectFile, "write", broken)
        for n in range(8):
            assert read(tier, [n]) == [None]
            write(tier, [20 + n])
    assert caplog.text.count("out of use") >= 1
    wait_until(lambda: write(tier, NUMBERS) or check_readable(tier) == len(NUMBERS))
    assert tier.stats().state == "ok"
    tier.close()


# --- kill -9 ---------------------------------------------------------------------------------------------------------


def kill_while_writing(folder: Path, seed: int) -> None:
    """Whatever moment the process dies at: the next one finds nothing but right blocks, and most of them."""
    rng = random.Random(seed)
    command = [sys.executable, "-m", "tests.kv.tiers.disk.disk_writer", str(folder), str(seed)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    last = 0
    for _ in range(rng.randint(1, 40)):
        last = int(process.stdout.readline())
    time.sleep(rng.random() * 0.01)
    process.send_signal(signal.SIGKILL)
    for line in process.stdout:
        last = int(line)
    process.wait()
    tier = open_tier(folder, N_SLOTS)
    numbers = list(range(last + 13))
    found = check_readable(tier, numbers)
    assert found >= min(last, N_SLOTS) - 24  # it dropped the victims of its last batch, and some removed ones
    tier.purge()
    assert not any(path.read_bytes().strip(b"\0") for path in folder.rglob("*.blocks"))
    tier.close()


@pytest.mark.parametrize("seed", range(3))
def test_kill_while_writing(tmp_path: Path, seed: int) -> None:
    kill_while_writing(tmp_path, seed)


@pytest.mark.slow
def test_kill_while_writing_often(tmp_path: Path) -> None:
    for seed in range(100, 300):
        kill_while_writing(tmp_path, seed)  # one folder: each process opens what the one before left
