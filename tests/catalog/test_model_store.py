"""The model store: linking, finding, resolving and removing models."""

import os
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from emberline.catalog.model_card import PathSource, describe_path
from emberline.catalog.model_store import CARD, ModelStore
from emberline.catalog.pull import pull
from emberline.kernels.cpu.packed_file import MIN_BYTES, PackedArray, PackedFile
from emberline.protocol.errors import BadInput, ModelNotFound
from tests.catalog.tiny_models import folder_files, gguf_bytes


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "home")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "My Model.Q4.gguf"
    path.write_bytes(gguf_bytes(tmp_path))
    return path


def test_an_empty_store(store: ModelStore) -> None:
    assert store.entries() == []
    assert store.find("smollm2") is None


def test_a_file_is_linked_not_copied(store: ModelStore, model: Path) -> None:
    card, path = pull(str(model), store)
    assert path == model
    assert card.id == "@local/models/my-model.q4"
    assert card.source == PathSource(str(model))
    assert card.context_window == 64
    assert [item.name for item in store.folder(card.id).iterdir()] == [CARD]
    assert store.entries() == [(card, path)]


def test_a_folder_is_linked(store: ModelStore, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes(folder_files()[name])
    assert pull(str(folder), store).path == folder


@pytest.mark.parametrize("name", ["@local/models/my-model.q4", "my-model.q4", "My-Model.Q4"])
def test_it_is_found_by_id_and_alias(store: ModelStore, model: Path, name: str) -> None:
    entry = pull(str(model), store)
    assert store.find(name) == entry
    assert store.resolve(name) == entry
    assert ModelStore(store.root.parent).find(name) == entry  # another process's view


def test_a_path_resolves_without_being_registered(store: ModelStore, model: Path) -> None:
    card, path = store.resolve(str(model))
    assert path == model
    assert card.fingerprint
    assert store.entries() == []


def test_two_files_of_one_name_are_two_models(store: ModelStore, model: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere" / model.name
    other.parent.mkdir()
    other.write_bytes(gguf_bytes(tmp_path, seed=1))
    first, second = pull(str(model), store), pull(str(other), store)
    assert first.card.id != second.card.id
    assert pull(str(model), store).card.id == first.card.id
    assert len(store.entries()) == 2


def test_a_file_cannot_take_a_built_in_name(store: ModelStore, model: Path) -> None:
    impostor = model.rename(model.with_name("smollm2.gguf"))
    assert pull(str(impostor), store).card.id == "@local/models/smollm2"
    assert store.find("smollm2") is None


def test_a_file_that_is_not_a_model_is_refused(store: ModelStore, tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + bytes(10))
    with pytest.raises(BadInput, match=r"bad\.gguf is not a model"):
        pull(str(bad), store)
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelNotFound, match="there is no file"):  # reading it would wait for ever
        pull(str(tmp_path / "pipe.gguf"), store)
    with pytest.raises(ModelNotFound, match="there is no file"):
        pull(str(tmp_path / "none.gguf"), store)
    assert store.entries() == []


@pytest.mark.parametrize(
    ("name", "advice"),
    [("smollm2", "emberline pull smollm2"), ("hf:a/b", "emberline pull"), ("@cf/a/b", "emberline ls")],
)
def test_an_unpulled_model_names_the_pull_command(store: ModelStore, name: str, advice: str) -> None:
    with pytest.raises(ModelNotFound, match=advice):
        store.resolve(name)


def test_pulling_an_unknown_name_suggests_near_ones_or_lists_the_built_in(store: ModelStore) -> None:
    with pytest.raises(ModelNotFound, match=r"'smolm2'; did you mean smollm2.*\?"):
        pull("smolm2", store)
    with pytest.raises(ModelNotFound, match=r"'no-such-model'; Emberline comes with smollm2, [^?]*; `emberline ls"):
        pull("no-such-model", store)


def test_removing_a_linked_model_keeps_the_file(store: ModelStore, model: Path) -> None:
    card = pull(str(model), store).card
    packed = PackedFile.beside(model, card.fingerprint, model)
    packed.add("matrix", PackedArray(np.zeros(MIN_BYTES, np.uint8), 4))
    writing = packed.save()
    assert writing is not None
    writing.join()
    assert list(model.parent.glob(".*.packed"))
    assert store.remove(card.id) == card
    assert model.exists()
    assert not list(model.parent.glob(".*.packed"))
    assert store.entries() == []
    with pytest.raises(ModelNotFound):
        store.remove(card.id)


def test_packed_weights_that_cannot_be_removed_do_not_keep_a_model(store: ModelStore, model: Path) -> None:
    card = pull(str(model), store).card
    (model.parent / f".{model.name}.0.packed").mkdir()  # nobody can unlink a folder
    store.remove(card.id)
    assert store.entries() == []


def test_a_missing_linked_file_is_not_listed_but_can_be_removed(store: ModelStore, model: Path) -> None:
    card = pull(str(model), store).card
    model.unlink()
    assert store.entries() == []
    store.remove(card.id)
    assert list(store.root.glob("[!.]*")) == []


def test_a_damaged_card_hides_its_model_only(store: ModelStore, model: Path, tmp_path: Path) -> None:
    good = pull(str(model), store)
    (store.root / "cf--other--model").mkdir()
    (store.root / "cf--other--model" / CARD).write_text("{")
    assert store.entries() == [good]


def test_the_lock_is_exclusive(store: ModelStore) -> None:
    order: list[str] = []

    def second() -> None:
        with ModelStore(store.root.parent).lock():
            order.append("second")

    with store.lock():
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.1)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_stored_cards_get_the_sampling_defaults_of_today(store: ModelStore, tmp_path: Path) -> None:
    """A card that an earlier version has stored has none."""
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(tmp_path, sampling={"temp": 0.5}))
    with store.lock():
        store.place(msgspec.structs.replace(describe_path(path), sampling=None), str(path))
    (entry,) = store.entries()
    assert entry.card.defaults.temperature == 0.5
