"""What every pattern answers: what to tell the prefill server, what the decode server, and in which order."""

import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

Fields = Mapping[str, Any]  # a body's top-level fields; large ones are `msgspec.Raw`, copied and never read

# A small GET on a server that is not the endpoint itself: (host and port, path) → JSON.
Fetch = Callable[[str, str], Awaitable[Any]]


@dataclass(slots=True)
class Peer:
    """One of the two servers, as far as an adapter needs to know it."""

    name: str
    host: str
    bootstrap: str = ""  # host:port where it tells others how to reach its KV
    facts: dict[str, Any] = field(default_factory=dict)  # learnt once, forgotten when the server fails


@dataclass(frozen=True, slots=True)
class Plan:
    prefill: Fields
    decode: Fields
    order: Literal["serial", "concurrent"]


class BadAnswer(Exception):
    """The prefill server answered something that decode could not use; the message says what."""


class Adapter(Protocol):
    cached_from_prefill: bool  # decode does not know, or lies about, what prefill found in its cache
    decodes_alone: bool  # a decode server computes a prompt itself when it is told of no prefill

    def prepare(self, request: Fields, prefill: Peer, decode: Peer) -> Plan:
        """Bodies for both legs; every call draws fresh ids, so a retry never meets the leavings of the try before."""

    def after_prefill(self, answer: Any) -> Fields:
        """What prefill's answer adds to decode's body. BadAnswer where decode could do nothing with it."""

    async def learn(self, prefill: Peer, fetch: Fetch) -> None:
        """Facts that `prepare` needs and only the server knows; asked for once."""


encode = msgspec.json.Encoder().encode


_DROPPED = frozenset({"stream_options", "min_tokens"})


def prefill_leg(request: Fields, **added: Any) -> dict[str, Any]:
    """`min_tokens` would contradict the one token; decode still gets it."""
    leg = {name: value for name, value in request.items() if name not in _DROPPED}
    leg |= {"stream": False, "max_tokens": 1}
    if "max_completion_tokens" in leg:
        leg["max_completion_tokens"] = 1
    return leg | added


class Mooncake:
    cached_from_prefill = True
    decodes_alone = True

    def prepare(self, request: Fields, prefill: Peer, decode: Peer) -> Plan:
        transfer = f"xfer-{secrets.token_hex(16)}"
        produced = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
        fetched = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_bootstrap_addr": f"http://{prefill.bootstrap}",
            "remote_engine_id": prefill.facts["engine_id"],
            "transfer_id": transfer,
        }
        return Plan(
            prefill_leg(request, kv_transfer_params=produced), {**request, "kv_transfer_params": fetched}, "concurrent"
        )

    def after_prefill(self, answer: Any) -> Fields:
        return {}

    async def learn(self, prefill: Peer, fetch: Fetch) -> None:
        if "engine_id" in prefill.facts:
            return
        answer = await fetch(prefill.bootstrap, "/query")
        rank = answer.get("0") if isinstance(answer, dict) else None
        engine_id = rank.get("engine_id") if isinstance(rank, dict) else None
        if not isinstance(engine_id, str) or not engine_id:
            raise BadAnswer(f"its bootstrap server {prefill.bootstrap} names no engine id")
        prefill.facts["engine_id"] = engine_id


_KEEP_BLOCKS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class NixlPull:
    cached_from_prefill = True
    decodes_alone = True

    def prepare(self, request: Fields, prefill: Peer, decode: Peer) -> Plan:
        return Plan(prefill_leg(request, kv_transfer_params=_KEEP_BLOCKS), request, "serial")

    def after_prefill(self, answer: Any) -> Fields:
        """Verbatim: what is in it is between the two servers, and differs from version to version."""
        params = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
        if params is None:
            raise BadAnswer("its answer has no kv_transfer_params: is it started with a kv_connector?")
        if not isinstance(params, dict) or not params.get("do_remote_prefill"):
            raise BadAnswer("its kv_transfer_params do not tell decode to fetch anything")
        return {"kv_transfer_params": params}

    async def learn(self, prefill: Peer, fetch: Fetch) -> None:
        return None


ROOMS = 1 << 63


class SGLang:
    cached_from_prefill = False  # decode reports it
    decodes_alone = False  # it refuses requests without a room

    def prepare(self, request: Fields, prefill: Peer, decode: Peer) -> Plan:
        host, _, port = prefill.bootstrap.rpartition(":")
        n = _sequences(request)
        if n == 1:
            meeting: dict[str, Any] = {
                "bootstrap_host": host,
                "bootstrap_port": int(port),
                "bootstrap_room": secrets.randbelow(ROOMS),
            }
        else:
            meeting = {
                "bootstrap_host": [host] * n,
                "bootstrap_port": [int(port)] * n,
                "bootstrap_room": [secrets.randbelow(ROOMS) for _ in range(n)],
            }
        body = {**request, **meeting}
        return Plan(body, body, "concurrent")

    def after_prefill(self, answer: Any) -> Fields:
        return {}

    async def learn(self, prefill: Peer, fetch: Fetch) -> None:
        return None


def _sequences(request: Fields) -> int:
    """How many rooms: one per choice of every prompt."""
    prompts = request.get("prompt")
    return (request.get("n") or 1) * (len(prompts) if isinstance(prompts, list) else 1)


class SharedStore:
    cached_from_prefill = True
    decodes_alone = True

    def prepare(self, request: Fields, prefill: Peer, decode: Peer) -> Plan:
        return Plan(prefill_leg(request), request, "serial")

    def after_prefill(self, answer: Any) -> Fields:
        return {}

    async def learn(self, prefill: Peer, fetch: Fetch) -> None:
        return None


_ADAPTERS: dict[tuple[str, str], Adapter] = {
    ("vllm", "nixl"): NixlPull(),
    ("vllm", "mooncake"): Mooncake(),
    ("vllm", "store"): SharedStore(),
    ("sglang", "bootstrap"): SGLang(),
    ("sglang", "store"): SharedStore(),
}
DEFAULT_TRANSFER = {"vllm": "nixl", "sglang": "bootstrap"}


def adapter_for(kind: str, transfer: str) -> Adapter | None:
    """None: servers of that kind cannot be told to work in pairs."""
    return _ADAPTERS.get((kind, transfer or DEFAULT_TRANSFER.get(kind, "")))


def transfers_of(kind: str) -> list[str]:
    return [transfer for known, transfer in _ADAPTERS if known == kind]
