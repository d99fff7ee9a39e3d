"""The Backend protocol in Triton: one workspace, nothing allocated inside a layer, all of it fit for a CUDA graph."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from emberline.kernels.backend import MLP, Attention, Layer, Rope, WeightSource
from emberline.kernels.gpu import cudnn_attention as dense_attention
from emberline.kernels.gpu import decode_attention as cascade
from emberline.kernels.gpu import elementwise as embedding
from emberline.kernels.gpu import split_kv as plan
from emberline.kernels.gpu.decode_attention import decode_attention
from emberline.kernels.gpu.elementwise import add_norm
from emberline.kernels.gpu.launch import INTERPRETED, supports_pdl
from emberline.kernels.gpu.matmul import GATES, DenseMatrix, Fusion, Matmul
from emberline.kernels.gpu.prefill_attention import plan_prefill_splits, prefill_attention
from emberline.kernels.gpu.quantized_gemm import QuantizedMatrix, pack_quantized, quantized_embedding
from emberline.kernels.gpu.rope import rope_and_cache, rotary_table
from emberline.kernels.gpu.split_kv import PrefillSplits
from emberline.kernels.gpu.workspace import PrefillChunk, StepShape, Workspace, WorkspaceSizes, mlp_tokens
from emberline.protocol.block_hash import KVGroup


@dataclass(frozen=True, slots=True)
class TritonStepContext:
    """What the layers of a step share."""

    step: Any
    shape: StepShape
    kv: list[Tensor]
    angles: list[tuple[Tensor, Tensor]]  # by KV group
    pieces: list[plan.DecodeSplits]
    items: list[PrefillSplits | None]


class TritonBackend:
    name = "triton"
    kv_keys = "token"

    def __init__(self, device: str = "cuda", dtype: torch.dtype | None = None, *, deterministic: bool = False) -> None:
        self.device = device
        self.dtype = dtype or (torch.float32 if INTERPRETED else torch.bfloat16)
        self.kv_dtype = str(self.dtype).removeprefix("torch.")
        self._deterministic = deterministic
        self._pdl = supports_pdl()
        self._space: Workspace | None = None
        self._multiply: Matmul | None = None

    # --- memory and weights ---------------------------------------------------------------------------------------

    def reserve(self, sizes: WorkspaceSizes) -> None:
        """The workspace, once. Without a call it is made, and grows, when a step begins: never inside a capture."""
        self._space = Workspace(sizes, self.device, self.dtype)
        self._multiply = Matmul(self._space, self._deterministic, self._pdl)

    def matrix(
        self, weights: list[WeightSource], bias: list[WeightSource] | None = None, *, gated: bool = False
    ) -> DenseMatrix | QuantizedMatrix:
        added = None if bias is None else torch.cat([b.tensor(self.dtype, self.device) for b in bias])
        parts = [w.affine() for w in weights]
        if all(part is not None for part in parts):
            return pack_quantized(parts, added, self.device, self.dtype)
        rows = [w.shape[0] for w in weights]
        stacked = torch.empty(sum(rows), weights[0].shape[1], dtype=self.dtype, device=self.device)
        for weight, place in zip(weights, torch.split(stacked, rows), strict=True):
            into = getattr(weight, "into", None)
            if into is not None:
                into(place)
            else:
                place.copy_(weight.tensor(self.dtype, self.device))
        return DenseMatrix(stacked, added)

    def vector(self, weight: WeightSource) -> Tensor:
        return weight.tensor(torch.float32, self.device)

    # --- a step -----------------------------------------------------------------------------------------------------

    def begin(self, step: Any, kv: list[Tensor], groups: tuple[KVGroup, ...], ropes: list[Rope]) -> TritonStepContext:
        shape = getattr(step, "shape", None) or _shape_of(step)
        space = self._workspace
        rows = 0 if self._deterministic else shape.decode_rows
        angles, pieces, items = [], [], []
        for i, (group, rope) in enumerate(zip(groups, ropes, strict=True)):
            angles.append(rotary_table(step.positions, rope, space.flat(f"angles{i}", torch.float32)))
            shares = shape.shares if group.window is None else None
            room = space.flat(f"pieces{i}", torch.int32)
            pieces.append(plan.plan_decode_splits(step.context_lens, rows, group.kv_heads, group.window, shares, room))
            items.append(self._items(i, step, shape, group))
        return TritonStepContext(step, shape, kv, angles, pieces, items)

    def _items(self, number: int, step: Any, shape: StepShape, group: KVGroup) -> PrefillSplits | None:
        """How the keys of chunks are split; in deterministic mode they are not."""
        if self._deterministic or not shape.max_query:
            return None
        space, first = self._workspace, 0 if shape.chunks is None else shape.decode_rows
        return plan_prefill_splits(
            space.sizes.heads, group.kv_heads, group.head_dim, group.window, step.query_starts, step.context_lens,
            len(step.token_ids) - first, shape.decode_rows, space.flat(f"items{number}", torch.int32),
            space.chunk_scratch,
        )  # fmt: skip

    @property
    def _workspace(self) -> Workspace:
        assert self._space is not None, "reserve() comes first"
        return self._space

    def rows(self, matrix: DenseMatrix | QuantizedMatrix, ids: Tensor, factor: float) -> Tensor:
        out = self._workspace.take("residual", len(ids), matrix.shape[1])
        if isinstance(matrix, QuantizedMatrix):
            quantized_embedding(matrix, ids, factor, out)
        else:
            embedding.embedding(matrix.weight, ids, factor, out)
        return out

    def linear(self, x: Tensor, matrix: DenseMatrix | QuantizedMatrix, norm: Tensor, eps: float) -> Tensor:
        out = self._workspace.take("logits", len(x), matrix.shape[0], dtype=torch.float32)
        self._product(x, matrix, out, Fusion(norm, eps))
        return out

    def layers(self, layers: Sequence[Layer], x: Tensor, context: TritonStepContext) -> None:
        space, tokens = self._workspace, len(x)
        for layer in layers:
            qkv = space.take("qkv", tokens, layer.qkv.shape[0])
            self._product(x, layer.qkv, qkv, Fusion(layer.norm, layer.eps))
            attended = space.take("normed", tokens, layer.attention.heads * layer.attention.head_dim)
            attended = self._attend(qkv, attended, layer.attention, context)
            self._add(attended, layer.output, x, layer.post_norm, layer.eps, overlapped=True)
            for part in torch.split(x, mlp_tokens(tokens)):
                self._mlp(layer.mlp, part)

    def _product(
        self, x: Tensor, matrix: DenseMatrix | QuantizedMatrix, out: Tensor, job: Fusion, overlapped: bool = False
    ) -> None:
        assert self._multiply is not None
        self._multiply(x, matrix, out, job, overlapped)

    def _add(
        self, x: Tensor, matrix: Any, residual: Tensor, post_norm: Tensor | None, eps: float, overlapped: bool = False
    ) -> None:
        if post_norm is None:
            self._product(x, matrix, residual, Fusion(add=True), overlapped)
            return
        out = self._workspace.take("gate_up", *residual.shape)
        self._product(x, matrix, out, Fusion(), overlapped)
        add_norm(residual, out, None, None, eps, post=post_norm, pdl=self._pdl)

    def _mlp(self, mlp: MLP, x: Tensor) -> None:
        activated = self._workspace.take("activated", len(x), mlp.down.shape[1])
        self._product(x, mlp.gate_up, activated, Fusion(mlp.norm, mlp.eps, gate=GATES.index(mlp.activation)))
        self._add(activated, mlp.down, x, mlp.post_norm, mlp.eps)

    # --- attention ----------------------------------------------------------------------------------------------------

    def _attend(self, qkv: Tensor, out: Tensor, at: Attention, context: TritonStepContext) -> Tensor:
        """Into `out`, or where it is already."""
        step, shape, space = context.step, context.shape, self._workspace
        pool, tables = context.kv[at.group][:, at.index], step.block_tables[at.group]
        decodes = 0 if self._deterministic else shape.decode_rows
        if decodes:
            prefix = None
            if shape.shared is not None and shape.shares is not None and at.window is None:
                parts = cascade.shared_prefix_attention(
                    qkv, at, context.angles[at.group], pool, tables, shape.shared, space.prefix, space.prefix_peaks,
                    decodes, pdl=self._pdl,
                )  # fmt: skip
                prefix = (space.prefix, space.prefix_peaks, shape.shares, parts)
            decode_attention(
                qkv, out, at, context.angles[at.group], pool, tables, context.pieces[at.group], space.partial,
                space.peaks, space.row_counters, decodes, prefix, pdl=self._pdl and decodes > 1,
                release=self._pdl,
            )  # fmt: skip
        if shape.max_query or not decodes:
            return self._attend_chunks(qkv, out, at, context, pool, tables, decodes)
        return out

    def _attend_chunks(
        self,
        qkv: Tensor,
        out: Tensor,
        at: Attention,
        context: TritonStepContext,
        pool: Tensor,
        tables: Tensor,
        decodes: int,
    ) -> Tensor:
        step, space, tokens = context.step, self._workspace, len(qkv)
        first = 0 if context.shape.chunks is None else decodes  # captured: only the device knows which rows decode
        queries = space.take("queries", tokens, at.heads * at.head_dim)
        listed = [] if self._deterministic else context.shape.chunks or []
        dense = [c for c in listed if dense_attention.supports(at, c.n)]
        own = space.take("own", 2, tokens - first, at.kv_heads * at.head_dim)
        exact = len(dense) == 1 and dense[0].n == tokens - first and dense_attention.has_exact_plan(dense[0].n)
        copy = None
        if dense:
            keys, values = (dense_attention.kv_view(half, tokens - first, at, exact) for half in own)
            copy = (keys, values)
        rope_and_cache(
            qkv, queries, at, context.angles[at.group], pool, tables, step.query_starts, step.positions, first, decodes,
            copy=copy, pdl=self._pdl,
        )  # fmt: skip
        if len(dense) < len(listed) or not listed:
            prefill_attention(
                queries, out, at, pool, tables, step.query_starts, step.context_lens, tokens - first, decodes,
                limit=dense_attention.MIN_TOKENS - 1 if dense else 2**31 - 1, items=context.items[at.group],
                pdl=self._pdl,
            )  # fmt: skip
        gathered = space.flat("gathered", self.dtype)
        halves = (gathered[: len(gathered) // 2], gathered[len(gathered) // 2 :])
        for c in dense:
            assert copy is not None
            new, mine = slice(c.start, c.start + c.n), slice(c.start - first, c.start - first + c.n)
            written = (copy[0][mine], copy[1][mine])
            if c.n == c.context == tokens:  # all there is: one copy less
                return dense_attention.attend_without_context(queries, written, at)
            dense_attention.attend(queries[new], written, at, pool, tables[c.row], c.context, halves, out[new])
        return out

    def rehearse(self, attentions: Sequence[Attention], kv: Sequence[Tensor]) -> Iterator[bool]:
        """What long prompts would wait for the first time, done ahead, a little with every turn."""
        space, tokens = self._workspace, self._workspace.sizes.max_tokens
        for kind in {at.window is None: at for at in attentions}.values():  # large steps do not split keys
            nothing = torch.zeros(1, 16, dtype=torch.int32, device=self.device)
            queries, out = (space.take(name, 1, kind.heads * kind.head_dim) for name in ("queries", "normed"))
            pool = kv[kind.group][:, kind.index]
            prefill_attention(queries, out, kind, pool, nothing, nothing[0, :2], nothing[0, :1], 1, pdl=self._pdl)
            yield True
        at = next((at for at in attentions if dense_attention.supports(at, tokens)), None)
        if at is None or self._deterministic:
            return
        queries, out = (space.take(name, tokens, at.heads * at.head_dim) for name in ("queries", "normed"))
        own = space.take("own", 2, tokens, at.kv_heads * at.head_dim)
        gathered = space.flat("gathered", self.dtype)
        halves = (gathered[: len(gathered) // 2], gathered[len(gathered) // 2 :])
        yield from dense_attention.warm_up(queries, own, at, kv[at.group][:, at.index], halves, out)


def _shape_of(step: Any) -> StepShape:
    """For steps that come without: asks the device, and waits."""
    starts, contexts = step.query_starts.tolist(), step.context_lens.tolist()
    lengths = [b - a for a, b in pairwise(starts)]
    decodes = next((row for row, n in enumerate(lengths) if n != 1), len(lengths))
    rest = [PrefillChunk(row, starts[row], lengths[row], contexts[row]) for row in range(decodes, len(lengths))]
    return StepShape(decodes, max((c.n for c in rest), default=0), chunks=rest)
