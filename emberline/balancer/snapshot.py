"""How things stand, as plain data, for `ps` and the metrics."""

from collections import Counter
from collections.abc import Iterable

import msgspec

from emberline.balancer.admission_queue import Admission, Tenants
from emberline.balancer.prefix_index import FleetPrefixIndex
from emberline.balancer.worker import Worker

_MOST_TENANTS = 100


class WorkerSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    role: str
    kind: str
    models: tuple[str, ...]
    state: str  # ready | down | draining | stalled | open | half_open
    problem: str  # why, in words
    prefill_tokens: int  # uncached, in flight
    decode_tokens: int
    active: int  # sequences of ours
    batch_active: int
    foreign_active: int  # sequences of others that do not make room
    held: int  # requests that wait for it
    wait_s: float  # until a prompt sent now would be begun
    prefill_scale: float  # measured seconds over the cost's own figures
    decode_scale: float
    lies: int  # reports that could not be believed


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    workers: list[WorkerSnapshot]
    waiting: dict[str, int]  # by class
    charged: int  # requests that hold something
    tenants: dict[str, float]  # virtual tokens of those that have used the most
    index_blocks: int
    index_bytes: int


def describe(
    workers: Iterable[Worker], waiting: Admission, tenants: Tenants, index: FleetPrefixIndex, charged: int, now_s: float
) -> Snapshot:
    most = sorted(tenants, key=lambda tenant: -tenant.counter)[:_MOST_TENANTS]
    return Snapshot(
        workers=[_describe(worker, now_s) for worker in workers],
        waiting=dict(Counter(ticket.priority.name.lower() for ticket in waiting)),
        charged=charged,
        tenants={tenant.account: tenant.counter for tenant in most},
        index_blocks=len(index),
        index_bytes=index.n_bytes,
    )


def _describe(worker: Worker, now_s: float) -> WorkerSnapshot:
    account, endpoint = worker.account, worker.endpoint
    return WorkerSnapshot(
        name=endpoint.name,
        role=endpoint.role,
        kind=endpoint.kind,
        models=endpoint.models,
        state=worker.state,
        problem=worker.problem or (worker.witness.problem if worker.witness.doubted(now_s) else ""),
        prefill_tokens=account.prefill_tokens,
        decode_tokens=account.decode_tokens,
        active=account.active,
        batch_active=account.batch_active,
        foreign_active=worker.witness.foreign_active(now_s),
        held=len(worker.held),
        wait_s=worker.wait_s(now_s),
        prefill_scale=worker.prefill_pace.scale,
        decode_scale=worker.decode_pace.scale,
        lies=worker.witness.lies,
    )
