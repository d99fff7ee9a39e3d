"""The operator's model cards: `$EMBERLINE_HOME/cards/*.toml`.

A card with a `source` is a model of its own, which `pull` downloads. A card without one changes what the catalog says
of a model that is known otherwise, whether it is built in, pulled or on an upstream server: its price, its deprecation
date, its sampling defaults. It names the model by `id` and has only the fields to change.
"""

import logging
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from emberline.catalog.model_card import ModelCard, PathSource, built_in, slug
from emberline.protocol.errors import BadInput

FOLDER = "cards"
_REQUIRED = {"description": "", "author": "", "context_window": 1, "created_at": "1970-01-01 00:00:00.000"}
_log = logging.getLogger(__name__)


class CardFiles:
    """Reads the folder once; make another one to read it again."""

    def __init__(self, home: Path) -> None:
        self.folder = home / FOLDER
        self._read: dict[str, dict[str, Any]] | None = None

    def apply(self, card: ModelCard) -> ModelCard:
        """The card with the operator's changes."""
        fields = self._fields.get(card.id.lower())
        return card if fields is None else _merged(card, fields)

    def find(self, name: str) -> ModelCard | None:
        """A built-in card, or one of the operator's that has a source, by id or alias in any case of letters."""
        if (card := built_in(name)) is not None:
            return self.apply(card)
        wanted = name.lower()
        return next((card for card in self.models() if wanted in (card.id.lower(), *card.aliases)), None)

    def models(self) -> list[ModelCard]:
        """The operator's cards that are models of their own."""
        own = [fields for fields in self._fields.values() if "source" in fields]
        return [_convert({"aliases": [slug(fields["id"].rpartition("/")[2])]} | fields) for fields in own]

    def add(self, path: Path) -> tuple[ModelCard, Path]:
        """Copy a card's file into the folder; BadInput says what is wrong with it."""
        fields = _fields_of(path)
        if "source" in fields and built_in(fields["id"]) is not None:
            raise BadInput(f"{path}: {fields['id']} is built in; leave out `source` to change what is said of it")
        card = _check(fields, path)
        target = self.folder / f"{slug(fields['id'])}.toml"
        self.folder.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(".part")
        part.write_bytes(path.read_bytes())
        part.replace(target)
        self._read = None
        return card, target

    @property
    def _fields(self) -> Mapping[str, dict[str, Any]]:
        if self._read is None:
            self._read = {}
            for path in sorted(self.folder.glob("*.toml")):
                try:
                    fields = _fields_of(path)
                    _check(fields, path)
                except BadInput as error:  # the others are still of use
                    _log.warning("%s", error.message)
                    continue
                self._read[fields["id"].lower()] = fields
        return self._read


def _fields_of(path: Path) -> dict[str, Any]:
    try:
        fields = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} is not a model card: {error}") from None
    unknown = fields.keys() - set(ModelCard.__struct_fields__)
    if unknown:
        raise BadInput(f"{path}: a model card has no field {', '.join(sorted(unknown))}")
    if not isinstance(fields.get("id"), str):
        raise BadInput(f'{path}: a model card names its model: id = "@cf/author/name"')
    return fields


def _check(fields: Mapping[str, Any], path: Path) -> ModelCard:
    """The card, or, of one that changes another, what it has."""
    base: Mapping[str, Any] = {} if "source" in fields else {**_REQUIRED, "source": {"type": "path", "path": ""}}
    try:
        return _convert({**base, **fields})
    except BadInput as error:
        raise BadInput(f"{path}: {error.message}") from None


def _convert(fields: Mapping[str, Any]) -> ModelCard:
    try:
        card = msgspec.convert(fields, ModelCard)
    except msgspec.ValidationError as error:
        raise BadInput(f"not a model card: {error}") from None
    if len(card.id.split("/")) != 3 and not isinstance(card.source, PathSource):
        raise BadInput(f"the id {card.id!r} is not of the form @source/author/name")
    return card


def _merged(card: ModelCard, fields: Mapping[str, Any]) -> ModelCard:
    return _convert({**msgspec.to_builtins(card), **fields})
