"""Rows of the store by which cores report to the planner, and the planner to everybody.

Every core writes what it sees of each scaled model every few seconds. The planner, which runs on one core at a time,
adds them up, and writes what it decides. All times are of the store's clock: those of the cores may be hours apart.
"""

from typing import Any, Literal

import msgspec

from emberline.protocol.frames import WorkerRole

STEP_S = 10  # of one interval of arrivals

ReplicaRowState = Literal["ordered", "running", "draining", "leaving"]


class WorkerView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker as one core sees it. Rates are measured; 0: not yet."""

    name: str
    role: WorkerRole = "both"
    connected: bool = False
    draining: bool = False
    in_flight: int = 0  # sequences of this core
    running: int = 0  # sequences of all cores, running or waiting, as the worker says
    kv_used_tokens: int = 0  # by running sequences of all cores
    kv_tokens: int = 0
    prefill_rate: float = 0.0  # uncached prompt tokens per second
    decode_rate: float = 0.0  # output tokens per second
    utilisation: float | None = None  # share of the last seconds in which its device computed; None: unknown
    drain_s: float = 0.0  # that it would take to finish what it has


class ArrivalPoint(msgspec.Struct, frozen=True, array_like=True):
    """Requests and tokens at one core in the interval of this number (Unix time ÷ STEP_S)."""

    number: int
    requests: int = 0
    uncached_tokens: int = 0  # of prompts
    output_tokens: int = 0
    kv_tokens: int = 0  # in use by all cores, at the most


class ModelLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model as one core sees it."""

    model: str
    queued_tokens: int = 0  # uncached, of this core's prompts that wait here or at workers
    held_requests: int = 0  # that wait while no worker takes them
    idle_s: float = 0.0  # since a request last waited or ran
    can_start: bool = False  # whether this core's planner could start replicas
    workers: tuple[WorkerView, ...] = ()
    arrivals: tuple[ArrivalPoint, ...] = ()  # of the last minutes, oldest first, up to now


class LoadRow(msgspec.Struct, frozen=True, kw_only=True):
    core: str
    at_us: int
    load: ModelLoad


class ReplicaRow(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that the planner has started, or drains. Operators drain others: those are not the planner's to use."""

    name: str
    model: str
    role: WorkerRole
    gpu: str
    state: ReplicaRowState
    since_us: int
    launcher: str  # that has started it for the planner; empty: it joined by itself


class DecisionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that the planner did, or would have done."""

    model: str
    at_us: int
    number: int  # of those made at once
    core: str
    action: str  # undrain | flip | start | drain
    role: str
    replica: str
    gpu: str
    cause: str
    why: str
    outcome: str  # begun | done | dry run | failed: why
    took_s: float  # from a start to the first connection, or until it had failed; 0: unknown


class PlanRow(msgspec.Struct, frozen=True, kw_only=True):
    """The planner's last look at a model."""

    model: str
    at_us: int
    core: str
    mode: str  # on | dry-run
    plan: dict[str, Any]  # a ScalingPlan
    observation: dict[str, Any]  # a ScalingObservation
