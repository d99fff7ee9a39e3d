import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from emberline.accounts.usage_journal import UsageJournal
from emberline.accounts.usage_row import UsageRow
from emberline.protocol.errors import Unavailable
from tests.accounts.test_usage_ledger import ROW

KILLED = """
import asyncio, sys
from pathlib import Path
from emberline.accounts.usage_journal import UsageJournal
from tests.accounts.test_usage_journal import row

async def main():
    journal = UsageJournal(Path(sys.argv[1]))
    await asyncio.gather(*(journal.append(row(f"ended{i}")) for i in range(5)))
    await journal.checkpoint([row("cut", 1), row("ended0", 1)])
    await journal.checkpoint([row("cut", 7), row("ended0", 1)])
    print("durable", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def row(name: str, output_tokens: int = 3) -> UsageRow:
    return msgspec.structs.replace(ROW, id=name, output_tokens=output_tokens)


async def all_rows(journal: UsageJournal) -> list[UsageRow]:
    found = []
    while journal.has_rows:
        rows, position = await journal.rows()
        found += rows
        journal.forwarded(position)
    return found


async def test_rows_are_kept_in_order_until_they_are_forwarded(tmp_path: Path) -> None:
    journal = UsageJournal(tmp_path)
    assert not journal.has_rows
    await asyncio.gather(*(journal.append(row(f"r{i}")) for i in range(100)))
    rows, position = await journal.rows()
    assert [row.id for row in rows] == [f"r{i}" for i in range(100)]
    assert (await journal.rows())[0] == rows  # not forwarded yet
    await journal.append(row("late"))
    journal.forwarded(position)
    assert [row.id for row in await all_rows(journal)] == ["late"]
    assert [path.stat().st_size for path in tmp_path.glob("*.spool")] == [0]
    await journal.close()
    assert list(tmp_path.iterdir()) == []


async def test_a_killed_process_leaves_its_rows_and_the_last_checkpoint(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert await asyncio.to_thread(process.stdout.readline) == "durable\n"
    living = UsageJournal(tmp_path)
    assert not living.has_rows  # its owner lives
    process.send_signal(signal.SIGKILL)
    await asyncio.to_thread(process.wait)
    process.stdout.close()
    for spool in tmp_path.glob("*.spool"):  # as if it had died during an append
        if spool.stat().st_size:
            spool.write_bytes(spool.read_bytes() + b'{"id": "torn"')
    heir = UsageJournal(tmp_path)
    found = {}
    for adopted in await all_rows(heir):
        found.setdefault(adopted.id, adopted.output_tokens)  # the first of an id stands
    assert found == {**{f"ended{i}": 3 for i in range(5)}, "cut": 7}
    await heir.close()
    await living.close()
    assert list(tmp_path.iterdir()) == []


async def test_adopted_rows_are_durable_before_their_file_is_removed(tmp_path: Path) -> None:
    dead = UsageJournal(tmp_path)
    await dead.append(row("r"))
    os.close(dead._file)
    heir = UsageJournal(tmp_path)
    os.close(heir._file)  # it dies too, before it has forwarded anything
    last = UsageJournal(tmp_path)
    assert [found.id for found in await all_rows(last)] == ["r"]
    await last.close()


async def test_a_full_disk_is_reported_and_leaves_whole_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = UsageJournal(tmp_path)
    await journal.append(row("before"))
    write = os.pwrite

    def full(file: int, data: bytes, at: int) -> int:
        if len(data) > 20:
            return write(file, data[: len(data) - 20], at)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(Unavailable, match="cannot record usage: No space left"):
        await journal.append(row("lost"))
    monkeypatch.undo()
    await journal.append(row("after"))
    assert [found.id for found in await all_rows(journal)] == ["before", "after"]
    await journal.close()


async def test_an_unusable_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "usage").write_text("")
    with pytest.raises(Unavailable, match="cannot use"):
        UsageJournal(tmp_path / "usage")
