"""Model cards: names, properties and source of a model; the built-in ones, and those made from a checkpoint."""

import hashlib
import re
import tomllib
import uuid
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from emberline.protocol.errors import BadInput, ModelNotFound
from emberline.protocol.price import Price
from emberline.protocol.request import SamplingDefaults
from emberline.weights.checkpoint import open_checkpoint
from emberline.weights.gguf import GGUFFile
from emberline.weights.image_settings import read_image_processor
from emberline.weights.model_config import BadCheckpoint
from emberline.weights.summary import summarize
from emberline.weights.task_config import task_of
from emberline.weights.vision_tensors import read_vision_tensors
from emberline.weights.whisper_files import CONTEXT_LEN, WEIGHTS, read_whisper

TEXT_GENERATION = "Text Generation"
TEXT_EMBEDDINGS = "Text Embeddings"
TEXT_CLASSIFICATION = "Text Classification"  # rerankers too, as in Workers AI's catalog
SPEECH_RECOGNITION = "Automatic Speech Recognition"
TEXT_TO_SPEECH = "Text-to-Speech"  # this and those below: of providers
TEXT_TO_IMAGE = "Text-to-Image"
TEXT_TO_VIDEO = "Text-to-Video"
PREDICTION = "Prediction"  # of predictors, whatever they predict

MODEL_ID = r"@?[A-Za-z0-9][A-Za-z0-9._:+-]*(/[A-Za-z0-9][A-Za-z0-9._:+-]*)*"  # ids and aliases, at most 256 characters

Date = Annotated[str, msgspec.Meta(pattern=r"^(\d{4}-\d{2}-\d{2})?$")]
_NAMESPACE = uuid.UUID("6f1b8a0e-5b0c-4b57-9d55-0c6a3f6f2a10")  # of every UUID made from a name


def stable_uuid(kind: str, name: str) -> str:
    """The same for the same name on every machine."""
    return str(uuid.uuid5(_NAMESPACE, f"{kind}:{name}"))


class WheelPart(msgspec.Struct, frozen=True, rename={"n_bytes": "bytes"}):
    """A member of a wheel that is a file of the model, or one part of it."""

    file: str  # the model's file; parts of one file are concatenated in the order of the wheels
    member: str  # its path inside the wheel
    n_bytes: int
    sha256: str = ""  # of the part; empty where the part is the whole file


class Wheel(msgspec.Struct, frozen=True, rename={"n_bytes": "bytes"}):
    requirement: str  # pinned: "name==1.0"
    n_bytes: int
    parts: tuple[WheelPart, ...]


class HubSource(msgspec.Struct, frozen=True, tag="hub"):
    repo: str
    revision: str | None = None  # as requested; a commit once pulled
    file: str | None = None  # one GGUF of several


class WheelSource(msgspec.Struct, frozen=True, tag="wheel"):
    """Files of a repository on the hub, and a mirror of them: one or several wheels of the Python package index."""

    files: dict[str, str]  # sha256 by path; a path is relative to the model's folder and to the repository
    wheels: tuple[Wheel, ...]
    hub: HubSource | None = None  # asked first; None: only the mirror has the files

    def __post_init__(self) -> None:
        if {part.file for wheel in self.wheels for part in wheel.parts} != self.files.keys():
            raise ValueError("`files` must name the files that the wheels' parts make up")
        for file in self.files:
            if Path(file).is_absolute() or ".." in Path(file).parts:
                raise ValueError(f"{file!r} is not a path inside the model's folder")

    @property
    def path(self) -> str:
        """Path of what is served, relative to the model's folder: the only file, or the folder."""
        return next(iter(self.files)) if len(self.files) == 1 else "."


class PathSource(msgspec.Struct, frozen=True, tag="path"):
    """A local file or folder, used in place."""

    path: str


class CogSource(msgspec.Struct, frozen=True, tag="cog"):
    """A predictor that a user pushed: a version, and the JSON Schemas of its input and output."""

    version: int
    digest: str
    input: dict[str, Any]
    output: dict[str, Any]
    streams: bool = False
    slots: int = 1
    max_predict_ms: int = 600_000  # after which a prediction is ended
    account: str = ""  # whose model it is, which no other account sees; empty: the operator's, for every account


ModelSource = WheelSource | HubSource | PathSource | CogSource


