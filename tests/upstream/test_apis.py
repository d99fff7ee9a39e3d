"""Models on upstream servers through every API: real core, stand-in servers, in-process HTTP."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from emberline.accounts.auth import Authenticator
from emberline.accounts.prices import PriceVersion
from emberline.accounts.secret import Secret
from emberline.api.app import ApiSettings, App
from emberline.protocol import token_ids as tokens
from emberline.protocol.price import Price
from emberline.protocol.request import GenerateRequest, Message
from emberline.protocol.route_request import Route, RouteRequest
from emberline.text.prompt import build_prompt
from emberline.text.text_model import TextModel
from emberline.upstream.servers.kv_events import KVEventDecoder, key_root
from standins.openai_script import ServerScript, StandinPrompt
from tests.service.conftest import text_model
from tests.upstream.conftest import LONG, PATIENCE_S, Bench, Opener, bench

__all__ = ["bench", "text_model"]

CHAT = {"model": "standin", "messages": [{"role": "user", "content": LONG}]}


def expected(messages: Any = None) -> str:
    return "".join(StandinPrompt({"messages": messages or CHAT["messages"]}).words(50))


class ApiClient:
    def __init__(self, made: Bench, client: httpx.AsyncClient) -> None:
        self.bench = made
        self.client = client

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return await self.client.post(path, json=body, headers=headers)


@pytest.fixture
async def api(bench: Opener, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[ApiClient]:
    options = getattr(request, "param", {})
    servers = options.get("servers", [("a", "vllm", "both")])
    made = await bench(*servers, **{name: value for name, value in options.items() if name != "servers"})

    app = App(made.service, ApiSettings(Authenticator(Secret.open(tmp_path))))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8686") as client:
        yield ApiClient(made, client)


def events(text: str) -> list[Any]:
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def said(chunks: list[Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


async def test_the_cost_of_a_forwarded_chat(api: ApiClient) -> None:
    price = Price(input=600_000, cached_input=600_000, output=3_000_000, neuron=11)
    model = str(CHAT["model"]).lower()
    version = PriceVersion(model=model, number=1, valid_from_us=0, source="admin", created_us=0, price=price)
    api.bench.core.prices.add(version)
    for stream in (False, True):
        answer = await api.post("/v1/chat/completions", CHAT | {"stream": stream, "usage": {"include": True}})
        usage = events(answer.text)[-1]["usage"] if stream else answer.json()["usage"]
        cost_pico = usage["prompt_tokens"] * 600_000 + 50 * 3_000_000
        assert usage["cost"] == pytest.approx(cost_pico / 1e12)
        if not stream:
            assert answer.headers["cf-ai-neurons"] == price.neurons(cost_pico)
        assert await api.bench.costs() == [cost_pico] * (1 + stream)
    assert "cost" not in (await api.post("/v1/chat/completions", CHAT)).json()["usage"]


async def test_a_chat_is_forwarded(api: ApiClient) -> None:
    answer = await api.post("/v1/chat/completions", CHAT)
    assert answer.status_code == 200
    body = answer.json()
    assert body["choices"][0]["message"]["content"] == expected()
    assert body["usage"]["completion_tokens"] == 50
    assert answer.headers["cf-ai-req-id"] == answer.headers["x-request-id"]
    ((row_id, status, n_input, n_output, _),) = await api.bench.rows()
    assert (row_id, status) == (answer.headers["x-request-id"], "finished")
    assert (n_input, n_output) == (body["usage"]["prompt_tokens"], 50)
    assert await api.bench.idle()


@pytest.mark.parametrize("asks", [False, True])
async def test_a_stream_is_forwarded_with_usage_on_request(api: ApiClient, asks: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if asks else {}
    answer = await api.post("/v1/chat/completions", {**CHAT, "stream": True, **options})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert "content-length" not in answer.headers
    assert answer.text.endswith("data: [DONE]\n\n")
    chunks = events(answer.text)
    assert said(chunks) == expected()
    assert [bool(chunk.get("usage")) for chunk in chunks].count(True) == int(asks)
    ((_, status, _, n_output, _),) = await api.bench.rows()
    assert (status, n_output) == ("finished", 50)


async def test_ollamas_images_reach_the_server(api: ApiClient) -> None:
    message = {"role": "user", "content": "What is this?", "images": ["iVBORw0K"]}
    answer = await api.post("/api/chat", {"model": CHAT["model"], "messages": [message], "stream": False})
    assert answer.status_code == 200, answer.text
    assert answer.json()["message"]["content"]
    (sent,) = api.bench.standins["a"].requests
    assert sent["messages"][0]["content"] == [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0K"}},
        {"type": "text", "text": "What is this?"},
    ]


async def test_ollamas_defaults_are_not_sent(api: ApiClient) -> None:
    """They are for our engines: a server that does not know `top_k` would refuse what the client never sent."""
    message = {"role": "user", "content": "Hi"}
    body = {"model": CHAT["model"], "messages": [message], "stream": False}
    assert (await api.post("/api/chat", body)).status_code == 200
    assert (await api.post("/api/chat", body | {"options": {"temperature": 0.8, "top_p": 0.5}})).status_code == 200
    plain, chosen = api.bench.standins["a"].requests
    assert not plain.keys() & {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
    assert (chosen["temperature"], chosen["top_p"]) == (0.8, 0.5)
    assert "top_k" not in chosen


async def test_a_forwarded_stream_is_resumed(api: ApiClient) -> None:
    """Computed and billed once; its events are the upstream server's, with numbers."""
    headers = {"x-emberline-resume": "60"}
    answer = await api.client.post("/v1/chat/completions", json={**CHAT, "stream": True}, headers=headers)
    assert answer.text.startswith("id: 0\ndata: ")
    assert answer.text.endswith("data: [DONE]\n\n")
    assert said(events(answer.text)) == expected()
    again = await api.client.get(f"/v1/streams/{answer.headers['x-emberline-stream-id']}?starting_after=9")
    assert again.text.startswith("id: 10\n")
    assert answer.text.endswith(again.text)
    assert len(await api.bench.rows()) == 1


