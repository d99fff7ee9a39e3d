"""An EAGLE-3 head on a model's backend: it drafts from what the model computed, with a KV group of its own.

The entry of the head's KV cache at position p is made of the target's hidden state at p - 1 and of the token at p. It
depends on no later token, so blocks of it are cached and moved like any others, under the same content keys.

In a rank group the ranks that sample have the head, divided as the model is: attention heads, MLP and vocabulary. Each
has some rows of `fc`, whose results are gathered; MLA's first projections are whole on every rank. The other stages of
a pipeline pass on the states that it taps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import msgspec
import torch
from torch import Tensor

from emberline.kernels.backend import MLP, GroupedQueryAttention, LatentAttention, Layer, Rope
from emberline.models.decoder import Decoder, StepInputs
from emberline.models.eagle3 import Eagle3Config, Eagle3Head, Eagle3Layer
from emberline.models.shard import Shard
from emberline.protocol.block_hash import BLOCK_TOKENS, KVGroup
from emberline.weights.model_config import BadCheckpoint
from emberline.weights.tensors import Affine, Unpack, requantize

KV_GROUP = "eagle3"


class DraftHead:
    """The head on a CPU's backend."""

    packs = True  # its matrices are packed with 8 bits

    def __init__(self, head: Eagle3Head, model: Decoder, embedding: Any = None) -> None:
        """embedding: the target's, on a stage of a pipeline that has none."""
        config, backend = head.config, model.kernels
        self.taps, self.hidden_size, self._backend = config.taps, config.hidden_size, backend
        self._part = part = _RankPart(model.shard, self.packs)
        self._eps, self._feeds_norm = config.norm_eps, config.norm_output
        if config.latent is not None and backend.name == "native":
            raise BadCheckpoint("an EAGLE-3 head with latent attention (MLA) is for models with MLA")
        own = [backend.load_matrix([part.vocabulary(head.embedding)])] if config.own_embedding else []
        self._own_embedding, shared = own, embedding if model.embedding is None else model.embedding
        self._embedding = own[0] if own else shared
        self._scale: float = 1.0 if own else model.config.embedding_scale
        self._first_id = model.shard.rank.vocabulary(config.vocab_size)[0]  # of the embedding's rows here
        parts = torch.split(head.fc.weight.detach(), config.tapped_size, dim=1)  # of each tap
        tp = model.shard.layout.tp
        divides = tp > 1 and config.hidden_size % tp == 0
        self._own_size = config.hidden_size // tp if divides else config.hidden_size  # columns of `fc`'s results here
        self._combine = [backend.load_matrix([part.rows(each) if divides else part.whole(each)]) for each in parts]
        norms = head.fc_norm if config.fc_norm else [None] * len(parts)
        self._tap_norms = [None if norm is None else backend.load_vector(part.whole(norm)) for norm in norms]
        first, *others = head.all_layers
        self._of_embedding, self._embed_norm, layer = self._first_layer(first)
        self._layers = [layer, *(self._layer(each, n) for n, each in enumerate(others, 1))]
        self._others = self._layers[1:]  # a list of its own: a backend knows lists of layers by their identity
        self._norm = backend.load_vector(part.whole(head.norm))
        self._lm_head = backend.load_matrix([part.vocabulary(head.lm_head.weight)])
        self._vocabulary = model.shard.vocabulary(config.draft_vocab_size)
        self.target_ids = head.target_ids.int().to(backend.device)
        self._rope = Rope(config.rope_frequencies.to(backend.device), config.rope_scale)
        self.kv_group = kv_group(head, model)

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        return (self.kv_group,)

    @property
    def layer(self) -> Layer:
        return self._layers[0]

    @property
    def matrices(self) -> list[Any]:
        layers = [matrix for layer in self._layers for matrix in layer.matrices]
        return [*self._own_embedding, *self._combine, self._of_embedding, *layers, self._lm_head]

    def _first_layer(self, layer: Eagle3Layer) -> tuple[Any, Tensor, Layer]:
        """The matrix that reads the embedding, its norm, and the layer without them."""
        width = self.hidden_size
        made = self._layer(layer, 0, slice(width, None))
        of_embedding = self._backend.load_matrix(self._inputs(layer, slice(width)))
        return of_embedding, self._backend.load_vector(self._part.whole(layer.input_norm)), made

    def _inputs(self, layer: Eagle3Layer, columns: slice) -> "list[_Loaded]":
        """The matrices of this rank that read these columns of the input: of queries, and of keys and values."""
        config, part = layer.config, self._part
        if config.latent is None:
            kv = (part.kv_heads(each.weight[:, columns], config.n_kv_heads) for each in (layer.k_proj, layer.v_proj))
            return [part.rows(layer.q_proj.weight[:, columns]), *kv]
        kv_a = part.whole(layer.kv_a_proj.weight[:, columns])
        if config.latent.q_lora is None:
            return [part.rows(layer.q_proj.weight[:, columns]), kv_a]
        return [part.whole(layer.q_a_proj.weight[:, columns]), kv_a]

    def _layer(self, layer: Eagle3Layer, number: int, columns: slice = slice(None)) -> Layer:
        """A layer in the backend's blocks. columns: of its input that the blocks read."""
        config, backend, part, mla = layer.config, self._backend, self._part, layer.config.latent
        inputs = self._inputs(layer, columns)
        n_heads = config.n_heads // part.shard.layout.tp
        shared = {
            "norm": backend.load_vector(part.whole(layer.hidden_norm if layer.first else layer.input_norm)),
            "output": backend.load_matrix([part.columns(layer.o_proj.weight)]),
            "heads": n_heads,
            "scale": config.scale,
            "eps": config.norm_eps,
            "kv_group": 0,
            "layer_index": number,
        }
        attention: GroupedQueryAttention | LatentAttention
        if mla is None:
            first, stop = part.shard.rank.kv_heads(config.n_kv_heads)
            attention = GroupedQueryAttention(
                qkv=backend.load_matrix(inputs), kv_heads=stop - first, head_dim=config.head_dim, **shared
            )
        else:
            low_rank = mla.q_lora is not None
            up = backend.load_tensor(part.rows(layer.kv_b_proj.weight))
            up = up.view(n_heads, mla.nope + mla.v_dim, mla.kv_lora)
            attention = LatentAttention(
                qkv_a=backend.load_matrix(inputs),
                q_norm=backend.load_vector(part.whole(layer.q_a_norm)) if low_rank else None,
                q_b=backend.load_matrix([part.rows(layer.q_b_proj.weight)]) if low_rank else None,
                kv_norm=backend.load_vector(part.whole(layer.kv_a_norm)),
                k_up=up[:, : mla.nope],
                v_up=up[:, mla.nope :],
                q_lora=mla.q_lora,
                kv_lora=mla.kv_lora,
                nope_dim=mla.nope,
                rope_dim=mla.rope,
                v_dim=mla.v_dim,
                **shared,
            )
        gate_up = [part.rows(each.weight) for each in (layer.gate_proj, layer.up_proj)]
        mlp = MLP(
            norm=backend.load_vector(part.whole(layer.mlp_norm)),
            gate_up=backend.load_matrix(gate_up, gated=True),
            down=backend.load_matrix([part.columns(layer.down_proj.weight)]),
            eps=config.norm_eps,
            activation="silu",
        )
        return Layer(attention, mlp)

    @torch.inference_mode()
    def combine(self, states: Sequence[Tensor]) -> Tensor:
        """States of the target at each tap [tokens, hidden] to the head's hidden states [tokens, hidden]."""
        hidden = states[0].new_empty(len(states[0]), self.hidden_size)
        for n, state in enumerate(states):
            self.add_tap(n, state, hidden)
        self.gather_taps(hidden, torch.empty_like(hidden))
        return hidden

    def add_tap(self, n: int, state: Tensor, hidden: Tensor) -> None:
        """The share of tap n in the hidden states; that of the first is written, those of the others are added. In a
        rank group `hidden` begins with this rank's columns until `gather_taps`."""
        self._backend.project(state, self._combine[n], self._own(hidden), self._tap_norms[n], self._eps, add=n > 0)

    def gather_taps(self, hidden: Tensor, scratch: Tensor) -> None:
        """Complete the hidden states by other ranks' columns. scratch: memory of the same size."""
        if self._own_size < self.hidden_size:
            group, own = self._backend.groups.tp, self._own(hidden)
            everyone = group.all_gather(own, scratch.view(group.size, *own.shape))  # [ranks, tokens, own]
            hidden.view(len(hidden), group.size, -1).copy_(everyone.transpose(0, 1))

    def _own(self, hidden: Tensor) -> Tensor:
        """Columns of this rank before all are gathered: contiguous, at the beginning of the hidden states' memory."""
        return hidden.view(-1)[: len(hidden) * self._own_size].view(len(hidden), self._own_size)

    @torch.inference_mode()
    def extend(self, step: StepInputs, hidden: Tensor, pool: Tensor) -> Tensor:
        """Entries for the step's tokens, each with the hidden state of the position before it: writes them to `pool`,
        through the one block table that the step has, and returns the outputs."""
        context = self._backend.begin_step(step, [pool], (self.kv_group,), [self._rope])
        x = hidden.clone()
        self._run(x, self._backend.embed(self._embedding, step.token_ids, self._scale, self._first_id), context)
        return x

    def _run(self, x: Tensor, embeds: Tensor, context: Any) -> None:
        """All layers: x becomes their output."""
        backend, attn = self._backend, self.layer.attention
        projected = backend.joint_projection(embeds, self._embed_norm, self._of_embedding, x, attn)
        backend.linear_add(backend.attention(projected, attn, context), attn.output, x, None, attn.eps)
        backend.mlp(self.layer.feed_forward, x)
        if self._others:
            backend.run_layers(self._others, x, context)

    @torch.inference_mode()
    def feed_back(self, output: Tensor) -> None:
        """Turn outputs, whose logits are known, into the hidden states that the next draft tokens start from."""
        if self._feeds_norm:
            self._backend.normalize(output, self._norm, self._eps)

    @torch.inference_mode()
    def logits(self, output: Tensor) -> Tensor:
        """Over the draft vocabulary, float32; `target_ids` are its token ids."""
        result: Tensor = self._backend.norm_linear(output, self._lm_head, self._norm, self._eps).float()
        return result if len(self._vocabulary) == 1 else self._backend.gather_logits(result, self._vocabulary)


