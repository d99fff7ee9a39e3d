"""Prices of models, now and in the past. A key may read those of the models that it may use; an admin sets them."""

from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from emberline.accounts.prices import PriceVersion
from emberline.api.http.body import read_json
from emberline.api.http.exchange import HttpExchange, Reply, Services, json_reply
from emberline.protocol.errors import BadInput, EmberlineError, NotFound
from emberline.protocol.price import Price, PriceFields, price_fields

MODEL = {"model": {"type": "string"}}
ModelName = Annotated[str, Meta(min_length=1, max_length=256)]


class NewPrice(PriceFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Amounts of the currency, as text or numbers, per million tokens, second of audio, image and neuron. Percentages
    are of the whole price. `valid_from`: an ISO 8601 time in the future; left out: now."""

    model: ModelName
    valid_from: str | None = None


class NoPrice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: ModelName


async def list_prices(call: HttpExchange) -> Reply:
    """The prices that are valid now; with `model`, all versions of its price."""
    prices = call.accounts.prices
    await prices.refresh()
    if (name := call.query.get("model")) is not None:
        model = _model_id(call, name)
        history = prices.table.history(model)
        if not history or not _may_see(call, model):
            raise NotFound(f"{model[:256]} has no price: set one with `emberline price set`", param="model")
        return json_reply({"object": "list", "data": [_version(call, version) for version in history]})
    seen = [version for version in prices.current() if _may_see(call, version.model)]
    return json_reply({"object": "list", "data": [_version(call, version) for version in seen]})


async def set_price(call: HttpExchange) -> Reply:
    body = await read_json(call, NewPrice)
    return await _set(call, body.model, body.price(), body.valid_from)


async def remove_price(call: HttpExchange) -> Reply:
    """Take a model's own price away from now on; its past prices stay. A model of an account then has the default."""
    body = await read_json(call, NoPrice)
    return await _set(call, body.model, None, None)


async def _set(call: HttpExchange, name: str, price: Price | None, valid_from: str | None) -> Reply:
    if not name.isprintable():
        raise BadInput("the name of a model has printable characters only", param="model")
    begin_us = None if valid_from is None else _time_us(valid_from)
    model = _model_id(call, name)
    version = await call.accounts.prices.set(model, price, "admin", call.actor(), begin_us)
    if (service := _service(call)) is not None:
        await service.operations.refresh_prices()
    return json_reply(_version(call, version))


def _service(call: HttpExchange) -> Services | None:
    """None: the command line without a server."""
    return call.service


def _model_id(call: HttpExchange, name: str) -> str:
    """Prices are by id: an alias of a served model stands for it. Others may be served later."""
    service, principal = _service(call), call.principal
    account = None if principal.is_admin else principal.account
    try:
        return name if service is None else service.models.find(name, account).id
    except EmberlineError:
        return name


def _may_see(call: HttpExchange, model: str) -> bool:
    """True unless the model's name alone would tell the caller about another account, or what its key leaves out."""
    service, principal = _service(call), call.principal
    if service is None or principal.is_admin:
        return True
    try:
        card = service.models.find(model, principal.account)
    except EmberlineError:
        return False
    return principal.may_use((card.id, *card.aliases))


def _version(call: HttpExchange, version: PriceVersion) -> dict[str, Any]:
    by = {"created_by": version.created_by} if call.principal.is_admin else {}
    return {
        "model": version.model,
        "version": version.number,
        "valid_from": _time(version.valid_from_us),
        "source": version.source,
        "created_at": _time(version.created_us),
        **by,
        "price": None if version.price is None else price_fields(version.price),
    }


def _time(at_us: int) -> str:
    return datetime.fromtimestamp(at_us / 1e6, UTC).isoformat(timespec="seconds")


def _time_us(text: str) -> int:
    try:
        moment = datetime.fromisoformat(text[:40])
        return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1e6)
    except (ValueError, OverflowError):
        raise BadInput("`valid_from` is a time such as 2026-12-01T00:00:00Z", param="valid_from") from None
