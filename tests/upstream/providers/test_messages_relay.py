"""The Messages API to Anthropic: bodies and events as they came, usage counted."""

from typing import Any

from emberline.accounts.prices import PriceVersion
from emberline.protocol.price import Price
from tests.upstream.providers.conftest import Opener, StartProvider, configured, events

MODEL = "anthropic/claude-opus-5"
KEPT = {"type": "ephemeral"}
BODY: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 2000,
    "system": [{"type": "text", "text": "Long.", "cache_control": KEPT}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": KEPT}]}],
    "thinking": {"type": "adaptive", "display": "summarized"},
    "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 3}],
}
CALLS = [("weather", {"city": "Oslo"}), ("clock", {})]


async def test_the_body_and_the_message_are_untouched(gateway: Opener, provider_server: StartProvider) -> None:
    counts = {"prompt_tokens": 100, "cached_tokens": 60, "written_tokens": 10, "thinking_tokens": 4}
    server = await provider_server("anthropic", thinking="Hm.", text="Yes.", calls=CALLS, split=13, **counts)
    made = await gateway(configured("anthropic", server))
    headers = {"anthropic-version": "2026-10-21", "anthropic-beta": "some-beta-2026-01-01"}
    answer = await made.client.post("/v1/messages", json=BODY, headers=headers)
    assert answer.status_code == 200, answer.text
    (got,) = server.requests
    assert got == BODY | {"model": "claude-opus-5", "stream": True}
    assert {name: server.headers[name] for name in headers} == headers
    assert answer.json()["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": "c2lnbmVk"},
        {"type": "text", "text": "Yes."},
        {"type": "tool_use", "id": "toolu_0", "name": "weather", "input": {"city": "Oslo"}},
        {"type": "tool_use", "id": "toolu_1", "name": "clock", "input": {}},
    ]
    assert (answer.json()["stop_reason"], answer.json()["usage"]["cache_creation_input_tokens"]) == ("tool_use", 10)
    streamed = await made.client.post("/v1/messages", json=BODY | {"stream": True}, headers=headers)
    sent = b"".join(server._events("claude-opus-5"))  # type: ignore[attr-defined]
    assert streamed.content == sent
    assert [row[1:5] for row in await made.rows()] == [("finished", 100, 60, 9)] * 2


async def test_drafts_are_not_asked_of_anthropic(gateway: Opener, provider_server: StartProvider) -> None:
    server = await provider_server("anthropic")
    made = await gateway(configured("anthropic", server))
    for path in ("/v1/messages", "/v1/chat/completions"):
        refused = await made.post(path, {**BODY, "tools": [], "speculation": {"max_draft_tokens": 0}})
        assert refused.status_code == 400, refused.text
        assert "`speculation`" in refused.text
    assert server.requests == []


async def test_cost_errors_and_counting(gateway: Opener, provider_server: StartProvider) -> None:
    server = await provider_server("anthropic", prompt_tokens=100)
    made = await gateway(configured("anthropic", server))
    price = Price(input=1_000_000, cached_input=1_000_000, output=2_000_000)
    made.core.prices.add(
        PriceVersion(model=MODEL, number=1, valid_from_us=0, source="admin", created_us=0, price=price)
    )
    body = BODY | {"stream": True}
    stream = events((await made.post("/v1/messages", body, **{"x-emberline-cost": "true"})).text)
    assert next(event for event in stream if event["type"] == "message_delta")["usage"]["cost"] == 0.000118
    server.script.error_after, server.script.split = 4, 40
    stream = events((await made.post("/v1/messages", body)).text)
    assert stream[-1]["type"] == "error"
    assert "provider anthropic" in stream[-1]["error"]["message"]
    server.script.error_after = -1
    refused = await made.post("/v1/messages", body | {"messages": []})
    assert (refused.status_code, refused.json()["type"]) == (400, "error")
    plain = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    assert (await made.post("/v1/messages/count_tokens", plain)).json() == {"input_tokens": 100}
    assert [row[1] for row in await made.rows()] == ["finished", "failed", "failed"]
