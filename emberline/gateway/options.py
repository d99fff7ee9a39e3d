"""Options of a request for its gateway: the `cf-aig-*` headers, and how they combine with the gateway's settings."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from emberline.gateway.guardrails import check_guardrails
from emberline.gateway.retry import RetryPolicy
from emberline.gateway.routing import check_chains
from emberline.protocol.errors import BadInput
from emberline.protocol.gateway import (
    CustomCost,
    GatewayOptions,
    GatewaySettings,
    Guardrail,
    Metadata,
    Retries,
    StepConfig,
)

PREFIX = "cf-aig-"
_NO_STEP = StepConfig()
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
AUTHORIZATION = "cf-aig-authorization"  # read where the caller is authenticated
_JSON = {"cf-aig-metadata": ("metadata", Metadata), "cf-aig-custom-cost": ("customCost", CustomCost)}
_FIELDS = {  # header → field, and how its text is read
    "cf-aig-gateway-id": ("id", str),
    "cf-aig-skip-cache": ("skipCache", bool),
    "cf-aig-cache-ttl": ("cacheTtl", int),
    "cf-aig-cache-key": ("cacheKey", str),
    "cf-aig-collect-log": ("collectLog", bool),
    "cf-aig-collect-log-payload": ("collectLogPayload", bool),
    "cf-aig-event-id": ("eventId", str),
    "cf-aig-request-timeout": ("requestTimeoutMs", int),
}
_RETRIES = {
    "cf-aig-max-attempts": ("maxAttempts", int),
    "cf-aig-retry-delay": ("retryDelayMs", int),
    "cf-aig-backoff": ("backoff", str),
}


def from_headers(headers: Mapping[str, str]) -> GatewayOptions | None:
    """None: no header names the gateway or asks for anything of it. BadInput names a header that is wrong."""
    asked: dict[str, str] = {}
    for name, text in headers.items():
        if name.startswith(PREFIX) and name != AUTHORIZATION:
            asked[name] = text
    if not asked:
        return None
    if len(asked) == 1 and (only := asked.get("cf-aig-gateway-id")) is not None and _NAME.fullmatch(only):
        return GatewayOptions(id=only)
    fields: dict[str, Any] = {}
    retries: dict[str, Any] = {}
    for name, text in asked.items():
        if name in _JSON:
            field, kind = _JSON[name]
            fields[field] = _json(name, text)
            _convert(fields[field], kind, name)
        elif name in _FIELDS:
            field, read = _FIELDS[name]
            fields[field] = _value(name, text, read)
            _convert({field: fields[field]}, GatewayOptions, name)
        elif name in _RETRIES:
            field, read = _RETRIES[name]
            retries[field] = _value(name, text, read)
            _convert({field: retries[field]}, Retries, name)
        else:
            raise BadInput(f"the header `{name[:64]}` is not supported", param=name[:64])
    if retries:
        fields["retries"] = retries
    return msgspec.convert(fields, GatewayOptions)


def _value(name: str, text: str, kind: type) -> Any:
    if kind is bool:
        if text.lower() not in ("true", "false", "1", "0"):
            raise BadInput(f"`{name}` must be true or false", param=name)
        return text.lower() in ("true", "1")
    if kind is int:
        if not (text.isascii() and text.isdecimal() and len(text) <= 12):
            raise BadInput(f"`{name}` must be a number", param=name)
        return int(text)
    return text


def _json(name: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text.encode("latin-1"))
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise BadInput(f"`{name}` must be a JSON object", param=name) from None


def _convert(value: Any, kind: Any, name: str) -> None:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise BadInput(f"`{name}`: {error}", param=name) from None


def merge(given: GatewayOptions, headers: GatewayOptions | None) -> GatewayOptions:
    """`options.gateway` of the body, and for what it leaves out the headers."""
    if headers is None:
        return given
    missing = {name: value for name in given.__struct_fields__ if (value := getattr(given, name)) is None}
    return msgspec.structs.replace(given, **{name: getattr(headers, name) for name in missing})


def retry_policy(
    settings: GatewaySettings,
    options: GatewayOptions,
    step: StepConfig | None = None,
    floor: GatewaySettings | None = None,
) -> RetryPolicy:
    """A step's own, then the request's, then the gateway's. None exceeds the timeout of `floor`, the operator's."""
    if step is None and options.retries is None and options.request_timeout_ms is None:
        return RetryPolicy(
            settings.max_attempts, settings.retry_delay_ms, settings.backoff, settings.request_timeout_ms
        )
    asked = options.retries or Retries()
    step = step or _NO_STEP
    return RetryPolicy(
        _first(step.max_attempts, asked.max_attempts, settings.max_attempts),
        _first(step.retry_delay, asked.retry_delay_ms, settings.retry_delay_ms),
        step.backoff or asked.backoff or settings.backoff,
        _shorter(
            _first(step.request_timeout, options.request_timeout_ms, settings.request_timeout_ms),
            0 if floor is None else floor.request_timeout_ms,
        ),
    )


def _shorter(one_ms: int, other_ms: int) -> int:
    """The shorter of two timeouts, of which 0 is none."""
    return min(one_ms, other_ms) if one_ms and other_ms else one_ms or other_ms


def is_operators_timeout(policy: RetryPolicy, floor: GatewaySettings | None) -> bool:
    """True if the operator's timeout is the one that ends attempts: neither account nor request asks for a shorter."""
    return floor is not None and policy.timeout_ms == floor.request_timeout_ms


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)


