"""Streamed and whole answers agree in every API, for any output of the model."""

import asyncio
import json
from collections.abc import Iterable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.protocol.events import (
    ChoiceDone,
    DraftUsage,
    ReasoningDelta,
    TextDelta,
    TextEvent,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)
from emberline.protocol.request import Speculation
from tests.api.fake_service import MODEL, FakeService, client_of, says
from tests.examples import n_examples

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
RUN = f"/client/v4/accounts/acme/ai/run/{MODEL}"

texts = st.text(st.characters(codec="utf-8"), max_size=8)
numbers = st.integers(-(1 << 53), 1 << 53) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def pieces(draw: st.DrawFn, text: str) -> list[str]:
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=3)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@st.composite
def written(draw: st.DrawFn, index: int) -> list[TextEvent]:
    """The output of one choice: reasoning, text and calls in any order and any chunking."""
    events: list[TextEvent] = []
    n_calls = 0
    for kind in draw(st.lists(st.sampled_from(["think", "say", "call"]), max_size=5)):
        if kind == "think":
            events += [ReasoningDelta(index, piece) for piece in draw(pieces(draw(texts)))]
        elif kind == "say":
            events += [TextDelta(index, piece) for piece in draw(pieces(draw(texts)))]
        else:
            arguments = json.dumps(draw(st.dictionaries(texts, values, max_size=3)))
            events.append(ToolCallStarted(index, n_calls, f"call_{n_calls}", draw(st.sampled_from(["f", "g"]))))
            events += [ToolCallDelta(index, n_calls, piece) for piece in draw(pieces(arguments))]
            n_calls += 1
    finish = "tool_calls" if n_calls else draw(st.sampled_from(["stop", "length"]))
    return [*events, ChoiceDone(index, finish)]


def data(text: str) -> list[dict[str, Any]]:
    lines = [line for line in text.split("\n") if line.startswith("data: {")]
    return [json.loads(line[6:]) for line in lines]


def chat_whole(chunks: Iterable[dict[str, Any]], n: int) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"calls": []} for _ in range(n)]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        message, delta = messages[choice["index"]], choice["delta"]
        for field in ("content", "reasoning_content"):
            if delta.get(field):
                message[field] = message.get(field, "") + delta[field]
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(message["calls"])
                message["calls"].append([call["id"], call["function"]["name"], ""])
            message["calls"][call["index"]][2] += call["function"]["arguments"]
        assert "finish" not in message
        if choice["finish_reason"]:
            message["finish"] = choice["finish_reason"]
    return messages


