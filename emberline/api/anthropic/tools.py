"""Anthropic's tools, the choice among them, and its form of structured output."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from emberline.api.common.reasoning import Effort
from emberline.api.common.response_format import Asked
from emberline.api.common.tools import MAX_TOOLS, ToolName, Toolset, check_unique, declare, require
from emberline.protocol.errors import BadInput, Unsupported
from emberline.protocol.request import OutputFormat, ToolChoice


class CustomTool(msgspec.Struct):
    """A function of the caller's. Tools that Anthropic runs or defines itself have another type."""

    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: Annotated[str | None, Meta(extra_json_schema={"enum": ["custom", None]})] = None
    strict: bool | None = None


CustomTools = Annotated[list[CustomTool], Meta(max_length=MAX_TOOLS)]


class Pick(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputSchema(msgspec.Struct):
    schema: dict[str, Any]
    type: Literal["json_schema"] = "json_schema"


class OutputConfig(msgspec.Struct):
    effort: Effort | None = None
    format: OutputSchema | None = None


def toolset(tools: list[CustomTool] | None, pick: Pick | None) -> Toolset:
    where = tuple(f"tools[{i}]" for i in range(len(tools or ())))
    found = []
    for tool, here in zip(tools or (), where, strict=True):
        if tool.type not in (None, "custom"):
            raise Unsupported(f"`{here}`: tools of type {tool.type!r} are not supported", param=f"{here}.type")
        if tool.input_schema is None:
            raise BadInput(f"`{here}` needs an `input_schema`", param=f"{here}.input_schema")
        found.append(declare(tool.name, tool.description, tool.input_schema, tool.strict, here))
    given = Toolset(tuple(found), where=where)
    check_unique(given)
    if pick is None or pick.type in ("auto", "none"):
        return msgspec.structs.replace(given, choice=ToolChoice("none" if pick and pick.type == "none" else "auto"))
    if pick.type == "tool" and pick.name is None:
        raise BadInput("`tool_choice` of type `tool` needs a `name`", param="tool_choice.name")
    return require(given, pick.name if pick.type == "tool" else None)


def output(early: OutputSchema | None, config: OutputConfig | None) -> Asked:
    """`output_format` is the older place of what `output_config.format` says."""
    late = config.format if config else None
    if early is not None and late is not None:
        raise BadInput("`output_format` and `output_config.format` are the same; send one", param="output_format")
    schema, field = (late, "output_config.format.schema") if early is None else (early, "output_format.schema")
    return Asked(OutputFormat("json_schema", schema.schema) if schema else None, field)
