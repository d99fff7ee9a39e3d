"""A mixture of experts in plain PyTorch: routing and experts. The oracle of `gpu.moe_routing` and `gpu.grouped_gemm`.

A router scores every expert for each token, and the token's `top_k` best experts compute it; their outputs are summed
with the routing weights. A pair is a token and one of the experts chosen for it, numbered `token * slots + slot`, where
a token's slots are its top-k experts, best first, and then the shared experts that are stored with the routed ones.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from emberline.kernels.routing import Routing

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0  # GPT-OSS


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """float32 [tokens, experts], whatever the dtype of x: a small error could choose another expert."""
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float())


def route(
    logits: Tensor, routing: Routing, correction: Tensor | None = None, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Experts and weights of each token: int32 and float32 [tokens, slots].

    logits: float32 [tokens, experts]. correction: float32 [experts], added to the scores for the choice only. valid:
    [tokens], zero for the padding of a step, which gets no expert (-1). Of equal scores the first expert wins.
    """
    n_tokens, n_experts = logits.shape
    scores = logits.softmax(-1) if routing.scoring == "softmax" else logits.sigmoid()
    choice = scores if correction is None else scores + correction
    if routing.n_groups > 1:
        groups = choice.view(n_tokens, routing.n_groups, -1)
        best = _best(groups.topk(2, dim=-1).values.sum(-1), routing.top_groups)
        excluded = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(1, best, False)
        choice = groups.masked_fill(excluded[..., None], -torch.inf).flatten(1)
    ids = _best(choice, routing.top_k)
    weights = scores.gather(1, ids)
    if routing.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights * routing.scale
    if routing.n_shared:
        shared = torch.arange(n_experts, n_experts + routing.n_shared, device=ids.device).expand(n_tokens, -1)
        ids, weights = (
            torch.cat([ids, shared], 1),
            torch.cat([weights, torch.ones_like(shared, dtype=torch.float32)], 1),
        )
    ids = ids.int()
    if valid is not None:
        padding = valid[:, None] == 0
        ids, weights = ids.masked_fill(padding, -1), weights.masked_fill(padding, 0.0)
    return ids, weights


def own_experts(ids: Tensor, first: int, n: int) -> Tensor:
    """Experts as a rank with `n` of them, from `first` on, numbers them; -1 for those of other ranks."""
    own = ids - first
    return own.masked_fill((own < 0) | (own >= n), -1)


def _best(scores: Tensor, n: int) -> Tensor:
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :n]


def gated_activation(activation: str, gate: Tensor, up: Tensor) -> Tensor:
    if activation == "swiglu_clamped":
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


@dataclass(frozen=True, slots=True)
class TorchExperts:
    """One matrix per expert."""

    weight: Tensor  # [experts, rows, cols]
    bias: Tensor | None = None  # [experts, rows]

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.weight.shape[0], self.weight.shape[1], self.weight.shape[2]


def run_experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: TorchExperts, down: TorchExperts, activation: str,
    weight_on_input: bool = False,
) -> Tensor:  # fmt: skip
    """The weighted sum of each token's experts, float32 [tokens, hidden].

    x: [tokens, hidden]; ids, weights: [tokens, slots], a negative id is skipped. The rows of `gate_up` are those of
    gate, then those of up. weight_on_input: the weight multiplies an expert's input instead of its output (Llama 4).
    """
    out = torch.zeros(len(x), down.shape[1], dtype=torch.float32, device=x.device)
    for expert in sorted(set(ids.flatten().tolist())):
        if expert < 0:
            continue
        token, slot = (ids == expert).nonzero(as_tuple=True)
        weight = weights[token, slot, None]
        rows = x[token]
        if weight_on_input:
            rows = (rows.float() * weight).to(x.dtype)
        gate, up = _linear(rows, gate_up, expert).chunk(2, dim=-1)
        result = _linear(gated_activation(activation, gate, up), down, expert).float()
        out.index_add_(0, token, result if weight_on_input else result * weight)
    return out


def _linear(x: Tensor, experts: TorchExperts, expert: int) -> Tensor:
    return F.linear(x, experts.weight[expert], None if experts.bias is None else experts.bias[expert])
