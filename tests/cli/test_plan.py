"""`emberline plan`: a plan, or one line that says why there is none."""

import json
from typing import Any

import pytest

from emberline.cli.main import main
from tests.cli.console import emberline_process, without_module

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
    def run(*flags, **changes):
        (tmp_path / "config.json").write_text(json.dumps(MODEL | changes))
        code = main(["plan", str(tmp_path), "--json", *flags])
        said = capsys.readouterr()
        return json.loads(said.out) if code == 0 else said.err

    return run


def test_a_folder_with_a_configuration_alone_is_planned(plan):
    whole, packed = (each["recommended"] for each in (plan(), plan(**compressed(ignore=None), text_config=None)))
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
    whole, half = (each["recommended"] for each in (plan(), plan("--gpu-memory-share", "0.5")))
    assert half["memory_bytes"] == whole["memory_bytes"] // 2
    assert 0.45 < half["kv_bytes"] / whole["kv_bytes"] < 0.5
    assert "give its --gpu-memory-share alone" in plan("--gpu-memory-share", "0.5,0.5")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--context 0", "--context is at least 1"),
        ("--concurrency 0", "--concurrency is at least 1"),
        ("--drive 0", "--drive is a rate above 0"),
        ("--gpus 8xH99", "known are A100-40"),
        ("--gpus 4xH100 --layout tp=3", "tp3 takes 3 GPUs, which do not divide 4: give layouts of 2 or 4 GPUs"),
        ("--gpus 3xH100 --layout tp=3", "--tp 3 does not divide the model's 4 attention heads: use 2 or 4"),
        ("--gpus 4xH100 --layout pp=4", "--pp 4 asks for more stages than the model's 2 layers: use at most 2"),
        ("--layout tp8", "give tp=N, pp=N, dcp=N and ep, each once"),
        ("--layout tp=2,tp=2", "each once"),
        ("--prefill-decode 1", "give two numbers of replicas, as in 1:3"),
        ("--gpus 4xH100 --prefill-decode 1:2", "4 GPUs cannot be divided among 3 replicas"),
    ],
)
def test_what_cannot_be_planned_is_one_line(plan, flags, message):
    said = plan(*flags.split())
    assert said.count("\n") == 1
    assert message in said


def test_layouts_are_compared_and_one_is_recommended(plan):
    found = plan("--gpus", "2xH100", "--concurrency", "4")
    assert {each["layout"]["tp"] for each in (found["recommended"], *found["others"])} == {1, 2}
    assert found["recommended"]["tokens_s"] >= max(each["tokens_s"] for each in found["others"])
    asked = plan("--gpus", "2xH100", "--layout", "tp=2,ep")
    assert asked["recommended"]["layout"] == {"tp": 2, "pp": 1, "ep": True, "dcp": 1}
    assert asked["others"] == []


@pytest.mark.parametrize(
    "flags",
    [
        ["@cf/moonshotai/kimi-k2.5", "--gpus", "8xH100"],
        ["llama-3.1-8b", "--gpus", "4xA100", "--prefill-decode", "1:3", "--input-tokens", "100000"],
        ["gpt-oss-20b"],
    ],
)
def test_a_plan_is_eighty_columns_wide(capsys, flags):
    assert main(["plan", *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any("tokens/s" in line for line in lines)


def test_what_drafts_is_counted(plan, tmp_path):
    small = dict(
        model_type="llama", hidden_size=128, num_attention_heads=2, num_key_value_heads=2, intermediate_size=256
    )
    small |= dict(num_hidden_layers=3, vocab_size=1000, max_position_embeddings=4096)
    head = small | dict(hidden_size=256, num_hidden_layers=1, architectures=["LlamaForCausalLMEagle3"])
    deep = dict(num_hidden_layers=4)
    for name, config in (("small", small), ("head", head)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config | {"draft_vocab_size": 500}))
    draft_model, draft_head = ("--draft-model", str(tmp_path / "small")), ("--draft-head", str(tmp_path / "head"))
    alone, model, eagle3 = (plan(*flags, **deep)["recommended"] for flags in ((), draft_model, draft_head))
    (stage,), (other,) = model["stages"], eagle3["stages"]
    matrices = 2 * 1000 * 128 + 3 * (4 * 128 * 128 + 3 * 256 * 128)
    assert stage["draft_weights_bytes"] == 2 * matrices + 3 * 2 * 128 * 4
    assert model["weights_bytes"] == alone["weights_bytes"] + stage["draft_weights_bytes"]
    layer = 3 * 256 * 256 + 512 * 3 * 256 + 256 * 256 + 3 * 256 * 256  # taps, attention and MLP of the head
    assert other["draft_weights_bytes"] == 2 * (layer + 500 * 256) + 2 * 256 * 4
    for found, per_token in ((model, 3 * 2 * 128 * 2), (eagle3, 2 * 256 * 2)):
        (drafting,) = found["stages"]
        assert drafting["draft_kv_bytes"] / drafting["kv_bytes"] == pytest.approx(
            per_token / (2048 + per_token), rel=0.01
        )
        assert found["kv_tokens"] < alone["kv_tokens"]
        assert drafting["workspace_bytes"] + drafting["state_bytes"] > sum(
            alone["stages"][0][name] for name in ("workspace_bytes", "state_bytes")
        )
    assert "give one of them" in plan(*draft_model, *draft_head)
    assert "do not pass between GPUs' stages" in plan(*draft_model, "--gpus", "2xH200", "--layout", "pp=2")
    divided = plan(*draft_head, "--gpus", "2xH200", "--layout", "tp=2", **deep)["recommended"]["stages"][0]
    own, fc = 500 * 256 // 2 + 512 * 2 * 256 // 2 + 3 * 256 * 256 // 2, 3 * 256 * 256
    assert own + fc < divided["draft_weights_bytes"] / 2 < 0.75 * other["draft_weights_bytes"] / 2
    (tmp_path / "head" / "config.json").write_text(json.dumps(head | {"hidden_size": 512}))
    assert "the EAGLE-3 head is for a model with a hidden size of 512; this model's is 256" in plan(*draft_head, **deep)
    (tmp_path / "small" / "config.json").write_text(json.dumps(small | {"num_key_value_heads": 3}))
    said = plan(*draft_model, **deep)
    assert f"--draft-model {tmp_path / 'small'} cannot draft for {tmp_path}: " in said, "not the model's own fault"
    assert "2 query heads cannot share 3 KV heads" in said


@pytest.mark.slow  # a process that imports torch; daily: tests/kernels/gpu/test_triton_placeholder.py
@pytest.mark.parametrize("is_installed", [False, True])
def test_a_machine_without_triton_gets_the_same_plan(plan, tmp_path, is_installed):
    """Also where it is installed and cannot be imported."""
    expected = plan()
    hidden = without_module("triton", tmp_path / "site")
    if is_installed:
        (tmp_path / "site" / "sitecustomize.py").unlink()
        (tmp_path / "site" / "triton.py").write_text(
            "raise ImportError('libtriton.so: cannot open shared object file')"
        )
    done = emberline_process("plan", str(tmp_path), "--json", home=tmp_path, **hidden)
    assert json.loads(done.stdout) == expected, done.stderr
