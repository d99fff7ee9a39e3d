import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.protocol.request import Tool, ToolCall
from emberline.protocol.token_ids import unpack
from emberline.text.tool_calls.parser import (
    ArgumentsPiece,
    CallEnd,
    CallStart,
    ParsedCall,
    ReasoningPiece,
    Reply,
    ReplyPiece,
    TextPiece,
)
from tests.text.tool_calls.models import CALLERS, model

TOOLS = (Tool("get_weather", "", {"properties": {"city": {"type": "string"}}}), Tool("add.numbers-2"))
PARIS = ToolCall("1", "get_weather", '{"city":"P\\"ar{i}s \U0001f680","days":[1,{"n":2}]}')
EMPTY = ToolCall("2", "add.numbers-2", "{}")


def ids_of(name: str, text: str) -> list[int]:
    return unpack(model(name).encode(text, special=True))


def pieces_of(name: str, chunks: list[list[int]], thinking: bool | None = False, tools=TOOLS) -> list[ReplyPiece]:
    parser = model(name).reply_parser(b"", tools, thinking)
    pieces = [piece for chunk in chunks for piece in parser.push(chunk)]
    return pieces + parser.finish()


def read(name: str, text: str, thinking: bool | None = False, tools=TOOLS) -> Reply:
    """Token by token."""
    return Reply().add(pieces_of(name, [[token_id] for token_id in ids_of(name, text)], thinking, tools))


def calls_of(name: str) -> tuple[ToolCall, ...]:
    return (PARIS, EMPTY) if model(name).tool_format.parallel else (PARIS,)


@pytest.mark.parametrize("name", CALLERS)
def test_calls_are_read_as_they_are_written(name: str) -> None:
    form = model(name).tool_format
    before = "" if form.alone else "Let me see.\n"
    reply = read(name, before + form.write(calls_of(name)))
    assert reply.text == before.rstrip()
    assert [(call.name, call.arguments) for call in reply.calls] == [
        (call.name, call.arguments) for call in calls_of(name)
    ]


@pytest.mark.parametrize("name", CALLERS)
def test_a_call_goes_out_while_it_is_written(name: str) -> None:
    parser = model(name).reply_parser(b"", TOOLS, False)
    steps = [parser.push([token_id]) for token_id in ids_of(name, model(name).tool_format.write([PARIS]))]
    begun = next(at for at, step in enumerate(steps) if CallStart("get_weather", "0" if name == "kimi" else "") in step)
    ended = next(at for at, step in enumerate(steps) if CallEnd() in step)
    arguments = [piece.text for step in steps[begun : ended + 1] for piece in step if isinstance(piece, ArgumentsPiece)]
    assert "".join(arguments) == PARIS.arguments
    assert len(arguments) > 5


@pytest.mark.parametrize("name", CALLERS)
def test_a_tool_that_was_not_declared_is_not_called(name: str) -> None:
    form = model(name).tool_format
    reply = read(name, form.write([ToolCall("1", "rm", '{"path":"/"}')]))
    assert reply.calls == []
    assert ('{"path":"/"}' if form.tags is None else "path") in reply.text
    assert not any("\ud800" <= char <= "\udfff" for char in reply.text)


@pytest.mark.parametrize("name", CALLERS)
def test_without_tools_markup_is_text(name: str) -> None:
    text = model(name).tool_format.write([PARIS])
    special = model(name).special_ids
    plain = model(name).decode([token_id for token_id in ids_of(name, text) if token_id not in special])
    assert read(name, text, tools=()) == Reply(plain)


@pytest.mark.parametrize("name", ["qwen", "hermes-special", "hermes-text", "generic"])
@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>\nnot json\n</tool_call> and so on",
        '<tool_call>\n{"name": "get_weather", "arguments": ',
        '<tool_call>\n{"name": "get_weather", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"name": ["get_weather"], "arguments": {}}\n</tool_call>',
        "<tool_ca",
        "a < b",
        "tail \n\n",
    ],
)
def test_what_is_no_call_stays_text(name: str, text: str) -> None:
    special = model(name).special_ids
    plain = model(name).decode([token_id for token_id in ids_of(name, text) if token_id not in special])
    assert read(name, text) == Reply(plain)


