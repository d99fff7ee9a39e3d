"""How one family of models writes tool calls, as data: the prompt, the grammar and the reply's automaton read it."""

import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from string import ascii_letters, digits
from typing import Any, Literal, NamedTuple

import msgspec

from emberline.protocol.request import Tool, ToolCall

MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")
_BASE62 = digits + ascii_letters
_FIRST_SIGN = 0xD800  # lone surrogates: decoded text never has one

IdStyle = Literal["call", "mistral", "kimi"]


class ToolForm(msgspec.Struct, frozen=True, kw_only=True):
    """A reply's calls are `begin`, calls with `between` between them, `close`. A call is `call`, `prefix`, the name,
    `number` and which call it is where there is one, `arguments`, the arguments, `end`."""

    family: str
    begin: str = ""
    call: str
    prefix: str = ""
    number: str = ""
    arguments: str
    end: str
    between: str = ""
    close: str = ""
    openings: tuple[str, ...]  # what text may contain only as the beginning of calls
    alone: bool = False  # calls are all of a reply: text has none behind it
    parallel: bool = True  # several calls in a reply
    ids: IdStyle = "call"
    marks: tuple[str, ...] = ()  # strings that are special tokens where the tokenizer has them so
    tokens: dict[str, int] = {}  # those marks that are, in this tokenizer
    own: bool = False  # the template knows nothing of it: tools, calls and results are written by us

    def at(self, special: Mapping[str, int]) -> "ToolForm":
        """The form in a tokenizer that has these special tokens."""
        tokens = {mark: special[mark] for mark in self.marks if mark in special}
        return msgspec.structs.replace(self, tokens=tokens)

    def write(self, calls: Sequence[ToolCall]) -> str:
        """The calls as the model would have written them."""
        texts = [
            f"{self.call}{self.prefix}{call.name}{self.number}{number if self.number else ''}"
            f"{self.arguments}{call.arguments}{self.end}"
            for number, call in enumerate(calls)
        ]
        return self.begin + self.between.join(texts) + self.close

    def call_id(self, origin: str, name: str, number: str) -> str:
        """The id of a call. `origin` says which request's, choice's and call it is; the model wrote `number`."""
        if self.ids == "kimi":
            return f"{self.prefix}{name}{self.number}{number}"
        digest = blake2b(origin.encode("utf-8", "surrogatepass"), digest_size=12)
        return f"call_{digest.hexdigest()}" if self.ids == "call" else _base62(digest.digest())


def signs(tokens: Mapping[str, int]) -> dict[str, str]:
    """A character for each mark that is a special token. Replies are read as text in which these stand for tokens, so
    that the same string written out in ordinary tokens is not mistaken for one."""
    return {mark: chr(_FIRST_SIGN + n) for n, mark in enumerate(sorted(tokens, key=len, reverse=True))}


def signed(text: str, signs_of: Mapping[str, str]) -> str:
    for mark, sign in signs_of.items():
        text = text.replace(mark, sign)
    return text


def split_tokens(text: str, tokens: Mapping[str, int]) -> list[str | int]:
    """The text with its special tokens as ids."""
    if not tokens:
        return [text] if text else []
    pattern = "|".join(re.escape(mark) for mark in sorted(tokens, key=len, reverse=True))
    return [tokens.get(piece, piece) for piece in re.split(f"({pattern})", text) if piece]


def family_ids(style: IdStyle, calls: Sequence[ToolCall]) -> dict[str, str]:
    """What a family's templates insist on, for the ids of a conversation's calls; the same every turn."""
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


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """OpenAI's shape. Some templates go over the properties without asking whether there are any."""
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


def system_text(tools: Sequence[Tool]) -> str:
    """The same for the same tools, to the byte: it stands at the beginning of every prompt of a conversation."""
    lines = [_declaration(tool) for tool in tools]
    return "\n".join([_BEFORE, *lines, _AFTER])


_BEFORE = "You can call these functions, given as JSON lines:\n<tools>"
_AFTER = (
    "</tools>\n"
    "To call one, reply with its name and its arguments as JSON inside these tags, one pair of tags per call:\n"
    '<tool_call>\n{"name": "the name", "arguments": {"key": "value"}}\n</tool_call>\n'
    "What it returns comes back inside <tool_response> tags. Then answer, or call again."
)


def result_text(content: str) -> str:
    """A call's result, in a user's turn."""
    return f"<tool_response>\n{content}\n</tool_response>"


def _declaration(tool: Tool) -> str:
    """Parameters in the order they were declared: calls are written in that order."""
    row = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return msgspec.json.encode({key: value for key, value in row.items() if value}).decode()
