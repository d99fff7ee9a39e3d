"""A gateway's settings, as configured and stored, and what one request asks of it.

A gateway belongs to an account and stands between its callers and the models: retries, timeouts, fallbacks, dynamic
routes, a response cache, guardrails and logs.
"""

from math import isfinite
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

DEFAULT_GATEWAY = "default"  # exists always
DYNAMIC = "dynamic/"  # begins the name of a dynamic route, in place of a model
MONTH_S = 31 * 86_400
MAX_ATTEMPTS = 5
MAX_DELAY_MS = 5000
MAX_TIMEOUT_MS = 600_000
MIN_CACHE_TTL_S = 60
MAX_COST_PICO = 1 << 60  # of a request, as it is logged and counted: sums of two fit the store's 64 bits

GatewayName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
RouteName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
ModelName = Annotated[str, Meta(min_length=1, max_length=256)]
Backoff = Literal["constant", "linear", "exponential"]
Attempts = Annotated[int, Meta(ge=1, le=MAX_ATTEMPTS)]
Delay = Annotated[int, Meta(ge=0, le=MAX_DELAY_MS)]
Timeout = Annotated[int, Meta(ge=0, le=MAX_TIMEOUT_MS)]
MetadataValue = str | int | float | bool


class _Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


# --- dynamic routes ---------------------------------------------------------------------------------------------------


class Condition(_Settings, frozen=True):
    """On one key of a request's metadata. A request without the key meets only `ne` and `exists: false`."""

    key: Annotated[str, Meta(min_length=1, max_length=64)]
    op: Literal["eq", "ne", "in", "gt", "ge", "lt", "le", "exists"] = "eq"
    value: MetadataValue | Annotated[tuple[MetadataValue, ...], Meta(max_length=100)] = True


class RateLimit(_Settings, frozen=True):
    requests: Annotated[int, Meta(ge=1, le=1_000_000_000)]
    per_s: Annotated[int, Meta(ge=1, le=MONTH_S)] = 60
    by: Annotated[str, Meta(max_length=64)] = ""  # a key of the metadata, each of whose values has its own; empty: all


class Budget(_Settings, frozen=True):
    """Limit on the cost of the requests of a rule, in the currency of the prices."""

    amount: Annotated[float, Meta(gt=0, le=1e9)]
    per_s: Annotated[int, Meta(ge=60, le=MONTH_S)] = 86_400
    by: Annotated[str, Meta(max_length=64)] = ""


class RouteRule(_Settings, frozen=True):
    """Takes a request that meets all of `when`, if `percent`, `rate` and `budget` let it. Its models are tried in
    order."""

    models: Annotated[tuple[ModelName, ...], Meta(min_length=1, max_length=10)]
    when: Annotated[tuple[Condition, ...], Meta(max_length=16)] = ()
    percent: Annotated[float, Meta(ge=0, le=100)] | None = None  # of the requests that come to this rule
    rate: RateLimit | None = None
    budget: Budget | None = None


# --- guardrails -------------------------------------------------------------------------------------------------------


class Guardrail(_Settings, frozen=True):
    """A check of texts: a pattern that must not occur, or a moderation model. Exactly one of the two is set."""

    name: GatewayName
    on: Literal["request", "response", "both"] = "both"
    action: Literal["block", "flag"] = "block"
    pattern: Annotated[str, Meta(max_length=1000)] = ""  # RE2 syntax
    ignore_case: bool = True
    model: Annotated[str, Meta(max_length=256)] = ""  # a classifier, or a model that answers "safe" or "unsafe"
    labels: Annotated[tuple[str, ...], Meta(max_length=64)] = ()  # of a classifier that are unsafe
    threshold: Annotated[float, Meta(gt=0, le=1)] = 0.5  # of their score
    hold: Literal["sentence", "whole"] = "sentence"  # how much of a streamed reply is checked before it is sent on


# --- settings ---------------------------------------------------------------------------------------------------------


Chain = Annotated[tuple[ModelName, ...], Meta(min_length=1, max_length=10)]
Rules = Annotated[tuple[RouteRule, ...], Meta(min_length=1, max_length=32)]


class GatewaySettings(_Settings, frozen=True):
    """One gateway. An empty account: a configured one that every account may use."""

    name: GatewayName
    account: Annotated[str, Meta(max_length=64)] = ""
    cache_ttl_s: Annotated[int, Meta(ge=0, le=MONTH_S)] = 0  # 0: nothing is cached unless a request asks for it
    max_attempts: Attempts = 1  # of one model
    retry_delay_ms: Delay = 500  # before the second attempt
    backoff: Backoff = "exponential"
    request_timeout_ms: Timeout = 0  # until the first byte of a reply; 0: no limit
    fallbacks: Annotated[dict[ModelName, Chain], Meta(max_length=100)] = {}  # by model: what to try where it fails
    routes: Annotated[dict[RouteName, Rules], Meta(max_length=100)] = {}
    guardrails: Annotated[tuple[Guardrail, ...], Meta(max_length=16)] = ()
    custom_cost_counts: bool = False  # True: the budgets of routes count `cf-aig-custom-cost` in place of prices
    collect_logs: bool = True
    log_content: bool = False  # prompts and replies
    log_retention_days: Annotated[float, Meta(gt=0, le=3650)] = 30.0
    log_max_rows: Annotated[int, Meta(ge=1, le=100_000_000)] = 1_000_000


# --- what a request asks ----------------------------------------------------------------------------------------------


Metadata = Annotated[dict[Annotated[str, Meta(max_length=64)], MetadataValue], Meta(max_length=16)]


class Retries(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    max_attempts: Attempts | None = None
    retry_delay_ms: Delay | None = None
    backoff: Backoff | None = None


TokenCost = Annotated[float, Meta(ge=0, le=1)]  # of the currency, for one token


class CustomCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cost of a request that the log states in place of the model's price."""

    per_token_in: TokenCost = 0.0
    per_token_out: TokenCost = 0.0

    def __post_init__(self) -> None:
        if not (isfinite(self.per_token_in) and isfinite(self.per_token_out)):
            raise ValueError("the cost of a token is a finite number")

    def cost_pico(self, input_tokens: int, output_tokens: int) -> int:
        cost = self.per_token_in * input_tokens + self.per_token_out * output_tokens
        return min(int(cost * 1e12), MAX_COST_PICO)


class GatewayOptions(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """`options.gateway` of Workers AI, and the `cf-aig-*` headers. None: as the gateway is set."""

    id: GatewayName = DEFAULT_GATEWAY
    skip_cache: bool | None = None
    cache_ttl: Annotated[int, Meta(ge=MIN_CACHE_TTL_S, le=MONTH_S)] | None = None  # seconds
    cache_key: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    metadata: Metadata | None = None
    collect_log: bool | None = None
    collect_log_payload: bool | None = None
    event_id: Annotated[str, Meta(max_length=128)] | None = None
    request_timeout_ms: Timeout | None = None
    retries: Retries | None = None
    custom_cost: CustomCost | None = None


class StepConfig(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """`config` of one step of a universal request."""

    request_timeout: Timeout | None = None  # ms
    max_attempts: Attempts | None = None
    retry_delay: Delay | None = None  # ms
    backoff: Backoff | None = None
    cache_ttl: Annotated[int, Meta(ge=MIN_CACHE_TTL_S, le=MONTH_S)] | None = None
    skip_cache: bool | None = None
