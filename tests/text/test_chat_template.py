import pytest

from emberline.protocol.errors import BadInput
from emberline.protocol.request import Message, ToolCall
from emberline.text.chat_template import ChatTemplate
from tests.api.adversarial import cpu_s
from tests.text.chats import CHATML, GEMMA, LLAMA2, LLAMA3, family

SYSTEM, USER, REPLY = Message("system", "Be brief."), Message("user", "hi"), Message("assistant", "hello")


def _render(source, *messages, add_generation_prompt=True, **kwargs):
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    return template.render(template.turns(messages), kwargs, add_generation_prompt=add_generation_prompt)


def test_chatml():
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    assert _render(CHATML, SYSTEM, USER, add_generation_prompt=False) == text
    assert _render(CHATML, SYSTEM, USER) == text + "<|im_start|>assistant\n"


def test_a_template_names_its_special_tokens():
    assert _render(LLAMA2, USER, REPLY) == "<s>[INST] hi [/INST] hello </s>"


def test_template_arguments_reach_the_template():
    source = "{{ enable_thinking }}{{ tools is none }}"
    assert _render(source, USER, enable_thinking=False) == "FalseTrue"
    with pytest.raises(BadInput, match="'messages'"):
        _render(source, USER, messages=[])


def test_a_refusal_has_the_templates_message():
    with pytest.raises(BadInput, match="roles must alternate") as caught:
        _render(GEMMA, USER, USER)
    assert caught.value.param == "messages"


def test_a_template_that_trips_is_bad_input():
    with pytest.raises(BadInput, match="cannot render"):
        _render("{{ messages[0].content + 1 }}", USER)


def test_no_messages_are_refused():
    with pytest.raises(BadInput, match="empty"):
        _render(CHATML)


def test_a_template_without_a_system_role_gets_it_in_the_first_user_message():
    text = _render(GEMMA, SYSTEM, Message("system", "In English."), USER)
    assert text == "<s><start_of_turn>user\nBe brief.\n\nIn English.\n\nhi<end_of_turn>\n<start_of_turn>model\n"


def test_system_messages_are_gathered_when_a_template_wants_one_first():
    source = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
    )
    source += "{{ m.role }}:{{ m.content }};{% endfor %}"
    assert _render(source, SYSTEM, USER, Message("system", "Now.")) == "system:Be brief.\n\nNow.;user:hi;"
    assert _render(source, SYSTEM, USER) == "system:Be brief.;user:hi;"


def test_only_system_messages_do_not_crash():
    assert "Be brief." in _render(LLAMA3, SYSTEM, SYSTEM)
    with pytest.raises(BadInput, match="System role"):
        _render(GEMMA, SYSTEM)


def test_developer_is_system_where_the_template_does_not_know_it():
    developer = Message("developer", "Be brief.")
    assert _render(CHATML, developer, USER) == _render(CHATML, SYSTEM, USER)
    knows = "{% for m in messages %}{% if m.role == 'developer' %}D{% endif %}{% endfor %}"
    assert _render(knows, developer) == "D"


CALL = Message("assistant", "", tool_calls=(ToolCall("1", "add", '{"a": 1}'), ToolCall("2", "add", "broken")))
RESULTS = (Message("tool", "one", tool_call_id="1"), Message("tool", "two", tool_call_id="2"))


def test_tool_results_are_one_user_turn_where_the_template_does_not_know_them():
    text = _render(GEMMA, USER, CALL, *RESULTS, Message("user", "go on"))
    assert text.endswith("<start_of_turn>user\none\n\ntwo\n\ngo on<end_of_turn>\n<start_of_turn>model\n")
    assert '{"name": "add", "arguments": {"a": 1}}\n{"name": "add", "arguments": broken}' in text


def test_tool_calls_are_parsed_where_the_template_knows_them():
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments|tojson }}"
        "{% endfor %}{% if m.role == 'tool' %}={{ m.content }}{{ m.tool_call_id }}{% endif %}{% endfor %}"
    )
    assert _render(source, USER, CALL, *RESULTS) == 'add{"a": 1}add"broken"=one1=two2'


def test_arguments_are_text_where_the_template_wants_them_so():
    source = "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    source += "{{ '' + c.function.arguments }};{% endfor %}{% endfor %}"
    assert _render(source, USER, CALL) == '{"a":1};broken;'


def test_models_without_a_template_get_a_plain_one():
    model = family("plain")
    assert model.render([SYSTEM, USER]) == "System: Be brief.\nUser: hi\nAssistant:"
    assert model.chat_stops == ("\nUser:", "\nSystem:")
    assert family("chatml").chat_stops == ()


def test_joining_tool_results_takes_linear_time():
    template = ChatTemplate(LLAMA2)
    messages = [USER, *[Message("tool", "x" * 200)] * 20_000]
    assert cpu_s(lambda: template.turns(messages)) < 1
