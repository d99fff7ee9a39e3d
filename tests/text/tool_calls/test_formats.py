import pytest

from emberline.text.tool_calls.formats import FORMATS_BY_FAMILY, detect_tool_format
from tests.text.chats import CHATML, FAMILIES, family
from tests.text.chats import LLAMA3 as LLAMA3_PLAIN
from tests.text.tool_calls.models import (
    CALLERS,
    DEEPSEEK,
    DEEPSEEK_V31,
    GLM,
    GLM_LINES,
    KIMI,
    LLAMA3,
    MISTRAL,
    MISTRAL_LIST,
    QWEN,
    QWEN3_CODER,
    model,
)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (QWEN, "hermes"),
        (LLAMA3, "llama3"),
        (MISTRAL_LIST, "mistral"),
        (MISTRAL_LIST.replace("[TOOL_CALLS]", "[TOOL_CALLS] "), "mistral"),
        (MISTRAL, "mistral-args"),
        (KIMI, "kimi"),
        (CHATML, "generic"),
        (LLAMA3_PLAIN, "generic"),
        (DEEPSEEK, "deepseek"),
        (DEEPSEEK_V31, "deepseek-v3.1"),
        (GLM, "glm"),
        (GLM_LINES, "glm-lines"),
        (QWEN3_CODER, "qwen3-coder"),
        (LLAMA3.replace("start_header_id", "header_start"), "llama3"),  # Llama 4's
        ("{{ tools }}<|channel|>analysis<|message|><|channel|>commentary", "harmony"),
        ("{{ tools }}<tool_call>\n<invoke name=x>", "generic"),  # calls that are not known
        ("{{ tools }}[TOOL_CALLS]name[CALL_ID]id[ARGS]{}", "generic"),
        ("{{ tools }} in a way that is not known", "generic"),
    ],
)
def test_a_family_is_known_by_its_template(source: str, name: str) -> None:
    assert detect_tool_format(source, "tools" in source, {}).family == name


def test_a_template_that_takes_no_tools_gets_the_generic_form() -> None:
    assert detect_tool_format("<tool_call> arguments", supports_tools=False, special={}).untemplated


def test_marks_are_tokens_where_the_tokenizer_has_them_as_special() -> None:
    assert model("qwen").tool_format.tokens == {}
    special = model("hermes-special")
    assert special.tool_format.tokens == {
        mark: special.tokenizer.special[mark] for mark in ("<tool_call>", "</tool_call>")
    }
    assert len(model("kimi").tool_format.tokens) == 5
    assert model("generic").tool_format.tokens == {}


def test_forms_are_found_by_name() -> None:
    for name in CALLERS:
        form = model(name).tool_format
        assert FORMATS_BY_FAMILY[form.family].at(form.tokens) == form


def test_models_without_tools_in_their_templates_have_the_generic_form() -> None:
    assert {family(name).tool_format.family for name in FAMILIES} == {"generic"}
