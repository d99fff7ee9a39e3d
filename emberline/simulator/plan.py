"""What is simulated: resolved once, checked, frozen."""

from dataclasses import dataclass, field

from emberline.balancer.cost_model import Settings
from emberline.protocol.errors import BadInput
from emberline.protocol.frames import WorkerRole
from emberline.simulator.coefficients import Chunking, Coefficients, Timed
from emberline.simulator.transfer import Wire

OUR_POLICIES = ("sticky", "affinity", "prefix", "round_robin", "least_loaded")  # our balancer's
PEER_POLICIES = ("plain_round_robin", "plain_least_loaded", "sglang", "dynamo")
POLICIES = (*OUR_POLICIES, *PEER_POLICIES)
MAX_WORKERS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    model: Coefficients
    load: float  # copies of a trace with its own arrivals; session starts a second of others
    workers: int = 8  # that do both
    prefill: int = 0  # workers of this role; with `decode`, instead of `workers`
    decode: int = 0
    policy: str = "sticky"
    settings: Settings = field(default_factory=Settings)
    chunking: Chunking = field(default_factory=Timed)
    wire: Wire = field(default_factory=Wire)
    seed: int = 1
    warm_s: float = 600.0  # that nothing is measured
    measured_s: float = 1800.0
    drain_s: float = 300.0  # given to what was asked before the end
    cores: int = 1  # of our own balancer, over the one fleet
    delay_s: float = 0.0  # until a core hears of load and caches
    named: bool = False  # sessions tell their names
    tenants: int = 8
    key_tokens: int = 256  # of one key in the fleet's index, at least a block of the trace

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise BadInput(f"there is no policy {self.policy!r}: one of {', '.join(POLICIES)}", param="policy")
        if bool(self.prefill) != bool(self.decode):
            raise BadInput("prefill and decode workers need each other: give both numbers", param="prefill")
        if self.prefill and self.policy in PEER_POLICIES:
            raise BadInput(f"the policy {self.policy} is modelled for workers that do both", param="policy")
        if not 1 <= len(self.roles) <= MAX_WORKERS:
            raise BadInput(f"a fleet has 1 to {MAX_WORKERS} workers, not {len(self.roles)}", param="workers")
        if self.load <= 0:
            raise BadInput("the load must be above 0", param="load")
        if self.cores < 1 or (self.cores > 1 and self.policy in PEER_POLICIES):
            raise BadInput("several cores are modelled for our own policies", param="cores")

    @property
    def roles(self) -> list[WorkerRole]:
        numbers: list[tuple[WorkerRole, int]] = [("prefill", self.prefill), ("decode", self.decode)]
        if not self.prefill:
            numbers = [("both", self.workers)]
        return [role for role, n in numbers for _ in range(n)]

    @property
    def end_s(self) -> float:
        return self.warm_s + self.measured_s
