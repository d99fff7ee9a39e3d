"""OpenAI's Responses API: responses, streams and errors."""

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.api.openai.responses.items import seal
from emberline.protocol.errors import Overloaded, Unavailable
from emberline.protocol.events import (
    ChoiceDone,
    Completed,
    ReasoningDelta,
    Started,
    TextDelta,
    TextEvent,
    TextLogprob,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)
from emberline.protocol.request import (
    MODEL_DEFAULTS,
    GenerateRequest,
    Message,
    OutputFormat,
    Priority,
    Reasoning,
    SamplingParams,
    Tool,
    ToolCall,
    ToolChoice,
)
from tests.api.fake_service import MODEL, USAGE, FakeService, Script, client_of
from tests.examples import n_examples

ASK = {"model": MODEL, "input": "Hi"}
CF = "/client/v4/accounts/acme/ai"
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
REPLIED = {"type": "output_text", "text": "Here."}
REMOTE_IMAGE = {"type": "input_image", "image_url": "https://example.org/a.png"}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edit", "format": {"type": "text"}}


def saying(*events: TextEvent, finish: str = "stop", usage: Usage = USAGE) -> Script:
    async def script(request: GenerateRequest) -> AsyncIterator[TextEvent]:
        yield Started(usage)
        for event in events:
            yield event
        yield ChoiceDone(0, finish)  # type: ignore[arg-type]
        yield Completed(usage)

    return script


def calling(name: str, *pieces: str, call: int = 0, call_id: str = "call_1") -> list[TextEvent]:
    return [ToolCallStarted(0, call, call_id, name), *(ToolCallDelta(0, call, piece) for piece in pieces)]


def told(text: str) -> list[dict[str, Any]]:
    """The events of a stream, whose names and sequence numbers are checked."""
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def normal(response: dict[str, Any]) -> dict[str, Any]:
    text = re.sub(r"[0-9a-f]{32}", "KEY", json.dumps(response))
    return json.loads(text) | {"created_at": 0, "completed_at": 0}


async def ask(client: httpx.AsyncClient, body: dict[str, Any], base: str = "/v1") -> dict[str, Any]:
    answer = await client.post(f"{base}/responses", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def events_of(client: httpx.AsyncClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await client.post("/v1/responses", json=body | {"stream": True})
    assert answer.headers["content-type"] == "text/event-stream", answer.text
    return told(answer.text)


# --- the answer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", ["/v1", f"{CF}/v1"])
async def test_the_answer(client: httpx.AsyncClient, service: FakeService, base: str) -> None:
    answer = await client.post(f"{base}/responses", json=ASK)
    assert answer.headers["x-request-id"] == service.requests[0].id
    found = answer.json()
    assert found["id"] == "resp_" + service.requests[0].id.replace("-", "")
    assert 0 <= found["completed_at"] - found["created_at"] <= 5
    assert normal(found) == {
        "id": "resp_KEY",
        "object": "response",
        "created_at": 0,
        "status": "completed",
        "background": False,
        "completed_at": 0,
        "error": None,
        "frequency_penalty": 0,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "model": MODEL,
        "output": [
            {
                "id": "msg_KEY_o0",
                "type": "message",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "annotations": [], "logprobs": [], "text": "Hello!"}],
            }
        ],
        "parallel_tool_calls": True,
        "presence_penalty": 0,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "prompt_cache_retention": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": True,
        "temperature": 0.2,  # the model's own
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1,
        "truncation": "disabled",
        "usage": {
            "input_tokens": 12,
            "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 0},
            "output_tokens": 3,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 15,
        },
        "user": None,
        "metadata": {},
    }
    assert service.requests[0] == GenerateRequest(
        api="responses",
        id=service.requests[0].id,
        model=MODEL,
        messages=(Message("user", "Hi"),),
        session=found["id"],
        left_to_model=MODEL_DEFAULTS,
    )