def cache_ttl_s(settings: GatewaySettings, options: GatewayOptions, step: StepConfig | None = None) -> int:
    """Return the seconds for which the reply may be served again; 0 if it is neither stored nor served from the
    cache."""
    step = step or _NO_STEP
    if options.skip_cache if step.skip_cache is None else step.skip_cache:
        return 0
    return _first(step.cache_ttl, options.cache_ttl, settings.cache_ttl_s)


def check_settings(settings: GatewaySettings) -> GatewaySettings:
    """The settings, if they can be used; BadInput says what is wrong."""
    check_chains(settings)
    check_guardrails(settings.guardrails)
    return settings


# --- the operator's gateways, to which accounts may add ---------------------------------------------------------------


def combined(floor: GatewaySettings, added: GatewaySettings) -> GatewaySettings:
    """The operator's gateway with what an account adds to it.

    Guardrails of both apply. The operator's routes, fallbacks, logging and retention stand; others can be added, and
    logging switched on. A timeout can be shortened. Everything else is convenience (how long replies are cached, how
    often a failed attempt is repeated) and the account's where it has set it.
    """
    unset = GatewaySettings(name=added.name)
    own = {name: value for name in added.__struct_fields__ if (value := getattr(added, name)) != getattr(unset, name)}
    routes, fallbacks = _lower(floor.routes), _lower(floor.fallbacks)
    rules = {
        "guardrails": (*floor.guardrails, *_others(floor, added)),
        "routes": {name: rules for name, rules in added.routes.items() if name.lower() not in routes} | floor.routes,
        "fallbacks": {name: chain for name, chain in added.fallbacks.items() if name.lower() not in fallbacks}
        | floor.fallbacks,
        "request_timeout_ms": _shorter(floor.request_timeout_ms, added.request_timeout_ms),
        "custom_cost_counts": floor.custom_cost_counts,
        "collect_logs": floor.collect_logs or added.collect_logs,
        "log_content": floor.log_content or added.log_content,
        "log_retention_days": floor.log_retention_days,
        "log_max_rows": floor.log_max_rows,
    }
    return msgspec.structs.replace(floor, **(own | rules))


def check_additions(floor: GatewaySettings, added: GatewaySettings) -> None:
    """BadInput for additions that would replace something of the operator's gateway, or cannot be combined with it."""
    if taken := {rule.name for rule in added.guardrails} & {rule.name for rule in floor.guardrails}:
        raise BadInput(
            f"the operator's gateway {floor.name} has a guardrail {min(taken)!r}, which stays: name yours otherwise",
            param="guardrails",
        )
    for field in ("routes", "fallbacks"):
        if taken := _lower(getattr(floor, field)) & _lower(getattr(added, field)):
            raise BadInput(
                f"the operator's gateway {floor.name} has {field} of {min(taken)!r}, which stay: leave them out",
                param=field,
            )
    check_settings(combined(floor, added))


def _others(floor: GatewaySettings, added: GatewaySettings) -> tuple[Guardrail, ...]:
    names = {rule.name for rule in floor.guardrails}
    return tuple(rule for rule in added.guardrails if rule.name not in names)


def _lower(names: Iterable[str]) -> set[str]:
    return {name.lower() for name in names}
