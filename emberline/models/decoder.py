"""A decoder-only transformer: embedding, layers, norm, LM head. An architecture says what a layer is made of.

The architectures are `llama`, `qwen` and `gemma`: each is a function that builds a layer from the blocks of `attention`
and `feed_forward`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from emberline.kernels.backend import Attention, Backend, FeedForward, Layer, Rope
from emberline.kernels.reference import rms_norm
from emberline.models.layer_weights import CheckpointSource, LayerWeights
from emberline.protocol.block_hash import KVGroup

Architecture = Callable[[LayerWeights], Layer]


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


class Decoder:
    """Weights in the backend's layout, and the forward pass over them."""

    def __init__(self, source: CheckpointSource, backend: Backend, architecture: Architecture) -> None:
        self.config = source.config
        self._backend = backend
        self._embedding = backend.load_matrix([source.weight("token_embd.weight")])
        tied = not source.has("output.weight")
        self._head = self._embedding if tied else backend.load_matrix([source.weight("output.weight")])
        self._norm = backend.load_vector(source.weight("output_norm.weight"))
        layers = [architecture(LayerWeights(source, backend, n)) for n in range(self.config.n_layers)]
        self.kv_groups = kv_groups([layer.attention for layer in layers], backend)
        self.layers = [_with_cache(layer, n, self.kv_groups) for n, layer in enumerate(layers)]
        self._ropes = [self._rope(group) for group in self.kv_groups]

    @property
    def backend(self) -> str:
        return self._backend.name

    @property
    def kernels(self) -> Any:
        """The backend itself, for what is specific to one, such as the GPU's workspace."""
        return self._backend

    @property
    def device(self) -> str:
        return self._backend.device

    @property
    def head(self) -> Any:
        """The matrix of the LM head."""
        return self._head

    @property
    def matrices(self) -> list[Any]:
        """All weight matrices, in the backend's layout."""
        return [self._embedding, self._head, *(matrix for layer in self.layers for matrix in layer.matrices)]

    @property
    def attentions(self) -> list[Attention]:
        return [layer.attention for layer in self.layers]

    @property
    def feed_forwards(self) -> list[FeedForward]:
        return [layer.feed_forward for layer in self.layers]

    @contextmanager
    def distinct_layers(self) -> Iterator[None]:
        """Inside, `forward` runs one layer of each kind only, which is enough to compile every kernel."""
        layers = self.layers
        self.layers = list({_kind(layer): layer for layer in layers}.values())
        try:
            yield
        finally:
            self.layers = layers

    @torch.inference_mode()
    def forward(self, step: StepInputs, kv: list[Tensor]) -> Tensor:
        """Logits, float32 [samples, vocab]. Writes what the new tokens leave in the cache into the blocks of `kv`."""
        x = self._run_layers(step, kv)
        if not len(step.sample_tokens):  # a chunk in the middle of a prompt needs no logits
            return x.new_empty(0, self.config.vocab_size, dtype=torch.float32)
        if len(step.sample_tokens) != len(x):  # in a decode step every token is sampled
            x = x[step.sample_tokens]
        return self._backend.norm_linear(x, self._head, self._norm, self.config.norm_eps).float()

    @torch.inference_mode()
    def hidden(self, step: StepInputs, kv: list[Tensor]) -> Tensor:
        """The normed output of the last layer, float32 [tokens, hidden]: what embedders pool."""
        return rms_norm(self._run_layers(step, kv), self._norm, self.config.norm_eps).float()

    def _run_layers(self, step: StepInputs, kv: list[Tensor]) -> Tensor:  # [tokens, hidden]
        context = self._backend.begin_step(step, kv, self.kv_groups, self._ropes)
        x = self._backend.embed(self._embedding, step.token_ids, self.config.embedding_scale)
        self._backend.run_layers(self.layers, x, context)
        return x

    def _rope(self, group: KVGroup) -> Rope:
        config, dim = self.config, self.layers[group.layers[0]].attention.rotary_dim
        local = group.window is not None and config.local_rope_theta is not None
        theta = config.local_rope_theta if local else config.rope_theta
        frequencies = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        if config.rope_divisors and not local:
            frequencies = frequencies / torch.tensor(config.rope_divisors, dtype=torch.float64)
        return Rope(frequencies.float().to(self.device), 1.0 if local else config.rope_scale)


def kv_groups(attentions: list[Attention], backend: Backend) -> tuple[KVGroup, ...]:
    """Layers grouped by what they keep of a token; full attention first."""
    layouts = [attention.cache for attention in attentions]
    return tuple(
        KVGroup(
            name="full" if layout.window is None else f"{'chunk' if layout.chunked else 'window'}{layout.window}",
            layers=tuple(n for n, other in enumerate(layouts) if other == layout),
            dtype=backend.kv_dtype,
            keys=backend.kv_keys,
            **layout._asdict(),
        )
        for layout in sorted(set(layouts), key=lambda each: (each.window is not None, each.window or 0))
    )


def _with_cache(layer: Layer, n: int, groups: tuple[KVGroup, ...]) -> Layer:
    number, group = next((i, group) for i, group in enumerate(groups) if n in group.layers)
    return replace(layer, attention=replace(layer.attention, kv_group=number, layer_index=group.layers.index(n)))


def _kind(value: Any) -> Any:
    """Equal for layers that run the same kernels: of tensors only shape and type count, and not the layer's number."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if is_dataclass(value):
        inner = (_kind(getattr(value, field.name)) for field in fields(value) if field.name != "layer_index")
        return type(value), *inner
    return value
