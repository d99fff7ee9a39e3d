"""Reasoning fields of every API, and reasoning that the client wants hidden."""

import httpx
import pytest

from emberline.protocol.request import Reasoning
from tests.api.fake_service import MODEL, FakeService, agent

RUN = f"/client/v4/accounts/acme/ai/run/{MODEL}"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize("path", ["/v1/chat/completions", RUN])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, Reasoning()),
        ({"reasoning_effort": None}, Reasoning()),
        ({"reasoning_effort": "high"}, Reasoning(effort="high")),
        ({"reasoning_effort": "none"}, Reasoning(enabled=False, effort="none")),
        ({"chat_template_kwargs": {"enable_thinking": False}}, Reasoning(enabled=False)),
        ({"chat_template_kwargs": {"thinking": True}}, Reasoning(enabled=True)),
        ({"thinking": True}, Reasoning(enabled=True)),
        ({"thinking": {"type": "disabled"}}, Reasoning(enabled=False)),
        ({"thinking": {"type": "enabled", "budget_tokens": 64}}, Reasoning(enabled=True, budget_tokens=64)),
        ({"thinking_token_budget": 0}, Reasoning(budget_tokens=0)),
        ({"reasoning": {"effort": "low", "max_tokens": 9}}, Reasoning(effort="low", budget_tokens=9)),
        ({"reasoning": {"enabled": False}, "thinking": True}, Reasoning(enabled=False)),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "max"}, Reasoning(effort="max")),
    ],
)
async def test_reasoning_fields(
    client: httpx.AsyncClient, service: FakeService, path: str, fields: dict, expected: Reasoning
) -> None:
    answer = await client.post(path, json=CHAT | fields)
    assert answer.status_code == 200, answer.text
    assert service.requests[0].reasoning == expected
    assert service.requests[0].template_kwargs == fields.get("chat_template_kwargs", {})


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, Reasoning()),
        ({"thinking": {"type": "disabled"}}, Reasoning(enabled=False)),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, Reasoning(enabled=True, budget_tokens=2000)),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, Reasoning(enabled=True, effort="max")),
        ({"output_config": {"effort": "low"}}, Reasoning(effort="low")),
    ],
)
async def test_anthropic_thinking(
    client: httpx.AsyncClient, service: FakeService, path: str, fields: dict, expected: Reasoning
) -> None:
    answer = await client.post(path, json=CHAT | fields)
    assert answer.status_code == 200, answer.text
    assert service.requests[0].reasoning == expected


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"include_reasoning": False}),
        ("/v1/chat/completions", {"reasoning": {"exclude": True}}),
        (RUN, {"include_reasoning": False}),
        ("/v1/messages", {"thinking": {"type": "adaptive", "display": "omitted"}}),
    ],
)
async def test_hidden_reasoning(
    client: httpx.AsyncClient, service: FakeService, path: str, fields: dict, stream: bool
) -> None:
    service.script = agent
    shown = await client.post(path, json=CHAT | {"stream": stream})
    assert "towns." in shown.text
    hidden = await client.post(path, json=CHAT | fields | {"stream": stream})
    assert hidden.status_code == 200
    assert "towns." not in hidden.text
    assert "look." in hidden.text


BEGUN = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]}


@pytest.mark.parametrize("path", ["/v1/chat/completions", RUN])
async def test_continuing_the_last_message(client: httpx.AsyncClient, service: FakeService, path: str) -> None:
    for fields in ({}, {"add_generation_prompt": False}):
        answer = await client.post(path, json=CHAT | BEGUN | fields | {"continue_final_message": True})
        assert answer.status_code == 200, answer.text
        assert service.requests[-1].continue_final
    for fields in ({}, {"add_generation_prompt": True}, {"continue_final_message": False}):
        await client.post(path, json=CHAT | BEGUN | fields)
        assert not service.requests[-1].continue_final
    for fields in (
        {"add_generation_prompt": False},
        {"add_generation_prompt": True, "continue_final_message": True},
    ):
        answer = await client.post(path, json=CHAT | BEGUN | fields)
        assert answer.status_code == 400
        assert "`add_generation_prompt" in answer.text
