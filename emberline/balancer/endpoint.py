"""A worker's address, role and capacity, and the events by which its connection keeps the balancer informed."""

from typing import Literal, Protocol

import msgspec

from emberline.config import EndpointConfig
from emberline.protocol.block_hash import bytes_per_token
from emberline.protocol.errors import BadInput
from emberline.protocol.frames import EngineInfo, EngineLoad, KVEvents, WorkerRole

Kind = Literal["emberline", "vllm", "sglang", "openai", "anthropic", "gemini", "any-llm"]
DEFAULT_MAX_RUNNING = 16  # where an engine does not say


class Endpoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One worker. The name is unique in the fleet and stable over restarts: session affinity hashes it."""

    name: str
    address: str  # "unix:/path/to.sock", "tcp:host:port"; of upstream servers "http(s)://host:port"
    token: str = ""  # the secret to join
    role: WorkerRole = "both"
    kind: Kind = "emberline"
    models: tuple[str, ...] = ()
    tls_host: str = ""  # the name in its certificate; empty: the connection is not encrypted
    region: str = ""  # empty: none
    account: str = ""  # that alone may use it; empty: all
    version: int = 0  # of the protocol that it speaks; 0: not known, and the newest is tried first
    alone: bool = True  # it can compute prompts; if not, it decodes only what a prefill worker computed

    def split(self) -> tuple[str | None, str, int]:
        """(path, "", 0) of a Unix socket, (None, host, port) of a TCP one."""
        scheme, _, rest = self.address.partition(":")
        if scheme == "unix" and rest:
            return rest, "", 0
        host, _, port = rest.rpartition(":")
        if scheme != "tcp" or not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"endpoint {self.name}: {self.address!r} is neither unix:/path nor tcp:host:port")
        return None, host.strip("[]"), int(port)


def provider_pool(name: str) -> str:
    """Name the pool of a provider's endpoint. A provider's models cannot be listed, so the endpoint serves them all
    under this name."""
    return f"{name.lower()}/*"


def logged_name(worker: str) -> str:
    """The worker's name in the log of requests: that of the provider if the worker is called like a provider's pool."""
    return worker.removesuffix("/*")


def engine_endpoint(config: EndpointConfig) -> Endpoint:
    """A configured Emberline worker on another machine. It names its one model: the core tokenizes for it."""
    if len(config.models) != 1:
        raise BadInput(f"endpoint {config.name}: `models` must name the one model that this worker serves")
    address = config.url.replace("://", ":", 1)
    endpoint = Endpoint(
        name=config.name, address=address, token=config.key or "", role=config.role, models=config.models
    )
    try:
        endpoint.split()
    except ValueError:
        raise BadInput(
            f"endpoint {config.name}: the url of a worker is tcp://host:port or unix:/path, not {config.url!r}"
        ) from None
    return endpoint


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """Capacity of a worker, known once the worker has connected."""

    max_running: int = DEFAULT_MAX_RUNNING
    kv_tokens: int = 0  # 0: unknown
    kv_token_bytes: float = 0.0  # of KV that tiers hold for a token of a long prompt; 0: unknown
    events: bool = True  # it publishes KV events
    heartbeats: bool = False  # its connection notices when it hangs
    shared: bool = False  # a provider, where requests may hang for as long as one likes: no account gets all its slots
    round_trip_s: float = 0.0  # of the network, as measured when it connected
    n_devices: int = 0  # of ours that it occupies; 0: an upstream server

    @classmethod
    def of(cls, info: EngineInfo, events: bool = True, round_trip_s: float = 0.0) -> "Capacity":
        return cls(
            max_running=info.max_running or DEFAULT_MAX_RUNNING,
            kv_tokens=info.kv_tokens,
            kv_token_bytes=bytes_per_token(info.kv_groups),
            events=events,
            heartbeats=info.heartbeat_s > 0,
            round_trip_s=round_trip_s,
            n_devices=info.layout.n_ranks,
        )


class WorkerListener(Protocol):
    """Receives the events of a worker from its connection. Implemented by the core's admission controller."""

    def joined(self, endpoint: Endpoint, capacity: Capacity, load: EngineLoad | None) -> None:
        """`load` is None of a worker that does not report."""

    def resized(self, name: str, capacity: Capacity) -> None: ...

    def reported(self, name: str, load: EngineLoad) -> None: ...

    def kv_events(self, name: str, events: KVEvents) -> None: ...

    def left(self, name: str, why: str) -> None: ...

    def distrusted(self, name: str) -> None:
        """The worker said what cannot be true: open its circuit breaker."""


class WorkerConnection(Protocol):
    listener: WorkerListener | None

    @property
    def endpoint(self) -> Endpoint: ...
