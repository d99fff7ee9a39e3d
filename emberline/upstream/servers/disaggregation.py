"""Prefill/decode disaggregation on other servers: what each server is sent, in which order, per KV transfer method."""

import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

Fields = Mapping[str, Any]  # a body's top-level fields; large ones are `msgspec.Raw`, copied and never decoded

# A small GET on a port that is not the endpoint's own: (host and port, path) → JSON.
Fetch = Callable[[str, str], Awaitable[Any]]

encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Peer:
    """One of the two servers, as far as an adapter needs to know it."""

    name: str
    host: str
    bootstrap: str = ""  # host:port of its bootstrap server, which tells others how to reach its KV
    facts: dict[str, Any] = field(default_factory=dict)  # learnt from the server, forgotten when it fails


@dataclass(frozen=True, slots=True)
class Plan:
    """The bodies of both exchanges. Serial: prefill's reply completes decode's body."""

    prefill: Fields
    decode: Fields
    order: Literal["serial", "concurrent"]


class BadPrefillReply(Exception):
    """The decode server could not use what the prefill server replied; the message says why."""


class Adapter:
    """One KV transfer method. The base class is the simplest: both servers share a KV store and find blocks there."""

    cached_from_prefill = True  # only the prefill server knows what it found in its cache
    decodes_alone = True  # a decode server computes a prompt itself when no prefill server is named

    async def learn(self, prefill: Peer, fetch: Fetch) -> None:
        """Get the facts that `plan` needs and only the server knows; asked for once."""

    def plan(self, request: Fields, prefill: Peer) -> Plan:
        """Draws fresh transfer ids each time, so that a retry cannot meet the remains of an earlier attempt."""
        return Plan(prefill_body(request), request, "serial")

    def after_prefill(self, reply: Any) -> Fields:
        """Fields that prefill's reply adds to decode's body. Raises BadPrefillReply if decode could not use it."""
        return {}


def prefill_body(request: Fields, **added: Any) -> dict[str, Any]:
    """The request for one token, not streamed. `min_tokens` would contradict that; decode still gets it."""
    body = {name: value for name, value in request.items() if name not in ("stream_options", "min_tokens")}
    body |= {"stream": False, "max_tokens": 1}
    if "max_completion_tokens" in body:
        body["max_completion_tokens"] = 1
    return body | added


class MooncakeTransfer(Adapter):
    """vLLM's Mooncake connector: decode fetches the blocks under a transfer id that both servers get at once."""

    async def learn(self, prefill: Peer, fetch: Fetch) -> None:
        if "engine_id" in prefill.facts:
            return
        reply = await fetch(prefill.bootstrap, "/query")
        rank = reply.get("0") if isinstance(reply, dict) else None
        engine_id = rank.get("engine_id") if isinstance(rank, dict) else None
        if not isinstance(engine_id, str) or not engine_id:
            raise BadPrefillReply(f"its bootstrap server {prefill.bootstrap} names no engine id")
        prefill.facts["engine_id"] = engine_id

    def plan(self, request: Fields, prefill: Peer) -> Plan:
        transfer_id = f"xfer-{secrets.token_hex(16)}"
        send = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
        fetch = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_bootstrap_addr": f"http://{prefill.bootstrap}",
            "remote_engine_id": prefill.facts["engine_id"],
            "transfer_id": transfer_id,
        }
        body = prefill_body(request, kv_transfer_params=send)
        return Plan(body, {**request, "kv_transfer_params": fetch}, "concurrent")


_KEEP_BLOCKS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
}


class NixlTransfer(Adapter):
    """vLLM's NIXL connector: decode reads the blocks that prefill holds for it, as prefill's reply says."""

    def plan(self, request: Fields, prefill: Peer) -> Plan:
        return Plan(prefill_body(request, kv_transfer_params=_KEEP_BLOCKS), request, "serial")

    def after_prefill(self, reply: Any) -> Fields:
        """Verbatim: its content is between the two servers, and differs from version to version."""
        params = reply.get("kv_transfer_params") if isinstance(reply, dict) else None
        if params is None:
            raise BadPrefillReply("its reply has no kv_transfer_params: is it started with a kv_connector?")
        if not isinstance(params, dict) or not params.get("do_remote_prefill"):
            raise BadPrefillReply("its kv_transfer_params do not tell decode to fetch anything")
        return {"kv_transfer_params": params}


class SGLangBootstrap(Adapter):
    """SGLang: both servers get the request at once and meet in a room of the prefill server's bootstrap server."""

    cached_from_prefill = False
    decodes_alone = False

    def plan(self, request: Fields, prefill: Peer) -> Plan:
        host, _, port = prefill.bootstrap.rpartition(":")
        prompts = request.get("prompt")
        n = (request.get("n") or 1) * (len(prompts) if isinstance(prompts, list) else 1)  # one room per sequence
        rooms = [secrets.randbelow(1 << 63) for _ in range(n)]
        one = {"bootstrap_host": host, "bootstrap_port": int(port), "bootstrap_room": rooms[0]}
        many = {"bootstrap_host": [host] * n, "bootstrap_port": [int(port)] * n, "bootstrap_room": rooms}
        body = {**request, **(one if n == 1 else many)}
        return Plan(body, body, "concurrent")


_ADAPTERS: dict[tuple[str, str], Adapter] = {
    ("vllm", "nixl"): NixlTransfer(),
    ("vllm", "mooncake"): MooncakeTransfer(),
    ("vllm", "store"): Adapter(),
    ("sglang", "bootstrap"): SGLangBootstrap(),
    ("sglang", "store"): Adapter(),
}
DEFAULT_TRANSFER = {"vllm": "nixl", "sglang": "bootstrap"}


def adapter_for(kind: str, transfer: str) -> Adapter | None:
    """None: servers of that kind have no disaggregation that we know."""
    return _ADAPTERS.get((kind, transfer or DEFAULT_TRANSFER.get(kind, "")))


def transfers_of(kind: str) -> list[str]:
    return [transfer for known, transfer in _ADAPTERS if known == kind]
