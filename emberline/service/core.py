"""The core, of which a node has one: admission and in-flight ledger, sessions, usage rows, responses, metrics.

The pipeline uses it through `CoreAccess`: `LocalCore` in the core process, `core_link.RemoteCore` in the other HTTP
workers.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
from prometheus_client.registry import Collector

from emberline.accounts.limit_enforcement import LimitEnforcer
from emberline.accounts.price_store import PriceStore
from emberline.accounts.prices import PriceTable
from emberline.accounts.usage_ledger import UsageLedger
from emberline.accounts.usage_row import UsageRow, usage_row
from emberline.balancer.admission_controller import AdmissionController
from emberline.balancer.balancer import Outcome
from emberline.balancer.endpoint import WorkerConnection
from emberline.balancer.grants import SHARE, Grants
from emberline.catalog.aliases import Aliases
from emberline.cluster.cluster import Cluster, ClusterStatus
from emberline.cluster.membership import Membership, WorkerChange
from emberline.cluster.scaled_models import ScaledModels
from emberline.protocol.errors import Unsupported
from emberline.protocol.events import Usage
from emberline.protocol.member import Challenge, Signed
from emberline.protocol.route_request import Route, RouteRequest
from emberline.service.event_log import EventLogs, MemoryEventLogs
from emberline.service.responses import DatabaseResponses, ResponseStore
from emberline.service.sessions import SessionOwner, Sessions
from emberline.telemetry.health import Connection, Health, check, disk_problem
from emberline.telemetry.history import History
from emberline.telemetry.metrics import Counts, Metrics
from emberline.telemetry.status import Status, StatusQuery, status
from emberline.text.prompt import EncodedPrefix, KnownPrefix

log = logging.getLogger("emberline.core")


class SessionEntry(msgspec.Struct, frozen=True, array_like=True):
    """Token ids of the conversation that has this digest, for later turns."""

    account: str
    model_version: str
    digest: bytes
    entry: EncodedPrefix
    salt: bytes = b""  # of the account
    session: str | None = None  # the client's id of the conversation


class PurgedTexts(msgspec.Struct, frozen=True):
    """Numbers of what the core has forgotten of accounts' conversations."""

    conversations: int  # prefixes whose token ids were known
    streams: int  # event logs of resumable streams that have ended


class RequestEnd(msgspec.Struct, frozen=True, omit_defaults=True):
    """Outcome of a request that was admitted."""

    row: UsageRow
    inter_token: Counts = msgspec.field(default_factory=Counts)  # latencies
    is_job: bool = False  # the job queue writes the usage row itself, and settles the reservation then
    lost: tuple[str, ...] = ()  # workers that failed it
    operation: str = "chat"  # `gen_ai.operation.name` and `gen_ai.provider.name`
    provider: str = "emberline"


class Core(Protocol):
    """The part of the core that every request uses."""

    async def find(self, account: str, model_version: str, digests: list[bytes]) -> KnownPrefix | None:
        """Returns the longest known prefix of the conversation whose messages have these digests."""

    def remember(self, entries: Sequence[SessionEntry]) -> None:
        """Keep token ids of conversations, for `find`."""

    async def admit(self, request: RouteRequest) -> Route:
        """Choose workers; the request is in flight there until it is finalized. Asking again moves the request.
        Raises Overloaded or Unavailable if no worker can take the request."""

    async def n_ahead(self, request_id: str) -> int | None:
        """Number of requests that wait for workers before this one. Returns None if this one does not wait."""

    def first_token(self, request_id: str, cached_tokens: int) -> None:
        """Note that a request has its first token, and that `cached_tokens` of its prompt were cached."""

    def checkpoint(self, rows: Sequence[UsageRow]) -> None:
        """Note what running requests have used by now: it is recorded if they never end."""

    async def finalize(self, end: RequestEnd) -> int:
        """Remove the request's record, update the metrics; return once the usage row is durable.

        Returns the device milliseconds that the request had, for a job's owner, who writes the row itself."""

    def refused(self, kind: str, times: int = 1) -> None:
        """Count requests that were not admitted, by kind of error."""


