"""The deprecated `functions` and `function_call`: tools by their older names, answered by those."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from emberline.api.tools import MAX_TOOLS, DeclaredFunction, FunctionName, Toolset, check_unique, declare, require
from emberline.protocol.request import ToolChoice

Functions = Annotated[list[DeclaredFunction], Meta(max_length=MAX_TOOLS)]
FunctionPick = Literal["auto", "none"] | FunctionName


def functions_as_tools(functions: list[DeclaredFunction], pick: FunctionPick | None) -> Toolset:
    where = tuple(f"functions[{i}]" for i in range(len(functions)))
    tools = tuple(
        declare(function.name, function.description, function.parameters, function.strict, here)
        for function, here in zip(functions, where, strict=True)
    )
    given = Toolset(tools, where=where)
    check_unique(given)
    if isinstance(pick, FunctionName):
        return require(given, pick.name, "function_call")
    return msgspec.structs.replace(given, choice=ToolChoice("none" if pick == "none" else "auto"))
