"""`emberline cache` against a fake server."""

import asyncio
import json
from pathlib import Path

from emberline.gateway.response_cache import CachedReply, ResponseCache
from emberline.protocol.complete_response import Answer
from emberline.protocol.events import Usage
from emberline.service.service_factory import DATABASE
from emberline.store import open_store
from tests.cli.console import emberline
from tests.cli.fake_server import FakeServer
from tests.kv.tiers.disk.disk_blocks import open_tier, write


def test_purge_says_what(tmp_path: Path, fake_server: FakeServer) -> None:
    done = emberline("cache", "purge", "--port", fake_server.port, home=tmp_path)
    assert (done.returncode, done.stderr) == (
        1,
        "emberline: say what to purge: --session ID, --account NAME or --everything\n",
    )
    done = emberline("cache", "purge", "--session", "s", "--account", "a", "--port", fake_server.port, home=tmp_path)
    assert done.stdout == "purged: 5 blocks, 2 prompts of conversations, 1 streams, 3 cached replies\n", done.stderr
    assert [(path, json.loads(raw)) for path, _, raw in fake_server.posts] == [
        ("/api/cache/purge", {"session": "s", "account": "a"})
    ]


def test_export_and_import(tmp_path: Path, fake_server: FakeServer) -> None:
    target = tmp_path / "s.kv"
    done = emberline("cache", "export", "s", "-o", str(target), "--port", fake_server.port, home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert target.read_bytes() == b"exported"
    assert target.stat().st_mode & 0o777 == 0o600
    done = emberline("cache", "import", str(target), "--port", fake_server.port, home=tmp_path)
    assert done.stdout == "4 blocks imported into model-0\n", done.stderr
    assert [(path, raw) for path, _, raw in fake_server.posts] == [("/api/cache/import", b"exported")]


def test_a_failed_export_leaves_no_file(tmp_path: Path, fake_server: FakeServer) -> None:
    fake_server.error = (404, "no KV of session 's' is stored")
    done = emberline("cache", "export", "s", "-o", str(tmp_path / "s.kv"), "--port", fake_server.port, home=tmp_path)
    assert (done.returncode, done.stderr) == (1, "emberline: no KV of session 's' is stored\n")
    assert not list(tmp_path.glob("*.kv*"))


def test_stat(tmp_path: Path, fake_server: FakeServer) -> None:
    done = emberline("cache", "stat", "--port", fake_server.port, home=tmp_path)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0][:3] == ["WORKER", "TIER", "BLOCKS"]
    assert lines[1][:3] == ["model-0", "device", "100"]
    assert lines[2][:3] == ["model-0", "disk", "7"]
    assert done.stdout.rstrip().endswith("degraded: the disk is full")


def test_without_a_server_everything_on_disk_is_purged(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "kv" / "model")
    write(tier, [1, 2, 3])
    tier.close()
    asyncio.run(store_reply(tmp_path / DATABASE))
    done = emberline("cache", "purge", "--everything", home=tmp_path, EMBERLINE_SERVER_PORT="1")
    assert done.stdout == f"purged: 3 blocks in {tmp_path / 'kv'}, 1 cached replies\n", done.stderr
    assert not list(tmp_path.rglob("*.blocks"))


async def store_reply(path: Path) -> None:
    store = await open_store(path)
    cache = ResponseCache(store)
    cache.put("acme", "digest", CachedReply(answer=Answer([], Usage()), model="m", provider="p", expires_us=1 << 60))
    await cache.close()
    await store.close()
