"""What exists once per node: admission and the in-flight ledger, sessions, usage rows, stored responses, metrics.

The pipeline uses it through `Core`: `LocalCore` in the core process, `RemoteCore` in the other HTTP workers.
"""

import logging
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec
from prometheus_client.registry import Collector

from emberline.accounts.usage_ledger import UsageLedger, UsageRow
from emberline.balancer.admission_controller import AdmissionController
from emberline.balancer.balancer import Outcome
from emberline.balancer.endpoint import WorkerConnection
from emberline.balancer.grants import SHARE, Grants
from emberline.balancer.route_request import Route, RouteRequest
from emberline.service.health import Connection, Health, check
from emberline.service.metrics import Counts, Metrics
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

    async def admit(self, request: RouteRequest) -> Route:
        """Which workers to use; in flight there until settled. Overloaded, Unavailable. Asking again moves it."""

    def began(self, request_id: str, cached_tokens: int) -> None:
        """The first token of a request is there."""

    async def settle(self, settlement: Settlement) -> None:
        """Give back the engine's room, remember the session, count; return once the usage row is durable."""

    async def health(self) -> Health: ...

    async def metrics(self) -> bytes: ...

    def refused(self, kind: str) -> None:
        """Count a request that was not admitted."""


class CoreConnection(Connection, WorkerConnection, Protocol):
    """The core's connection to a worker: an engine client or an upstream server."""


class LocalCore:
    def __init__(
        self,
        admission: AdmissionController,
        connections: Sequence[CoreConnection],
        usage: UsageLedger,
        sessions: Sessions,
        responses: Responses,
        job_share: float = SHARE,
    ) -> None:
        """`connections` are not started yet."""
        self.admission = admission
        self.grants = Grants(admission.balancer, job_share)
        self.responses = responses
        self._connections = connections
        self._usage = usage
        self._sessions = sessions
        self._metrics = Metrics(admission.snapshot)
        for connection in connections:
            admission.watch(connection)

    async def find(self, account: str, model_version: str, digests: list[bytes]) -> Known | None:
        return self._sessions.find(account, model_version, digests)

    async def admit(self, request: RouteRequest) -> Route:
        return await self.admission.admit(request)

    def began(self, request_id: str, cached_tokens: int) -> None:
        self.admission.first_token(request_id, cached_tokens)

    async def settle(self, settlement: Settlement) -> None:
        row = settlement.row
        self._observe_ttft(row)
        self.admission.ended(row.id, _outcome(settlement), row.output_tokens, settlement.lost)
        self.grants.notify_room()
        for memory in settlement.memories:
            entry = memory.entry
            self._sessions.remember(
                memory.account, memory.model_version, memory.digest, entry.ids, entry.text_len, entry.text_digest
            )
        self._metrics.record(row, settlement.gaps)
        if not settlement.booked:
            await self._usage.record(row)

    async def abandon(self, request_id: str) -> None:
        """The HTTP worker that owned this request has died: if it was dispatched, it ends here, failed."""
        record = self.admission.find(request_id)
        if record is None or not record.admitted:
            return
        request = record.request
        row = UsageRow(
            id=request.id,
            account=request.account,
            key_id=request.key_id,
            model=request.model,
            model_version=request.model_version,
            priority=request.priority,
            input_tokens=request.input_tokens,
            status="failed",
            created_us=request.created_us,
            finished_us=time.time_ns() // 1000,
        )
        log.warning("the HTTP worker of a request died", extra={"request_id": request_id})
        await self.settle(Settlement(row))

    async def health(self) -> Health:
        return check(self._connections, self.admission.snapshot())

    async def metrics(self) -> bytes:
        return self._metrics.expose()

    def count(self, collector: Collector) -> None:
        """Expose these figures with the others."""
        self._metrics.add(collector)

    def refused(self, kind: str, times: int = 1) -> None:
        self._metrics.refused(kind, times)

    def _observe_ttft(self, row: UsageRow) -> None:
        """Of a request that is no job: how jobs on the same worker slow it down."""
        record = self.admission.find(row.id)
        if record is None or record.route is None or record.is_job or row.first_token_us is None:
            return
        ttft_s = (row.first_token_us - row.created_us) / 1e6
        self.grants.observe_ttft(row.model, record.route.decode, ttft_s, record.mixed)


def _outcome(settlement: Settlement) -> Outcome:
    if settlement.row.status == "failed":
        return "engine_failed" if settlement.lost else "client_error"
    return "finished" if settlement.row.status == "finished" else "cancelled"
