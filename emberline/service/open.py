"""Putting a service together: in the core process, and in a door process."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from emberline.accounts.ledger import Ledger
from emberline.balancer.engine_client import EngineClient
from emberline.balancer.fleet import MAX_WAITING, Fleet
from emberline.service.core import LocalCore
from emberline.service.core_server import CoreServer
from emberline.service.prepare import Served
from emberline.service.remote_core import RemoteCore
from emberline.service.service import Service
from emberline.service.sessions import Sessions
from emberline.store import Store

DATABASE = "emberline.db"


async def open_service(served: Sequence[Served], *, data_dir: Path, max_waiting: int = MAX_WAITING) -> Service:
    """The core process's service. Opens the store in `data_dir` and connects to the engines in the background."""
    async with AsyncExitStack() as owned:
        store = await Store.open(data_dir / DATABASE)
        owned.push_async_callback(store.close)
        engines = _connect(served, owned)
        by_model = {item.card.id: [engines[endpoint.name] for endpoint in item.endpoints] for item in served}
        core = LocalCore(Fleet(by_model, max_waiting), Ledger(store), Sessions())
        return Service(core, served, engines, owned.pop_all())


async def open_core_server(service: Service, socket_path: Path) -> CoreServer:
    """Let door processes of this user use the core of `service`. Close the server before the service."""
    assert isinstance(service.core, LocalCore), "doors are served by the core process"
    server = CoreServer(service.core, socket_path)
    await server.start()
    return server


async def open_door(served: Sequence[Served], *, core_socket: Path) -> Service:
    """A door process's service. While the core is gone it answers Unavailable."""
    async with AsyncExitStack() as owned:
        engines = _connect(served, owned)
        core = RemoteCore(core_socket, list(engines.values()))
        owned.push_async_callback(core.close)
        return Service(core, served, engines, owned.pop_all())


def _connect(served: Sequence[Served], owned: AsyncExitStack) -> dict[str, EngineClient]:
    engines: dict[str, EngineClient] = {}
    for endpoint in (endpoint for item in served for endpoint in item.endpoints):
        assert endpoint.name not in engines, f"two endpoints are called {endpoint.name}"
        engines[endpoint.name] = client = EngineClient(endpoint)
        owned.push_async_callback(client.close)
        client.start()
    return engines
