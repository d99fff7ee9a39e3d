"""A decoder-only transformer: embedding, layers, norm, LM head. An architecture says what a layer is made of.

The architectures are `llama`, `qwen` and `gemma`: each is a function that builds a layer from the blocks of `attention`
and `feed_forward`.

A rank of several has a `Shard` of it: the layers of its stage, of which the backend computes the rank's part. Within a
stage all ranks have the same hidden states; from stage to stage each sends its own to the next.

On the C backend steps are numpy arrays, and nothing here imports torch. Elsewhere they are tensors, which the C backend
takes, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from emberline.kernels.backend import Attention, Backend, FeedForward, Layer, Rope
from emberline.models.layer_weights import CheckpointSource, LayerWeights
from emberline.models.shard import Shard
from emberline.protocol.block_hash import KVGroup
from emberline.protocol.errors import BadInput

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from emberline.kernels.gpu.prompt_logprobs import DeviceScoredTokens
    from emberline.kernels.prompt_logprobs import ScoredTokens

Architecture = Callable[[LayerWeights], Layer]


class Taps(Protocol):
    """Reads the residual between layers, as draft heads do."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Numbers of layers, ascending. The number of all stands for the end of the last one."""

    def take(self, n: int, residual: Tensor) -> None:
        """Input of layer taps[n]: [tokens, hidden], valid during the call."""

    def end(self, step: StepInputs) -> None:
        """All layers ran, the logits are still to be computed: but for the residual the backend's memory is free."""


@dataclass(slots=True)
class ImageInputs:
    """Rows of images in a step. The first `hidden` columns of a row replace its token's embedding; each of the next
    `hidden` columns is added behind one of the first layers (deepstack)."""

    tokens: Tensor  # int64 [rows], indices of their tokens in the step
    rows: Tensor  # [rows, hidden * (1 + deepstack)]
    last_visible: Tensor | None = None  # int32 [tokens]: what each token sees reaches so far; None: to itself


@dataclass(slots=True)
class StepInputs:
    """A ragged batch, in tensors or numpy arrays.

    Row r has tokens query_starts[r] : query_starts[r + 1], the last ones of its context.
    """

    token_ids: Tensor  # int32 [tokens]
    positions: Tensor  # int32 [tokens]
    query_starts: Tensor  # int32 [rows + 1]
    context_lens: Tensor  # int32 [rows], the new tokens included
    block_tables: list[Tensor]  # per KV group: int32 [rows, max_blocks]; entry j holds tokens 16j .. 16j + 15
    sample_tokens: Tensor  # int64 [samples], indices into tokens whose logits are wanted
    shape: Any = None  # kernels.gpu.backend.workspace.StepShape: lengths known on the host, saving a device sync
    scored: ScoredTokens | DeviceScoredTokens | None = None  # tokens whose next one is scored; None: none
    images: ImageInputs | None = None  # None: no token stands for a row of an image
    rope_positions: Tensor | None = None  # int32 [tokens] or [3, tokens] (M-RoPE); None: `positions`

    @property
    def rotary_positions(self) -> Tensor:
        """Positions that rotate queries and keys: of time, height and width, or one for all."""
        return self.positions if self.rope_positions is None else self.rope_positions

    def of_tokens(self) -> StepInputs:
        """The step for a drafter, which reads token ids at their own positions, and neither images nor scores."""
        return replace(self, images=None, rope_positions=None, scored=None)


