"""Formats in which model families write tool calls, as data that the prompt, the grammar and the reply parser share."""

import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from string import ascii_letters, digits
from typing import Any, Literal, NamedTuple

import msgspec

from emberline.protocol.request import Tool, ToolCall
from emberline.text.tool_calls.tagged_arguments import Tags, write_tagged

MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")
_BASE62 = digits + ascii_letters
_FIRST_SENTINEL = 0xD800  # lone surrogates: decoded text never contains one

IdStyle = Literal["call", "mistral", "kimi"]


class ToolCallFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of a reply are `begin`, the calls separated by `between`, `close`. One call is `call`, `prefix`, the
    name, `number` and the index of the call (in families that number them), `arguments`, the arguments, `end`."""

    family: str
    begin: str = ""
    call: str
    prefix: str = ""
    number: str = ""
    arguments: str
    end: str
    between: str = ""
    close: str = ""
    tags: Tags | None = None  # around the keys and values of the arguments; None: these are JSON
    openings: tuple[str, ...]  # strings that text may contain only as the beginning of calls
    alone: bool = False  # calls are the whole reply: none follow text
    parallel: bool = True  # a reply may have several calls
    ids: IdStyle = "call"
    markers: tuple[str, ...] = ()  # strings that may be special tokens of the tokenizer
    tokens: dict[str, int] = {}  # the markers that are special tokens of this tokenizer
    loose: bool = False  # models of this family also write calls as in `loose_calls`
    untemplated: bool = False  # not the template's: we write tools, calls and results into the messages

    def at(self, special: Mapping[str, int]) -> "ToolCallFormat":
        """The format for a tokenizer with these special tokens."""
        tokens = {mark: special[mark] for mark in self.markers if mark in special}
        return msgspec.structs.replace(self, tokens=tokens)

    def write(self, calls: Sequence[ToolCall]) -> str:
        """The calls as the model would have generated them."""
        texts = [
            f"{self.call}{self.prefix}{call.name}{self.number}{number if self.number else ''}"
            f"{self.arguments}{write_tagged(self.tags, call.arguments) if self.tags else call.arguments}{self.end}"
            for number, call in enumerate(calls)
        ]
        return self.begin + self.between.join(texts) + self.close

    def call_id(self, origin: str, name: str, number: str) -> str:
        """The id of a call. `origin` identifies request, choice and call; `number` is the model's index."""
        if self.ids == "kimi":
            return f"{self.prefix}{name}{self.number}{number}"
        digest = blake2b(origin.encode("utf-8", "surrogatepass"), digest_size=12)
        return f"call_{digest.hexdigest()}" if self.ids == "call" else _base62(digest.digest())


def sentinels(tokens: Mapping[str, int]) -> dict[str, str]:
    """A sentinel character for each marker that is a special token. The parser reads replies as text in which sentinels
    stand for special tokens, so that the same string in ordinary tokens is not mistaken for one."""
    return {marker: chr(_FIRST_SENTINEL + n) for n, marker in enumerate(sorted(tokens, key=len, reverse=True))}


def with_sentinels(text: str, sentinels_of: Mapping[str, str]) -> str:
    for marker, sentinel in sentinels_of.items():
        text = text.replace(marker, sentinel)
    return text


def split_tokens(text: str, tokens: Mapping[str, int]) -> list[str | int]:
    """The text with its special tokens replaced by their ids."""
    if not tokens:
        return [text] if text else []
    pattern = "|".join(re.escape(mark) for mark in sorted(tokens, key=len, reverse=True))
    return [tokens.get(piece, piece) for piece in re.split(f"({pattern})", text) if piece]


def family_ids(style: IdStyle, calls: Sequence[ToolCall]) -> dict[str, str]:
    """Call ids in the style that a family's templates require; the same in every turn."""
    if style == "mistral":
        return {call.id: _mistral_id(call.id) for call in calls}
    if style == "kimi":
        return {call.id: _kimi_id(call, number) for number, call in enumerate(calls)}
    return {}


