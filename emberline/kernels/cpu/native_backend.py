"""The C backend: `kernels.c` behind the Backend protocol. Activations are float32, the KV cache is float16.

Weights are numpy arrays. Activations may be numpy arrays or tensors of torch, which draft heads and pipelines compute
with: results are of the same kind. Nothing here imports torch for arrays.
"""

import ctypes
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emberline.kernels.backend import MLP, GroupedQueryAttention, Layer, Rope, WeightSource
from emberline.kernels.collectives import ALONE, ParallelGroups
from emberline.kernels.cpu.packed_file import PackedArray, PackedFile
from emberline.kernels.native_library import load_library
from emberline.protocol.block_hash import BLOCK_TOKENS, KVGroup

PANEL_ROWS = 16
BLOCK_KINDS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k")  # as unpack.h numbers them
GROUP = 32  # weights that share a scale and an offset
MAX_HEAD_DIM = 256
MAX_QUERY_HEADS_PER_KV_HEAD = 16
CACHE_LINE = 64  # bytes; vectors that straddle two lines take twice as long to read

Array = Any  # a numpy array, or a tensor of torch in the host's memory


def _fields(kind: Any, *names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names]


# The structs of kernels.c and attention.h, field by field.


class _Linear(ctypes.Structure):
    _fields_ = [*_fields(c_void_p, "panels", "bias"), *_fields(c_int64, "rows", "cols"), ("bits", c_int32)]


class _Mlp(ctypes.Structure):
    _fields_ = [
        *_fields(_Linear, "gate_up", "down"),
        *_fields(c_void_p, "norm", "post_norm"),
        ("eps", c_float),
        ("gelu", c_int32),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *_fields(c_int64, "tokens", "rows"),
        *_fields(c_void_p, "positions", "query_starts", "context_lens", "last_visible"),
    ]


class _Cache(ctypes.Structure):
    _fields_ = [
        ("pool", c_void_p),
        ("block_stride", c_int64),
        ("block_table", c_void_p),
        ("table_stride", c_int64),
        *_fields(c_void_p, "cosine", "sine"),
    ]


class _Attention(ctypes.Structure):
    _fields_ = [
        *_fields(c_int32, "heads", "kv_heads", "head_dim", "window"),
        ("layer_offset", c_int64),
        *_fields(c_float, "scale", "eps"),
        *_fields(c_void_p, "q_norm", "k_norm"),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        *_fields(_Linear, "qkv", "output"),
        *_fields(c_void_p, "norm", "post_norm"),
        ("eps", c_float),
        ("group", c_int32),
        ("attention", _Attention),
        ("mlp", _Mlp),
    ]


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """Packed weights. `struct` points into `panels` and `bias`, which the matrix keeps alive."""

    struct: _Linear
    panels: NDArray[Any]
    bias: NDArray[np.float32] | None
    n_rows: int  # without the padding to whole panels


@dataclass(slots=True)
class NativeStep:
    """Buffers that the layers of one step share; `keep` holds the arrays its structs point into."""

    step: _Step
    caches: Any  # an array of _Cache, one per KV group
    keep: list[Any] = field(default_factory=list)


def _address(array: Array | None) -> int | None:
    return None if array is None else np.asarray(array).__array_interface__["data"][0]


def _empty(shape: tuple[int, ...], dtype: Any = np.float32) -> NDArray[Any]:
    """An uninitialized array that begins on a cache line."""
    n_bytes = prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(n_bytes + CACHE_LINE, np.uint8)
    first = -memory.__array_interface__["data"][0] % CACHE_LINE
    aligned: NDArray[Any] = memory[first : first + n_bytes].view(dtype).reshape(shape)
    return aligned


def _result(like: Array, *shape: int) -> Array:
    """Room for a float32 result, of the kind of an input."""
    if isinstance(like, np.ndarray):
        return _empty(shape)
    import torch

    return torch.empty(shape)


def supports(hidden: int, head_dim: int, mlp: int, heads_per_kv_head: int) -> bool:
    """True if the kernels can run a model of this shape."""
    aligned = hidden % 16 == 0 and mlp % 16 == 0 and head_dim % 16 == 0
    return aligned and head_dim <= MAX_HEAD_DIM and heads_per_kv_head <= MAX_QUERY_HEADS_PER_KV_HEAD


def set_threads(n: int) -> None:
    """Set the number of threads of all kernels in this process. Called between two steps."""
    load_library().em_threads(n)


