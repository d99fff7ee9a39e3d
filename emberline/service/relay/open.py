"""Putting a relay together."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from emberline.balancer.http.exchange import Broken
from emberline.balancer.http.server import Server
from emberline.balancer.http.upstream import Upstream
from emberline.config import ConfigError
from emberline.service.core import Core
from emberline.service.relay.relay import Relay
from emberline.text.model import TextModel

DISCOVERY_S = 15.0
_RETRY_S = 0.5

log = logging.getLogger("emberline.balancer")


async def discover(servers: Sequence[Server]) -> list[Upstream]:
    """Connections to the servers, one for each model that a server has.

    Those whose models are not configured are asked; the others may come up later. ConfigError where nobody answers.
    """
    upstreams = [Upstream(server) for server in servers]
    await asyncio.gather(*(_ask(upstream) for upstream in upstreams if not upstream.models))
    return [single for upstream in upstreams for single in _singles(upstream)]


def _singles(upstream: Upstream) -> list[Upstream]:
    if len(upstream.models) == 1:
        return [upstream]
    upstream.pool.close()
    endpoint = upstream.server.endpoint
    named = [msgspec.structs.replace(endpoint, name=f"{endpoint.name}:{m}", models=(m,)) for m in upstream.models]
    return [Upstream(msgspec.structs.replace(upstream.server, endpoint=one)) for one in named]


async def _ask(server: Upstream) -> None:
    problem = ""
    try:
        async with asyncio.timeout(DISCOVERY_S):
            while True:
                try:
                    await server.ask_models()
                    return
                except Broken as error:
                    problem = str(error)
                    log.warning("endpoint %s: %s", server.name, problem)
                await asyncio.sleep(_RETRY_S)
    except TimeoutError:
        raise ConfigError(
            f'endpoint {server.name} does not tell its models ({problem}): start it first, or give models = ["…"]',
            param="endpoints",
        ) from None


def open_relay(core: Core, servers: Sequence[Upstream]) -> Relay:
    """The service starts and closes the servers' connections with its own."""
    texts: dict[str, TextModel] = {}
    for server in servers:
        for model in server.models:
            if server.server.tokenizer and model not in texts:
                texts[model] = _tokenizer(server)
    return Relay(core, {server.name: server for server in servers}, texts)


def _tokenizer(server: Upstream) -> TextModel:
    path = Path(server.server.tokenizer).expanduser()
    try:
        return TextModel.load(path)
    except (ValueError, OSError) as error:
        raise ConfigError(f"endpoint {server.name}: tokenizer {path}: {error}", param="endpoints") from None
