"""Endpoints of the KV cache: who may purge, export and import what."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from emberline.protocol.errors import NotFound
from emberline.protocol.frames import TierStats
from tests.api.fake_service import KEY, MODEL, SECRET, FakeService, client_of


class FakeCache:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls: list[tuple[Any, ...]] = []

    async def purge(self, salt: bytes | None, session: str | None) -> dict[str, dict[str, int]]:
        self.calls.append(("purge", salt, session))
        return {"smollm2-0": {"device": 1, "disk": 2}}

    @asynccontextmanager
    async def export(self, salt: bytes, session: str, model: str | None) -> AsyncIterator[tuple[Path, dict[str, Any]]]:
        self.calls.append(("export", salt, session, model))
        if session == "unknown":
            raise NotFound("no KV of this session is stored")
        path = self.folder / "export"
        path.write_bytes(b"blocks" * 1000)
        yield path, {}

    @asynccontextmanager
    async def upload(self) -> AsyncIterator[Path]:
        path = self.folder / "import"
        yield path
        path.unlink()

    async def import_file(self, path: Path, salt: bytes, worker: str | None) -> dict[str, Any]:
        self.calls.append(("import", path.read_bytes(), salt, worker))
        return {"worker": "smollm2-0", "model": "m", "blocks": 3}


@pytest.fixture
def cache(service: FakeService, tmp_path: Path) -> FakeCache:
    service.kv_cache = FakeCache(tmp_path)  # type: ignore[attr-defined]
    return service.kv_cache  # type: ignore[attr-defined,no-any-return]


def salt_of(account: str) -> bytes:
    return SECRET.derive("kv", account)


async def test_an_admin_acts_for_any_account(service: FakeService, cache: FakeCache) -> None:
    async with client_of(service, key=KEY) as client:
        client.headers["authorization"] = f"Bearer {KEY}"
        answer = await client.post("/api/cache/purge", json={"account": "acme", "session": "s"})
        texts = {"conversations": 4, "streams": 1, "replies": 0}
        assert answer.json() == {"blocks": 3, "workers": {"smollm2-0": {"device": 1, "disk": 2}}, **texts}
        await client.post("/api/cache/purge", json={"everything": True})
        exported = await client.get("/api/cache/export", params={"account": "acme", "session": "s"})
        assert exported.content == b"blocks" * 1000
        imported = await client.post("/api/cache/import?account=acme&worker=w", content=b"file")
        assert imported.json()["blocks"] == 3
    assert service.purges == [("acme", "s"), (None, None)]
    assert cache.calls == [
        ("purge", salt_of("acme"), "s"),
        ("purge", None, None),
        ("export", salt_of("acme"), "s", None),
        ("import", b"file", salt_of("acme"), "w"),
    ]


async def test_what_is_refused(service: FakeService, cache: FakeCache) -> None:
    async with client_of(service) as client:
        for body in ({"everything": True, "session": "s"}, {"session": ""}, {"tier": "disk"}, {"account": "no/name"}):
            assert (await client.post("/api/cache/purge", json=body)).status_code == 400
        assert (await client.get("/api/cache/export")).status_code == 400
    assert cache.calls == []
    async with client_of(service) as client:
        assert (await client.get("/api/cache/export?session=unknown")).status_code == 404
    async with client_of(service, key=KEY) as client:
        for method, path in (("POST", "purge"), ("GET", "export"), ("POST", "import")):
            assert (await client.request(method, f"/api/cache/{path}")).status_code == 401
        assert (await client.get("/api/cache")).status_code == 401


async def test_tiers_of_every_worker(service: FakeService) -> None:
    host = TierStats(name="host", used_bytes=300, capacity_bytes=1000, blocks=3, hits=2)
    service.engine_load = {"kv_used_blocks": 5, "kv_total_blocks": 100, "tiers": (host,)}
    async with client_of(service) as client:
        answer = await client.get("/api/cache")
    assert answer.status_code == 200
    (worker,) = answer.json()["workers"]
    tiers = worker.pop("tiers")
    assert worker == {"name": "smollm2-0", "model": MODEL, "device": {"used_blocks": 5, "total_blocks": 100}}
    assert [(tier["name"], tier["used_bytes"], tier["blocks"], tier["misses"]) for tier in tiers] == [
        ("host", 300, 3, 0)
    ]
    service.engine_load = {"kv_total_blocks": 0}  # an encoder, for example
    async with client_of(service) as client:
        assert (await client.get("/api/cache")).json() == {"workers": []}
