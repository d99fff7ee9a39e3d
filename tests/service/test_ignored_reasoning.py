"""Reasoning that is asked of a model which does not reason is never ignored in silence, whichever API asks for it."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from emberline.accounts.auth import Authenticator
from emberline.accounts.secret import Secret
from emberline.api.app import ApiSettings, App
from emberline.api.http.unknown_fields import HEADER
from emberline.service import Service
from tests.service.conftest import MODEL

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
INPUT: dict[str, Any] = {"model": MODEL, "input": "Hi", "store": False}
RUN = f"/client/v4/accounts/a/ai/run/{MODEL}"


@pytest.fixture
async def client(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(App(service, ApiSettings(auth=Authenticator(Secret("0" * 64), None))))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8686") as client:
        yield client


@pytest.mark.parametrize(
    ("path", "body", "fields", "names"),
    [
        ("/v1/chat/completions", CHAT, {"reasoning_effort": "high"}, ["reasoning_effort"]),
        ("/v1/chat/completions", CHAT, {"thinking_token_budget": 5}, ["thinking_token_budget"]),
        ("/v1/chat/completions", CHAT, {"reasoning": {"effort": "low", "exclude": True}}, ["reasoning.effort"]),
        (
            "/v1/chat/completions",
            CHAT,
            {"thinking": {"type": "enabled"}, "chat_template_kwargs": {"enable_thinking": True}},
            ["thinking", "chat_template_kwargs"],
        ),
        ("/v1/messages", CHAT, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, ["thinking"]),
        ("/v1/messages", CHAT, {"output_config": {"effort": "low"}}, ["output_config.effort"]),
        ("/v1/responses", INPUT, {"reasoning": {"effort": "high"}}, ["reasoning.effort"]),
        (RUN, {"messages": CHAT["messages"]}, {"reasoning_effort": "low"}, ["reasoning_effort"]),
    ],
)
async def test_the_response_names_what_had_no_effect(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], fields: dict[str, Any], names: list[str]
) -> None:
    for stream in (False, True):
        plain = await client.post(path, json=body | {"stream": stream})
        assert (plain.status_code, HEADER in plain.headers) == (200, False), plain.text
        answer = await client.post(path, json=body | fields | {"stream": stream})
        assert answer.status_code == 200, answer.text
        named = ", ".join(f"`{name}`" for name in names)
        assert answer.headers[HEADER] == f"no effect of {named}: {MODEL} does not reason"


async def test_reasoning_turned_off_needs_no_warning(client: httpx.AsyncClient) -> None:
    for fields in ({"reasoning_effort": "none"}, {"thinking": {"type": "disabled"}}, {"include_reasoning": True}):
        answer = await client.post("/v1/chat/completions", json=CHAT | fields)
        assert (answer.status_code, HEADER in answer.headers) == (200, False), answer.text


async def test_it_stands_beside_unknown_fields(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/chat/completions", json=CHAT | {"reasoning_effort": "low", "efort": 1})
    expected = f"ignored unknown fields: `efort`; no effect of `reasoning_effort`: {MODEL} does not reason"
    assert answer.headers[HEADER] == expected


async def test_ollama_refuses(client: httpx.AsyncClient) -> None:
    """As Ollama does, whose clients look for these words."""
    for path, body in (("chat", {"messages": CHAT["messages"]}), ("generate", {"prompt": "Hi"})):
        for stream in (False, True):
            asked = {"model": "bytes", "stream": stream} | body
            for think in (True, "high"):
                answer = await client.post(f"/api/{path}", json=asked | {"think": think})
                assert answer.status_code == 400, answer.text
                assert answer.json() == {"error": '"bytes" does not support thinking: leave `think` out'}
            assert (await client.post(f"/api/{path}", json=asked | {"think": False})).status_code == 200
    shown = await client.post("/api/show", json={"model": "bytes"})
    assert "thinking" not in shown.json()["capabilities"]
