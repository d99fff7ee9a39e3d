"""Duration of a step on one rank, by roofline: bytes read over the bandwidth, or operations over the arithmetic rate,
and the collectives of the group.

The efficiencies were measured on an H200; see docs/lab/2026-11-gpu-kernels.md.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import log, prod, sqrt
from typing import Any, NamedTuple

from emberline.engine.planning.collective_time import Link
from emberline.engine.planning.hardware import Gpu
from emberline.engine.runners.gpu.rank_memory import tensor_bytes
from emberline.kernels.backend import Attention, FeedForward, LatentAttention, Layer, MoE
from emberline.kernels.gpu.formats.registry import n_fp8
from emberline.kv.groups import kind_of
from emberline.models.decoder import Decoder
from emberline.protocol.block_hash import BLOCK_TOKENS, KVGroup

MEMORY_EFFICIENCY = 0.93  # of weights that matrix products read
KV_EFFICIENCY = 0.75  # of the cache that decode attention reads
MATMUL_EFFICIENCY = 0.80
ATTENTION_EFFICIENCY = 0.72
LAUNCH_S = 1.2e-6  # between kernels of a CUDA graph
KERNELS = 4  # of a block
EXPANDED_TOKENS = 171  # of MLA: from so many new tokens on, expanded attention computes less than absorbed
ITEM = 2  # bytes of an activation


@dataclass(frozen=True, slots=True)
class Step:
    """`rows` sequences, each with `tokens` new ones after `context` others."""

    rows: int
    tokens: int
    context: int = 0

    @property
    def n_tokens(self) -> int:
        return self.rows * self.tokens


class StepSeconds(NamedTuple):
    compute: float
    collectives: float

    @property
    def total(self) -> float:
        return self.compute + self.collectives


class LayerSeconds(NamedTuple):
    """Layers that are alike."""

    has_experts: bool
    n: int
    seconds: StepSeconds  # of one


class Matrices(NamedTuple):
    """Weights that are multiplied together: how many, and the bytes that they take."""

    n_weights: float
    n_bytes: float
    n_fp8: float = 0  # of the weights: those that multiply FP8 activations

    @classmethod
    def of(cls, *matrices: Any) -> "Matrices":
        n_weights = sum(prod(matrix.shape) for matrix in matrices)
        return cls(n_weights, sum(map(tensor_bytes, matrices)), sum(map(n_fp8, matrices)))

    def seconds(self, n_tokens: float, gpu: Gpu, share: float = 1.0) -> float:
        """share: of the weights that are read at all."""
        per_tflops = (self.n_weights - self.n_fp8) / gpu.bf16_tflops + self.n_fp8 / gpu.fp8_tflops
        return share * max(
            self.n_bytes / (gpu.bandwidth_tb_s * 1e12 * MEMORY_EFFICIENCY),
            2 * n_tokens * per_tflops / (1e12 * MATMUL_EFFICIENCY),
        )


def token_bytes(group: KVGroup) -> float:
    """Return the bytes of a token's cache in one of the group's layers, on this rank."""
    return group.block_bytes / BLOCK_TOKENS / len(group.layers)


class AttentionWork:
    """Operations and bytes read of an attention block."""

    def __init__(self, block: Attention, group: KVGroup, dcp: int) -> None:
        self._products = Matrices.of(*block.matrices)
        self._reach = kind_of(group).reach
        self._token_bytes = token_bytes(group)
        self._latent = block if isinstance(block, LatentAttention) else None
        self._dcp = dcp
        if self._latent is None:
            self._width = self._absorbed = block.output_dim * 2
        else:
            mla, up = self._latent, block.heads * self._latent.kv_lora
            self._up = Matrices(up * (mla.nope_dim + mla.v_dim), ITEM * up * (mla.nope_dim + mla.v_dim))
            self._width = mla.heads * (mla.nope_dim + mla.rope_dim + mla.v_dim)
            self._absorbed = mla.heads * (2 * mla.kv_lora + mla.rope_dim)

    def seconds(self, gpu: Gpu, step: Step) -> float:
        products = self._products.seconds(step.n_tokens, gpu)
        expanded = step.tokens >= EXPANDED_TOKENS
        if self._latent is not None:
            products += self._up.seconds(step.n_tokens + (step.rows * step.context if expanded else 0), gpu)
        seen = min(step.context + step.tokens / 2, self._reach)  # by a token, on average
        cache_bytes = step.rows * min(step.context + step.tokens, self._reach) * self._token_bytes
        flops = 2 * step.n_tokens * seen * (self._width if expanded else self._absorbed)
        over_cache = max(
            cache_bytes / (gpu.bandwidth_tb_s * 1e12 * KV_EFFICIENCY),
            flops / (gpu.bf16_tflops * 1e12 * ATTENTION_EFFICIENCY),
        )
        return products + over_cache + KERNELS * LAUNCH_S

    def collective_seconds(self, gpu: Gpu, step: Step) -> float:
        """Return the duration of context parallelism's collectives: queries are gathered and results exchanged, or a
        long chunk's latents gathered."""
        if self._dcp == 1 or self._latent is None:
            return 0.0
        link, mla = Link(gpu, self._dcp), self._latent
        width = (mla.kv_lora + mla.rope_dim) * ITEM
        if step.tokens >= EXPANDED_TOKENS:
            return link.all_gather_s(step.rows * (step.context + step.tokens) * width / self._dcp)
        queries = step.n_tokens * mla.heads * width
        return link.all_gather_s(queries) + link.exchange_s(queries * self._dcp)