def test_white_space_is_free_around_a_call() -> None:
    text = '<tool_call>{"name":"get_weather" ,  "arguments" :\n {"city": "Rome"} } </tool_call>\n\n'
    text += '<tool_call>\n\n{ "name" : "add.numbers-2", "arguments": {}}\n</tool_call>\n'
    assert read("qwen", text) == Reply(
        "", "", [ParsedCall("get_weather", "", '{"city": "Rome"}'), ParsedCall(EMPTY.name, "", "{}")]
    )


def test_endless_white_space_goes_out() -> None:
    for name, thinking in (("qwen", None), ("qwen", True), ("llama3", False)):
        parser = model(name).reply_parser(b"", TOOLS, thinking)
        parser.push_text("so" if thinking else "")
        spaces = "".join(
            p.text for _ in range(100) for p in parser.push_text(" \n") if isinstance(p, TextPiece | ReasoningPiece)
        )
        assert len(spaces) >= 100


def test_text_after_calls_is_text() -> None:
    reply = read("qwen", model("qwen").tool_format.write([EMPTY]) + "\n Done.")
    assert (reply.text, len(reply.calls)) == ("Done.", 1)


def test_a_family_whose_calls_stand_alone_has_none_behind_text() -> None:
    text = "Like this: " + model("llama3").tool_format.write([PARIS])
    assert read("llama3", text) == Reply(text)
    assert read("llama3", "<|python_tag|>" + model("llama3").tool_format.write([PARIS])).calls
    assert read("llama3", '{"answer": 1}') == Reply('{"answer": 1}')


def test_markup_spelled_in_ordinary_tokens_is_not_a_special_token() -> None:
    text = model("kimi").tool_format.write([PARIS])
    ids = unpack(model("kimi").encode(text, special=False))
    assert Reply().add(pieces_of("kimi", [ids])) == Reply(text)


def test_kimis_calls_keep_their_numbers_and_need_no_prefix() -> None:
    text = "<|tool_call_begin|>get_weather:2<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert read("kimi", text).calls == [ParsedCall("get_weather", "2", "{}")]


def test_a_special_token_ends_broken_arguments() -> None:
    text = '<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"a":"<|tool_call_end|>'
    assert read("kimi", text + "<|tool_calls_section_end|>so") == Reply(
        "so", "", [ParsedCall("get_weather", "0", '{"a":"')]
    )


@pytest.mark.parametrize("name", CALLERS)
def test_a_call_that_is_cut_keeps_what_was_written(name: str) -> None:
    text = model(name).tool_format.write([PARIS])
    cut = text[: text.index('P"' if model(name).tool_format.tags else "P\\") + 1]
    assert [call.arguments for call in read(name, cut).calls] == ['{"city":"P']


def read_cut(name: str, ids: list[int], thinking: bool | None = False) -> tuple[Reply, bool]:
    """Of a reply that had no room for more, and whether it lost a call."""
    parser = model(name).reply_parser(b"", TOOLS, thinking)
    reply = Reply()
    for token_id in ids:
        reply.add(parser.push([token_id]))
    return reply.add(parser.finish(cut=True)), parser.lost_tool_call


@pytest.mark.parametrize("name", CALLERS)
def test_wherever_a_reply_is_cut_no_call_is_text(name: str) -> None:
    form = model(name).tool_format
    before = "" if form.alone else "Let me see.\n"
    ids = ids_of(name, before + form.write(calls_of(name)))
    openings = [at for opening in form.openings for at in range(1, len(ids)) if opening in text_of(name, ids[:at])]
    n_calls = []
    for at in range(min(openings), len(ids) + 1):
        reply, lost = read_cut(name, ids[:at])
        if not form.alone and text_of(name, ids[:at]).rstrip().endswith(PARTIAL):
            continue  # half an opening may be text
        assert reply.text == before.rstrip()
        assert not (lost and len(reply.calls) == len(calls_of(name)))
        assert lost or reply.calls
        n_calls.append(len(reply.calls))
    assert n_calls == sorted(n_calls)
    assert (n_calls[0], n_calls[-1]) == (0, len(calls_of(name)))


