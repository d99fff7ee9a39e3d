"""Tasks of checkpoints: generating text, or encoding it into vectors, relevance scores or labels.

A folder says so in config.json (`architectures`, `id2label`) and in the files of sentence-transformers: modules.json
and the configurations of its pooling module.
"""

import re
from pathlib import Path

import msgspec

from emberline.protocol.encoding import Pooling, Task
from emberline.weights.model_config import BadCheckpoint, Fields
from emberline.weights.whisper_files import is_whisper

ENCODERS = ("bert", "roberta", "xlm-roberta", "distilbert")
MAX_LABELS = 10_000
MAX_JSON_BYTES = 64 << 20
_POOLING: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_MODULES = {"Transformer", "Pooling", "Normalize"}


class TaskConfig(msgspec.Struct, frozen=True, kw_only=True):
    task: Task = "generate"
    pooling: Pooling = "mean"  # of vectors
    normalize: bool = True
    max_len: int | None = None  # tokens of a text, where less than the model's positions
    labels: tuple[str, ...] = ()  # of a classifier, in the order of its logits
    multi_label: bool = False  # labels are independent: each has a probability of its own
    matryoshka: bool = False  # the first dimensions of a vector are a vector


def read_json(folder: Path, name: str, *, optional: bool = False) -> dict[str, object]:
    value = _read(folder, name, optional)
    if not isinstance(value, dict):
        raise BadCheckpoint(f"{name} is not a JSON object")
    return value


def _read(folder: Path, name: str, optional: bool) -> object:
    path = folder / name
    if not path.is_file():
        if optional:
            return {}
        raise BadCheckpoint(f"{folder.name} has no {name}")
    if path.stat().st_size > MAX_JSON_BYTES:
        raise BadCheckpoint(f"{name} is larger than {MAX_JSON_BYTES >> 20} MiB")
    try:
        return msgspec.json.decode(path.read_bytes())
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise BadCheckpoint(f"{name} is not valid: {error}") from None


def task_of(path: Path) -> TaskConfig:
    """The task of a checkpoint. A GGUF file generates text. Raises BadCheckpoint."""
    if not path.is_dir():
        return TaskConfig()
    if is_whisper(path):
        return TaskConfig(task="transcribe")
    config = Fields(read_json(path, "config.json"), "config.json")
    architectures = config.get("architectures", [])
    if not isinstance(architectures, list):
        raise config.wrong("architectures", "a list")
    classifies = any(str(name).endswith("ForSequenceClassification") for name in architectures)
    modules = _read(path, "modules.json", True)
    if classifies:
        return _classifier(config)
    if not modules and config.get("model_type", "") not in ENCODERS:
        return TaskConfig()
    limit = Fields(read_json(path, "sentence_bert_config.json", optional=True), "sentence_bert_config.json")
    pooling, normalize = _modules(path, modules) if modules else ("mean", True)
    return TaskConfig(
        task="embed",
        pooling=pooling,
        normalize=normalize,
        max_len=limit.whole("max_seq_length") if limit.has("max_seq_length") else None,
        # Qwen's decoder embedders are all trained so, and none of their files says it.
        matryoshka=bool(config.get("matryoshka_dimensions", config.get("is_matryoshka", False)))
        or config.get("model_type", "") == "qwen3",
    )


def _classifier(config: Fields) -> TaskConfig:
    names = config.get("id2label", {})
    if not isinstance(names, dict) or len(names) > MAX_LABELS or not all(key.isdigit() for key in names):
        raise config.wrong("id2label", f"an object of at most {MAX_LABELS} labels by number")
    labels = tuple(str(names[key]) for key in sorted(names, key=int))
    if not labels:
        labels = tuple(f"LABEL_{n}" for n in range(config.whole("num_labels", 2, most=MAX_LABELS)))
    if len(labels) == 1:
        return TaskConfig(task="rerank", labels=labels)
    multi_label = config.get("problem_type", "") == "multi_label_classification"
    return TaskConfig(task="classify", labels=labels, multi_label=multi_label)


def _modules(folder: Path, modules: object) -> tuple[Pooling, bool]:
    """Pooling, and whether vectors are normalized, as modules.json lists them."""
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise BadCheckpoint("modules.json is not a list of modules")
    kinds = {str(module.get("type", "")).rpartition(".")[2]: str(module.get("path", "")) for module in modules}
    if unknown := kinds.keys() - _MODULES:
        raise BadCheckpoint(f"modules.json has a module that is not supported: {', '.join(sorted(unknown))}")
    if "Pooling" not in kinds:
        raise BadCheckpoint("modules.json has no pooling module")
    if not re.fullmatch(r"\w[\w.-]*", kinds["Pooling"]):
        raise BadCheckpoint(f"modules.json names a folder {kinds['Pooling'][:80]!r}")
    pooling = Fields(read_json(folder / kinds["Pooling"], "config.json"), f"{kinds['Pooling']}/config.json")
    modes = {key: value for key, value in pooling.values.items() if key.startswith("pooling_mode_") and value}
    if "pooling_mode" in pooling.values:  # newer files name the mode instead
        modes = {
            {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens"}.get(
                str(pooling.values["pooling_mode"]), f"pooling_mode_{pooling.values['pooling_mode']}"
            ): True
        }
    known = [_POOLING[key] for key in modes if key in _POOLING]
    if len(modes) != 1 or not known:
        raise BadCheckpoint(f"{pooling.where}: supported is one of {', '.join(_POOLING)}, not {', '.join(modes)}")
    return known[0], "Normalize" in kinds
