"""Keys of providers: an account's own, or, of an admin, those of all accounts. A stored key is never returned."""

import re
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from emberline.accounts.account import check_account_name
from emberline.accounts.provider_keys import NewProviderKey
from emberline.accounts.stored_provider import EVERY_ACCOUNT, StoredProvider
from emberline.api.http.body import read_json
from emberline.api.http.exchange import HttpExchange, Reply, json_reply
from emberline.config import is_header_safe
from emberline.net.egress_policy import parse_target
from emberline.net.http_client import parse
from emberline.protocol.errors import BadInput, Forbidden, Unavailable
from emberline.upstream.providers.registry import ALIASES, known

ACCOUNT = {"account": {"type": "string"}}
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,31}")


class NewProvider(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`account`: whose key it is; left out: the caller's own, or, of an admin, all accounts'."""

    name: str
    key: Annotated[str, Meta(min_length=1, max_length=4096)]
    url: str = ""
    kind: Literal["", "openai", "anthropic", "gemini"] = ""
    account: str | None = None

    def __repr__(self) -> str:
        return f"NewProvider(name={self.name!r}, url={self.url!r})"


async def list_all(call: HttpExchange) -> Reply:
    """List the providers whose keys the caller's requests may use. An admin sees all."""
    stored = call.accounts.provider_keys.list()
    if not call.principal.is_admin:
        stored = [row for row in stored if row.account in (call.principal.account, EVERY_ACCOUNT)]
    rows = [_body(row) for row in stored]
    rows += [
        {"name": client.name, "account": None, "kind": client.provider.kind, "source": "configuration"}
        for client in _configured(call).values()
    ]
    return json_reply({"object": "list", "data": rows})


async def add(call: HttpExchange) -> Reply:
    """Store a key, in place of an earlier one. It is in effect at once, and never shown again."""
    body = await read_json(call, NewProvider)
    account = _account(call, body.account)
    if not _NAME.fullmatch(body.name):
        raise BadInput("a provider's name has 1 to 32 lower-case letters, digits, dots, dashes", param="name")
    if not is_header_safe(body.key):
        raise BadInput("a key is printable ASCII without spaces", param="key")
    found = known(body.name)
    if body.url:
        _check_url(body.url, account)
    elif (found is None or not found.url) and body.name not in _configured(call):
        raise BadInput(f"provider {body.name} needs a `url`: the address of its API", param="url")
    if body.kind and not body.url:
        raise BadInput("`kind` goes with a `url`: the API of a known provider is known", param="kind")
    new = NewProviderKey(account, _name(call, body.name), body.key, body.kind, body.url)
    return json_reply(_body(await call.accounts.provider_keys.add(call.actor(), new)))


async def remove(call: HttpExchange) -> Reply:
    account = _account(call, call.query.get("account"))
    await call.accounts.provider_keys.remove(call.actor(), account, _name(call, call.path_param))
    return json_reply({"name": call.path_param, "deleted": True})


async def test(call: HttpExchange) -> Reply:
    """Ask the provider for its models, with the key that the caller's requests would use."""
    service: Any = call.service
    if service is None:
        raise Unavailable("a running server asks providers: start one with `emberline serve`")
    models = await service.models.upstream.providers.test(call.path_param, call.principal)
    return json_reply({"name": call.path_param, "ok": True, "models": models})


def _name(call: HttpExchange, given: str) -> str:
    """Under which a key is stored: one name of each provider, so that no account's key gives another name of it a
    meaning for all."""
    return given if given in _configured(call) else ALIASES.get(given, given)


def _configured(call: HttpExchange) -> dict[str, Any]:
    """The providers of the operator's file, by name; none where the command line runs without a server."""
    service: Any = call.service
    clients = {} if service is None else service.models.upstream.providers.clients
    return {name: client for name, client in clients.items() if client.is_configured}


def _account(call: HttpExchange, named: str | None) -> str:
    if call.principal.is_admin:
        return check_account_name(named) if named else EVERY_ACCOUNT
    if named is not None and named != call.principal.account:
        raise Forbidden("only an admin stores keys of other accounts", param="account")
    return call.principal.account


def _check_url(url: str, account: str) -> None:
    """Refuse an invalid URL. An account's URL is checked again whenever a connection is made, since its name may lead
    elsewhere by then."""
    if account != EVERY_ACCOUNT:
        parse_target(url)
    try:
        parse(url, keep_version=True)
    except ValueError as error:
        raise BadInput(str(error), param="url") from None


def _body(row: StoredProvider) -> dict[str, Any]:
    created = datetime.fromtimestamp(row.created_us / 1e6, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    found = known(row.provider)
    kind = row.kind or ("openai" if found is None else found.kind)
    body: dict[str, Any] = {"name": row.provider, "account": row.account or None, "kind": kind}
    return body | {"url": row.url or None, "source": "stored", "created_at": created}