PARTIAL = tuple("<tool_call>"[:n] for n in range(1, len("<tool_call>")))


def text_of(name: str, ids: list[int]) -> str:
    return model(name).decode(ids, special=True)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\nnot json",
        '<tool_call>\n{"name": "rm',
        '<tool_call>\n{"name": "rm", "arguments": {"path":',
        '<tool_call>\n{"nom": "',
        '<tool_call>\n{"name": "get_weather", "arguments": [1',
        "a <",
        "<tool_ca",
    ],
)
def test_what_could_not_become_a_call_stays_text_when_it_is_cut(text: str) -> None:
    assert read_cut("generic", ids_of("generic", text)) == (Reply(text), False)


@pytest.mark.parametrize(
    "begun", [" {", '{"name":', '\n{ "name" : "get_wea', '{"name":"add.numbers-2","arguments" :  ']
)
def test_white_space_is_free_around_half_a_call(begun: str) -> None:
    assert read_cut("qwen", ids_of("qwen", "So: \n<tool_call>" + begun)) == (Reply("So:"), True)


def test_half_a_call_of_a_numbered_family() -> None:
    for text in ("get_weather:1", "functions.get_weather:12<|tool_call_argument_begin|>", "functions", "functions.add"):
        assert read_cut("kimi", ids_of("kimi", "So.<|tool_call_begin|>" + text)) == (Reply("So."), True)
    reply, lost = read_cut("kimi", ids_of("kimi", "So.<|tool_call_begin|>functions.rm:1"))
    assert (reply.text, lost) == ("So.functions.rm:1", False)


def test_half_a_call_inside_reasoning() -> None:
    ids = ids_of("kimi", "I look.<|tool_call_begin|>functions.get_w")
    assert read_cut("kimi", ids, True) == (Reply("", "I look."), True)


def test_white_space_behind_a_whole_call_loses_none() -> None:
    for name in CALLERS:
        reply, lost = read_cut(name, ids_of(name, model(name).tool_format.write([PARIS]) + "\n"))
        assert (reply.text, len(reply.calls), lost) == ("", 1, False)


# --- reasoning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen", "hermes-special", "hermes-text", "kimi", "r1"])
@pytest.mark.parametrize("begun", [True, None])
def test_reasoning_is_separated_from_the_answer(name: str, begun: bool | None) -> None:
    text = ("" if begun else "<think>") + "\nIs <b> so?\n\nYes.\n</think>\n\nIt is. </think>"
    reply = read(name, text, begun, tools=())
    assert reply.reasoning == "Is <b> so?\n\nYes."
    assert reply.text in ("It is. </think>", "It is. ")  # a special token is no text


def test_a_reply_may_leave_reasoning_out() -> None:
    assert read("qwen", " <b>no</b> <think>", None) == Reply(" <b>no</b> <think>")
    assert read("qwen", "<thi", None) == Reply("<thi")
    assert read("qwen", "", None) == Reply()


def test_reasoning_that_never_ends_is_all_reasoning() -> None:
    assert read("kimi", "and on and", True) == Reply("", "and on and")


@pytest.mark.parametrize("name", ["qwen", "hermes-special", "kimi"])
def test_a_call_inside_reasoning_is_not_lost(name: str) -> None:
    reply = read(name, "I need the weather.\n" + model(name).tool_format.write([PARIS, EMPTY]), True)
    assert (reply.text, reply.reasoning) == ("", "I need the weather.")
    assert [call.name for call in reply.calls] == [PARIS.name, EMPTY.name]


def test_a_call_that_is_none_inside_reasoning_stays_reasoning() -> None:
    text = 'Write <tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>, or not.'
    assert read("qwen", text + "</think>Yes.", True) == Reply("Yes.", text)


def test_only_text_follows() -> None:
    parser = model("qwen").reply_parser(b"", (), True)
    seen = []
    for token_id in ids_of("qwen", "so.\n</think>\n\nIt is."):
        seen.append(parser.plain)
        parser.push([token_id])
    assert not seen[0]
    assert parser.plain
    assert not model("qwen").reply_parser(b"", TOOLS, False).plain


# --- however it is cut ------------------------------------------------------------------------------------------------

