"""OpenAI's chat completions, completions and models, byte for byte where clients depend on it."""

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from emberline.protocol import token_ids as tokens
from emberline.protocol.errors import Overloaded
from emberline.protocol.events import ChoiceDone, Completed, Started, TextDelta, TextEvent, TextLogprob, Usage
from emberline.protocol.request import GenerateRequest, Message, Priority, Reasoning, SamplingParams, ToolCall
from tests.api.fake_service import MODEL, USAGE, FakeModels, FakeService, card, client_of

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
USAGE_JSON = (
    '{"prompt_tokens":12,"completion_tokens":3,"total_tokens":15,"prompt_tokens_details":{"cached_tokens":8},'
    '"completion_tokens_details":{"reasoning_tokens":0}}'
)
CF = "/client/v4/accounts/acme/ai"


def normal(text: str) -> str:
    text = re.sub(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "ID", text)
    return re.sub(r'"created":\d+', '"created":0', text)


def chunks(text: str) -> list[dict]:
    return [json.loads(line[6:]) for line in text.split("\n\n") if line and line != "data: [DONE]"]


async def test_chat_answer(client: httpx.AsyncClient, service: FakeService) -> None:
    answer = await client.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"] == answer.headers["cf-ai-req-id"] == service.requests[0].id
    assert normal(answer.text) == (
        '{"id":"chatcmpl-ID","object":"chat.completion","created":0,"model":"' + MODEL + '","choices":[{"index":0,'
        '"message":{"role":"assistant","content":"Hello!","refusal":null},"logprobs":null,"finish_reason":"stop"}],'
        '"usage":' + USAGE_JSON + "}"
    )
    assert service.principals[0].account == "local"


async def test_chat_stream(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/chat/completions", json=CHAT | {"stream": True})
    assert answer.headers["content-type"] == "text/event-stream"
    head = 'data: {"id":"chatcmpl-ID","object":"chat.completion.chunk","created":0,"model":"' + MODEL + '","choices":['
    rest = ',"logprobs":null,"finish_reason":null}]}\n\n'
    assert normal(answer.text) == (
        head + '{"index":0,"delta":{"role":"assistant","content":""}' + rest
        + head + '{"index":0,"delta":{"content":"Hel"}' + rest
        + head + '{"index":0,"delta":{"content":"lo"}' + rest
        + head + '{"index":0,"delta":{"content":"!"}' + rest
        + head + '{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}]}\n\n'
        "data: [DONE]\n\n"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("base", "options", "expected"),
    [("/v1", {}, 0), ("/v1", {"stream_options": {"include_usage": True}}, 1), (f"{CF}/v1", {}, 1)],
)
async def test_one_usage_chunk(client: httpx.AsyncClient, base: str, options: dict, expected: int) -> None:
    for path, body in (("chat/completions", CHAT), ("completions", {"model": MODEL, "prompt": "Hi"})):
        answer = await client.post(f"{base}/{path}", json=body | {"stream": True} | options)
        with_usage = [chunk for chunk in chunks(answer.text) if chunk.get("usage")]
        assert len(with_usage) == expected
        assert answer.text.endswith("data: [DONE]\n\n")
        assert answer.text.count("[DONE]") == 1
        if expected:
            assert with_usage[0]["choices"] == []
            assert with_usage[0]["usage"] == json.loads(USAGE_JSON)
            assert chunks(answer.text)[-1] == with_usage[0]


async def test_obfuscation_pads_every_text(client: httpx.AsyncClient) -> None:
    options = {"stream": True, "stream_options": {"include_obfuscation": True}}
    answer = await client.post("/v1/chat/completions", json=CHAT | options)
    texts = [chunk for chunk in chunks(answer.text) if chunk["choices"][0]["delta"].get("content")]
    assert len(texts) == 3
    assert all(1 <= len(chunk["obfuscation"]) <= 32 for chunk in texts)


async def test_canonical_request(client: httpx.AsyncClient, service: FakeService) -> None:
    body = {
        "model": MODEL,
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Now."}]},
            {"role": "user", "content": None, "name": "ann"},
            {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "content": "42", "tool_call_id": "c1"},
        ],
        "bad_words": ["no"], "include_stop_str_in_output": True,
        "max_tokens": 5, "max_completion_tokens": 7, "temperature": 0, "top_p": 0.5, "top_k": -1, "min_p": 0.1,
        "repetition_penalty": 1.1, "frequency_penalty": -1, "presence_penalty": 1, "logit_bias": {"17": -100},
        "seed": -5, "stop": "END", "n": 2, "logprobs": True, "top_logprobs": 4, "service_tier": "flex",
        "user": "u", "prompt_cache_key": "k", "stop_token_ids": [2], "ignore_eos": True, "min_tokens": 1,
        "chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low", "unheard_of": {"x": [1]},
        "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "store": False, "metadata": None,
    }  # fmt: skip
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["service_tier"] == "flex"
    request = service.requests[0]
    assert request == GenerateRequest(
        id=answer.headers["x-request-id"],
        model=MODEL,
        messages=(
            Message("developer", "Be brief.\nNow."),
            Message("user", "", "ann"),
            Message("assistant", "", tool_calls=(ToolCall("c1", "f", "{}"),)),
            Message("tool", "42", tool_call_id="c1"),
        ),
        sampling=SamplingParams(
            bad_words=("no",), include_stop=True,
            max_tokens=7, min_tokens=1, temperature=0.0, top_p=0.5, min_p=0.1, repetition_penalty=1.1,
            frequency_penalty=-1.0, presence_penalty=1.0, logit_bias={17: -100.0}, seed=-5, stop=("END",),
            stop_ids=(2,), ignore_eos=True, logprobs=4,
        ),
        n=2,
        session="k",
        priority=Priority.FLEX,
        reject_if_busy=True,
        template_kwargs={"enable_thinking": False},
        reasoning=Reasoning(enabled=False, effort="low"), api="chat",
    )  # fmt: skip


