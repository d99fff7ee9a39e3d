"""The Workers AI run endpoints: responses, streams and errors."""

import json
import re

import httpx
import pytest

from emberline.protocol.request import Message, SamplingParams, ToolCall
from tests.api.fake_service import KEY, MODEL, FakeService, client_of

AI = "/client/v4/accounts/acme/ai"
RUN = f"{AI}/run/{MODEL}"
USAGE_JSON = (
    '{"prompt_tokens":12,"completion_tokens":3,"total_tokens":15,"prompt_tokens_details":{"cached_tokens":8},'
    '"completion_tokens_details":{"reasoning_tokens":0}}'
)


@pytest.mark.parametrize("model", [MODEL, MODEL.replace("/", "%2F"), MODEL.replace("/", "%2f").replace("@", "%40")])
async def test_run(client: httpx.AsyncClient, service: FakeService, model: str) -> None:
    answer = await client.post(f"{AI}/run/{model}", content=b'{"prompt":"Hi"}')
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["cf-ai-req-id"] == answer.headers["x-request-id"]
    assert "cf-ai-neurons" not in answer.headers  # its price has none
    assert answer.text == (
        '{"result":{"response":"Hello!","tool_calls":[],"usage":' + USAGE_JSON + '},'
        '"success":true,"errors":[],"messages":[]}'
    )  # fmt: skip
    assert service.requests[0].model == MODEL
    assert service.requests[0].messages == (Message("user", "Hi"),)
    assert service.requests[0].sampling == SamplingParams(temperature=0.6)
    assert service.principals[0].account == "acme"


async def test_stream(client: httpx.AsyncClient) -> None:
    answer = await client.post(RUN, json={"messages": [{"role": "user", "content": "Hi"}], "stream": True})
    assert answer.headers["content-type"] == "text/event-stream"
    assert re.sub(r'"p":"\w{1,32}"', '"p":"P"', answer.text) == (
        'data: {"response":"Hel","p":"P"}\n\ndata: {"response":"lo","p":"P"}\n\ndata: {"response":"!","p":"P"}\n\n'
        'data: {"response":"","usage":' + USAGE_JSON + "}\n\ndata: [DONE]\n\n"
    )


async def test_padding_varies(client: httpx.AsyncClient) -> None:
    answers = [(await client.post(RUN, json={"prompt": "x", "stream": True})).text for _ in range(10)]
    assert len({len(answer) for answer in answers}) > 2


async def test_universal(client: httpx.AsyncClient, service: FakeService) -> None:
    answer = await client.post(f"{AI}/run", json={"model": MODEL, "input": {"prompt": "Hi", "max_tokens": 9}})
    assert answer.json()["result"]["response"] == "Hello!"
    assert service.requests[0].sampling.max_tokens == 9
    bad = await client.post(f"{AI}/run", json={"model": "openai/gpt-4.1", "input": {"prompt": "Hi"}})
    assert (bad.status_code, bad.json()["errors"][0]["code"]) == (400, 5007)


async def test_raw_skips_the_template(client: httpx.AsyncClient, service: FakeService) -> None:
    await client.post(RUN, json={"prompt": "<|user|>Hi", "raw": True})
    assert service.requests[0].prompt == "<|user|>Hi"
    assert service.requests[0].messages is None


