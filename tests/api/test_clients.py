"""The official clients, unchanged, against the app on a real port."""

import json
from collections.abc import Iterator

import httpx
import pydantic
import pytest

from emberline.protocol.errors import Overloaded
from emberline.protocol.events import ChoiceDone, TextDelta
from emberline.protocol.request import Message, OutputFormat, Reasoning, ToolCall, ToolChoice
from tests.api.fake_service import AGENT, KEY, MODEL, FakeService, agent, app_of, hello, says
from tests.api.loopback import Loopback, on_loopback
from tests.lazy_modules import anthropic, cloudflare, openai

MESSAGES = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}
_service = FakeService()


class Town(pydantic.BaseModel):
    """A town."""

    town: str


async def looks_then_answers(request):
    """Calls tools until there are results, then repeats the results."""
    messages = request.messages or ()
    results = [message.content for message in messages if message.role == "tool"]
    script = says(TextDelta(0, " and ".join(results)), ChoiceDone(0, "stop")) if results else agent
    async for event in script(request):
        yield event


THE_CALLS = (ToolCall("call_a", "weather", '{"town":"Oslo"}'), ToolCall("call_b", "weather", '{"town":"Rome"}'))


@pytest.fixture(scope="module")
def server() -> Iterator[Loopback]:
    with on_loopback(app_of(_service, KEY)) as server:
        yield server


@pytest.fixture
def service() -> FakeService:
    _service.requests.clear()
    _service.principals.clear()
    _service.script = hello
    return _service


