"""Every kernel against its plain-PyTorch reference on random inputs, and its time against its floor.

`check()` raises where a kernel is wrong. Otherwise it returns, by kernel and shape, the error, the microseconds and the
floor: the bytes it must move, or the operations it must do, at the rates measured on this card.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emberline.kernels.backend import GroupedQueryAttention, Rope
from emberline.kernels.gpu import long_attention, split_kv
from emberline.kernels.gpu.backend.matmul import Matmul
from emberline.kernels.gpu.backend.workspace import AttentionShape, Workspace, WorkspaceSizes
from emberline.kernels.gpu.decode_attention import decode_attention, n_prefix_splits, shared_prefix_attention
from emberline.kernels.gpu.elementwise import (
    add_norm,
    add_norm_reference,
    embedding,
    embedding_reference,
    gated_activation,
    gated_activation_reference,
)
from emberline.kernels.gpu.formats.dense import DenseMatrix
from emberline.kernels.gpu.formats.matrix_format import Fusion
from emberline.kernels.gpu.prefill_attention import plan_prefill_splits, prefill_attention, prefill_scratch_floats
from emberline.kernels.gpu.quantized_gemm import QuantizedMatrix, dequantize_reference, pack_quantized
from emberline.kernels.gpu.rope import rope_and_cache, rope_and_cache_reference, rotary_table
from emberline.kernels.gpu.sampler import sample_batch
from emberline.kernels.gpu.sampler_table import SampledBatch, SamplerTable, sample_reference
from emberline.kernels.gpu.verify_attention import verify_attention, verify_partial_floats, verify_queries
from emberline.kernels.reference import attend, rms_norm
from emberline.kernels.sampling import SamplerRow
from emberline.protocol.block_hash import BLOCK_TOKENS
from emberline.weights.tensors import Affine

LIMIT = 1e-2  # relative error in the norm, of bf16
LAYERS = 8  # of a KV pool: enough that the next layer's blocks are not in the L2 cache


@dataclass(frozen=True)
class Card:
    device: str
    dtype: torch.dtype
    bytes_s: float  # a large copy, reads and writes counted
    flop_s: float  # a large matmul

    @classmethod
    def measured(cls, device: str = "cuda") -> "Card":
        a, b = (torch.empty(1 << 30, dtype=torch.uint8, device=device) for _ in range(2))
        x, y = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=device) for _ in range(2))
        copy, product = time_us(lambda i: b.copy_(a), 4), time_us(lambda i: torch.mm(x, y), 4)
        return cls(device, torch.bfloat16, 2 * (1 << 30) / copy * 1e6, 2 * 8192**3 / product * 1e6)

    def noise(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype) * scale

    def ints(self, values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device=self.device)


@dataclass(frozen=True)
class Case:
    name: str
    run: Callable[[int], Any]  # launches call i; inputs rotate with i
    got: Callable[[], Tensor]  # what call 0 wrote
    want: Callable[[], Tensor]
    n_bytes: float = 0
    flops: float = 0
    calls: int = 16
    exact: bool = False


def check(card: Card | None = None, scale: int = 1) -> dict[str, Any]:
    """scale: divides the shapes of Llama-8B, for Triton's interpreter."""
    timed = card is None
    card = card or Card.measured()
    found: dict[str, Any] = {}
    if timed:
        found["ceilings"] = {"copy_tb_s": card.bytes_s / 1e12, "matmul_tflop_s": card.flop_s / 1e12}
    for case in itertools.chain(_small(card, scale), _attention(card, scale), _matmuls(card, scale), _draws(card)):
        case.run(0)
        got, want = case.got(), case.want()
        off = _error(got, want)
        if off > (0 if case.exact else LIMIT) or off != off:
            raise AssertionError(f"{case.name}: off by {off:.2e} of the reference's size")
        found[case.name] = {"error": off}
        if timed:
            us = time_us(case.run, case.calls)
            floor = max(case.n_bytes / card.bytes_s, case.flops / card.flop_s) * 1e6
            found[case.name] |= {"us": round(us, 2), "floor_us": round(floor, 2)}
            print(f"    {case.name:44s} {us:9.1f} us, floor {floor:8.1f}, error {off:.1e}", flush=True)
    return found