def _mistral_id(call_id: str) -> str:
    if MISTRAL_ID.fullmatch(call_id):
        return call_id
    return _base62(blake2b(call_id.encode("utf-8", "surrogatepass"), digest_size=12).digest())


def _kimi_id(call: ToolCall, number: int) -> str:
    known = re.fullmatch(r"functions\.[\w.-]+:\d+", call.id)
    return call.id if known else f"functions.{call.name}:{number}"


def _base62(data: bytes) -> str:
    value = int.from_bytes(data, "little")
    return "".join(_BASE62[value // 62**place % 62] for place in range(9))


HERMES = ToolCallFormat(
    family="hermes",
    call='<tool_call>\n{"name": "',
    arguments='", "arguments": ',
    end="}\n</tool_call>",
    between="\n",
    openings=("<tool_call>",),
    markers=("<tool_call>", "</tool_call>"),
    loose=True,
)
LLAMA3 = ToolCallFormat(
    family="llama3",
    call='{"name": "',
    arguments='", "parameters": ',
    end="}",
    between="; ",
    openings=('{"name": "',),
    alone=True,
    parallel=False,  # its templates refuse more than one
)
MISTRAL_LIST = ToolCallFormat(
    family="mistral",
    begin="[TOOL_CALLS][",
    call='{"name": "',
    arguments='", "arguments": ',
    end="}",
    between=", ",
    close="]",
    openings=("[TOOL_CALLS]",),
    ids="mistral",
    markers=("[TOOL_CALLS]",),
)
MISTRAL = ToolCallFormat(
    family="mistral-args",
    call="[TOOL_CALLS]",
    arguments="[ARGS]",
    end="",
    openings=("[TOOL_CALLS]",),
    ids="mistral",
    markers=("[TOOL_CALLS]", "[ARGS]"),
)
KIMI = ToolCallFormat(
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
    markers=(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
)
DEEPSEEK = ToolCallFormat(
    family="deepseek",
    begin="<｜tool▁calls▁begin｜>",
    call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    arguments="\n```json\n",
    end="\n```<｜tool▁call▁end｜>",
    between="\n",
    close="<｜tool▁calls▁end｜>",
    openings=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    markers=(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
)
DEEPSEEK_V31 = msgspec.structs.replace(
    DEEPSEEK,
    family="deepseek-v3.1",
    call="<｜tool▁call▁begin｜>",
    arguments="<｜tool▁sep｜>",
    end="<｜tool▁call▁end｜>",
    between="",
)
GLM = ToolCallFormat(
    family="glm",
    call="<tool_call>",
    arguments="",
    tags=Tags("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
    end="</tool_call>",
    openings=("<tool_call>",),
    markers=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
GLM_LINES = msgspec.structs.replace(
    GLM,
    family="glm-lines",  # GLM-4.5 and 4.6
    arguments="\n",
    tags=Tags("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    between="\n",
)
QWEN3_CODER = ToolCallFormat(
    family="qwen3-coder",
    call="<tool_call>\n<function=",
    arguments=">\n",
    tags=Tags("<parameter=", ">\n", "\n</parameter>\n"),
    end="</function>\n</tool_call>",
    between="\n",
    openings=("<tool_call>",),
    markers=("<tool_call>", "</tool_call>"),
)
# GPT-OSS's, of which calls are only a part: see `harmony`.
HARMONY = ToolCallFormat(
    family="harmony",
    call="<|channel|>commentary to=functions.",
    arguments=" <|constrain|>json<|message|>",
    end="",
    openings=("<|channel|>commentary to=",),
    parallel=False,
    markers=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),
)
# For every other model: Hermes' format as ordinary text, described in a system prompt of ours.
GENERIC = ToolCallFormat(
    family="generic",
    call=HERMES.call,
    arguments=HERMES.arguments,
    end=HERMES.end,
    between=HERMES.between,
    openings=HERMES.openings,
    parallel=False,  # models not trained for tools repeat the first call until max_tokens
    loose=True,
    untemplated=True,
)
FORMATS_BY_FAMILY = {
    format.family: format
    for format in (
        *(HERMES, LLAMA3, MISTRAL_LIST, MISTRAL, KIMI, DEEPSEEK, DEEPSEEK_V31, GLM, GLM_LINES, QWEN3_CODER, HARMONY),
        GENERIC,
    )
}


class _Detection(NamedTuple):
    format: ToolCallFormat
    has: str  # a pattern that the template's source contains
    lacks: str = r"(?!)"  # and one that it does not


# The first that fits. Templates with `<tool_call>` around something other than JSON (Qwen3-Coder, GLM) are not Hermes'.
_DETECTIONS = (
    _Detection(HARMONY, r"<\|channel\|>commentary"),
    _Detection(KIMI, r"<\|tool_calls_section_begin\|>"),
    _Detection(DEEPSEEK, r"<｜tool▁calls▁begin｜>(?s:.)*```json"),
    _Detection(DEEPSEEK_V31, r"<｜tool▁calls▁begin｜>"),
    _Detection(GLM_LINES, r"<tool_call>(?s:.)*</arg_key>(\n|\\n)"),
    _Detection(GLM, r"<tool_call>(?s:.)*</arg_key>\s*<arg_value>"),
    _Detection(QWEN3_CODER, r"<tool_call>(?s:.)*<function=(?s:.)*<parameter="),
    _Detection(MISTRAL, r"\[TOOL_CALLS\](?s:.)*\[ARGS\]", lacks=r"\[CALL_ID\]"),
    _Detection(MISTRAL_LIST, r"\[TOOL_CALLS\]", lacks=r"\[ARGS\]"),
    _Detection(HERMES, r"<tool_call>(?s:.)*arguments|arguments(?s:.)*<tool_call>", lacks=r"<function=|<arg_key>"),
    _Detection(LLAMA3, r"<\|(start_header_id|header_start)\|>(?s:.)*\bparameters\b", lacks=r"<tool_call>|<function="),
)


def detect_tool_format(source: str, supports_tools: bool, special: Mapping[str, int]) -> ToolCallFormat:
    """The format of a model by its chat template; GENERIC unless the template supports tools in a known one."""
    for row in _DETECTIONS if supports_tools else ():
        if re.search(row.has, source) and not re.search(row.lacks, source):
            return row.format.at(special)
    return GENERIC


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The tools in OpenAI's format. Some templates iterate over the properties without checking that they exist."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": {"type": "object", "properties": {}} | tool.parameters,
            },
        }
        for tool in tools
    ]


def tools_system_prompt(tools: Sequence[Tool]) -> str:
    """Declares the tools, byte for byte the same for the same ones: it is in every prompt's cached prefix."""
    lines = [_declaration(tool) for tool in tools]
    return "\n".join([_TOOLS_HEADER, *lines, _TOOLS_FOOTER])


_TOOLS_HEADER = "You can call these functions, given as JSON lines:\n<tools>"
_TOOLS_FOOTER = (
    "</tools>\n"
    "To call one, reply with its name and its arguments as JSON inside these tags, one pair of tags per call:\n"
    '<tool_call>\n{"name": "the name", "arguments": {"key": "value"}}\n</tool_call>\n'
    "What it returns comes back inside <tool_response> tags. Then answer, or call again."
)


def tool_result_text(content: str) -> str:
    """A tool result in a user message."""
    return f"<tool_response>\n{content}\n</tool_response>"


def _declaration(tool: Tool) -> str:
    """Parameters in the declared order, in which calls are generated too."""
    row = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return msgspec.json.encode({key: value for key, value in row.items() if value}).decode()
