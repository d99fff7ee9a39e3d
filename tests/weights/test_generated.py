"""Random weights of a configuration: real shapes, no memory, the same for the same seed."""

import json
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from emberline.models.registry import load_model
from emberline.weights.generated import generate_checkpoint, generate_tensors
from emberline.weights.tensor_names import canonical, hf_name
from emberline.weights.tensor_shapes import check_tensors

LLAMA = dict(
    model_type="llama", hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=300, max_position_embeddings=512, rms_norm_eps=1e-5, rope_theta=1e4,
)  # fmt: skip
QWEN_MOE = LLAMA | dict(
    model_type="qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16,
    norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
)  # fmt: skip


@pytest.mark.parametrize("values", [LLAMA, QWEN_MOE])
def test_has_the_tensors_of_its_configuration(values):
    made = generate_checkpoint(values, 0)
    check_tensors(made.config, {name: made.weight(name) for name in made.names})


def test_the_same_seed_gives_the_same_weights_and_another_seed_others():
    one, same, other = (generate_checkpoint(LLAMA, seed) for seed in (5, 5, 6))
    name = "blk.1.ffn_down.weight"
    np.testing.assert_array_equal(one.weight(name).dense(), same.weight(name).dense())
    assert one.fingerprint == same.fingerprint != other.fingerprint
    assert (one.weight(name).dense() != other.weight(name).dense()).mean() > 0.9
    assert (one.weight(name).dense() != one.weight("blk.0.ffn_down.weight").dense()).mean() > 0.9


def test_numbers_have_the_deviation_that_keeps_activations_of_unit_size():
    made = generate_checkpoint(LLAMA | dict(hidden_size=1024, num_attention_heads=8), 1)
    weight = made.weight("blk.0.ffn_gate.weight").dense()
    assert weight.std() * 1024**0.5 == pytest.approx(1, abs=0.05)
    assert abs(np.corrcoef(weight[0], weight[1])[0, 1]) < 0.15
    assert (made.weight("blk.0.attn_norm.weight").dense() == 1).all()


def test_a_model_runs_on_them():
    model = load_model(generate_checkpoint(LLAMA, 0), "cpu")
    assert [group.layers for group in model.kv_groups] == [(0, 1)]


def test_a_model_larger_than_memory_takes_none():
    """70 billion parameters, in a process with 2 GB of address space beyond its imports."""
    program = f"""
import json, resource
from emberline.weights.generated import generate_checkpoint
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30),) * 2)
values = json.loads({
        json.dumps(
            json.dumps(
                LLAMA
                | dict(
                    hidden_size=8192,
                    intermediate_size=28672,
                    num_hidden_layers=80,
                    num_attention_heads=64,
                    num_key_value_heads=8,
                    vocab_size=128256,
                )
            )
        )
    })
made = generate_checkpoint(values, 0)
print(sum(2 * made.weight(name).shape[0] * (made.weight(name).shape + (1,))[1] for name in made.names))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1500:]
    assert int(done.stdout) > 130e9


INT4 = dict(
    quant_method="compressed-tensors", format="pack-quantized", ignore=["lm_head", "re:.*self_attn.*"],
    config_groups=dict(
        group_0=dict(
            targets=["Linear"], weights=dict(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
        )
    ),
)  # fmt: skip
FP8 = dict(quant_method="fp8", fmt="e4m3", weight_block_size=[128, 128], activation_scheme="dynamic")


@pytest.mark.parametrize(
    ("quantization", "kinds"),
    [
        (INT4, {"blk.0.attn_q.weight": "bf16", "blk.0.ffn_up_exps.3.weight": "int4", "output.weight": "bf16"}),
        (FP8, {"blk.0.attn_q.weight": "fp8", "blk.0.ffn_up_exps.3.weight": "fp8", "output.weight": "bf16"}),
        (dict(quant_method="mxfp4"), {"blk.0.attn_q.weight": "bf16", "blk.0.ffn_down_exps.1.weight": "mxfp4"}),
    ],
)
def test_matrices_are_quantized_as_the_configuration_says(quantization, kinds):
    made = generate_checkpoint(QWEN_MOE | dict(quantization_config=quantization), 0)
    for name, kind in kinds.items():
        assert made.weight(name).kind == kind, name
        numbers = made.weight(name).dense()
        assert numbers.std() * numbers.shape[1] ** 0.5 == pytest.approx(1, rel=0.4)
    assert made.weight("blk.0.ffn_gate_inp.weight").kind == "bf16", "routers are never quantized"


def test_quantized_weights_load_on_a_cpu():
    model = load_model(generate_checkpoint(QWEN_MOE | dict(quantization_config=INT4), 0), "cpu")
    assert model.backend == "torch"


def test_tokens_choose_as_many_experts_as_uniform_routing_would():
    """Through experts of 4 bits, whose codes would add a common direction to all tokens if they had a mean."""
    n_experts, top_k, layers, rows = 64, 8, 6, 12
    values = QWEN_MOE | dict(
        num_experts=n_experts, hidden_size=1024, moe_intermediate_size=256, num_hidden_layers=layers,
        num_attention_heads=8, head_dim=128, vocab_size=4000,
    )  # fmt: skip
    made = generate_checkpoint(values | dict(quantization_config=INT4), 0)
    x = made.weight("token_embd.weight").dense()[np.random.default_rng(0).choice(4000, rows, replace=False)]
    touched = []
    for layer in range(layers):
        normed = x / np.sqrt((x**2).mean(1, keepdims=True))
        chosen = np.argsort(-normed @ made.weight(f"blk.{layer}.ffn_gate_inp.weight").dense().T, 1)[:, :top_k]
        touched.append(len(np.unique(chosen)))
        for expert in np.unique(chosen):
            gate, up, down = (
                made.weight(f"blk.{layer}.ffn_{part}_exps.{expert}.weight").dense() for part in ("gate", "up", "down")
            )
            tokens = (chosen == expert).any(1)
            gated = normed[tokens] @ gate.T
            x[tokens] += (gated / (1 + np.exp(-gated)) * (normed[tokens] @ up.T)) @ down.T
    assert np.mean(touched[-3:]) > 0.93 * n_experts * (1 - (1 - top_k / n_experts) ** rows)


@pytest.mark.parametrize("values", [LLAMA, QWEN_MOE | dict(quantization_config=INT4)])
def test_tensors_have_the_names_of_published_checkpoints(values):
    config, tensors = generate_tensors(values, 0)
    names = [tensor.name for tensor in tensors]
    assert [canonical(hf_name(name, config), config) for name in names] == names


def test_a_router_s_correction_is_named_as_it_is_published():
    config, _ = generate_tensors(QWEN_MOE, 0)
    config = msgspec.structs.replace(config, architecture="deepseek_v3")
    published = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert hf_name("blk.1.exp_probs_b.bias", config) == published
    assert canonical(published, config) == "blk.1.exp_probs_b.bias"
