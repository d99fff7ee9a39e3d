from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from emberline.accounts.account_service import AccountService
from emberline.api.batch_loader import BatchService
from emberline.gateway.gateways import GatewayService
from emberline.jobs.webhooks.service import WebhookService
from emberline.store import open_store
from tests.api.batch_fixtures import open_batch_service
from tests.api.fake_service import SECRET, FakeService, client_of
from tests.jobs.webhooks.helpers import webhook_service


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
async def client(service: FakeService) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(service) as client:
        yield client


@pytest.fixture
async def webhooks(tmp_path: Path) -> AsyncIterator[WebhookService]:
    """Events on their own store; nothing is delivered."""
    store = await open_store(tmp_path / "webhooks.db")
    async with webhook_service(store, deliver=False) as webhooks:
        yield webhooks
    await store.close()


@pytest.fixture
async def accounts(tmp_path: Path) -> AsyncIterator[AccountService]:
    """Accounts and keys on their own store."""
    store = await open_store(tmp_path / "accounts.db")
    accounts = AccountService(store, SECRET)
    await accounts.open()
    yield accounts
    await accounts.close()
    await store.close()


@pytest.fixture
async def gateways(tmp_path: Path) -> AsyncIterator[GatewayService]:
    """Gateways on their own store."""
    store = await open_store(tmp_path / "gateways.db")
    gateways = GatewayService(store)
    await gateways.open()
    yield gateways
    await gateways.close()
    await store.close()


@pytest.fixture
async def batches(service: FakeService, tmp_path: Path) -> AsyncIterator[BatchService]:
    """A queue on its own store."""
    store = await open_store(tmp_path / "queue.db")
    async with open_batch_service(store, service, tmp_path) as batches:
        yield batches
    await store.close()
