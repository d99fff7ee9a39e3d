"""Accounts share a provider: requests of one that hang do not stop those of another."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from emberline.net.egress_policy import EgressPolicy
from standins.standin_providers import StandinProvider
from tests.upstream.providers.conftest import Gateway, Opener, StartProvider, configured
from tests.upstream.providers.test_provider_keys import key_of

CHAT = "/v1/chat/completions", {"model": "openai/gpt-test", "messages": [{"role": "user", "content": "Hi"}]}
EMBED = "/v1/embeddings", {"model": "openai/embed-test", "input": "Hi"}


@asynccontextmanager
async def hanging(send: Callable[[], Coroutine[Any, Any, Any]], n: int) -> AsyncIterator[None]:
    asked = [asyncio.create_task(send()) for _ in range(n)]
    try:
        yield
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def settled(made: Gateway, server: StandinProvider, n: int) -> None:
    """Wait until all of `n` requests wait for a slot, or hang at the server."""
    async with asyncio.timeout(60):
        while True:
            now = made.core.admission.snapshot()
            if now.dispatched + sum(now.waiting.values()) == n and len(server.received) == now.dispatched:
                return
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("asked", [CHAT, EMBED])
async def test_requests_of_an_account_that_hang_do_not_stop_anothers(
    gateway: Opener, provider_server: StartProvider, asked: tuple[str, Any]
) -> None:
    server = await provider_server("openai", hang=True)
    made = await gateway(configured("openai", server, max_running=4), keys=True)
    alice, bob = await key_of(made, "alice"), await key_of(made, "bob")
    async with hanging(lambda: made.post(*asked, **alice), 8):
        await settled(made, server, 8)
        server.script.hang = False
        async with asyncio.timeout(20):
            answer = await made.post(*asked, **bob)
        assert answer.status_code == 200, answer.text


async def test_an_address_of_an_accounts_own_takes_no_slots_of_the_provider(
    gateway: Opener, provider_server: StartProvider
) -> None:
    ours, theirs = await provider_server("openai"), await provider_server("openai", hang=True)
    egress = EgressPolicy(["127.0.0.0/8"], setting="[accounts] provider_networks")
    made = await gateway(configured("openai", ours, max_running=2), keys=True, egress=egress)
    alice, bob, carol = [await key_of(made, account) for account in ("alice", "bob", "carol")]
    for account in (alice, bob):
        new = {"name": "openai", "key": theirs.key, "url": theirs.url}
        assert (await made.post("/api/providers", new, **account)).status_code == 200
    async with hanging(lambda: made.post(*CHAT, **alice), 3), hanging(lambda: made.post(*CHAT, **bob), 3):
        await settled(made, theirs, 6)
        async with asyncio.timeout(20):
            answer = await made.post(*CHAT, **carol)
        assert answer.status_code == 200, answer.text
