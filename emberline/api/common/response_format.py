"""Structured output: OpenAI's `response_format`, and the equivalents that vLLM clients send."""

from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from emberline.api.common.sampling_fields import SamplingFields
from emberline.api.common.unsupported_fields import UnsupportedField, refuse_unsupported
from emberline.protocol.errors import BadInput
from emberline.protocol.request import OutputFormat

_ENVELOPE = {"name", "description", "schema", "strict"}

Schema = dict[str, Any] | bool
Choices = Annotated[list[str], Meta(min_length=1)]


class ResponseFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None  # the schema itself, or OpenAI's {name, schema, strict} around it
    schema: Schema | None = None  # where some clients put it


class StructuredOutputs(msgspec.Struct):
    """vLLM's newer form of the guided_* fields."""

    json: Schema | str | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: UnsupportedField = None
    whitespace_pattern: UnsupportedField = None
    disable_additional_properties: UnsupportedField = None


class RequestedFormat(NamedTuple):
    format: OutputFormat | None
    field: str  # where the client asked for it


class GenerationFields(SamplingFields, kw_only=True):
    """A request body that asks for generated text. At most one of the fields that constrain it may be set."""

    response_format: ResponseFormat | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: UnsupportedField = None
    structured_outputs: StructuredOutputs | None = None

    def output(self) -> RequestedFormat:
        requested = _guided("guided_", self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        if self.response_format is not None and (found := _response_format(self.response_format)).format:
            requested.append(found)
        if (extra := self.structured_outputs) is not None:
            prefix = "structured_outputs."
            refuse_unsupported(extra, prefix)
            requested += _guided(prefix, extra.json, extra.regex, extra.choice, extra.grammar)
            if extra.json_object:
                requested.append(RequestedFormat(OutputFormat("json_object"), prefix + "json_object"))
        if len(requested) > 1:
            first, second = requested[0].field, requested[1].field
            raise BadInput(f"`{first}` and `{second}` both constrain the output; send one", param=second)
        return requested[0] if requested else RequestedFormat(None, "response_format")


def _response_format(given: ResponseFormat) -> RequestedFormat:
    if given.type == "text":
        return RequestedFormat(None, "response_format")
    schema, field = given.schema, "response_format.schema"
    if schema is None and given.json_schema is not None:
        schema, field = _without_envelope(given.json_schema), "response_format.json_schema"
        if schema is not given.json_schema:
            field += ".schema"
    if schema is not None:
        return RequestedFormat(OutputFormat("json_schema", schema), field)
    if given.type == "json_schema" and given.json_schema is None:
        raise BadInput(
            "`response_format` has no schema; send one as `response_format.json_schema`",
            param="response_format.json_schema",
        )
    return RequestedFormat(OutputFormat("json_object"), "response_format")


def _without_envelope(given: Schema) -> Schema | None:
    """The schema inside OpenAI's envelope; None if the envelope has none, which allows any object."""
    if not isinstance(given, dict) or not given.keys() <= _ENVELOPE:
        return given
    schema: Schema | None = given.get("schema")
    if not isinstance(schema, dict | bool | None):
        field = "response_format.json_schema.schema"
        raise BadInput(f"`{field}` must be a schema: an object or a boolean", param=field)
    if schema is not None:
        return schema
    return None if isinstance(given.get("name"), str) else given


def _guided(
    prefix: str, json: Schema | str | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> list[RequestedFormat]:
    requested: list[RequestedFormat] = []
    if json is not None:
        requested.append(RequestedFormat(OutputFormat("json_schema", _schema(json, prefix + "json")), prefix + "json"))
    if regex is not None:
        requested.append(RequestedFormat(OutputFormat("regex", regex), prefix + "regex"))
    if choice is not None:
        requested.append(RequestedFormat(OutputFormat("choice", choice), prefix + "choice"))
    if grammar is not None:
        requested.append(RequestedFormat(OutputFormat("grammar", grammar), prefix + "grammar"))
    return requested


def _schema(given: Schema | str, field: str) -> Schema:
    """A schema, which may have been sent as JSON text."""
    if not isinstance(given, str):
        return given
    try:
        schema: Schema = msgspec.json.decode(given, type=dict[str, Any] | bool)
    except (msgspec.DecodeError, RecursionError) as bad:
        raise BadInput(f"`{field}` is not the JSON text of a schema: {bad}", param=field) from None
    return schema
