"""Providers that fail, in each family: a clear error, one usage row, nothing billed twice."""

import asyncio
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.accounts.prices import PriceVersion
from emberline.config import ProviderConfig
from emberline.protocol.price import Price
from emberline.protocol.request import GenerateRequest, Message
from emberline.upstream.dialects.dialect import Dialect
from standins.standin_providers import ProviderScript
from tests.upstream.providers.conftest import Gateway, Opener, StartProvider, configured, events, said

KINDS = ("openai", "anthropic", "gemini")
each_kind = pytest.mark.parametrize("kind", KINDS)
TEXT = "One two three four five."


def model(kind: str) -> str:
    return {"anthropic": "anthropic/claude-opus-5", "gemini": "gemini/gemini-3-pro", "openai": "openai/gpt-5"}[kind]


def body(kind: str, **more: Any) -> dict[str, Any]:
    return {"model": model(kind), "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100, **more}


async def open_gateway(
    gateway: Opener, provider_server: StartProvider, kind: str, **script: Any
) -> tuple[Any, Gateway]:
    server = await provider_server(kind, text=TEXT, **script)
    hangs = script.get("hang") or "hang_after" in script
    made = await gateway(configured(kind, server, timeout_s=0.15 if hangs else 60))
    price = Price(input=1_000_000, cached_input=1_000_000, output=2_000_000)
    made.core.prices.add(
        PriceVersion(model=model(kind), number=1, valid_from_us=0, source="admin", created_us=0, price=price)
    )
    return server, made


@each_kind
@pytest.mark.parametrize(
    ("script", "status", "part"),
    [
        ({"hang": True}, 503, "did not answer"),
        ({"hang_after": 150}, 503, "did not answer"),
        ({"html": True}, 503, "event stream"),
        ({"status": 502, "html": True}, 503, "answered 502"),
        ({"redirect": "https://elsewhere.example/"}, 503, "redirect"),
        ({"cut_after": 400}, 503, "failed"),
        ({"error_after": 3}, 503, "middle of its reply"),
        ({"status": 404}, 404, "no such model"),
        ({"status": 400}, 400, "scripted"),
        ({"status": 413}, 413, "too large"),
        ({"status": 503}, 503, "answered 503"),
        ({"status": 402}, 403, "paid"),
        ({"status": 429}, 429, "no room"),
        ({"status": 529}, 429, "no room"),
        ({"status": 504}, 503, "answered 504"),
    ],
)
async def test_every_failure_is_named(
    gateway: Opener, provider_server: StartProvider, kind: str, script: Any, status: int, part: str
) -> None:
    server, made = await open_gateway(gateway, provider_server, kind, **script)
    answer = await made.post("/v1/chat/completions", body(kind))
    assert (answer.status_code, part in answer.json()["error"]["message"]) == (status, True), answer.text
    assert [(row[1], row[5]) for row in await made.rows()] == [("failed", 0)]
    assert len(server.requests) <= 1


@each_kind
async def test_retry_after_in_every_form(gateway: Opener, provider_server: StartProvider, kind: str) -> None:
    server, made = await open_gateway(gateway, provider_server, kind, status=429)
    default = "17" if kind == "gemini" else "1"  # Google tells it in the body
    for given_s, expected in (("23", "23"), ("", default), ("soon", default), ("-5", default), ("1e99", "86400")):
        server.script.retry_after = given_s
        answer = await made.post("/v1/chat/completions", body(kind))
        assert (answer.status_code, answer.headers["retry-after"]) == (429, expected), given_s
    server.script.retry_after = "Wed, 21 Oct 2065 07:28:00 GMT"
    assert (await made.post("/v1/chat/completions", body(kind))).headers["retry-after"] == "86400"


@each_kind
async def test_a_stream_that_breaks_ends_with_an_error(
    gateway: Opener, provider_server: StartProvider, kind: str
) -> None:
    _, made = await open_gateway(gateway, provider_server, kind, cut_after=700)
    answer = await made.post("/v1/chat/completions", body(kind, stream=True))
    assert answer.status_code == 200
    assert f"provider {kind}" in events(answer.text)[-1]["error"]["message"]
    assert "[DONE]" not in answer.text
    assert [row[1] for row in await made.rows()] == ["failed"]


LIES: list[dict[str, Any]] = [
    {"input": -5, "output": -1},
    {"input": 10**15, "output": 10**15},
    {"input": 2**31 - 1, "output": 2**31 - 1},
    {"input": "many", "output": None},
    {"input": 1.5, "output": [1]},
    {"input": 0, "output": 0},
    {"input": 20, "output": 50_000},
]
_NAMES = {
    "openai": ("prompt_tokens", "completion_tokens"),
    "anthropic": ("input_tokens", "output_tokens"),
    "gemini": ("promptTokenCount", "candidatesTokenCount"),
}


@each_kind
async def test_a_provider_that_lies_about_usage_bills_what_can_be(
    gateway: Opener, provider_server: StartProvider, kind: str
) -> None:
    server, made = await open_gateway(gateway, provider_server, kind)
    names = _NAMES[kind]
    for lie in LIES:
        server.script.usage = {names[0]: lie["input"], names[1]: lie["output"]}
        for path in ("/v1/chat/completions", "/v1/messages"):
            answer = await made.post(path, body(kind))
            assert answer.status_code == 200, answer.text
    rows = await made.rows()
    assert len(rows) == 2 * len(LIES)
    for _, status, n_input, cached, n_output, cost in rows:
        assert status == "finished"
        assert 0 <= cached <= n_input < 300
        assert 0 <= n_output <= 1200
        assert cost == n_input * 1_000_000 + n_output * 2_000_000


@each_kind
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_wherever_a_stream_is_cut_it_ends_once(kind: str, data: st.DataObject) -> None:
    """Whole or failed, never half: a reply without an error is the whole reply."""
    cut = data.draw(st.one_of(st.just(-1), st.integers(0, 2500)), label="cut")
    split = data.draw(st.integers(1, 200), label="split")
    asyncio.run(_cut_anywhere(kind, ProviderScript(text=TEXT, cut_after=cut, split=split)))


async def _cut_anywhere(kind: str, script: ProviderScript) -> None:
    from emberline.net.http_client import ConnectionFailed
    from emberline.upstream.dialects.event_reader import ChunkEditor
    from emberline.upstream.dialects.sse import StreamEditor
    from emberline.upstream.providers.access import Access
    from emberline.upstream.providers.attempt import ProviderAttempt
    from emberline.upstream.providers.client import ProviderClient
    from emberline.upstream.providers.errors import ProviderFailed
    from emberline.upstream.providers.registry import provider
    from standins.standin_providers import StandinAnthropic, StandinGemini, StandinOpenAI

    server = {"anthropic": StandinAnthropic, "gemini": StandinGemini, "openai": StandinOpenAI}[kind](script)
    await server.start()
    client = ProviderClient(provider(ProviderConfig(name=kind, url=server.url)))
    try:
        fields: Any = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
        task, editor, text, failed = None, cast(Any, StreamEditor()), b"", False
        if kind != "openai":
            task = GenerateRequest(id="r", model="m", messages=(Message("user", "Hi"),))
            editor = ChunkEditor(cast(Dialect, client.api).reader(task, 1), "m", hides_usage=False)
        attempt = ProviderAttempt("/v1/chat/completions", "r", client, Access(server.key), task=task)
        try:
            exchange = await attempt.open(fields)
            piece = b"?"
            while piece:
                piece = await exchange.piece()
                text += editor.feed(piece)
        except (ProviderFailed, ConnectionFailed):
            failed = True
        attempt.close()
        chunks = events(text.decode())
        assert TEXT.startswith(said(chunks))
        assert not editor.ended or (said(chunks) == TEXT and editor.usage is not None)
        if script.cut_after < 0:
            assert editor.ended
            assert not failed
        finishes = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
        assert sum(reason is not None for reason in finishes) <= 1
        assert len(server.requests) == 1
    finally:
        await client.close()
        await server.close()
