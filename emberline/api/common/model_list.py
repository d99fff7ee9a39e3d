"""Model cards in the model lists of the Workers AI, OpenAI, OpenRouter and Ollama APIs."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from emberline.catalog.model_card import (
    PREDICTION,
    SPEECH_RECOGNITION,
    TASKS,
    TEXT_EMBEDDINGS,
    TEXT_GENERATION,
    HubSource,
    ModelCard,
    ModelSource,
    task,
)
from emberline.protocol.price import MICRO, NANO, UNITS, format_amount

_SOURCES = {"@cf": 1, "@hf": 2}
_LOCAL_SOURCE = 3
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty"),
    *("presence_penalty", "stop", "seed", "max_tokens", "logit_bias"),
)
HUB_PREFIX = "hf:"
_SIZE = re.compile(r"(?:^|[-_x])([0-9]{1,4}(?:\.[0-9]{1,3})?[bm])(?![a-z0-9])")
_FLAGS = ("function_calling", "reasoning", "vision", "beta")


def source(card: ModelCard) -> int:
    return _SOURCES.get(card.id.partition("/")[0], _LOCAL_SOURCE)


def cloudflare_model(card: ModelCard, state: str = "", problem: str = "") -> dict[str, Any]:
    """`state` and `problem`: see `openai_model`."""
    return (
        ({"state": state} if state else {})
        | ({"problem": problem} if problem else {})
        | {
            "id": card.uuid,
            "source": source(card),
            "name": card.id,
            "description": card.description,
            "task": (task(card.task) or TASKS[0])._asdict(),
            "created_at": card.created_at,
            "tags": [],
            "properties": [{"property_id": name, "value": value} for name, value in _properties(card).items() if value],
        }
    )


def _properties(card: ModelCard) -> dict[str, Any]:
    """Workers AI's properties: every value is text except the price, and what is false or unknown is left out."""
    can = card.capabilities
    flags = {name: "true" for name in _FLAGS if getattr(can, name)}
    return {
        "price": _prices(card),
        "context_window": str(card.context_window),
        "max_input_tokens": str(can.max_input_tokens or ""),
        "output_dimensions": str(can.output_dimensions or ""),
        "languages": ", ".join(can.languages),
        "terms": card.license,
        "async_queue": "true" if card.task in (TEXT_GENERATION, PREDICTION) else "",
        "planned_deprecation_date": card.deprecation_date,
        **flags,
    }


def _prices(card: ModelCard) -> list[dict[str, Any]]:
    if (price := card.price) is None:
        return []
    rates = {
        "per M input tokens": price.input / MICRO,
        "per M output tokens": price.output / MICRO,
        "per M cached input tokens": price.cached_input / MICRO,
        "per audio minute": price.audio_second * 60 / NANO,
        "per second": price.second / NANO,
        "per prediction": price.prediction / MICRO,
    }
    return [{"unit": unit, "price": rate, "currency": "USD"} for unit, rate in rates.items() if rate]


def listed_names(cards: Sequence[ModelCard]) -> list[tuple[str, ModelCard]]:
    """Every name that a request may use, with its model: all ids, then the aliases and short names."""
    names = {card.id: card for card in cards}
    for card in cards:
        for alias in card.aliases:
            if not alias.startswith(HUB_PREFIX):  # where it can be pulled from
                names.setdefault(alias, card)
    return list(names.items())


def openai_model(card: ModelCard, state: str = "", name: str = "", problem: str = "") -> dict[str, Any]:
    """The model under its id, or under another of its names; `state` and `problem`: as `Models` has them."""
    return (
        ({"state": state} if state else {})
        | ({"problem": problem} if problem else {})
        | {
            "id": name or card.id,
            "root": card.id,  # vLLM's field for the model behind a name
            "aliases": list(card.aliases),
            "object": "model",
            "created": _unix(card),
            "owned_by": card.author,
            "context_window": card.context_window,
            "max_model_len": card.context_window,  # vLLM's name
            "default_parameters": card.defaults.given,
            "task": card.task,
            "capabilities": msgspec.to_builtins(card.capabilities),
            "license": card.license or None,
            "pricing": _pricing(card),
            "deprecation_date": card.deprecation_date or None,
            # Anthropic's fields: both APIs list models at the same path.
            "type": "model",
            "display_name": card.id.rpartition("/")[2],
            "created_at": _rfc3339(card),
        }
    )