@pytest.fixture(params=["/v1", "/client/v4/accounts/acme/ai/v1"])
def to_openai(server: Loopback, request: pytest.FixtureRequest) -> Iterator["openai.OpenAI"]:
    with openai.OpenAI(base_url=server.url + request.param, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(params=["", "/client/v4/accounts/acme/ai", "/client/v4/accounts/acme/ai/v1"])
def to_anthropic(server: Loopback, request: pytest.FixtureRequest) -> Iterator["anthropic.Anthropic"]:
    with anthropic.Anthropic(base_url=server.url + request.param, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def to_cloudflare(server: Loopback) -> Iterator["cloudflare.Cloudflare"]:
    with cloudflare.Cloudflare(base_url=server.url + "/client/v4", api_token=KEY, max_retries=0) as client:
        yield client


def test_openai_chat(to_openai: "openai.OpenAI", service: FakeService) -> None:
    session = {"x-session-affinity": "ses_1"}
    answer = to_openai.chat.completions.create(model=MODEL, messages=MESSAGES, extra_headers=session)
    assert answer.choices[0].message.content == "Hello!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens_details.cached_tokens == 8
    assert service.requests[0].session == "ses_1"
    assert answer._request_id == service.requests[0].id


def test_openai_chat_stream(to_openai: "openai.OpenAI", service: FakeService) -> None:
    options = {"include_usage": True}
    chunks = list(
        to_openai.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, stream_options=options)
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello!"
    assert [chunk.usage.prompt_tokens_details.cached_tokens for chunk in chunks if chunk.usage] == [8]


def test_openai_stream_helper(to_openai: "openai.OpenAI", service: FakeService) -> None:
    with to_openai.chat.completions.stream(model=MODEL, messages=MESSAGES) as stream:
        assert stream.get_final_completion().choices[0].message.content == "Hello!"


def test_openai_completions(to_openai: "openai.OpenAI", service: FakeService) -> None:
    answer = to_openai.completions.create(model=MODEL, prompt=["a", "b"], n=2)
    assert [choice.text for choice in answer.choices] == ["Hello!"] * 4
    streamed = to_openai.completions.create(model=MODEL, prompt="a", stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == "Hello!"


def test_openai_models(to_openai: "openai.OpenAI", service: FakeService) -> None:
    assert MODEL in [model.id for model in to_openai.models.list()]
    assert to_openai.models.retrieve(MODEL).id == MODEL


def test_openai_errors(to_openai: "openai.OpenAI", service: FakeService) -> None:
    with pytest.raises(openai.NotFoundError, match="nope"):
        to_openai.chat.completions.create(model="nope", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as refused:
        to_openai.chat.completions.create(model=MODEL, messages=MESSAGES, tool_choice="required")
    assert refused.value.param == "tool_choice"
    with pytest.raises(openai.AuthenticationError):
        to_openai.with_options(api_key="wrong").models.list()


def test_openai_retries_what_is_overloaded(to_openai: "openai.OpenAI", service: FakeService) -> None:
    async def full_at_first(request):
        if len(service.requests) < 2:
            raise Overloaded("full", retry_after_s=0.01)
        async for event in hello(request):
            yield event

    service.script = full_at_first
    answer = to_openai.with_options(max_retries=1).chat.completions.create(model=MODEL, messages=MESSAGES)
    assert answer.choices[0].message.content == "Hello!"


def test_openai_client_reports_a_broken_stream(to_openai: "openai.OpenAI", service: FakeService) -> None:
    async def breaks(request):
        async for event in hello(request):
            yield event
            if getattr(event, "text", "") == "lo":
                raise Overloaded("the engine went away")

    service.script = breaks
    with pytest.raises(openai.APIError, match="the engine went away"):
        list(to_openai.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True))


def test_openai_parses_into_a_model(to_openai: "openai.OpenAI", service: FakeService) -> None:
    service.script = says(TextDelta(0, '{"town":'), TextDelta(0, '"Oslo"}'), ChoiceDone(0, "stop"))
    answer = to_openai.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Town)
    assert answer.choices[0].message.parsed == Town(town="Oslo")
    output = service.requests[0].output
    assert output is not None
    assert (output.kind, output.value["required"], output.value["additionalProperties"]) == (
        "json_schema", ["town"], False,
    )  # fmt: skip
    with to_openai.chat.completions.stream(model=MODEL, messages=MESSAGES, response_format=Town) as stream:
        events = list(stream)
        assert stream.get_final_completion().choices[0].message.parsed == Town(town="Oslo")
    deltas = [event.delta for event in events if event.type == "content.delta"]
    assert deltas == ["", '{"town":', '"Oslo"}']  # the first is the role's
    assert [event.parsed for event in events if event.type == "content.done"] == [Town(town="Oslo")]


def test_openai_tools_streamed_as_events(to_openai: "openai.OpenAI", service: FakeService) -> None:
    service.script = agent
    tool = openai.pydantic_function_tool(Town, name="weather")
    with to_openai.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=[tool]) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert "".join(event.arguments_delta for event in deltas if event.index == 0) == '{"town":"Oslo"}'
    assert [event.arguments for event in done] == ['{"town":"Oslo"}', '{"town":"Rome"}']
    assert [event.parsed_arguments for event in done] == [Town(town="Oslo"), Town(town="Rome")]
    assert final.choices[0].finish_reason == "tool_calls"
    assert [call.id for call in final.choices[0].message.tool_calls] == ["call_a", "call_b"]
    assert final.choices[0].message.content == "Let me look."
    assert service.requests[0].tools[0].strict
    whole = to_openai.chat.completions.parse(model=MODEL, messages=MESSAGES, tools=[tool])
    parsed = [call.function.parsed_arguments for call in whole.choices[0].message.tool_calls]
    assert parsed == [Town(town="Oslo"), Town(town="Rome")]
    assert whole.choices[0].message.reasoning_content == "Two towns."
    assert whole.usage.completion_tokens_details.reasoning_tokens == 4


@pytest.mark.parametrize("streamed", [False, True])
def test_openai_tool_loop(to_openai: "openai.OpenAI", service: FakeService, streamed: bool) -> None:
    service.script = looks_then_answers
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    messages: list = list(MESSAGES)
    while True:
        asked = {"model": MODEL, "messages": messages, "tools": tools}
        if streamed:
            with to_openai.chat.completions.stream(**asked) as stream:
                message = stream.get_final_completion().choices[0].message
        else:
            message = to_openai.chat.completions.create(**asked, tool_choice="auto").choices[0].message
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            town = json.loads(call.function.arguments)["town"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"rain in {town}"})
    assert message.content == "rain in Oslo and rain in Rome"
    assert service.requests[1].messages == (
        Message("user", "Hi"),
        Message("assistant", "Let me look.", tool_calls=THE_CALLS, reasoning="Two towns."),
        Message("tool", "rain in Oslo", tool_call_id="call_a"),
        Message("tool", "rain in Rome", tool_call_id="call_b"),
    )


