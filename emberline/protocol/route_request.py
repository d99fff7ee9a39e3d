"""What admission is asked and what it answers: a request to be routed, its route, and why an attempt failed."""

from collections.abc import Mapping
from hashlib import blake2b
from typing import TypeVar

import msgspec

from emberline.protocol.block_hash import DIGEST_BYTES
from emberline.protocol.errors import WorkerRemoved
from emberline.protocol.price import Price
from emberline.protocol.rate_limits import RateLimits

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
    lost: tuple[str, ...] = ()  # workers that just failed it: avoided, and blamed once
    deadline_s: float | None = None  # seconds from now by which it must have ended
    api: str = ""  # for the usage row
    is_retry: bool = False  # of a request that counts for the limits on requests already
    slots: str = ""  # an address of the account's own, whose slots are apart from the provider's; empty: the provider's
    accepted_us: int = 0  # of a job: when it was queued, which decides its price; 0: `created_us`


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
    """What a failed attempt tells the next one: which workers to avoid, and which of them are to blame."""

    retryable: bool
    avoid: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()  # counted by their circuit breakers


def client_of(clients: Mapping[str, Client], worker: str) -> Client:
    """The connection to a worker of a route. WorkerRemoved: it was removed after the route was decided."""
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
