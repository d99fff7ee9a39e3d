"""Requests as the Open Responses compliance suite sends them, by behaviour: each reply has its objects and items."""

from typing import Any

import httpx
import pytest

from tests.api.fake_service import MODEL, FakeService, agent
from tests.api.openai.responses import open_responses
from tests.api.openai.responses.test_endpoints import ask, events_of
from tests.api.openai.responses.test_open_responses import check, check_events

Json = dict[str, Any]
WEATHER: Json = {
    "type": "function",
    "name": "weather",
    "description": "Weather of a town",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
}


def message(role: str, text: str) -> Json:
    return {"type": "message", "role": role, "content": text}


QUESTION = message("user", "Which town is warmer?")
REQUESTS: dict[str, Json] = {
    "basic": {"input": [QUESTION]},
    "system prompt": {"input": [message("system", "Answer in verse."), QUESTION]},
    "tool call": {"input": [QUESTION], "tools": [WEATHER]},
    "several turns": {"input": [message("user", "I am Ada."), message("assistant", "Hello Ada."), QUESTION]},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", REQUESTS)
async def test_requests(client: httpx.AsyncClient, service: FakeService, name: str, stream: bool) -> None:
    if "tools" in REQUESTS[name]:
        service.script = agent
    body = {"model": MODEL} | REQUESTS[name]
    events = await events_of(client, body) if stream else []
    response = check_events(events) if stream else await ask(client, body)
    check(open_responses.RESPONSE, response)
    assert response["status"] == "completed"
    kinds = [item["type"] for item in response["output"]]
    assert ("function_call" in kinds) == ("tools" in REQUESTS[name])
    if stream and "tools" in REQUESTS[name]:
        added = [event["item"]["type"] for event in events if event["type"] == "response.output_item.added"]
        assert "function_call" in added
        names = {event["type"] for event in events}
        assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= names


async def test_turns_by_previous_response_id(client: httpx.AsyncClient, service: FakeService) -> None:
    """A word that is remembered, and a function call with its result."""
    first = await ask(client, {"model": MODEL, "input": "Remember: papaya."})
    second = await ask(client, {"model": MODEL, "input": "Which word?", "previous_response_id": first["id"]})
    assert (second["status"], second["previous_response_id"]) == ("completed", first["id"])
    assert [each.content for each in service.requests[-1].messages or ()][:1] == ["Remember: papaya."]
    hello, service.script = service.script, agent
    choice = {"type": "function", "name": "weather"}
    call = await ask(client, {"model": MODEL, "input": [QUESTION], "tools": [WEATHER], "tool_choice": choice})
    call_ids = [item["call_id"] for item in call["output"] if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": each, "output": "64 degrees"} for each in call_ids]
    service.script = hello
    done = await ask(client, {"model": MODEL, "previous_response_id": call["id"], "input": results})
    check(open_responses.RESPONSE, done)
    assert done["status"] == "completed"
