"""Damaged weights are found, and files that did not change are not hashed again."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from emberline.catalog.integrity import RECORD, verify
from emberline.catalog.model_card import ModelCard
from emberline.catalog.model_store import ModelStore
from emberline.catalog.pull import pull
from emberline.cli.models import fetch
from emberline.protocol.errors import BadInput
from tests.catalog.test_hub import server
from tests.catalog.tiny_models import gguf_bytes

__all__ = ["server"]  # a fixture


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "home")


@pytest.fixture
def card(server: object, store: ModelStore) -> ModelCard:
    return pull("hf:org/tiny", store).card


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the files that were hashed."""
    names: list[str] = []
    digest = hashlib.file_digest

    def counted(file: Any, name: str) -> Any:
        names.append(Path(file.name).name)
        return digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", counted)
    return names


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_flipped_bits_are_refused(store: ModelStore, card: ModelCard, name: str) -> None:
    assert fetch(card.id, store).card == card
    flip_a_bit(store.folder(card.id) / name)
    with pytest.raises(
        BadInput, match=rf"{name} is damaged: .* emberline rm @hf/org/tiny && emberline pull hf:org/tiny"
    ):
        fetch(card.id, store)
    flip_a_bit(store.folder(card.id) / name)
    verify(store, card)


def test_files_are_hashed_once_per_change(store: ModelStore, card: ModelCard, hashed: list[str]) -> None:
    verify(store, card)
    assert hashed == []  # the pull has done it
    weights = store.folder(card.id) / "model.safetensors"
    os.utime(weights)
    verify(store, card)
    verify(store, card)
    assert hashed == ["model.safetensors"]
    (store.folder(card.id) / RECORD).write_text("{")
    verify(store, card)
    assert len(hashed) == 4
    verify(store, card)
    assert len(hashed) == 4


def test_a_missing_file_is_named(store: ModelStore, card: ModelCard) -> None:
    (store.folder(card.id) / "tokenizer.json").unlink()
    with pytest.raises(BadInput, match=r"tokenizer.json cannot be read: No such file"):
        verify(store, card)


def test_a_linked_file_may_change(store: ModelStore, tmp_path: Path) -> None:
    path = tmp_path / "mine.gguf"
    path.write_bytes(gguf_bytes(tmp_path))
    entry = pull(str(path), store)
    flip_a_bit(path)
    verify(store, entry.card)