class Capabilities(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    function_calling: bool = False
    reasoning: bool = False
    vision: bool = False
    beta: bool = False  # experimental: `hide_experimental` leaves it out of the catalog
    output_dimensions: int = 0  # of an embedding; 0: the model makes none
    max_input_tokens: int = 0  # where that is less than the context window; the rest is cut off
    languages: tuple[str, ...] = ()


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str  # "@cf/author/name", "@hf/org/repo", "@local/author/name"
    aliases: tuple[str, ...] = ()
    description: str
    author: str
    context_window: int  # tokens
    source: ModelSource
    created_at: str  # "2026-02-02 21:11:49.874", UTC
    task: str = TEXT_GENERATION
    license: str = ""
    architecture: str = ""
    weight_bytes: int = 0
    n_parameters: int = 0  # 0: not counted
    quantization: str = ""  # the number format of most weights: "Q4_K_M", "BF16"; empty: unknown
    fingerprint: str = ""  # of the weights; empty until pulled
    sampling: SamplingDefaults | None = None  # None: not read from its files yet
    capabilities: Capabilities = Capabilities()
    price: Price | None = None  # None: the card states none
    deprecation_date: Date = ""  # "2027-03-31"; empty: none is planned

    @property
    def defaults(self) -> SamplingDefaults:
        """For requests that leave sampling parameters out."""
        return self.sampling or SamplingDefaults()

    @property
    def predictor(self) -> CogSource | None:
        """The predictor that a user pushed, if the model is one."""
        return self.source if isinstance(self.source, CogSource) else None

    @property
    def uuid(self) -> str:
        return stable_uuid("model", self.id)

    @property
    def digest(self) -> str:
        """Digest of the id and the weights, as Ollama's API lists it."""
        return hashlib.sha256(f"{self.id}\0{self.fingerprint}".encode()).hexdigest()

    def is_seen_by(self, account: str | None) -> bool:
        """True if the account may know of the model. `account` None: the operator, who sees all."""
        owner = "" if self.predictor is None else self.predictor.account
        return account is None or owner in ("", account)


PUSHED = "@me/"  # begins the names of pushed models: each account's own, and the operator's
OF_ACCOUNTS = "@accounts/"  # begins the ids of models that accounts have pushed


def pushed_id(account: str, name: str) -> str:
    """The id of the model that the account calls `@me/NAME`; `account` empty: the operator. Two accounts never share
    one, although ids have no capital letters and their folders `--` for `/`."""
    if not account:
        return f"{PUSHED}{name}"
    owner = "".join(f"{each.lower()}." if each.isupper() or each == "-" else each for each in account)
    return f"{OF_ACCOUNTS}{owner}/{name}"


DEFAULT_MODEL = "@cf/huggingfacetb/smollm2-135m-instruct"


def read_card(path: Path) -> ModelCard:
    """The card in a TOML file; BadInput where it is none."""
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), ModelCard)
    except (OSError, ValueError) as error:  # TOML's, UTF-8's and msgspec's errors are ValueErrors
        raise BadInput(f"{path} is not a model card: {error}") from None


BUILT_IN: tuple[ModelCard, ...] = tuple(
    sorted(
        (read_card(path) for path in (Path(__file__).parent / "cards").glob("*.toml")),
        key=lambda card: (card.id != DEFAULT_MODEL, card.id),
    )
)


class CatalogRow(NamedTuple):
    """A task or an author, as the search endpoints list them."""

    id: str
    name: str
    description: str


def _task(name: str, description: str) -> CatalogRow:
    return CatalogRow(stable_uuid("task", name), name, description)


TASKS: tuple[CatalogRow, ...] = (
    _task(
        TEXT_GENERATION,
        "Family of generative text models, such as large language models (LLM), that can be adapted for a variety of"
        " natural language tasks.",
    ),
    _task(TEXT_EMBEDDINGS, "Turn text into vectors that are close where the meanings are: for search and clustering."),
    _task(TEXT_CLASSIFICATION, "Label a text, or score how well a text answers a query (rerankers)."),
    _task(SPEECH_RECOGNITION, "Turn recorded speech into text, with the time of each word."),
    _task(TEXT_TO_SPEECH, "Turn text into spoken audio."),
    _task(TEXT_TO_IMAGE, "Make an image from a text prompt."),
    _task(TEXT_TO_VIDEO, "Make a video from a text prompt."),
    _task(PREDICTION, "Run a model that a user brought along, on inputs of its own schema."),
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


def is_built_in(card: ModelCard) -> bool:
    """True if the model is one of the catalog's, from where the catalog has it."""
    known = built_in(card.id)
    return known is not None and known.source == card.source


def with_aliases(card: ModelCard, names: Iterable[str]) -> ModelCard:
    """The card with these names beside its own."""
    new = [name for name in names if name not in card.aliases]
    return msgspec.structs.replace(card, aliases=(*card.aliases, *new)) if new else card


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


_TASK_NAMES = {
    "generate": TEXT_GENERATION,
    "embed": TEXT_EMBEDDINGS,
    "rerank": TEXT_CLASSIFICATION,
    "classify": TEXT_CLASSIFICATION,
    "transcribe": SPEECH_RECOGNITION,
}


def describe(path: Path, model_id: str, aliases: tuple[str, ...], source: ModelSource) -> ModelCard:
    try:
        if task_of(path).task == "transcribe":
            return _describe_whisper(path, model_id, aliases, source)
        checkpoint = open_checkpoint(path)
    except BadCheckpoint as error:
        raise BadInput(f"{path} is not a model that can be served: {error}") from None
    config, task = checkpoint.config, task_of(path)
    processor = read_image_processor(path)
    tower = {} if processor is None else read_vision_tensors(path, processor.family)
    weights = [*(checkpoint.weight(name) for name in checkpoint.names), *tower.values()]
    summary = summarize(((weight, 1) for weight in weights), path)
    card = ModelCard(
        id=model_id,
        aliases=aliases,
        description=f"A {config.architecture} model of {config.n_layers} layers, width {config.hidden_size}.",
        author=model_id.split("/")[1],
        context_window=config.context_len,
        task=_TASK_NAMES[task.task],
        source=source,
        created_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3],
        architecture=config.architecture,
        weight_bytes=summary.n_bytes,
        n_parameters=summary.n_parameters,
        quantization=summary.quantization,
        fingerprint=checkpoint.fingerprint,
        sampling=read_sampling(path),
        capabilities=Capabilities(
            vision=processor is not None,
            output_dimensions=config.hidden_size if task.task == "embed" else 0,
            max_input_tokens=task.max_len or 0,
        ),
    )
    checkpoint.close()
    return card


def _describe_whisper(path: Path, model_id: str, aliases: tuple[str, ...], source: ModelSource) -> ModelCard:
    return ModelCard(
        id=model_id,
        aliases=aliases,
        description="A Whisper model: transcribes recorded speech.",
        author=model_id.split("/")[1],
        context_window=CONTEXT_LEN,
        source=source,
        created_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3],
        task=SPEECH_RECOGNITION,
        architecture="whisper",
        weight_bytes=(path / WEIGHTS).stat().st_size,
        fingerprint=read_whisper(path).fingerprint,
        sampling=SamplingDefaults(),
    )