def time_us(run: Callable[[int], Any], calls: int, repeats: int = 7) -> float:
    """Microseconds per call, measured on a CUDA graph of several calls."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(0)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            run(i)
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def _error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-9))


def _llama(scale: int) -> tuple[int, int, int, int]:
    """hidden, MLP, heads, KV heads; a head has 128 dimensions."""
    return 4096 // scale, 14336 // scale, max(4, 32 // scale), max(2, 8 // scale)


# --- norms, gates, rows ---------------------------------------------------------------------------------------------


def _small(card: Card, scale: int) -> Iterator[Case]:
    hidden, mlp, _, _ = _llama(scale)
    item = card.dtype.itemsize
    for tokens in (1, 64, 4096 // scale**2):
        x, added, weight = card.noise(tokens, hidden), card.noise(tokens, hidden), card.noise(hidden).float()
        start, out = x.clone(), torch.full_like(x, torch.nan)
        yield Case(
            f"add + norm, {tokens} tokens",
            lambda i, x=x, a=added, w=weight, o=out: add_norm(x, a, w, o, 1e-5),
            lambda o=out: o,
            lambda s=start, a=added, w=weight: add_norm_reference(s, a, w, 1e-5)[1],
            4 * x.numel() * item,
        )
        both, gated = card.noise(tokens, 2 * mlp), card.noise(tokens, mlp).fill_(torch.nan)
        yield Case(
            f"SiLU · mul, {tokens} tokens",
            lambda i, b=both, o=gated: gated_activation(b, "silu", o),
            lambda o=gated: o,
            lambda b=both: gated_activation_reference(b, "silu"),
            3 * gated.numel() * item,
        )
    table, ids = card.noise(32_000 // scale**2, hidden), card.ints(torch.randint(0, 32_000 // scale**2, (64,)))
    out = card.noise(64, hidden).fill_(torch.nan)
    yield Case(
        "embedding, 64 tokens",
        lambda i: embedding(table, ids, 2.0, out),
        lambda: out,
        lambda: embedding_reference(table, ids, 2.0),
        2 * out.numel() * item,
    )


# --- attention ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cache:
    """Rows of one context length in scattered blocks; the first `shared` tokens are in the same blocks."""

    attn: GroupedQueryAttention
    pool: Tensor
    tables: Tensor
    lens: Tensor
    context: int

    @classmethod
    def of(cls, card: Card, scale: int, n_rows: int, context: int, shared: int = 0) -> "Cache":
        _, _, heads, kv_heads = _llama(scale)
        width, common = -(-context // BLOCK_TOKENS), shared // BLOCK_TOKENS
        blocks = 1 + torch.randperm(n_rows * width).view(n_rows, width)
        blocks[:, :common] = blocks[:1, :common]
        pool = card.noise(n_rows * width + 1, LAYERS, 2, kv_heads, BLOCK_TOKENS, 128)
        attn = GroupedQueryAttention(
            norm=torch.ones(1), qkv=None, output=None, heads=heads, kv_heads=kv_heads, head_dim=128, scale=128**-0.5,
            eps=1e-5, kv_group=0, layer_index=0,
        )  # fmt: skip
        return cls(attn, pool, card.ints(blocks), card.ints([context] * n_rows), context)

    def keys_values(self, row: int, context: int) -> tuple[Tensor, Tensor]:
        blocks = self.pool[self.tables[row, : -(-context // BLOCK_TOKENS)].long(), 0]
        k, v = blocks.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :context]
        return k, v


def _rope(card: Card) -> Rope:
    return Rope((500_000.0 ** -(torch.arange(0, 128, 2, dtype=torch.float64) / 128)).float().to(card.device))


def _attention(card: Card, scale: int) -> Iterator[Case]:
    for n_rows, context in ((1, 576), (8, 576), (64, 576), (128 // scale, 1024), (4, 8192)):
        yield decode_case(card, scale, n_rows, context // scale)
    yield decode_case(card, scale, 32 // scale, 4096 // scale + 100, 4096 // scale)
    for n_rows, n_tokens, context in ((1, 5, 576), (4, 9, 4096), (16, 3, 4096), (32 // scale, 5, 576)):
        yield verify_case(card, scale, n_rows, n_tokens, context // scale)
    yield _rope_and_cache(card, scale)
    for n in (128, 512, 608, 1024):
        yield _chunk(card, scale, n // scale, 8192 // scale, long=False)
    if card.device == "cuda":
        yield _chunk(card, scale, 4096, 8192, long=True)
        yield _chunk(card, scale, 1500, 6500, long=True)


def decode_case(card: Card, scale: int, n_rows: int, context: int, shared: int = 0) -> Case:
    cache = Cache.of(card, scale, n_rows, context, shared)
    attn = cache.attn

    def floats(*sizes: int) -> Tensor:
        return torch.empty(math.prod(sizes), dtype=torch.float32, device=card.device)

    qkv = card.noise(n_rows, (attn.heads + 2 * attn.kv_heads) * 128)
    rotary = rotary_table(cache.lens - 1, _rope(card), floats(n_rows, 128))
    prefix_lens = card.ints([shared] * n_rows) if shared else None
    memory = card.ints([0] * split_kv.max_decode_splits(n_rows, attn.kv_heads) * split_kv.DECODE_SPLIT_FIELDS)
    splits = split_kv.plan_decode_splits(cache.lens, n_rows, attn.kv_heads, (split_kv.FULL, 0), prefix_lens, memory)
    partial, stats = floats(splits.n, attn.heads, 128), floats(splits.n, attn.heads, 2)
    n_splits = n_prefix_splits(n_rows, attn.heads, attn.kv_heads)
    prefix, prefix_stats = (floats(n_splits, n_rows, attn.heads, size) for size in (128, 2))
    out = card.noise(n_rows, attn.heads * 128).fill_(torch.nan)
    counters, pointer = card.ints([0] * (n_rows * attn.kv_heads)), card.ints([n_rows - 1, shared])

    def run(i: int) -> None:
        pool, read = cache.pool[:, i % LAYERS], None
        if prefix_lens is not None:
            shared_prefix_attention(
                qkv, attn, rotary, pool, cache.tables, pointer, cache.lens - 1, prefix, prefix_stats, n_rows
            )
            read = (prefix, prefix_stats, prefix_lens, n_splits)
        decode_attention(qkv, out, attn, rotary, pool, cache.tables, splits, partial, stats, counters, n_rows, read)

    def want() -> Tensor:
        starts = card.ints(range(n_rows + 1))
        q = rope_and_cache_reference(qkv, attn, rotary, cache.pool[:, 0], cache.tables, starts, cache.lens - 1)
        rows = [
            attend(q[r : r + 1], *cache.keys_values(r, context), attn.scale, context - 1, None) for r in range(n_rows)
        ]
        return torch.cat(rows).flatten(1)

    tokens = n_rows * context - max(0, n_rows - 1) * shared
    name = f"decode, {n_rows} × {context}" + (f", {shared} shared" if shared else "")
    return Case(name, run, lambda: out, want, tokens * 2 * attn.kv_heads * 128 * card.dtype.itemsize)


def verify_case(card: Card, scale: int, n_rows: int, n_tokens: int, context: int) -> Case:
    """Rows of n_tokens each, as of a step that verifies drafts; the context has them."""
    cache = Cache.of(card, scale, n_rows, context)
    attn, n = cache.attn, n_rows * n_tokens
    group = attn.heads // attn.kv_heads
    positions = card.ints([context - n_tokens + t for _ in range(n_rows) for t in range(n_tokens)])
    qkv = card.noise(n, (attn.heads + 2 * attn.kv_heads) * 128)
    rotary = rotary_table(positions, _rope(card), torch.empty(n * 128, device=card.device))
    queries, starts = verify_queries(group), card.ints(range(0, n + 1, n_tokens))
    memory = card.ints([0] * split_kv.max_decode_splits(n_rows, attn.kv_heads, queries) * split_kv.DECODE_SPLIT_FIELDS)
    local = (split_kv.FULL, 0)
    splits = split_kv.plan_decode_splits(cache.lens, n_rows, attn.kv_heads, local, None, memory, starts, queries)
    partial = torch.empty(verify_partial_floats(n_rows, attn.kv_heads, group, 128), device=card.device)
    out = card.noise(n, attn.heads * 128).fill_(torch.nan)
    counters = card.ints([0] * (n_rows * attn.kv_heads))

    def run(i: int) -> None:
        pool = cache.pool[:, i % LAYERS]
        verify_attention(qkv, out, attn, rotary, pool, cache.tables, starts, splits, partial, counters)

    def want() -> Tensor:
        q = rope_and_cache_reference(qkv, attn, rotary, cache.pool[:, 0], cache.tables, starts, positions)
        rows = [
            attend(each, *cache.keys_values(r, context), attn.scale, context - n_tokens)
            for r, each in enumerate(q.split(n_tokens))
        ]
        return torch.cat(rows).flatten(1)

    n_bytes = n_rows * context * 2 * attn.kv_heads * 128 * card.dtype.itemsize
    return Case(f"verify, {n_rows} × {n_tokens} of {context}", run, lambda: out, want, n_bytes)


def _rope_and_cache(card: Card, scale: int) -> Case:
    tokens = 2048 // scale**2
    cache = Cache.of(card, scale, 1, tokens)
    attn, starts, positions = cache.attn, card.ints([0, tokens]), card.ints(range(tokens))
    qkv, out = card.noise(tokens, (attn.heads + 2 * attn.kv_heads) * 128), card.noise(tokens, attn.heads * 128)
    rotary = rotary_table(positions, _rope(card), torch.empty(tokens * 128, device=card.device))
    pool = cache.pool.clone()

    def run(i: int) -> None:
        rope_and_cache(qkv, out, attn, rotary, cache.pool[:, i % LAYERS], cache.tables, starts, positions)

    def want() -> Tensor:
        q = rope_and_cache_reference(qkv, attn, rotary, pool[:, 0], cache.tables, starts, positions)
        return torch.cat([q.flatten(), pool[:, 0].flatten()])

    def got() -> Tensor:
        return torch.cat([out.flatten(), cache.pool[:, 0].flatten()])

    return Case(f"rope + KV write, {tokens} tokens", run, got, want, 2 * qkv.numel() * card.dtype.itemsize)


def _chunk(card: Card, scale: int, n: int, context: int, long: bool) -> Case:
    cache = Cache.of(card, scale, 1, context)
    attn, q = cache.attn, card.noise(n, cache.attn.heads * 128)
    out, starts = torch.full_like(q, torch.nan), card.ints([0, n])
    library = long_attention.long_attention()
    memory = card.noise(long_attention.gathered_elements(n, attn.kv_heads * 128) if long else 0)
    partials = torch.empty(prefill_scratch_floats(attn.heads, attn.kv_heads, 128), device=card.device)
    scratch = split_kv.SplitScratch(partials, card.ints([0] * split_kv.work_item_room()))
    table = card.ints([0] * split_kv.work_item_room() * split_kv.WORK_ITEM_FIELDS)
    shape = (attn.heads, attn.kv_heads, 128, (split_kv.FULL, 0))
    splits = plan_prefill_splits(*shape, starts, cache.lens, n, 0, table, scratch)  # once for all layers
    new_kv = library.new_kv(memory, attn, n, True) if long else None
    for target, source in zip(new_kv or (), cache.keys_values(0, context)):
        target.copy_(source[-n:])
    made = [out]

    def run(i: int) -> None:
        pool = cache.pool[:, 0]
        if long:
            made[0] = library.attend(q, new_kv, attn, pool, cache.tables[0], context, memory, out)
        else:
            prefill_attention(q, out, attn, pool, cache.tables, starts, cache.lens, n, splits=splits)

    few = [*range(4), *range(n - 4, n)]

    def want() -> Tensor:
        k, v = cache.keys_values(0, context)
        queries = q.view(n, attn.heads, 128)
        at_end = [context - n + t for t in few]
        each = [attend(queries[t : t + 1], k[: p + 1], v[: p + 1], attn.scale, p, None) for t, p in zip(few, at_end)]
        return torch.cat(each).flatten(1)

    flops = 4 * attn.heads * 128 * (n * (context - n) + n * (n + 1) / 2)
    name = f"chunk, {n} of {context}" + (f", {library.name}" if long else "")
    return Case(name, run, lambda: made[0][few], want, flops=flops, calls=3)


# --- matmuls ----------------------------------------------------------------------------------------------------------


def _matmuls(card: Card, scale: int) -> Iterator[Case]:
    hidden, mlp, heads, kv_heads = _llama(scale)
    sizes = WorkspaceSizes(
        hidden, 1024, (AttentionShape(heads, kv_heads, 128),), mlp, 512, 512, 512, card.dtype.itemsize, True
    )
    matmul = Matmul(Workspace(sizes, card.device, card.dtype), False, False)
    shapes = {
        "qkv": ((heads + 2 * kv_heads) * 128, hidden, Fusion(card.noise(hidden).float(), 1e-5)),
        "output": (hidden, heads * 128, Fusion(add=True)),
        "gate, up": (mlp, hidden, Fusion(card.noise(hidden).float(), 1e-5, gate=1)),
        "down": (hidden, mlp, Fusion(add=True)),
    }
    for (name, (n, k, fusion)), m in itertools.product(shapes.items(), (1, 8, 64, 256)):
        yield _matmul(card, matmul, f"{name}, {m} tokens", m, n, k, fusion, 0)
    for (name, (n, k, fusion)), bits, m in itertools.product(shapes.items(), (4, 8), (1, 8, 32, 256)):
        yield _matmul(card, matmul, f"{name}, {bits} bits, {m} tokens", m, n, k, fusion, bits)


def _matmul(card: Card, matmul: Matmul, name: str, m: int, n: int, k: int, fusion: Fusion, bits: int) -> Case:
    total = 2 * n if fusion.gate else n
    copies = 1 if card.device == "cpu" else max(2, int(2e8 // (total * k * 2)) + 1)  # more than the L2 cache holds
    weights = [_weight(card, total, k, bits)]
    weights += [_copy(weights[0]) for _ in range(copies - 1)]
    x, out = card.noise(m, k), card.noise(m, n)
    start = out.clone()

    def want() -> Tensor:
        weight = weights[0]
        dense = weight.weight.float() if isinstance(weight, DenseMatrix) else dequantize_reference(weight)
        y = (x.float() if fusion.norm is None else rms_norm(x.float(), fusion.norm, fusion.eps)) @ dense.T
        y = gated_activation_reference(y, "silu") if fusion.gate else y
        return y + start.float() if fusion.add else y

    stored = sum(t.numel() * t.element_size() for t in _tensors(weights[0]))
    return Case(
        name,
        lambda i: matmul(x, weights[i % copies], out, fusion),
        lambda: out.clone(),
        want,
        stored + (x.numel() + out.numel()) * card.dtype.itemsize,
        2 * m * total * k,
        calls=8,
    )


def _weight(card: Card, n: int, k: int, bits: int) -> DenseMatrix | QuantizedMatrix:
    if not bits:
        return DenseMatrix(card.noise(n, k, scale=k**-0.5))
    rng = np.random.default_rng()
    scale = (rng.uniform(0.5, 1.5, (n, k // 32)) * 2**-bits * k**-0.5).astype(np.float32)
    codes = rng.integers(0, 2**bits, (n, k), dtype=np.uint8)
    return pack_quantized([Affine(codes, scale, -scale * 2 ** (bits - 1), bits)], None, card.device)


def _copy(matrix: DenseMatrix | QuantizedMatrix) -> DenseMatrix | QuantizedMatrix:
    if isinstance(matrix, DenseMatrix):
        return DenseMatrix(matrix.weight.clone())
    return QuantizedMatrix(matrix.codes.clone(), matrix.affine.clone(), matrix.bits)


def _tensors(matrix: DenseMatrix | QuantizedMatrix) -> list[Tensor]:
    return [matrix.weight] if isinstance(matrix, DenseMatrix) else [matrix.codes, matrix.affine]


# --- sampling ---------------------------------------------------------------------------------------------------------


def _draws(card: Card) -> Iterator[Case]:
    vocab = 128_256 if card.device == "cuda" else 9000
    filters: dict[str, dict[str, Any]] = {
        "greedy": dict(temperature=0.0),
        "temperature": dict(temperature=0.7),
        "top-p": dict(temperature=0.7, top_p=0.95),
        "top-k": dict(top_k=50, top_p=0.9),
        "min-p": dict(min_p=0.05),
    }
    for (name, how), n_rows in itertools.product(filters.items(), (1, 64) if card.device == "cuda" else (2,)):
        logits = torch.randn(n_rows, vocab, device=card.device) * 3
        table = SamplerTable(n_rows, vocab, card.device)
        for slot in range(n_rows):
            table.set(slot, SamplerRow(seed=slot * 77, **how))
        table.upload()
        slots, out, other = (
            card.ints(range(n_rows)),
            SampledBatch.empty(n_rows, card.device),
            SampledBatch.empty(n_rows, card.device),
        )

        def want(
            logits: Tensor = logits, table: Any = table, slots: Tensor = slots, other: SampledBatch = other
        ) -> Tensor:
            sample_reference(logits, table, slots, slots, other)
            return other.token_ids

        yield Case(
            f"draw, {name}, {n_rows} rows",
            lambda i, x=logits, t=table, s=slots, o=out: sample_batch(x, t, s, s, o),
            lambda o=out: o.token_ids,
            want,
            logits.numel() * 4,
            exact=True,
            calls=4,
        )