async def test_the_stream_of_a_text(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/responses", json=ASK | {"stream": True})
    events = told(answer.text)
    opening = events[0]["response"]
    assert (opening["status"], opening["output"], opening["usage"]) == ("in_progress", [], None)
    item = f"msg_{opening['id'][5:]}_o0"
    part = {"type": "output_text", "annotations": [], "logprobs": [], "text": "Hello!"}
    done = {"id": item, "type": "message", "status": "completed", "role": "assistant", "content": [part]}
    place = {"item_id": item, "output_index": 0, "content_index": 0}
    assert [{k: v for k, v in event.items() if k != "sequence_number"} for event in events] == [
        {"type": "response.created", "response": opening},
        {"type": "response.in_progress", "response": opening},
        {
            "type": "response.output_item.added",
            "output_index": 0,
            "item": done | {"status": "in_progress", "content": []},
        },
        {"type": "response.content_part.added", **place, "part": part | {"text": ""}},
        {"type": "response.output_text.delta", **place, "delta": "Hel", "logprobs": []},
        {"type": "response.output_text.delta", **place, "delta": "lo", "logprobs": []},
        {"type": "response.output_text.delta", **place, "delta": "!", "logprobs": []},
        {"type": "response.output_text.done", **place, "text": "Hello!", "logprobs": []},
        {"type": "response.content_part.done", **place, "part": part},
        {"type": "response.output_item.done", "output_index": 0, "item": done},
        {"type": "response.completed", "response": events[-1]["response"]},
    ]
    assert events[-1]["response"]["output"] == [done]


async def test_calls_and_reasoning(client: httpx.AsyncClient, service: FakeService) -> None:
    service.script = saying(
        ReasoningDelta(0, "I need "),
        ReasoningDelta(0, "the weather."),
        TextDelta(0, "Looking."),
        *calling("weather", '{"city"', ':"Rome"}'),
        *calling("apply_patch", '{"inp', 'ut":"a\\', 'n\\u00e9"}', call=1, call_id="call_2"),
        finish="tool_calls",
    )
    events = await events_of(client, ASK | {"tools": [WEATHER, PATCH]})
    final = events[-1]["response"]
    assert [normal(item) | {"created_at": 0} for item in final["output"]] == [
        normal(item)
        for item in (
            {
                "id": "rs_KEY_o0",
                "type": "reasoning",
                "status": "completed",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "I need the weather."}],
            },
            {
                "id": "msg_KEY_o1",
                "type": "message",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "annotations": [], "logprobs": [], "text": "Looking."}],
            },
            {
                "id": "fc_KEY_o2",
                "type": "function_call",
                "status": "completed",
                "call_id": "call_1",
                "name": "weather",
                "arguments": '{"city":"Rome"}',
            },
            {
                "id": "ctc_KEY_o3",
                "type": "custom_tool_call",
                "status": "completed",
                "call_id": "call_2",
                "name": "apply_patch",
                "input": "a\né",
            },
        )
    ]
    assert [event["type"].removeprefix("response.") for event in events[2:-1]] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]
    whole = await ask(client, ASK | {"tools": [WEATHER, PATCH]})
    assert normal(whole) == normal(final)


async def test_reasoning_as_summary_or_content(client: httpx.AsyncClient, service: FakeService) -> None:
    service.script = saying(ReasoningDelta(0, "Hm"), ReasoningDelta(0, "m."), TextDelta(0, "Yes"))
    events = await events_of(
        client, ASK | {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}
    )
    assert [event["type"].removeprefix("response.") for event in events[3:9]] == [
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ]
    item = events[8]["item"]
    assert item["summary"] == [{"type": "summary_text", "text": "Hmm."}]
    assert "content" not in item
    assert item["encrypted_content"] == seal("Hmm.")
    assert events[2]["item"]["encrypted_content"] == ""
    back = {"input": [{"role": "user", "content": "Hi"}, {**item, "summary": []}, {"role": "user", "content": "?"}]}
    await ask(client, ASK | back)
    assert service.requests[-1].messages[1] == Message("assistant", "", reasoning="Hmm.")


async def test_a_namespace(client: httpx.AsyncClient, service: FakeService) -> None:
    service.script = saying(*calling("team__close", "{}"), finish="tool_calls")
    space = {"type": "namespace", "name": "team", "description": "", "tools": [{"type": "function", "name": "close"}]}
    found = await ask(client, ASK | {"tools": [space]})
    assert [tool.name for tool in service.requests[0].tools] == ["team__close"]
    item = found["output"][0]
    assert (item["name"], item["namespace"]) == ("close", "team")
    output = {"type": "function_call_output", "call_id": "call_1", "output": "done"}
    await ask(client, ASK | {"tools": [space], "input": [output], "previous_response_id": found["id"]})
    assert service.requests[1].messages[1].tool_calls == (ToolCall("call_1", "team__close", "{}"),)


