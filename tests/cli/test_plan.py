"""`emberline plan`: a plan, or one line that says why there is none."""

import json
from typing import Any

import pytest

from emberline.cli.main import main

MODEL: dict[str, Any] = dict(
    model_type="qwen3_moe", hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    intermediate_size=512, moe_intermediate_size=128, num_hidden_layers=2, vocab_size=1000,
    max_position_embeddings=4096, num_experts=8, num_experts_per_tok=2,
)  # fmt: skip
INT4 = dict(num_bits=4, type="int", symmetric=True, group_size=32, strategy="group")


def compressed(**changes: Any) -> dict[str, Any]:
    config = dict(quant_method="compressed-tensors", config_groups={"g": dict(targets=["Linear"], weights=INT4)})
    return {"quantization_config": config | changes}


@pytest.fixture
def plan(tmp_path, capsys):
    pytest.importorskip("triton")

    def run(*flags, **changes):
        (tmp_path / "config.json").write_text(json.dumps(MODEL | changes))
        code = main(["plan", str(tmp_path), "--json", *flags])
        said = capsys.readouterr()
        return json.loads(said.out) if code == 0 else said.err

    return run


def test_a_folder_with_a_configuration_alone_is_planned(plan):
    whole, packed = plan(), plan(**compressed(ignore=None), text_config=None)
    assert 0 < packed["weights_bytes"] < 0.6 * whole["weights_bytes"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_experts=640), "640 experts and 0 shared: at most 512"),
        (dict(num_key_value_heads=3), "4 query heads cannot share 3 KV heads"),
        (compressed(ignore=["re:("]), "'re:\\(' is not a regular expression"),
        (compressed(ignore="lm_head"), "'ignore' is 'lm_head', not a list"),
        (dict(quantization_config={"quant_method": "awq"}), "'awq' is not supported; supported are compressed-tensors"),
        (dict(model_type="bert"), "one that embeds or classifies has no KV cache"),
    ],
)
def test_a_model_that_cannot_be_served_is_one_line(plan, changes, message):
    said = plan(**changes)
    assert said.count("\n") == 1
    assert message.replace("\\", "") in said


def test_a_share_of_the_gpu_can_be_planned(plan):
    whole, half = plan(), plan("--gpu-memory-share", "0.5")
    assert half["memory_bytes"] == whole["memory_bytes"] // 2
    assert 0.45 < half["kv_bytes"] / whole["kv_bytes"] < 0.5
    assert "give its --gpu-memory-share alone" in plan("--gpu-memory-share", "0.5,0.5")


def test_a_decode_context_has_a_token_at_least(plan):
    assert plan("--context", "0") == "emberline: --context is at least 1\n"
