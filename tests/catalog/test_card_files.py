"""The operator's model cards."""

from pathlib import Path

import pytest

from emberline.catalog.card_files import CardFiles
from emberline.catalog.model_card import DEFAULT_MODEL, built_in
from emberline.catalog.model_store import ModelStore
from emberline.catalog.pull import pull
from emberline.protocol.errors import BadInput
from tests.catalog.tiny_models import gguf_bytes

OVERRIDE = f"""
id = "{DEFAULT_MODEL}"
deprecation_date = "2027-03-31"
[price]
input = 600_000
output = 3_000_000
"""


def card_of(path: Path) -> str:
    return f"""
id = "@acme/tests/tiny"
description = "A tiny model."
author = "tests"
context_window = 64
created_at = "2026-01-01 00:00:00.000"
[source]
type = "path"
path = "{path}"
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "card.toml"
    path.write_text(text)
    return path


def test_a_card_changes_what_is_said_of_a_built_in_model(tmp_path: Path) -> None:
    CardFiles(tmp_path).add(write(tmp_path, OVERRIDE))
    card, known = CardFiles(tmp_path).find("smollm2"), built_in("smollm2")
    assert card is not None
    assert known is not None
    assert card.deprecation_date == "2027-03-31"
    assert card.price is not None
    assert card.price.output == 3_000_000
    assert (card.description, card.source, card.sampling) == (known.description, known.source, known.sampling)


def test_a_card_with_a_source_is_a_model(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(gguf_bytes(tmp_path))
    store = ModelStore(tmp_path / "home")
    store.cards.add(write(tmp_path, card_of(model)))
    entry = pull("tiny", store)
    assert (entry.card.id, entry.path, entry.card.description) == ("@acme/tests/tiny", model, "A tiny model.")
    assert entry.card.fingerprint
    assert store.find("@acme/tests/tiny") == entry


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("id = ", "not a model card"),
        ("", "names its model"),
        ("id = 3", "names its model"),
        ('id = "@cf/a/b"\ncontxt = 3', "no field contxt"),
        ('id = "@cf/a/b"\ndeprecation_date = "soon"', "deprecation_date"),
        ('id = "@cf/a/b"\n[price]\ninput = -1', "price"),
        (OVERRIDE + '\n[source]\ntype = "path"\npath = "/x"', "is built in"),
        ('id = "@cf/a/b"\n[source]\ntype = "hub"\nrepo = "a/b"', "missing required"),
    ],
)
def test_what_is_no_card(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(BadInput, match=problem):
        CardFiles(tmp_path / "home").add(write(tmp_path, text))
    assert not (tmp_path / "home").exists()


def test_a_broken_card_does_not_hide_the_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cards = CardFiles(tmp_path)
    cards.add(write(tmp_path, OVERRIDE))
    (cards.folder / "broken.toml").write_text("id = ")
    card = CardFiles(tmp_path).find(DEFAULT_MODEL)
    assert card is not None
    assert card.deprecation_date
    assert "broken.toml" in caplog.text