class Operations(Protocol):
    """Operations that the APIs offer to the server's operator."""

    async def health(self) -> Health: ...

    async def metrics(self) -> bytes:
        """Returns the metrics of the whole server in the Prometheus text format."""

    async def status(self, query: StatusQuery) -> Status: ...

    async def refresh_prices(self) -> None:
        """Read the prices from the store, where they were changed; return once the core charges them."""

    async def change_alias(self, name: str, targets: Mapping[str, int] | None) -> None:
        """Set an alias, or remove it (None). All HTTP workers are told before this returns."""

    async def load_model(
        self, model: str, action: Literal["load", "unload"], keep_alive_s: float | None = None
    ) -> None:
        """Load or unload a model for an operator; return when it is done. `keep_alive_s`: see GenerateRequest."""

    async def purge(self, account: str | None, session: str | None) -> PurgedTexts:
        """Forget what the core remembers of the conversations of an account, of one of its sessions, or (None) of
        all. The streams of a session are not known: they are forgotten with those of the account."""


class ClusterAdmin(Protocol):
    """Workers of the core, and the cluster that they join."""

    async def change_workers(self, change: WorkerChange) -> list[str]:
        """Let workers join, leave or drain; returns their names."""

    async def join_challenge(self) -> Challenge:
        """Returns a challenge for a worker that wants to announce itself."""

    async def announce(self, signed: Signed) -> Signed:
        """Take the announcement of a worker; returns the signed answer to it."""

    async def cluster_status(self) -> ClusterStatus: ...

    async def scaling_plan(self, model: str, limit: int) -> dict[str, Any]:
        """Returns what the planner saw, did and why, of one model, or of all (empty), as plain data."""

    async def set_scaling_bounds(self, model: str, changes: dict[str, Any] | None) -> dict[str, Any] | None:
        """Change the scaling bounds of a model; None restores the configured ones. Returns the bounds in effect."""


class CoreAccess(Core, Protocol):
    """The core with all that it keeps, as the pipeline and the APIs use it in any process."""

    @property
    def responses(self) -> ResponseStore: ...

    @property
    def event_logs(self) -> EventLogs: ...

    @property
    def aliases(self) -> Aliases: ...

    @property
    def operations(self) -> Operations: ...

    @property
    def cluster_admin(self) -> ClusterAdmin: ...


class ModelLoading(Protocol):
    """Loads and unloads the models of this machine."""

    def admitting(self, model: str, keep_alive_s: float | None = None) -> float:
        """Return the seconds that a request about to be admitted may wait for its model; 0 if the model is not loaded
        on demand. Raises Unavailable if the model cannot be loaded."""

    def statuses(self) -> list[dict[str, Any]]:
        """States of the models that are loaded and unloaded here, as plain data."""

    async def ask(self, model: str, action: Literal["load", "unload"], keep_alive_s: float | None = None) -> None:
        """Returns when it is done. NotFound, Unavailable."""


class CoreConnection(Connection, WorkerConnection, Protocol):
    """The core's connection to a worker: an engine client or an upstream server."""


