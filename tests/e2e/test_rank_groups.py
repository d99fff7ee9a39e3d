"""`emberline serve` with several ranks, over HTTP: the text of one rank, and disaggregation between rank groups."""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDTH, LAYERS, VOCABULARY = 32, 4, 2, 16, 64, 2, 260
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
    "intermediate_size": WIDTH, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "eos_token_id": 257, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
PROMPTS = ["Tell me of the sea.", "A list of ships, and where each of them went in the year of the storm, with names."]


def write_model(folder: Path) -> Path:
    """A tiny Llama with random weights and a byte-level tokenizer."""
    torch.manual_seed(4)
    rows = {"q_proj": HEADS * HEAD_DIM, "k_proj": KV_HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM}
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN)}
    norms = ["model.norm.weight"]
    for n in range(LAYERS):
        layer = f"model.layers.{n}"
        norms += [f"{layer}.input_layernorm.weight", f"{layer}.post_attention_layernorm.weight"]
        shapes |= {f"{layer}.self_attn.{name}.weight": (size, HIDDEN) for name, size in rows.items()}
        shapes |= {f"{layer}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM)}
        shapes |= {f"{layer}.mlp.{name}.weight": (WIDTH, HIDDEN) for name in ("gate_proj", "up_proj")}
        shapes |= {f"{layer}.mlp.down_proj.weight": (HIDDEN, WIDTH)}
    tensors = {name: (0.4 * torch.randn(shape)).bfloat16() for name, shape in shapes.items()}
    save_file(tensors | {name: torch.ones(HIDDEN).bfloat16() for name in norms}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@contextmanager
def serving(model: Path, home: Path, *flags: str) -> Iterator[str]:
    """The base URL of a server of its own."""
    command = [sys.executable, "-m", "emberline.cli.main", "serve", str(model), "--port", "0", "--json"]
    common = ["--device", "cpu", "--kv-bytes", "16M", "--threads", "2", "--speculation", "off"]
    env = {**os.environ, "EMBERLINE_HOME": str(home)}
    process = subprocess.Popen([*command, *common, *flags], stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the server did not start; its log is above"
        yield json.loads(line)["url"]
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def ask(url: str, path: str, **body: Any) -> Any:
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def replies(url: str) -> list[str]:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
        name = json.load(answer)["data"][0]["id"]
    asked = {"model": name, "max_tokens": 24, "seed": 3}
    texts = []
    for prompt in PROMPTS:
        for temperature in (0.0, 0.9):
            message = {"role": "user", "content": prompt}
            chat = ask(url, "/v1/chat/completions", messages=[message], temperature=temperature, **asked)
            texts.append(chat["choices"][0]["message"]["content"])
    shape = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    how = {"type": "json_schema", "json_schema": {"name": "lamp", "schema": shape}}
    message = {"role": "user", "content": PROMPTS[0]}
    chat = ask(url, "/v1/chat/completions", messages=[message], response_format=how, temperature=0.0, **asked)
    texts.append(chat["choices"][0]["message"]["content"])
    assert set(json.loads(texts[-1])) == {"on"}
    return texts


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    with serving(model, tmp_path_factory.mktemp("one")) as url:
        return replies(url)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--tp", "2"),
        ("--pp", "2", "--step-timeout", "300"),
        ("--tp", "2", "--prefill-workers", "1", "--decode-workers", "1"),
    ],
    ids=["tp2", "pp2", "tp2 apart"],
)
def test_ranks_reply_as_one_over_http(model: Path, expected: list[str], tmp_path: Path, flags: tuple[str, ...]) -> None:
    with serving(model, tmp_path, *flags) as url:
        assert replies(url) == expected
        assert replies(url) == expected, "with the prompts in the prefix cache"
