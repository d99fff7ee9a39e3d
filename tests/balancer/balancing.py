"""A balancer over workers without engines, for tests."""

from hashlib import blake2b
from itertools import count
from typing import Any

from emberline.balancer.balancer import Balancer
from emberline.balancer.cost_model import Settings
from emberline.balancer.endpoint import Capacity, Endpoint
from emberline.balancer.ledger import InFlightLoad
from emberline.protocol.block_hash import BLOCK_TOKENS
from emberline.protocol.route_request import Route, RouteRequest

MODEL = "m"
_ids = count()


def endpoint(name: str, role: Any = "both", address: str = "") -> Endpoint:
    return Endpoint(name=name, address=address or f"unix:/{name}", role=role, models=(MODEL,))


def fleet(*roles: Any, max_running: int = 16, kv_tokens: int = 0, events: bool = True, **settings: Any) -> Balancer:
    """Workers e0, e1, … with these roles, of two devices each, connected at time 0."""
    balancer = Balancer(Settings(**settings))
    for i, role in enumerate(roles):
        capacity = Capacity(max_running=max_running, kv_tokens=kv_tokens, events=events, n_devices=2)
        balancer.fleet.join(endpoint(f"e{i}", role), capacity, 0.0)
    return balancer


def keys(*parts: tuple[str, int]) -> bytes:
    """A chain of content keys: so many blocks of each named part, each key depending on those before it."""
    chain, out = b"", []
    for name, n in parts:
        for i in range(n):
            chain = blake2b(f"{name}/{i}".encode(), key=chain, digest_size=16).digest()
            out.append(chain)
    return b"".join(out)


def request(chain: bytes = b"", tokens: int = 0, account: str = "a", **more: Any) -> RouteRequest:
    return RouteRequest(
        id=more.pop("id", f"r{next(_ids)}"),
        account=account,
        model=more.pop("model", MODEL),
        model_version="v",
        input_tokens=tokens or len(chain) // 16 * BLOCK_TOKENS + 1,
        created_us=0,
        keys=chain,
        **more,
    )


def send(balancer: Balancer, wanted: RouteRequest, now_s: float = 0.0) -> Route:
    """Enqueue a request that must be dispatched at once."""
    record = balancer.enqueue(wanted, now_s)
    assert record in balancer.dispatch(now_s)
    assert record.route is not None, record.error
    return record.route


def serve(
    balancer: Balancer, wanted: RouteRequest, now_s: float = 0.0, took_s: float = 0.01, output_tokens: int = 10
) -> Route:
    """A request from admission to its end, with KV events."""
    route = send(balancer, wanted, now_s)
    balancer.first_token(wanted.id, now_s + took_s)
    for name in {route.decode, route.prefill} - {""}:
        balancer.fleet.stored(name, wanted.keys, now_s + took_s)
    balancer.ended(wanted.id, now_s + took_s, "finished", output_tokens)
    return route


def open_ids(balancer: Balancer) -> set[str]:
    """Requests that have a record."""
    return {record.request.id for record in balancer.ledger}


def nothing_left(balancer: Balancer, now_s: float) -> bool:
    """No request is on record, and no worker has load."""
    snapshot = balancer.snapshot(now_s)
    return (
        not open_ids(balancer)
        and not snapshot.dispatched
        and not snapshot.waiting
        and not len(balancer.queue)
        and all(worker.in_flight == InFlightLoad() for worker in balancer.fleet.workers.values())
    )