async def test_truncated(client: httpx.AsyncClient, service: FakeService) -> None:
    service.script = saying(*calling("weather", '{"city":"Ro'), finish="length")
    events = await events_of(client, ASK | {"tools": [WEATHER], "max_output_tokens": 5})
    assert events[-1]["type"] == "response.incomplete"
    final = events[-1]["response"]
    assert (final["status"], final["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert final["output"][0]["status"] == "incomplete"
    assert final["completed_at"] is None


@pytest.mark.parametrize("events", [(), (ReasoningDelta(0, "Nothing to say."),)])
async def test_an_empty_answer_is_an_empty_message(
    client: httpx.AsyncClient, service: FakeService, events: tuple[TextEvent, ...]
) -> None:
    service.script = saying(*events)
    found = await ask(client, ASK)
    assert [item["type"] for item in found["output"]] == ["reasoning"] * len(events) + ["message"]
    assert found["output"][-1]["content"][0]["text"] == ""


async def test_logprobs(client: httpx.AsyncClient, service: FakeService) -> None:
    token = TextLogprob("Hi", -0.5, [72, 105], [TextLogprob("Hi", -0.5, [72, 105])])
    service.script = saying(TextDelta(0, "Hi", [token]))
    events = await events_of(client, ASK | {"top_logprobs": 1, "include": ["message.output_text.logprobs"]})
    one = {"token": "Hi", "logprob": -0.5, "bytes": [72, 105]}
    assert events[4]["logprobs"] == [one | {"top_logprobs": [one]}]
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == [one | {"top_logprobs": [one]}]
    assert service.requests[0].sampling.logprobs == 1


async def test_padding(client: httpx.AsyncClient) -> None:
    events = await events_of(client, ASK | {"stream_options": {"include_obfuscation": True}})
    padded = [event for event in events if "obfuscation" in event]
    assert [event["type"] for event in padded] == ["response.output_text.delta"] * 3
    paddings = [event["obfuscation"] for event in padded]
    for _ in range(4):
        events = await events_of(client, ASK | {"stream_options": {"include_obfuscation": True}})
        paddings += [event["obfuscation"] for event in events if "obfuscation" in event]
    assert len({len(padding) for padding in paddings}) > 3, "the lengths hide those of the tokens"
    assert not any("obfuscation" in event for event in await events_of(client, ASK))


async def test_a_stream_that_breaks(client: httpx.AsyncClient, service: FakeService) -> None:
    async def breaks(request: GenerateRequest) -> AsyncIterator[TextEvent]:
        yield Started(USAGE)
        yield TextDelta(0, "Hel")
        raise Unavailable("the engine went away")

    service.script = breaks
    events = await events_of(client, ASK)
    error, failed = events[-2:]
    assert (error["type"], error["code"], error["message"]) == ("error", "unavailable", "the engine went away")
    assert error["error"]["message"] == "the engine went away"
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "the engine went away"}
    assert failed["response"]["output"][0]["status"] == "incomplete"
    gone = await client.get(f"/v1/responses/{failed['response']['id']}")
    assert gone.status_code == 404
    assert service.open == 0


async def test_refused_before_the_stream(client: httpx.AsyncClient, service: FakeService) -> None:
    async def full(request: GenerateRequest) -> AsyncIterator[TextEvent]:
        raise Overloaded("full", retry_after_s=2, param="messages")
        yield

    service.script = full
    answer = await client.post("/v1/responses", json=ASK | {"stream": True})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
    assert answer.json()["error"]["param"] == "input"


PIECES = st.lists(
    st.one_of(
        st.text(max_size=3).map(lambda text: [TextDelta(0, text)]),
        st.text(max_size=3).map(lambda text: [ReasoningDelta(0, text)]),
        st.text(max_size=3).map(lambda text: calling("weather", '{"city":', json.dumps(text), "}")),
        st.text(max_size=3).map(lambda text: calling("apply_patch", '{"input":', json.dumps(text), "}")),
    ),
    max_size=6,
)


@given(PIECES, st.sampled_from(["stop", "length", "tool_calls"]), st.booleans(), st.booleans())
@settings(max_examples=n_examples(60), deadline=None)
async def test_stream_and_whole_response_agree(
    groups: list[list[TextEvent]], finish: str, summary: bool, sealed: bool
) -> None:
    service = FakeService(saying(*(event for group in groups for event in group), finish=finish))
    body = ASK | {"tools": [WEATHER, PATCH], "reasoning": {"summary": "auto" if summary else None}}
    body["include"] = ["reasoning.encrypted_content"] if sealed else []
    async with client_of(service) as client:
        events = await events_of(client, body)
        whole = await ask(client, body)
        final = events[-1]["response"]
        assert normal(whole) == normal(final)
        assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == final["output"]
        for event in events:
            if event["type"].endswith((".delta", "text.done", "arguments.done", "input.done")):
                assert event["item_id"] == final["output"][event["output_index"]]["id"]
        for item in final["output"]:
            grown = "".join(e["delta"] for e in events if e["type"].endswith(".delta") and e["item_id"] == item["id"])
            assert grown == text_of(item)
        stored = await client.get(f"/v1/responses/{final['id']}")
        assert stored.json() == final


def text_of(item: dict[str, Any]) -> str:
    parts = item.get("content") or item.get("summary") or []
    return "".join(part["text"] for part in parts) + item.get("arguments", "") + item.get("input", "")


# --- the request ------------------------------------------------------------------------------------------------------


async def test_canonical_request(client: httpx.AsyncClient, service: FakeService) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "out", "schema": schema, "strict": True}
    allowed = [{"type": "function", "name": "weather"}]
    found = await ask(
        client,
        {
            "model": MODEL,
            "instructions": "Be brief.",
            "input": [
                {"role": "developer", "content": [{"type": "input_text", "text": "One."}]},
                {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
                {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
                {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
                {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": 'x"'},
                {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "sun"}]},
                {"type": "custom_tool_call_output", "call_id": "c2", "output": "ok"},
                {"role": "assistant", "content": "Sunny."},
                {"role": "assistant", "content": "And warm."},
            ],
            "tools": [WEATHER, PATCH, {"type": "web_search", "external_web_access": True}],
            "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": allowed},
            "parallel_tool_calls": False,
            "text": {"format": form, "verbosity": "low"},
            "reasoning": {"effort": "low"},
            "max_output_tokens": 7, "temperature": 0, "top_p": 0.5, "truncation": "auto", "store": False,
            "metadata": {"a": "b"}, "user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "max_tool_calls": 3,
            "include": ["reasoning.encrypted_content"], "service_tier": "flex", "client_metadata": {"x": "y"},
        },
    )  # fmt: skip
    request = service.requests[0]
    assert request == GenerateRequest(
        api="responses",
        id=request.id,
        model=MODEL,
        messages=(
            Message("system", "Be brief."),
            Message("developer", "One."),
            Message("user", "a\nb"),
            Message(
                "assistant",
                "Let me see.",
                tool_calls=(ToolCall("c1", "weather", "{}"), ToolCall("c2", "apply_patch", '{"input":"x\\""}')),
                reasoning="Hm.",
            ),
            Message("tool", "sun", tool_call_id="c1"),
            Message("tool", "ok", tool_call_id="c2"),
            Message("assistant", "Sunny."),
            Message("assistant", "And warm."),
        ),
        sampling=SamplingParams(max_tokens=7, temperature=0.0, top_p=0.5),
        left_to_model=("top_k", "min_p", "repetition_penalty"),
        session="k",
        priority=Priority.FLEX,
        reject_if_busy=True,
        tools=(Tool("weather", "Of a city", WEATHER["parameters"], True),),
        tool_choice=ToolChoice("required"),
        parallel_tool_calls=False,
        output=OutputFormat("json_schema", schema),
        reasoning=Reasoning(effort="low"),
    )
    assert found["text"] == {"format": form | {"description": None}, "verbosity": "low"}
    assert found["tool_choice"]["tools"] == allowed
    assert found["tools"] == [WEATHER, PATCH]  # there is no search here, and the answer says so
    assert (found["store"], found["service_tier"], found["metadata"]) == (False, "flex", {"a": "b"})
    assert (await client.get(f"/v1/responses/{found['id']}")).status_code == 404


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", ToolChoice()),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "name": "weather"}, ToolChoice("required", "weather")),
        ({"type": "custom", "name": "apply_patch"}, ToolChoice("required", "apply_patch")),
    ],
)
async def test_tool_choice(client: httpx.AsyncClient, service: FakeService, choice: Any, expected: Any) -> None:
    found = await ask(client, ASK | {"tools": [WEATHER, PATCH], "tool_choice": choice})
    assert service.requests[0].tool_choice == expected
    assert found["tool_choice"] == choice
    assert found["tools"] == [WEATHER, PATCH]


