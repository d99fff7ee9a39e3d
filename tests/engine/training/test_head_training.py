"""From prompts to a head that a worker uses, on a tiny model; heads that do not fit."""

import json

import pytest
import torch

from emberline.engine.training import head_training
from emberline.engine.worker import main as worker
from emberline.models import eagle3_files
from emberline.models.eagle3_files import load_head
from emberline.protocol.errors import BadInput
from emberline.weights.model_config import BadCheckpoint
from emberline.weights.safetensors_file import write_safetensors
from tests.engine.fakes import request
from tests.engine.runners.cpu.test_torch_runner import run, tokens

VOCAB, HIDDEN, LAYERS = 64, 32, 4
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": 0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def write_model(folder, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for n in range(LAYERS):
        layer = f"model.layers.{n}."
        shapes |= {
            f"{layer}input_layernorm.weight": (HIDDEN,),
            f"{layer}post_attention_layernorm.weight": (HIDDEN,),
            f"{layer}self_attn.q_proj.weight": (32, HIDDEN),
            f"{layer}self_attn.k_proj.weight": (16, HIDDEN),
            f"{layer}self_attn.v_proj.weight": (16, HIDDEN),
            f"{layer}self_attn.o_proj.weight": (HIDDEN, 32),
            f"{layer}mlp.gate_proj.weight": (48, HIDDEN),
            f"{layer}mlp.up_proj.weight": (48, HIDDEN),
            f"{layer}mlp.down_proj.weight": (HIDDEN, 48),
        }
    tensors = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator) * 0.3 if len(shape) > 1 else torch.ones(shape)
        tensors[name] = ("F32", shape, values.numpy().tobytes())
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model, its head, and the curve of its training."""
    folder = tmp_path_factory.mktemp("heads")
    model = write_model(folder / "model")
    for name, first in (("prompts", 1), ("held_out", 40)):
        lines = (" ".join(str((first + n * i) % VOCAB) for i in range(1, 6)) for n in range(12))
        (folder / name).write_text("\n".join(lines))
    options = {"steps": 30, "batch": 8, "depth": 2, "warmup": 5, "report-every": 10, "max-tokens": 16, "length": 24}
    options |= {"draft-vocab": 48, "learning-rate": 0.003, "device": "cpu"}
    head_training.main(
        [
            *("--model", str(model), "--prompts", str(folder / "prompts"), "--held-out", str(folder / "held_out")),
            *("--out", str(folder / "head")),
            *(word for name, value in options.items() for word in (f"--{name}", str(value))),
        ]
    )
    return model, folder / "head", json.loads((folder / "head" / "curve.json").read_text())


def engine_of(model, *flags):
    arguments = ["--model", str(model), "--socket", "unused", "--device", "cpu", "--kv-bytes", "2000000", *flags]
    return worker.build(worker.parse_arguments(arguments))[0]


def test_training_writes_a_head_and_its_curve(trained):
    _, head, curve = trained
    assert curve["steps"] == [0, 10, 20, 30]
    assert curve["loss"][-1] < curve["loss"][0]
    assert {"replies", "target", "training"} == curve["phases_s"].keys()
    assert load_head(head, LAYERS).config.draft_vocab_size == 48


def test_a_worker_uses_it_and_replies_as_without(trained):
    model, head, _ = trained
    asked = [request(f"r{n}", [3 + n, 9, 27], max_tokens=40, temperature=0.0, ignore_eos=True) for n in range(3)]
    plain = {id: tokens(deltas) for id, deltas in run(engine_of(model, "--speculation", "off"), *asked).items()}
    loop = engine_of(model, "--speculation", "eagle3", "--draft-head", str(head))
    policy = loop.scheduler.speculation.policy
    policy.begin_step, policy.depth = lambda n_rows: True, lambda cells: 4
    policy.choose = lambda cells, n_guessed=0, trust=1.0: (len(cells) - n_guessed, 1.0)
    assert {id: tokens(deltas) for id, deltas in run(loop, *asked).items()} == plain
    [stats] = loop.scheduler.speculation.stats
    assert stats.drafter == "eagle3"
    assert stats.drafted[0] > 10


def test_the_shipped_head_is_found_where_it_is_named(trained, tmp_path, monkeypatch):
    model, head, _ = trained
    fingerprint = load_head(head, LAYERS).config.target
    monkeypatch.setattr(eagle3_files, "SHIPPED", tmp_path)
    with pytest.raises(BadInput, match="needs a head"):
        engine_of(model, "--speculation", "eagle3")
    (tmp_path / fingerprint[:16]).symlink_to(head)
    assert engine_of(model, "--speculation", "eagle3").runner.head is not None
    assert engine_of(model).runner.head is None, "it is used where it is asked for"


def test_a_head_of_another_model_is_an_error_where_it_is_named(trained, tmp_path, caplog):
    _, head, _ = trained
    other = write_model(tmp_path / "other", seed=1)
    with pytest.raises(BadCheckpoint, match="trained for the model"):
        engine_of(other, "--speculation", "eagle3", "--draft-head", str(head))
    loop = engine_of(other, "--draft-head", str(head))
    assert loop.runner.head is None
    assert "was trained for the model" in caplog.text
    with pytest.raises(BadCheckpoint, match="no readable"):
        engine_of(other, "--speculation", "eagle3", "--draft-head", str(tmp_path / "none"))
