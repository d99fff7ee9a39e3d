"""Dialects of providers: canonical requests written straight into their form, and their streams read as events."""

import json
from typing import Any

import msgspec
import pytest

from emberline.protocol.errors import BadInput, Unsupported
from emberline.protocol.events import (
    ChoiceDone,
    Opaque,
    ReasoningDelta,
    Started,
    TextDelta,
    TextEvent,
    ToolCallDelta,
    ToolCallStarted,
)
from emberline.protocol.request import ContentPart, GenerateRequest, Message, SamplingParams, Tool, ToolCall
from emberline.upstream.dialects.anthropic import AnthropicReader, message_request
from emberline.upstream.dialects.event_reader import MAX_CALLS, ChunkEditor, EventReader
from emberline.upstream.dialects.gemini import GeminiReader, content_request
from emberline.upstream.dialects.sse import MalformedLine, StreamError
from emberline.upstream.upstream_request import body_of

KEPT = {"cache_control": {"type": "ephemeral"}}
SIGNED = {"extra_content": {"google": {"thought_signature": "sig"}}}
THOUGHT = [{"type": "thinking", "thinking": "Hm.", "signature": "sig"}]
TURNS = (
    Message("system", "Be.", parts=(ContentPart("text", "Be.", marks=KEPT),)),
    Message(
        "user",
        "See:",
        parts=(
            ContentPart("text", "See:"),
            ContentPart("image", "data:image/png;base64,AA==", marks=KEPT),
            ContentPart("file", "data:application/pdf;base64,BB==", "a.pdf"),
        ),
    ),
    Message("assistant", "", tool_calls=(ToolCall("c", "f", '{"x":1}', SIGNED),), marks={"thinking_blocks": THOUGHT}),
    Message("tool", "ok", tool_call_id="c", marks=KEPT),
)


def asked(*messages: Message, **fields: Any) -> GenerateRequest:
    return GenerateRequest(id="r", model="m", messages=messages or (Message("user", "Hi"),), **fields)


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def test_parts_and_marks_reach_anthropic() -> None:
    body = message_request("a", asked(*TURNS, tools=(Tool("f", marks=KEPT),), end_user="u"), "claude-opus-5")
    assert body["system"] == [{"type": "text", "text": "Be.", **KEPT}]
    assert body["tools"] == [{"name": "f", "input_schema": {"type": "object"}, **KEPT}]
    assert body["metadata"] == {"user_id": "u"}
    user, assistant, result = (turn["content"] for turn in body["messages"])
    image = {"type": "base64", "media_type": "image/png", "data": "AA=="}
    file = {"type": "base64", "media_type": "application/pdf", "data": "BB=="}
    assert user == [
        {"type": "text", "text": "See:"},
        {"type": "image", "source": image, **KEPT},
        {"type": "document", "source": file, "title": "a.pdf"},
    ]
    assert assistant == [*THOUGHT, {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}}]
    answer = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "ok"}], **KEPT}
    assert result == [answer]


def test_parts_and_signatures_reach_gemini() -> None:
    body = content_request("g", asked(*TURNS), "gemini-3-pro")
    assert body["systemInstruction"] == {"parts": [{"text": "Be."}]}
    user, model, result = (content["parts"] for content in body["contents"])
    media = [("image/png", "AA=="), ("application/pdf", "BB==")]
    inline = [{"inlineData": {"mimeType": mime, "data": data}} for mime, data in media]
    assert user == [{"text": "See:"}, *inline]
    assert model == [{"functionCall": {"name": "f", "args": {"x": 1}}, "thoughtSignature": "sig"}]
    assert result == [{"functionResponse": {"name": "f", "response": {"result": "ok"}}}]


@pytest.mark.parametrize("write", [message_request, content_request])
def test_what_an_api_lacks_is_refused(write: Any) -> None:
    for sampling, field in (
        (SamplingParams(min_p=0.1), "min_p"),
        (SamplingParams(stop_ids=(1,)), "stop_token_ids"),
        (SamplingParams(logprobs=0), "logprobs"),
        (SamplingParams(logit_bias={1: 2.0}), "logit_bias"),
    ):
        with pytest.raises(Unsupported, match=f"`{field}`") as refused:
            write("p", asked(sampling=sampling), "m")
        assert refused.value.param == field
    with pytest.raises(Unsupported, match="text completions"):
        write("p", GenerateRequest(id="r", model="m", prompt="Hi"), "m")
    with pytest.raises(BadInput, match="data:"):
        write("p", asked(Message("user", "", parts=(ContentPart("image", "file:///etc/passwd"),))), "m")
    for arguments in ("{", "[1]"):
        with pytest.raises(BadInput, match="arguments of f"):
            write("p", asked(Message("assistant", "", tool_calls=(ToolCall("c", "f", arguments),))), "m")


