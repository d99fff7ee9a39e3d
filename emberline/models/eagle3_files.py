"""Published EAGLE-3 and 3.1 heads: config.json and safetensors, as vLLM and SGLang read them.

`fc`, one or more layers, a norm and an LM head over a draft vocabulary, whose ids `d2t` maps to the target's. Some have
MLA (`Eagle3DeepseekV2ForCausalLM`), an embedding of their own, or EAGLE-3.1's norms. A tensor or a setting that is not
known is an error: a head that is half understood would draft badly, and nobody would see why.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from emberline.models.eagle3 import Eagle3Config, Eagle3Head, default_taps
from emberline.weights.hf_checkpoint import TensorFile, open_files
from emberline.weights.lossless_files import is_compressed
from emberline.weights.model_config import BadCheckpoint, Fields, rope_from_hf, yarn_scale
from emberline.weights.moe_config import latent_config
from emberline.weights.safetensors_file import SafetensorsFile, write_safetensors

WEIGHTS, CONFIG = "model.safetensors", "config.json"
LLAMA = frozenset({"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"})
DEEPSEEK = frozenset({"Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"})
SHIPPED = Path(__file__).parent / "draft_heads"

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I32": torch.int32, "I64": torch.int64}
_TOP = {"fc.weight": "fc.weight", "norm": "norm.weight", "lm_head.weight": "lm_head.weight", "d2t": "d2t"}
_TOP |= {"embedding": "embed_tokens.weight"}
_LAYER = {
    "q_proj.weight": "self_attn.q_proj.weight",
    "k_proj.weight": "self_attn.k_proj.weight",
    "v_proj.weight": "self_attn.v_proj.weight",
    "o_proj.weight": "self_attn.o_proj.weight",
    "q_a_proj.weight": "self_attn.q_a_proj.weight",
    "q_a_norm": "self_attn.q_a_layernorm.weight",
    "q_b_proj.weight": "self_attn.q_b_proj.weight",
    "kv_a_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "kv_a_norm": "self_attn.kv_a_layernorm.weight",
    "kv_b_proj.weight": "self_attn.kv_b_proj.weight",
    "gate_proj.weight": "mlp.gate_proj.weight",
    "up_proj.weight": "mlp.up_proj.weight",
    "down_proj.weight": "mlp.down_proj.weight",
    "input_norm": "input_layernorm.weight",
    "hidden_norm": "hidden_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
}
_ONLY_LAYER = "midlayer."  # of a head with one layer; "layers.0." as some publish it
_NOT_READ = frozenset({"t2d"})  # the inverse of d2t
# Settings that change what a head computes, with the value that each must have.
_FIXED: dict[str, object] = {
    "attention_bias": False,
    "mlp_bias": False,
    "norm_before_residual": False,
    "hidden_act": "silu",
    "logit_scale": 1.0,
    "quantization_config": None,
    "parallel_drafting": False,
}


def shipped_head(fingerprint: str) -> Path | None:
    """The head that comes with this package for the model. Returns None if there is none."""
    folder = SHIPPED / fingerprint[:16]
    return folder if (folder / CONFIG).is_file() else None


def save_head(head: Eagle3Head, folder: Path) -> None:
    """Write a head in bfloat16, with the names of published ones."""
    config = head.config
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        stored: own.to(torch.bfloat16).cpu() if own.is_floating_point() else own.cpu()
        for own, stored in ((head.state_dict()[name], stored) for name, stored in stored_names(head))
    }
    assert config.rope_divisors is None, "its rope_scaling would be lost"
    for name, kind, dim in _rotated(config):
        if name in tensors and config.rope_interleaved:
            tensors[name] = _reordered(tensors[name], kind, dim, inverse=True)
    t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
    t2d[head.target_ids.cpu()] = True
    names = {dtype: name for name, dtype in _DTYPES.items()} | {torch.bool: "BOOL"}
    stored = {
        name: (names[each.dtype], tuple(each.shape), each.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        for name, each in (tensors | {"t2d": t2d}).items()
    }
    write_safetensors(folder / WEIGHTS, stored)
    mla = config.latent
    fields: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if mla is None else "Eagle3DeepseekV2ForCausalLM"],
        "model_type": "llama" if mla is None else "kimi_k2",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.n_layers,
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
    if mla is not None:
        fields |= {"q_lora_rank": mla.q_lora, "kv_lora_rank": mla.kv_lora, "v_head_dim": mla.v_dim}
        fields |= {"qk_nope_head_dim": mla.nope, "qk_rope_head_dim": mla.rope}
        fields["rope_interleave"] = config.rope_interleaved
    for name in ("target_hidden_size", "fc_norm", "norm_output"):
        if getattr(config, name):
            fields[name] = getattr(config, name)
    (folder / CONFIG).write_text(json.dumps(fields, indent=2) + "\n")


def load_head(folder: Path, n_target_layers: int) -> Eagle3Head:
    """Read a published head, or one of `save_head`. Raises BadCheckpoint if it is none, or not known entirely."""
    config = read_config(folder, n_target_layers)
    head, files = Eagle3Head(config), _open(folder)
    own, left = head.state_dict(), set(files) - _NOT_READ
    rotated = {name: (kind, dim) for name, kind, dim in _rotated(config)}
    for name, stored in stored_names(head):
        found = stored if stored in files else stored.replace(_ONLY_LAYER, "layers.0.")
        if name == "d2t" and found not in files:
            tensor = _identity(config)
        else:
            tensor = _read(files, folder, found, stored, tuple(own[name].shape))
        if stored in rotated and config.rope_interleaved:
            tensor = _reordered(tensor, *rotated[stored])
        own[name].copy_(tensor)
        left.discard(found)
    left -= {f"layers.{n}.hidden_norm.weight" for n in range(1, config.n_layers)}  # no layer but the first has a use
    left = {name for name in left if not name.endswith(".rotary_emb.inv_freq")}
    if left:
        names = ", ".join(sorted(left)[:4])
        raise BadCheckpoint(f"the EAGLE-3 head {folder} has {len(left)} tensors that are not known: {names[:200]}")
    ids = head.target_ids
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        raise BadCheckpoint(f"the EAGLE-3 head {folder} drafts token ids outside the vocabulary")
    if not all(bool(torch.isfinite(tensor).all()) for tensor in own.values()):
        raise BadCheckpoint(f"the EAGLE-3 head {folder} has weights that are no numbers")
    return head


def stored_names(head: Eagle3Head) -> Iterator[tuple[str, str]]:
    """Names of a head's tensors: in its state, and in files."""
    for name in head.state_dict():
        place, _, rest = name.removeprefix("layers.").partition(".")
        if name in _TOP:
            yield name, _TOP[name]
        elif name.startswith("fc_norm."):
            yield name, f"{name}.weight"
        else:
            prefix = _ONLY_LAYER if head.config.n_layers == 1 else f"layers.{place}."
            yield name, prefix + _LAYER[rest]


