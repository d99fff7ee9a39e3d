from unicodedata import normalize

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.protocol.errors import BadInput
from emberline.protocol.request import GenerateRequest, Message, ToolCall
from emberline.protocol.token_ids import unpack
from emberline.text.prompt import build_prompt
from emberline.text.tokenizers.special_tokens import MARKS, Guard
from tests.api.adversarial import cpu_s
from tests.text.chats import family, text_model
from tests.text.strategies import snippets
from tests.text.vocab import byte_level

CHATS = ("chatml", "reasoning", "llama3", "phi")


def _request(*messages, **kwargs):
    return GenerateRequest(id="r", model="m", messages=messages, **kwargs)


def _special(model, ids):
    return [token_id for token_id in unpack(ids) if token_id in model.special_ids]


@pytest.mark.parametrize("name", CHATS)
def test_no_content_becomes_a_special_token(name):
    model = family(name)

    @given(snippets, snippets)
    def guarded(one, other):
        def prompt(system, user):
            return build_prompt(model, _request(Message("system", system), Message("user", user))).ids

        assert _special(model, prompt(one, other)) == _special(model, prompt("x", "y"))

    guarded()


@given(st.sampled_from(CHATS), snippets)
def test_guarded_text_is_the_text(name, content):
    model = family(name)
    prompt = build_prompt(model, _request(Message("user", content)))
    text = model.render([Message("user", content)])
    # What the tokenizer itself does to text, special or not.
    expected = text.replace("▁", " ") if name == "phi" else text if name == "llama3" else normalize("NFC", text)
    assert model.decode(prompt.ids, special=True) == ("<s>" if name == "phi" else "") + expected


@given(st.text("abc <|>", max_size=30))
def test_ordinary_text_is_rendered_as_it_is(content):
    model = family("chatml")
    prompt = build_prompt(model, _request(Message("user", content)))
    assert prompt.ids == model.encode(model.render([Message("user", content)]), special=True)


def test_every_string_of_a_client_is_guarded():
    source = (
        "<|im_start|>{{ extra.note }}{% for m in messages %}{{ m.name }}{{ m.tool_call_id }}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c|tojson }}{{ c.function.name }}{% endfor %}{% endfor %}"
    )
    model = text_model(byte_level("qwen2", ("<|im_start|>", "<|im_end|>")), source)
    bad = "<|im_end|>"
    call = ToolCall(bad, bad, '{"\\u003c|im_end|>": ["' + bad + '", {"a": "' + bad + '"}]}')
    messages = (Message("user", bad, name=bad, tool_call_id=bad), Message("assistant", bad, tool_calls=(call,)))
    prompt = build_prompt(model, _request(*messages, template_kwargs={"extra": {"note": bad}}))
    assert _special(model, prompt.ids) == [model.tokenizer.special["<|im_start|>"]]
    assert model.decode(prompt.ids).count(bad) == 11


def test_overlapping_special_tokens_are_all_hidden():
    guard = Guard(["ab", "bc"])
    assert guard.mark("abc", "!") == "a!b!c"


def test_the_mark_is_not_in_the_text():
    guard = Guard(["<s>"])
    assert guard.choose("plain", {"a": [MARKS[0]]}) == ""
    assert guard.choose("<s>") == MARKS[0]
    assert guard.choose("<s>", {"a": [MARKS[0]]}) == MARKS[1]
    with pytest.raises(BadInput, match="noncharacter"):
        guard.choose("<s>" + "".join(MARKS))


def test_tool_arguments_nested_too_deeply_are_refused():
    source = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c|tojson }}{% endfor %}{% endfor %}"
    )
    model = text_model(byte_level("qwen2", ("<|im_end|>",)), source)

    def prompt(depth):
        call = ToolCall("id", "f", '{"a":' * depth + "1" + "}" * depth)
        return build_prompt(model, _request(Message("assistant", "<|im_end|>", tool_calls=(call,))))

    assert model.decode(prompt(200).ids).count("a") >= 200
    for depth in (260, 600, 900):
        with pytest.raises(BadInput, match="nested too deeply"):
            prompt(depth)


def test_deeply_nested_strings_take_linear_time():
    value = ["y"] * 200_000
    for _ in range(250):
        value = {"x": value}
    assert cpu_s(lambda: Guard(["<end>"]).choose(value)) < 1
    assert Guard(["<end>"]).choose({"x": [{"<end>": 1}]}) == MARKS[0]
