"""Routing of a mixture of experts: the router's parameters, and which of them the kernels support."""

from dataclasses import dataclass

MAX_EXPERTS = 512
MAX_TOP_K = 16
SCORINGS = ("softmax", "sigmoid")


@dataclass(frozen=True, slots=True)
class Routing:
    """Rule that turns a router's logits into experts and weights."""

    top_k: int
    scoring: str = "softmax"  # of SCORINGS
    n_groups: int = 1  # of experts; only those of the `top_groups` best are considered (DeepSeek-V3)
    top_groups: int = 1
    normalize: bool = True  # a token's weights to a sum of 1
    scale: float = 1.0  # of the weights, after normalization
    n_shared: int = 0  # experts stored after the routed ones that every token uses, with weight 1

    @property
    def slots(self) -> int:
        """Pairs of a token."""
        return self.top_k + self.n_shared


def check_routing(routing: Routing, n_experts: int) -> None:
    """Raise ValueError for what no kernel supports or makes no sense."""
    top_k, groups = routing.top_k, routing.n_groups
    if not 1 <= n_experts + routing.n_shared <= MAX_EXPERTS:
        raise ValueError(f"{n_experts} experts and {routing.n_shared} shared: at most {MAX_EXPERTS} are supported")
    if not 1 <= top_k <= min(MAX_TOP_K, n_experts):
        raise ValueError(f"{top_k} experts per token of {n_experts}: 1 to {min(MAX_TOP_K, n_experts)} are supported")
    if routing.scoring not in SCORINGS:
        raise ValueError(f"unknown scoring of experts {routing.scoring!r}; known: {', '.join(SCORINGS)}")
    if groups < 1 or n_experts % groups:
        raise ValueError(f"{n_experts} experts do not divide into {groups} groups")
    if not 1 <= routing.top_groups <= groups or top_k > routing.top_groups * (n_experts // groups):
        raise ValueError(f"{routing.top_groups} of {groups} groups do not hold {top_k} experts per token")
    if groups > 1 and (n_experts & (n_experts - 1) or n_experts // groups < 2):
        raise ValueError(f"{groups} groups of {n_experts} experts: a power of two is supported, two or more in a group")
