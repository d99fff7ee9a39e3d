"""A call that is cut off before its arguments: in every API, streamed or not, an item says so."""

import json
from typing import Any

import httpx
import pytest

from emberline.protocol.events import ChoiceDone, ToolCallStarted
from tests.api.fake_service import MODEL, FakeService, says

CUT = says(ToolCallStarted(0, 0, "call_a", "weather"), ChoiceDone(0, "length"))
MESSAGES = [{"role": "user", "content": "Oslo?"}]
SCHEMA = {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}
FUNCTION = {"name": "weather", "parameters": SCHEMA}
CHAT = {"messages": MESSAGES, "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


async def test_chat_completions(client: httpx.AsyncClient, service: FakeService) -> None:
    service.script = CUT
    body = {"model": MODEL, **CHAT}
    (whole,) = (await client.post("/v1/chat/completions", json=body)).json()["choices"]
    chunks = events((await client.post("/v1/chat/completions", json=body | {"stream": True})).text)
    (call,) = whole["message"]["tool_calls"]
    assert (call["function"], whole["finish_reason"]) == ({"name": "weather", "arguments": ""}, "length")
    said = [each["function"] for chunk in chunks for each in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert said == [{"name": "weather", "arguments": ""}]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_responses(client: httpx.AsyncClient, service: FakeService) -> None:
    service.script = CUT
    body = {"model": MODEL, "input": "Oslo?", "tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"}
    whole = (await client.post("/v1/responses", json=body)).json()
    found = events((await client.post("/v1/responses", json=body | {"stream": True})).text)
    for response in (whole, found[-1]["response"]):
        (item,) = response["output"]
        assert (item["type"], item["name"], item["arguments"]) == ("function_call", "weather", "")
        assert (response["status"], item["status"]) == ("incomplete", "incomplete")
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    kinds = [event["type"] for event in found if "item" in event["type"]]
    assert kinds == ["response.output_item.added", "response.output_item.done"]


async def test_messages(client: httpx.AsyncClient, service: FakeService) -> None:
    service.script = CUT
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    body = {"model": MODEL, "messages": MESSAGES, "tools": tools, "tool_choice": {"type": "any"}, "max_tokens": 1}
    whole = (await client.post("/v1/messages", json=body)).json()
    found = events((await client.post("/v1/messages", json=body | {"stream": True})).text)
    (block,) = whole["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "weather", {})
    assert whole["stop_reason"] == "max_tokens"
    by_kind = {event["type"]: event for event in found}
    assert by_kind["content_block_start"]["content_block"]["name"] == "weather"
    assert "content_block_stop" in by_kind
    assert by_kind["message_delta"]["delta"]["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("path", ["/api/chat", f"/client/v4/accounts/a/ai/run/{MODEL}"])
async def test_other_apis(client: httpx.AsyncClient, service: FakeService, path: str) -> None:
    service.script = CUT
    body = {"model": MODEL, **CHAT, "tool_choice": "auto"} if path == "/api/chat" else CHAT
    whole = await client.post(path, json=body | {"stream": False})
    assert whole.status_code == 200, whole.text
    assert "weather" in whole.text
    streamed = await client.post(path, json=body | {"stream": True})
    assert "weather" in streamed.text
