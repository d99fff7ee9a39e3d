"""The families whose calls we read and write, and how a model's template tells that it is of one."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from emberline.text.tool_calls.formats import ToolForm

HERMES = ToolForm(
    family="hermes",
    call='<tool_call>\n{"name": "',
    arguments='", "arguments": ',
    end="}\n</tool_call>",
    between="\n",
    openings=("<tool_call>",),
    marks=("<tool_call>", "</tool_call>"),
)
LLAMA3 = ToolForm(
    family="llama3",
    call='{"name": "',
    arguments='", "parameters": ',
    end="}",
    between="; ",
    openings=('{"name": "',),
    alone=True,
    parallel=False,  # its templates refuse more than one
)
MISTRAL_LIST = ToolForm(
    family="mistral",
    begin="[TOOL_CALLS][",
    call='{"name": "',
    arguments='", "arguments": ',
    end="}",
    between=", ",
    close="]",
    openings=("[TOOL_CALLS]",),
    ids="mistral",
    marks=("[TOOL_CALLS]",),
)
MISTRAL = ToolForm(
    family="mistral-args",
    call="[TOOL_CALLS]",
    arguments="[ARGS]",
    end="",
    openings=("[TOOL_CALLS]",),
    ids="mistral",
    marks=("[TOOL_CALLS]", "[ARGS]"),
)
KIMI = ToolForm(
    family="kimi",
    begin="<|tool_calls_section_begin|>",
    call="<|tool_call_begin|>",
    prefix="functions.",
    number=":",
    arguments="<|tool_call_argument_begin|>",
    end="<|tool_call_end|>",
    close="<|tool_calls_section_end|>",
    openings=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    ids="kimi",
    marks=(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
)
# For all others: Hermes' form as ordinary text, which our own system text teaches (teach.py).
GENERIC = ToolForm(
    family="generic",
    call=HERMES.call,
    arguments=HERMES.arguments,
    end=HERMES.end,
    between=HERMES.between,
    openings=HERMES.openings,
    parallel=False,  # models that were never taught to call repeat the first call until their tokens run out
    own=True,
)
FORMS = {form.family: form for form in (HERMES, LLAMA3, MISTRAL_LIST, MISTRAL, KIMI, GENERIC)}  # by name


class _Row(NamedTuple):
    form: ToolForm
    has: str  # a pattern that the template's source contains
    lacks: str = r"(?!)"  # and one that it does not


# The first that fits. Templates with `<tool_call>` around something other than JSON (Qwen3-Coder, GLM) are not Hermes'.
_TABLE = (
    _Row(KIMI, r"<\|tool_calls_section_begin\|>"),
    _Row(MISTRAL, r"\[TOOL_CALLS\](?s:.)*\[ARGS\]", lacks=r"\[CALL_ID\]"),
    _Row(MISTRAL_LIST, r"\[TOOL_CALLS\]", lacks=r"\[ARGS\]"),
    _Row(HERMES, r"<tool_call>(?s:.)*arguments|arguments(?s:.)*<tool_call>", lacks=r"<function=|<arg_key>"),
    _Row(LLAMA3, r"<\|start_header_id\|>(?s:.)*\bparameters\b", lacks=r"<tool_call>|<function="),
)


def detect(source: str, knows_tools: bool, special: Mapping[str, int]) -> ToolForm:
    """The form of a model whose template has this source; the generic one unless template and family are known."""
    for row in _TABLE if knows_tools else ():
        if re.search(row.has, source) and not re.search(row.lacks, source):
            return row.form.at(special)
    return GENERIC