async def test_custom_tools_as_functions(client: httpx.AsyncClient, service: FakeService) -> None:
    lark = PATCH | {"format": {"type": "grammar", "syntax": "lark", "definition": "start: /x+/"}}
    regex = PATCH | {"name": "xs", "format": {"type": "grammar", "syntax": "regex", "definition": "x|y"}}
    await ask(client, ASK | {"tools": [lark, regex]})
    patch, xs = service.requests[0].tools
    assert patch.description.startswith("Edit")
    assert "start: /x+/" in patch.description
    assert patch.parameters["required"] == ["input"]
    assert xs.parameters["properties"]["input"]["pattern"] == "^(?:x|y)$"


async def test_effort_none_disables_reasoning(client: httpx.AsyncClient, service: FakeService) -> None:
    await ask(client, ASK | {"reasoning": {"effort": "none"}})
    assert service.requests[0].reasoning == Reasoning(enabled=False, effort="none")


async def test_sampling_fields_of_chats(client: httpx.AsyncClient, service: FakeService) -> None:
    fields = {"frequency_penalty": 0.5, "presence_penalty": -0.5, "temperature": 0.7, "top_p": 0.9}
    more = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 7, "stop": ["END"]}
    found = await ask(client, ASK | fields | more | {"chat_template_kwargs": {"enable_thinking": False}})
    (request,) = service.requests
    assert request.sampling == SamplingParams(**{**fields, **more, "stop": ("END",)})  # type: ignore[arg-type]
    assert request.left_to_model == ()
    assert (request.reasoning, request.template_kwargs) == (Reasoning(enabled=False), {"enable_thinking": False})
    assert {name: found[name] for name in fields} == fields


