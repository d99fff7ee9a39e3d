"""Tools, calls and results on their way into prompts, and back into sessions."""

import re

import msgspec
import pytest

from emberline.protocol.errors import BadInput
from emberline.protocol.request import GenerateRequest, Message, Reasoning, Tool, ToolCall
from emberline.protocol.token_ids import pack, unpack
from emberline.text.prompt import (
    KnownPrefix,
    PrefixCut,
    build_prompt,
    chain_digests,
    extend_digest,
    reasoning_begun,
    reply_entry,
)
from emberline.text.text_model import TextModel
from emberline.text.tool_calls.formats import tools_system_prompt
from emberline.text.tool_calls.parser import Reply
from tests.text.tool_calls.models import CALLERS, model

WEATHER = Tool("get_weather", "Tells the weather.", {"type": "object", "properties": {"city": {"type": "string"}}})
ADD = Tool("add")
SYSTEM, USER = Message("system", "Be brief."), Message("user", "Is it warm in Paris?")


def ask(*messages: Message, **fields: object) -> GenerateRequest:
    return GenerateRequest(id="r", model="m", messages=messages, **{"tools": (WEATHER, ADD), **fields})  # type: ignore[arg-type]


def text_of(name: str, request: GenerateRequest) -> str:
    rendered = build_prompt(model(name), request).rendered
    assert rendered is not None
    return rendered.text


@pytest.mark.parametrize("name", CALLERS)
def test_tools_stand_in_the_prompt(name: str) -> None:
    text = text_of(name, ask(USER))
    assert "get_weather" in text
    assert "Tells the weather." in text
    assert '"properties"' in text
    assert "get_weather" not in text_of(name, ask(USER, tools=()))
    assert text == text_of(name, ask(USER))


@pytest.mark.parametrize("name", CALLERS)
@pytest.mark.parametrize("begun", ["The answer is", "Yes, ", "", "  x"])
@pytest.mark.parametrize("tools", [(WEATHER,), ()])
def test_a_message_to_be_continued_ends_the_prompt(name: str, begun: str, tools: tuple[Tool, ...]) -> None:
    request = ask(USER, Message("assistant", begun), continue_final=True, tools=tools)
    text = text_of(name, request)
    assert text.endswith(begun) or text.endswith(begun.lstrip())  # some templates trim the beginning
    assert text.count(USER.content) == 1
    assert "\U0001ffff" not in text
    assert build_prompt(model(name), request).n_ids > 0


def test_a_continued_message_may_contain_special_tokens_as_text() -> None:
    text = model("generic")
    request = ask(USER, Message("assistant", "<|im_end|> ends"), continue_final=True, tools=())
    end_id = text.tokenizer.special["<|im_end|>"]
    plain = build_prompt(text, ask(USER, Message("assistant", "x ends"), continue_final=True, tools=()))
    assert unpack(build_prompt(text, request).ids).count(end_id) == unpack(plain.ids).count(end_id)


def test_our_tool_prompt_ends_the_system_message() -> None:
    words = tools_system_prompt((WEATHER, ADD))
    beginning = f"<|im_start|>system\nBe brief.\n\n{words}<|im_end|>\n<|im_start|>user\n"
    assert text_of("generic", ask(SYSTEM, USER)).startswith(beginning)
    assert text_of("generic", ask(USER)).startswith(f"<|im_start|>system\n{words}<|im_end|>\n<|im_start|>user\n")
    assert len(tools_system_prompt(())) < 500


def test_our_own_format_of_calls_and_results() -> None:
    calls = (ToolCall("a", "get_weather", '{"city":"Paris"}'), ToolCall("b", "add", "{}"))
    said = Message("assistant", "Let me see.", tool_calls=calls)
    results = (Message("tool", "20 C", tool_call_id="a"), Message("tool", "0", tool_call_id="b"))
    text = text_of("generic", ask(USER, said, *results))
    written = model("generic").tool_format.write(calls)
    assert f"<|im_start|>assistant\nLet me see.\n{written}<|im_end|>\n" in text
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\n20 C\n</tool_response>\n\n<tool_response>\n0\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_ids_are_what_the_templates_insist_on() -> None:
    calls = (ToolCall("call_1", "get_weather", "{}"), ToolCall("functions.add:7", "add", "{}"))
    turns = (USER, Message("assistant", "", tool_calls=calls), Message("tool", "warm", tool_call_id="call_1"))
    kimi = text_of("kimi", ask(*turns))
    assert "<|tool_call_begin|>functions.get_weather:0<" in kimi
    assert "<|tool_call_begin|>functions.add:7<" in kimi
    assert "## Return of functions.get_weather:0\nwarm" in kimi
    assert "warm" in text_of("mistral-list", ask(*turns))  # its template refuses ids that have not 9 characters
    kept = Message("assistant", "", tool_calls=(ToolCall("abcDEF123", "add", "{}"),))
    assert text_of("mistral", ask(USER, kept, Message("tool", "x", tool_call_id="abcDEF123")))