ANTHROPIC = (
    event(type="message_start", message={"id": "msg_1", "model": "claude", "usage": {"input_tokens": 5}}),
    event(type="content_block_start", index=0, content_block={"type": "thinking"}),
    event(type="content_block_delta", index=0, delta={"type": "thinking_delta", "thinking": "Hm."}),
    event(type="content_block_delta", index=0, delta={"type": "signature_delta", "signature": "sig"}),
    event(type="content_block_stop", index=0),
    event(type="content_block_start", index=1, content_block={"type": "tool_use", "id": "c", "name": "f"}),
    event(type="content_block_stop", index=1),
    event(type="message_delta", delta={"stop_reason": "tool_use"}, usage={"output_tokens": 7}),
    event(type="message_stop"),
)
GEMINI = (
    event(candidates=[{"content": {"parts": [{"text": "Hm.", "thought": True}]}}], responseId="r1"),
    event(
        candidates=[
            {
                "content": {"parts": [{"functionCall": {"name": "f", "id": "c"}, "thoughtSignature": "sig"}]},
                "finishReason": "STOP",
            }
        ],
        usageMetadata={"promptTokenCount": 5, "candidatesTokenCount": 4, "thoughtsTokenCount": 3},
    ),
)


def read(reader: EventReader, *pieces: bytes) -> list[TextEvent]:
    return [event for piece in (*pieces, b"") for event in reader.feed(piece)]


@pytest.mark.parametrize(
    ("reader", "stream", "opaque"),
    [
        (AnthropicReader(9), ANTHROPIC, Opaque(0, "thinking_blocks", THOUGHT)),
        (GeminiReader(9, 1), GEMINI, Opaque(0, "extra_content", SIGNED["extra_content"], 0)),
    ],
)
def test_a_stream_is_read_as_events(reader: EventReader, stream: tuple[bytes, ...], opaque: Opaque) -> None:
    assert reader.usage is None
    found = read(reader, *stream)
    assert isinstance(found[0], Started)
    assert found[0].usage.prompt_tokens == 9
    assert found[1] == ReasoningDelta(0, "Hm.")
    assert opaque in found
    assert [one for one in found[2:] if one != opaque] == [
        ToolCallStarted(0, 0, "c", "f"),
        ToolCallDelta(0, 0, "{}"),
        ChoiceDone(0, "tool_calls"),
    ]
    assert reader.ended
    assert reader.usage is not None
    assert (reader.usage.prompt_tokens, reader.usage.completion_tokens) == (5, 7)


def test_chunks_tell_what_only_openais_api_can_tell() -> None:
    reader = GeminiReader(9, 2)
    editor = ChunkEditor(reader, "m", hides_usage=True)
    blocked = event(promptFeedback={"blockReason": "SAFETY"})
    lines = editor.feed(blocked) + editor.feed(b"")
    chunks = [json.loads(line[6:]) for line in lines.splitlines() if line.startswith(b"data: {")]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [
        None,
        "content_filter",
        None,
        "content_filter",
    ]
    assert [chunk["choices"][0]["index"] for chunk in chunks] == [0, 0, 1, 1]
    assert lines.endswith(b"data: [DONE]\n\n")


def test_what_cannot_be_a_reply_blames_the_provider() -> None:
    done = {"content": {"parts": [{"text": "x"}]}, "finishReason": "STOP"}
    missing = GeminiReader(9, 2)
    assert TextDelta(0, "x") in read(missing, event(candidates=[done]))
    with pytest.raises(MalformedLine, match="without a finish reason"):
        missing.closing()
    with pytest.raises(MalformedLine, match="candidate 2 of 2"):
        GeminiReader(9, 2).feed(event(candidates=[{**done, "index": 2}]))
    calls = [{"functionCall": {"name": "f"}}] * (MAX_CALLS + 1)
    with pytest.raises(MalformedLine, match="tool calls"):
        GeminiReader(9, 1).feed(event(candidates=[{"content": {"parts": calls}}]))
    with pytest.raises(MalformedLine, match="cannot be read"):
        AnthropicReader(9).feed(b"data: {\n\n")
    with pytest.raises(MalformedLine, match="without a stop reason"):
        AnthropicReader(9).feed(ANTHROPIC[0] + ANTHROPIC[-1])
    with pytest.raises(StreamError, match="Overloaded"):
        AnthropicReader(9).feed(event(type="error", error={"type": "overloaded_error", "message": "Overloaded"}))


def test_images_of_tool_results_follow_as_a_message_of_the_user() -> None:
    """OpenAI's results of tools are text. Results of one turn belong together, so their images come after all."""
    image = ContentPart("image", "data:image/png;base64,AA==", detail="low")
    calls = (ToolCall("a", "shot", "{}"), ToolCall("b", "shot", "{}"))
    turns = (
        Message("user", "Look"),
        Message("assistant", "", tool_calls=calls),
        Message("tool", "first", tool_call_id="a", parts=(ContentPart("text", "first"), image)),
        Message("tool", "second", tool_call_id="b"),
        Message("user", "Well?"),
    )
    messages = msgspec.json.decode(body_of(asked(*turns), "openai")["messages"])
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "user", "user"]
    assert (messages[2]["content"], messages[3]["content"]) == ("first", "second")
    assert messages[4]["content"] == [
        {"type": "text", "text": "Images in the result of a:"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}},
    ]
    last = msgspec.json.decode(body_of(asked(*turns[:3]), "openai")["messages"])
    assert last[-1]["content"][1]["image_url"]["detail"] == "low"