async def test_hosted_tools_when_none_may_be_called(client: httpx.AsyncClient, service: FakeService) -> None:
    await ask(client, ASK | {"tools": [WEATHER, {"type": "file_search"}], "tool_choice": "none"})
    assert [tool.name for tool in service.requests[0].tools] == ["weather"]


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"input": []}, "input", "empty"),
        ({"input": None}, "input", "empty"),
        ({"input": [{"role": "user"}, {"role": "robot", "content": ""}]}, "input[1].role", "robot"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            "input[0].content[0].type",
            "input_file",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
            "file_id",
        ),
        (
            {"input": [{"role": "assistant", "content": [REPLIED, REMOTE_IMAGE]}, {"role": "user", "content": "?"}]},
            "input[0].content[1]",
            "not of the assistant",
        ),
        (
            {"input": [{"role": "assistant", "content": [REPLIED, {"type": "input_file", "file_id": "f"}]}]},
            "input[0].content[1].type",
            "input_file",
        ),
        ({"input": [{"role": "assistant", "content": [{"type": "input_audio"}]}]}, "input[0].content[0].type", "audio"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type", "web_search_call"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "input[0].arguments", "missing"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": ""}]}, "input[0]", "answers no call"),
        ({"input": [{"type": "reasoning", "encrypted_content": "ember1.é"}]}, "input", "altered"),
        ({"tools": [{"type": "file_search"}]}, "tools[0].type", "file_search"),
        ({"tools": [{"type": "mcp"}]}, "tools[0].type", "mcp"),
        ({"tools": [{"type": "local_shell"}]}, "tools[0].type", "local_shell"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "name"),
        ({"tools": [{"type": "custom", "name": "no spaces"}]}, "tools[0]", "name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name", "two tools"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "x"),
        ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice.type", "web_search"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "schema"),
        ({"conversation": "conv_1"}, "conversation", "conversation"),
        ({"prompt": {"id": "p"}}, "prompt", "prompt"),
        ({"temperature": 3}, "temperature", "2"),
        ({"max_output_tokens": 0}, "max_output_tokens", "1"),
        ({"reasoning": {"effort": "extreme"}}, "reasoning.effort", "extreme"),
        ({"metadata": {"a": 1}}, "metadata[...]", "str"),
        ({"include": ["bogus"]}, "include[0]", "bogus"),
        ({"frequency_penalty": 3}, "frequency_penalty", "2"),
        ({"stop": [""]}, "stop[0]", "1"),
        ({"max_completion_tokens": 5}, "max_completion_tokens", "max_output_tokens"),
        ({"n": 2}, "n", "not supported"),
        ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs", "x"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_input(
    client: httpx.AsyncClient, service: FakeService, change: dict, param: str, words: str, stream: bool
) -> None:
    answer = await client.post("/v1/responses", json=ASK | {"stream": stream} | change)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert service.requests == []


async def test_input_tokens(client: httpx.AsyncClient, service: FakeService) -> None:
    answer = await client.post("/v1/responses/input_tokens", json=ASK | {"instructions": "Be kind."})
    assert answer.json() == {"object": "response.input_tokens", "input_tokens": 3}