def test_openai_deprecated_functions(to_openai: "openai.OpenAI", service: FakeService) -> None:
    service.script = says(*AGENT[4:])
    asked = {"model": MODEL, "messages": MESSAGES, "functions": [{"name": "weather", "parameters": SCHEMA}]}
    choice = to_openai.chat.completions.create(**asked, function_call={"name": "weather"}).choices[0]
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("function_call", None, None)
    assert choice.message.function_call.arguments == '{"town":"Oslo"}'
    assert service.requests[0].tool_choice == ToolChoice("required", "weather")
    chunks = to_openai.chat.completions.create(**asked, stream=True)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    called = [delta.function_call for delta in deltas if delta.function_call]
    assert called[0].name == "weather"
    assert "".join(call.arguments for call in called) == '{"town":"Oslo"}'


def test_anthropic_messages(to_anthropic: "anthropic.Anthropic", service: FakeService) -> None:
    answer = to_anthropic.messages.create(model=MODEL, max_tokens=9, system="Be kind.", messages=MESSAGES)
    assert answer.content[0].text == "Hello!"
    assert answer.stop_reason == "end_turn"
    assert (answer.usage.input_tokens, answer.usage.cache_read_input_tokens, answer.usage.output_tokens) == (4, 8, 3)
    assert [message.role for message in service.requests[0].messages or ()] == ["system", "user"]


def test_anthropic_stream(to_anthropic: "anthropic.Anthropic", service: FakeService) -> None:
    with to_anthropic.messages.stream(model=MODEL, max_tokens=9, messages=MESSAGES) as stream:
        assert list(stream.text_stream) == ["Hel", "lo", "!"]
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn"
    assert (final.usage.input_tokens, final.usage.cache_read_input_tokens, final.usage.output_tokens) == (4, 8, 3)


def test_anthropic_tools_and_thinking_streamed(to_anthropic: "anthropic.Anthropic", service: FakeService) -> None:
    service.script = looks_then_answers
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    asked = {"model": MODEL, "max_tokens": 9000, "tools": tools, "thinking": {"type": "enabled", "budget_tokens": 2000}}
    with to_anthropic.messages.stream(**asked, messages=MESSAGES) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert final.content[0].thinking == "Two towns."
    assert final.content[0].signature
    assert [block.input for block in final.content[2:]] == [{"town": "Oslo"}, {"town": "Rome"}]
    assert final.stop_reason == "tool_use"
    assert {"thinking", "signature", "text", "input_json"} <= set(kinds)
    whole = to_anthropic.messages.create(**asked, messages=MESSAGES)
    assert [block.to_dict() for block in whole.content] == [
        {name: value for name, value in block.to_dict().items() if name != "parsed_output"} for block in final.content
    ]
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": f"rain in {block.input['town']}"}
        for block in final.content[2:]
    ]
    turns = [*MESSAGES, {"role": "assistant", "content": final.content}, {"role": "user", "content": results}]
    with to_anthropic.messages.stream(**asked, messages=turns) as stream:
        assert stream.get_final_text() == "rain in Oslo and rain in Rome"
    assert service.requests[-1].reasoning == Reasoning(enabled=True, budget_tokens=2000)
    assert service.requests[-1].messages == (
        Message("user", "Hi"),
        Message("assistant", "Let me look.", tool_calls=THE_CALLS, reasoning="Two towns."),
        Message("tool", "rain in Oslo", tool_call_id="call_a"),
        Message("tool", "rain in Rome", tool_call_id="call_b"),
    )


def test_anthropic_parses_into_a_model(to_anthropic: "anthropic.Anthropic", service: FakeService) -> None:
    service.script = says(TextDelta(0, '{"town":"Oslo"}'), ChoiceDone(0, "stop"))
    answer = to_anthropic.messages.parse(model=MODEL, max_tokens=9, messages=MESSAGES, output_format=Town)
    assert answer.parsed_output == Town(town="Oslo")
    output = service.requests[0].output
    assert output is not None
    assert (output.kind, output.value["required"]) == ("json_schema", ["town"])


def test_anthropic_count_tokens(to_anthropic: "anthropic.Anthropic", service: FakeService) -> None:
    assert to_anthropic.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens == 1


