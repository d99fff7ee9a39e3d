"""What cannot be, on a server whose models keep no KV, is the caller's error and not a passing one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from emberline.protocol.errors import NotFound, Unavailable, Unsupported
from emberline.service.kv_cache import KVCacheAdmin


def worker(task: str, address: str = "unix:/x") -> Any:
    endpoint = SimpleNamespace(address=address, models=("m",))
    return SimpleNamespace(name="model-0", info=SimpleNamespace(task=task), endpoint=endpoint)


async def test_a_server_that_only_encodes(tmp_path: Path) -> None:
    admin = KVCacheAdmin([worker("embed")], tmp_path, generates=False)
    assert await admin.purge(b"salt", None) == {}
    with pytest.raises(Unsupported, match="keep no KV"):
        async with admin.export(b"salt", "session", None):
            pass
    with pytest.raises(Unsupported, match="keep no KV"):
        async with admin.upload():
            pass


async def test_workers_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="no engine worker runs"):
        await KVCacheAdmin([], tmp_path).purge(b"salt", None)
    with pytest.raises(NotFound, match="no engine worker is called nobody"):
        await KVCacheAdmin([worker("generate")], tmp_path).import_file(tmp_path, b"salt", "nobody")
    with pytest.raises(Unavailable, match="this machine runs no engine worker"):
        async with KVCacheAdmin([worker("generate", "tcp:10.0.0.1:1")], tmp_path).upload():
            pass
