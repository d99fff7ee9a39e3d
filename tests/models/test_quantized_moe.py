"""Quantized checkpoints as Kimi K2.5, DeepSeek-V3 and GPT-OSS publish them, against transformers with the numbers that
their codes stand for."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from emberline.kernels.reference import TorchBackend
from emberline.models.decoder import Decoder
from emberline.models.registry import ARCHITECTURES
from emberline.weights.checkpoint import open_checkpoint
from emberline.weights.model_config import BadCheckpoint
from tests.lazy_modules import transformers
from tests.models.small_moe_models import save_small_model
from tests.models.step_inputs import all_logits
from tests.weights.quantized_folder import SCHEMES, quantize, quantize_mxfp4

IDS = torch.randint(3, 160, (70,), generator=torch.Generator().manual_seed(1)).tolist()
FILE = "model.safetensors"
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


class Quantizer:
    """Writes a small model twice: quantized, and with the numbers of the codes, which transformers reads."""

    def __init__(self, folder: Path, kind: str, **changes: object) -> None:
        self.plain, self.folder = folder / "plain", folder / "quantized"
        self.folder.mkdir(parents=True)
        save_small_model(self.plain, kind, **changes)
        self.config = json.loads((self.plain / "config.json").read_text())
        self.dense = load_file(self.plain / FILE)
        self.stored: dict[str, Tensor] = {}

    def quantize(self, pattern: str, scheme: str) -> None:
        """The matrices whose names match; all others are stored as they are."""
        for key, tensor in self.dense.items():
            if re.search(pattern, key) is None:
                self.stored[key] = tensor
                continue
            parts, self.dense[key] = quantize(scheme, tensor)
            self.stored |= {f"{key.removesuffix('weight')}{suffix}": part for suffix, part in parts.items()}

    def write(self, config: dict[str, Any], prefix: str = "") -> None:
        stored = {f"{prefix}{key}": tensor.contiguous() for key, tensor in self.stored.items()}
        save_file(stored, self.folder / FILE)
        (self.folder / "config.json").write_text(json.dumps(config))
        save_file({key: tensor.contiguous() for key, tensor in self.dense.items()}, self.plain / FILE, {"format": "pt"})

    def check(self) -> None:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            self.plain, dtype=torch.float32, attn_implementation="eager"
        )
        checkpoint = open_checkpoint(self.folder)
        ours = Decoder(checkpoint, TorchBackend(), ARCHITECTURES[checkpoint.config.architecture])
        with torch.no_grad():
            want = theirs.eval()(torch.tensor([IDS])).logits[0].float()
        assert ((all_logits(ours, IDS) - want).norm() / want.norm()).item() < 3e-5


def kimi(folder: Path) -> Quantizer:
    """Routed experts in INT4 groups of 32; the text model nested beside a vision tower."""
    made = Quantizer(folder, "deepseek_v3", n_group=1, topk_group=1, hidden_size=128, moe_intermediate_size=64)
    made.quantize(r"mlp\.experts\.\d+\.\w+_proj\.weight", "int4 g32")
    return made


def test_int4_experts_of_kimi(tmp_path: Path) -> None:
    made = kimi(tmp_path)
    inner = made.config | {"model_type": "kimi_k2", "quantization_config": SCHEMES["int4 g32"]}
    made.write({"model_type": "kimi_k25", "text_config": inner}, "language_model.")
    assert open_checkpoint(made.folder).weight("blk.1.ffn_gate_exps.3.weight").kind == "int4"
    made.check()


def test_fp8_blocks_of_deepseek(tmp_path: Path) -> None:
    """All matrices but the router, embedding and head; blocks that are not full, and rows that RoPE reorders."""
    made = Quantizer(tmp_path, "deepseek_v3", hidden_size=160, qk_nope_head_dim=128, qk_rope_head_dim=64)
    made.quantize(r"layers.*_proj(_with_mqa)?\.weight", "deepseek")
    made.write(made.config | {"quantization_config": SCHEMES["deepseek"]})
    assert open_checkpoint(made.folder).weight("blk.1.attn_q_b.weight").kind == "fp8"
    made.check()


def test_mxfp4_experts_of_gpt_oss(tmp_path: Path) -> None:
    made = Quantizer(tmp_path, "gpt_oss")
    for key, tensor in made.dense.items():
        if not key.endswith(("gate_up_proj", "down_proj")):
            made.stored[key] = tensor
            continue
        blocks, scales, numbers = quantize_mxfp4(tensor.transpose(1, 2))
        made.stored |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        made.dense[key] = numbers.transpose(1, 2)
    made.write(made.config | {"quantization_config": MXFP4})
    assert open_checkpoint(made.folder).weight("blk.1.ffn_up_exps.3.weight").kind == "mxfp4"
    made.check()


def test_missing_scale_of_an_expert_is_named(tmp_path: Path) -> None:
    made = kimi(tmp_path)
    del made.stored["model.layers.2.mlp.experts.5.up_proj.weight_scale"]
    made.write(made.config | {"quantization_config": SCHEMES["int4 g32"]})
    with pytest.raises(BadCheckpoint, match=r"blk\.2\.ffn_up_exps\.5\.weight.* has no scale"):
        open_checkpoint(made.folder)


def test_wrong_group_size_is_named(tmp_path: Path) -> None:
    made = kimi(tmp_path)
    made.write(made.config | {"quantization_config": SCHEMES["int4 g128"]})
    with pytest.raises(BadCheckpoint, match="group size of 128"):
        open_checkpoint(made.folder)