async def test_defaults(client: httpx.AsyncClient, service: FakeService) -> None:
    await client.post("/v1/chat/completions", json=CHAT)
    assert service.requests[0].sampling == SamplingParams()
    assert set(service.requests[0].left_to_model) == {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}
    assert service.requests[0].session is None


@pytest.mark.parametrize("stream", [False, True])
async def test_choices(client: httpx.AsyncClient, stream: bool) -> None:
    answer = await client.post("/v1/chat/completions", json=CHAT | {"n": 3, "stream": stream})
    if stream:
        texts = [""] * 3
        for chunk in chunks(answer.text):
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["delta"].get("content", "")
    else:
        texts = [choice["message"]["content"] for choice in answer.json()["choices"]]
    assert texts == ["Hello!"] * 3


async def with_logprobs(request: GenerateRequest) -> AsyncIterator[TextEvent]:
    yield Started(USAGE)
    for token in ("Hé", "!"):
        raw = list(token.encode())
        other = TextLogprob("x", -math.inf, [120])
        yield TextDelta(0, token, [TextLogprob(token, -0.25, raw, [TextLogprob(token, -0.25, raw), other])])
    yield ChoiceDone(0, "length")
    yield Completed(USAGE)


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_logprobs(client: httpx.AsyncClient, service: FakeService, stream: bool) -> None:
    service.script = with_logprobs
    body = CHAT | {"logprobs": True, "top_logprobs": 2, "stream": stream}
    answer = await client.post("/v1/chat/completions", json=body)
    if stream:
        choices = [chunk["choices"][0] for chunk in chunks(answer.text)]
        found = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["content"]]
        assert choices[-1]["finish_reason"] == "length"
    else:
        found = answer.json()["choices"][0]["logprobs"]["content"]
    first = {"token": "Hé", "logprob": -0.25, "bytes": [72, 195, 169]}
    assert found[0] == first | {"top_logprobs": [first, {"token": "x", "logprob": -9999.0, "bytes": [120]}]}
    assert [token["token"] for token in found] == ["Hé", "!"]


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_logprobs(client: httpx.AsyncClient, service: FakeService, stream: bool) -> None:
    service.script = with_logprobs
    answer = await client.post("/v1/completions", json={"model": MODEL, "prompt": "x", "logprobs": 2, "stream": stream})
    found = [chunk["choices"][0]["logprobs"] for chunk in (chunks(answer.text) if stream else [answer.json()])]
    offsets = [offset for part in found if part for offset in part["text_offset"]]
    assert offsets == [0, 2]
    assert found[0]["top_logprobs"][0] == {"Hé": -0.25, "x": -9999.0}