class GpuDraftHead(DraftHead):
    """The head on the GPU's backend: in buffers of its caller, so that a CUDA graph can be captured."""

    packs = False

    def __init__(self, head: Eagle3Head, model: Decoder) -> None:
        super().__init__(head, model)
        self.group = len(model.kv_groups)  # number of its KV group

    def write_entries(self, step: StepInputs, hidden: Tensor, pool: Tensor) -> None:
        """Entries for the step's tokens, and nothing else. `hidden` is lost."""
        attn = self.layer.attention
        step = replace(step.of_tokens(), block_tables=step.block_tables[self.group :])
        if self._others or isinstance(attn, LatentAttention):  # the entries of later layers need what these attend to
            self.extend_in_place(step, hidden, pool)
            return
        context = self._backend.rotate_only(step, pool, self._rope, self.group)
        self._backend.write_kv(self._projected(step, hidden), attn, context)

    def extend_in_place(self, step: StepInputs, x: Tensor, pool: Tensor) -> None:
        """Do what `extend` does in place: x becomes the outputs."""
        context = self._backend.begin_step(step, [pool], (self.kv_group,), [self._rope], self.group)
        self._run(x, self._embeds(step), context)

    def _embeds(self, step: StepInputs) -> Tensor:
        """Embeddings of the step's tokens, in memory that the attention's first projection still spares."""
        out = self._backend.draft_embeds(len(step.token_ids), self.hidden_size)
        embeds: Tensor = self._backend.embed(self._embedding, step.token_ids, self._scale, self._first_id, out=out)
        return embeds

    def _projected(self, step: StepInputs, hidden: Tensor) -> Tensor:
        attn, embeds = self.layer.attention, self._embeds(step)
        projected: Tensor = self._backend.joint_projection(embeds, self._embed_norm, self._of_embedding, hidden, attn)
        return projected