@pytest.mark.parametrize("api", [{"a": ServerScript(itl_ms=10)}], indirect=True)
async def test_a_reply_that_is_not_streamed_counts_as_prefilled_at_its_first_chunk(api: ApiClient) -> None:
    core, began = api.bench.core, asyncio.Event()
    tell = core.first_token

    def spy(request_id: str, cached_tokens: int) -> None:
        tell(request_id, cached_tokens)
        began.set()

    core.first_token = spy  # type: ignore[method-assign]
    task = asyncio.create_task(api.post("/v1/chat/completions", CHAT))
    async with asyncio.timeout(PATIENCE_S):
        await began.wait()
    assert not task.done()
    assert api.bench.standins["a"].running == 1
    now_us = time.time_ns() // 1000
    assert (await task).json()["choices"][0]["message"]["content"] == expected()
    ((first_us, created_us, finished_us),) = await api.bench.times()
    assert created_us <= first_us <= now_us < finished_us


@pytest.mark.parametrize(
    "api",
    [
        {
            "servers": [("a", "openai", "both"), ("b", "openai", "both")],
            "a": ServerScript(cut_after=9),
            "b": ServerScript(),
        }
    ],
    indirect=True,
)
async def test_a_reply_that_is_not_streamed_begins_again_at_another_server(api: ApiClient) -> None:
    for _ in range(4):  # whichever server is tried first
        answer = await api.post("/v1/chat/completions", CHAT)
        assert answer.json()["choices"][0]["message"]["content"] == expected()
    assert {row[1] for row in await api.bench.rows()} == {"finished"}
    assert await api.bench.idle()


@pytest.mark.parametrize("api", [{"servers": [("p", "vllm", "prefill"), ("d", "vllm", "decode")]}], indirect=True)
async def test_cached_tokens_of_prefill_are_in_the_stream_and_in_the_usage_row(api: ApiClient) -> None:
    asked = {**CHAT, "stream": True, "stream_options": {"include_usage": True}, "min_tokens": 2}
    for _ in range(2):
        answer = await api.post("/v1/chat/completions", asked)
    cached = len(f"user: {LONG}") // 64 * 16
    usage = next(chunk["usage"] for chunk in events(answer.text) if chunk.get("usage"))
    assert usage["prompt_tokens_details"] == {"cached_tokens": cached}
    rows = {row[0]: row for row in await api.bench.rows()}
    assert json.loads(rows[answer.headers["x-request-id"]][4]) == {"device": cached}
    whole = await api.post("/v1/chat/completions", CHAT)
    assert whole.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}
    assert api.bench.standins["p"].violations == []


