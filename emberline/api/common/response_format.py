"""What the reply's text must be: OpenAI's `response_format`, and the extras that vLLM's clients send."""

from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from emberline.api.http.body import UnsupportedField, refuse_unsupported
from emberline.protocol.errors import BadInput
from emberline.protocol.request import OutputFormat

_ENVELOPE = {"name", "description", "schema", "strict"}

Schema = dict[str, Any] | bool
Choices = Annotated[list[str], Meta(min_length=1)]


class ResponseFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None  # the schema itself, or OpenAI's {name, schema, strict} around it
    schema: Schema | None = None  # where others put it


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


class Asked(NamedTuple):
    """An output format, and the field that asked for it."""

    format: OutputFormat | None
    field: str


class Constrained(msgspec.Struct, kw_only=True):
    """The fields that say what the text must be. At most one of them may."""

    response_format: ResponseFormat | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: UnsupportedField = None
    structured_outputs: StructuredOutputs | None = None

    def output(self) -> Asked:
        asked = _asked("guided_", self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        if self.response_format is not None and (found := of_response_format(self.response_format)).format:
            asked.append(found)
        if (extra := self.structured_outputs) is not None:
            where = "structured_outputs."
            refuse_unsupported(extra, where)
            asked += _asked(where, extra.json, extra.regex, extra.choice, extra.grammar)
            if extra.json_object:
                asked.append(Asked(OutputFormat("json_object"), where + "json_object"))
        if len(asked) > 1:
            first, second = asked[0].field, asked[1].field
            raise BadInput(f"`{first}` and `{second}` both say what the text must be; send one", param=second)
        return asked[0] if asked else Asked(None, "response_format")


def of_response_format(given: ResponseFormat, where: str = "response_format") -> Asked:
    if given.type == "text":
        return Asked(None, where)
    schema, field = given.schema, f"{where}.schema"
    if schema is None and given.json_schema is not None:
        schema, field = bare(given.json_schema, f"{where}.json_schema"), f"{where}.json_schema"
        if schema is not given.json_schema:
            field += ".schema"
    if schema is not None:
        return Asked(OutputFormat("json_schema", schema), field)
    if given.type == "json_schema" and given.json_schema is None:
        raise BadInput(f"`{where}` has no schema; send one as `{where}.json_schema`", param=f"{where}.json_schema")
    return Asked(OutputFormat("json_object"), where)


def bare(given: Schema, where: str) -> Schema | None:
    """A schema without OpenAI's envelope; None: the envelope holds none, which leaves any object."""
    if not isinstance(given, dict) or not given.keys() <= _ENVELOPE:
        return given
    schema: Schema | None = given.get("schema")
    if not isinstance(schema, dict | bool | None):
        raise BadInput(f"`{where}.schema` is a schema: an object or a boolean", param=f"{where}.schema")
    if schema is not None:
        return schema
    return None if isinstance(given.get("name"), str) else given


def _asked(
    where: str, json: Schema | str | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> list[Asked]:
    asked: list[Asked] = []
    if json is not None:
        asked.append(Asked(OutputFormat("json_schema", _schema(json, where + "json")), where + "json"))
    if regex is not None:
        asked.append(Asked(OutputFormat("regex", regex), where + "regex"))
    if choice is not None:
        asked.append(Asked(OutputFormat("choice", choice), where + "choice"))
    if grammar is not None:
        asked.append(Asked(OutputFormat("grammar", grammar), where + "grammar"))
    return asked


def _schema(given: Schema | str, where: str) -> Schema:
    """A schema that may have been sent as its JSON text."""
    if not isinstance(given, str):
        return given
    try:
        schema: Schema = msgspec.json.decode(given, type=dict[str, Any] | bool)
    except (msgspec.DecodeError, RecursionError) as bad:
        raise BadInput(f"`{where}` is not the JSON text of a schema: {bad}", param=where) from None
    return schema
