"""The built-in model cards."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from emberline.catalog.model_card import (
    BUILT_IN,
    DEFAULT_MODEL,
    TASKS,
    ModelCard,
    WheelSource,
    authors,
    built_in,
    describe_path,
    read_sampling,
    task,
)
from emberline.protocol.request import MODEL_DEFAULTS, SamplingDefaults, SamplingParams
from emberline.weights.checkpoint import open_checkpoint
from tests.catalog.tiny_models import folder_files, gguf_bytes


def test_names_are_unique() -> None:
    names = [name for card in BUILT_IN for name in (card.id, *card.aliases)]
    assert len(names) == len(set(names))
    assert all(built_in(name) is not None for name in names)
    assert built_in("SmolLM2") is built_in(DEFAULT_MODEL)
    assert built_in("nothing") is None


def test_ids_are_stable() -> None:
    card = built_in("smollm2")
    assert card is not None
    assert card.uuid == "7b362890-e2d8-5c31-8829-f40fe14ee259"
    assert len({row.id for row in TASKS} | {card.uuid for card in BUILT_IN}) == len(TASKS) + len(BUILT_IN)


@pytest.mark.parametrize("card", BUILT_IN, ids=lambda card: card.aliases[0])
def test_sources_are_pinned(card: ModelCard) -> None:
    source = card.source
    assert isinstance(source, WheelSource)
    assert all("==" in wheel.requirement for wheel in source.wheels)
    parts = [part for wheel in source.wheels for part in wheel.parts]
    assert all(len(sha256) == 64 for sha256 in source.files.values())
    assert all(len(part.sha256 or source.files[part.file]) == 64 for part in parts)
    assert task(card.task) is not None


def test_rows_for_the_search_endpoints() -> None:
    assert [row.name for row in authors(BUILT_IN)] == [
        *("google", "huggingfacetb", "openai", "qwen", "sentence-transformers"),
    ]
    found = task("Text Generation")
    assert found is not None
    assert found in TASKS
    assert task("Translation") is None


def test_the_default_card_matches_its_checkpoint(smollm2: Path) -> None:
    card = built_in(DEFAULT_MODEL)
    assert card is not None
    config = open_checkpoint(smollm2).config
    assert (card.context_window, card.architecture) == (config.context_len, config.architecture)
    assert card.weight_bytes == smollm2.stat().st_size


def test_the_catalog_is_free_of_torch() -> None:
    modules = "emberline.catalog.pull, emberline.catalog.model_card, emberline.weights.checkpoint"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_sampling_defaults_of_a_folder(tmp_path: Path) -> None:
    for name, content in folder_files().items():
        if "/" not in name:
            (tmp_path / name).write_bytes(content)
    assert describe_path(tmp_path).sampling == SamplingDefaults()
    given = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": None, "repetition_penalty": 7, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    assert describe_path(tmp_path).sampling == SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95)
    for broken in (
        b"[]",
        b"{",
        b'{"temperature": "hot", "top_p": true, "top_k": 1e99}',
        b'{"a": "\xff"}',
        b"[" * 100_000,
    ):
        (tmp_path / "generation_config.json").write_bytes(broken)
        assert read_sampling(tmp_path) == SamplingDefaults()


def test_defaults_that_were_read_can_be_sent_to_an_engine(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"top_k": 20.0, "temperature": 1}')
    sampling = read_sampling(tmp_path).apply(SamplingParams(), MODEL_DEFAULTS)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(sampling), type=SamplingParams)
    assert (sent.top_k, sent.temperature) == (20, 1.0)


def test_sampling_defaults_of_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(tmp_path, sampling={"temp": 0.5, "penalty_repeat": 1.25}))
    assert describe_path(path).sampling == SamplingDefaults(temperature=0.5, repetition_penalty=1.25)


def test_the_default_model_has_the_published_sampling_defaults() -> None:
    card = built_in(DEFAULT_MODEL)
    assert card is not None
    assert card.defaults.given == {"temperature": 0.2, "top_p": 0.9}
