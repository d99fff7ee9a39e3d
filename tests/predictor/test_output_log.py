"""The log of a predictor: the secrets that it never has."""

import fcntl
import json
import os
import shutil
import threading
import tracemalloc
from pathlib import Path

import pytest

from emberline.predictor.output_log import END_BYTES, MAX_LINE_BYTES, OutputLog, last_lines

KEY = "-----BEGIN KEY-----\nMIIEvQIBADANBg\nkqhkiG9w0BAQ\n-----END KEY-----\n"
ACCOUNT = '{"id": "x", "token": "a\\"b\nc"}'


@pytest.mark.parametrize(
    ("secrets", "printed", "parts"),
    [
        (("tell-nobody", "tell-nobody-123"), "it is tell-nobody-123", ("tell-nobody", "123")),
        ((KEY,), f"the key:\n{KEY}", ("MIIEvQIBADANBg", "kqhkiG9w0BAQ")),
        ((KEY,), json.dumps({"fields": {"error": KEY}}), ("MIIEvQIBADANBg", "kqhkiG9w0BAQ")),
        ((ACCOUNT,), json.dumps({"fields": {"error": ACCOUNT}}), ("token", "id")),
        ((ACCOUNT,), f"ValueError: {ACCOUNT!r}", ("token", "id")),
        (("tell-nobody",), "x" * (MAX_LINE_BYTES - 4) + "tell-nobody", ("tell", "nobody")),
    ],
)
def test_secrets_are_hidden_however_they_are_printed(
    secrets: tuple[str, ...], printed: str, parts: tuple[str, ...], tmp_path: Path
) -> None:
    log = OutputLog(tmp_path / "log", secrets)
    os.write(log.descriptor, printed.encode() + b"\nthe end")
    log.close_writer()
    log.close(10.0)
    found = (tmp_path / "log").read_text()
    assert not [part for part in parts if part in found], found[-500:]
    assert "**********" in found
    assert found.endswith("the end\n")
    assert log.last_line == "the end"


def test_workers_that_write_one_log_lose_no_recent_lines(tmp_path: Path) -> None:
    path, written = tmp_path / "log", list[str]()
    workers = [OutputLog(path, max_bytes=100) for _ in range(2)]
    for number in range(40):
        written.append(f"line {number:02}".ljust(5 + number % 4 * 15, "."))
        workers[number // 3 % 2].add(written[-1])  # each a few lines, then the other: either may find the file full
        kept = last_lines(path, 40)
        assert kept == written[-len(kept) :]
        assert len(kept) >= min(number + 1, 3), "the file before is kept until this one is full"
    for worker in workers:
        worker.close_writer()
        worker.close(10.0)
    assert sum(each.stat().st_size for each in tmp_path.iterdir()) <= 200


def test_a_worker_waits_for_another_that_rotates(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = OutputLog(path, max_bytes=20)
    log.add("fills the file")
    writing = threading.Thread(target=log.add, args=("of this worker",))
    with path.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        writing.start()
        writing.join(0.1)
        assert writing.is_alive(), "the other has the lock"
        path.rename(f"{path}.1")
        path.write_text("x\n")
    writing.join(10.0)
    log.close_writer()
    log.close(10.0)
    assert last_lines(path, 9) == ["fills the file", "x", "of this worker"]


def test_output_is_read_on_after_the_log_was_removed(tmp_path: Path) -> None:
    log = OutputLog(tmp_path / "logs" / "log", max_bytes=100)
    shutil.rmtree(tmp_path / "logs")
    os.write(log.descriptor, b"a line\n" * 50 + b"the end\n")
    log.close_writer()
    log.close(10.0)
    assert log.last_line == "the end"


def test_the_end_of_a_log_is_read_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert last_lines(path, 2) == []
    log = OutputLog(path, max_bytes=100)
    for number in range(10):
        log.add(f"line {number} of 20 bytes")
    log.close_writer()
    log.close(10.0)
    assert (tmp_path / "log.1").exists(), "the lines are in two files"
    assert len(path.read_text().splitlines()) < 7
    assert last_lines(path, 7) == [f"line {number} of 20 bytes" for number in range(3, 10)]
    assert last_lines(path, 5, max_bytes=30) == ["f 20 bytes", "line 9 of 20 bytes"]
    with path.open("wb") as file:
        file.truncate(64 << 20)
        file.seek(0, os.SEEK_END)
        file.write(b"\n\xff end\n")
    tracemalloc.start()
    try:
        lines = last_lines(path, 2)
        assert tracemalloc.get_traced_memory()[1] < 8 * END_BYTES
    finally:
        tracemalloc.stop()
    assert lines[1] == "\N{REPLACEMENT CHARACTER} end"
    assert sum(map(len, lines)) < END_BYTES
