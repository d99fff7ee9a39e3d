"""An EAGLE-3 head on a model's backend: it drafts from what the model computed, with a KV group of its own.

The entry of the head's KV cache at position p is made of the target's hidden state at p - 1 and of the token at p. It
depends on no later token, so blocks of it are cached and moved like any others, under the same content keys.
"""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from emberline.kernels.backend import MLP, GroupedQueryAttention, Layer, Rope
from emberline.models.decoder import Decoder, StepInputs
from emberline.models.eagle3 import Eagle3Head
from emberline.protocol.block_hash import KVGroup
from emberline.protocol.errors import BadInput
from emberline.weights.tensors import Affine, Unpack, requantize

KV_GROUP = "eagle3"


class DraftHead:
    """The head on a CPU's backend."""

    def __init__(self, head: Eagle3Head, model: Decoder) -> None:
        config, backend, hidden = head.config, model.kernels, head.config.hidden_size
        self.taps, self.hidden_size = config.taps, hidden
        if backend.groups.tp.size * backend.groups.pp.size > 1:
            raise BadInput("a draft head runs on a model of one rank, without --tp and --pp")
        self._backend, self._embedding, self._scale = backend, model.embedding, model.config.embedding_scale
        self._eps = config.norm_eps
        weights = {name: _Loaded(tensor, self.packs) for name, tensor in head.state_dict().items() if name != "d2t"}
        qkv = torch.cat([head.q_proj.weight, head.k_proj.weight, head.v_proj.weight]).detach()
        self._qkv_of_embedding = backend.load_matrix([_Loaded(qkv[:, :hidden], self.packs)])
        self._embed_norm = backend.load_vector(weights["embed_norm"])
        parts = torch.split(head.fc.weight.detach(), hidden, dim=1)  # of each tap
        self._combine = [backend.load_matrix([_Loaded(part, self.packs)]) for part in parts]
        self._attention = GroupedQueryAttention(
            norm=backend.load_vector(weights["hidden_norm"]),
            qkv=backend.load_matrix([_Loaded(qkv[:, hidden:], self.packs)]),
            output=backend.load_matrix([weights["o_proj.weight"]]),
            heads=config.n_heads,
            kv_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            eps=config.norm_eps,
            kv_group=0,
            layer_index=0,
        )
        self._mlp = MLP(
            norm=backend.load_vector(weights["mlp_norm"]),
            gate_up=backend.load_matrix([weights["gate_proj.weight"], weights["up_proj.weight"]], gated=True),
            down=backend.load_matrix([weights["down_proj.weight"]]),
            eps=config.norm_eps,
            activation="silu",
        )
        self._norm = backend.load_vector(weights["norm"])
        self._lm_head = backend.load_matrix([weights["lm_head.weight"]])
        ids = head.d2t + torch.arange(config.draft_vocab_size, device=head.d2t.device)
        self.target_ids = ids.int().to(backend.device)
        dim = config.head_dim
        frequencies = config.rope_theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        self._rope = Rope(frequencies.float().to(backend.device))
        self.kv_group = KVGroup(
            name=f"{KV_GROUP}-{_digest(head)}",  # what it caches is of no use to another head
            layers=(model.config.n_layers,),  # behind the model's own
            dtype=backend.kv_dtype,
            keys=backend.kv_keys,
            **self._attention.cache._asdict(),
        )

    packs = True  # its matrices are packed with 8 bits

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        return (self.kv_group,)

    @property
    def layer(self) -> Layer:
        return Layer(self._attention, self._mlp)

    @property
    def matrices(self) -> list[Any]:
        return [*self._combine, self._qkv_of_embedding, *self.layer.matrices, self._lm_head]

    @torch.inference_mode()
    def combine(self, states: Sequence[Tensor]) -> Tensor:
        """States of the target at each tap [tokens, hidden] to the head's hidden states [tokens, hidden]."""
        hidden = torch.zeros_like(states[0])
        for state, part in zip(states, self._combine, strict=True):
            self._backend.linear_add(state, part, hidden, None, self._eps)
        return hidden

    @torch.inference_mode()
    def extend(self, step: StepInputs, hidden: Tensor, pool: Tensor) -> Tensor:
        """Entries for the step's tokens, each with the hidden state of the position before it: writes them to `pool`,
        through the one block table that the step has, and returns the hidden states that follow."""
        context = self._backend.begin_step(step, [pool], (self.kv_group,), [self._rope])
        embeds = self._backend.embed(self._embedding, step.token_ids, self._scale)
        attn = self._attention
        qkv = self._backend.norm_linear(embeds, self._qkv_of_embedding, self._embed_norm, self._eps)
        qkv = qkv + self._backend.norm_linear(hidden, attn.qkv, attn.norm, attn.eps)
        x = hidden.clone()
        self._attend(qkv, x, context)
        return x

    def _attend(self, qkv: Tensor, x: Tensor, context: Any) -> None:
        attn = self._attention
        self._backend.linear_add(self._backend.attention(qkv, attn, context), attn.output, x, None, attn.eps)
        self._backend.mlp(self._mlp, x)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Over the draft vocabulary, float32; `target_ids` are its token ids."""
        result: Tensor = self._backend.norm_linear(hidden, self._lm_head, self._norm, self._eps)
        return result.float()


class GpuDraftHead(DraftHead):
    """The head on the GPU's backend: in buffers of its caller, so that a CUDA graph can be captured."""

    packs = False

    def __init__(self, head: Eagle3Head, model: Decoder) -> None:
        super().__init__(head, model)
        self.group = len(model.kv_groups)  # number of its KV group

    def add_tap(self, n: int, state: Tensor, hidden: Tensor) -> None:
        """The share of tap n in the hidden states; that of the first is written, those of the others are added."""
        if n == 0:
            hidden.zero_()
        self._backend.linear_add(state, self._combine[n], hidden, None, self._eps)

    def write_entries(self, step: StepInputs, hidden: Tensor, pool: Tensor, embeds: Tensor) -> None:
        """Entries for the step's tokens, and nothing else. embeds: memory for their embeddings."""
        step = replace(step, block_tables=step.block_tables[self.group :])
        context = self._backend.rotate_only(step, pool, self._rope, self.group)
        self._backend.write_kv(self._qkv(step, hidden, embeds), self._attention, context)

    def extend_in_place(self, step: StepInputs, x: Tensor, pool: Tensor, embeds: Tensor) -> None:
        """As `extend`: x becomes the hidden states that follow."""
        context = self._backend.begin_step(step, [pool], (self.kv_group,), [self._rope], self.group)
        self._attend(self._qkv(step, x, embeds), x, context)

    def _qkv(self, step: StepInputs, hidden: Tensor, embeds: Tensor) -> Tensor:
        self._backend.embed(self._embedding, step.token_ids, self._scale, out=embeds)
        qkv: Tensor = self._backend.joint_qkv(embeds, self._embed_norm, self._qkv_of_embedding, hidden, self._attention)
        return qkv


def _digest(head: Eagle3Head) -> str:
    if head.fc.weight.is_meta:  # it is planned with, and caches nothing
        return ""
    digest = blake2b(digest_size=6)
    for tensor in head.state_dict().values():
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


class _Loaded:
    """A tensor in memory as a `kernels.backend.WeightSource`. The C kernels take it with 8 bits."""

    kind = "f32"

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