async def test_only_allowed_fields_are_forwarded(api: ApiClient) -> None:
    for name, value in {
        "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.1"},
        "cache_salt": "another tenant's",
        "chat_template": "{{ evil }}",
        "prompt_embeds": "AAAA",
        "bootstrap_host": "10.0.0.1",
    }.items():
        refused = await api.post("/v1/chat/completions", {**CHAT, name: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
    unknown = {"api_base": "http://10.0.0.1", "documents": []}
    await api.post("/v1/chat/completions", {**CHAT, **unknown, "stop_token_ids": [7], "top_k": 5, "user": "someone"})
    (got,) = api.bench.standins["a"].requests
    assert set(got) == {
        *("model", "messages", "stream", "stream_options", "stop_token_ids", "top_k", "cache_salt", "_id")
    }
    assert got["cache_salt"] != "another tenant's"


async def test_what_is_forwarded_is_what_was_checked(api: ApiClient) -> None:
    """Servers differ in which of two equal names they read, so they get one."""
    image = '{"role":"user","content":[{"type":"image_url","image_url":"http://10.0.0.1"}]}'
    text = '{"role":"user","content":"Hi"}'
    body = '{"model":"standin","messages":[%s],"temperature":0,"messages":[%s],"max_tokens":3.0,"temperature":1}'
    for first, last, status in ((text, image, 400), (image, text, 200)):
        answer = await api.client.post("/v1/chat/completions", content=body % (first, last))
        assert answer.status_code == status, answer.text
    (got,) = api.bench.standins["a"].requests
    assert (got["messages"], got["temperature"], got["max_tokens"]) == ([json.loads(text)], 1, 3)
    broken = body.encode() % (b"", b'{"role":"user","content":"\xff"}')
    assert (await api.client.post("/v1/chat/completions", content=broken)).status_code == 400


async def test_a_message_to_be_continued_and_bad_words_are_forwarded(api: ApiClient) -> None:
    begun = [*CHAT["messages"], {"role": "assistant", "content": "Well"}]
    fields = {"continue_final_message": True, "bad_words": ["no"], "include_stop_str_in_output": True}
    await api.post("/v1/chat/completions", {**CHAT, "messages": begun, **fields})
    await api.post("/v1/messages", {"model": CHAT["model"], "messages": begun, "max_tokens": 5})
    passed, translated = api.bench.standins["a"].requests
    assert {name: passed[name] for name in fields} == fields
    for got in (passed, translated):
        assert got["continue_final_message"] is True
        assert got["add_generation_prompt"] is False
        assert got["messages"][-1] == begun[-1]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}},
        {"type": "image_url", "image_url": "file:///etc/passwd"},
        {"type": "video_url", "video_url": {"url": "http://10.0.0.1"}},
        {"type": "image_embeds", "image_embeds": "AAAA"},
    ],
)
async def test_media_that_the_server_would_fetch_are_refused(api: ApiClient, part: dict[str, Any]) -> None:
    answer = await api.post("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": [part]}]})
    assert answer.status_code == 400
    assert api.bench.standins["a"].requests == []


async def test_an_image_inside_the_body_is_forwarded_and_charged(api: ApiClient) -> None:
    price = Price(image=5000)
    version = PriceVersion(model="standin", number=1, valid_from_us=0, source="admin", created_us=0, price=price)
    api.bench.core.prices.add(version)
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "what is it?"}, part]}]
    answer = await api.post("/v1/chat/completions", {**CHAT, "messages": messages}, **{"x-emberline-cost": "true"})
    assert answer.status_code == 200
    assert api.bench.standins["a"].requests[0]["messages"] == messages
    assert answer.json()["usage"]["cost"] == 0.005
    assert await api.bench.costs() == [price.cost_pico("default", images=1)]


@pytest.mark.parametrize(
    "bad",
    [{"n": 10**9}, {"temperature": -1}, {"max_tokens": 0}, {"messages": []}, {"messages": "x"}, {"top_logprobs": 99}],
)
async def test_values_out_of_range_are_refused(api: ApiClient, bad: dict[str, Any]) -> None:
    answer = await api.post("/v1/chat/completions", {**CHAT, **bad})
    assert answer.status_code == 400, answer.text
    assert api.bench.standins["a"].requests == []


@pytest.mark.parametrize("api", [{"a": ServerScript(status=400, message="stop is odd")}], indirect=True)
async def test_a_server_s_error_is_translated_for_each_api(api: ApiClient) -> None:
    answer = await api.post("/v1/chat/completions", {**CHAT, "stream": True})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "stop is odd"
    anthropic = await api.post("/v1/messages", {**CHAT, "max_tokens": 9})
    assert anthropic.json()["error"] == {"type": "invalid_request_error", "message": "stop is odd"}


@pytest.mark.parametrize("api", [{"servers": [("a", "openai", "both")], "a": ServerScript(cut_after=5)}], indirect=True)
async def test_a_broken_stream_ends_in_an_error_event_without_done(api: ApiClient) -> None:
    answer = await api.post("/v1/chat/completions", {**CHAT, "stream": True})
    assert answer.status_code == 200
    assert "[DONE]" not in answer.text
    assert events(answer.text)[-1]["error"]["code"] == "unavailable"
    ((_, status, *_),) = await api.bench.rows()
    assert status == "failed"