class Decoder:
    """Weights in the backend's layout, and the forward pass over them."""

    def __init__(
        self, source: CheckpointSource, backend: Backend, architecture: Architecture, shard: Shard | None = None
    ) -> None:
        """shard: of a rank; `source` is then its checkpoint, and `backend` has its groups."""
        self.config = source.config
        self.shard = shard = shard or Shard.whole(source.config)
        self._backend = backend
        self._numbers = numbers = shard.layers
        self._is_first, self._is_last = numbers.start == 0, numbers.stop == self.config.n_layers
        tied = not source.has("output.weight")
        self._embedding = self._head = self._norm = None
        if self._is_first or (self._is_last and tied):
            self._embedding = backend.load_matrix([source.weight("token_embd.weight")])
        if self._is_last:
            self._head = self._embedding if tied else backend.load_matrix([source.weight("output.weight")])
            self._norm = backend.load_vector(source.weight("output_norm.weight"))
        self._vocabulary = shard.vocabulary(self.config.vocab_size)
        layers = [architecture(LayerWeights(source, backend, n)) for n in numbers]
        self.kv_groups = kv_groups([layer.attention for layer in layers], backend, shard)
        _check_stage(self.config, self.kv_groups, shard)
        self.layers = [_with_cache(layer, n, self.kv_groups) for n, layer in zip(numbers, layers, strict=True)]
        self._ropes = [self._rope(group) for group in self.kv_groups]
        self._tapped: dict[tuple[int, ...], list[list[Layer]]] = {}

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
    def embedding(self) -> Any:
        """The matrix of token embeddings."""
        return self._embedding

    @property
    def head(self) -> Any:
        """The matrix of the LM head."""
        return self._head

    @property
    def norm(self) -> Tensor:
        """The weight of the norm before the LM head."""
        assert self._norm is not None, "a stage of a pipeline"
        return self._norm

    @property
    def matrices(self) -> list[Any]:
        """All weight matrices, in the backend's layout."""
        ends = [matrix for matrix in (self._embedding, self._head) if matrix is not None]
        return [*ends, *(matrix for layer in self.layers for matrix in layer.matrices)]

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

    def forward(self, step: StepInputs, kv: list[Tensor], taps: Taps | None = None) -> Tensor:
        """Logits, float32 [samples, vocab]. Writes what the new tokens leave in the cache into the blocks of `kv`.

        All ranks of a layout call it with the same steps in the same order. In a pipeline hidden states come from the
        stage before and go to the next, and only the ranks of the last get logits, the others [0, vocab]: a stage goes
        on with its next step, of other sequences, while those behind it compute this one.
        """
        with self._backend.inference():
            return self._forward(step, kv, taps)

    def _forward(self, step: StepInputs, kv: list[Tensor], taps: Taps | None) -> Tensor:
        if taps is not None:
            x = self._run_segments(step, kv, taps.taps, taps.take)
            taps.end(step)
            return self._logits(step, x)
        if self._is_first and self._is_last:
            return self._logits(step, self._run_layers(step, kv))
        stages, hidden = self._backend.groups.pp, None
        if not self._is_first:
            hidden = self._backend.residual(len(step.token_ids), self.config.hidden_size)
            stages.recv(hidden, stages.rank - 1)
        out = self.forward_stage(step, kv, hidden)
        if self._is_last:
            return out
        stages.send(out, stages.rank + 1)
        return _no_logits(out, self.config.vocab_size)

    def forward_stage(self, step: StepInputs, kv: list[Tensor], hidden: Tensor | None) -> Tensor:
        """The layers of this stage alone: hidden states [tokens, hidden] of the stage before (the first embeds) to
        those for the next, in place, or to logits in the last. The caller moves them between stages."""
        with self._backend.inference():
            x = self._run_layers(step, kv, hidden)
            return self._logits(step, x) if self._is_last else x

    def forward_tapped(self, step: StepInputs, kv: list[Tensor], taps: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
        """Run `forward`. Returns also the hidden states before each layer in `taps`, ascending: [tokens, hidden].

        They are what a drafter reads that was trained on them. The number of layers stands for the end of the last one.
        In a pipeline each stage passes on those of the stages before with its own: the last one returns all.
        """
        first, stages = self._numbers.start, self._backend.groups.pp
        x: Any = None
        states: list[Any] = []
        with self._backend.inference():
            if not self._is_first:
                x = self._backend.residual(len(step.token_ids), self.config.hidden_size)
                states = [x.clone() for tap in taps if tap < first]
                for each in (x, *states):
                    stages.recv(each, stages.rank - 1)
            own = tuple(tap - first for tap in taps if tap in self._numbers or (self._is_last and tap >= first))
            x = self._run_segments(step, kv, own, lambda n, residual: states.append(residual.clone()), x)
            if self._is_last:
                return self._logits(step, x), states
            for each in (x, *states):
                stages.send(each, stages.rank + 1)
            return _no_logits(x, self.config.vocab_size), []

    def _run_segments(
        self,
        step: StepInputs,
        kv: list[Tensor],
        taps: tuple[int, ...],
        take: Callable[[int, Tensor], None],
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Run the layers, and stop before those that are tapped and behind those that image rows are added to."""
        context = self._backend.begin_step(step, kv, self.kv_groups, self._ropes)
        x = self._begin(step) if hidden is None else hidden
        images, width = step.images, self.config.hidden_size
        n_added = 0 if images is None else images.rows.shape[1] // width - 1
        stops = tuple(sorted({*taps, *range(1, 1 + n_added)}))
        for layers, stop in zip(self._segments(stops), (*stops, None)):
            self._backend.run_layers(layers, x, context)
            if images is not None and stop is not None and 1 <= stop <= n_added:
                x[images.tokens] += images.rows[:, stop * width : (stop + 1) * width].to(x.dtype)
            if stop in taps:
                take(taps.index(stop), x)
        return x

    def _logits(self, step: StepInputs, x: Tensor) -> Tensor:
        """Logits of the tokens that sample. Tokens that are scored have theirs before, some at a time."""
        if (scored := step.scored) is not None:
            for piece in scored.pieces():
                scored.take(piece, self._project(x[scored.tokens[piece]]))
        if not len(step.sample_tokens):  # a chunk in the middle of a prompt needs no logits
            return _no_logits(x, self.config.vocab_size)
        if len(step.sample_tokens) != len(x):  # in a decode step every token is sampled
            x = x[step.sample_tokens]
        return self._project(x)

    def _project(self, x: Tensor) -> Tensor:
        """The LM head: logits, float32 [tokens, vocab], of hidden states."""
        assert self._norm is not None
        logits = self._backend.norm_linear(x, self._head, self._norm, self.config.norm_eps)
        return self._backend.gather_logits(logits, self._vocabulary)

    def _segments(self, taps: tuple[int, ...]) -> list[list[Layer]]:
        """The layers up to each tap, and the rest. Kept: a backend knows lists of layers by their identity."""
        if len(self.layers) < len(self._numbers):  # see distinct_layers
            return [self.layers, *[list[Layer]()] * len(taps)]
        found = self._tapped.get(taps)
        if found is None:
            assert list(taps) == sorted(set(taps)) and all(0 <= tap <= len(self.layers) for tap in taps), taps  # noqa: PT018
            ends = [*taps, len(self.layers)]
            found = self._tapped[taps] = [self.layers[begin:end] for begin, end in zip([0, *taps], ends)]
        return found

    def tapped(self, step: StepInputs, kv: list[Tensor], taps: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
        """The LM head's input for all tokens [tokens, hidden], and the hidden states of `forward_tapped`."""
        *hidden, x = self.forward_tapped(step, kv, (*taps, len(self.layers)))[1]
        return self._normed(x), hidden

    def hidden(self, step: StepInputs, kv: list[Tensor]) -> Tensor:
        """The normed output of the last layer, float32 [tokens, hidden]: what embedders pool."""
        with self._backend.inference():
            return self._normed(self._run_layers(step, kv)).float()

    def _normed(self, x: Tensor) -> Tensor:
        """The LM head's input, of tensors: who asks for it computes with torch."""
        import torch

        from emberline.kernels.reference import rms_norm

        with self._backend.inference():
            return rms_norm(x, torch.as_tensor(self._norm), self.config.norm_eps)

    def _run_layers(self, step: StepInputs, kv: list[Tensor], hidden: Tensor | None = None) -> Tensor:
        images = step.images
        if images is not None and images.rows.shape[1] > self.config.hidden_size and self._is_first:
            return self._run_segments(step, kv, (), lambda n, residual: None)
        context = self._backend.begin_step(step, kv, self.kv_groups, self._ropes)
        x = self._begin(step) if hidden is None else hidden
        self._backend.run_layers(self.layers, x, context)
        return x

    def _begin(self, step: StepInputs) -> Tensor:
        first = sum(self._vocabulary[: self.shard.position.tp_rank])
        x = self._backend.embed(self._embedding, step.token_ids, self.config.embedding_scale, first)
        if (images := step.images) is not None:
            if self._backend.groups.tp.size > 1:
                self._backend.groups.tp.all_reduce(images.rows)  # each rank has some of their columns
            x[images.tokens] = images.rows[:, : x.shape[1]].to(x.dtype)
        return x

    def _rope(self, group: KVGroup) -> Rope:
        config, dim = self.config, self.layers[group.layers[0] - self._numbers.start].attention.rotary_dim
        local = group.window is not None and config.local_rope_theta is not None
        theta = config.local_rope_theta if local else config.rope_theta
        frequencies = theta ** -(np.arange(0, dim, 2) / dim)
        if config.rope_divisors and not local:
            frequencies = frequencies / np.array(config.rope_divisors)
        scale, axes = 1.0 if local else config.rope_scale, _rope_axes(config.mrope_sections, len(frequencies))
        constant = self._backend.constant
        return Rope(constant(frequencies.astype(np.float32)), scale, None if axes is None else constant(axes))


def _rope_axes(sections: tuple[int, ...], n_frequencies: int) -> NDArray[np.int64] | None:
    """The axis that rotates each frequency under interleaved M-RoPE: 0 time, 1 height, 2 width."""
    if not sections:
        return None
    axes = np.zeros(n_frequencies, np.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


def kv_groups(attentions: list[Attention], backend: Backend, shard: Shard) -> tuple[KVGroup, ...]:
    """The layers of a stage grouped by what they keep of a token; full attention first."""
    layouts = [attention.cache for attention in attentions]
    return tuple(
        KVGroup(
            name="full" if layout.window is None else f"{'chunk' if layout.chunked else 'window'}{layout.window}",
            layers=tuple(n for n, other in zip(shard.layers, layouts, strict=True) if other == layout),
            dtype=backend.kv_dtype,
            keys=backend.kv_keys,
            first_head=shard.first_kv_head,
            tokens=shard.token_share.span,
            **layout._asdict(),
        )
        for layout in sorted(set(layouts), key=lambda each: (each.window is not None, each.window or 0))
    )


def _check_stage(config: Any, groups: tuple[KVGroup, ...], shard: Shard) -> None:
    """BadInput for a stage without a layer of some KV group: all ranks have blocks of the same groups."""
    kinds = set(zip(config.windows or [None] * config.n_layers, config.chunks or [None] * config.n_layers, strict=True))
    if len(groups) < len(kinds):
        first, last = shard.layers[0], shard.layers[-1]
        raise BadInput(
            f"--pp {shard.layout.pp}: stage {shard.position.stage} (layers {first} to {last}) has only layers that"
            f" cache {groups[0].name!r}, and needs each of the model's {len(kinds)} kinds: use fewer stages",
            param="pp",
        )


def _with_cache(layer: Layer, n: int, groups: tuple[KVGroup, ...]) -> Layer:
    number, group = next((i, group) for i, group in enumerate(groups) if n in group.layers)
    return replace(layer, attention=replace(layer.attention, kv_group=number, layer_index=group.layers.index(n)))


def _no_logits(like: Any, vocab_size: int) -> Tensor:
    """Logits of no token, of the kind of `like`: float32 [0, vocab]."""
    if isinstance(like, np.ndarray):
        return np.empty((0, vocab_size), np.float32)  # type: ignore[return-value]
    return like.new_empty(0, vocab_size).float()  # type: ignore[no-any-return]


def _kind(value: Any) -> Any:
    """Equal for layers that run the same kernels: of tensors only shape and type count, and not the layer's number."""
    if hasattr(value, "dtype"):
        return value.shape, value.dtype
    if is_dataclass(value):
        inner = (_kind(getattr(value, field.name)) for field in fields(value) if field.name != "layer_index")
        return type(value), *inner
    return value
