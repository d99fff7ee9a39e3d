"""A provider whose last key is removed leaves nothing: no worker, no series of metrics, no card."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from emberline.service.timings import Timings
from tests.upstream.providers.conftest import PATIENCE_S, SAYS, Gateway, Opener, StartProvider
from tests.upstream.providers.test_provider_keys import key_of

MODEL = "gemini-3-pro"


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not await condition():
        assert time.monotonic() < end_s
        await asyncio.sleep(0.01)


async def workers(made: Gateway, admin: dict[str, str]) -> set[str]:
    status = (await made.client.get("/api/status", headers=admin)).json()
    return {worker["name"] for worker in status["workers"]}


async def test_removed_providers_leave_nothing(gateway: Opener, provider_server: StartProvider) -> None:
    server = await provider_server("gemini")
    made = await gateway(keys=True, timings=Timings(provider_sweep_s=0.02))
    admin = await key_of(made, "root", admin=True)
    for number in range(5):
        name = f"mine-{number}"
        new = {"name": name, "key": server.key, "url": server.url, "kind": "gemini"}
        assert (await made.post("/api/providers", new, **admin)).status_code == 200
        body = {"model": f"{name}/{MODEL}", "messages": SAYS}
        assert (await made.post("/v1/chat/completions", body, **admin)).status_code == 200
        assert name in await workers(made, admin)
        if number == 0:
            assert b'model="mine-0/' in await made.service.metrics()
        if number < 4:
            assert (await made.client.delete(f"/api/providers/{name}", headers=admin)).status_code == 200
    kept = {"mine-4"}
    await until(lambda: _are(made, admin, kept))
    text = (await made.service.metrics()).decode()
    assert "mine-4/" in text
    assert not any(f"mine-{number}" in text for number in range(4))
    assert set(made.service.upstream.clients) == kept
    gone = await made.post("/v1/chat/completions", {"model": f"mine-0/{MODEL}", "messages": SAYS}, **admin)
    assert gone.status_code == 404
    again = {"name": "mine-0", "key": server.key, "url": server.url, "kind": "gemini"}
    assert (await made.post("/api/providers", again, **admin)).status_code == 200
    back = await made.post("/v1/chat/completions", {"model": f"mine-0/{MODEL}", "messages": SAYS}, **admin)
    assert back.status_code == 200


async def _are(made: Gateway, admin: dict[str, str], names: set[str]) -> bool:
    return await workers(made, admin) == names


async def test_a_request_in_flight_keeps_its_provider(gateway: Opener, provider_server: StartProvider) -> None:
    server = await provider_server("gemini", hang=True)
    made = await gateway(keys=True, timings=Timings(provider_sweep_s=0.01))
    admin = await key_of(made, "root", admin=True)
    new = {"name": "mine", "key": server.key, "url": server.url, "kind": "gemini"}
    assert (await made.post("/api/providers", new, **admin)).status_code == 200
    body = {"model": f"mine/{MODEL}", "messages": SAYS}
    running = asyncio.create_task(made.post("/v1/chat/completions", body, **admin))
    await until(lambda: _runs(made))
    assert (await made.client.delete("/api/providers/mine", headers=admin)).status_code == 200
    await asyncio.sleep(0.1)  # ten sweeps
    assert await workers(made, admin) == {"mine"}
    assert made.core.admission.in_flight_on("mine") == 1
    running.cancel()
    await asyncio.wait([running])
    await until(lambda: _are(made, admin, set()))


async def _runs(made: Gateway) -> bool:
    return made.core.admission.in_flight_on("mine") == 1