def test_ids_that_are_given_out() -> None:
    forms = {name: model(name).tool_format for name in CALLERS}
    assert re.fullmatch(r"call_[0-9a-f]{24}", forms["qwen"].call_id("r/0/0", "add", ""))
    assert re.fullmatch(r"[a-zA-Z0-9]{9}", forms["mistral"].call_id("r/0/0", "add", ""))
    assert forms["kimi"].call_id("r/0/0", "add", "3") == "functions.add:3"
    for name in ("qwen", "mistral"):
        ids = {forms[name].call_id(f"r/0/{n}", "add", "") for n in range(1000)}
        assert len(ids) == 1000


@pytest.mark.parametrize("name", CALLERS)
def test_special_tokens_in_tools_and_results_stay_text(name: str) -> None:
    bad = "".join(model(name).tokenizer.special)
    tool = Tool("add", bad, {"type": "object", "properties": {bad: {"type": "string", "description": bad}}})
    call = ToolCall("c", "add", msgspec.json.encode({bad: bad}).decode())
    calling = Message("assistant", "", tool_calls=(call,))
    turns = (USER, calling, Message("tool", bad, tool_call_id="c"))
    harmless = Tool("add", "x", {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}})
    tame = (USER, Message("assistant", "", tool_calls=(ToolCall("c", "add", '{"x":"x"}'),)))
    expected = _special(name, ask(*tame, Message("tool", "x", tool_call_id="c"), tools=(harmless,)))
    assert _special(name, ask(*turns, tools=(tool,))) == expected


def _special(name: str, request: GenerateRequest) -> list[int]:
    return [token for token in unpack(build_prompt(model(name), request).ids) if token in model(name).special_ids]


def test_earlier_reasoning_reaches_the_template() -> None:
    calling = Message("assistant", "", tool_calls=(ToolCall("c", "add", "{}"),), reasoning="Sum it.")
    turns = (USER, calling, Message("tool", "3", tool_call_id="c"))
    assert "<think>\nSum it.\n</think>" in text_of("qwen", ask(*turns))
    assert "Sum it." not in text_of("qwen", ask(*turns, Message("assistant", "3."), Message("user", "ok")))
    assert "<think>Sum it.</think>" in text_of("kimi", ask(*turns))


def test_a_template_that_refuses_calls_says_so() -> None:
    calls = (ToolCall("a", "add", "{}"), ToolCall("b", "add", "{}"))
    with pytest.raises(BadInput, match="one call at a time"):
        text_of("llama3", ask(USER, Message("assistant", "", tool_calls=calls)))


def test_tools_and_reasoning_root_the_digests() -> None:
    plain = chain_digests([USER])
    assert chain_digests([USER], {}, (WEATHER,)) != plain
    assert chain_digests([USER], {}, (WEATHER,)) != chain_digests([USER], {}, (ADD,))
    assert extend_digest(plain[0], Message("assistant", "a", reasoning="b")) != extend_digest(
        plain[0], Message("assistant", "a")
    )


# --- sessions ---------------------------------------------------------------------------------------------------------


def reply_of(text: TextModel, request: GenerateRequest, reply_ids: list[int]) -> Message:
    prompt = build_prompt(text, request)
    parser = text.reply_parser(prompt.ids, request.tools, reasoning_begun(text, prompt.rendered))
    reply = Reply().add(parser.push(reply_ids)).add(parser.finish())
    calls = [
        ToolCall(text.tool_format.call_id(f"r/0/{n}", call.name, call.number), call.name, call.arguments)
        for n, call in enumerate(reply.calls)
    ]
    return Message("assistant", reply.text, tool_calls=tuple(calls), reasoning=reply.reasoning or None)


