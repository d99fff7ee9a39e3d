"""A decoder-only transformer. Architectures differ by their table of tensor names: `llama`, `qwen`, `gemma`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from emberline.kernels.backend import MLP, Attention, Backend, Layer, Rope, WeightSource
from emberline.kernels.reference import rms_norm
from emberline.protocol.block_hash import KVGroup


@dataclass(slots=True)
class StepInputs:
    """A ragged batch. Row r has tokens query_starts[r] : query_starts[r + 1], the last ones of its context."""

    token_ids: Tensor  # int32 [tokens]
    positions: Tensor  # int32 [tokens]
    query_starts: Tensor  # int32 [rows + 1]
    context_lens: Tensor  # int32 [rows], the new tokens included
    block_tables: list[Tensor]  # per KV group: int32 [rows, max_blocks]; entry j holds tokens 16j .. 16j + 15
    sample_tokens: Tensor  # int64 [samples], indices into tokens whose logits are wanted
    shape: Any = None  # kernels.gpu.workspace.StepShape: lengths known on the host, saving a device sync


class CheckpointSource(Protocol):
    """What a model needs of a checkpoint. See `emberline.weights.checkpoint.Checkpoint`."""

    @property
    def config(self) -> Any: ...
    def has(self, name: str) -> bool: ...
    def weight(self, name: str) -> WeightSource: ...


@dataclass(frozen=True, kw_only=True)
class LayerTensorNames:
    """Names of the tensors that make up a layer, relative to `blk.N.`."""

    norm: str = "attn_norm"
    qkv: tuple[str, str, str] = ("attn_q", "attn_k", "attn_v")
    qkv_bias: bool = False  # always; other architectures have them where the checkpoint does
    q_norm: str | None = None
    k_norm: str | None = None
    output: str = "attn_output"
    post_norm: str | None = None
    mlp_norm: str = "ffn_norm"
    gate_up: tuple[str, str] = ("ffn_gate", "ffn_up")
    down: str = "ffn_down"
    mlp_post_norm: str | None = None


class Decoder:
    """Weights in the backend's layout, and the forward pass over them."""

    def __init__(self, source: CheckpointSource, backend: Backend, names: LayerTensorNames) -> None:
        config = source.config
        self.config = config
        self._backend = backend
        self.kv_groups = kv_groups(config, backend)
        self._ropes = [_rope(config, group, backend.device) for group in self.kv_groups]
        self._embedding = backend.load_matrix([source.weight("token_embd.weight")])
        tied = not source.has("output.weight")
        self._head = self._embedding if tied else backend.load_matrix([source.weight("output.weight")])
        self._norm = backend.load_vector(source.weight("output_norm.weight"))
        self._layers = [self._layer(source, names, n) for n in range(config.n_layers)]

    @property
    def backend(self) -> str:
        return self._backend.name

    @property
    def matrices(self) -> list[Any]:
        """All weight matrices, in the backend's layout."""
        inner = [(layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down) for layer in self._layers]
        return [self._embedding, self._head, *(matrix for layer in inner for matrix in layer)]

    @property
    def attentions(self) -> list[Attention]:
        return [layer.attention for layer in self._layers]

    @contextmanager
    def distinct_layers(self) -> Iterator[None]:
        """Inside, `forward` runs one layer of each kind only, which is enough to compile every kernel."""

        def kind(layer: Layer) -> tuple[object, ...]:
            matrices = (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down)
            return layer.attention.window, *((type(m), m.shape, getattr(m, "bits", None)) for m in matrices)

        layers = self._layers
        self._layers = list({kind(layer): layer for layer in layers}.values())
        try:
            yield
        finally:
            self._layers = layers

    @property
    def kernels(self) -> Any:
        """The backend itself, for what is specific to one, such as the GPU's workspace."""
        return self._backend

    @property
    def device(self) -> str:
        return self._backend.device

    def _layer(self, source: CheckpointSource, names: LayerTensorNames, n: int) -> Layer:
        config, backend = self.config, self._backend

        def weights(parts: tuple[str, ...], kind: str = "weight") -> list[WeightSource]:
            return [source.weight(f"blk.{n}.{part}.{kind}") for part in parts]

        def norm(name: str) -> Tensor:
            return backend.load_vector(source.weight(f"blk.{n}.{name}.weight"))

        def optional_norm(name: str | None) -> Tensor | None:
            return None if name is None else norm(name)

        group = next(i for i, g in enumerate(self.kv_groups) if n in g.layers)
        attention = Attention(
            heads=config.n_heads,
            kv_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale or config.head_dim**-0.5,
            eps=config.norm_eps,
            kv_group=group,
            layer_index=self.kv_groups[group].layers.index(n),
            window=self.kv_groups[group].window,
            q_norm=optional_norm(names.q_norm),
            k_norm=optional_norm(names.k_norm),
        )
        mlp = MLP(
            gate_up=backend.load_matrix(weights(names.gate_up), gated=True),
            down=backend.load_matrix(weights((names.down,))),
            norm=norm(names.mlp_norm),
            post_norm=optional_norm(names.mlp_post_norm),
            eps=config.norm_eps,
            activation=config.activation,
        )
        bias = weights(names.qkv, "bias") if names.qkv_bias or config.qkv_bias else None
        qkv = backend.load_matrix(weights(names.qkv), bias)
        output = backend.load_matrix(weights((names.output,)))
        return Layer(norm(names.norm), qkv, attention, output, optional_norm(names.post_norm), mlp, config.norm_eps)

    @torch.inference_mode()
    def forward(self, step: StepInputs, kv: list[Tensor]) -> Tensor:
        """Logits, float32 [samples, vocab]. Writes the new tokens' keys and values into the blocks of `kv`."""
        backend = self._backend
        x = self._run_layers(step, kv)
        if not len(step.sample_tokens):  # a chunk in the middle of a prompt needs no logits
            return x.new_empty(0, self.config.vocab_size, dtype=torch.float32)
        if len(step.sample_tokens) != len(x):  # in a decode step every token is sampled
            x = x[step.sample_tokens]
        return backend.norm_linear(x, self._head, self._norm, self.config.norm_eps).float()

    @torch.inference_mode()
    def hidden(self, step: StepInputs, kv: list[Tensor]) -> Tensor:
        """The normed output of the last layer, float32 [tokens, hidden]: what embedders pool."""
        return rms_norm(self._run_layers(step, kv), self._norm, self.config.norm_eps).float()

    def _run_layers(self, step: StepInputs, kv: list[Tensor]) -> Tensor:  # [tokens, hidden]
        context = self._backend.begin_step(step, kv, self.kv_groups, self._ropes)
        x = self._backend.embed(self._embedding, step.token_ids, self.config.embedding_scale)
        self._backend.run_layers(self._layers, x, context)
        return x


def kv_groups(config: Any, backend: Backend) -> tuple[KVGroup, ...]:
    """Layers grouped by sliding window; full attention first."""
    windows = config.windows or (None,) * config.n_layers
    return tuple(
        KVGroup(
            name="full" if window is None else f"window{window}",
            layers=tuple(n for n, w in enumerate(windows) if w == window),
            kv_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            dtype=backend.kv_dtype,
            window=window,
            keys=backend.kv_keys,
        )
        for window in sorted(set(windows), key=lambda w: (w is not None, w or 0))
    )


def _rope(config: Any, group: KVGroup, device: str) -> Rope:
    local = group.window is not None and config.local_rope_theta is not None
    theta = config.local_rope_theta if local else config.rope_theta
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequencies = theta**-exponents
    if config.rope_divisors and not local:
        frequencies = frequencies / torch.tensor(config.rope_divisors, dtype=torch.float64)
    return Rope(frequencies.float().to(device), 1.0 if local else config.rope_scale)
