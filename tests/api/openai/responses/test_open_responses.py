"""The Open Responses specification: every object has every required field, whichever way a response was made."""

from typing import Any

import httpx
import jsonschema_rs
import pytest

from emberline.api.batch_loader import BatchService
from emberline.protocol.errors import Unavailable
from emberline.protocol.events import Started, TextDelta
from emberline.protocol.request import GenerateRequest
from tests.api.batch_fixtures import run_all
from tests.api.fake_service import AGENT, MODEL, USAGE, FakeService, client_of, says
from tests.api.openai.responses import open_responses
from tests.api.openai.responses.test_background import made, streamed
from tests.api.openai.responses.test_endpoints import ASK, WEATHER, ask, events_of, saying

RESULTS = [{"type": "function_call_output", "call_id": f"call_{name}", "output": "sun"} for name in "ab"]
OPTIONS = {
    "tools": [WEATHER | {"strict": None, "description": None}],
    "tool_choice": {"type": "function", "name": "weather"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
    "metadata": {"a": "b"},
}


def check(schema: open_responses.Schema, found: Any) -> None:
    problems = [f"{error.instance_path}: {error.message[:200]}" for error in jsonschema_rs.iter_errors(schema, found)]
    assert problems == [], found


def check_events(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Check every event. Returns the response of the last one."""
    for event in events:
        check(open_responses.EVENTS[event["type"]], event)
    response: dict[str, Any] = events[-1]["response"]
    return response


@pytest.mark.parametrize("options", [{}, OPTIONS, {"reasoning": {"effort": "none"}, "temperature": 0, "top_p": 1}])
async def test_responses_and_events(client: httpx.AsyncClient, service: FakeService, options: dict[str, Any]) -> None:
    service.script = says(*AGENT)
    first = await ask(client, ASK | options)
    check(open_responses.RESPONSE, first)
    check(open_responses.RESPONSE, (await client.get(f"/v1/responses/{first['id']}")).json())
    body = {"model": MODEL, "previous_response_id": first["id"], "input": RESULTS} | options
    second = check_events(await events_of(client, body))
    assert second["previous_response_id"] == first["id"]
    service.script = says(*AGENT[2:4], AGENT[-1])
    compacted = await client.post("/v1/responses/compact", json=ASK | {"previous_response_id": second["id"]})
    check(open_responses.COMPACTED, compacted.json())


async def test_what_the_request_leaves_out(client: httpx.AsyncClient) -> None:
    """The defaults of the model, else OpenAI's."""
    names = ("temperature", "top_p", "frequency_penalty", "presence_penalty")
    for model, expected in ((MODEL, 0.2), ("@hf/acme/tiny", 1)):
        for body in ({}, dict.fromkeys(names)):
            found = await ask(client, {"model": model, "input": "Hi"} | body)
            assert [found[name] for name in names] == [expected, 1, 0, 0]


async def test_failed_streams(client: httpx.AsyncClient, service: FakeService) -> None:
    async def broken(request: GenerateRequest) -> Any:
        yield Started(USAGE)
        yield TextDelta(0, "Hel")
        raise Unavailable("the engine was lost")

    service.script = broken
    assert check_events(await events_of(client, ASK))["status"] == "failed"
    service.script = saying(TextDelta(0, "Hel"), finish="length")
    assert check_events(await events_of(client, ASK))["status"] == "incomplete"


async def test_background_responses(service: FakeService, batches: BatchService) -> None:
    service.script = says(*AGENT)
    async with client_of(service, batches=batches) as client:
        queued = await made(client)
        check(open_responses.RESPONSE, queued)
        await run_all(batches.queue, service)
        final = check_events(await streamed(client, queued["id"]))
        assert (final["status"], final["temperature"], final["top_p"]) == ("completed", 0.2, 1)
        assert (await client.get(f"/v1/responses/{queued['id']}")).json() == final
        continued = await ask(client, ASK | {"previous_response_id": final["id"], "tools": [], "input": RESULTS})
        check(open_responses.RESPONSE, continued)
