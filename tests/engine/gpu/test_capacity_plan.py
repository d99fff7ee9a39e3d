"""A capacity plan is made by the engine's own code on the meta device: sizes without memory."""

import json

import pytest
import torch

from emberline.engine import worker
from emberline.engine.gpu import engine
from emberline.engine.gpu.capacity_plan import plan_capacity
from emberline.engine.gpu.hardware import GIB, GPUS, parse_gpus
from emberline.engine.gpu.step_time import Step, step_seconds, tensor_bytes
from emberline.engine.scheduler.limits import Limits
from emberline.models import registry
from emberline.models.registry import lay_out
from emberline.protocol.errors import BadInput
from emberline.weights.generated import generate_checkpoint

LLAMA_8B = dict(
    model_type="llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=5e5,
)  # fmt: skip
LIMITS = Limits(131072, 128256, (0,), 256, 8192)


@pytest.fixture(scope="module")
def llama():
    return lay_out(generate_checkpoint(LLAMA_8B, 0))


def test_counts_the_weights_exactly_and_gives_the_rest_to_kv(llama):
    plan = plan_capacity(llama, GPUS["H200"], LIMITS)
    matrices = 2 * 128256 * 4096 + 32 * (6144 * 4096 + 4096 * 4096 + 3 * 14336 * 4096)
    assert plan.weights_bytes == 2 * matrices + 32 * 2 * 4096 * 4  # norms are float32
    parts = (plan.weights_bytes, plan.workspace_bytes, plan.state_bytes, plan.reserve_bytes, plan.context_bytes)
    block = 131072 * 16
    assert 0 <= plan.memory_bytes - sum(parts) - plan.kv_bytes < 2 * block
    assert plan.kv_bytes_per_token == 131072
    assert plan.kv_tokens == plan.kv_bytes // 131072 - 16  # but the null block


def test_nothing_is_allocated(llama):
    assert all(matrix.weight.device.type == "meta" for matrix in llama.matrices)
    assert tensor_bytes(llama.layers) > 13e9


def test_the_roofline_is_near_what_was_measured_on_an_h200(llama):
    gpu = GPUS["H200"]
    for rows, measured_ms in ((1, 4.0), (64, 5.9)):  # at 576 tokens
        assert 1e3 * step_seconds(llama, gpu, Step(rows, 1, 576)) == pytest.approx(measured_ms, rel=0.12)
    assert step_seconds(llama, gpu, Step(1, 8192)) == pytest.approx(0.221, rel=0.12)


def test_fp8_is_multiplied_at_its_own_rate(llama):
    fp8 = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
    quantized, gpu, step = lay_out(generate_checkpoint(LLAMA_8B | fp8, 0)), GPUS["H200"], Step(1, 8192)
    assert 0.5 < step_seconds(quantized, gpu, step) / step_seconds(llama, gpu, step) < 0.75


def test_a_model_that_does_not_fit_is_refused_with_what_is_missing(llama):
    _, small = parse_gpus("1xH100")
    with pytest.raises(BadInput, match=r"weights take 15\.0.* fewer than asked; give a smaller --kv-bytes"):
        plan_capacity(llama, small, LIMITS, kv_bytes=70 * GIB)


def test_gpus_are_named_or_come_from_a_file(tmp_path):
    assert parse_gpus("8xh100") == (8, GPUS["H100"])
    assert parse_gpus("H200")[0] == 1
    table = tmp_path / "gpus.toml"
    table.write_text('[[gpu]]\nname = "X1"\nmemory_gib = 10\nbandwidth_tb_s = 1\nbf16_tflops = 100\nfp8_tflops = 200\n')
    assert parse_gpus("2xX1", table)[1].memory == 10 * GIB
    for wrong in ("0xH200", "8xH99", "many"):
        with pytest.raises(BadInput):
            parse_gpus(wrong)
    table.write_text('[[gpu]]\nname = "X1"\n')
    with pytest.raises(BadInput, match="memory_gib"):
        parse_gpus("X1", table)


def test_a_start_that_runs_out_of_memory_says_what_is_missing(tmp_path, monkeypatch):
    def begin_loading(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    monkeypatch.setattr(registry, "begin_loading", begin_loading)
    monkeypatch.setattr(registry, "select_device", lambda asked: "cuda")
    monkeypatch.setattr(engine, "load_attention", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * GIB, 16 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 13 * GIB)
    args = worker._parse(["--model", str(tmp_path), "--socket", "unix:x", "--random-weights", "0"])
    with pytest.raises(BadInput, match=r"15\.0 GiB of the device are available; weights take 15\.0.* too many"):
        worker.build(args)
