"""`emberline pull`: what it says of a model that cannot run yet."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from tests.catalog.tiny_models import CONFIG, folder_files
from tests.cli.console import emberline, emberline_process, without_module


@pytest.fixture
def whisper(tmp_path: Path) -> Path:
    """The folder of a speech model, as far as its files are read at `pull`."""
    folder = tmp_path / "ears"
    folder.mkdir()
    config = {"suppress_ids": [], "suppress_ids_begin": [], "lang_ids": [], "alignment_heads": []}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.bin").write_bytes(bytes(64))
    (folder / "vocabulary.txt").write_text("a\nb\n")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_a_model_whose_library_is_missing_says_so(whisper: Path, tmp_path: Path) -> None:
    pytest.importorskip("faster_whisper")
    home = tmp_path / "home"
    complete = emberline("pull", str(whisper), home=home)
    assert (complete.returncode, complete.stderr) == (0, f"pulling {whisper}\n")
    hidden = without_module("faster_whisper", tmp_path / "site")
    lacking = emberline_process("pull", str(whisper), "--json", home=home, **hidden)
    assert lacking.returncode == 0, lacking.stderr
    for said in (lacking.stderr, json.loads(lacking.stdout)["problem"]):
        assert "it cannot run yet: speech to text needs faster-whisper: pip install 'emberline[speech]'" in said


SEEING = Path(__file__).parents[1] / "models" / "seeing"
HEADS_OF_8 = CONFIG | {"num_attention_heads": 4}


def decoder(folder: Path) -> Path:
    """The folder of a model of a shape that only torch computes, as far as its files are read at `pull`."""
    (folder / "config.json").write_text(json.dumps(HEADS_OF_8))
    (folder / "model.safetensors").write_bytes(folder_files()["model.safetensors"])
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def encoder(folder: Path) -> Path:
    from tests.encoders import tiny_bert  # which imports torch

    return tiny_bert(folder)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (decoder, "it cannot run yet: the CPU kernels do not support this model's shape: that needs"),
        pytest.param(encoder, "it cannot run yet: embeddings and reranking need", marks=pytest.mark.slow),
        pytest.param(lambda folder: SEEING, "it takes no images yet: images need", marks=pytest.mark.slow),
    ],
)
def test_a_model_that_needs_torch_says_so(tmp_path: Path, made: Callable[[Path], Path], said: str) -> None:
    """Also if only a part of the model needs torch: the last one writes without it, and does not see."""
    folder = tmp_path / "model"
    folder.mkdir()
    hidden = without_module("torch", tmp_path / "site")
    pulled = emberline_process("pull", str(made(folder)), "--json", home=tmp_path / "home", **hidden)
    assert pulled.returncode == 0, pulled.stderr
    problem = json.loads(pulled.stdout)["problem"]
    assert problem.startswith(f"{said} PyTorch, which is not installed: pip install 'emberline[torch]'")
    assert problem in pulled.stderr
