"""Where an engine listens, what it does, and how much of it."""

from typing import Literal, Protocol

import msgspec

from emberline.protocol.frames import EngineInfo, EngineLoad, KVEvents, WorkerRole

Kind = Literal["emberline", "vllm", "sglang", "openai"]
DEFAULT_MAX_RUNNING = 16  # where an engine does not say


class Endpoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One engine process. The name is unique in the fleet and stable over restarts: affinity hashes it."""

    name: str
    address: str  # "unix:/path/to.sock", "tcp:host:port"; of other people's servers "http(s)://host:port"
    token: str = ""  # the secret to join
    role: WorkerRole = "both"
    kind: Kind = "emberline"
    models: tuple[str, ...] = ()
    alone: bool = True  # it can compute prompts; where not, it draws tokens beside a prefill endpoint only

    def split(self) -> tuple[str | None, str, int]:
        """(path, "", 0) of a Unix socket, (None, host, port) of a TCP one."""
        scheme, _, rest = self.address.partition(":")
        if scheme == "unix" and rest:
            return rest, "", 0
        host, _, port = rest.rpartition(":")
        if scheme != "tcp" or not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"endpoint {self.name}: {self.address!r} is neither unix:/path nor tcp:host:port")
        return None, host.strip("[]"), int(port)


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What an endpoint can hold. Known once it has answered."""

    max_running: int = DEFAULT_MAX_RUNNING
    kv_tokens: int = 0  # 0: unknown
    events: bool = True  # it tells what its prefix cache gains and loses

    @classmethod
    def of(cls, info: EngineInfo) -> "Capacity":
        return cls(max_running=info.max_running or DEFAULT_MAX_RUNNING, kv_tokens=info.kv_tokens)


class Watcher(Protocol):
    """Who follows what an endpoint does, beside those whose requests it serves: the core does."""

    def joined(self, info: EngineInfo, load: EngineLoad) -> None: ...

    def reported(self, load: EngineLoad) -> None: ...

    def cached(self, events: KVEvents) -> None: ...

    def left(self) -> None: ...


class Client(Protocol):
    info: EngineInfo | None  # of the last time it answered; outlives the connection
    load: EngineLoad
    progress_s: float  # monotonic time of the last sign that it computes
    problem: str  # empty while connected
    closing: bool
    watcher: Watcher | None

    @property
    def endpoint(self) -> Endpoint: ...

    @property
    def name(self) -> str: ...

    @property
    def connected(self) -> bool: ...

    def start(self) -> None:
        """Connect, and stay connected, in the background."""

    async def wait_connected(self, timeout_s: float) -> bool: ...

    async def close(self) -> None: ...