def read_config(folder: Path, n_target_layers: int) -> Eagle3Config:
    """Read a head's config.json. Raises BadCheckpoint if the head cannot run here."""
    try:
        document = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"the EAGLE-3 head {folder} has no readable {CONFIG}: {error}") from None
    architectures = document.get("architectures") if isinstance(document, dict) else None
    if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in LLAMA | DEEPSEEK:
        known = ", ".join(sorted(LLAMA | DEEPSEEK))
        raise BadCheckpoint(f"{folder} is no EAGLE-3 head that runs here: its architectures are none of {known}")
    try:
        return _config(Fields(document, f"{CONFIG} of the EAGLE-3 head"), architectures[0] in DEEPSEEK, folder,
                       n_target_layers)  # fmt: skip
    except (TypeError, ValueError, msgspec.ValidationError) as error:
        raise BadCheckpoint(f"the EAGLE-3 head {folder} has a {CONFIG} that cannot be used: {error}") from None


def _config(fields: Fields, latent: bool, folder: Path, n_target_layers: int) -> Eagle3Config:
    for key, value in _FIXED.items():
        if fields.has(key) and fields.get(key) != value:
            raise fields.wrong(key, f"{value!r}, the only value that is supported")
    eagle = Fields(_object(fields, "eagle_config"), "eagle_config")
    if not eagle.flag("use_aux_hidden_state", True):
        raise eagle.wrong("use_aux_hidden_state", "true: heads without taps are not supported")
    taps = eagle.whole_numbers("eagle_aux_hidden_state_layer_ids") or default_taps(n_target_layers)
    n_taps = fields.whole("num_aux_hidden_states", len(taps))
    if n_taps != len(taps):
        raise fields.wrong("num_aux_hidden_states", f"the number of taps, {len(taps)}")
    hidden, n_heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    mla = latent_config(fields) if latent else None
    head_dim = mla.nope + mla.rope if mla is not None else fields.whole("head_dim", max(1, hidden // n_heads))
    rope = Fields(_object(fields, "rope_parameters") or _object(fields, "rope_scaling"), "the rope parameters")
    theta, dim = rope.positive("rope_theta", fields.get("rope_theta", 10_000.0)), head_dim if mla is None else mla.rope
    if mla is not None and rope.has("factor"):  # DeepSeek's is YaRN, whatever it is called
        rope = Fields(dict(rope.values) | {"rope_type": "yarn"}, rope.where)
    context_len = fields.whole("max_position_embeddings", 8192)
    divisors, rope_scale = rope_from_hf(rope, theta, dim, context_len)
    logits = 1.0
    if mla is not None and rope.has("mscale_all_dim"):
        logits = yarn_scale(rope.positive("factor"), rope.positive("mscale_all_dim")) ** 2
    vocab = fields.whole("vocab_size")
    return Eagle3Config(
        hidden_size=hidden,
        n_heads=n_heads,
        n_kv_heads=n_heads if mla is not None else fields.whole("num_key_value_heads", n_heads),
        head_dim=head_dim,
        mlp_size=fields.whole("intermediate_size"),
        vocab_size=vocab,
        draft_vocab_size=fields.whole("draft_vocab_size", vocab),
        norm_eps=fields.positive("rms_norm_eps", 1e-5),
        rope_theta=theta,
        taps=taps,
        target=fields.text("emberline_target", ""),
        target_hidden_size=fields.whole("target_hidden_size", 0, least=0),
        n_layers=fields.whole("num_hidden_layers", 1, most=16),
        latent=mla,
        yarn_factor=logits,
        rope_divisors=divisors,
        rope_scale=rope_scale,
        rope_interleaved=mla is not None and fields.flag("rope_interleave", True),
        own_embedding=any(folder.glob("*.safetensors")) and "embed_tokens.weight" in _open(folder),
        fc_norm=fields.flag("fc_norm", False),
        norm_output=fields.flag("norm_output", False),
    )


def _object(fields: Fields, key: str) -> dict[str, object]:
    found = fields.get(key, {})
    if not isinstance(found, dict):
        raise fields.wrong(key, "an object")
    return found


# --- tensors ----------------------------------------------------------------------------------------------------------

_Files = dict[str, tuple[TensorFile, str]]  # the file, and the tensor's name in it


def _open(folder: Path) -> _Files:
    """The tensors of all safetensors files of the folder, by name without the prefix that some publish."""
    found: _Files = {}
    try:
        paths = sorted(folder.glob("*.safetensors"))
        files = open_files(folder)[0] if is_compressed(folder) else [SafetensorsFile.open(path) for path in paths]
        for file in files:
            found |= {name.removeprefix("model."): (file, name) for name in file.tensors}
    except OSError as error:
        raise BadCheckpoint(f"the EAGLE-3 head {folder} cannot be read: {error}") from None
    if not found:
        raise BadCheckpoint(f"the EAGLE-3 head {folder} has no safetensors files")
    return found


def _read(files: _Files, folder: Path, name: str, published: str, shape: tuple[int, ...]) -> Tensor:
    if name not in files:
        raise BadCheckpoint(f"the EAGLE-3 head {folder} lacks the tensor {published}")
    file, stored_name = files[name]
    entry = file.tensors[stored_name]
    if entry.shape != shape:
        raise BadCheckpoint(f"the head's tensor {name} is {list(entry.shape)}; expected {list(shape)}")
    if entry.dtype not in _DTYPES:
        raise BadCheckpoint(f"the head's tensor {name} is of {entry.dtype}, which is not one of {', '.join(_DTYPES)}")
    numbers = np.asarray(file.rows_of(stored_name)[0])
    return torch.frombuffer(bytearray(numbers.tobytes()), dtype=_DTYPES[entry.dtype]).view(shape)


def _identity(config: Eagle3Config) -> Tensor:
    if config.draft_vocab_size != config.vocab_size:
        raise BadCheckpoint("the EAGLE-3 head has a draft vocabulary but no d2t, which says what its ids mean")
    return torch.zeros(config.draft_vocab_size, dtype=torch.int64)


def _rotated(config: Eagle3Config) -> Iterator[tuple[str, int, int]]:
    """Stored names of MLA's matrices whose rows RoPE rotates: the rows of a head, and how many of its last rotate."""
    if config.latent is None:
        return
    mla = config.latent
    for n in range(config.n_layers):
        prefix = _ONLY_LAYER if config.n_layers == 1 else f"layers.{n}."
        for name in ("q_proj", "q_b_proj"):
            yield prefix + _LAYER[f"{name}.weight"], mla.nope + mla.rope, mla.rope
        yield prefix + _LAYER["kv_a_proj.weight"], mla.kv_lora + mla.rope, mla.rope


def _reordered(tensor: Tensor, rows: int, dim: int, inverse: bool = False) -> Tensor:
    """Rows in the order that pairs i with i + dim / 2, from one that pairs 2i with 2i + 1; or back."""
    order = torch.arange(rows)
    order[rows - dim :] = rows - dim + torch.arange(dim).view(-1, 2).T.flatten()
    order = order.argsort() if inverse else order
    return tensor.view(-1, rows, tensor.shape[1])[:, order].flatten(0, 1)