@pytest.mark.parametrize(
    "api",
    [
        {
            "servers": [("a", "vllm", "both"), ("b", "vllm", "both")],
            "a": ServerScript(cut_after=9),
            "b": ServerScript(cut_after=9, times=1),
        }
    ],
    indirect=True,
)
async def test_a_resumed_stream_looks_like_one_stream(api: ApiClient) -> None:
    api.bench.standins["a"].script.times = 1
    answer = await api.post("/v1/chat/completions", {**CHAT, "stream": True, "temperature": 0, "max_tokens": 50})
    chunks = events(answer.text)
    assert said(chunks) == expected()
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert sum("role" in choice["delta"] for chunk in chunks for choice in chunk["choices"]) == 1
    assert answer.text.endswith("data: [DONE]\n\n")
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert "token_ids" not in answer.text
    assert "usage" not in answer.text


async def test_a_completion_is_forwarded(api: ApiClient) -> None:
    body = {"model": "standin", "prompt": "once upon a time", "max_tokens": 7}
    answer = (await api.post("/v1/completions", body)).json()
    assert answer["choices"][0]["text"] == "".join(StandinPrompt(body).words(7))
    streamed = await api.post("/v1/completions", {**body, "stream": True})
    texts = [choice["text"] for chunk in events(streamed.text) for choice in chunk["choices"]]
    assert "".join(texts) == answer["choices"][0]["text"]


async def test_every_other_api(api: ApiClient) -> None:
    anthropic = (await api.post("/v1/messages", {**CHAT, "max_tokens": 60})).json()
    assert anthropic["content"] == [{"type": "text", "text": expected()}]
    assert anthropic["usage"]["output_tokens"] == 50
    native = (await api.post("/client/v4/accounts/acme/ai/run/standin", {"messages": CHAT["messages"]})).json()
    assert native["result"]["response"] == expected()
    responses = (await api.post("/v1/responses", {"model": "standin", "input": LONG, "store": False})).json()
    assert responses["output"][0]["content"][0]["text"] == expected()
    enveloped = await api.post("/client/v4/accounts/acme/ai/v1/chat/completions", {**CHAT, "stream": True})
    assert any(chunk.get("usage") for chunk in events(enveloped.text))
    assert len(await api.bench.rows()) == 4
    assert await api.bench.idle()


async def test_the_models_are_listed(api: ApiClient) -> None:
    rows = (await api.client.get("/v1/models")).json()["data"]
    assert [(row["id"], row["state"]) for row in rows] == [("standin", "provider")]
    assert (await api.client.get("/v1/models/STANDIN")).json()["id"] == "standin"
    assert (await api.post("/v1/chat/completions", {**CHAT, "model": "nobody"})).status_code == 404


async def test_a_session_id_of_a_megabyte(api: ApiClient) -> None:
    """A digest of it takes its place: the server is not sent it, nor does the balancer keep it."""
    for name in ("s", "s", "t"):
        answer = await api.post("/v1/chat/completions", CHAT, **{"x-session-affinity": name * (1 << 20)})
        assert answer.status_code == 200
    first, same, other = (ask.affinity for ask in api.bench.asks)
    assert first == same != other
    assert 0 < len(first or "") < 100
    asked = api.bench.standins["a"].requests
    assert len(asked) == 3
    assert max(len(json.dumps(body)) for body in asked) < 2 * len(json.dumps(CHAT))


async def test_with_a_tokenizer_prefix_keys_match_the_server_s_kv_events(api: ApiClient, text_model: TextModel) -> None:
    """What a KV event says of these token ids is what the balancer is asked for."""
    api.bench.service.upstream.texts = {"standin": text_model}
    await api.post("/v1/chat/completions", CHAT)
    await api.post("/v1/messages", {**CHAT, "max_tokens": 5})
    request = GenerateRequest(id="x", model="standin", messages=(Message("user", LONG),))
    ids = build_prompt(text_model, request).ids
    event = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": tokens.unpack(ids)}
    payload = msgspec.msgpack.encode([0.0, [{**event, "block_size": tokens.count(ids)}]])
    told = KVEventDecoder(key_root("vllm", "standin")).decode(payload).stored
    assert told
    assert [ask.keys for ask in api.bench.asks] == [told, told]
    assert {ask.input_tokens for ask in api.bench.asks} == {tokens.count(ids)}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/client/v4/accounts/me/ai/run/standin"])
async def test_all_that_a_server_may_put_into_the_prompt_bounds_it(
    api: ApiClient, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a budget reserves for: otherwise a long prompt could be sent in another field for next to nothing."""
    admitted: list[RouteRequest] = []
    admit = api.bench.core.admit

    async def spy(request: RouteRequest) -> Route:
        admitted.append(request)
        return await admit(request)

    monkeypatch.setattr(api.bench.core, "admit", spy)
    schema = {"type": "object", "description": "x" * 5000}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema} if "chat" in path else schema}
    body = {"messages": [{"role": "user", "content": "hi"}], "response_format": form}
    await api.post(path, {"model": "standin", **body} if "chat" in path else body)
    assert admitted[0].max_input_tokens > 5000
