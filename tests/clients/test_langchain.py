"""LangChain's standard tests of chat models: over chat completions, responses and messages."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.conftest import HERE, Run
from tests.e2e.clients.reply_script import reply_script, text_reply, tool_call
from tests.e2e.clients.scripted_server import scripted_server

JOKE = {"setup": "Why do cats sit on keyboards?", "punchline": "To reach the mouse."}
JSON_JOKE = '{"setup": "Why do cats sit on keyboards?", "punchline": "To reach the mouse."}'
# What the model says to the suite's prompts. It is scripted, and the server holds it to tools and schemas.
SCRIPT = reply_script(
    text_reply("Hello from Emberline."),
    tool_call("magic_function", trigger="Hello!", input=3),
    tool_call("magic_function", trigger="magic_function(3)", input=3),
    tool_call("magic_function_no_args", trigger="magic_function_no_args()"),
    tool_call("greeting_generator", trigger="generate a Pirate greeting", answer_style="Pirate"),
    tool_call("my_adder_tool", trigger="What is 3 + 4", a=3, b=4),
    tool_call("get_weather", trigger="weather in San Francisco", location="San Francisco, CA"),
    text_reply("It is sunny.", trigger="It's sunny."),
    tool_call("unicode_customer", trigger="你好啊集团", customer_name="你好啊集团", description="Technology"),
    tool_call(
        "unicode_customer", trigger="こんにちは株式会社", customer_name="こんにちは株式会社", description="Software"
    ),
    text_reply(JSON_JOKE, trigger="about cats"),
    tool_call("Joke", trigger="Joke to tell user", **JOKE),
    tool_call("JokeDict", trigger="JokeDict", **JOKE),
)
# What the suite leaves out: input that models of text cannot read, and a measurement with recorded replies.
SKIPPED = {
    "Model does not support PDF inputs.",
    "Model does not support PDF tool message.",
    "Model does not support audio inputs.",
    "Model does not support image message.",
    "Model does not support image tool message.",
    "VCR not set up.",
}
# And what one API has and another one lacks: content as in Anthropic's API, JSON without a schema.
SKIPPED_BY_API = {
    "ChatCompletions": {"Model does not explicitly support Anthropic inputs."},
    "Responses": {"Model does not explicitly support Anthropic inputs."},
    "Messages": {"Test requires json mode support."},
}


@pytest.fixture(scope="module")
def langchain_server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with scripted_server(SCRIPT, smollm2, tmp_path_factory.mktemp("langchain") / "home") as url:
        yield url


@pytest.mark.parametrize("api", SKIPPED_BY_API)
def test_standard_tests(run: Run, installed: Path, langchain_server: str, tmp_path: Path, api: str) -> None:
    suite = [HERE / "langchain_standard.py", "-k", f"Test{api}", "-rsxX", "-q", "--noconftest", "-c", "/dev/null"]
    # One event loop for all tests: the clients keep their connections between them.
    settings = ("mode=auto", "default_test_loop_scope=session", "default_fixture_loop_scope=session")
    options = [*("-p", "no:cacheprovider"), *(word for setting in settings for word in ("-o", f"asyncio_{setting}"))]
    python = installed / "python" / "bin" / "python"
    printed = run(python, "-m", "pytest", *suite, *options, cwd=tmp_path, EMBERLINE_URL=langchain_server)
    skipped = set(re.findall(r"^SKIPPED \[\d+\] \S+: (.*)$", printed, re.MULTILINE))
    assert skipped == SKIPPED | SKIPPED_BY_API[api]
    found = re.search(r"^(\d+) passed, (\d+) skipped, \d+ deselected", printed, re.MULTILINE)
    assert found is not None, printed  # nothing failed, nor was expected to
    assert (int(found[1]) > 40, int(found[2])) == (True, len(skipped))
