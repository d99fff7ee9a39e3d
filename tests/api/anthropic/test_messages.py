"""The Anthropic Messages API: responses, streams and errors."""

import json
import re
from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest

from emberline.api.anthropic.message_request import SIGNATURE
from emberline.protocol.complete_response import Answer
from emberline.protocol.events import ChoiceDone, Completed, Opaque, ReasoningDelta, Started, TextDelta, TextEvent
from emberline.protocol.request import ContentPart, GenerateRequest, Message, Reasoning, SamplingParams, ToolCall
from emberline.service.event_collector import AnswerCollector, events_of
from tests.api.fake_service import MODEL, USAGE, FakeService, says

BODY = {"model": MODEL, "max_tokens": 100, "messages": [{"role": "user", "content": "Hi"}]}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
TOOL_USE = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
SCHEMA = {"type": "json_schema", "schema": {"type": "object"}}
CF = "/client/v4/accounts/acme/ai"
USAGE_JSON = '{"input_tokens":4,"cache_creation_input_tokens":0,"cache_read_input_tokens":8,"output_tokens":3}'


def normal(text: str) -> str:
    return re.sub(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "ID", text)


@pytest.mark.parametrize("path", ["/v1/messages", f"{CF}/v1/messages", f"{CF}/v1/v1/messages"])
async def test_message(client: httpx.AsyncClient, service: FakeService, path: str) -> None:
    answer = await client.post(path, json=BODY)
    assert normal(answer.text) == (
        '{"id":"msg_ID","type":"message","role":"assistant","model":"' + MODEL + '",'
        '"content":[{"type":"text","text":"Hello!"}],"stop_reason":"end_turn","stop_sequence":null,'
        '"usage":' + USAGE_JSON + "}"
    )
    assert answer.headers["request-id"] == answer.headers["x-request-id"] == service.requests[0].id
    assert service.principals[0].account == ("local" if path.startswith("/v1") else "acme")


async def test_stream(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/messages", json=BODY | {"stream": True})
    assert answer.headers["content-type"] == "text/event-stream"

    def delta(text: str) -> str:
        return (
            "event: content_block_delta\ndata: "
            '{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"' + text + '"}}\n\n'
        )

    assert normal(answer.text) == (
        'event: message_start\ndata: {"type":"message_start","message":{"id":"msg_ID","type":"message",'
        '"role":"assistant","model":"' + MODEL + '","content":[],'
        '"usage":' + USAGE_JSON.replace('tokens":3', 'tokens":1') + ',"stop_reason":null,"stop_sequence":null}}\n\n'
        "event: content_block_start\n"
        'data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}\n\n'
        'event: ping\ndata: {"type":"ping"}\n\n' + delta("Hel") + delta("lo") + delta("!") +
        'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
        'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},'
        '"usage":' + USAGE_JSON + "}\n\n"
        'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    )  # fmt: skip


@pytest.mark.parametrize(
    ("done", "reason"),
    [
        (ChoiceDone(0, "length"), ("max_tokens", None)),
        (ChoiceDone(0, "stop"), ("end_turn", None)),
        (ChoiceDone(0, "stop", "END"), ("stop_sequence", "END")),
    ],
)
async def test_stop_reasons(client: httpx.AsyncClient, service: FakeService, done: ChoiceDone, reason: tuple) -> None:
    async def script(request: GenerateRequest) -> AsyncIterator[TextEvent]:
        yield Started(USAGE)
        yield TextDelta(0, "x")
        yield done
        yield Completed(USAGE)

    service.script = script
    answer = (await client.post("/v1/messages", json=BODY)).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == reason
    streamed = (await client.post("/v1/messages", json=BODY | {"stream": True})).text
    assert (
        f'"delta":{json.dumps({"stop_reason": reason[0], "stop_sequence": reason[1]}, separators=(",", ":"))}'
        in streamed
    )


async def test_canonical_request(client: httpx.AsyncClient, service: FakeService) -> None:
    body = {
        "model": MODEL,
        "system": [
            {"type": "text", "text": "You are", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "kind."},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "Let me look."},
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": 1}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "nothing"}]},
                {"type": "text", "text": "So?"},
            ]},
        ],
        "temperature": 0.2, "top_p": 0, "top_k": 9, "stop_sequences": ["END"], "metadata": {"user_id": "ann"},
        "thinking": {"type": "disabled"}, "tool_choice": {"type": "auto"}, "tools": [], "service_tier": "auto",
    }  # fmt: skip
    answer = await client.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    assert service.requests[0] == GenerateRequest(
        api="messages",
        cache_ttl_s=300,
        id=answer.headers["x-request-id"],
        model=MODEL,
        messages=(
            Message(
                "system",
                "You are\nkind.",
                parts=(
                    ContentPart("text", "You are", marks={"cache_control": {"type": "ephemeral"}}),
                    ContentPart("text", "kind."),
                ),
            ),
            Message("user", "Hi"),
            Message(
                "assistant",
                "Let me look.",
                tool_calls=(ToolCall("t1", "look", '{"at":1}'),),
                reasoning="hm",
                marks={"thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "s"}]},
            ),
            Message("tool", "nothing", tool_call_id="t1"),
            Message("user", "So?"),
        ),
        sampling=SamplingParams(temperature=0.2, top_p=1e-6, top_k=9, stop=("END",)),
        left_to_model=("min_p", "repetition_penalty"),
        session="ann",
        reasoning=Reasoning(enabled=False),
    )


async def test_count_tokens(client: httpx.AsyncClient, service: FakeService) -> None:
    body = {"model": MODEL, "system": "Be brief.", "messages": [{"role": "user", "content": "one two three"}]}
    for path in ("/v1/messages", f"{CF}/v1/messages", f"{CF}/v1/v1/messages"):
        answer = await client.post(f"{path}/count_tokens", json=body)
        assert answer.json() == {"input_tokens": 5}


@pytest.mark.parametrize("field", ["user", "safety_identifier", "prompt_cache_key"])
async def test_count_tokens_of_a_body_whose_other_fields_are_odd(client: httpx.AsyncClient, field: str) -> None:
    """The first look at a body, for the model's name, cannot read such a number."""
    body = f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "one two"}}], "{field}": 1e999}}'
    answer = await client.post("/v1/messages/count_tokens", content=body)
    assert answer.status_code in (200, 400), answer.text


