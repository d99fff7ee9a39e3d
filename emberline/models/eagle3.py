"""EAGLE-3 and 3.1: a draft head of a few decoder layers over what the target model computed anyway.

At position i the head sees the residuals that enter some layers of the target (the taps) and the token that follows; it
predicts the token after that one. For further tokens it takes its own output in place of the taps. `eagle3_files` reads
and writes published heads.
"""

from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from emberline.kernels.reference import attend, rms_norm, rotate
from emberline.weights.model_config import BadCheckpoint, LatentConfig, ModelConfig

N_TAPS = 3  # of the heads that are trained here


class Eagle3Config(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of a head, and which of the published variants it is."""

    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    mlp_size: int
    vocab_size: int  # of the target
    draft_vocab_size: int
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    taps: tuple[int, ...]  # layers of the target whose input the head sees
    target: str = ""  # fingerprint of the model it was trained for; published heads name none
    target_hidden_size: int = 0  # 0: the head's own
    n_layers: int = 1
    latent: LatentConfig | None = None  # None: grouped-query attention
    yarn_factor: float = 1.0  # multiplies attention's scores: mscale² of DeepSeek's YaRN
    rope_divisors: tuple[float, ...] | None = None
    rope_scale: float = 1.0  # multiplies cos and sin
    rope_interleaved: bool = False  # of the file, whose rows are reordered when they are read
    own_embedding: bool = False  # False: the target's
    fc_norm: bool = False  # EAGLE-3.1: a norm of each tapped state before they are combined
    norm_output: bool = False  # EAGLE-3.1: the next token starts from the normed output

    @classmethod
    def of(cls, target: ModelConfig, draft_vocab_size: int, fingerprint: str = "") -> "Eagle3Config":
        """A head of the target's own shape."""
        return cls(
            hidden_size=target.hidden_size,
            n_heads=target.n_heads,
            n_kv_heads=target.n_kv_heads,
            head_dim=target.head_dim,
            mlp_size=target.mlp_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size,
            norm_eps=target.norm_eps,
            rope_theta=target.rope_theta,
            taps=default_taps(target.n_layers),
            target=fingerprint,
        )

    @property
    def tapped_size(self) -> int:
        """Numbers of a tapped state."""
        return self.target_hidden_size or self.hidden_size

    @property
    def rope_dim(self) -> int:
        """Dimensions of a query head that RoPE rotates."""
        return self.head_dim if self.latent is None else self.latent.rope

    @property
    def scale(self) -> float:
        """The factor of attention's scores."""
        dim = self.head_dim if self.latent is None else self.latent.nope + self.latent.rope
        return float(dim**-0.5) * self.yarn_factor

    @property
    def rope_frequencies(self) -> Tensor:
        """Rotary frequencies, float32 [rope_dim / 2]."""
        frequencies = self.rope_theta ** -(torch.arange(0, self.rope_dim, 2, dtype=torch.float64) / self.rope_dim)
        if self.rope_divisors is not None:
            frequencies = frequencies / torch.tensor(self.rope_divisors, dtype=torch.float64)
        return frequencies.float()

    def check(self, target: ModelConfig, fingerprint: str) -> None:
        """Raise BadCheckpoint unless the head drafts for this model."""
        shapes = [("hidden size", self.tapped_size, target.hidden_size)]
        if not self.own_embedding:
            shapes.append(("hidden size", self.hidden_size, target.hidden_size))
        for name, own, theirs in (*shapes, ("vocabulary", self.vocab_size, target.vocab_size)):
            if own != theirs:
                raise BadCheckpoint(f"the EAGLE-3 head is for a model with a {name} of {own}; this model's is {theirs}")
        if self.target and self.target != fingerprint:
            raise BadCheckpoint(
                f"the EAGLE-3 head was trained for the model {self.target[:12]}, not for {fingerprint[:12]};"
                " train one for this model with `emberline draft train`"
            )
        ascending = list(self.taps) == sorted(set(self.taps))
        if not self.taps or not ascending or not all(0 <= tap < target.n_layers for tap in self.taps):
            raise BadCheckpoint(f"the EAGLE-3 head taps layers {self.taps} of a model with {target.n_layers} layers")


def default_taps(n_layers: int) -> tuple[int, int, int]:
    """An early, a middle and a late layer, as published heads have them."""
    return (2, n_layers // 2, n_layers - 3) if n_layers > 6 else (0, n_layers // 2, n_layers - 1)


class Eagle3Layer(nn.Module):
    """A decoder layer of a head. The first one's attention reads the token's embedding and the hidden state."""

    def __init__(self, config: Eagle3Config, *, first: bool) -> None:
        super().__init__()
        self.config, self.first = config, first
        hidden, heads, mla = config.hidden_size, config.n_heads, config.latent
        width = 2 * hidden if first else hidden

        def linear(columns: int, rows: int) -> nn.Linear:
            return nn.Linear(columns, rows, bias=False)

        if mla is None:
            self.q_proj = linear(width, heads * config.head_dim)
            self.k_proj = linear(width, config.n_kv_heads * config.head_dim)
            self.v_proj = linear(width, config.n_kv_heads * config.head_dim)
            self.o_proj = linear(heads * config.head_dim, hidden)
        else:
            q_rows = heads * (mla.nope + mla.rope)
            if mla.q_lora is None:
                self.q_proj = linear(width, q_rows)
            else:
                self.q_a_proj, self.q_b_proj = linear(width, mla.q_lora), linear(mla.q_lora, q_rows)
                self.q_a_norm = nn.Parameter(torch.ones(mla.q_lora))
            self.kv_a_proj = linear(width, mla.kv_lora + mla.rope)
            self.kv_a_norm = nn.Parameter(torch.ones(mla.kv_lora))
            self.kv_b_proj = linear(mla.kv_lora, heads * (mla.nope + mla.v_dim))
            self.o_proj = linear(heads * mla.v_dim, hidden)
        self.gate_proj, self.up_proj = linear(hidden, config.mlp_size), linear(hidden, config.mlp_size)
        self.down_proj = linear(config.mlp_size, hidden)
        self.input_norm = nn.Parameter(torch.ones(hidden))  # of the embedding in the first layer
        if first:
            self.hidden_norm = nn.Parameter(torch.ones(hidden))
        self.mlp_norm = nn.Parameter(torch.ones(hidden))

    def attention_inputs(self, embeds: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q and k, and v: [batch, tokens, heads, dim]. `positions`: [tokens] of the embedded tokens."""
        config, eps, mla = self.config, self.config.norm_eps, self.config.latent
        if self.first:
            parts = rms_norm(embeds, self.input_norm, eps), rms_norm(hidden, self.hidden_norm, eps)
            x = torch.cat(parts, dim=-1)
        else:
            x = rms_norm(hidden, self.input_norm, eps)
        angles = torch.outer(positions.float(), config.rope_frequencies.to(x.device))
        cosine, sine = angles.cos() * config.rope_scale, angles.sin() * config.rope_scale
        if mla is None:
            dim = config.head_dim
            q, k, v = (part(x).unflatten(-1, (-1, dim)) for part in (self.q_proj, self.k_proj, self.v_proj))
            return rotate(q, cosine, sine), rotate(k, cosine, sine), v
        rows = self.q_proj(x) if mla.q_lora is None else self.q_b_proj(rms_norm(self.q_a_proj(x), self.q_a_norm, eps))
        q_nope, q_rope = rows.unflatten(-1, (config.n_heads, -1)).split([mla.nope, mla.rope], dim=-1)
        latent, key = self.kv_a_proj(x).split([mla.kv_lora, mla.rope], dim=-1)
        expanded = self.kv_b_proj(rms_norm(latent, self.kv_a_norm, eps)).unflatten(-1, (config.n_heads, -1))
        k_nope, v = expanded.split([mla.nope, mla.v_dim], dim=-1)
        k_rope = rotate(key[..., None, :], cosine, sine).expand_as(q_rope)
        return torch.cat([q_nope, rotate(q_rope, cosine, sine)], -1), torch.cat([k_nope, k_rope], -1), v

    def finish(self, attended: Tensor, hidden: Tensor) -> Tensor:
        """Compute the layer's output from attention's output [batch, tokens, heads, dim]."""
        hidden = hidden + self.o_proj(attended.flatten(-2))
        x = rms_norm(hidden, self.mlp_norm, self.config.norm_eps)
        result: Tensor = hidden + self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class Eagle3Head(nn.Module):
    """The head in plain PyTorch: what training differentiates, and the reference of every other implementation."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        hidden, tapped, n_taps = config.hidden_size, config.tapped_size, len(config.taps)
        self.fc = nn.Linear(n_taps * tapped, hidden, bias=False)
        if config.fc_norm:
            self.fc_norm = nn.ParameterList([torch.ones(tapped) for _ in range(n_taps)])
        self.layers = nn.ModuleList([Eagle3Layer(config, first=n == 0) for n in range(config.n_layers)])
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.norm = nn.Parameter(torch.ones(hidden))
        if config.own_embedding:
            self.embedding = nn.Parameter(torch.empty(config.vocab_size, hidden))
        self.d2t: Tensor
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))

    @property
    def all_layers(self) -> list[Any]:
        """The layers; the type of a module's attributes is not known."""
        return list(self.layers)

    @property
    def layer(self) -> Any:
        """The first layer, which is all of a head that is trained here."""
        return self.layers[0]

    @property
    def target_ids(self) -> Tensor:
        """The target's token ids of the draft vocabulary."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def combine(self, taps: Tensor) -> Tensor:
        """[…, taps * hidden] to the hidden state that the first draft token starts from."""
        if self.config.fc_norm:
            parts = zip(torch.split(taps, self.config.tapped_size, dim=-1), self.fc_norm)
            taps = torch.cat([rms_norm(part, weight, self.config.norm_eps) for part, weight in parts], dim=-1)
        combined: Tensor = self.fc(taps)
        return combined

    def extend(self, embeds: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """Outputs [tokens, hidden] for a sequence from its begin: of the embedded tokens, each with the hidden state
        before it."""
        for layer in self.all_layers:
            q, k, v = layer.attention_inputs(embeds, hidden, positions)
            hidden = layer.finish(attend(q, k, v, self.config.scale, 0), hidden)
        return hidden

    def feed_back(self, output: Tensor) -> Tensor:
        """The hidden state that the next draft token starts from."""
        return rms_norm(output, self.norm, self.config.norm_eps) if self.config.norm_output else output

    def logits(self, output: Tensor) -> Tensor:
        """Over the draft vocabulary."""
        result: Tensor = self.lm_head(rms_norm(output, self.norm, self.config.norm_eps))
        return result
