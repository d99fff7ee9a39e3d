"""The official `openai` package on the Responses API, over a real port and the real store."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from emberline.protocol.complete_response import StoredResponse
from emberline.protocol.errors import Unavailable
from emberline.protocol.events import ReasoningDelta, Started, TextDelta
from emberline.protocol.request import GenerateRequest, Message, OutputFormat, ToolCall
from emberline.service.responses import DatabaseResponses
from emberline.store import SqliteStore
from tests.api.fake_service import KEY, MODEL, USAGE, FakeService, app_of, hello
from tests.api.loopback import Loopback, on_loopback
from tests.api.openai.responses.test_endpoints import WEATHER, calling, saying
from tests.lazy_modules import openai


class InServersLoop:
    """The real service, opened by the serving thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened: DatabaseResponses | None = None

    async def _responses(self) -> DatabaseResponses:
        if self._opened is None:
            self._opened = DatabaseResponses(await SqliteStore.open(self._path))
        return self._opened

    async def put(self, record: StoredResponse) -> bool:
        return await (await self._responses()).put(record)

    async def get(self, account: str, response_id: str, whole: bool = False) -> list[StoredResponse]:
        return await (await self._responses()).get(account, response_id, whole)

    async def delete(self, account: str, response_id: str) -> bool:
        return await (await self._responses()).delete(account, response_id)


_service = FakeService()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loopback]:
    _service.responses = InServersLoop(tmp_path_factory.mktemp("responses") / "t.db")
    with on_loopback(app_of(_service, KEY)) as server:
        yield server


@pytest.fixture
def service() -> FakeService:
    _service.requests.clear()
    _service.script = hello
    return _service


@pytest.fixture(params=["/v1", "/client/v4/accounts/acme/ai/v1"])
def client(server: Loopback, request: pytest.FixtureRequest) -> Iterator["openai.OpenAI"]:
    with openai.OpenAI(base_url=server.url + request.param, api_key=KEY, max_retries=0) as client:
        yield client


def agent(request: GenerateRequest) -> Any:
    """Calls the weather tool for a new city until it has three results, then answers."""
    known = [message.content for message in request.messages or () if message.role == "tool"]
    if len(known) == 3:
        return saying(TextDelta(0, "All "), TextDelta(0, ", ".join(known)))(request)
    city = ("Rome", "Oslo", "Lima")[len(known)]
    call = calling("weather", '{"city":', f'"{city}"', "}", call_id=f"call_{city}")
    return saying(ReasoningDelta(0, f"Next is {city}."), *call, finish="tool_calls")(request)


def results(response: "openai.types.responses.Response") -> list[dict[str, Any]]:
    return [
        {
            "type": "function_call_output",
            "call_id": item.call_id,
            "output": f"sun in {json.loads(item.arguments)['city']}",
        }
        for item in response.output
        if item.type == "function_call"
    ]


def strict(response: "openai.types.responses.Response") -> None:
    """Every required field is present and has its type, which the client itself does not check."""
    openai.types.responses.Response.model_validate(response.model_dump(by_alias=True, warnings=False), strict=True)


def test_create_retrieve_delete(client: "openai.OpenAI", service: FakeService) -> None:
    made = client.responses.create(model=MODEL, input="Hi", metadata={"k": "v"}, tools=[WEATHER])
    strict(made)
    assert made.output_text == "Hello!"
    assert (made.status, made.usage.input_tokens_details.cached_tokens) == ("completed", 8)
    again = client.responses.retrieve(made.id)
    strict(again)
    assert again == made
    items = client.responses.input_items.list(made.id, order="asc").data
    assert [(item.role, item.content[0].text) for item in items] == [("user", "Hi")]
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=MODEL, input="Hi", previous_response_id=made.id)
    assert refused.value.param == "previous_response_id"