@dataclass(frozen=True, slots=True)
class DraftsElsewhere:
    """A stage of a pipeline whose last stage drafts: it passes on tapped states, and has no part of the KV groups."""

    taps: tuple[int, ...]
    kv_groups: tuple[KVGroup, ...]

    @classmethod
    def of(cls, taps: tuple[int, ...], groups: Sequence[KVGroup]) -> "DraftsElsewhere":
        """groups: of the rank that drafts. The same ones here have no layers, so their blocks have no bytes."""
        return cls(taps, tuple(msgspec.structs.replace(group, layers=()) for group in groups))


def kv_group(head: Eagle3Head, model: Decoder) -> KVGroup:
    """The KV group of a head on a rank: its KV heads, or MLA's latents and the rank's share of their tokens."""
    config, backend, shard, mla = head.config, model.kernels, model.shard, head.config.latent
    first, stop = (0, 1) if mla is not None else shard.rank.kv_heads(config.n_kv_heads)
    n = model.config.n_layers
    return KVGroup(
        name=f"{KV_GROUP}-{_digest(head)}",  # what it caches is of no use to another head
        layers=tuple(range(n, n + config.n_layers)),  # behind the model's own
        kv_heads=stop - first,
        head_dim=config.head_dim if mla is None else mla.kv_lora + mla.rope,
        dtype=backend.kv_dtype,
        keys=backend.kv_keys,
        planes=2 if mla is None else 1,
        first_head=first,
        tokens=(0, BLOCK_TOKENS) if mla is None else shard.token_share.span,
    )