def anthropic_whole(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    partial, is_open = "", False
    message: dict[str, Any] = {}
    for event in events:
        if event["type"] == "content_block_start":
            assert (event["index"], is_open) == (len(blocks), False)
            blocks.append(event["content_block"])
            partial, is_open = "", True
        elif event["type"] == "content_block_delta":
            assert (event["index"], is_open) == (len(blocks) - 1, True)
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                partial += delta["partial_json"]
            else:
                field = delta["type"].removesuffix("_delta")
                blocks[-1][field] += delta[field]
        elif event["type"] == "content_block_stop":
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = json.loads(partial)
            is_open = False
        elif event["type"] == "message_delta":
            message = event["delta"]
    assert not is_open
    return message | {"content": blocks}


def native_whole(pieces: Iterable[dict[str, Any]]) -> dict[str, Any]:
    text, reasoning, calls = "", "", []
    end: dict[str, Any] = {}
    for piece in pieces:
        text += piece.get("response", "")
        reasoning += piece.get("reasoning_content", "")
        for call in piece.get("tool_calls", ()):
            if "id" in call:
                calls.append([call["id"], call["function"]["name"], ""])
            calls[call["index"]][2] += call["function"]["arguments"]
        if "finish_reason" in piece:
            end = {"finish_reason": piece["finish_reason"]}
    named = [{"name": name, "arguments": json.loads(arguments), "id": id} for id, name, arguments in calls]
    found: dict[str, Any] = {"response": text if text or not calls else None, "tool_calls": named}
    return found | end | ({"reasoning_content": reasoning} if reasoning else {})


def answers(path: str, body: dict[str, Any], events: list[TextEvent]) -> tuple[str, dict[str, Any]]:
    async def ask() -> tuple[str, dict[str, Any]]:
        async with client_of(FakeService(says(*events))) as client:
            streamed = await client.post(path, json=body | {"stream": True})
            whole = await client.post(path, json=body)
            assert (streamed.status_code, whole.status_code) == (200, 200)
            return streamed.text, whole.json()

    return asyncio.run(ask())


@given(st.tuples(written(0), written(1)), st.randoms(use_true_random=False))
@settings(max_examples=n_examples(60), deadline=None)
def test_chat(choices: tuple[list[TextEvent], list[TextEvent]], random: Any) -> None:
    mixed: list[TextEvent] = []
    queues = [list(reversed(events)) for events in choices]
    while any(queues):
        mixed.append(random.choice([queue for queue in queues if queue]).pop())
    streamed, whole = answers("/v1/chat/completions", CHAT | {"n": 2}, mixed)
    found = chat_whole(data(streamed), 2)
    for choice, message in zip(whole["choices"], found, strict=True):
        said = choice["message"]
        assert message.get("content") == (said["content"] or None)
        assert (said["content"] is None) == (
            not message.get("content") and ("reasoning_content" in said or "tool_calls" in said)
        )
        assert message.get("reasoning_content") == said.get("reasoning_content")
        calls = [[call["id"], *call["function"].values()] for call in said.get("tool_calls", ())]
        assert message["calls"] == calls
        assert message["finish"] == choice["finish_reason"]


@given(written(0))
@settings(max_examples=n_examples(60), deadline=None)
def test_anthropic(events: list[TextEvent]) -> None:
    streamed, whole = answers("/v1/messages", CHAT, events)
    assert anthropic_whole(data(streamed)) == {
        name: whole[name] for name in ("content", "stop_reason", "stop_sequence")
    }


@given(written(0))
@settings(max_examples=n_examples(60), deadline=None)
def test_native(events: list[TextEvent]) -> None:
    streamed, whole = answers(RUN, {"prompt": "Hi"}, events)
    result = whole["result"]
    del result["usage"]
    assert native_whole(data(streamed)) == result


async def test_usage_says_which_tiers_cached_tokens_came_from() -> None:
    usage = Usage(prompt_tokens=100, completion_tokens=3, cached_by_tier={"pool": 64, "host": 0, "device": 16})
    service = FakeService(says(TextDelta(0, "Hello"), ChoiceDone(0, "stop"), usage=usage))
    tiers = {"pool": 64, "device": 16}
    async with client_of(service) as client:
        chat = (await client.post("/v1/chat/completions", json=CHAT)).json()["usage"]
        run = (await client.post(RUN, json={"messages": CHAT["messages"]})).json()["result"]["usage"]
        anthropic = (await client.post("/v1/messages", json={**CHAT, "max_tokens": 5})).json()["usage"]
        response = (await client.post("/v1/responses", json={"model": MODEL, "input": "Hi"})).json()["usage"]
    for details in (chat["prompt_tokens_details"], run["prompt_tokens_details"], response["input_tokens_details"]):
        assert (details["cached_tokens"], details["cached_tokens_by_tier"]) == (80, tiers)
    assert (anthropic["cache_read_input_tokens"], anthropic["cache_read_input_tokens_by_tier"]) == (80, tiers)
    assert anthropic["input_tokens"] == 20
    assert Usage(cached_by_tier={"device": 8, "pool": 0}).cached_below_device == {}


async def test_a_request_may_limit_speculation_and_ask_what_it_gave() -> None:
    usage = Usage(prompt_tokens=100, completion_tokens=30, drafts=DraftUsage(40, 20))
    service = FakeService(says(TextDelta(0, "Hello"), ChoiceDone(0, "stop"), usage=usage))
    asked = {"speculation": {"max_draft_tokens": 4, "report": True}}
    async with client_of(service) as client:
        chat = (await client.post("/v1/chat/completions", json={**CHAT, **asked})).json()["usage"]
        run = (await client.post(RUN, json={"prompt": "Hi", **asked})).json()["result"]["usage"]
        bodies = {
            "/v1/completions": {"model": MODEL, "prompt": "Hi"},
            "/v1/messages": CHAT,
            "/v1/responses": {"model": MODEL, "input": "Hi"},
        }
        others = [(await client.post(path, json={**body, **asked})).json()["usage"] for path, body in bodies.items()]
        for path, body in bodies.items():
            more = await client.post(path, json={**body, "speculation": {"max_draft_tokens": 16}})
            assert more.status_code == 400
            assert "max_draft_tokens" in more.text
        refused = await client.post("/v1/chat/completions", json={**CHAT, "speculation": {"max_draft_tokens": 16}})
        unknown = await client.post("/v1/chat/completions", json={**CHAT, "speculation": {"tree": True}})
    for told in (chat, run, *others):
        assert told["speculation"] == {"draft_tokens": 40, "accepted_tokens": 20}
    assert [request.speculation for request in service.requests] == [Speculation(4, report=True)] * 5
    assert (refused.status_code, unknown.status_code) == (400, 400)
    assert "max_draft_tokens" in refused.text
    assert "tree" in unknown.text
