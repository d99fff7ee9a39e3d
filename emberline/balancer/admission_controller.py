"""Where requests wait for their route: the balancer decides, the gate gives it a clock and wakes those who may go."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

import msgspec

from emberline.balancer.balancer import Balancer, Outcome
from emberline.balancer.cost_model import Settings
from emberline.balancer.endpoint import Capacity, Client
from emberline.balancer.route_request import Route, RouteRequest
from emberline.balancer.snapshot import Snapshot
from emberline.protocol.block_hash import DIGEST_BYTES
from emberline.protocol.errors import BadInput
from emberline.protocol.frames import EngineInfo, EngineLoad, KVEvents

log = logging.getLogger("emberline.balancer")


class AdmissionController:
    """Lives in the core's event loop."""

    def __init__(self, balancer: Balancer | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.balancer = balancer or Balancer(Settings())
        self._clock = clock
        self._waiting: dict[str, asyncio.Future[Route]] = {}  # by request id
        self._alarm: asyncio.TimerHandle | None = None

    def watch(self, client: Client, models: Iterable[str]) -> None:
        """Learn from the client's connection what its endpoint does. Before the client is started."""
        client.watcher = _Watch(self, client, tuple(models))

    async def admit(self, ask: RouteRequest) -> Route:
        """Wait for a route, charged until `ended`. Overloaded, Unavailable, DeadlineExceeded. Asking again moves."""
        if ask.engine:
            return self.balancer.place(ask, self._clock())
        self.balancer.offer(ask, self._clock())
        waiting: asyncio.Future[Route] = asyncio.get_running_loop().create_future()
        self._waiting[ask.id] = waiting
        self.turn()
        try:
            return await waiting
        except asyncio.CancelledError:
            self._waiting.pop(ask.id, None)
            self.ended(ask.id, "cancelled")
            raise

    def began(self, request_id: str, cached_tokens: int) -> None:
        """Its first token is there."""
        self.balancer.began(request_id, self._clock(), cached_tokens)
        self.turn()

    def ended(self, request_id: str, outcome: Outcome, output_tokens: int = 0, blame: tuple[str, ...] = ()) -> None:
        """Once and for all; `blame`: endpoints whose fault it was."""
        self.balancer.ended(request_id, self._clock(), outcome, output_tokens, blame)
        self.turn()

    def snapshot(self) -> Snapshot:
        return self.balancer.snapshot(self._clock())

    def close(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()

    def turn(self) -> None:
        """Let go who may, and see to it that nobody is forgotten."""
        now_s = self._clock()
        for ticket in self.balancer.dispatch(now_s):
            waiting = self._waiting.pop(ticket.ask.id, None)
            if waiting is None or waiting.done():  # it has left meanwhile
                self.balancer.ended(ticket.ask.id, now_s, "cancelled")
            elif ticket.error is not None:
                waiting.set_exception(ticket.error)
            else:
                assert ticket.route is not None
                waiting.set_result(ticket.route)
        self.close()
        wake_s = self.balancer.wake_s(now_s)
        if wake_s is not None:
            self._alarm = asyncio.get_running_loop().call_later(max(0.001, wake_s - now_s), self.turn)

    # --- what connections tell ---------------------------------------------------------------------------------------

    def joined(self, client: Client, models: tuple[str, ...], info: EngineInfo, load: EngineLoad) -> None:
        now_s = self._clock()
        endpoint = msgspec.structs.replace(client.endpoint, role=info.role, models=models)
        try:
            capacity = msgspec.structs.replace(Capacity.of(info), events=getattr(client, "tells_kv", True))
            self.balancer.join(endpoint, capacity, now_s)
        except BadInput as error:
            log.error("%s", error.message)
            return
        self.balancer.report(endpoint.name, load, now_s)
        self.turn()

    def reported(self, name: str, load: EngineLoad) -> None:
        self.balancer.report(name, load, self._clock())
        if self._waiting:
            self.turn()

    def cached(self, name: str, events: KVEvents) -> None:
        now_s = self._clock()
        if len(events.stored) % DIGEST_BYTES or len(events.removed) % DIGEST_BYTES:
            self.balancer.failed(name, now_s)
        elif events.whole:
            self.balancer.whole(name, events.stored, now_s)
        else:
            self.balancer.removed(name, events.removed, now_s)
            self.balancer.stored(name, events.stored, now_s)

    def left(self, name: str, why: str) -> None:
        self.balancer.down(name, self._clock(), why)
        self.turn()


class _Watch:
    """One endpoint's connection, as the gate follows it."""

    def __init__(self, gate: AdmissionController, client: Client, models: tuple[str, ...]) -> None:
        self._gate = gate
        self._client = client
        self._models = models

    def joined(self, info: EngineInfo, load: EngineLoad) -> None:
        self._gate.joined(self._client, self._models, info, load)

    def reported(self, load: EngineLoad) -> None:
        self._gate.reported(self._client.name, load)

    def cached(self, events: KVEvents) -> None:
        self._gate.cached(self._client.name, events)

    def left(self) -> None:
        self._gate.left(self._client.name, self._client.problem)
