"""The Workers AI catalog: models, their schemas, tasks and authors.

Clients request pages until one is empty or short, so every list is paged and a page past the end is [].
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar

from emberline.api.common.model_list import cloudflare_model, openrouter_model, source
from emberline.api.http.exchange import HttpExchange, Reply, json_reply
from emberline.api.http.openapi import struct_schemas
from emberline.api.workers_ai.encode_request import OUTPUT_SCHEMAS, EncodeInput, encodes_text
from emberline.api.workers_ai.response_body import envelope
from emberline.api.workers_ai.run_request import RunRequest
from emberline.api.workers_ai.speech import OUTPUT_SCHEMA as SPEECH_OUTPUT
from emberline.api.workers_ai.speech import SpeechInput
from emberline.catalog.model_card import SPEECH_RECOGNITION, TASKS, ModelCard, authors, stable_uuid
from emberline.protocol.errors import BadInput

T = TypeVar("T")

DEFAULT_PER_PAGE = 50
MAX_PER_PAGE = 1000
MAX_PAGE = 1 << 31

PAGING = {
    "page": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE},
    "per_page": {"type": "integer", "minimum": 1, "maximum": MAX_PER_PAGE},
}
MODEL_FILTERS = {
    "author": {"type": "string"},
    "search": {"type": "string"},
    "task": {"type": "string"},
    "source": {"type": "integer", "minimum": 1, "maximum": 1000},
    "hide_experimental": {"type": "boolean"},
    "format": {"enum": ["openrouter"]},
} | PAGING
MODEL_NAME = {"model": {"type": "string", "minLength": 1}}
_USAGE = {
    "type": "object",
    "properties": {
        "prompt_tokens": {"type": "integer"},
        "completion_tokens": {"type": "integer"},
        "total_tokens": {"type": "integer"},
        "prompt_tokens_details": {
            "type": "object",
            "properties": {
                "cached_tokens": {"type": "integer"},
                "cached_tokens_by_tier": {"type": "object", "additionalProperties": {"type": "integer"}},
            },
        },
    },
}
_TOOL_CALL = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "arguments": {"type": "object"}, "id": {"type": "string"}},
    "required": ["name", "arguments"],
}
_OUTPUT = {
    "oneOf": [
        {
            "type": "object",
            "contentType": "application/json",
            "properties": {
                "response": {"type": ["string", "object", "array", "number", "boolean", "null"]},
                "reasoning_content": {"type": "string"},
                "tool_calls": {"type": "array", "items": _TOOL_CALL},
                "finish_reason": {"enum": ["length", "tool_calls"]},
                "usage": _USAGE,
            },
            "required": ["response"],
        },
        {"type": "string", "contentType": "text/event-stream", "format": "binary"},
    ]
}


_OUTPUTS = {**OUTPUT_SCHEMAS, SPEECH_RECOGNITION: SPEECH_OUTPUT}


async def models(call: HttpExchange) -> Reply:
    call.int_param("source", 1, 1, 1000)
    hides_beta = call.bool_param("hide_experimental", default=False)
    cards = [card for card in call.models() if not (hides_beta and card.capabilities.beta)]
    found = [card for card in cards if _matches(card, call.query)]
    if "format" not in call.query:
        models, caller = call.service.models, call.principal
        shown = [cloudflare_model(card, models.state(card.id), models.problem(card, caller)) for card in found]
        return paged_reply(call, shown)
    call.enum_param("format", ("openrouter",), "openrouter")
    rows = _page(call, [openrouter_model(card) for card in found])
    return json_reply(envelope(rows, data=rows))


async def schema(call: HttpExchange) -> Reply:
    name = call.query.get("model")
    if not name:
        raise BadInput("the query must name a `model`", param="model")
    card = call.service.models.find(name, call.principal.account)
    if (predictor := card.predictor) is not None:
        schemas = {"input": predictor.input, "output": predictor.output, "streams": predictor.streams}
        return json_reply(envelope(schemas))
    body = SpeechInput if card.task == SPEECH_RECOGNITION else EncodeInput if encodes_text(card) else RunRequest
    return json_reply(envelope({"input": _input_schema(body), "output": _OUTPUTS.get(card.task, _OUTPUT)}))


async def tasks(call: HttpExchange) -> Reply:
    return paged_reply(call, [row._asdict() for row in TASKS])


async def list_authors(call: HttpExchange) -> Reply:
    return paged_reply(call, [row._asdict() for row in authors(call.models())])


@cache
def _input_schema(body: type[Any]) -> dict[str, Any]:
    """Move the schema's own definition to the top level, where clients look for `type` and `properties`."""
    (reference,), definitions = struct_schemas([body], "#/$defs/{name}")
    own = definitions.pop(reference["$ref"].rpartition("/")[2])
    return {**own, "$defs": definitions}


def _matches(card: ModelCard, query: dict[str, str]) -> bool:
    words = query.get("search", "").lower()
    texts = (card.id, card.description, *card.aliases)
    return (
        query.get("author", card.author).lower() == card.author.lower()
        and query.get("task", card.task).lower() in (card.task.lower(), stable_uuid("task", card.task))
        and query.get("source", str(source(card))) == str(source(card))
        and any(words in text.lower() for text in texts)
    )


def paged_reply(call: HttpExchange, rows: Sequence[dict[str, Any]]) -> Reply:
    page = _page(call, rows)
    per_page = _per_page(call)
    info = {
        "count": len(page),
        "page": call.int_param("page", 1, 1, MAX_PAGE),
        "per_page": per_page,
        "total_count": len(rows),
        "total_pages": -(-len(rows) // per_page),
    }
    return json_reply(envelope(page, result_info=info))


def _page(call: HttpExchange, rows: Sequence[T]) -> Sequence[T]:
    per_page = _per_page(call)
    first = (call.int_param("page", 1, 1, MAX_PAGE) - 1) * per_page
    return rows[first : first + per_page]


def _per_page(call: HttpExchange) -> int:
    return call.int_param("per_page", DEFAULT_PER_PAGE, 1, MAX_PER_PAGE)
