"""Ollama's API against a fake service: the form of requests and replies."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from emberline.accounts.account_service import AccountService
from emberline.accounts.audit_log import Actor
from emberline.api.ollama.chat_request import TEMPERATURE, OllamaChat
from emberline.catalog.model_store import ModelStore
from emberline.catalog.offers import ModelMemory
from emberline.protocol.complete_response import Encoded
from emberline.protocol.errors import Unavailable
from emberline.protocol.events import (
    ChoiceDone,
    Completed,
    SequenceIds,
    Started,
    TextDelta,
    TextEvent,
    TextLogprob,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)
from emberline.protocol.request import ContentPart, EncodeRequest, GenerateRequest, SamplingDefaults
from emberline.protocol.token_ids import pack
from emberline.service.model_pulls import ModelPulls
from emberline.service.work import TaskEvents, Work
from tests.api.fake_service import KEY, MODEL, FakeModels, FakeService, agent, card, client_of, says
from tests.catalog.tiny_models import gguf_bytes

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
    assert (end["prompt_eval_count"], end["eval_count"]) == (12, n_output)
    parts = [end[f"{part}_duration"] for part in ("load", "prompt_eval", "eval")]
    assert min(parts) > 0
    assert end["total_duration"] >= max(parts)


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


async def with_ids(request: GenerateRequest) -> AsyncIterator[TextEvent]:
    yield Started(Usage(prompt_tokens=3))
    yield TextDelta(0, "Hi")
    yield ChoiceDone(0, "stop")
    ids = SequenceIds(request.context_ids + pack([1, 2, 3]), pack([4]))
    yield Completed(Usage(prompt_tokens=3, completion_tokens=1), result=ids)


async def test_the_context_of_a_reply_is_continued(client: httpx.AsyncClient, service: FakeService) -> None:
    service.script = with_ids
    whole = await post(client, "/api/generate", PROMPT | {"stream": False})
    *_, streamed = await lines(client, "/api/generate", PROMPT)
    mark, *ids = whole["context"]
    assert ids == [1, 2, 3, 4]
    assert 1 << 30 <= mark < 1 << 31, "no token, and an integer of 32 bits"
    assert streamed["context"] == whole["context"]
    again = await post(client, "/api/generate", PROMPT | {"stream": False, "context": whole["context"]})
    assert service.requests[-1].context_ids == pack([1, 2, 3, 4])
    assert again["context"] == [mark, 1, 2, 3, 4, 1, 2, 3, 4]
    assert "context" not in await post(client, "/api/generate", PROMPT | {"stream": False, "raw": True})
    assert "context" not in await post(client, "/api/chat", CHAT | {"stream": False})
    seen = PROMPT | {"images": ["iVBORw0KGgo="]}
    assert "context" not in await post(client, "/api/generate", seen | {"stream": False})
    assert "context" not in (await lines(client, "/api/generate", seen))[-1]


@pytest.mark.parametrize("bad", [[1, 2], [-1], [1 << 30, 1 << 31]])
async def test_a_context_of_another_model_is_refused(
    client: httpx.AsyncClient, service: FakeService, bad: list[int]
) -> None:
    service.script = with_ids
    other = (await post(client, "/api/generate", PROMPT | {"model": "@hf/acme/tiny", "stream": False}))["context"]
    for context in (bad, other):
        answer = await client.post("/api/generate", json=PROMPT | {"context": context})
        assert answer.status_code == 400
        assert "`context` is not of" in answer.json()["error"]
    raw = await client.post("/api/generate", json=PROMPT | {"raw": True, "context": other})
    assert raw.status_code == 400


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
    assert (given.context_len, bare.context_len) == (4096, None)
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
    """They reach the request as data URLs, before the text; whether the model takes any is for its server to say."""
    message = {"role": "user", "content": "What is this?", "images": ["iVBORw0K", "/9j/4AAQ"]}
    await post(client, "/api/chat", CHAT | {"messages": [message], "stream": False})
    await post(client, "/api/generate", PROMPT | {"images": ["UklGRg=="], "stream": False})
    chat, prompt = service.requests
    urls = ("data:image/png;base64,iVBORw0K", "data:image/jpeg;base64,/9j/4AAQ")
    text = ContentPart("text", "What is this?")
    assert (chat.messages or ())[0].parts == (*(ContentPart("image", url) for url in urls), text)
    assert (prompt.messages or ())[0].parts[:1] == (ContentPart("image", "data:image/webp;base64,UklGRg=="),)
    for fields in ({"images": ["aGk="]}, {"images": ["http://127.0.0.1/a.png"]}, {"images": ["iVBOR"], "raw": True}):
        answer = await client.post("/api/generate", json=PROMPT | fields)
        assert (answer.status_code, "`images" in answer.json()["error"]) == (400, True)


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
    assert (first["details"]["parameter_size"], first["details"]["quantization_level"]) == ("135M", "unknown")
    names = [model["name"] for model in models]
    assert names == [MODEL, "@hf/acme/tiny", "smollm2-135m-instruct", "tiny"], "ids, then the short names"
    assert models[2] | {"name": MODEL, "model": MODEL} == first
    shown = await post(client, "/api/show", {"model": MODEL})
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["model_info"]["unknown.context_length"] == 8192
    assert shown["parameters"] == 'temperature 0.2\nstop "<|im_end|>"'
    assert shown["template"] == "{{ messages }}"
    running = (await client.get("/api/ps")).json()
    expected = {"name": MODEL, "id": MODEL, "context_length": 8192, "workers_ready": 1, "size_vram": 0}
    assert running["models"][0].items() >= expected.items()
    assert {row["name"]: row["id"] for row in running["models"]}["smollm2-135m-instruct"] == MODEL
    assert "engines" in running
    assert (await client.get("/api/version")).json()["version"].count(".") == 2
    assert (await lines(client, "/api/pull", {"model": MODEL})) == [{"status": "success"}]


async def test_the_load_duration_ends_when_a_loaded_model_takes_the_request() -> None:
    arrived, loaded = asyncio.Event(), asyncio.Event()

    class Loading(FakeService):
        async def run(self, work: Work) -> TaskEvents:
            arrived.set()
            await loaded.wait()
            async for event in super().run(work):
                yield event

    client = client_of(Loading())
    for path, body in (("chat", CHAT), ("generate", PROMPT)):
        arrived.clear()
        loaded.clear()
        asked = asyncio.ensure_future(post(client, f"/api/{path}", body | {"stream": False}))
        await arrived.wait()
        began = time.monotonic_ns()
        await asyncio.sleep(0.02)
        waited_ns = time.monotonic_ns() - began
        loaded.set()
        assert (await asked)["load_duration"] >= waited_ns


async def test_the_operator_pulls_models_of_the_catalog(service: FakeService, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(gguf_bytes(tmp_path))
    (tmp_path / "cards").mkdir()
    fields = {"author": "acme", "description": "", "context_window": 64, "created_at": "2026-01-01 00:00:00.000"}
    text = "".join(f"{name} = {json.dumps(value)}\n" for name, value in fields.items())
    source = f'[source]\ntype = "path"\npath = "{tmp_path}/tiny.gguf"\n'
    (tmp_path / "cards" / "own.toml").write_text(f'id = "@acme/test/own"\n{text}{source}')
    client = client_of(service, pulls=ModelPulls(ModelStore(tmp_path), lambda: ModelMemory(8 << 30, False)))
    offers = {row["name"]: row for row in (await client.get("/api/models/available")).json()["data"]}
    assert (offers["own"]["here"], offers["qwen3:8b"]["license"]) == (False, "apache-2.0")
    assert not offers["llama3.3:70b"]["fits"]
    assert (await lines(client, "/api/pull", {"model": "own"}))[-1] == {"status": "success"}
    assert {"own"} == {row["name"] for row in (await client.get("/api/models/available")).json()["data"] if row["here"]}
    for name in ("nothing", f"{tmp_path}/tiny.gguf", "../tiny.gguf"):  # a client names no files of the server
        refused = await client.post("/api/pull", json={"model": name})
        assert (refused.status_code, "the catalog has no model" in refused.json()["error"]) == (404, True)


async def test_a_model_is_shown_by_what_its_card_tells(service: FakeService) -> None:
    sampling = SamplingDefaults(top_p=0.9, repetition_penalty=1.1)
    known = card(MODEL, "acme", n_parameters=134_515_008, quantization="Q4_1", architecture="llama", sampling=sampling)
    service.models = FakeModels([known])
    shown = await post(client_of(service), "/api/show", {"name": MODEL})
    assert shown["parameters"].splitlines()[:2] == ["top_p 0.9", "repeat_penalty 1.1"]
    assert shown["details"].items() >= {"parameter_size": "134.52M", "quantization_level": "Q4_1"}.items()
    assert shown["model_info"]["general.parameter_count"] == 134_515_008


async def test_ps_tells_where_a_model_is_and_until_when(service: FakeService) -> None:
    service.engine_device, service.unload_in_s = "cuda:0 (H200)", 90.0
    service.models = FakeModels([card(MODEL, "acme", weight_bytes=98_000_000)])
    running = (await client_of(service).get("/api/ps")).json()["models"][0]
    assert (running["size"], running["size_vram"]) == (98_000_000, 98_000_000)
    left = datetime.fromisoformat(running["expires_at"]) - datetime.now(UTC)
    assert 60 < left.total_seconds() <= 90


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


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        *((None, None), (-1, -1), ("-1", -1), ("-1m", -1), (300, 300), ("300", 300), ("10m", 600), ("1h30m", 5400)),
        *(("1.5s", 1.5), ("250ms", 0.25), (0, 0), ("999999h", -1)),
    ],
)
def test_keep_alive_in_seconds(given: float | str | None, seconds: float | None) -> None:
    assert OllamaChat(model=MODEL, keep_alive=given).keep_alive_s == seconds


async def test_keep_alive_is_an_admins_wish(service: FakeService, accounts: AccountService) -> None:
    tenant = await accounts.create_key(Actor("test"), "acme")
    async with client_of(service, KEY, accounts=accounts) as client:
        client.headers["authorization"] = f"Bearer {KEY}"
        for body, path in ((CHAT, "chat"), (PROMPT, "generate")):
            await post(client, f"/api/{path}", body | {"keep_alive": "2m", "stream": False})
        await post(client, "/api/generate", {"model": MODEL, "keep_alive": "10s", "stream": False})
        client.headers["authorization"] = f"Bearer {tenant.key.text}"
        await post(client, "/api/chat", CHAT | {"keep_alive": -1, "stream": False})
    assert [request.keep_alive_s for request in service.requests] == [120, 120, None]
    assert service.keep_alive_s == 10