def check_division(config: Eagle3Config, shard: Shard) -> None:
    """Raise BadInput, with the number and the nearest that work, if --tp does not divide the head."""
    layout = shard.layout
    layout.check_divides("heads of the draft head", config.n_heads)
    if config.latent is None and layout.tp % config.n_kv_heads:
        layout.check_divides("KV heads of the draft head", config.n_kv_heads)
    layout.check_divides("columns of the draft head's MLP", config.mlp_size)


@dataclass(frozen=True, slots=True)
class _RankPart:
    """The slices of a head's tensors that a rank has."""

    shard: Shard
    packs: bool

    def whole(self, tensor: Tensor) -> "_Loaded":
        return _Loaded(tensor, self.packs)

    def rows(self, tensor: Tensor) -> "_Loaded":
        return self.whole(tensor[slice(*self.shard.rank.part(len(tensor), "rows of a draft head"))])

    def columns(self, tensor: Tensor) -> "_Loaded":
        return self.whole(tensor[:, slice(*self.shard.rank.part(tensor.shape[1], "columns of a draft head"))])

    def kv_heads(self, tensor: Tensor, n_heads: int) -> "_Loaded":
        dim = len(tensor) // n_heads
        first, stop = self.shard.rank.kv_heads(n_heads)
        return self.whole(tensor[first * dim : stop * dim])

    def vocabulary(self, tensor: Tensor) -> "_Loaded":
        return self.whole(tensor[slice(*self.shard.rank.vocabulary(len(tensor)))])


def _digest(head: Eagle3Head) -> str:
    if head.fc.weight.is_meta:  # it is planned with, and caches nothing
        return ""
    digest = blake2b(digest_size=6)
    for tensor in head.state_dict().values():
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


class _Loaded:
    """A tensor in memory as a `kernels.backend.WeightSource`. The C kernels take it with 8 bits."""

    name, kind = "of a draft head", "f32"

    def __init__(self, values: Tensor, packs: bool) -> None:
        self._packs = packs
        values = values.detach().float()
        self._values = values if values.is_meta else values.cpu().contiguous()
        self.shape = tuple(values.shape)

    def dense(self) -> Any:
        return self._values.numpy()

    def affine(self, unpack: Unpack | None = None) -> Affine | None:
        return requantize(self.dense()) if self._packs and len(self.shape) == 2 else None

    def tensor(self, dtype: torch.dtype, device: str) -> Tensor:
        return self._values.to(device=device, dtype=dtype)

    def into(self, target: Tensor) -> None:
        target.copy_(self._values)