class NativeBackend:
    name = "native"
    device = "cpu"
    kv_dtype = "float16"
    kv_keys = "channel"

    def __init__(self, threads: int | None = None, target: str | None = None, groups: ParallelGroups = ALONE) -> None:
        """groups: stages of a pipeline, but no tensor parallelism: a call computes whole layers."""
        assert groups.tp.size == 1
        self.groups = groups
        self._lib = load_library(target)
        self._packed: PackedFile | None = None
        self._declare()
        self._stacks: dict[int, tuple[Any, Any, Any]] = {}  # by id of the layer list: pointers, structs, list
        self._lib.em_threads(threads or len(os.sched_getaffinity(0)))

    def _declare(self) -> None:
        lib, tensor = self._lib, c_void_p
        lib.em_linear.argtypes = [POINTER(_Linear), tensor, c_float, tensor, c_int64, tensor]
        lib.em_linear_add.argtypes = [POINTER(_Linear), tensor, c_float, tensor, c_int64, tensor]
        lib.em_mlp.argtypes = [POINTER(_Mlp), tensor, c_int64]
        lib.em_layers.argtypes = [tensor, c_int64, POINTER(_Step), POINTER(_Cache), tensor]
        lib.em_attention.argtypes = [POINTER(_Attention), POINTER(_Step), POINTER(_Cache), tensor, tensor]
        lib.em_embedding.argtypes = [POINTER(_Linear), tensor, c_int64, c_float, tensor]
        lib.em_pack.argtypes = [tensor, tensor, tensor, c_int64, c_int64, ctypes.c_int, tensor]
        lib.em_unpack.argtypes = [ctypes.c_int, tensor, c_int64, c_int64, tensor, tensor, tensor]
        lib.em_pack_f32.argtypes = [tensor, c_int64, c_int64, tensor]
        packing, steps = ("pack", "pack_f32", "unpack"), ("layers", "linear", "linear_add", "mlp", "attention")
        for name in (*steps, "embedding", *packing, "threads"):
            getattr(lib, f"em_{name}").restype = None

    def inference(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def constant(self, values: NDArray[Any]) -> Any:
        return values

    # --- loading ------------------------------------------------------------------------------------------------------

    def load_matrix(
        self, weights: list[WeightSource], bias: list[WeightSource] | None = None, *, gated: bool = False
    ) -> PackedMatrix:
        packed_bias = None
        if bias is not None:
            packed_bias = np.concatenate([b.dense() for b in bias])
        n_rows, cols = sum(w.shape[0] for w in weights), weights[0].shape[1]
        rows = _padded(n_rows)
        name = "+".join(weight.name for weight in weights) if self._packed is not None else ""
        found = None if self._packed is None else self._packed.find(name)
        if found is not None and len(found.panels) == _panel_bytes(rows, cols, found.bits):
            panels, bits = found
        else:
            panels, bits = self._pack(weights, gated)
            if self._packed is not None and bits < 32:  # float panels would be twice the size of their file
                self._packed.add(name, PackedArray(panels, bits))
        if packed_bias is not None and rows != n_rows:
            packed_bias = np.pad(packed_bias, (0, rows - n_rows))
        struct = _Linear(_address(panels), _address(packed_bias), rows, cols, bits)
        return PackedMatrix(struct, panels, packed_bias, n_rows)

    def keep_beside(self, model: Path, fingerprint: str) -> None:
        """Take matrices from a file beside the model, where an earlier start packed them. Without one, `end_loading`
        writes it."""
        self._packed = PackedFile.beside(model, fingerprint, Path(self._lib._name))

    def end_loading(self) -> None:
        """Keep what was packed since `keep_beside`, on a thread."""
        if self._packed is not None:
            self._packed.save()
        self._packed = None

    def _pack(self, weights: list[WeightSource], gated: bool) -> tuple[NDArray[Any], int]:
        """Panels of stacked weights, and the bits of their codes; 32: floats."""
        quantized = [w.affine(self.unpack) for w in weights] if weights[0].shape[1] % GROUP == 0 else [None]
        if any(part is None for part in quantized):
            return self._pack_floats(_stack([w.dense() for w in weights], gated)), 32
        return self._pack_codes(quantized, gated)

    def unpack(self, kind: str, blocks: Any, shape: tuple[int, ...]) -> tuple[Any, Any, Any]:
        """Codes, scales and offsets of each group of 32 numbers in GGUF blocks of a format of BLOCK_KINDS."""
        rows, cols = shape
        codes = np.empty((rows, cols), np.uint8)
        scale, offset = (np.empty((rows, cols // GROUP), np.float16) for _ in range(2))
        addresses = (array.ctypes.data for array in (codes, scale, offset))
        self._lib.em_unpack(BLOCK_KINDS.index(kind), blocks.ctypes.data, rows, cols, *addresses)
        return codes, scale, offset

    def _pack_codes(self, parts: list[Any], gated: bool) -> tuple[NDArray[Any], int]:
        bits = max(part.bits for part in parts)
        codes = np.ascontiguousarray(_stack([part.codes for part in parts], gated))
        scale, offset = (
            np.ascontiguousarray(_stack([getattr(part, name) for part in parts], gated), dtype=np.float16)
            for name in ("scale", "offset")
        )
        rows, cols = codes.shape
        panels = _empty((_panel_bytes(rows, cols, bits),), np.uint8)
        self._lib.em_pack(*map(_address, (codes, scale, offset)), rows, cols, bits, _address(panels))
        return panels, bits

    def _pack_floats(self, dense: Any) -> NDArray[np.float32]:
        dense = np.ascontiguousarray(dense, dtype=np.float32)
        panels = _empty((dense.size,))
        self._lib.em_pack_f32(_address(dense), *dense.shape, _address(panels))
        return panels

    def load_vector(self, weight: WeightSource) -> Any:
        return np.array(weight.dense(), dtype=np.float32)

    def load_tensor(self, weight: WeightSource) -> Any:
        return self.load_vector(weight)

    def load_experts(
        self, experts: list[list[WeightSource]], bias: list[list[WeightSource]] | None = None, *, gated: bool = False
    ) -> Any:
        raise NotImplementedError("models with experts run on TorchBackend: see registry.select_backend")

    # --- a step -------------------------------------------------------------------------------------------------------

    def begin_step(self, step: Any, kv: list[Array], groups: tuple[KVGroup, ...], ropes: list[Rope]) -> NativeStep:
        tokens, rows = step.positions.shape[0], step.context_lens.shape[0]
        pointers = map(_address, (step.positions, step.query_starts, step.context_lens))
        seen = None if step.images is None else step.images.last_visible
        context = NativeStep(_Step(tokens, rows, *pointers, _address(seen)), (_Cache * len(kv))(), [step])
        positions = np.asarray(step.rotary_positions).astype(np.float32)
        for cache, pool, table, rope in zip(context.caches, map(np.asarray, kv), step.block_tables, ropes, strict=True):
            table = np.asarray(table)
            angles = rope.by_frequency(positions) * np.asarray(rope.inverse_frequencies)
            angles = angles.astype(np.float64)  # rounded to float32 before
            cosine, sine = ((wave(angles) * rope.scale).astype(np.float32) for wave in (np.cos, np.sin))
            context.keep += [cosine, sine, pool, table]
            cache.pool, cache.block_stride = _address(pool), pool.strides[0] // pool.itemsize
            cache.block_table, cache.table_stride = _address(table), table.strides[0] // table.itemsize
            cache.cosine, cache.sine = _address(cosine), _address(sine)
        return context

    def run_layers(self, layers: Sequence[Layer], x: Array, context: NativeStep) -> None:
        stack = self._stacks.get(id(layers))
        if stack is None:
            structs = [_layer_struct(layer) for layer in layers]
            pointers = (c_void_p * len(structs))(*(ctypes.addressof(struct) for struct in structs))
            stack = self._stacks[id(layers)] = (pointers, structs, layers)  # kept alive: pointers and id stay valid
        self._lib.em_layers(stack[0], len(layers), context.step, context.caches, _address(x))

    def residual(self, n_tokens: int, hidden: int) -> Array:
        import torch  # through which the stages of a pipeline talk

        return torch.empty(n_tokens, hidden)

    def gather_logits(self, logits: Array, sizes: Sequence[int]) -> Array:
        return logits

    def embed(self, matrix: PackedMatrix, ids: Array, factor: float, first: int = 0) -> Array:
        out = _result(ids, ids.shape[0], matrix.struct.cols)
        self._lib.em_embedding(matrix.struct, _address(ids), ids.shape[0], factor, _address(out))
        return out

    def norm_linear(self, x: Array, matrix: PackedMatrix, norm: Array, eps: float) -> Array:
        out = _result(x, x.shape[0], matrix.struct.rows)
        self._lib.em_linear(matrix.struct, _address(norm), eps, _address(x), x.shape[0], _address(out))
        if matrix.n_rows == matrix.struct.rows:
            return out
        rows = _result(x, x.shape[0], matrix.n_rows)
        rows[:] = out[:, : matrix.n_rows]
        return rows

    def linear_add(self, x: Array, matrix: PackedMatrix, residual: Array, post_norm: Array | None, eps: float) -> None:
        inputs = _address(post_norm), eps, _address(x), x.shape[0]
        self._lib.em_linear_add(matrix.struct, *inputs, _address(residual))

    def project(self, x: Any, matrix: PackedMatrix, out: Any, norm: Array | None, eps: float, *, add: bool) -> None:
        """Write x times the matrix to out, or add it; x is normed first if a norm is given."""
        if norm is not None:
            result = self.norm_linear(x, matrix, norm, eps)
            out[:] = out + result if add else result
            return
        if not add:
            out[:] = 0
        self.linear_add(x, matrix, out, None, eps)

    def normalize(self, x: Any, norm: Array, eps: float) -> None:
        """Replace x, a tensor, by rms_norm(x)."""
        from emberline.kernels.reference import rms_norm  # a draft head needs torch

        x[:] = rms_norm(x, norm, eps)

    def joint_projection(
        self, embeds: Array, embed_norm: Array, of_embeds: PackedMatrix, hidden: Array, attn: GroupedQueryAttention
    ) -> Array:
        """The first projection of a draft head's attention, which reads two normed inputs."""
        of_embeddings = self.norm_linear(embeds, of_embeds, embed_norm, attn.eps)
        return of_embeddings + self.norm_linear(hidden, attn.qkv, attn.norm, attn.eps)

    def attention(self, qkv: Array, attention: GroupedQueryAttention, context: NativeStep) -> Array:
        out = _result(qkv, qkv.shape[0], attention.heads * attention.head_dim)
        cache = context.caches[attention.kv_group]
        self._lib.em_attention(_attention_struct(attention), context.step, cache, _address(qkv), _address(out))
        return out

    def mlp(self, mlp: MLP, residual: Array) -> None:
        self._lib.em_mlp(_mlp_struct(mlp), _address(residual), residual.shape[0])


def _attention_struct(a: GroupedQueryAttention) -> _Attention:
    layer = 2 * a.kv_heads * BLOCK_TOKENS * a.head_dim
    norms = _address(a.q_norm), _address(a.k_norm)
    return _Attention(a.heads, a.kv_heads, a.head_dim, a.window or 0, a.layer_index * layer, a.scale, a.eps, *norms)


def _mlp_struct(m: MLP) -> _Mlp:
    gelu = int(m.activation == "gelu_tanh")
    return _Mlp(m.gate_up.struct, m.down.struct, _address(m.norm), _address(m.post_norm), m.eps, gelu)


def _layer_struct(layer: Layer) -> _Layer:
    a, m = layer.attention, layer.feed_forward
    assert isinstance(a, GroupedQueryAttention), "other blocks run on TorchBackend"
    assert isinstance(m, MLP)
    norms = _address(a.norm), _address(a.post_norm)
    return _Layer(a.qkv.struct, a.output.struct, *norms, a.eps, a.kv_group, _attention_struct(a), _mlp_struct(m))


def _panel_bytes(rows: int, cols: int, bits: int) -> int:
    """Bytes of panels of codes, with a scale and an offset of two bytes for each group."""
    return rows * cols * bits // 8 + rows * (cols // GROUP) * 4


def _padded(rows: int) -> int:
    return -(-rows // PANEL_ROWS) * PANEL_ROWS


def _stack(parts: list[Any], gated: bool) -> Any:
    """Rows of all parts, padded to whole panels; gated: panels of gate and up alternate."""
    if gated:
        gate, up = (part.reshape(-1, PANEL_ROWS, part.shape[1]) for part in parts)
        return np.stack([gate, up], axis=1).reshape(-1, gate.shape[2])
    stacked = parts[0] if len(parts) == 1 else np.concatenate(parts)
    missing = _padded(stacked.shape[0]) - stacked.shape[0]
    return np.pad(stacked, ((0, missing), (0, 0))) if missing else stacked
