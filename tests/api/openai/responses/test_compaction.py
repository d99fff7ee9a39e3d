"""Compaction: the items that replace a conversation, and the responses that continue from them."""

from typing import Any

import httpx
import pytest

from emberline.protocol.events import ReasoningDelta, TextDelta
from emberline.protocol.request import Message, Reasoning, ToolChoice
from tests.api.fake_service import MODEL, FakeService
from tests.api.openai.responses.test_endpoints import ASK, WEATHER, ask, saying

TALK: list[dict[str, Any]] = [
    {"type": "message", "role": "developer", "content": "Be brief."},
    {"type": "message", "role": "user", "content": "What is the weather in Oslo?"},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "A tool knows."}]},
    {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city":"Oslo"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "rain"},
    {"type": "message", "role": "assistant", "content": "Rain."},
    {"type": "message", "role": "user", "content": "Thanks."},
]
SUMMARY = "It rains in Oslo."


async def compact(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    answer = await client.post("/v1/responses/compact", json={"model": MODEL} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_what_models_did_becomes_one_item(client: httpx.AsyncClient, service: FakeService) -> None:
    service.script = saying(ReasoningDelta(0, "Hm."), TextDelta(0, f"\n{SUMMARY}"))
    found = await compact(client, {"input": TALK, "tools": [WEATHER], "prompt_cache_key": "k", "instructions": "Hi"})
    (request,) = service.requests
    assert found["id"] == "resp_" + request.id.replace("-", "")
    assert found["object"] == "response.compaction"
    assert (found["usage"]["input_tokens"], found["usage"]["total_tokens"]) == (12, 15)
    *kept, summary = found["output"]
    assert [(item["role"], item["content"][0]["text"]) for item in kept] == [
        ("developer", "Be brief."),
        ("user", "What is the weather in Oslo?"),
        ("user", "Thanks."),
    ]
    assert summary.keys() == {"type", "id", "encrypted_content"}
    assert summary["type"] == "compaction"
    # The model summarizes as the conversation's next turn: its prefix is cached.
    assert request.messages is not None
    assert [message.role for message in request.messages] == [
        *("system", "developer", "user", "assistant", "tool", "assistant", "user", "user")
    ]
    assert (request.session, request.tool_choice, request.reasoning) == ("k", ToolChoice("none"), Reasoning(False))
    assert [tool.name for tool in request.tools] == ["weather"]


async def test_continuing_from_a_compaction(client: httpx.AsyncClient, service: FakeService) -> None:
    service.script = saying(TextDelta(0, SUMMARY))
    output = (await compact(client, {"input": TALK}))["output"]
    first = await ask(client, {"model": MODEL, "input": [*output, {"role": "user", "content": "And now?"}]})
    expected = (
        Message("developer", "Be brief."),
        Message("user", "What is the weather in Oslo?"),
        Message("user", "Thanks."),
        Message("assistant", f"Summary of our conversation so far:\n\n{SUMMARY}"),
        Message("user", "And now?"),
    )
    assert service.requests[-1].messages == expected
    # A stored response keeps the item; so does a compaction of what continues it, in its own summary alone.
    await ask(client, ASK | {"previous_response_id": first["id"]})
    assert service.requests[-1].messages == (*expected, Message("assistant", SUMMARY), Message("user", "Hi"))
    listed = await client.get(f"/v1/responses/{first['id']}/input_items", params={"order": "asc"})
    assert [item["type"] for item in listed.json()["data"]].count("compaction") == 1
    again = await compact(client, {"previous_response_id": first["id"], "input": "Go on"})
    assert [item["type"] for item in again["output"]] == ["message"] * 5 + ["compaction"]


async def test_bad_compactions(client: httpx.AsyncClient, service: FakeService) -> None:
    foreign = {"type": "compaction", "encrypted_content": "gAAAA"}
    for path, change, param, words in (
        ("/compact", {"model": None}, "model", "model"),
        ("/compact", {"input": []}, "input", "empty"),
        ("/compact", {"stream": True}, "stream", "at once"),
        ("/compact", {"background": True}, "background", "at once"),
        ("/compact", {"previous_response_id": "resp_1"}, "previous_response_id", "no response"),
        ("", {"input": [foreign]}, "input[0]", "another server"),
    ):
        answer = await client.post(f"/v1/responses{path}", json=ASK | change)
        assert 400 <= answer.status_code < 405, change
        assert answer.json()["error"]["param"] == param
        assert words in answer.json()["error"]["message"]
    service.script = saying(ReasoningDelta(0, "Hm."))
    answer = await client.post("/v1/responses/compact", json=ASK)
    assert (answer.status_code, "no summary" in answer.text) == (500, True)
    without_model = await client.post("/v1/responses/compact", json={"input": "Hi"})
    assert without_model.status_code == 400


@pytest.mark.parametrize("phase", ["commentary", "final_answer"])
async def test_phases_are_kept(client: httpx.AsyncClient, phase: str) -> None:
    said = {"type": "message", "role": "assistant", "phase": phase, "content": "One."}
    found = await ask(client, {"model": MODEL, "input": [said, {"role": "user", "content": "Hi"}]})
    listed = (await client.get(f"/v1/responses/{found['id']}/input_items", params={"order": "asc"})).json()["data"]
    assert [item.get("phase") for item in listed] == [phase, None]
    assert "phase" not in listed[1]
