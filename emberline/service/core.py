"""What must be in one place per node: sessions, admission, the ledger, kept responses, the metrics.

The pipeline sees it through `Core`. `LocalCore` is the thing itself; `remote_core` offers it to door processes.
"""

import logging
import time
from typing import Protocol

import msgspec
from prometheus_client.registry import Collector

from emberline.accounts.usage_ledger import UsageLedger, UsageRow
from emberline.balancer.admission_controller import AdmissionController
from emberline.balancer.balancer import Outcome
from emberline.balancer.fleet import Fleet, Member
from emberline.balancer.grants import Grants
from emberline.balancer.route_request import Route, RouteRequest
from emberline.service.health import Health, check
from emberline.service.metrics import BalancerMetrics, Counts, Metrics
from emberline.service.responses import Responses, ResponseStore
from emberline.service.sessions import Sessions
from emberline.text.prompt import Entry, Known

log = logging.getLogger("emberline.core")


class Memory(msgspec.Struct, frozen=True, array_like=True):
    """What a session is to remember of the conversation that has this digest."""

    account: str
    model_version: str
    digest: bytes
    entry: Entry


class Settlement(msgspec.Struct, frozen=True, omit_defaults=True):
    """The end of a request."""

    row: UsageRow
    gaps: Counts = msgspec.field(default_factory=Counts)
    memories: list[Memory] = []
    booked: bool = False  # whoever brought the request writes its usage row
    lost: tuple[str, ...] = ()  # endpoints whose fault it was


class Core(Protocol):
    @property
    def responses(self) -> ResponseStore: ...

    async def find(self, account: str, model_version: str, digests: list[bytes]) -> Known | None:
        """The longest known beginning of the conversation whose messages have these digests."""

    async def admit(self, ask: RouteRequest) -> Route:
        """Where to go, in flight there until settled. Overloaded, Unavailable. Asking again moves."""

    def began(self, request_id: str, cached_tokens: int) -> None:
        """The first token of a request is there."""

    async def settle(self, settlement: Settlement) -> None:
        """Give back the engine's room, remember the session, count; return once the usage row is durable."""

    async def health(self) -> Health: ...

    async def metrics(self) -> bytes: ...

    def refused(self, kind: str) -> None:
        """Count a request that was not admitted."""


class LocalCore:
    def __init__(
        self,
        fleet: Fleet,
        gate: AdmissionController,
        ledger: UsageLedger,
        sessions: Sessions,
        responses: Responses,
        grants: Grants | None = None,
    ) -> None:
        self.fleet = fleet
        self.gate = gate
        self.grants = grants or Grants(fleet)
        self.responses = responses
        self._ledger = ledger
        self._sessions = sessions
        self._metrics = Metrics(fleet)
        self._metrics.add(BalancerMetrics(gate.balancer))
        # By request id. Between two engines a request has none. Whether queued work was there when it came.
        self._open: dict[str, tuple[RouteRequest, Member | None, bool]] = {}

    async def find(self, account: str, model_version: str, digests: list[bytes]) -> Known | None:
        return self._sessions.find(account, model_version, digests)

    async def admit(self, ask: RouteRequest) -> Route:
        if self._release(ask.id):
            self._open[ask.id] = (ask, None, False)  # between two engines
        route = await self.gate.admit(ask)
        member = self.fleet[route.decode]
        self._open[ask.id] = (ask, member, bool(ask.engine) or member.batch_in_flight > 0)
        member.take(ask.n, batch=bool(ask.engine))
        return route

    def began(self, request_id: str, cached_tokens: int) -> None:
        self.gate.began(request_id, cached_tokens)

    async def settle(self, settlement: Settlement) -> None:
        row = settlement.row
        self._learn(row)
        self._release(row.id)
        self.gate.ended(row.id, _outcome(settlement), row.output_tokens, settlement.lost)
        for memory in settlement.memories:
            entry = memory.entry
            self._sessions.remember(
                memory.account, memory.model_version, memory.digest, entry.ids, entry.text_len, entry.text_digest
            )
        self._metrics.record(row, settlement.gaps)
        if not settlement.booked:
            await self._ledger.record(row)

    async def abandon(self, request_id: str) -> None:
        """A door died with this request open: it ends here, failed."""
        if request_id not in self._open:
            return
        ask, _, _ = self._open[request_id]
        row = UsageRow(
            id=ask.id,
            account=ask.account,
            key_id=ask.key_id,
            model=ask.model,
            model_version=ask.model_version,
            priority=ask.priority,
            input_tokens=ask.input_tokens,
            status="failed",
            created_us=ask.created_us,
            finished_us=time.time_ns() // 1000,
        )
        log.warning("the door of a request died", extra={"request_id": request_id})
        await self.settle(Settlement(row))

    async def health(self) -> Health:
        return check(self.fleet, self.gate.snapshot())

    async def metrics(self) -> bytes:
        return self._metrics.expose()

    def count(self, collector: Collector) -> None:
        """Expose these figures with the others."""
        self._metrics.add(collector)

    def refused(self, kind: str, times: int = 1) -> None:
        self._metrics.refused(kind, times)

    def _release(self, request_id: str) -> bool:
        """Whether the request was open."""
        if request_id not in self._open:
            return False
        ask, member, _ = self._open.pop(request_id)
        if member is not None:
            member.give_back(ask.n, batch=bool(ask.engine))
            self.grants.stir()
        return True

    def _learn(self, row: UsageRow) -> None:
        """How long a request that is not queued work waited for its first token, beside queued work or without."""
        _, member, mixed = self._open.get(row.id, (None, None, False))
        if member is not None and row.priority != "batch" and row.first_token_us is not None:
            self.grants.heard(member, (row.first_token_us - row.created_us) / 1e6, mixed)


def _outcome(settlement: Settlement) -> Outcome:
    if settlement.row.status == "failed":
        return "engine_failed" if settlement.lost else "client_error"
    return "finished" if settlement.row.status == "finished" else "cancelled"
