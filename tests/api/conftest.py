from collections.abc import AsyncIterator

import httpx
import pytest

from .scripted import ScriptedService, client_of


@pytest.fixture
def service() -> ScriptedService:
    return ScriptedService()


@pytest.fixture
async def client(service: ScriptedService) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(service) as client:
        yield client
