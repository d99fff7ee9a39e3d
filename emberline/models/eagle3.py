"""EAGLE-3: a draft head of one decoder layer over what the target model computed anyway.

At position i the head sees the residuals that enter three layers of the target (the taps) and the token that follows;
it predicts the token after that one. For further tokens it takes its own output in place of the taps. Heads are stored
as they are published: `fc`, one layer, a norm and an LM head over a draft vocabulary, whose ids `d2t` maps to the
target's. The embedding is the target's own.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from emberline.kernels.reference import rms_norm, rotate
from emberline.weights.model_config import BadCheckpoint, ModelConfig
from emberline.weights.safetensors_file import SafetensorsFile, write_safetensors

N_TAPS = 3
WEIGHTS, CONFIG = "model.safetensors", "config.json"
ARCHITECTURE = "LlamaForCausalLMEagle3"


class Eagle3Config(msgspec.Struct, frozen=True, kw_only=True):
    hidden_size: int  # of the target
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

    def check(self, target: ModelConfig, fingerprint: str) -> None:
        """Raise BadCheckpoint unless the head drafts for this model."""
        for name, own, theirs in (
            ("hidden size", self.hidden_size, target.hidden_size),
            ("vocabulary", self.vocab_size, target.vocab_size),
        ):
            if own != theirs:
                raise BadCheckpoint(f"the EAGLE-3 head is for a model with a {name} of {own}; this model's is {theirs}")
        if self.target and self.target != fingerprint:
            raise BadCheckpoint(
                f"the EAGLE-3 head was trained for the model {self.target[:12]}, not for {fingerprint[:12]};"
                " train one for this model with `emberline draft train`"
            )
        ascending = list(self.taps) == sorted(set(self.taps))
        if len(self.taps) != N_TAPS or not ascending or not all(0 <= tap < target.n_layers for tap in self.taps):
            raise BadCheckpoint(f"the EAGLE-3 head taps layers {self.taps} of a model with {target.n_layers} layers")


def default_taps(n_layers: int) -> tuple[int, int, int]:
    """An early, a middle and a late layer, as published heads have them."""
    return (2, n_layers // 2, n_layers - 3) if n_layers > 6 else (0, n_layers // 2, n_layers - 1)


class Eagle3Head(nn.Module):
    """The head in plain PyTorch: what training differentiates, and the reference of every other implementation."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        hidden, heads, kv_heads = config.hidden_size, config.n_heads, config.n_kv_heads
        self.fc = nn.Linear(N_TAPS * hidden, hidden, bias=False)
        self.q_proj = nn.Linear(2 * hidden, heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * hidden, kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * hidden, kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * config.head_dim, hidden, bias=False)
        self.gate_proj = nn.Linear(hidden, config.mlp_size, bias=False)
        self.up_proj = nn.Linear(hidden, config.mlp_size, bias=False)
        self.down_proj = nn.Linear(config.mlp_size, hidden, bias=False)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.embed_norm = nn.Parameter(torch.ones(hidden))
        self.hidden_norm = nn.Parameter(torch.ones(hidden))
        self.mlp_norm = nn.Parameter(torch.ones(hidden))
        self.norm = nn.Parameter(torch.ones(hidden))
        self.d2t: Tensor
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))

    def combine(self, taps: Tensor) -> Tensor:
        """[…, 3 * hidden] to the hidden state that the first draft token starts from."""
        combined: Tensor = self.fc(taps)
        return combined

    def attention_inputs(self, embeds: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q and k, and v: [batch, tokens, heads, head_dim]. `positions`: [tokens] of the embedded tokens."""
        eps, dim = self.config.norm_eps, self.config.head_dim
        x = torch.cat([rms_norm(embeds, self.embed_norm, eps), rms_norm(hidden, self.hidden_norm, eps)], dim=-1)
        q, k, v = (part(x).unflatten(-1, (-1, dim)) for part in (self.q_proj, self.k_proj, self.v_proj))
        frequencies = self.config.rope_theta ** -(torch.arange(0, dim, 2, device=x.device, dtype=torch.float32) / dim)
        angles = torch.outer(positions.float(), frequencies)
        cosine, sine = angles.cos(), angles.sin()
        return rotate(q, cosine, sine), rotate(k, cosine, sine), v

    def finish(self, attended: Tensor, hidden: Tensor) -> Tensor:
        """From attention's output [batch, tokens, heads, head_dim] to the layer's: the next token's hidden state."""
        hidden = hidden + self.o_proj(attended.flatten(-2))
        x = rms_norm(hidden, self.mlp_norm, self.config.norm_eps)
        result: Tensor = hidden + self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        """Over the draft vocabulary."""
        result: Tensor = self.lm_head(rms_norm(hidden, self.norm, self.config.norm_eps))
        return result


# --- files ------------------------------------------------------------------------------------------------------------

_LAYER = "midlayer."  # or "layers.0.", as some publish it
_NAMES = {
    "fc.weight": "fc.weight",
    "q_proj.weight": _LAYER + "self_attn.q_proj.weight",
    "k_proj.weight": _LAYER + "self_attn.k_proj.weight",
    "v_proj.weight": _LAYER + "self_attn.v_proj.weight",
    "o_proj.weight": _LAYER + "self_attn.o_proj.weight",
    "gate_proj.weight": _LAYER + "mlp.gate_proj.weight",
    "up_proj.weight": _LAYER + "mlp.up_proj.weight",
    "down_proj.weight": _LAYER + "mlp.down_proj.weight",
    "embed_norm": _LAYER + "input_layernorm.weight",
    "hidden_norm": _LAYER + "hidden_norm.weight",
    "mlp_norm": _LAYER + "post_attention_layernorm.weight",
    "norm": "norm.weight",
    "lm_head.weight": "lm_head.weight",
}


_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I32": torch.int32, "I64": torch.int64}
SHIPPED = Path(__file__).parent / "draft_heads"


def shipped_head(fingerprint: str) -> Path | None:
    """The head that comes with this package for the model, if there is one."""
    folder = SHIPPED / fingerprint[:16]
    return folder if (folder / CONFIG).is_file() else None


def save_head(head: Eagle3Head, folder: Path) -> None:
    """In bfloat16, with the names of published heads."""
    config = head.config
    folder.mkdir(parents=True, exist_ok=True)
    own = head.state_dict()
    tensors = {stored: own[name].to(torch.bfloat16).cpu().contiguous() for name, stored in _NAMES.items()}
    d2t = head.d2t.cpu()
    t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
    t2d[d2t + torch.arange(len(d2t))] = True
    names = {dtype: name for name, dtype in _DTYPES.items()} | {torch.bool: "BOOL"}
    stored = {
        name: (names[tensor.dtype], tuple(tensor.shape), tensor.flatten().view(torch.uint8).numpy().tobytes())
        for name, tensor in (tensors | {"d2t": d2t, "t2d": t2d}).items()
    }
    write_safetensors(folder / WEIGHTS, stored)
    fields = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_size,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "torch_dtype": "bfloat16",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(config.taps)},
        "emberline_target": config.target,
    }
    (folder / CONFIG).write_text(json.dumps(fields, indent=2) + "\n")


