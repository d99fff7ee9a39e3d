"""The cost of a request in its response, where the client asks for it, and neurons; never silently zero."""

from typing import Any

import httpx
import pytest

from emberline.protocol.price import Price
from tests.api.fake_service import MODEL, SPEECH, FakeService

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
ASK = {"x-emberline-cost": "true"}
PRICE = Price(input=600_000, output=3_000_000, neuron=11)
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "completions": ("/v1/completions", {"model": MODEL, "prompt": "hi"}),
    "responses": ("/v1/responses", {"model": MODEL, "input": "hi"}),
    "messages": ("/v1/messages", CHAT | {"max_tokens": 9}),
    "run": (f"/client/v4/accounts/a/ai/run/{MODEL}", {"prompt": "hi"}),
}


@pytest.fixture(params=BODIES)
def api(request: pytest.FixtureRequest, service: FakeService) -> tuple[str, dict[str, Any]]:
    service.price, service.cost_pico = PRICE, 2_385_800_000
    return BODIES[request.param]


async def test_in_every_api_where_asked(client: httpx.AsyncClient, api: tuple[str, dict[str, Any]]) -> None:
    path, body = api
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert '"cost"' not in answer.text
    assert answer.headers["cf-ai-neurons"] == "216.89"
    answer = await client.post(path, json=body, headers=ASK)
    assert '"cost":0.0023858' in answer.text
    streamed = await client.post(path, json=body | {"stream": True}, headers=ASK)
    assert '"cost":0.0023858' in streamed.text
    assert "cf-ai-neurons" not in streamed.headers  # its headers are sent before it is known


async def test_null_without_a_price(
    client: httpx.AsyncClient, service: FakeService, api: tuple[str, dict[str, Any]]
) -> None:
    path, body = api
    service.price = None
    answer = await client.post(path, json=body, headers=ASK)
    assert '"cost":null' in answer.text
    assert "cf-ai-neurons" not in answer.headers


async def test_as_openrouter_is_asked(client: httpx.AsyncClient, service: FakeService) -> None:
    service.price, service.cost_pico = PRICE, 1
    for path in ("/v1/chat/completions", "/v1/completions"):
        prompt: dict[str, Any] = CHAT if "chat" in path else {"model": MODEL, "prompt": ["hi", "ho"]}
        answer = await client.post(path, json=prompt | {"usage": {"include": True}})
        cost = "0.000000000001" if "chat" in path else "0.000000000002"  # two prompts are two requests
        assert f'"cost":{cost}' in answer.text
        streamed = await client.post(path, json=prompt | {"usage": {"include": True}, "stream": True})
        assert f'"cost":{cost}' in streamed.text
        assert '"cost"' not in (await client.post(path, json=prompt | {"usage": {"include": False}})).text


async def test_of_speech(client: httpx.AsyncClient, service: FakeService) -> None:
    service.price, service.cost_pico = PRICE, 22_000_000
    for headers, cost in ((ASK, 0.000022), ({}, None)):
        file = {"file": ("a.wav", b"RIFF....", "audio/wav")}
        answer = await client.post(
            "/v1/audio/transcriptions", data={"model": SPEECH.id}, files=file, headers=dict(headers)
        )
        assert answer.json()["usage"].get("cost") == cost
        assert answer.headers["cf-ai-neurons"] == "2.00"