def openrouter_model(card: ModelCard) -> dict[str, Any]:
    generates, can = card.task == TEXT_GENERATION, card.capabilities
    inputs = {SPEECH_RECOGNITION: ["audio"]}.get(card.task, ["text", *(["image"] if can.vision else [])])
    features = ["tools", "json_mode", "structured_outputs", "logprobs", *(["reasoning"] if can.reasoning else [])]
    free = {"prompt": "0", "completion": "0", "input_cache_read": "0", "request": "0", "image": "0"}
    return {
        "id": card.id,
        "name": card.id,
        "created": _unix(card),
        "description": card.description,
        "input_modalities": inputs,
        "output_modalities": ["embeddings" if card.task == TEXT_EMBEDDINGS else "text"],
        "context_length": card.context_window,
        "max_output_length": card.context_window if generates else 0,
        "pricing": free | (_pricing(card) or {}),
        "supported_sampling_parameters": list(_SAMPLING) if generates else [],
        "default_parameters": card.defaults.given,
        "supported_features": features if generates else [],
        **({"deprecation_date": card.deprecation_date} if card.deprecation_date else {}),
    }


def ollama_model(card: ModelCard, name: str = "") -> dict[str, Any]:
    """The model under its id, or under another of its names."""
    return {
        "name": name or card.id,
        "model": name or card.id,
        "modified_at": _rfc3339(card),
        "size": card.weight_bytes,
        "digest": card.digest,
        "details": ollama_details(card),
    }


def ollama_details(card: ModelCard) -> dict[str, Any]:
    """Facts of the weights. The number of parameters is the one in the model's name where its card does not count
    them."""
    named = _SIZE.search(card.id.rpartition("/")[2].lower())
    return {
        "parent_model": "",
        "format": "gguf" if _is_gguf(card.source) else "safetensors",
        "family": card.architecture,
        "families": [card.architecture] if card.architecture else [],
        "parameter_size": _size(card.n_parameters) or (named[1].upper() if named else ""),
        "quantization_level": card.quantization or "unknown",
    }


def _size(n_parameters: int) -> str:
    """The number as Ollama writes it: "134.52M", "8.0B". Empty for 0."""
    if n_parameters >= 1_000_000_000:
        return f"{n_parameters / 1e9:.1f}B"
    return f"{n_parameters / 1e6:.2f}M" if n_parameters else ""


def _is_gguf(source: ModelSource) -> bool:
    path = source.file if isinstance(source, HubSource) else getattr(source, "path", "")
    return (path or "").endswith(".gguf")


def _pricing(card: ModelCard) -> dict[str, str] | None:
    """Prices of one token, image or second of audio, as exact decimals. Returns None if the card has no price."""
    if (price := card.price) is None:
        return None
    rates = {
        "prompt": format_amount(price.input),  # micro-units per million tokens are pico-units per token
        "completion": format_amount(price.output),
        "input_cache_read": format_amount(price.cached_input),
        "image": format_amount(price.image, MICRO),
    }
    further = {name: UNITS[name] for name in ("audio_second", "second", "prediction") if getattr(price, name)}
    return rates | {name: format_amount(getattr(price, name), unit.scale) for name, unit in further.items()}


def _rfc3339(card: ModelCard) -> str:
    return datetime.fromtimestamp(_unix(card), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _unix(card: ModelCard) -> int:
    """Unix time of `created_at`, which is UTC."""
    return int(datetime.fromisoformat(card.created_at).replace(tzinfo=UTC).timestamp())
