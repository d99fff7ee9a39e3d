"""Reads the tokenizer of a Hugging Face model folder: tokenizer.json and the settings files next to it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers import AddedToken

from emberline.text.tokenizers.gguf_tokenizer import KNOWN_REGEXES
from emberline.text.tokenizers.tokenizer import Parts, PrefixSpace, Spelling
from emberline.weights.model_config import BadCheckpoint

MAX_JSON_BYTES = 256 << 20
Json = Mapping[str, Any]


class _Pipeline(msgspec.Struct):
    """The parts of tokenizer.json that are read here; the vocabulary is not."""

    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None


def read_json(path: Path) -> Json:
    """A JSON object; empty if the file does not exist."""
    value = _decode(path, Any) if path.is_file() else {}
    if not isinstance(value, dict):
        raise BadCheckpoint(f"{path.name} is not a JSON object")
    return value


def hf_parts(folder: Path, settings: Json) -> Parts:
    """`settings` is the folder's tokenizer_config.json."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise BadCheckpoint(f"{folder.name} has no tokenizer.json; convert its tokenizer, or use a GGUF file")
    pipeline: _Pipeline = _decode(path, _Pipeline)
    try:
        whole = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise BadCheckpoint(f"tokenizer.json cannot be read: {error}") from None
    added = {token_id: _raw(token) for token_id, token in sorted(whole.get_added_tokens_decoder().items())}
    spelling, prefix_space = _spelling(pipeline)
    bos_id, add_bos = _beginning(whole, settings)
    return Parts(
        model=whole.model,
        normalizer=whole.normalizer,
        pre_tokenizer=whole.pre_tokenizer,
        added=added,
        spelling=spelling,
        vocab_size=max([whole.get_vocab_size(), *(token_id + 1 for token_id in added)]),
        bos_id=bos_id,
        add_bos=add_bos,
        prefix_space=prefix_space,
        uncuttable="" if spelling == "bytelevel" and _cuts_words(pipeline) else None,
    )


def token_text(settings: Json, name: str) -> str | None:
    """The text of a token in a settings file: a string, or an object that contains one."""
    value = settings.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _decode(path: Path, kind: Any) -> Any:
    if path.stat().st_size > MAX_JSON_BYTES:
        raise BadCheckpoint(f"{path.name} is larger than {MAX_JSON_BYTES >> 20} MiB")
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadCheckpoint(f"{path.name} cannot be read: {error}") from None


def _raw(token: AddedToken) -> AddedToken:
    """Special tokens are matched in raw text, not in normalized text: otherwise a mark could not hide them."""
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized and not token.special,
        special=token.special,
    )


def _spelling(pipeline: _Pipeline) -> tuple[Spelling, PrefixSpace]:
    steps = {step["type"]: step for step in _steps(pipeline.decoder, "decoders")}
    if "ByteLevel" in steps:
        return "bytelevel", "never"
    metaspace = steps.get("Metaspace") or next(
        (step for step in _steps(pipeline.pre_tokenizer, "pretokenizers") if step["type"] == "Metaspace"), None
    )
    if metaspace is None and "Replace" not in steps:
        raise BadCheckpoint(f"tokenizer.json has an unsupported decoder: {', '.join(steps) or 'none'}")
    if "Metaspace" not in steps and "Strip" not in steps:
        return "metaspace", "never"
    schemes: dict[str, PrefixSpace] = {"never": "never", "first": "first"}
    return "metaspace", schemes.get((metaspace or {}).get("prepend_scheme", ""), "always")


def _cuts_words(pipeline: _Pipeline) -> bool:
    """True if the word cache is exact: every step of the pipeline is one whose behavior at a single space is known."""
    if any(step["type"] != "NFC" for step in _steps(pipeline.normalizer, "normalizers")):
        return False
    return all(_known(step) for step in _steps(pipeline.pre_tokenizer, "pretokenizers"))


def _known(step: dict[str, Any]) -> bool:
    if step["type"] == "Split":
        isolated = step.get("behavior") == "Isolated" and not step.get("invert")
        return isolated and step.get("pattern", {}).get("Regex") in KNOWN_REGEXES
    return step["type"] == "Digits" or (step["type"] == "ByteLevel" and not step.get("add_prefix_space", True))


def _steps(component: dict[str, Any] | None, inner: str) -> Iterator[dict[str, Any]]:
    """The steps of a component, with sequences flattened."""
    if component is None:
        return
    if component.get("type") == "Sequence":
        for step in component.get(inner, ()):
            yield from _steps(step, inner)
    else:
        yield {"type": "", **component}


def _beginning(whole: tokenizers.Tokenizer, settings: Json) -> tuple[int | None, bool]:
    """The beginning-of-sequence token, and whether sequences begin with it: as in the settings or the template."""
    text = token_text(settings, "bos_token")
    bos_id = whole.token_to_id(text) if text is not None else None
    template = whole.encode("", add_special_tokens=True).ids
    stated = settings.get("add_bos_token")
    if bos_id is None and template:
        bos_id = template[0]
    return bos_id, stated if isinstance(stated, bool) else bool(template) and template[0] == bos_id
