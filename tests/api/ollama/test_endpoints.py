"""Ollama's API against a fake service: the form of requests and replies."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from emberline.accounts.account_service import AccountService
from emberline.accounts.audit_log import Actor
from emberline.api.ollama.chat_request import TEMPERATURE, OllamaChat
from emberline.protocol.complete_response import Encoded
from emberline.protocol.errors import Unavailable
from emberline.protocol.events import (
    ChoiceDone,
    Completed,
    Started,
    TextDelta,
    TextEvent,
    TextLogprob,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)
from emberline.protocol.request import ContentPart, EncodeRequest, GenerateRequest
from emberline.protocol.token_ids import pack
from tests.api.fake_service import KEY, MODEL, FakeService, agent, client_of, says

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
PROMPT = {"model": MODEL, "prompt": "Hi"}


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    return answer.json()


async def lines(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def check_end(end: dict[str, Any], done_reason: str = "stop", n_output: int = 3) -> None:
    assert (end["done"], end["done_reason"]) == (True, done_reason)
    assert (end["prompt_eval_count"], end["eval_count"], end["load_duration"]) == (12, n_output, 0)
    assert end["total_duration"] >= end["eval_duration"] > 0
    assert end["prompt_eval_duration"] > 0


async def test_chat_streams_unless_told_otherwise(client: httpx.AsyncClient) -> None:
    *pieces, end = await lines(client, "/api/chat", CHAT)
    assert [piece["message"] for piece in pieces] == [
        {"role": "assistant", "content": text} for text in ("Hel", "lo", "!")
    ]
    assert pieces
    assert all(piece["model"] == MODEL and piece["done"] is False for piece in pieces)
    assert pieces[0]["created_at"].endswith("Z")
    assert end["message"] == {"role": "assistant", "content": ""}
    check_end(end)


async def test_chat_whole(client: httpx.AsyncClient) -> None:
    found = await post(client, "/api/chat", CHAT | {"stream": False})
    assert found["message"] == {"role": "assistant", "content": "Hello!"}
    check_end(found)


async def test_generate(client: httpx.AsyncClient, service: FakeService) -> None:
    *pieces, end = await lines(client, "/api/generate", PROMPT | {"system": "Be kind."})
    assert "".join(piece["response"] for piece in pieces) == "Hello!"
    check_end(end)
    assert end["response"] == ""
    whole = await post(client, "/api/generate", PROMPT | {"stream": False, "raw": True})
    assert whole["response"] == "Hello!"
    first, second = service.requests
    assert [(message.role, message.content) for message in first.messages or ()] == [
        ("system", "Be kind."),
        ("user", "Hi"),
    ]
    assert (second.prompt, second.messages) == ("Hi", None)


async def test_tool_calls_and_thinking(client: httpx.AsyncClient, service: FakeService) -> None:
    service.script = agent
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    body = CHAT | {"tools": [tool], "think": True}
    *pieces, end = await lines(client, "/api/chat", body)
    assert "".join(piece["message"].get("thinking", "") for piece in pieces) == "Two towns."
    assert "".join(piece["message"]["content"] for piece in pieces) == "Let me look."
    calls = [call for piece in pieces for call in piece["message"].get("tool_calls", ())]
    towns = [{"name": "weather", "arguments": {"town": town}} for town in ("Oslo", "Rome")]
    assert [call["function"] for call in calls] == towns
    check_end(end, n_output=30)
    whole = (await post(client, "/api/chat", body | {"stream": False}))["message"]
    assert (whole["thinking"], whole["content"], whole["tool_calls"]) == ("Two towns.", "Let me look.", calls)
    assert service.requests[0].reasoning.enabled is True
    assert service.requests[0].tools[0].name == "weather"


async def test_arguments_of_several_lines_are_one_line(client: httpx.AsyncClient, service: FakeService) -> None:
    async def script(request: GenerateRequest) -> AsyncIterator[TextEvent]:
        yield Started(Usage(prompt_tokens=3))
        yield ToolCallStarted(0, 0, "c", "weather")
        yield ToolCallDelta(0, 0, '{\r\n  "town": "a\\nb"\n}')
        yield ChoiceDone(0, "tool_calls")
        yield Completed(Usage(prompt_tokens=3, completion_tokens=2))

    service.script = script
    first, _ = await lines(client, "/api/chat", CHAT)
    assert first["message"]["tool_calls"][0]["function"]["arguments"] == {"town": "a\nb"}


async def test_a_conversation_with_results_of_tools(client: httpx.AsyncClient, service: FakeService) -> None:
    call = {"function": {"name": "weather", "arguments": {"town": "Oslo"}}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "thinking": "Ask.", "tool_calls": [call]},
        {"role": "tool", "tool_name": "weather", "content": "rain"},
    ]
    await post(client, "/api/chat", {"model": MODEL, "messages": messages, "stream": False})
    _, asked, result = service.requests[0].messages or ()
    assert asked.reasoning == "Ask."
    assert asked.tool_calls[0].arguments == '{"town":"Oslo"}'
    assert (result.content, result.tool_call_id) == ("rain", asked.tool_calls[0].id)


async def test_options(client: httpx.AsyncClient, service: FakeService) -> None:
    options = {"num_predict": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.4, "min_p": 0.1, "repeat_penalty": 1.1}
    options |= {"seed": 1, "stop": ["x"], "num_ctx": 4096, "num_gpu": 1, "presence_penalty": 1, "mirostat": 0}
    await post(client, "/api/chat", CHAT | {"options": options, "stream": False, "keep_alive": "5m"})
    await post(client, "/api/chat", CHAT | {"options": {"num_predict": -1, "top_k": 2}, "stream": False})
    given, bare = service.requests
    sampling = given.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.top_p) == (7, 0.5, 3, 0.4)
    assert (sampling.repetition_penalty, sampling.seed, sampling.stop) == (1.1, 1, ("x",))
    assert (given.left_to_model, given.api) == ((), "ollama")
    assert (bare.sampling.max_tokens, bare.sampling.temperature) == (None, TEMPERATURE)
    assert bare.left_to_model == ("temperature", "top_p", "min_p", "repetition_penalty")


async def test_formats(client: httpx.AsyncClient, service: FakeService) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for wanted in ("json", schema, ""):
        await post(client, "/api/generate", PROMPT | {"format": wanted, "stream": False})
    kinds = [request.output and (request.output.kind, request.output.value) for request in service.requests]
    assert kinds == [("json_object", None), ("json_schema", schema), None]


async def test_logprobs(client: httpx.AsyncClient, service: FakeService) -> None:
    token = TextLogprob("Hi", -0.5, [72, 105], [TextLogprob("Ho", -1.5, [72, 111])])
    service.script = says(TextDelta(0, "Hi", [token]), ChoiceDone(0, "length"))
    body = PROMPT | {"logprobs": True, "top_logprobs": 1}
    piece, end = await lines(client, "/api/generate", body)
    assert end["done_reason"] == "length"
    other = {"token": "Ho", "logprob": -1.5, "bytes": [72, 111]}
    expected = [{"token": "Hi", "logprob": -0.5, "bytes": [72, 105], "top_logprobs": [other]}]
    assert piece["logprobs"] == (await post(client, "/api/generate", body | {"stream": False}))["logprobs"] == expected
    assert service.requests[0].sampling.logprobs == 1


@pytest.mark.parametrize(
    ("path", "field", "value", "named"),
    [
        ("chat", "options", {"mirostat": 2}, "options.mirostat"),
        ("chat", "options", {"tfs_z": 0.5}, "options.tfs_z"),
        ("chat", "template", "{{ .Prompt }}", "template"),
        ("generate", "suffix", "end", "suffix"),
        ("generate", "context", [1, 2], "context"),
        ("generate", "width", 64, "width"),
    ],
)
async def test_what_is_not_supported_is_named(
    client: httpx.AsyncClient, path: str, field: str, value: object, named: str
) -> None:
    body = (CHAT if path == "chat" else PROMPT) | {field: value}
    answer = await client.post(f"/api/{path}", json=body)
    assert answer.status_code == 400
    assert answer.json().keys() == {"error"}
    assert f"`{named}`" in answer.json()["error"]


@pytest.mark.parametrize(
    "fields",
    [
        {"options": {"temperature": 9}},
        {"options": {"top_p": 2}},
        {"keep_alive": "soon"},
        {"think": "hard"},
        {"format": 3},
    ],
)
async def test_bad_values(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    answer = await client.post("/api/chat", json=CHAT | fields)
    assert answer.status_code == 400
    assert next(iter(fields)) in answer.json()["error"]


async def test_images(client: httpx.AsyncClient, service: FakeService) -> None:
    """They reach the request as data URLs; whether the model takes any is for its server to say."""
    message = {"role": "user", "content": "What is this?", "images": ["iVBORw0K", "/9j/4AAQ"]}
    await post(client, "/api/chat", CHAT | {"messages": [message], "stream": False})
    await post(client, "/api/generate", PROMPT | {"images": ["UklGRg=="], "stream": False})
    chat, prompt = service.requests
    urls = ("data:image/png;base64,iVBORw0K", "data:image/jpeg;base64,/9j/4AAQ")
    text = ContentPart("text", "What is this?")
    assert (chat.messages or ())[0].parts == (text, *(ContentPart("image", url) for url in urls))
    assert (prompt.messages or ())[0].parts[1:] == (ContentPart("image", "data:image/webp;base64,UklGRg=="),)
    for fields in ({"images": ["aGk="]}, {"images": ["http://127.0.0.1/a.png"]}, {"images": ["iVBOR"], "raw": True}):
        answer = await client.post("/api/generate", json=PROMPT | fields)
        assert (answer.status_code, "`images`" in answer.json()["error"]) == (400, True)


async def test_an_unknown_model(client: httpx.AsyncClient) -> None:
    for path in ("chat", "generate", "embed", "show", "pull"):
        answer = await client.post(f"/api/{path}", json={"model": "nothing"})
        assert (answer.status_code, list(answer.json())) == (404, ["error"])


async def test_names_with_the_tag_of_ollamas_clients(client: httpx.AsyncClient, service: FakeService) -> None:
    name = "smollm2-135m-instruct:latest"
    found = await post(client, "/api/chat", CHAT | {"model": name, "stream": False})
    assert found["model"] == name
    assert service.requests[0].model == "smollm2-135m-instruct"


async def test_an_error_in_a_stream_is_its_last_line(client: httpx.AsyncClient, service: FakeService) -> None:
    async def breaks(request: GenerateRequest) -> AsyncIterator[TextEvent]:
        yield Started(Usage(prompt_tokens=12))
        yield TextDelta(0, "Hel")
        raise Unavailable("the engine was lost")

    service.script = breaks
    first, last = await lines(client, "/api/chat", CHAT)
    assert first["message"]["content"] == "Hel"
    assert last == {"error": "the engine was lost"}


@pytest.mark.parametrize(
    ("keep_alive", "done_reason"), [(0, "unload"), ("0s", "unload"), ("5m", "load"), (None, "load")]
)
async def test_an_empty_request_loads_or_unloads(
    client: httpx.AsyncClient, service: FakeService, keep_alive: object, done_reason: str
) -> None:
    body = {"model": MODEL, "keep_alive": keep_alive}
    (line,) = await lines(client, "/api/chat", body | {"messages": []})
    assert (line["done_reason"], line["message"]["content"]) == (done_reason, "")
    found = await post(client, "/api/generate", body | {"stream": False})
    assert (found["done_reason"], found["response"]) == (done_reason, "")
    assert service.loads == [(MODEL, done_reason)] * 2
    assert service.requests == []


async def test_a_tenant_cannot_unload(service: FakeService, accounts: AccountService) -> None:
    tenant = await accounts.create_key(Actor("test"), "acme")
    async with client_of(service, KEY, accounts=accounts) as client:
        client.headers["authorization"] = f"Bearer {tenant.key.text}"
        assert (await client.post("/api/generate", json={"model": MODEL, "keep_alive": 0})).status_code == 403
        assert (await client.post("/api/generate", json={"model": MODEL})).status_code == 200
        assert service.loads == []
        assert (await client.get("/api/ps")).json().keys() == {"models"}


async def test_embeddings() -> None:
    asked: list[EncodeRequest] = []

    class Encoding(FakeService):
        def encode(self, request: EncodeRequest) -> Encoded:
            asked.append(request)
            n_rows = request.n_texts
            values = pack([0x3F800000, 0]) * n_rows  # 1.0, 0.0
            return Encoded(values=values, n_rows=n_rows, usage=Usage(prompt_tokens=4), pooling="mean")

    client = client_of(Encoding())
    found = await post(client, "/api/embed", {"model": MODEL, "input": ["a", "b"], "dimensions": 2})
    assert found["embeddings"] == [[1.0, 0.0], [1.0, 0.0]]
    assert (found["prompt_eval_count"], found["total_duration"] > 0) == (4, True)
    assert (await post(client, "/api/embed", {"model": MODEL, "input": "a", "truncate": False}))["embeddings"] == [
        [1, 0]
    ]
    assert await post(client, "/api/embeddings", {"model": MODEL, "prompt": "a"}) == {"embedding": [1.0, 0.0]}
    assert [(request.texts, request.truncate, request.dimensions) for request in asked] == [
        (("a", "b"), True, 2),
        (("a",), False, None),
        (("a",), True, None),
    ]
    assert (await post(client, "/api/embed", {"model": MODEL, "input": ""}))["embeddings"] == []


async def test_models(client: httpx.AsyncClient) -> None:
    models = (await client.get("/api/tags")).json()["models"]
    first = models[0]
    assert (first["name"], first["model"], len(first["digest"])) == (MODEL, MODEL, 64)
    assert first["modified_at"] == "2024-10-31T00:00:00Z"
    assert first["details"]["parameter_size"] == "135M"
    shown = await post(client, "/api/show", {"model": MODEL})
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["model_info"]["unknown.context_length"] == 8192
    assert shown["parameters"] == "temperature 0.2"
    running = (await client.get("/api/ps")).json()
    expected = {"name": MODEL, "id": MODEL, "context_length": 8192, "workers_ready": 1}
    assert running["models"][0].items() >= expected.items()
    assert "engines" in running
    assert (await client.get("/api/version")).json()["version"].count(".") == 2
    assert (await lines(client, "/api/pull", {"model": MODEL})) == [{"status": "success"}]


async def test_what_ollama_has_and_this_server_has_not(client: httpx.AsyncClient) -> None:
    for method, path in (("POST", "create"), ("POST", "push"), ("DELETE", "delete"), ("POST", "copy")):
        answer = await client.request(method, f"/api/{path}", json={"model": MODEL})
        assert answer.status_code == 404
        assert "emberline pull" in answer.json()["error"]


def test_unloading() -> None:
    def unloads(keep_alive: float | str | None) -> bool:
        return OllamaChat(model=MODEL, keep_alive=keep_alive).unloads

    assert [unloads(value) for value in (0, 0.0, "0", "0s", "0h0m")] == [True] * 5
    assert [unloads(value) for value in (None, -1, "-1", "10m", "1h0m", 300)] == [False] * 6
