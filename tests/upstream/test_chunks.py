"""Chunks of an upstream stream made into the body of a reply that is not streamed, and into text events."""

import json
import time
from typing import Any

import pytest

from emberline.protocol.events import (
    ChoiceDone,
    Opaque,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
)
from emberline.upstream.dialects.chunks import BodyAssembler, ChunkReader, UnreadableChunk

HEAD = {"id": "c1", "object": "chat.completion.chunk", "created": 7, "model": "m", "system_fingerprint": "fp"}
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}


def lines(*chunks: dict[str, Any]) -> bytes:
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks)


def chunk(delta: dict[str, Any], finish: str | None = None, index: int = 0, **more: Any) -> dict[str, Any]:
    return {**HEAD, "choices": [{"index": index, "delta": delta, "finish_reason": finish, **more}]}


def assembled(*chunks: dict[str, Any]) -> Any:
    """The body, however the lines are cut into blocks."""
    one_by_one, at_once = BodyAssembler(), BodyAssembler()
    for item in chunks:
        assert one_by_one(lines(item), False) == b""
    body = one_by_one(b"data: [DONE]\n\n", True)
    assert at_once(lines(*chunks) + b"data: [DONE]\n\n", True) == body
    return json.loads(body)


def test_text_usage_and_the_fields_of_the_first_chunk() -> None:
    body = assembled(
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "Hello"}),
        chunk({"content": " you"}, "stop", stop_reason=None, matched_stop=2),
        {**HEAD, "choices": [], "usage": USAGE},
    )
    choice = {"index": 0, "message": {"role": "assistant", "content": "Hello you"}, "finish_reason": "stop"}
    choice |= {"stop_reason": None, "matched_stop": 2}
    assert body == {**HEAD, "object": "chat.completion", "choices": [choice], "usage": USAGE}


def test_reasoning_and_tool_calls() -> None:
    def more(arguments: str) -> dict[str, Any]:
        return {"index": 0, "function": {"arguments": arguments}}

    first = {"index": 0, "id": "a", "type": "function", "function": {"name": "look", "arguments": ""}}
    second = {"index": 1, "id": "b", "type": "function", "function": {"name": "go", "arguments": "{}"}}
    body = assembled(
        chunk({"role": "assistant", "content": ""}),
        chunk({"reasoning_content": "let me "}),
        chunk({"reasoning_content": "see"}),
        chunk({"tool_calls": [first]}),
        chunk({"tool_calls": [more('{"at":')]}),
        chunk({"tool_calls": [more(" 1}"), second]}),
        chunk({}, "tool_calls"),
    )
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "let me see",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}},
            {"id": "b", "type": "function", "function": {"name": "go", "arguments": "{}"}},
        ],
    }


def test_an_empty_list_of_tool_calls_stays_a_list() -> None:
    body = assembled(chunk({"role": "assistant", "content": "", "tool_calls": []}), chunk({"tool_calls": []}, "stop"))
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "", "tool_calls": []}


def test_tool_calls_without_an_index_are_kept_separate() -> None:
    def call(arguments: str, **head: str) -> dict[str, Any]:
        return {"function": {"arguments": arguments}, **head}

    body = assembled(
        chunk({"role": "assistant", "tool_calls": [call('{"a":', id="a"), call("1}"), call("{}", id="b")]}),
        chunk({}, "tool_calls"),
    )
    calls = body["choices"][0]["message"]["tool_calls"]
    assert [(call["id"], call["function"]["arguments"]) for call in calls] == [("a", '{"a":1}'), ("b", "{}")]


def test_a_field_of_the_body_may_come_late() -> None:
    body = assembled({**chunk({"content": "x"}), "system_fingerprint": None}, chunk({}, "stop"))
    assert body["system_fingerprint"] == "fp"


def test_choices_and_logprobs_are_kept_separate() -> None:
    def logprobs(token: str) -> dict[str, Any]:
        return {"content": [{"token": token, "logprob": -1.0, "top_logprobs": []}]}

    body = assembled(
        chunk({"content": "x"}, index=1, logprobs=logprobs("x")),
        chunk({"content": "a"}, index=0, logprobs=logprobs("a")),
        chunk({"content": "b"}, "stop", index=0, logprobs=logprobs("b")),
        chunk({}, "length", index=1, logprobs=None),
    )
    assert [choice["message"]["content"] for choice in body["choices"]] == ["ab", "x"]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "length"]
    tokens = [[entry["token"] for entry in choice["logprobs"]["content"]] for choice in body["choices"]]
    assert tokens == [["a", "b"], ["x"]]