async def test_canonical_request(client: httpx.AsyncClient, service: FakeService) -> None:
    body = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"a": 1}}]},
            {"role": "tool", "content": "42", "name": "f"},
        ],
        "max_tokens": 5, "temperature": 5, "top_p": 0.001, "top_k": 50, "seed": 7, "repetition_penalty": 0,
        "frequency_penalty": 2, "presence_penalty": -2, "stream": False, "lora": None,
        "options": {"rejectIfBusy": True},
    }  # fmt: skip
    headers = {"x-session-affinity": "ses_1"}
    answer = await client.post(RUN + "?tags=a", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    request = service.requests[0]
    assert request.reject_if_busy
    assert request.messages == (
        Message("user", "Hi"),
        Message("assistant", "", tool_calls=(ToolCall("call_0", "f", '{"a":1}'),)),
        Message("tool", "42", "f", tool_call_id="call_0"),
    )
    assert request.session == "ses_1"
    assert request.sampling == SamplingParams(
        max_tokens=5, temperature=5.0, top_p=0.001, top_k=50, seed=7, frequency_penalty=2.0, presence_penalty=-2.0
    )


@pytest.mark.parametrize(
    ("body", "named", "code"),
    [
        ({}, "prompt", 5006),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt", 5006),
        ({"messages": []}, "messages", 5006),
        ({"messages": [{"role": "user", "content": "a"}], "raw": True}, "raw", 5006),
        ({"prompt": 5}, "prompt", 5006),
        ({"prompt": "a", "temperature": 5.1}, "temperature", 5006),
        ({"prompt": "a", "top_p": 0}, "top_p", 5006),
        ({"prompt": "a", "top_k": 51}, "top_k", 5006),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", 5006),
        ({"prompt": "a", "repetition_penalty": 2.1}, "repetition_penalty", 5006),
        ({"prompt": "a", "tools": [{"name": "f", "parameters": 5}]}, "tools[0].parameters", 5006),
        ({"prompt": "a", "tools": [{"name": "f"}], "raw": True}, "tools", 5006),
        ({"prompt": "a", "tool_choice": "required"}, "tool_choice", 5006),
        ({"prompt": "a", "response_format": {"type": "json_schema"}}, "response_format", 5006),
        ({"prompt": "a", "lora": "my-lora"}, "lora", 5006),
        ({"prompt": "a", "functions": [{}]}, "functions", 5006),
        ({"prompt": "a", "n": 2}, "n", 5006),
        ({"prompt": "a", "logprobs": True}, "logprobs", 5006),
    ],
)
async def test_errors_name_the_field(client: httpx.AsyncClient, body: dict, named: str, code: int) -> None:
    answer = await client.post(RUN, json=body)
    assert answer.status_code == 400
    error = answer.json()["errors"][0]
    assert error["code"] == code
    assert named in error["message"]
    assert error["message"].startswith("AiError: Bad input: ")
    assert error["message"].endswith(f"({answer.headers['x-request-id']})")
    assert answer.json() == {"errors": [error], "success": False, "result": {}, "messages": []}


async def test_a_server_without_a_queue(client: httpx.AsyncClient) -> None:
    answer = await client.post(f"{RUN}?queueRequest=true", json={"requests": [{"prompt": "a"}]})
    assert (answer.status_code, answer.json()["errors"][0]["code"]) == (503, 3040)


@pytest.mark.parametrize(
    ("model", "status", "code"), [("@cf/no/such", 400, 5007), ("%20%FF", 404, 3042), ("a%00b", 404, 3042)]
)
async def test_unknown_models(client: httpx.AsyncClient, model: str, status: int, code: int) -> None:
    answer = await client.post(f"{AI}/run/{model}", json={"prompt": "a"})
    assert (answer.status_code, answer.json()["errors"][0]["code"]) == (status, code)


async def test_authentication_error(service: FakeService) -> None:
    async with client_of(service, KEY) as client:
        answer = await client.post(RUN, json={"prompt": "a"})
        assert answer.status_code == 401
        assert answer.json() == {
            "success": False,
            "errors": [{"code": 10000, "message": "Authentication error"}],
            "messages": [],
            "result": None,
        }
        for headers in (
            {"authorization": f"Bearer {KEY}"},
            {"x-auth-email": "a@b.c", "x-auth-key": KEY},
            {"x-api-key": KEY},
        ):
            assert (await client.post(RUN, json={"prompt": "a"}, headers=headers)).status_code == 200


@pytest.mark.parametrize("account", ["a%2Fb", "..", "%2e%2e", "a b", "x" * 65, "-a", "é"])
async def test_invalid_accounts(client: httpx.AsyncClient, service: FakeService, account: str) -> None:
    answer = await client.post(f"/client/v4/accounts/{account}/ai/run/{MODEL}", json={"prompt": "a"})
    assert answer.status_code in (400, 404)
    assert answer.json()["success"] is False
    assert service.requests == []


async def test_unknown_routes(client: httpx.AsyncClient) -> None:
    for path in ("/client/v4", "/client/v4/accounts", f"{AI}", f"{AI}/run/", f"{AI}/nope", "/client/v4/zones"):
        answer = await client.post(path, json={})
        assert answer.status_code == 404, path
        (error,) = answer.json()["errors"]
        assert error["code"] == 7000
        assert error["message"].startswith("No route for that URI: /client/v4")
    answer = await client.get(RUN)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["errors"][0]["code"] == 7001
    assert json.loads(answer.text)["success"] is False