@pytest.mark.parametrize("name", CALLERS)
def test_the_next_turn_keeps_the_ids_of_a_call(name: str) -> None:
    """The model writes compact JSON, most templates do not: its own ids are kept all the same."""
    text = model(name)
    request = ask(USER)
    prompt = build_prompt(text, request)
    thought = "Look.</think>" if name == "kimi" else ""
    written = thought + text.tool_format.write([ToolCall("", "get_weather", '{"city":"Paris","days":[1,2]}')])
    reply_ids = unpack(text.encode(written, special=True))
    reply = reply_of(text, request, reply_ids)
    assert len(reply.tool_calls) == 1
    end = next(token for token in reversed(unpack(_ended(text, request, reply))) if token in text.special_ids)
    entry = reply_entry(text, request, prompt, reply, pack([*reply_ids, end]))
    assert entry is not None
    assert entry.ids == prompt.ids + pack(reply_ids)
    turns = (USER, reply, Message("tool", "20 C", tool_call_id=reply.tool_calls[0].id))
    known = KnownPrefix(entry.ids, (PrefixCut(len(entry.ids) // 4, entry.text_len, entry.text_digest),))
    following = build_prompt(text, ask(*turns), known)
    assert following.ids.startswith(entry.ids)
    assert following.n_known == len(entry.ids) // 4


def _ended(text: TextModel, request: GenerateRequest, reply: Message) -> bytes:
    rendered = text.render_guarded((USER, reply), {}, request.tools, add_generation_prompt=False)
    return text.tokenizer.encode_marked(*rendered)


@pytest.mark.parametrize("change", [{"tool_calls": ()}, {"content": "other"}, {"reasoning": "other"}])
def test_ids_are_not_kept_for_another_reply(change: dict[str, object]) -> None:
    text, request = model("qwen"), ask(USER)
    reply_ids = unpack(text.encode(text.tool_format.write([ToolCall("", "add", '{"a":1}')]), special=True))
    reply = msgspec.structs.replace(reply_of(text, request, reply_ids), **change)
    prompt = build_prompt(text, request)
    assert reply_entry(text, request, prompt, reply, pack(reply_ids)) is None


def test_reasoning_that_the_template_drops_is_not_kept() -> None:
    text, request = model("r1"), ask(USER, tools=())
    prompt = build_prompt(text, request)
    reply_ids = unpack(text.encode("Hm.\n</think>\n\nYes.", special=True))
    reply = reply_of(text, request, reply_ids)
    assert (reply.content, reply.reasoning) == ("Yes.", "Hm.")
    assert reply_entry(text, request, prompt, reply, pack(reply_ids)) is None


def test_reasoning_that_the_template_keeps_is_kept() -> None:
    text = model("kimi")
    request = ask(USER, tools=())
    prompt = build_prompt(text, request)
    reply_ids = unpack(text.encode("Hm.</think>Yes.", special=True))
    reply = reply_of(text, request, reply_ids)
    assert reply_entry(text, request, prompt, reply, pack(reply_ids)) is not None
    forgotten = msgspec.structs.replace(reply, reasoning=None)
    assert reply_entry(text, request, prompt, forgotten, pack(reply_ids)) is None


# --- thinking in prompts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reasoning", "ending", "begun"),
    [
        ("qwen", Reasoning(), "assistant\n", None),
        ("qwen", Reasoning(enabled=True), "assistant\n", None),
        ("qwen", Reasoning(enabled=False), "<think>\n\n</think>\n\n", False),
        ("qwen", Reasoning(effort="none"), "<think>\n\n</think>\n\n", False),
        ("qwen", Reasoning(effort="low"), "assistant\n<think>\n", True),
        ("qwen", Reasoning(budget_tokens=5), "assistant\n<think>\n", True),
        ("kimi", Reasoning(), "<think>", True),
        ("kimi", Reasoning(enabled=False), "<think></think>", False),
        ("r1", Reasoning(), "<think>\n", True),
        ("r1", Reasoning(enabled=False), "<think>\n</think>", False),
        ("generic", Reasoning(enabled=False), "assistant\n", False),
    ],
)
def test_how_prompts_begin_and_end_reasoning(name: str, reasoning: Reasoning, ending: str, begun: bool | None) -> None:
    prompt = build_prompt(model(name), ask(USER, tools=(), reasoning=reasoning))
    assert prompt.rendered is not None
    assert prompt.rendered.text.endswith(ending)
    assert reasoning_begun(model(name), prompt.rendered) is begun


def test_what_the_client_tells_the_template_wins() -> None:
    request = ask(USER, reasoning=Reasoning(enabled=True), template_kwargs={"enable_thinking": False})
    assert text_of("qwen", request).endswith("</think>\n\n")
