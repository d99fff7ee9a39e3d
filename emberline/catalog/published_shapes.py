"""The table of models known by name without being here: one JSON file for each in `shapes/`, more in a folder of the
user's.

An entry has what is published of a model: its official repository on the Hugging Face hub, the quantizations that its
publisher offers, licence, capabilities, the names that people type (`qwen3:8b`), and the essentials of its config.json.
Its size follows from those, and `emberline plan` reads them as it reads a checkpoint's own file, so a model can be
planned before it is pulled. The table has only models that the engine loads.
"""

import logging
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import msgspec

from emberline.catalog.model_card import Capabilities, HubSource, ModelCard, slug
from emberline.weights.hf_config import read_config
from emberline.weights.model_config import BadCheckpoint, ModelConfig
from emberline.weights.outline import OutlineCheckpoint
from emberline.weights.summary import summarize

USER_FOLDER = "shapes"  # in the data folder
LATEST = ":latest"  # Ollama's tag of a name without one
# Bits of a weight in a GGUF file of each type, averaged over a model's matrices.
_GGUF_BITS = {"q4_0": 4.6, "q4_K_M": 4.9, "q5_K_M": 5.7, "q6_K": 6.6, "q8_0": 8.5}
_log = logging.getLogger(__name__)


class ShapeVariant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The same model in another number format, as its publisher offers it."""

    repo: str  # on the Hugging Face hub
    file: str = ""  # a GGUF file; empty: the repository's safetensors
    revision: str = ""  # a commit, where its files were seen; empty: the newest
    config: dict[str, Any] = {}  # keys of config.json that differ from the model's own


class PublishedShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    id: str  # "@cf/author/name" where Workers AI has it, "@hf/org/name" otherwise
    repo: str  # on the Hugging Face hub
    config: dict[str, Any]  # of config.json what shapes, routing and format follow from
    aliases: tuple[str, ...] = ()  # names that people type; one with a tag comes first
    license: str = ""
    capabilities: Capabilities = Capabilities()
    variants: dict[str, ShapeVariant] = {}  # by quantization: "q4_K_M", "fp8"

    @cached_property
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

    def variant(self, quantization: str) -> ModelCard:
        """The card of the model in that quantization, with the tags of it: `qwen3:8b-q4_k_m`."""
        found, base = self.variants[quantization], self.card
        name = slug(Path(found.file).stem if found.file else found.repo.partition("/")[2])
        if found.file:
            weight_bytes = int(base.n_parameters * _GGUF_BITS[quantization] / 8)
        else:
            weight_bytes = summarize(OutlineCheckpoint(self.config | found.config).counted).n_bytes
        return msgspec.structs.replace(
            base,
            id=f"@hf/{slug(found.repo.partition('/')[0])}/{name}",
            aliases=tuple(f"{alias}-{quantization}".lower() for alias in self.aliases if ":" in alias),
            description=f"{self.repo.partition('/')[2]} in {quantization}, as published on the Hugging Face hub.",
            weight_bytes=weight_bytes,
            quantization=quantization.upper(),
            source=HubSource(found.repo, found.revision or None, found.file or None),
        )

    def offer(self, *, on_gpu: bool) -> ModelCard:
        """The card behind a name without a quantization: on a GPU the repository itself, on a CPU the smallest GGUF
        file that is offered. The card has both names."""
        quantization = next((key for key, each in self.variants.items() if each.file), None)
        if on_gpu or quantization is None:
            return self.card
        card = self.variant(quantization)
        return msgspec.structs.replace(card, aliases=(*card.aliases, *self.aliases))

    def read(self) -> ModelConfig:
        """Raises BadCheckpoint for a format that is not supported."""
        return read_config(self.config, {})


@cache
def published_shapes() -> tuple[PublishedShape, ...]:
    """The package's table."""
    return tuple(_read(sorted((Path(__file__).parent / "shapes").glob("*.json"))))


def all_shapes(home: Path) -> tuple[PublishedShape, ...]:
    """The package's table with the entries of the user's folder, which come first; a broken one is logged and left
    out."""
    own = []
    for path in sorted((home / USER_FOLDER).glob("*.json")):
        try:
            (shape,) = _read([path])
            shape.read()
        except (OSError, msgspec.MsgspecError, BadCheckpoint) as error:
            _log.warning("%s is no entry of the table of models: %s", path, error)
            continue
        own.append(shape)
    return (*own, *published_shapes())


def _read(files: Iterable[Path]) -> list[PublishedShape]:
    return [msgspec.json.decode(file.read_bytes(), type=PublishedShape) for file in files]


def find_shape(name: str, shapes: Iterable[PublishedShape] | None = None) -> PublishedShape | None:
    """The entry of that id, alias or repository, in any case of letters."""
    wanted = name.lower().removeprefix("hf:").removesuffix(LATEST)
    return next(
        (s for s in shapes or published_shapes() if wanted in (s.id, s.repo.lower(), *s.aliases)),
        None,
    )


def find_offer(name: str, shapes: Iterable[PublishedShape], *, on_gpu: bool) -> ModelCard | None:
    """The card to pull for a name: an id or repository is the model itself, `qwen3:8b` what suits the machine, and
    `qwen3:8b-q8_0` that quantization."""
    wanted = name.lower().removesuffix(LATEST)
    for shape in shapes:
        if wanted in shape.aliases:
            return shape.offer(on_gpu=on_gpu)
        if wanted.removeprefix("hf:") in (shape.id, shape.repo.lower()):
            return shape.card
        for quantization in shape.variants:
            if (
                wanted.endswith(f"-{quantization.lower()}")
                and wanted.removesuffix(f"-{quantization.lower()}") in shape.aliases
            ):
                return shape.variant(quantization)
    return None