def load_head(folder: Path, n_target_layers: int) -> Eagle3Head:
    """A published head, or one of `save_head`. Raises BadCheckpoint when it is none."""
    config = read_config(folder, n_target_layers)
    head = Eagle3Head(config)
    own = head.state_dict()
    try:
        file = SafetensorsFile.open(folder / WEIGHTS)
    except OSError as error:
        raise BadCheckpoint(f"the EAGLE-3 head {folder} cannot be read: {error}") from None
    for name, stored in _NAMES.items():
        found = stored if stored in file.tensors else stored.replace(_LAYER, "layers.0.")
        own[name].copy_(_read(file, found, stored, tuple(own[name].shape)))
    size = (config.draft_vocab_size,)
    head.d2t.copy_(_read(file, "d2t", "d2t", size) if "d2t" in file.tensors else _identity(config))
    ids = head.d2t + torch.arange(config.draft_vocab_size)
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        raise BadCheckpoint(f"the EAGLE-3 head {folder} drafts token ids outside the vocabulary")
    if not all(bool(torch.isfinite(tensor).all()) for tensor in own.values()):
        raise BadCheckpoint(f"the EAGLE-3 head {folder} has weights that are no numbers")
    return head


def _read(file: SafetensorsFile, name: str, published: str, shape: tuple[int, ...]) -> Tensor:
    entry = file.tensors.get(name)
    if entry is None:
        raise BadCheckpoint(f"the EAGLE-3 head {file.path.parent} lacks the tensor {published}")
    if entry.shape != shape:
        raise BadCheckpoint(f"the head's tensor {name} is {list(entry.shape)}; expected {list(shape)}")
    if entry.dtype not in _DTYPES:
        raise BadCheckpoint(f"the head's tensor {name} is of {entry.dtype}, which is not one of {', '.join(_DTYPES)}")
    return torch.frombuffer(bytearray(file.bytes_of(entry).tobytes()), dtype=_DTYPES[entry.dtype]).view(shape)


def _identity(config: Eagle3Config) -> Tensor:
    if config.draft_vocab_size != config.vocab_size:
        raise BadCheckpoint("the EAGLE-3 head has a draft vocabulary but no d2t, which says what its ids mean")
    return torch.zeros(config.draft_vocab_size, dtype=torch.int64)


def read_config(folder: Path, n_target_layers: int) -> Eagle3Config:
    try:
        fields: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"the EAGLE-3 head {folder} has no readable {CONFIG}: {error}") from None
    if fields.get("architectures") != [ARCHITECTURE]:
        raise BadCheckpoint(f"{folder} is no EAGLE-3 head that runs here: its architectures are not {ARCHITECTURE}")
    try:
        heads = fields["num_attention_heads"]
        taps = (fields.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        return msgspec.convert(
            {
                "hidden_size": fields["hidden_size"],
                "n_heads": heads,
                "n_kv_heads": fields.get("num_key_value_heads", heads),
                "head_dim": fields.get("head_dim") or fields["hidden_size"] // heads,
                "mlp_size": fields["intermediate_size"],
                "vocab_size": fields["vocab_size"],
                "draft_vocab_size": fields.get("draft_vocab_size") or fields["vocab_size"],
                "norm_eps": fields.get("rms_norm_eps", 1e-5),
                "rope_theta": fields.get("rope_theta", 10_000.0),
                "taps": taps or default_taps(n_target_layers),
                "target": fields.get("emberline_target", ""),
            },
            Eagle3Config,
        )
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise BadCheckpoint(f"the EAGLE-3 head {folder} has a {CONFIG} that cannot be used: {error}") from None
