"""The reference backend in plain PyTorch: it defines every block, runs on any device and is the tests' oracle."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from emberline.kernels.backend import (
    MLP,
    Attention,
    GroupedQueryAttention,
    LatentAttention,
    Layer,
    MoE,
    Rope,
    WeightSource,
)
from emberline.kernels.collectives import ALONE, ParallelGroups
from emberline.kernels.context_parallel import attend_to_shares
from emberline.kernels.moe import TorchExperts, gated_activation, own_experts, route, router_logits, run_experts
from emberline.protocol.block_hash import BLOCK_TOKENS, KVGroup

# --- the operations that blocks are made of ---------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    scaled = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return (scaled if weight is None else scaled * weight.float()).to(x.dtype)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """RoPE of x: [tokens, heads, dim]; dimension i is paired with i + dim / 2. cosine, sine: [tokens, dim / 2]."""
    first, second = x.float().chunk(2, dim=-1)
    cosine, sine = cosine[:, None], sine[:, None]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1).to(x.dtype)


def visible(
    positions: Tensor,
    context_len: int,
    window: int | None = None,
    chunk: int | None = None,
    last_visible: Tensor | None = None,
) -> Tensor:
    """Return which of a context's tokens those at these positions see: bool [positions, context_len]. `last_visible`
    tells how far each sees, where that is not its own position."""
    query, key = positions[:, None], torch.arange(context_len, device=positions.device)[None]
    seen = key <= (query if last_visible is None else last_visible[:, None])
    if window is not None:
        seen &= key > query - window
    if chunk is not None:
        seen &= key // chunk == query // chunk
    return seen


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    first: int,
    window: int | None = None,
    chunk: int | None = None,
    sinks: Tensor | None = None,
    last_visible: Tensor | None = None,
) -> Tensor:
    """Causal attention of q [n, heads, dim] at positions first .. first + n - 1 over k, v [context, kv_heads, dim].
    last_visible [n]: positions up to which the queries see, where that is not their own."""
    n, heads, _ = q.shape
    group = heads // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1).float() for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    query = torch.arange(first, first + n, device=q.device)
    seen = visible(query, k.shape[0], window, chunk, last_visible)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, n, 1)], dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)


# --- the backend ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TorchMatrix:
    weight: Tensor  # [rows, cols]
    bias: Tensor | None

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape


@dataclass(frozen=True, slots=True)
class TorchStep:
    step: Any
    kv: list[Tensor]
    ropes: list[tuple[Tensor, Tensor]]  # cosine, sine per KV group: [tokens, rotated dimensions / 2]
    query_starts: list[int]
    context_lens: list[int]


class TorchBackend:
    name = "torch"
    kv_keys = "token"

    def __init__(
        self,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        *,
        row_by_row: bool = False,
        groups: ParallelGroups = ALONE,
    ) -> None:
        self.device, self.groups = device, groups
        self.dtype = dtype or (torch.bfloat16 if device.startswith("cuda") else torch.float32)
        self.kv_dtype = str(self.dtype).removeprefix("torch.")
        self._row_by_row = row_by_row  # deterministic mode: a library's results may depend on the number of rows

    def inference(self) -> AbstractContextManager[Any]:
        return torch.inference_mode()

    def constant(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self.device)

    def load_matrix(
        self, weights: list[WeightSource], bias: list[WeightSource] | None = None, *, gated: bool = False
    ) -> TorchMatrix:
        stacked = torch.cat([w.tensor(self.dtype, self.device) for w in weights])
        return TorchMatrix(
            stacked, None if bias is None else torch.cat([b.tensor(self.dtype, self.device) for b in bias])
        )

    def load_vector(self, weight: WeightSource) -> Tensor:
        return weight.tensor(torch.float32, self.device)

    def load_tensor(self, weight: WeightSource) -> Tensor:
        return weight.tensor(self.dtype, self.device)

    def load_experts(
        self, experts: list[list[WeightSource]], bias: list[list[WeightSource]] | None = None, *, gated: bool = False
    ) -> TorchExperts:
        matrices = [self.load_matrix(weights, None if bias is None else bias[e]) for e, weights in enumerate(experts)]
        biases = [matrix.bias for matrix in matrices if matrix.bias is not None]
        return TorchExperts(
            torch.stack([matrix.weight for matrix in matrices]), torch.stack(biases) if biases else None
        )

    def begin_step(self, step: Any, kv: list[Tensor], groups: tuple[KVGroup, ...], ropes: list[Rope]) -> TorchStep:
        tables = []
        for rope in ropes:
            angles = rope.by_frequency(step.rotary_positions.float()) * rope.inverse_frequencies.to(self.device)
            tables.append((angles.cos() * rope.scale, angles.sin() * rope.scale))
        return TorchStep(step, kv, tables, step.query_starts.tolist(), step.context_lens.tolist())

    def embed(self, matrix: TorchMatrix, ids: Tensor, factor: float, first: int = 0) -> Tensor:
        if self.groups.tp.size == 1:
            return matrix.weight[ids.long()] * factor
        own = ids.long() - first
        exists = (own >= 0) & (own < len(matrix.weight))
        rows = matrix.weight[own * exists] * (exists[:, None] * factor)
        self.groups.tp.all_reduce(rows)
        return rows

    def residual(self, n_tokens: int, hidden: int) -> Tensor:
        return torch.empty(n_tokens, hidden, dtype=self.dtype, device=self.device)

    def gather_logits(self, logits: Tensor, sizes: Sequence[int]) -> Tensor:
        if len(sizes) == 1:
            return logits.float()
        padded = F.pad(logits.float(), (0, max(sizes) - logits.shape[1]))
        parts = self.groups.tp.all_gather(padded)
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1)

    def run_layers(self, layers: Sequence[Layer], x: Tensor, context: TorchStep) -> None:
        for layer in layers:
            if isinstance(layer.attention, LatentAttention):
                self.latent_attention(layer.attention, x, context)
            else:
                self.grouped_query_attention(layer.attention, x, context)
            if isinstance(layer.feed_forward, MoE):
                self.moe(layer.feed_forward, x)
            else:
                self.mlp(layer.feed_forward, x)

    def norm_linear(self, x: Tensor, matrix: TorchMatrix, norm: Tensor, eps: float) -> Tensor:
        return self._multiply(rms_norm(x, norm, eps), matrix)

    def linear_add(
        self, x: Tensor, matrix: TorchMatrix, residual: Tensor, post_norm: Tensor | None, eps: float
    ) -> None:
        self._add(self._multiply(x, matrix), residual, post_norm, eps)

    def project(
        self, x: Tensor, matrix: TorchMatrix, out: Tensor, norm: Tensor | None, eps: float, *, add: bool
    ) -> None:
        """Write x times the matrix to out, or add it. With a norm x is normed first."""
        result = self._multiply(x if norm is None else rms_norm(x, norm, eps), matrix)
        out.copy_(out + result if add else result)

    def normalize(self, x: Tensor, norm: Tensor, eps: float) -> None:
        """Replace x by rms_norm(x)."""
        x.copy_(rms_norm(x, norm, eps))

    def joint_projection(
        self, embeds: Tensor, embed_norm: Tensor, of_embeds: TorchMatrix, hidden: Tensor, attn: Attention
    ) -> Tensor:
        """The first projection of a draft head's attention, which reads two normed inputs."""
        own = attn.qkv_a if isinstance(attn, LatentAttention) else attn.qkv
        of_embeddings = self.norm_linear(embeds, of_embeds, embed_norm, attn.eps)
        return of_embeddings + self.norm_linear(hidden, own, attn.norm, attn.eps)

    def _add(self, out: Tensor, residual: Tensor, post_norm: Tensor | None, eps: float) -> None:
        """Add a block's output, of which each rank has a part."""
        if self.groups.tp.size > 1:
            self.groups.tp.all_reduce(out)
        residual += out if post_norm is None else rms_norm(out, post_norm, eps)

    # --- feed-forward blocks ------------------------------------------------------------------------------------------

    def mlp(self, mlp: MLP, residual: Tensor) -> None:
        out = self._gated(rms_norm(residual, mlp.norm, mlp.eps), mlp.gate_up, mlp.down, mlp.activation)
        self._add(out, residual, mlp.post_norm, mlp.eps)

    def moe(self, moe: MoE, residual: Tensor) -> None:
        x = rms_norm(residual, moe.norm, moe.eps)
        out = torch.cat([self._experts(part, moe) for part in torch.split(x, 1 if self._row_by_row else len(x) or 1)])
        if moe.shared is not None:
            out += self._gated(x, moe.shared.gate_up, moe.shared.down, moe.shared.activation)
        self._add(out.to(x.dtype), residual, moe.post_norm, moe.eps)

    def _experts(self, x: Tensor, moe: MoE) -> Tensor:
        logits = router_logits(x, moe.router, moe.router_bias)
        chosen, weights = route(logits, moe.routing, moe.correction_bias)
        if len(moe.router) + moe.routing.n_shared != moe.down.shape[0]:
            chosen = own_experts(chosen, moe.first_expert, moe.down.shape[0])
        return run_experts(x, chosen, weights, moe.gate_up, moe.down, moe.activation, moe.weight_on_input)

    def _gated(self, x: Tensor, gate_up: TorchMatrix, down: TorchMatrix, activation: str) -> Tensor:
        gate, up = self._multiply(x, gate_up).chunk(2, dim=-1)
        return self._multiply(gated_activation(activation, gate, up), down)

    # --- attention blocks ---------------------------------------------------------------------------------------------

    def grouped_query_attention(self, attn: GroupedQueryAttention, residual: Tensor, context: TorchStep) -> None:
        qkv = self.norm_linear(residual, attn.qkv, attn.norm, attn.eps)
        self.linear_add(self.attention(qkv, attn, context), attn.output, residual, attn.post_norm, attn.eps)

    def attention(self, qkv: Tensor, attn: Attention, context: TorchStep) -> Tensor:
        """Attention alone, from its first projection, qkv [tokens, (heads + 2 * kv_heads) * head_dim] or MLA's rows, to
        [tokens, output_dim]."""
        if isinstance(attn, LatentAttention):
            return self._attend_to_latents(qkv, attn, context)
        parts = [attn.heads, attn.kv_heads, attn.kv_heads]
        q, k, v = torch.split(qkv.view(len(qkv), -1, attn.head_dim), parts, dim=1)
        if attn.q_norm is not None and attn.k_norm is not None:
            q, k = rms_norm(q, attn.q_norm, attn.eps), rms_norm(k, attn.k_norm, attn.eps)
        if attn.rope:
            q, k = (rotate(t, *context.ropes[attn.kv_group]) for t in (q, k))
        if attn.l2_norm:
            q, k = (rms_norm(t, None, attn.eps) for t in (q, k))
        if attn.temperature is not None:
            steps = torch.floor((context.step.positions.float() + 1) / attn.temperature.interval)
            q = (q * (1 + attn.temperature.scale * torch.log1p(steps))[:, None, None]).to(q.dtype)
        return self.attend_to_cache(q, k, v, attn, context).flatten(1)

    def attend_to_cache(
        self, q: Tensor, k: Tensor, v: Tensor, attn: GroupedQueryAttention, context: TorchStep
    ) -> Tensor:
        """Attention of q [tokens, heads, dim], whose own k and v [tokens, kv_heads, dim] join the cache first."""
        out = torch.empty_like(q)
        images = context.step.images
        seen = None if images is None else images.last_visible
        for new, (keys, values), first in self._cached(attn, torch.stack([k, v], dim=1), context):
            last = None if seen is None else seen[new]
            out[new] = attend(q[new], keys, values, attn.scale, first, attn.window, attn.chunk, attn.sinks, last)
        return out

    def latent_attention(self, attn: LatentAttention, residual: Tensor, context: TorchStep) -> None:
        projected = self.norm_linear(residual, attn.qkv_a, attn.norm, attn.eps)
        out = self.attention(projected, attn, context)
        self.linear_add(out, attn.output, residual, attn.post_norm, attn.eps)

    def _attend_to_latents(self, projected: Tensor, attn: LatentAttention, context: TorchStep) -> Tensor:
        """Absorbed: queries are projected to the latent space, where all heads attend to the cached rows as one key
        head, whose first kv_lora dimensions are the value."""
        q_rows = projected.shape[1] - attn.kv_lora - attn.rope_dim
        q, latent, key = torch.split(projected, [q_rows, attn.kv_lora, attn.rope_dim], dim=1)
        if attn.q_norm is not None and attn.q_b is not None:
            q = self.norm_linear(q, attn.q_b, attn.q_norm, attn.eps)
        rope = context.ropes[attn.kv_group]
        q_nope, q_rope = torch.split(q.view(len(q), attn.heads, -1), [attn.nope_dim, attn.rope_dim], dim=-1)
        q_rope, key = rotate(q_rope, *rope), rotate(key[:, None], *rope)
        rows = torch.cat([rms_norm(latent, attn.kv_norm, attn.eps)[:, None], key], dim=-1)  # [tokens, 1, 576]
        queries = torch.cat([torch.einsum("thn,hnc->thc", q_nope, attn.k_up), q_rope], dim=-1)
        latents = queries.new_empty(len(q), attn.heads, attn.kv_lora)
        if self.groups.dcp.size > 1:
            self._attend_to_shares(attn, queries, rows[:, 0], latents, context)
        else:
            for new, (cached,), first in self._cached(attn, rows[:, None], context):
                latents[new] = attend(queries[new], cached, cached[..., : attn.kv_lora], attn.scale, first)
        return torch.einsum("thc,hvc->thv", latents, attn.v_up).flatten(1)

    def _attend_to_shares(
        self, attn: LatentAttention, queries: Tensor, rows: Tensor, out: Tensor, context: TorchStep
    ) -> None:
        pool = context.kv[attn.kv_group][:, attn.layer_index, 0, 0]
        for row, context_len in enumerate(context.context_lens):
            start, stop = context.query_starts[row], context.query_starts[row + 1]
            if not context_len:
                continue
            table = context.step.block_tables[attn.kv_group][row].long()
            for t in range(start, stop, 1 if self._row_by_row else stop - start):
                new = slice(t, t + 1 if self._row_by_row else stop)
                positions = context.step.positions[new].long()
                out[new] = attend_to_shares(
                    self.groups.dcp, queries[new], rows[new], pool, table, positions, attn.scale, attn.kv_lora
                )

    def _cached(
        self, attn: Attention, rows: Tensor, context: TorchStep
    ) -> Iterator[tuple[slice, tuple[Tensor, ...], int]]:
        """Write the new tokens' rows [tokens, planes, kv_heads, dim] to the cache, then give for queries that can be
        computed together: their slice, each plane of what they see [context, kv_heads, dim], and the first's position.
        """
        pool = context.kv[attn.kv_group][:, attn.layer_index]  # [blocks, planes, kv_heads, BLOCK_TOKENS, dim]
        sees_ahead = context.step.images is not None and context.step.images.last_visible is not None
        for row, context_len in enumerate(context.context_lens):
            new = slice(context.query_starts[row], context.query_starts[row + 1])
            table = context.step.block_tables[attn.kv_group][row]
            positions = context.step.positions[new].long()
            pool[table[positions // BLOCK_TOKENS].long(), :, :, positions % BLOCK_TOKENS] = rows[new].to(pool.dtype)
            blocks = pool[table[: -(-context_len // BLOCK_TOKENS)].long()]
            planes = blocks.permute(1, 0, 3, 2, 4).flatten(1, 2)  # [planes, context, kv_heads, dim]
            n = 1 if self._row_by_row else new.stop - new.start
            for t in range(new.start, new.stop, n):
                end = context_len - new.stop + t + n
                seen = context_len if sees_ahead else end
                yield slice(t, t + n), planes[:, :seen].unbind(), end - n

    def _multiply(self, x: Tensor, matrix: TorchMatrix) -> Tensor:
        if not self._row_by_row:
            return F.linear(x, matrix.weight, matrix.bias)
        out = x.new_empty(len(x), matrix.weight.shape[0])
        for row, to in zip(x, out, strict=True):
            to.copy_(F.linear(row, matrix.weight, matrix.bias))
        return out
