"""A connection to an endpoint, as the fleet sees it: our own engines' and other people's servers' alike."""

from typing import Protocol

from emberline.balancer.endpoint import Endpoint
from emberline.protocol.frames import EngineInfo, EngineLoad, KVEvents


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