def test_stream(client: "openai.OpenAI", service: FakeService) -> None:
    service.script = saying(ReasoningDelta(0, "Hm."), TextDelta(0, "Hel"), TextDelta(0, "lo"))
    events = list(client.responses.create(model=MODEL, input="Hi", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Hello"
    final = events[-1].response
    strict(final)
    assert client.responses.retrieve(final.id) == final
    with client.responses.stream(model=MODEL, input="Hi") as stream:
        last = [event.type for event in stream][-1]
        helped = stream.get_final_response()
    assert last == "response.completed"
    assert helped.output_text == "Hello"
    assert helped.output[0].content[0].text == "Hm."


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", ["by id", "stateless"])
def test_a_loop_of_tools(client: "openai.OpenAI", service: FakeService, way: str, stream: bool) -> None:
    service.script = agent
    history: list[Any] = [{"role": "user", "content": "Weather?"}]
    options: dict[str, Any] = {"model": MODEL, "tools": [WEATHER], "instructions": "Be brief."}
    if way == "stateless":
        options |= {"store": False, "include": ["reasoning.encrypted_content"]}
    response, new = None, history
    while response is None or new:
        given = new if way == "by id" else history
        previous = response.id if way == "by id" and response else None
        extra = {"previous_response_id": previous} if previous else {}
        if stream:
            with client.responses.stream(input=given, **options, **extra) as events:
                for _ in events:
                    pass
                response = events.get_final_response()
        else:
            response = client.responses.create(input=given, **options, **extra)
        new = results(response)
        history = [*history, *response.output, *new]
    assert response.output_text == "All sun in Rome, sun in Oslo, sun in Lima"
    assert len(service.requests) == 4
    assert len({request.session for request in service.requests}) == 1
    for one, two in zip(service.requests, service.requests[1:], strict=False):
        assert two.messages[: len(one.messages)] == one.messages  # so the prompt's cache is hit
    city = ToolCall("call_Rome", "weather", '{"city":"Rome"}')
    assert service.requests[3].messages[2:4] == (
        Message("assistant", "", tool_calls=(city,), reasoning="Next is Rome."),
        Message("tool", "sun in Rome", tool_call_id="call_Rome"),
    )


class Person(BaseModel):
    name: str
    kind: Literal["cat", "dog"]


def test_parse(client: "openai.OpenAI", service: FakeService) -> None:
    service.script = saying(TextDelta(0, '{"name":"Tom",'), TextDelta(0, '"kind":"cat"}'))
    response = client.responses.parse(model=MODEL, input="Who?", text_format=Person)
    assert response.output_parsed == Person(name="Tom", kind="cat")
    output = service.requests[0].output
    assert isinstance(output, OutputFormat)
    assert output.value["required"] == ["name", "kind"]
    with client.responses.stream(model=MODEL, input="Who?", text_format=Person) as stream:
        assert stream.get_final_response().output_parsed == Person(name="Tom", kind="cat")


def test_parsed_tools(client: "openai.OpenAI", service: FakeService) -> None:
    service.script = saying(*calling("Person", '{"name":"Tom","kind":"cat"}'), finish="tool_calls")
    tool = openai.pydantic_function_tool(Person)["function"]
    tools = [{"type": "function", **tool}]
    response = client.responses.parse(model=MODEL, input="Who?", tools=tools)
    assert response.output[0].parsed_arguments == {"name": "Tom", "kind": "cat"}


def test_count(client: "openai.OpenAI", service: FakeService) -> None:
    assert client.responses.input_tokens.count(model=MODEL, input="one two").input_tokens == 2


def test_paging(client: "openai.OpenAI", service: FakeService) -> None:
    given = [{"role": "user", "content": str(number)} for number in range(7)]
    made = client.responses.create(model=MODEL, input=given)
    pages = client.responses.input_items.list(made.id, order="asc", limit=3)
    assert [item.content[0].text for item in pages] == [str(number) for number in range(7)]


def test_errors(client: "openai.OpenAI", service: FakeService) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=MODEL, input="Hi", background=True, store=False)
    assert refused.value.param == "store"
    made = client.responses.create(model=MODEL, input="Hi")
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(made.id)

    async def breaks(request: GenerateRequest) -> Any:
        yield Started(USAGE)
        raise Unavailable("the engine went away")

    service.script = breaks
    with pytest.raises(openai.APIError, match="the engine went away"):
        list(client.responses.create(model=MODEL, input="Hi", stream=True))


def test_responses_over_a_websocket(client: "openai.OpenAI", service: FakeService) -> None:
    previous: str | None = None
    with client.responses.connect() as connection:
        for text in ("Hi", "Again"):
            connection.response.create(model=MODEL, input=text, store=False, previous_response_id=previous)
            said = ""
            for event in connection:
                if event.type == "response.output_text.delta":
                    said += event.delta
                if event.type == "response.completed":
                    previous = event.response.id
                    assert event.response.output_text == said == "Hello!"
                    break
    assert [message.content for message in service.requests[-1].messages or ()] == ["Hi", "Hello!", "Again"]