async def test_completion_stream(client: httpx.AsyncClient, service: FakeService) -> None:
    answer = await client.post("/v1/completions", json={"model": MODEL, "prompt": "Say", "stream": True})
    head = 'data: {"id":"cmpl-ID","object":"text_completion","created":0,"model":"' + MODEL + '","choices":[{"index":0,'
    assert normal(answer.text).startswith(head + '"text":"Hel","logprobs":null,"finish_reason":null}]}\n\n' + head)
    assert normal(answer.text).endswith(
        head + '"text":"","logprobs":null,"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    )
    assert service.requests[0].prompt == "Say"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a", "b", "c"], ["a", "b", "c"]),
        ([5, 6], [tokens.pack([5, 6])]),
        ([[5], [6, 7]], [tokens.pack([5]), tokens.pack([6, 7])]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_completion_prompts(
    client: httpx.AsyncClient, service: FakeService, prompt: object, expected: list, stream: bool
) -> None:
    body = {"model": MODEL, "prompt": prompt, "n": 2, "stream": stream}
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer = await client.post("/v1/completions", json=body | options)
    assert [request.prompt or request.prompt_ids for request in service.requests] == expected
    assert len({request.id for request in service.requests}) == len(expected)
    texts = [""] * (2 * len(expected))
    for chunk in chunks(answer.text) if stream else [answer.json()]:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["Hello!"] * (2 * len(expected))
    usage = chunks(answer.text)[-1]["usage"] if stream else answer.json()["usage"]
    assert usage["completion_tokens"] == 6 * len(expected)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 8 * len(expected)
    assert service.open == 0


async def test_one_prompt_refused_ends_all(client: httpx.AsyncClient, service: FakeService) -> None:
    async def script(request: GenerateRequest) -> AsyncIterator[TextEvent]:
        if request.prompt == "b":
            raise Overloaded("full", retry_after_s=2)
        yield Started(Usage())
        await asyncio.sleep(60)

    service.script = script
    answer = await client.post("/v1/completions", json={"model": MODEL, "prompt": ["a", "b"]})
    assert answer.status_code == 429
    assert service.open == 0


async def test_models(client: httpx.AsyncClient) -> None:
    for base in ("/v1", f"{CF}/v1"):
        listed = (await client.get(f"{base}/models")).json()
        assert listed["object"] == "list"
        assert listed["data"][0] == {
            "id": MODEL, "root": MODEL, "aliases": ["smollm2-135m-instruct"], "object": "model", "created": 1730332800,
            "owned_by": "huggingfacetb", "context_window": 8192, "max_model_len": 8192,
            "default_parameters": {"temperature": 0.2}, "task": "Text Generation", "capabilities": {},
            "license": "apache-2.0", "pricing": None, "deprecation_date": None, "state": "loaded",
            "type": "model", "display_name": "smollm2-135m-instruct",
            "created_at": "2024-10-31T00:00:00Z",
        }  # fmt: skip
        assert (listed["has_more"], listed["first_id"]) == (False, MODEL)
        short = {row["id"]: row["root"] for row in listed["data"]}["smollm2-135m-instruct"]
        assert short == MODEL, "short names are listed too"
        for name in (MODEL, MODEL.replace("/", "%2F"), "smollm2-135m-instruct"):
            assert (await client.get(f"{base}/models/{name}")).json() == listed["data"][0]
        assert (await client.get(f"{base}/models/nope")).status_code == 404


async def test_error_forms(client: httpx.AsyncClient) -> None:
    unknown = CHAT | {"model": "nope"}
    answer = await client.post("/v1/chat/completions", json=unknown)
    expected = {"message": "No such model nope or task", "type": "invalid_request_error", "param": "model"}
    assert answer.status_code == 404
    assert answer.json() == {"error": expected | {"code": "model_not_found"}}
    both = await client.post(f"{CF}/v1/chat/completions", json=unknown)
    assert both.status_code == 404
    assert both.json()["error"] == answer.json()["error"]
    assert both.json()["errors"][0]["code"] == 5007
    assert both.json()["success"] is False


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("completions", {"prompt": "Hi"}),
        ("responses", {"input": "Hi"}),
    ],
)
async def test_retention_hints(client: httpx.AsyncClient, service: FakeService, path: str, body: Any) -> None:
    for retention, ttl_s in (("24h", 86_400), ("in_memory", 300), ("in-memory", 300), (None, 0)):
        asked = body | {"model": MODEL, "prompt_cache_retention": retention}
        answer = await client.post(f"/v1/{path}", json=asked, headers={"x-session-final": "true"})
        assert answer.status_code == 200
        assert (service.requests[-1].cache_ttl_s, service.requests[-1].session_final) == (ttl_s, True)
    n = len(service.requests)
    answer = await client.post(f"/v1/{path}", json=body | {"model": MODEL, "prompt_cache_retention": "1w"})
    assert (answer.status_code, "prompt_cache_retention" in answer.text) == (400, True)
    answer = await client.post(f"/v1/{path}", json=body | {"model": MODEL}, headers={"x-session-final": "maybe"})
    assert (answer.status_code, "x-session-final" in answer.text) == (400, True)
    assert len(service.requests) == n


