"""A request as admission sees it, the route that it answers, and the fault of an attempt that failed."""

import time
from collections.abc import Mapping
from hashlib import blake2b
from typing import NamedTuple, TypeVar

import msgspec

from emberline.protocol.block_hash import DIGEST_BYTES
from emberline.protocol.errors import WorkerRemoved
from emberline.protocol.price import Price
from emberline.protocol.rate_limits import RateLimits
from emberline.protocol.request import Principal, Priority

Client = TypeVar("Client")


class RouteRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Enough to route a request, and to write its usage row should its HTTP worker die."""

    id: str
    account: str  # the tenant
    key_id: str = ""
    model: str
    model_version: str
    priority: str = "default"  # priority | default | flex | batch
    input_tokens: int
    created_us: int
    affinity: str | None = None  # the session id, of any size
    n: int = 1
    avoid: tuple[str, ...] = ()  # workers not to use while there is another
    wait_s: float = 0.0  # how long to wait for a worker to connect
    reject_if_busy: bool = False
    engine: str = ""  # the worker that a job was granted
    keys: bytes = b""  # content keys of the prompt's full blocks, end to end
    max_tokens: int = 0  # of the reply; 0: unknown
    context_len: int = 0  # of the model, where prompt or reply have no other bound
    max_input_tokens: int = 0  # where `input_tokens` is an estimate: it is not more than this
    max_audio_ms: int = 0  # that are transcribed at most
    images: int = 0  # in the prompt
    max_compute_ms: int = 0  # that a predictor takes at most
    predictions: int = 0
    lost: tuple[str, ...] = ()  # workers that just failed it: avoided, and blamed once
    deadline_s: float | None = None  # seconds from now by which it must have ended
    api: str = ""  # for the usage row
    is_retry: bool = False  # of a request that counts for the limits on requests already
    slots: str = ""  # an address of the account's own, whose slots are apart from the provider's; empty: the provider's
    accepted_us: int = 0  # of a job: when it was queued, which decides its price; 0: `created_us`
    keep_alive_s: float | None = None  # of its model, see GenerateRequest

    @property
    def most_input_tokens(self) -> int:
        """Tokens that the prompt has at most."""
        most = self.max_input_tokens or self.input_tokens
        return min(most, self.context_len) if self.context_len else most

    @property
    def most_output_tokens(self) -> int | None:
        """Tokens that all choices have together at most. Returns None if nothing bounds them."""
        most = self.max_tokens or self.context_len
        return most * self.n if most else None


class RouteTerms(NamedTuple):
    """Routing terms of a request, the same for every task."""

    id: str  # under which it is in flight
    api: str
    priority: Priority = Priority.DEFAULT
    session: str | None = None
    n: int = 1  # choices
    reject_if_busy: bool = False
    deadline_s: float | None = None
    engine: str = ""  # the worker that a job was granted
    accepted_us: int = 0  # of a job: when it was queued
    created_us: int = 0  # 0: now
    keep_alive_s: float | None = None  # of its model


def route_request(
    terms: RouteTerms,
    principal: Principal,
    model: str,
    model_version: str,
    *,
    input_tokens: int,
    keys: bytes = b"",
    max_tokens: int = 0,
    context_len: int = 0,
    max_input_tokens: int = 0,
    max_audio_ms: int = 0,
    images: int = 0,
    max_compute_ms: int = 0,
    predictions: int = 0,
    slots: str = "",
) -> RouteRequest:
    """A request of the principal as admission sees it: its terms, its model, and how much it may use."""
    return RouteRequest(
        id=terms.id,
        account=principal.account,
        key_id=principal.key_id,
        model=model,
        model_version=model_version,
        priority=terms.priority.name.lower(),
        input_tokens=input_tokens,
        created_us=terms.created_us or time.time_ns() // 1000,
        affinity=None if terms.session is None else f"{principal.account}/{terms.session}",
        n=terms.n,
        reject_if_busy=terms.reject_if_busy,
        engine=terms.engine,
        keys=keys,
        max_tokens=max_tokens,
        context_len=context_len,
        max_input_tokens=max_input_tokens,
        max_audio_ms=max_audio_ms,
        images=images,
        max_compute_ms=max_compute_ms,
        predictions=predictions,
        deadline_s=terms.deadline_s,
        api=terms.api,
        slots=slots,
        accepted_us=terms.accepted_us,
        keep_alive_s=terms.keep_alive_s,
    )


class Route(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Names of workers. Without `prefill` the decode worker computes the prompt itself."""

    decode: str
    prefill: str = ""
    cached_tokens: int = 0  # of the prompt, expected in the cache of the worker that computes it
    rate_limits: RateLimits | None = None  # of the caller, for the response's headers
    lease: str = ""  # of the budgets in which its cost is reserved; for the usage row
    reserved_pico: int = 0
    price: Price | None = None  # valid when the request was accepted; None: the model has none


class Fault(msgspec.Struct, frozen=True):
    """Why an attempt failed, for the next one: which workers to avoid, and which of them are to blame."""

    retryable: bool
    avoid: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()  # counted by their circuit breakers


def client_of(clients: Mapping[str, Client], worker: str) -> Client:
    """The connection to a worker of a route. Raises WorkerRemoved if it was removed after the route was decided."""
    client = clients.get(worker)
    if client is None:
        raise WorkerRemoved(worker)
    return client


def session_hash(request: RouteRequest, shared: int) -> int:
    """Identifies the conversation: by its session; else by its first block beyond the shared ones; else by its id."""
    if request.affinity is None and request.keys:
        first = min(shared, len(request.keys) // DIGEST_BYTES - 1) * DIGEST_BYTES
        return int.from_bytes(request.keys[first : first + 8], "little")
    name = request.id if request.affinity is None else request.affinity
    return int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