_SNIPPETS = [
    *(
        "Hello",
        " there",
        "\n",
        "  ",
        "<",
        "<tool",
        "<tool_call>",
        "</tool_call>",
        "</think>",
        "<think>",
        "é",
        "\U0001f680",
    ),
    *(
        '{"name": "get_weather", "arguments": {"a": "}"}}',
        '{"name": "rm", "arguments": {}}',
        '{"name": "',
        "[TOOL_CALLS]",
    ),
    *(
        "<|tool_call_begin|>",
        "functions.get_weather:1",
        "<|tool_call_argument_begin|>",
        '{"x":[{}]}',
        "<|tool_call_end|>",
    ),
    *(" \n" * 40, "[ARGS]", "get_weather", "[", "]", ", ", "}", "<|tool_calls_section_begin|>", "\\", '"'),
]


@st.composite
def replies(draw: st.DrawFn, name: str) -> str:
    form = model(name).tool_format
    calls = [PARIS, EMPTY, ToolCall("3", "rm", "{}")]
    written = st.lists(st.sampled_from(calls), min_size=1, max_size=3).map(form.write)
    return "".join(draw(st.lists(st.one_of(st.sampled_from(_SNIPPETS), written), max_size=8)))


@pytest.mark.parametrize("name", CALLERS)
@given(data=st.data())
def test_however_tokens_are_cut_the_same_comes_out(name: str, data: st.DataObject) -> None:
    ids = ids_of(name, data.draw(replies(name)))
    begun = data.draw(st.sampled_from([True, False, None])) if model(name).reasoning_format is not None else False
    whole = pieces_of(name, [ids], begun)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)))))
    chunks = [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    assert _merged(pieces_of(name, chunks, begun)) == _merged(whole)
    for call in Reply().add(whole).calls:
        assert call.name in {tool.name for tool in TOOLS}
    for piece in whole:
        if isinstance(piece, TextPiece | ReasoningPiece):
            assert not any("\ud800" <= char <= "\udfff" for char in piece.text)


def _merged(pieces: list[ReplyPiece]) -> list[ReplyPiece]:
    merged: list[ReplyPiece] = []
    for piece in pieces:
        if (
            merged
            and type(merged[-1]) is type(piece)
            and isinstance(piece, TextPiece | ReasoningPiece | ArgumentsPiece)
        ):
            merged[-1] = type(piece)(merged[-1].text + piece.text)  # type: ignore[union-attr]
        else:
            merged.append(piece)
    return merged


@given(
    arguments=st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=8),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
            max_leaves=8,
        ),
    ),
    indent=st.sampled_from([None, 2]),
    ascii_only=st.booleans(),
)
def test_arguments_end_where_the_object_does(arguments: dict, indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(arguments, indent=indent, ensure_ascii=ascii_only)
    reply = read("qwen", model("qwen").tool_format.write([ToolCall("1", "get_weather", text), EMPTY]))
    assert [call.arguments for call in reply.calls] == [text, "{}"]


_SHARDS = (
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "get_weather", "city"),
    *(
        "<function=",
        ">\n",
        "<parameter=",
        "\n</parameter>\n",
        "</function>\n",
        "é\U0001f680",
        '"{',
        "7",
        " ",
        "x" * 300,
    ),
)


@pytest.mark.parametrize("name", ["glm", "glm-lines", "qwen3-coder"])
@given(shards=st.lists(st.sampled_from(_SHARDS), max_size=14), at=st.integers(0, 60), cut=st.booleans())
def test_any_text_with_tags_is_read_the_same_however_it_is_split(
    name: str, shards: list[str], at: int, cut: bool
) -> None:
    ids = ids_of(name, "<tool_call>get_weather<arg_key>city</arg_key><arg_value>" + "".join(shards))
    replies = []
    for chunks in ([ids], [ids[:at], ids[at:]], [[token_id] for token_id in ids]):
        parser = model(name).reply_parser(b"", TOOLS, False)
        pieces = [piece for chunk in chunks for piece in parser.push(chunk)]
        replies.append(Reply().add(pieces).add(parser.finish(cut=cut)))
    assert replies[0] == replies[1] == replies[2]
