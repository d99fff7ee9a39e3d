"""The objects of the Open Responses specification (2026-04-24) as JSON schemas: required fields and their types."""

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def fields(optional: dict[str, Schema] | None = None, /, **required: Schema) -> Schema:
    properties = {name.rstrip("_"): schema for name, schema in required.items()}
    return {"type": "object", "properties": properties | (optional or {}), "required": list(properties)}


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


_STATUS = one_of("in_progress", "completed", "incomplete")
_PART = {
    "oneOf": [
        fields({"logprobs": array(OBJECT)}, type=one_of("output_text"), text=TEXT, annotations=array(OBJECT)),
        fields(type=one_of("input_text", "summary_text", "reasoning_text", "text"), text=TEXT),
        fields(type=one_of("refusal"), refusal=TEXT),
    ]
}
_MESSAGE = fields(
    {"phase": one_of("commentary", "final_answer")},
    type=one_of("message"),
    id=TEXT,
    status=_STATUS,
    role=one_of("user", "assistant", "system", "developer"),
    content=array(_PART),
)
_CALL = fields(type=one_of("function_call"), id=TEXT, call_id=TEXT, name=TEXT, arguments=TEXT, status=_STATUS)
_RESULT = fields(
    type=one_of("function_call_output"), id=TEXT, call_id=TEXT, output={"type": ["string", "array"]}, status=_STATUS
)
_REASONING = fields(
    {"content": array(_PART), "encrypted_content": TEXT}, type=one_of("reasoning"), id=TEXT, summary=array(_PART)
)
_COMPACTION = fields(type=one_of("compaction"), id=TEXT, encrypted_content=TEXT)
ITEM = {"oneOf": [_MESSAGE, _CALL, _RESULT, _REASONING, _COMPACTION]}
USAGE = fields(
    input_tokens=INTEGER,
    output_tokens=INTEGER,
    total_tokens=INTEGER,
    input_tokens_details=fields(cached_tokens=INTEGER),
    output_tokens_details=fields(reasoning_tokens=INTEGER),
)
_TOOL = fields(
    type=one_of("function"),
    name=TEXT,
    description=nullable(TEXT),
    parameters=nullable(OBJECT),
    strict=nullable(BOOLEAN),
)
_FORMAT = {
    "oneOf": [
        fields(type=one_of("text", "json_object")),
        fields(
            type=one_of("json_schema"), name=TEXT, description=nullable(TEXT), schema_=nullable(OBJECT), strict=BOOLEAN
        ),
    ]
}
_TOOL_CHOICE = {
    "oneOf": [
        one_of("none", "auto", "required"),
        fields(type=one_of("function"), name=TEXT),
        fields(type=one_of("allowed_tools"), tools=array(OBJECT), mode=one_of("none", "auto", "required")),
    ]
}
RESPONSE = fields(
    id=TEXT,
    object=one_of("response"),
    created_at=INTEGER,
    completed_at=nullable(INTEGER),
    status=TEXT,
    incomplete_details=nullable(fields(reason=TEXT)),
    model=TEXT,
    previous_response_id=nullable(TEXT),
    instructions=nullable(TEXT),
    output=array(ITEM),
    error=nullable(fields(code=TEXT, message=TEXT)),
    tools=array(_TOOL),
    tool_choice=_TOOL_CHOICE,
    truncation=one_of("auto", "disabled"),
    parallel_tool_calls=BOOLEAN,
    text=fields({"verbosity": one_of("low", "medium", "high")}, format=_FORMAT),
    top_p=NUMBER,
    presence_penalty=NUMBER,
    frequency_penalty=NUMBER,
    top_logprobs=INTEGER,
    temperature=NUMBER,
    reasoning=nullable(fields(effort=nullable(TEXT), summary=nullable(TEXT))),
    usage=nullable(USAGE),
    max_output_tokens=nullable(INTEGER),
    max_tool_calls=nullable(INTEGER),
    store=BOOLEAN,
    background=BOOLEAN,
    service_tier=TEXT,
    metadata=OBJECT,
    safety_identifier=nullable(TEXT),
    prompt_cache_key=nullable(TEXT),
    user=nullable(TEXT),
)
COMPACTED = fields(
    id=TEXT, object=one_of("response.compaction"), output=array(ITEM), created_at=INTEGER, usage=USAGE
)  # fmt: skip

_AT = {"output_index": INTEGER, "item_id": TEXT}
_FIELDS: dict[str, dict[str, Schema]] = {
    "output_item.added": {"output_index": INTEGER, "item": ITEM},
    "output_item.done": {"output_index": INTEGER, "item": ITEM},
    "content_part.added": {**_AT, "content_index": INTEGER, "part": _PART},
    "content_part.done": {**_AT, "content_index": INTEGER, "part": _PART},
    "output_text.delta": {**_AT, "content_index": INTEGER, "delta": TEXT},
    "output_text.done": {**_AT, "content_index": INTEGER, "text": TEXT},
    # The names of OpenAI's API; earlier texts of the specification say `response.reasoning.delta`, its schemas these.
    "reasoning_text.delta": {**_AT, "content_index": INTEGER, "delta": TEXT},
    "reasoning_text.done": {**_AT, "content_index": INTEGER, "text": TEXT},
    "reasoning_summary_part.added": {**_AT, "summary_index": INTEGER, "part": _PART},
    "reasoning_summary_part.done": {**_AT, "summary_index": INTEGER, "part": _PART},
    "reasoning_summary_text.delta": {**_AT, "summary_index": INTEGER, "delta": TEXT},
    "reasoning_summary_text.done": {**_AT, "summary_index": INTEGER, "text": TEXT},
    "function_call_arguments.delta": {**_AT, "delta": TEXT},
    "function_call_arguments.done": {**_AT, "arguments": TEXT},
}
_SNAPSHOTS = ("created", "queued", "in_progress", "completed", "failed", "incomplete")
EVENTS: dict[str, Schema] = {
    f"response.{name}": fields(type=one_of(f"response.{name}"), sequence_number=INTEGER, **more)
    for name, more in {**_FIELDS, **{name: {"response": RESPONSE} for name in _SNAPSHOTS}}.items()
}
EVENTS["error"] = fields(
    sequence_number=INTEGER,
    error=fields(type=TEXT, code=nullable(TEXT), message=TEXT, param=nullable(TEXT)),
)
SOCKET_ERROR = fields(type=one_of("error"), status=INTEGER, error=fields(code=TEXT, message=TEXT))
