"""What is published of large models, without their weights: the essentials of each one's config.json, in `shapes/`.

`emberline plan` reads them as it reads a checkpoint's own file, so a model can be planned before it is pulled.
"""

from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from emberline.weights.hf_config import read_config
from emberline.weights.model_config import ModelConfig


class PublishedShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str  # "@cf/author/name" where Workers AI has it, "@hf/org/name" otherwise
    repo: str  # on the Hugging Face hub
    config: dict[str, Any]  # of config.json what shapes, routing and format follow from
    aliases: tuple[str, ...] = ()

    def read(self) -> ModelConfig:
        """Raises BadCheckpoint for a format that is not supported."""
        return read_config(self.config, {})


@cache
def published_shapes() -> tuple[PublishedShape, ...]:
    files = sorted((Path(__file__).parent / "shapes").glob("*.json"))
    return tuple(msgspec.json.decode(file.read_bytes(), type=PublishedShape) for file in files)


def find_shape(name: str) -> PublishedShape | None:
    """By id, alias or repository, in any case of letters."""
    wanted = name.lower().removeprefix("hf:")
    return next((s for s in published_shapes() if wanted in (s.id, s.repo.lower(), *s.aliases)), None)