def test_anthropic_errors(to_anthropic: "anthropic.Anthropic", service: FakeService) -> None:
    with pytest.raises(anthropic.NotFoundError, match="nope"):
        to_anthropic.messages.create(model="nope", max_tokens=9, messages=MESSAGES)
    with pytest.raises(anthropic.AuthenticationError):
        to_anthropic.with_options(api_key="wrong").messages.create(model=MODEL, max_tokens=9, messages=MESSAGES)


def test_anthropic_with_a_bearer_token(server: Loopback, service: FakeService) -> None:
    with anthropic.Anthropic(base_url=server.url, auth_token=KEY, max_retries=0) as client:
        assert client.messages.create(model=MODEL, max_tokens=9, messages=MESSAGES).content[0].text == "Hello!"


def test_cloudflare_run(to_cloudflare: "cloudflare.Cloudflare", service: FakeService) -> None:
    answer = to_cloudflare.ai.run(MODEL, account_id="acme", prompt="Hi")
    assert answer["response"] == "Hello!"
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}
    assert service.principals[0].account == "acme"
    answer = to_cloudflare.ai.run(MODEL, account_id="acme", messages=MESSAGES, temperature=0.0)
    assert answer["response"] == "Hello!"


def test_cloudflare_tools_and_json_mode(to_cloudflare: "cloudflare.Cloudflare", service: FakeService) -> None:
    service.script = agent
    tools = [{"name": "weather", "description": "Tells the weather.", "parameters": SCHEMA}]
    answer = to_cloudflare.ai.run(MODEL, account_id="acme", messages=MESSAGES, tools=tools)
    assert [call["arguments"] for call in answer["tool_calls"]] == [{"town": "Oslo"}, {"town": "Rome"}]
    service.script = says(TextDelta(0, '{"town":"Oslo"}'), ChoiceDone(0, "stop"))
    wanted = {"type": "json_schema", "json_schema": SCHEMA}
    answer = to_cloudflare.ai.run(MODEL, account_id="acme", messages=MESSAGES, response_format=wanted)
    assert answer["response"] == {"town": "Oslo"}
    assert service.requests[-1].output == OutputFormat("json_schema", SCHEMA)


def test_cloudflare_stream(to_cloudflare: "cloudflare.Cloudflare", service: FakeService) -> None:
    with to_cloudflare.ai.with_streaming_response.run(MODEL, account_id="acme", prompt="Hi", stream=True) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[0].startswith('data: {"response":"Hel","p":"')
    assert lines[-1] == "data: [DONE]"


def test_cloudflare_catalog(to_cloudflare: "cloudflare.Cloudflare", service: FakeService) -> None:
    names = [model["name"] for model in to_cloudflare.ai.models.list(account_id="acme", per_page=1)]
    assert names == [MODEL, "@hf/acme/tiny"]
    assert to_cloudflare.ai.models.schema.get(account_id="acme", model=MODEL).input.type == "object"
    tasks = [row["name"] for row in to_cloudflare.ai.tasks.list(account_id="acme")]
    assert tasks[:4] == ["Text Generation", "Text Embeddings", "Text Classification", "Automatic Speech Recognition"]
    assert tasks[4:] == ["Text-to-Speech", "Text-to-Image", "Text-to-Video", "Prediction"], "and a user's"
    assert len(list(to_cloudflare.ai.authors.list(account_id="acme"))) == 2


def test_cloudflare_errors(to_cloudflare: "cloudflare.Cloudflare", service: FakeService) -> None:
    with pytest.raises(cloudflare.BadRequestError) as refused:
        to_cloudflare.ai.run("@cf/no/such", account_id="acme", prompt="Hi")
    assert refused.value.errors[0].code == 5007
    with pytest.raises(cloudflare.AuthenticationError):
        to_cloudflare.with_options(api_token="wrong").ai.tasks.list(account_id="acme")


def test_curl_without_a_content_type(server: Loopback, service: FakeService) -> None:
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/x-www-form-urlencoded"}
    url = f"{server.url}/client/v4/accounts/acme/ai/run/{MODEL}"
    assert (
        httpx.post(url, content='{"prompt": "Hi"}', headers=headers, timeout=60).json()["result"]["response"]
        == "Hello!"
    )
