"""What every pattern answers: what to tell the prefill server, what the decode server, and in which order."""

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
