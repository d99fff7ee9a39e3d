"""The comparison of large models: the same weights in both engines, and the experts that their steps touch."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from benchmarks.gpu import counting_worker, large_models, large_shapes, quick
from emberline.kernels.gpu.moe_routing import make_permutation, permutation_ints
from emberline.weights.generated import generate_checkpoint
from emberline.weights.tensor_names import canonical

MOE_INT4 = dict(
    model_type="qwen3_moe", hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=300, max_position_embeddings=512, rms_norm_eps=1e-5, rope_theta=1e4,
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16, norm_topk_prob=True,
    decoder_sparse_step=1, mlp_only_layers=[],
    quantization_config=large_shapes.INT4_GROUP_32 | dict(ignore=["lm_head", "re:.*self_attn.*"]),
)  # fmt: skip


def test_experts_that_uniform_routing_touches():
    assert [round(large_models.uniform(large_models.KIMI_9, n)) for n in (1, 8, 32, 64)] == [8, 60, 188, 284]
    assert large_models.uniform(large_models.LLAMA_8B, 64) == 0


def test_the_table_tells_the_experts_of_both_engines():
    runs = {"emberline": [{"b8": [110.0], "touched_b8": 59.4}], "vllm": [{"b8": [100.0], "touched_b8": 60.1}]}
    line = large_models.table({"kimi": runs}).splitlines()[1]
    assert "1.100" in line
    assert line.endswith("59 and 60, uniform 60")


def test_the_table_tells_what_each_figure_must_be():
    own = {
        "b5": [10.0, 12.0, 11.0],
        "b256": [112.0],
        "8192": [0.2],
        "throughput": [10.0],
        "load": [2.5],
        "mixed": [25.0],
    }
    runs = {"emberline": [own, {"b256": [114.0]}], "vllm": [{"b256": [100.0], "8192": [0.22], "throughput": [10.5]}]}
    figures = {"bf16": runs, "fp8": {"emberline": [{"b1": [16.0]}], "vllm": []}}
    runs["emberline"][0]["b1"] = [10.0]
    lines = large_models.table(figures).splitlines()[1:]
    by_title = {line.partition("  ")[0]: line for line in lines}
    assert "11 (10–12)" in by_title["bf16, decode, batch 5, tok/s"]
    assert by_title["bf16, decode, batch 256, tok/s"].split()[-3:] == ["1.130", "1.12", "ok"]
    assert by_title["bf16, prefill 8,192, s"].split()[-3:] == ["1.100", "1.0", "ok"]
    assert by_title["bf16, 512 × 1,024/256, s"].split()[-3:] == ["1.050", "1.06", "short"]
    assert by_title["bf16, start beyond reading the weights, s"].split()[-3:] == ["≤", "3", "ok"]
    assert by_title["bf16, prompts of 8,192 every 0.5 s: ITL p99, ms"].endswith("short")
    assert by_title["FP8 against our BF16, batch 1"].split()[-3:] == ["1.600", "1.5", "ok"]


def test_workloads_have_titles_and_rows():
    names = {name for _, workloads in large_models.MODELS.values() for name in workloads}
    assert {f"b{n}" for n in (5, 33, 100, 200)} <= names
    assert all(large_models._title("m", name) for name in names)
    assert [large_models.decode_rows(name) for name in ("b33", "top_p_b64", "grammar_b16", "8192", "mixed")] == [
        33, 64, 16, 0, 0,
    ]  # fmt: skip
    assert not large_models.Deadline(None).passed
    assert large_models.Deadline(0).passed


def test_only_runs_batches_and_lengths_that_a_list_lacks():
    listed = large_models.MODELS["kimi"][1]
    assert large_models.chosen(listed, None) == listed
    assert large_models.chosen(listed, ["b16", "b64", "16384", "agentic"]) == ("b16", "b64", "16384")
    runs = {"emberline": [{"b16": [12.0], "16384": [0.4]}], "vllm": [{"b16": [10.0], "16384": [0.5]}]}
    by_title = {line.partition("  ")[0]: line for line in large_models.table({"kimi": runs}).splitlines()[1:]}
    assert "1.200" in by_title["kimi, decode, batch 16, tok/s"]
    assert "1.250" in by_title["kimi, prefill 16,384, s"]


def test_the_quick_table_has_the_ratio_of_every_workload():
    alone = {"emberline": [{"b1": [246.0], "8192": [0.2]}], "vllm": [{"b1": [200.0], "8192": [0.21]}]}
    http = {"emberline": {"streams_64": {"tok_s": 110.0}}, "vllm": {"streams_64": {"tok_s": 100.0}}}
    figures = {"offline": alone, "http": http, "failed": {"vllm over HTTP": "no time"}}
    by_title = {line.partition("  ")[0]: line.split() for line in quick.table(figures).splitlines()}
    assert by_title["decode, batch 1, tok/s"][-3:] == ["1.230", "1.23", "ok"]
    assert by_title["prefill 8,192, s"][-3:] == ["1.050", "1.04", "ok"]
    assert by_title["HTTP, 64 streams, tok/s"][-3:] == ["1.100", "1.15", "short"]
    assert by_title["agentic 32 × 8, s"][-2] == "–"
    assert "vllm over HTTP: no time" in by_title


def _permutation(tokens):
    memory = torch.zeros(permutation_ints(tokens, 2, 8), dtype=torch.int32)
    return make_permutation(memory, tokens, 2, 8, 16)


def test_a_worker_counts_the_experts_of_each_layer(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    chosen = counting_worker.ChosenExperts()
    chosen.make_permutation(torch.zeros(permutation_ints(2, 2, 8), dtype=torch.int32), 2, 2, 8, 16)
    layers = [chosen.keep(_permutation(2)) for _ in range(3)]
    other = chosen.keep(_permutation(3))
    assert chosen.touched() == {}, "before a step"
    layers[0].ids.copy_(torch.tensor([[0, 1], [1, 2]]))
    layers[1].ids.copy_(torch.tensor([[0, 1], [2, 3]]))
    layers[2].ids.copy_(torch.tensor([[0, 1], [-1, -1]]))  # too much padding
    other.ids[0] = 5
    assert chosen.touched() == {2: 3.5}


@pytest.fixture
def peer(monkeypatch):
    """`vllm_generated` with a stand-in for vLLM, whose device is the CPU."""
    classes = {"dummy_loader": "DummyModelLoader", "base_router": "BaseRouter"}
    for path in (
        "vllm.model_executor.layers.fused_moe.router.base_router",
        "vllm.model_executor.model_loader.dummy_loader",
    ):
        parts = path.split(".")
        for i in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(parts[i - 1]))
        name = classes[parts[-1]]
        setattr(sys.modules[path], name, type(name, (), {"_select_experts": lambda self, ids: (None, ids)}))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "benchmarks.peers.vllm_generated", raising=False)
    yield importlib.import_module("benchmarks.peers.vllm_generated")
    sys.modules.pop("benchmarks.peers.vllm_generated", None)


def test_the_peer_computes_with_the_same_weights(peer):
    made, found = generate_checkpoint(MOE_INT4, peer.SEED), dict(peer.tensors(MOE_INT4))
    assert all(tensor.is_contiguous() for tensor in found.values())
    dense = {name: tensor for name, tensor in found.items() if name.endswith("proj.weight") or "norm" in name}
    assert len(dense) == 2 * 8 + 1
    for name, tensor in dense.items():
        torch.testing.assert_close(tensor.float(), torch.tensor(made.weight(canonical(name, made.config)).dense()))
    codes, scale = (found[f"model.layers.1.mlp.experts.3.down_proj.weight_{part}"] for part in ("packed", "scale"))
    assert codes.dtype == torch.int32
    assert codes.shape == (64, 32 // 8)
    values = torch.stack([(codes >> 4 * i & 15) - 8 for i in range(8)], -1).flatten(1) * scale.float()
    torch.testing.assert_close(values, torch.tensor(made.weight("blk.1.ffn_down_exps.3.weight").dense()))


def test_the_peer_keeps_the_experts_of_captured_steps(peer, monkeypatch):
    router, worker = (
        sys.modules["vllm.model_executor.layers.fused_moe.router.base_router"].BaseRouter(),
        SimpleNamespace(),
    )
    router.global_num_experts = 4
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    overwritten = torch.tensor([[0, 1], [2, 4]])
    layers = [torch.tensor([[0, 1], [1, 2]]), torch.tensor([[0, 1], [2, 3]]), overwritten]
    for ids in layers:
        router._select_experts(ids)
    assert peer.CountsExperts.count_experts(worker, 2) == 3.5
    assert peer.CountsExperts.count_experts(worker, 64) == 0
    peer.CountsExperts.forget_experts(worker)
    assert peer.CountsExperts.count_experts(worker, 2) == 0
