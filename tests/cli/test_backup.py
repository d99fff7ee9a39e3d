"""Backups are taken while the store is written to, hold everything durable, and are restored whole or not at all."""

import asyncio
import fcntl
import os
import stat
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from emberline.accounts.account_service import AccountService
from emberline.accounts.audit_log import Actor
from emberline.accounts.secret import Secret
from emberline.accounts.usage_ledger import UsageLedger
from emberline.cli.backup import back_up, restore, verify
from emberline.cli.main import main
from emberline.config import Config, StoreConfig, resolve
from emberline.jobs.batches.blobs import BlobStore
from emberline.protocol.errors import BadInput, Conflict, EmberlineError, Unavailable
from emberline.protocol.price import Price
from emberline.store import Database, open_store
from tests.accounts.test_usage_ledger import ROW
from tests.databases import DatabaseLocation, drop_schema, make_schema


def config_of(home: Path, url: str) -> Config:
    config = resolve(environ={}, home=home)
    return msgspec.structs.replace(config, store=StoreConfig(url=url))


@pytest.fixture
async def empty_url(database: DatabaseLocation, request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """Another database, of the same kind."""
    if database.kind == "sqlite":
        yield ""
        return
    server = request.getfixturevalue("postgres")
    url = await make_schema(server)
    yield url
    await drop_schema(server, url)


async def write_rows(store: Database, first: int, stop: asyncio.Event) -> int:
    """Rows one after the other, until `stop`; their number."""
    ledger, n = UsageLedger(store), first
    while not stop.is_set():
        await ledger.record(msgspec.structs.replace(ROW, id=f"r{n}", cost_pico=n))
        n += 1
    return n


async def test_a_backup_under_load_is_restored(database: DatabaseLocation, empty_url: str, tmp_path: Path) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    url = "" if database.kind == "sqlite" else database.where
    home.mkdir()
    (home / "emberline.toml").write_text("[server]\nport = 4711\n")
    config = config_of(home, url)
    store = await open_store(url or home / "emberline.db")
    accounts = AccountService(store, Secret.open(home))
    await accounts.prices.set("m", Price(input=1), "admin", Actor("me"))
    blob = await BlobStore(home / "blobs").put(b"x" * 100_000)
    (home / "cards").mkdir()
    (home / "cards" / "m.toml").write_text("# a card\n")
    (home / "usage").mkdir()
    (home / "usage" / "dead.spool").write_bytes(msgspec.json.encode(msgspec.structs.replace(ROW, id="spooled")) + b"\n")
    for n in range(50):
        await UsageLedger(store).record(msgspec.structs.replace(ROW, id=f"before{n}", cost_pico=1))
    stop = asyncio.Event()
    writing = asyncio.create_task(write_rows(store, 0, stop))
    file, manifest = await back_up(config, tmp_path)
    stop.set()
    n_written = await writing
    assert n_written > 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert {"secret", "emberline.toml", "cards/m.toml", "usage/dead.spool"} < manifest.files.keys()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    await accounts.close()
    await store.close()

    await restore(config_of(other, empty_url), file)
    assert resolve(environ={}, home=other).server.port == 4711
    assert (other / "secret").read_text() == (home / "secret").read_text()
    assert stat.S_IMODE((other / "secret").stat().st_mode) == 0o600
    assert await BlobStore(other / "blobs").get(blob) == b"x" * 100_000
    again = await open_store(empty_url or other / "emberline.db")
    ((n_rows,),) = await again.read("SELECT COUNT(*) FROM usage")
    assert 50 <= int(n_rows or 0) <= 50 + n_written
    ((n_late, highest),) = await again.read(
        "SELECT COUNT(*), COALESCE(MAX(cost_pico), -1) FROM usage WHERE id LIKE 'r%'"
    )
    assert n_late == int(highest or 0) + 1  # a snapshot: all rows up to one, and none behind it
    sums = await again.read("SELECT SUM(n_requests), SUM(cost_pico) FROM usage_daily")
    assert sums == await again.read("SELECT COUNT(*), SUM(cost_pico) FROM usage")
    await UsageLedger(again).record(msgspec.structs.replace(ROW, id="new"))  # the trigger is there, once
    assert await again.read("SELECT SUM(n_requests) FROM usage_daily") == [(int(n_rows or 0) + 1,)]
    restored = AccountService(again, Secret.open(other))
    await restored.prices.refresh()
    assert restored.prices.table.find("m", again.now_us()) is not None
    assert (await restored.audit.verify()).problem == ""
    await restored.close()
    await again.close()

    with pytest.raises(Conflict, match="--force"):
        await restore(config_of(other, empty_url), file)
    (other / "secret").write_text("of another server, to be replaced")
    await restore(config_of(other, empty_url), file, force=True)
    assert (other / "secret").read_text() == (home / "secret").read_text()
    (aside,) = other.glob("before-restore-*")
    assert (aside / "secret").read_text() == "of another server, to be replaced"


@pytest.fixture
async def backup(tmp_path: Path) -> tuple[Config, Path]:
    home = tmp_path / "home"
    store = await open_store(home / "emberline.db")
    await UsageLedger(store).record(ROW)
    await store.close()
    Secret.open(home)
    config = config_of(home, "")
    return config, (await back_up(config, tmp_path / "b.tar"))[0]


async def test_a_file_is_not_overwritten(backup: tuple[Config, Path], tmp_path: Path) -> None:
    config, file = backup
    with pytest.raises(Conflict, match="--force"):
        await back_up(config, file)
    await back_up(config, file, force=True)
    with pytest.raises(BadInput, match="no folder"):
        await back_up(config, tmp_path / "missing" / "b.tar")


@pytest.mark.parametrize("damage", ["flip", "cut", "traversal", "text", "link"])
async def test_a_damaged_backup_changes_nothing(backup: tuple[Config, Path], tmp_path: Path, damage: str) -> None:
    _, file = backup
    raw = bytearray(file.read_bytes())
    if damage == "flip":
        raw[len(raw) // 2] ^= 1
    elif damage == "cut":
        del raw[-20_000:]
    elif damage == "text":
        raw = bytearray(b"not a backup")
    file.write_bytes(raw)
    if damage in ("traversal", "link"):
        with tarfile.open(file, "w") as archive:
            info = tarfile.TarInfo("store/../../escaped")
            if damage == "link":
                info = tarfile.TarInfo("secret")
                info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(info)
    target = tmp_path / "target"
    with pytest.raises(Unavailable, match="cannot be restored"):
        await restore(config_of(target, ""), file)
    assert list(target.iterdir()) == []
    assert not (tmp_path / "escaped").exists()


async def test_a_running_server_is_not_replaced(backup: tuple[Config, Path]) -> None:
    config, file = backup
    spool = config.home / "usage" / "a.spool"
    spool.parent.mkdir()
    with spool.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(Conflict, match="stop it first"):
            await restore(config, file, force=True)


async def test_another_kind_of_store_is_refused(backup: tuple[Config, Path], tmp_path: Path) -> None:
    _, file = backup
    with pytest.raises(EmberlineError, match="the kind it was made from"):
        await restore(config_of(tmp_path / "other", "postgresql://127.0.0.1:1/x"), file)


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in [name for name in os.environ if name.startswith("EMBERLINE_")]:
        monkeypatch.delenv(name)
    home, other = str(tmp_path / "home"), str(tmp_path / "other")
    file = str(tmp_path / "b.tar")
    assert main(["backup", file, "--data-dir", home]) == 1
    assert "there is no database" in capsys.readouterr().err
    assert main(["price", "set", "m", "--input", "1", "--data-dir", home, "--json"]) == 0
    assert main(["backup", file, "--data-dir", home]) == 0
    assert main(["restore", file, "--verify"]) == 0
    assert "intact" in capsys.readouterr().out
    assert main(["restore", file, "--data-dir", other]) == 0
    assert main(["price", "ls", "--data-dir", other]) == 0
    assert "1.00" in capsys.readouterr().out
    assert verify(Path(file)).store.kind == "sqlite"
