"""The admin API as commands use it: the running server's, or this machine's store directly where none runs.

Without a server, the same endpoints are called in this process: SQLite locks the file for each write, and a server that
starts meanwhile reads the changes like those of any other process.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any, cast
from urllib.parse import quote, urlencode

from emberline.cli import common
from emberline.cli import http_client as client
from emberline.config import Config
from emberline.server.address import ServerAddress

_PAGE = 1000  # the most that the server gives
_COMMAND_LINE = "command line"  # the audit log's source


class AdminApi:
    def __init__(self, args: argparse.Namespace) -> None:
        self._config = common.config_of(args)
        self._address = ServerAddress.for_client(self._config)
        self._uses_server = common.names_server(args, self._config) or client.is_running(self._address)

    def get(self, path: str, **query: object) -> Any:
        given = {name: value for name, value in query.items() if value is not None}
        return self._request("GET", f"{path}?{urlencode(given)}" if given else path)

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._request("POST", path, body or {})

    def patch(self, path: str, body: dict[str, Any]) -> Any:
        return self._request("PATCH", path, body)

    def delete(self, path: str, **query: object) -> Any:
        given = {name: value for name, value in query.items() if value is not None}
        return self._request("DELETE", f"{path}?{urlencode(given)}" if given else path)

    def pages(self, path: str, **query: object) -> Iterator[dict[str, Any]]:
        """Every object of a list."""
        after: object = None
        while True:
            page = self.get(path, **query, after=after, limit=_PAGE)
            yield from page["data"]
            if not page["has_more"]:
                return
            after = page["last_id"]

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        if self._uses_server:
            return client.request_json(self._address, method, path, body)
        return asyncio.run(_request_in_process(self._config, method, path, body))


def segment(value: str) -> str:
    """A client's word as one segment of a path."""
    return quote(value, safe="")


async def _request_in_process(config: Config, method: str, path: str, body: dict[str, Any] | None) -> Any:
    from emberline.accounts.account_service import AccountService
    from emberline.accounts.auth import Authenticator
    from emberline.accounts.operator_ticket import operator_ticket
    from emberline.accounts.secret import Secret
    from emberline.api.app import ApiSettings, App
    from emberline.api.http.exchange import Services
    from emberline.gateway.gateways import GatewayService
    from emberline.service.service_factory import DATABASE
    from emberline.store import open_store

    secret = Secret.open(config.home)
    store = await open_store(config.store.url or config.home / DATABASE)
    accounts = AccountService(store, secret)
    await accounts.open()
    gateways = GatewayService(store, config.gateways)
    try:
        auth = Authenticator(secret, directory=accounts.directory, required=True)
        await gateways.open()
        app = App(cast(Services, None), ApiSettings(auth), accounts=accounts, gateways=gateways)  # they serve no model
        raw_path, _, query = path.partition("?")
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        headers.append((b"authorization", f"Bearer {operator_ticket(secret, int(time.time()))}".encode()))
        scope = {
            "type": "http",
            "method": method,
            "path": raw_path,
            "raw_path": raw_path.encode(),
            "query_string": query.encode(),
            "headers": headers,
            "client": (_COMMAND_LINE, 0),
        }
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"" if body is None else json.dumps(body).encode()}

        async def send(message: Any) -> None:
            sent.append(message)

        await app(scope, receive, send)
    finally:
        await gateways.close()
        await accounts.close()
        await store.close()
    return client.decode_reply(sent[0]["status"], b"".join(part.get("body", b"") for part in sent[1:]))