async def test_error_forms(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/messages", json=BODY | {"model": "nope"})
    assert answer.status_code == 404
    error = {"type": "not_found_error", "message": "No such model nope or task"}
    assert answer.json() == {"type": "error", "error": error, "request_id": answer.headers["x-request-id"]}
    assert answer.headers["request-id"] == answer.headers["cf-ai-req-id"] == answer.headers["x-request-id"]
    both = await client.post(f"{CF}/v1/messages", json=BODY | {"model": "nope"})
    assert both.json()["error"] == error
    assert both.json()["errors"][0]["code"] == 5007


PREFILLED = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "{"}]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_a_last_assistant_message_begins_the_reply(
    client: httpx.AsyncClient, service: FakeService, path: str
) -> None:
    answer = await client.post(path, json=BODY | {"messages": PREFILLED})
    assert answer.status_code == 200, answer.text
    assert service.requests[0].continue_final
    await client.post(path, json=BODY)
    assert not service.requests[1].continue_final


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tools": [{"name": "f"}]}, "tools[0]` needs an `input_schema"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [TOOL | {"name": "no spaces"}]}, "tools[0].name"),
        ({"tools": [TOOL | {"input_schema": []}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        ({"thinking": {"type": "sometimes"}}, "thinking"),
        ({"output_config": {"format": {"type": "xml", "schema": {}}}}, "output_config.format"),
        ({"output_config": {"format": SCHEMA}, "output_format": SCHEMA}, "output_format"),
        ({"messages": [{"role": "user", "content": [TOOL_USE]}]}, "messages[0].content[0]"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"messages": []}, "messages"),
        ({"messages": [*PREFILLED[:-1], {"role": "assistant", "content": "It "}]}, "messages[1]` begins the reply"),
        ({"messages": PREFILLED, "thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
        ({"temperature": 1.5}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
    ],
)
async def test_errors_name_the_field(client: httpx.AsyncClient, change: dict, named: str) -> None:
    answer = await client.post("/v1/messages", json=BODY | change)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert named in answer.json()["error"]["message"]


HOUR, MINUTES = {"type": "ephemeral", "ttl": "1h"}, {"type": "ephemeral"}


@pytest.mark.parametrize(
    ("change", "ttl_s"),
    [
        ({}, 0),
        ({"cache_control": MINUTES}, 300),
        ({"cache_control": HOUR}, 3600),
        ({"system": [{"type": "text", "text": "S", "cache_control": HOUR}], "cache_control": MINUTES}, 3600),
        ({"tools": [TOOL | {"cache_control": HOUR}]}, 3600),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": HOUR}]}]}, 3600),
    ],
)
async def test_cache_control_is_a_hint(
    client: httpx.AsyncClient, service: FakeService, change: dict[str, object], ttl_s: int
) -> None:
    answer = await client.post("/v1/messages", json=BODY | change, headers={"x-session-final": "true"})
    assert answer.status_code == 200
    assert service.requests[0].cache_ttl_s == ttl_s
    assert service.requests[0].session_final


@pytest.mark.parametrize("bad", [{"type": "forever"}, {"type": "ephemeral", "ttl": "2h"}, {"ttl": "1h"}])
async def test_malformed_cache_control_is_refused_by_name(
    client: httpx.AsyncClient, service: FakeService, bad: dict[str, str]
) -> None:
    answer = await client.post("/v1/messages", json=BODY | {"cache_control": bad})
    assert answer.status_code == 400
    assert "cache_control" in answer.text
    assert not service.requests


def signed(thinking: str, signature: str) -> dict[str, str]:
    return {"type": "thinking", "thinking": thinking, "signature": signature}


T1, T2, HIDDEN = signed("One.", "s1"), signed("Two.", "s2"), {"type": "redacted_thinking", "data": "x"}
SAID, DONE = {"type": "text", "text": "So."}, ChoiceDone(0, "stop")
SIGNED_AS_IT_COMES = (
    *(ReasoningDelta(0, "One."), Opaque(0, "thinking_blocks", [T1]), TextDelta(0, "So.")),
    *(
        Opaque(0, "thinking_blocks", [T1, HIDDEN]),
        ReasoningDelta(0, "Two."),
        Opaque(0, "thinking_blocks", [T1, HIDDEN, T2]),
    ),
    TextDelta(0, "So."),
)
SIGNED_AT_THE_END = (
    *(ReasoningDelta(0, "One."), TextDelta(0, "So."), ReasoningDelta(0, "Two.")),
    Opaque(0, "thinking_blocks", [T1, T2]),
)
UNSIGNED_FIRST = (ReasoningDelta(0, "Zero. "), ReasoningDelta(0, "One."), Opaque(0, "thinking_blocks", [T1]))


@pytest.mark.parametrize(
    ("events", "blocks"),
    [
        (SIGNED_AS_IT_COMES, [T1, SAID, HIDDEN, T2, SAID]),
        (SIGNED_AT_THE_END, [T1, SAID, T2]),
        (UNSIGNED_FIRST, [signed("Zero. ", SIGNATURE), T1]),
    ],
)
async def test_whole_and_cached_replies_keep_the_order_of_their_thinking(
    client: httpx.AsyncClient, service: FakeService, events: tuple[TextEvent, ...], blocks: list[dict[str, str]]
) -> None:
    service.script = says(*events, DONE)
    assert (await client.post("/v1/messages", json=BODY)).json()["content"] == blocks
    collector = AnswerCollector(1)
    for event in (*events, DONE):
        collector.add(event)
    answer = collector.answer(USAGE)
    kept = msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=Answer)
    service.script = says(*events_of(kept))  # as from the response cache
    assert (await client.post("/v1/messages", json=BODY)).json()["content"] == blocks
    if events is SIGNED_AS_IT_COMES:
        stream = (await client.post("/v1/messages", json=BODY | {"stream": True})).text
        told = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: ")]
        kinds = [event["content_block"]["type"] for event in told if event["type"] == "content_block_start"]
        assert kinds == [block["type"] for block in blocks]
        deltas = [event["delta"] for event in told if event["type"] == "content_block_delta"]
        assert [delta["signature"] for delta in deltas if "signature" in delta] == ["s1", "s2"]


@pytest.mark.parametrize("signature", ["", "c2ln"])
async def test_thinking_after_encrypted_thinking(
    client: httpx.AsyncClient, service: FakeService, signature: str
) -> None:
    """Thinking is streamed as it comes, and is there without a signature, too."""
    hidden = {"type": "redacted_thinking", "data": "x"}
    signed = [{"type": "thinking", "thinking": "Well.", "signature": signature}] if signature else []
    marks = [Opaque(0, "thinking_blocks", [hidden, *signed])] if signed else []
    thinks = (Opaque(0, "thinking_blocks", [hidden]), ReasoningDelta(0, "We"), ReasoningDelta(0, "ll."))
    service.script = says(*thinks, *marks, TextDelta(0, "Yes."), ChoiceDone(0, "stop"))
    whole = (await client.post("/v1/messages", json=BODY)).json()["content"]
    assert [block.get("thinking", "") for block in whole] == ["", "Well.", ""]
    stream = (await client.post("/v1/messages", json=BODY | {"stream": True})).text
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: ")]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert [delta["thinking"] for delta in deltas if "thinking" in delta] == ["We", "ll."]
    signatures = [delta["signature"] for delta in deltas if "signature" in delta]
    assert signatures == [whole[1]["signature"]]
    assert signature in ("", *signatures)