async def test_sessions_first_wins(client: httpx.AsyncClient, service: FakeService) -> None:
    sources = ["x-session-affinity", "x-claude-code-session-id", "session-id", "session_id", "x-session-id"]
    body = CHAT | {"prompt_cache_key": "key", "user": "user"}
    for first in range(len(sources)):
        headers = {name: f"from {name}" for name in sources[first:]}
        await client.post("/v1/chat/completions", json=body, headers=headers)
        assert service.requests[-1].session == f"from {sources[first]}"
    await client.post("/v1/chat/completions", json=body)
    assert service.requests[-1].session == "key"
    await client.post("/v1/chat/completions", json=CHAT | {"user": "u" * 5000})
    assert len(service.requests[-1].session or "") == 32


async def test_the_account_is_the_path_segment(client: httpx.AsyncClient, service: FakeService) -> None:
    for path in ("/v1/chat/completions", f"{CF}/v1/chat/completions"):
        await client.post(path, json=CHAT)
    local, acme = service.principals
    assert (local.account, acme.account) == ("local", "acme")
    assert local.salt != acme.salt


async def test_the_model_named_at_start_is_meant_beside_others_on_disk(service: FakeService) -> None:
    spare, other = card("@cf/acme/spare", "acme"), card("@cf/acme/other", "acme")
    for named, on_demand, model in (
        ([card(MODEL, "acme")], [spare, other], MODEL),
        ([], [spare], spare.id),
        ([], [spare, other], None),
        ([spare, other], [card(MODEL, "acme")], None),
    ):
        service.models = FakeModels(named, (), on_demand)
        async with client_of(service) as client:
            answer = await client.post("/v1/completions", json={"prompt": "hi"})
        assert answer.status_code == (400 if model is None else 200), answer.text
        if model is not None:
            assert answer.json()["model"] == model
        else:
            assert all(each.id in answer.json()["error"]["message"] for each in (*named, *on_demand))