class FeedForwardWork:
    def __init__(self, block: FeedForward, expert_ranks: int) -> None:
        """expert_ranks: among which whole experts are spread."""
        self._experts: Matrices | None = None
        if isinstance(block, MoE):
            self._experts = Matrices.of(block.gate_up, block.down)
            self._chosen = block.routing.top_k / block.router.shape[0]  # share of the experts, by one token
            self._n_experts = block.down.shape[0]  # on this rank
            self._ranks = expert_ranks
            self._dense = Matrices.of(*(() if block.shared is None else block.shared.matrices))
        else:
            self._dense = Matrices.of(*block.matrices)

    @property
    def has_experts(self) -> bool:
        return self._experts is not None

    def seconds(self, gpu: Gpu, step: Step) -> float:
        seconds = self._dense.seconds(step.n_tokens, gpu) + KERNELS * LAUNCH_S
        if self._experts is None:
            return seconds
        share = 1 - (1 - self._chosen) ** step.n_tokens  # of the experts: chosen by any token
        per_expert = step.n_tokens * self._chosen / share  # tokens of one that is chosen
        return seconds + self._experts.seconds(per_expert, gpu, self._busiest(share)) + KERNELS * LAUNCH_S

    def _busiest(self, share: float) -> float:
        """The share of its experts that the rank with the most chosen ones computes: all ranks wait for it."""
        if self._ranks == 1:
            return share
        spread = sqrt(2 * log(self._ranks) * share * (1 - share) / self._n_experts)
        return min(1.0, share + spread)


class StageWork:
    """Work of one rank in a step: the layers of its stage, and what the ends of the model add."""

    def __init__(self, model: Decoder) -> None:
        layout = model.shard.layout
        self._layout, self._hidden = layout, model.config.hidden_size
        self._layers = [
            (AttentionWork(layer.attention, group, layout.dcp), FeedForwardWork(layer.feed_forward, self._ep), n)
            for layer, group, n in _alike(model)
        ]
        self._embeds, self._head = model.embedding is not None, model.head
        self._head_matrix = None if model.head is None else Matrices.of(model.head)
        self._vocab = model.config.vocab_size

    @property
    def _ep(self) -> int:
        return self._layout.tp if self._layout.ep else 1

    def layers(self, gpu: Gpu, step: Step) -> list[LayerSeconds]:
        """By kind. The ranks add up the output of both blocks of a layer."""
        talk = 2 * Link(gpu, self._layout.tp).all_reduce_s(step.n_tokens * self._hidden * ITEM)
        found = []
        for attention, feed_forward, n in self._layers:
            compute = attention.seconds(gpu, step) + feed_forward.seconds(gpu, step)
            collectives = attention.collective_seconds(gpu, step) + talk
            found.append(LayerSeconds(feed_forward.has_experts, n, StepSeconds(compute, collectives)))
        return found

    def seconds(self, gpu: Gpu, step: Step) -> StepSeconds:
        layers = self.layers(gpu, step)
        compute, talk = (sum(each.n * each.seconds[part] for each in layers) for part in (0, 1))
        link, hidden_bytes = Link(gpu, self._layout.tp), step.n_tokens * self._hidden * ITEM
        talk += self._embeds * link.all_reduce_s(hidden_bytes)
        if self._head_matrix is not None:
            compute += self._head_matrix.seconds(step.rows, gpu)
            talk += link.all_gather_s(step.rows * self._vocab * 4 / self._layout.tp)
        elif self._layout.pp > 1:  # to the next stage
            talk += Link(gpu, self._layout.n_ranks).send_s(hidden_bytes)
        return StepSeconds(compute, talk)


def _alike(model: Decoder) -> Iterable[tuple[Layer, KVGroup, int]]:
    """One layer of each kind, its KV group, and how many there are."""
    kinds = [(id(layer.feed_forward), layer.attention.kv_group) for layer in model.layers]
    first = dict(zip(reversed(kinds), reversed(model.layers)))
    return [(first[kind], model.kv_groups[kind[1]], n) for kind, n in Counter(kinds).items()]


def step_seconds(model: Decoder, gpu: Gpu, step: Step) -> float:
    """Seconds of a step with the model's layers and head."""
    return StageWork(model).seconds(gpu, step).total