class LocalCore:
    """Implements CoreAccess, Operations and ClusterAdmin in the core process."""

    def __init__(
        self,
        admission: AdmissionController,
        connections: Sequence[CoreConnection],
        usage: UsageLedger,
        sessions: Sessions,
        responses: DatabaseResponses,
        job_share: float = SHARE,
        data_dir: Path | None = None,
        limits: LimitEnforcer | None = None,
        prices: PriceStore | None = None,
    ) -> None:
        """`connections` are not started yet. Without being able to write to `data_dir`, no request can be served."""
        self.limits = limits  # of accounts and keys
        self._data_dir = data_dir
        self.admission = admission
        self.grants = Grants(admission.balancer.fleet, job_share)
        self.responses = responses
        self.event_logs = MemoryEventLogs()
        self.prices = PriceTable() if prices is None else prices.table
        self.price_store = prices
        self.membership: Membership | None = None  # set by whoever owns the connections
        self.cluster: Cluster | None = None  # set where workers may join
        self.scaling: ScaledModels | None = None  # the same
        self.aliases = Aliases()  # replaced by the stored ones
        self.models: ModelLoading | None = None  # set where this machine loads and unloads models
        self.know_model: Callable[[str], Awaitable[None]] | None = None  # an HTTP worker may know a provider first
        self._connections: list[Connection] = []
        self.usage = usage
        self.sessions = sessions
        self.lists_model: Callable[[str], bool] = lambda model: False  # True for one that an upstream server offers
        self._metrics = Metrics(admission.snapshot, self._knows_model)
        self.history = History(admission.snapshot)
        for connection in connections:
            self.add(connection)

    @property
    def operations(self) -> Operations:
        return self

    @property
    def cluster_admin(self) -> ClusterAdmin:
        return self

    def add(self, connection: CoreConnection) -> None:
        """Add a worker whose connection is not started yet."""
        self.admission.watch(connection)
        self._connections.append(connection)

    def discard(self, name: str) -> None:
        """Forget a worker that has left for good."""
        self.admission.remove(name)
        self.grants.forget(name)
        self._connections = [connection for connection in self._connections if connection.name != name]

    async def change_workers(self, change: WorkerChange) -> list[str]:
        assert self.membership is not None
        if self.cluster is not None and change.action != "join" and self.cluster.follows(change.name):
            if change.action == "restart":
                self.membership.restart_worker(change.name)
            elif change.action == "role":
                assert change.role is not None
                await self.cluster.set_role(change.name, change.role, change.wait_s)
            else:
                await self.cluster.change(change.name, change.action)
            return [change.name]
        return await self.membership.change(change)

    async def join_challenge(self) -> Challenge:
        return self._own_cluster.challenge()

    async def announce(self, signed: Signed) -> Signed:
        return await self._own_cluster.announce(signed)

    async def cluster_status(self) -> ClusterStatus:
        return await self._own_cluster.status()

    async def scaling_plan(self, model: str, limit: int) -> dict[str, Any]:
        return await self._own_scaling.plan(model, limit)

    async def set_scaling_bounds(self, model: str, changes: dict[str, Any] | None) -> dict[str, Any] | None:
        bounds = await self._own_scaling.set_bounds(model, changes)
        return None if bounds is None else msgspec.to_builtins(bounds)

    @property
    def _own_scaling(self) -> ScaledModels:
        if self.scaling is None:
            raise Unsupported("this server is no core of a cluster")
        return self.scaling

    @property
    def _own_cluster(self) -> Cluster:
        if self.cluster is None:
            raise Unsupported("this server is no core of a cluster")
        return self.cluster

    async def change_alias(self, name: str, targets: Mapping[str, int] | None) -> None:
        await self.aliases.change(name, targets)

    async def load_model(
        self, model: str, action: Literal["load", "unload"], keep_alive_s: float | None = None
    ) -> None:
        if self.models is None:
            raise Unsupported("this server loads no models on demand: it has no engine workers of its own")
        await self.models.ask(model, action, keep_alive_s)

    async def find(self, account: str, model_version: str, digests: list[bytes]) -> KnownPrefix | None:
        return self.sessions.find(account, model_version, digests)

    async def admit(self, request: RouteRequest) -> Route:
        if self.know_model is not None and not self.admission.balancer.fleet.workers_of(request.model):
            await self.know_model(request.model)
        price = self.prices.find(request.model, request.accepted_us or request.created_us)
        is_held = self.models is not None or self.scaling is not None
        if self.limits is None:
            held = self._held(request) if is_held else request
            return msgspec.structs.replace(await self.admission.admit(held), price=price)
        share = await self.limits.admit(request, price)
        try:
            route = await self.admission.admit(self._held(request) if is_held else request)
        except BaseException:
            if not request.avoid:  # it never ran; one that is moved keeps its share
                self.limits.release(request.id)
            raise
        return msgspec.structs.replace(
            route, price=price, rate_limits=share.rate_limits, lease=share.lease, reserved_pico=share.reserved_pico
        )

    def _held(self, request: RouteRequest) -> RouteRequest:
        """The same request, which waits for its model if that is loaded, or gets a replica, on demand. Nothing is
        awaited from here until it is queued, so the number that wait is right."""
        if request.engine:
            return request
        if self.models is not None:
            request = _waiting(request, self.models.admitting(request.model, request.keep_alive_s))
        if self.scaling is not None:
            wait_s = self.scaling.admitting(request.model, request.account, is_moved=bool(request.avoid))
            request = _waiting(request, wait_s)
        return request

    async def purge(self, account: str | None, session: str | None) -> PurgedTexts:
        streams = 0 if session is not None else self.event_logs.purge(account)
        return PurgedTexts(self.sessions.purge(account, session), streams)

    async def refresh_prices(self) -> None:
        if self.price_store is not None:
            await self.price_store.refresh()

    def remember(self, entries: Sequence[SessionEntry]) -> None:
        for stored in entries:
            entry, owner = stored.entry, SessionOwner(stored.salt, stored.session)
            key = stored.account, stored.model_version, stored.digest
            self.sessions.add(*key, entry.ids, entry.text_len, entry.text_digest, owner)

    async def n_ahead(self, request_id: str) -> int | None:
        record = self.admission.find(request_id)
        return None if record is None else self.admission.balancer.queue.n_ahead(record)

    def first_token(self, request_id: str, cached_tokens: int) -> None:
        self.admission.first_token(request_id, cached_tokens)

    def checkpoint(self, rows: Sequence[UsageRow]) -> None:
        for row in rows:
            self.history.progressed(row, self.usage.used_by(row.id))
        self.usage.checkpoint(rows)

    async def finalize(self, end: RequestEnd) -> int:
        row = self.prices.priced(end.row)
        if row.first_token_us is not None:
            self._observe_ttft(row, (row.first_token_us - row.created_us) / 1e6)
        is_late = self.limits is not None and not end.is_job and self.limits.settle(row)
        outcome: Outcome = "finished" if row.status == "finished" else _outcome(end)
        device_ms = round(1000 * self.admission.ended(row.id, outcome, row.output_tokens, end.lost))
        row = msgspec.structs.replace(row, device_ms=device_ms)
        self.grants.notify_room()
        self._metrics.record(row, end.inter_token, end.operation, end.provider)
        self.history.ended(row, self.usage.used_by(row.id), end.inter_token)
        if not end.is_job:
            await self.usage.record(row, is_late)
        return device_ms

    def settle_job(self, row: UsageRow, is_stored: bool) -> None:
        """Give back what an attempt at a job had reserved of its budgets, less its cost if the queue has stored the
        row: an attempt without a row is not billed."""
        if self.limits is not None:
            self.limits.settle(row if is_stored else msgspec.structs.replace(row, cost_pico=0))

    async def abandon(self, request_id: str) -> None:
        """End a request, failed, whose HTTP worker has died, if the request was dispatched.

        It has used what its last checkpoint says; before the first, nothing, or its prompt if that was computed."""
        record = self.admission.find(request_id)
        if record is None or not record.admitted:
            return
        request, now_us = record.request, time.time_ns() // 1000
        if (row := self.usage.used_by(request_id)) is None:
            prompt = Usage() if record.first_token_s is None else Usage(prompt_tokens=request.input_tokens)
            row = usage_row(request, prompt, "failed", now_us)
        row = msgspec.structs.replace(row, finished_us=now_us)
        log.warning("the HTTP worker of a request died", extra={"request_id": request_id})
        await self.finalize(RequestEnd(row))

    async def health(self) -> Health:
        health = check(self._connections, self.admission.snapshot())
        if self.models is not None:
            statuses = self.models.statuses()
            can_load = any(not status["pinned"] and status["state"] != "failed" for status in statuses)
            health = Health(health.ok or can_load, {**health.detail, "model_states": statuses})
        if self.scaling is not None and self.scaling.can_wake:
            health = Health(True, health.detail)
        if self._data_dir is None:
            return health
        problem = await asyncio.to_thread(disk_problem, self._data_dir)
        return Health(health.ok and not problem, {**health.detail, "disk": problem or "ok"})

    async def metrics(self) -> bytes:
        return await self._metrics.expose()

    def _knows_model(self, model: str) -> bool:
        """True if the operator has named the model: by a worker, a price, an alias or an upstream server's list."""
        return (
            any(model in worker.endpoint.models for worker in self.admission.balancer.fleet.workers.values())
            or self.prices.n_versions(model) > 0
            or self.aliases.table.leads_to(model)
            or self.lists_model(model)
        )

    async def status(self, query: StatusQuery) -> Status:
        health = await self.health()
        return status(query, health, self.admission, self._metrics, self.history, self.usage.used_by)

    def forget_provider(self, name: str) -> None:
        """Remove the metrics of a provider whose last key was removed."""
        self._metrics.forget_provider(name)

    def register(self, collector: Collector) -> None:
        """Expose more metrics."""
        self._metrics.add(collector)

    def refused(self, kind: str, times: int = 1) -> None:
        self._metrics.refused(kind, times)
        self.history.refused(times)

    def _observe_ttft(self, row: UsageRow, ttft_s: float) -> None:
        """Tell the grants the TTFT of a request that is no job: how much jobs on the same worker slow it down."""
        record = self.admission.balancer.ledger.get(row.id)
        if record is not None and record.route is not None and not record.is_job:
            self.grants.observe_ttft(record.route.decode, ttft_s, record.mixed)


def _waiting(request: RouteRequest, wait_s: float) -> RouteRequest:
    """The same request, which may wait at least so long for a worker."""
    return msgspec.structs.replace(request, wait_s=wait_s) if wait_s > request.wait_s else request


def _outcome(end: RequestEnd) -> Outcome:
    """The outcome of a request that was not finished, as its workers are judged by it."""
    if end.row.status == "failed":
        return "engine_failed" if end.lost else "client_error"
    return "cancelled"
