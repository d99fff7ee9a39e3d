"""The official clients, unchanged, against the app on a real port."""

from collections.abc import Iterator

import anthropic
import cloudflare
import httpx
import openai
import pytest

from emberline.protocol.errors import Overloaded

from .loopback import Loopback, on_loopback
from .scripted import KEY, MODEL, ScriptedService, app_of, hello

MESSAGES = [{"role": "user", "content": "Hi"}]
_service = ScriptedService()


@pytest.fixture(scope="module")
def server() -> Iterator[Loopback]:
    with on_loopback(app_of(_service, KEY)) as server:
        yield server


@pytest.fixture
def service() -> ScriptedService:
    _service.requests.clear()
    _service.principals.clear()
    _service.script = hello
    return _service


@pytest.fixture(params=["/v1", "/client/v4/accounts/acme/ai/v1"])
def to_openai(server: Loopback, request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + request.param, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(params=["", "/client/v4/accounts/acme/ai", "/client/v4/accounts/acme/ai/v1"])
def to_anthropic(server: Loopback, request: pytest.FixtureRequest) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url + request.param, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def to_cloudflare(server: Loopback) -> Iterator[cloudflare.Cloudflare]:
    with cloudflare.Cloudflare(base_url=server.url + "/client/v4", api_token=KEY, max_retries=0) as client:
        yield client


def test_openai_chat(to_openai: openai.OpenAI, service: ScriptedService) -> None:
    session = {"x-session-affinity": "ses_1"}
    answer = to_openai.chat.completions.create(model=MODEL, messages=MESSAGES, extra_headers=session)
    assert answer.choices[0].message.content == "Hello!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens_details.cached_tokens == 8
    assert service.requests[0].session == "ses_1"
    assert answer._request_id == service.requests[0].id


def test_openai_chat_stream(to_openai: openai.OpenAI, service: ScriptedService) -> None:
    options = {"include_usage": True}
    chunks = list(
        to_openai.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, stream_options=options)
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello!"
    assert [chunk.usage.prompt_tokens_details.cached_tokens for chunk in chunks if chunk.usage] == [8]


def test_openai_stream_helper(to_openai: openai.OpenAI, service: ScriptedService) -> None:
    with to_openai.chat.completions.stream(model=MODEL, messages=MESSAGES) as stream:
        assert stream.get_final_completion().choices[0].message.content == "Hello!"


def test_openai_completions(to_openai: openai.OpenAI, service: ScriptedService) -> None:
    answer = to_openai.completions.create(model=MODEL, prompt=["a", "b"], n=2)
    assert [choice.text for choice in answer.choices] == ["Hello!"] * 4
    streamed = to_openai.completions.create(model=MODEL, prompt="a", stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == "Hello!"


def test_openai_models(to_openai: openai.OpenAI, service: ScriptedService) -> None:
    assert MODEL in [model.id for model in to_openai.models.list()]
    assert to_openai.models.retrieve(MODEL).id == MODEL


def test_openai_errors(to_openai: openai.OpenAI, service: ScriptedService) -> None:
    with pytest.raises(openai.NotFoundError, match="nope"):
        to_openai.chat.completions.create(model="nope", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as refused:
        to_openai.chat.completions.create(model=MODEL, messages=MESSAGES, response_format={"type": "json_object"})
    assert refused.value.param == "response_format"
    with pytest.raises(openai.AuthenticationError):
        to_openai.with_options(api_key="wrong").models.list()


def test_openai_retries_what_is_overloaded(to_openai: openai.OpenAI, service: ScriptedService) -> None:
    async def full_at_first(request):
        if len(service.requests) < 2:
            raise Overloaded("full", retry_after_s=0.01)
        async for event in hello(request):
            yield event

    service.script = full_at_first
    answer = to_openai.with_options(max_retries=1).chat.completions.create(model=MODEL, messages=MESSAGES)
    assert answer.choices[0].message.content == "Hello!"


def test_openai_hears_of_a_broken_stream(to_openai: openai.OpenAI, service: ScriptedService) -> None:
    async def breaks(request):
        async for event in hello(request):
            yield event
            if getattr(event, "text", "") == "lo":
                raise Overloaded("the engine went away")

    service.script = breaks
    with pytest.raises(openai.APIError, match="the engine went away"):
        list(to_openai.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True))


def test_anthropic_messages(to_anthropic: anthropic.Anthropic, service: ScriptedService) -> None:
    answer = to_anthropic.messages.create(model=MODEL, max_tokens=9, system="Be kind.", messages=MESSAGES)
    assert answer.content[0].text == "Hello!"
    assert answer.stop_reason == "end_turn"
    assert (answer.usage.input_tokens, answer.usage.cache_read_input_tokens, answer.usage.output_tokens) == (4, 8, 3)
    assert [message.role for message in service.requests[0].messages or ()] == ["system", "user"]


def test_anthropic_stream(to_anthropic: anthropic.Anthropic, service: ScriptedService) -> None:
    with to_anthropic.messages.stream(model=MODEL, max_tokens=9, messages=MESSAGES) as stream:
        assert list(stream.text_stream) == ["Hel", "lo", "!"]
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn"
    assert (final.usage.input_tokens, final.usage.cache_read_input_tokens, final.usage.output_tokens) == (4, 8, 3)


def test_anthropic_count_tokens(to_anthropic: anthropic.Anthropic, service: ScriptedService) -> None:
    assert to_anthropic.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens == 1


def test_anthropic_errors(to_anthropic: anthropic.Anthropic, service: ScriptedService) -> None:
    with pytest.raises(anthropic.NotFoundError, match="nope"):
        to_anthropic.messages.create(model="nope", max_tokens=9, messages=MESSAGES)
    with pytest.raises(anthropic.AuthenticationError):
        to_anthropic.with_options(api_key="wrong").messages.create(model=MODEL, max_tokens=9, messages=MESSAGES)


def test_anthropic_with_a_bearer_token(server: Loopback, service: ScriptedService) -> None:
    with anthropic.Anthropic(base_url=server.url, auth_token=KEY, max_retries=0) as client:
        assert client.messages.create(model=MODEL, max_tokens=9, messages=MESSAGES).content[0].text == "Hello!"


def test_cloudflare_run(to_cloudflare: cloudflare.Cloudflare, service: ScriptedService) -> None:
    answer = to_cloudflare.ai.run(MODEL, account_id="acme", prompt="Hi")
    assert answer["response"] == "Hello!"
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}
    assert service.principals[0].account == "acme"
    answer = to_cloudflare.ai.run(MODEL, account_id="acme", messages=MESSAGES, temperature=0.0)
    assert answer["response"] == "Hello!"


def test_cloudflare_stream(to_cloudflare: cloudflare.Cloudflare, service: ScriptedService) -> None:
    with to_cloudflare.ai.with_streaming_response.run(MODEL, account_id="acme", prompt="Hi", stream=True) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[0].startswith('data: {"response":"Hel","p":"')
    assert lines[-1] == "data: [DONE]"


def test_cloudflare_catalog(to_cloudflare: cloudflare.Cloudflare, service: ScriptedService) -> None:
    names = [model["name"] for model in to_cloudflare.ai.models.list(account_id="acme", per_page=1)]
    assert names == [MODEL, "@hf/acme/tiny"]
    assert to_cloudflare.ai.models.schema.get(account_id="acme", model=MODEL).input.type == "object"
    assert [row["name"] for row in to_cloudflare.ai.tasks.list(account_id="acme")] == ["Text Generation"]
    assert len(list(to_cloudflare.ai.authors.list(account_id="acme"))) == 2


def test_cloudflare_errors(to_cloudflare: cloudflare.Cloudflare, service: ScriptedService) -> None:
    with pytest.raises(cloudflare.BadRequestError) as refused:
        to_cloudflare.ai.run("@cf/no/such", account_id="acme", prompt="Hi")
    assert refused.value.errors[0].code == 5007
    with pytest.raises(cloudflare.AuthenticationError):
        to_cloudflare.with_options(api_token="wrong").ai.tasks.list(account_id="acme")


def test_curl_without_a_content_type(server: Loopback, service: ScriptedService) -> None:
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/x-www-form-urlencoded"}
    url = f"{server.url}/client/v4/accounts/acme/ai/run/{MODEL}"
    assert httpx.post(url, content='{"prompt": "Hi"}', headers=headers).json()["result"]["response"] == "Hello!"
