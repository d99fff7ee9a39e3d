"""JSON schemas of replies, for the OpenAPI document: of each route the fields on which clients can rely."""

from typing import Any

Json = dict[str, Any]

_TEXT: Json = {"type": "string"}
_NAME: Json = {"type": ["string", "null"]}
_COUNT: Json = {"type": "integer", "minimum": 0}
_TRUE_OR_FALSE: Json = {"type": "boolean"}
_ANY: Json = {"type": "object"}
_ROWS: Json = {"type": "array", "items": _ANY}


def _object(**fields: Json) -> Json:
    return {"type": "object", "properties": fields, "required": list(fields)}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _constant(value: str) -> Json:
    return {"const": value}


_USAGE = _object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT)
_FINISH: Json = {"enum": ["stop", "length", "tool_calls", "function_call", "content_filter"]}
_FUNCTION = _object(name=_TEXT, arguments=_TEXT)
_CALL = _object(id=_TEXT, type=_constant("function"), function=_FUNCTION)
_ASSISTANT = _object(role=_constant("assistant"), content=_NAME)
_ASSISTANT["properties"] |= {"reasoning_content": _TEXT, "tool_calls": _list(_CALL), "function_call": _FUNCTION}
_CHOICE = _object(index=_COUNT, message=_ASSISTANT, finish_reason=_FINISH)
_TEXT_CHOICE = _object(index=_COUNT, text=_TEXT, finish_reason=_FINISH)
_VECTOR: Json = {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string"}]}
_EMBEDDING = _object(object=_constant("embedding"), index=_COUNT, embedding=_VECTOR)
_PROMPT_USAGE = _object(prompt_tokens=_COUNT, total_tokens=_COUNT)
_RESULT = _object(index=_COUNT, relevance_score={"type": "number"})
_MODEL = _object(id=_TEXT, object=_constant("model"), created=_COUNT, owned_by=_TEXT)
_STATUS: Json = {"enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]}
_PAGE = _object(object=_constant("list"), data=_ROWS, has_more=_TRUE_OR_FALSE)
_MESSAGE_USAGE = _object(input_tokens=_COUNT, output_tokens=_COUNT)
_MESSAGE_PAGE = _object(data=_ROWS, has_more=_TRUE_OR_FALSE, first_id=_NAME, last_id=_NAME)
_OLLAMA_REPLY = {"model": _TEXT, "created_at": _TEXT, "done": _TRUE_OR_FALSE}

COMPONENTS: dict[str, Json] = {
    "ChatCompletion": _object(
        id=_TEXT, object=_constant("chat.completion"), created=_COUNT, model=_TEXT, choices=_list(_CHOICE), usage=_USAGE
    ),
    "Completion": _object(
        id=_TEXT,
        object=_constant("text_completion"),
        created=_COUNT,
        model=_TEXT,
        choices=_list(_TEXT_CHOICE),
        usage=_USAGE,
    ),
    "Embeddings": _object(object=_constant("list"), data=_list(_EMBEDDING), model=_TEXT, usage=_PROMPT_USAGE),
    "Ranking": _object(object=_constant("list"), model=_TEXT, results=_list(_RESULT), usage=_PROMPT_USAGE),
    "Model": _MODEL,
    "ModelList": _object(object=_constant("list"), data=_list(_MODEL)),
    "Response": _object(
        id=_TEXT, object=_constant("response"), created_at=_COUNT, status=_STATUS, model=_TEXT, output=_ROWS
    ),
    "InputTokens": _object(object=_constant("response.input_tokens"), input_tokens=_COUNT),
    "Page": _PAGE,
    "Message": _object(
        id=_TEXT,
        type=_constant("message"),
        role=_constant("assistant"),
        model=_TEXT,
        content=_list(_object(type=_TEXT)),
        stop_reason=_NAME,
        usage=_MESSAGE_USAGE,
    ),
    "MessageTokens": _object(input_tokens=_COUNT),
    "MessageBatch": _object(id=_TEXT, type=_constant("message_batch"), processing_status=_TEXT, request_counts=_ANY),
    "MessagePage": _MESSAGE_PAGE,
    "File": _object(id=_TEXT, object=_constant("file"), bytes=_COUNT, filename=_TEXT, purpose=_TEXT),
    "Batch": _object(id=_TEXT, object=_constant("batch"), endpoint=_TEXT, status=_TEXT, request_counts=_ANY),
    "Deletion": _object(id=_TEXT),
    "OllamaChatReply": _object(**_OLLAMA_REPLY, message=_object(role=_constant("assistant"), content=_TEXT)),
    "OllamaReply": _object(**_OLLAMA_REPLY, response=_TEXT),
    "OllamaVectors": _object(model=_TEXT, embeddings=_list(_list({"type": "number"}))),
    "OllamaVector": _object(embedding=_list({"type": "number"})),
    "OllamaModels": _object(models=_list(_object(name=_TEXT, model=_TEXT, size=_COUNT, digest=_TEXT, details=_ANY))),
    "OllamaModel": _object(details=_ANY, model_info=_ANY, capabilities=_list(_TEXT)),
    "OllamaStatus": _object(status=_TEXT),
    "OllamaVersion": _object(version=_TEXT),
    "Transcription": _object(text=_TEXT),
}

# By method and path; under `{A}/v1` as under `/v1`. Other routes answer with an object, or with Cloudflare's envelope.
_BY_ROUTE = {
    "POST /v1/chat/completions": "ChatCompletion",
    "POST /v1/completions": "Completion",
    "POST /v1/embeddings": "Embeddings",
    "POST /v1/rerank": "Ranking",
    "POST /v2/rerank": "Ranking",
    "POST /v1/audio/transcriptions": "Transcription",
    "POST /v1/audio/translations": "Transcription",
    "GET /v1/models": "ModelList",
    "GET /v1/models/{model}": "Model",
    "POST /v1/responses": "Response",
    "GET /v1/responses/{id}": "Response",
    "POST /v1/responses/{id}/cancel": "Response",
    "POST /v1/responses/input_tokens": "InputTokens",
    "DELETE /v1/responses/{id}": "Deletion",
    "GET /v1/responses/{id}/input_items": "Page",
    "POST /v1/files": "File",
    "GET /v1/files/{id}": "File",
    "DELETE /v1/files/{id}": "Deletion",
    "GET /v1/files": "Page",
    "POST /v1/batches": "Batch",
    "GET /v1/batches/{id}": "Batch",
    "POST /v1/batches/{id}/cancel": "Batch",
    "GET /v1/batches": "Page",
    "POST /v1/messages": "Message",
    "POST /v1/messages/count_tokens": "MessageTokens",
    "POST /v1/messages/batches": "MessageBatch",
    "GET /v1/messages/batches/{id}": "MessageBatch",
    "POST /v1/messages/batches/{id}/cancel": "MessageBatch",
    "GET /v1/messages/batches": "MessagePage",
    "POST /api/chat": "OllamaChatReply",
    "POST /api/generate": "OllamaReply",
    "POST /api/embed": "OllamaVectors",
    "POST /api/embeddings": "OllamaVector",
    "GET /api/tags": "OllamaModels",
    "POST /api/show": "OllamaModel",
    "POST /api/pull": "OllamaStatus",
    "GET /api/version": "OllamaVersion",
}


def reply_schema(method: str, path: str, *, enveloped: bool) -> Json:
    """Schema of a JSON reply that is no error. `enveloped`: in Cloudflare's envelope alone."""
    own = path[path.index("/v1/", 4) :] if path.startswith("/client/") and "/v1/" in path[4:] else path
    own = own.removeprefix("/v1") if own.startswith("/v1/v1/") else own
    if (name := _BY_ROUTE.get(f"{method} {own}")) is not None:
        return {"$ref": f"#/components/schemas/{name}"}
    return {"$ref": "#/components/schemas/Envelope"} if enveloped else {"type": "object"}
