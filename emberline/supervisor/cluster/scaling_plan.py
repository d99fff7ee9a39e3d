"""Plain data of the planner: its observation of a model, the bounds it keeps to, and its plan with the reasons."""

import math
from typing import Literal

import msgspec

from emberline.protocol.errors import BadInput
from emberline.protocol.frames import WorkerRole
from emberline.supervisor.cluster.replica_demand import ArrivalInterval, Demand, NodeOffer, Replica

Action = Literal["undrain", "flip", "start", "drain"]
Cause = Literal["load", "wake", "minimum", "ratio", "surplus", "maximum", "idle"]


class ScalingBounds(msgspec.Struct, frozen=True, kw_only=True):
    """Scaling bounds of one model."""

    min_replicas: int = 1  # 0: none while it is idle; requests are held while one starts
    max_replicas: int = 1  # draining ones included, whose GPUs are still in use
    disaggregated: bool = False  # prefill and decode on replicas of their own
    tolerated_s: float = 2.0  # that a prompt may be queued: the TTFT target less the prefill time of an idle replica
    grow_after_s: float = 10.0
    shrink_after_s: float = 300.0
    settle_s: float = 30.0  # between two drains or flips
    idle_s: float = 900.0  # without a request, before the last replicas are drained

    def __post_init__(self) -> None:
        n_roles = 2 if self.disaggregated else 1
        if self.min_replicas < 0:
            raise BadInput(f"min_replicas is {self.min_replicas}: use 0 or more", param="min_replicas")
        if self.max_replicas < max(n_roles, self.min_replicas):
            raise BadInput(
                f"max_replicas is {self.max_replicas}: use {max(n_roles, self.min_replicas)} or more"
                + (", for one prefill and one decode replica" if n_roles > self.min_replicas and n_roles > 1 else ""),
                param="max_replicas",
            )
        for name in ("tolerated_s", "grow_after_s", "shrink_after_s", "settle_s", "idle_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0) or (name == "tolerated_s" and not value):
                raise BadInput(f"{name} is {value}: use a number of seconds", param=name)

    @property
    def roles(self) -> tuple[WorkerRole, ...]:
        return ("prefill", "decode") if self.disaggregated else ("both",)


class ScalingObservation(msgspec.Struct, frozen=True, kw_only=True):
    """Observation of one model by all cores and workers at one moment."""

    replicas: tuple[Replica, ...] = ()
    offers: tuple[NodeOffer, ...] = ()
    queued_tokens: int = 0  # uncached, of prompts that wait at cores or engines
    held_requests: int = 0  # that wait for a first replica
    kv_tokens: int = 0  # in use by running sequences
    history: tuple[ArrivalInterval, ...] = ()  # of the last minutes, oldest first
    start_s: float = 180.0  # measured: from the order of a replica to its first request
    last_request_s: float = -math.inf


class RoleState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a role before the decisions."""

    role: WorkerRole
    running: int
    starting: int
    draining: int
    load: float | None  # of running and starting ones; None: there are none
    load_at_start: float | None  # the same when a replica that is started now would be ready


class ScalingDecision(msgspec.Struct, frozen=True, kw_only=True):
    action: Action
    role: WorkerRole  # the one that gets or loses it; of a flip, the new one
    cause: Cause
    why: str
    replica: str = ""  # its name; empty for one that is started
    gpu: str = ""
    from_role: WorkerRole | None = None  # of a flip


class ScalingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a round: the observation, the decisions, and the reasons for them and against further ones."""

    model: str
    at_s: float
    queued_tokens: int
    demand: Demand  # now
    forecast: Demand  # when a replica that is started now would be ready
    roles: tuple[RoleState, ...]
    decisions: tuple[ScalingDecision, ...] = ()
    held: tuple[str, ...] = ()  # reasons
