"""What is published of large models, without their weights: the essentials of each one's config.json, in `shapes/`.

`emberline pull` finds the models by their ids, and `emberline plan` reads their shapes as it reads a checkpoint's own
file, so a model can be planned before it is pulled.
"""

from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from emberline.catalog.model_card import Capabilities, HubSource, ModelCard
from emberline.weights.hf_config import read_config
from emberline.weights.model_config import ModelConfig
from emberline.weights.outline import OutlineCheckpoint
from emberline.weights.summary import summarize


class PublishedShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str  # "@cf/author/name" where Workers AI has it, "@hf/org/name" otherwise
    repo: str  # on the Hugging Face hub
    config: dict[str, Any]  # of config.json what shapes, routing and format follow from
    aliases: tuple[str, ...] = ()
    license: str = ""
    capabilities: Capabilities = Capabilities()

    @property
    def card(self) -> ModelCard:
        """The card to pull the model by its id, with what its shape tells."""
        name = self.repo.partition("/")[2]
        outline = OutlineCheckpoint(self.config)
        summary = summarize(outline.counted)
        return ModelCard(
            id=self.id,
            aliases=(*self.aliases, f"hf:{self.repo.lower()}"),
            description=f"{name}, as published on the Hugging Face hub.",
            author=self.id.split("/")[1],
            context_window=outline.config.context_len,
            architecture=outline.config.architecture,
            weight_bytes=summary.n_bytes,
            n_parameters=summary.n_parameters,
            quantization=summary.quantization,
            source=HubSource(self.repo),
            created_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3],
            license=self.license,
            capabilities=self.capabilities,
        )

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