def test_a_text_completion() -> None:
    head = {"id": "c", "object": "text_completion", "created": 1, "model": "m"}

    def piece(text: str, finish: str | None = None) -> dict[str, Any]:
        logprobs = {"tokens": [text], "token_logprobs": [-0.5], "top_logprobs": [{text: -0.5}], "text_offset": [0]}
        return {**head, "choices": [{"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}]}

    body = assembled(piece("once"), piece(" upon", "length"), {**head, "choices": [], "usage": USAGE})
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("once upon", "length")
    assert choice["logprobs"]["tokens"] == ["once", " upon"]
    assert (body["object"], body["usage"]) == ("text_completion", USAGE)


@pytest.mark.parametrize(
    "data",
    [b"{", b"3", b'{"choices": 3}', *(b'{"choices": [{%b}]}' % at for at in (b"", b'"index": []', b'"index": null'))],
)
def test_a_chunk_that_cannot_be_read_is_the_servers_fault(data: bytes) -> None:
    with pytest.raises(UnreadableChunk):
        BodyAssembler()(b"data: " + data + b"\n\n", False)


def test_a_stream_without_choices_has_no_body() -> None:
    with pytest.raises(UnreadableChunk, match="without choices"):
        BodyAssembler()(b"data: [DONE]\n\n", True)


def test_a_body_has_a_limit() -> None:
    with pytest.raises(UnreadableChunk, match="more than"):
        BodyAssembler(max_bytes=100)(lines(chunk({"content": "x" * 200})), False)


def test_a_long_body_takes_linear_time() -> None:
    """16 MiB in 16,384 chunks: concatenating text to text would copy 128 GiB."""
    assembler, piece = BodyAssembler(), lines(chunk({"content": "x" * 1024}))
    started_s = time.process_time()
    for _ in range(16_384):
        assembler(piece, False)
    body = json.loads(assembler(lines(chunk({}, "stop")), True))
    assert time.process_time() - started_s < 5
    assert len(body["choices"][0]["message"]["content"]) == 16 << 20


@pytest.mark.parametrize("last", [None, "abort", "error", 3])
def test_a_choice_that_has_not_finished_makes_no_body(last: Any) -> None:
    with pytest.raises(UnreadableChunk, match="finish reason"):
        assembled(chunk({"content": "a"}, "stop"), chunk({"content": "b"}, last, index=1))


def test_text_events() -> None:
    reader = ChunkReader(1, ("END",), 11)
    call = {"index": 0, "id": "a", "function": {"name": "look", "arguments": "{}"}}
    found = reader(lines(chunk({"role": "assistant"}), chunk({"reasoning": "hm"}), chunk({"content": "Hi"})), False)
    found += reader(lines(chunk({"tool_calls": [call]}), chunk({}, "tool_calls")) + b"data: [DONE]\n\n", True)
    kinds = [Started, ReasoningDelta, TextDelta, ToolCallStarted, ToolCallDelta, ChoiceDone]
    assert [type(event) for event in found] == kinds
    assert isinstance(found[0], Started)
    assert found[0].usage.prompt_tokens == 11
    assert isinstance(found[-1], ChoiceDone)
    assert found[-1].finish == "tool_calls"


def thinking(text: str, signature: str = "") -> dict[str, str]:
    return {"type": "thinking", "thinking": text, "signature": signature}


REDACTED = {"type": "redacted_thinking", "data": "x"}


@pytest.mark.parametrize(
    ("deltas", "reasoning", "marks"),
    [
        (  # in pieces, the last with the signature
            [
                {"reasoning_content": "I ", "thinking_blocks": [thinking("I ")]},
                {"reasoning_content": "see.", "thinking_blocks": [thinking("see.")]},
                {"thinking_blocks": [thinking("", "s")]},
            ],
            "I see.",
            [[thinking("I see.", "s")]],
        ),
        (  # all that there are, each time
            [
                {"reasoning_content": "a"},
                {"thinking_blocks": [thinking("a", "s")]},
                {"reasoning_content": "b"},
                {"thinking_blocks": [thinking("a", "s"), REDACTED, thinking("b", "t")]},
                {"thinking_blocks": [thinking("a", "s"), REDACTED, thinking("b", "t")]},
            ],
            "ab",
            [[thinking("a", "s")], [thinking("a", "s"), REDACTED, thinking("b", "t")]],
        ),
        # What is in no reasoning would reach the client past the guardrails.
        ([{"thinking_blocks": [thinking("bad", "s") | {"more": "bad"}]}], "bad", [[thinking("bad", "s")]]),
        ([{"reasoning": "fine"}, {"thinking_blocks": [thinking("evil", "s")]}], "fineevil", [[thinking("evil", "s")]]),
        ([{"thinking_blocks": [{"type": "text", "text": "bad"}, "bad", 1]}, {"thinking_blocks": "bad"}], "", []),
        ([{"reasoning": "a", "thinking_blocks": [thinking("a")]}], "a", []),  # never signed
    ],
)
def test_blocks_of_thinking(deltas: list[Any], reasoning: str, marks: list[Any]) -> None:
    found = ChunkReader(1, (), 1)(lines(*map(chunk, deltas), chunk({}, "stop")), True)
    assert "".join(event.text for event in found if isinstance(event, ReasoningDelta)) == reasoning
    assert [event.value for event in found if isinstance(event, Opaque)] == marks


def test_the_number_of_blocks_of_thinking_is_limited() -> None:
    blocks = [{"type": "redacted_thinking", "data": str(number)} for number in range(300)]
    with pytest.raises(UnreadableChunk, match="blocks of thinking"):
        ChunkReader(1, (), 1)(lines(chunk({"thinking_blocks": blocks})), False)


def test_a_reply_without_a_finish_reason_is_the_servers_fault() -> None:
    with pytest.raises(UnreadableChunk, match="finish reason"):
        ChunkReader(1, (), 1)(lines(chunk({"content": "Hi"})) + b"data: [DONE]\n\n", True)
