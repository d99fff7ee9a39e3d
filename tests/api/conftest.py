from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from emberline.api.batch_loader import BatchService
from emberline.jobs.webhooks.service import WebhookService
from emberline.store import open_store
from tests.jobs.webhooks.helpers import webhook_service

from .queued import desk_of
from .scripted import ScriptedService, client_of


@pytest.fixture
def service() -> ScriptedService:
    return ScriptedService()


@pytest.fixture
async def client(service: ScriptedService) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(service) as client:
        yield client


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[WebhookService]:
    """Events on a store of their own; nothing is delivered."""
    store = await open_store(tmp_path / "desk.db")
    async with webhook_service(store, deliver=False) as desk:
        yield desk
    await store.close()


@pytest.fixture
async def batches(service: ScriptedService, tmp_path: Path) -> AsyncIterator[BatchService]:
    """A queue on a store of its own."""
    store = await open_store(tmp_path / "queue.db")
    async with desk_of(store, service, tmp_path) as desk:
        yield desk
    await store.close()
