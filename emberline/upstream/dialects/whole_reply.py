"""A whole reply as the lines of a stream, for servers that answer a streaming request with JSON: a completion of
OpenAI's API, a message of Anthropic's, or a reply of Gemini's."""

from typing import Any

import msgspec

from emberline.upstream.dialects.sse import MalformedLine, encode

Json = dict[str, Any]
_STREAMED = {"chat.completion": "chat.completion.chunk"}
_END = b"data: [DONE]\n\n"


def stream_lines(body: bytes) -> bytes:
    """The lines that the server would have streamed. Raises MalformedLine if `body` is neither a completion nor an
    error."""
    reply = _object(body)
    if reply.get("error") and "choices" not in reply:
        return b"data: " + encode({"error": reply["error"]}) + b"\n\n"
    choices = reply.get("choices")
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, dict) for choice in choices):
        raise MalformedLine("JSON that is no completion")
    usage = reply.get("usage")
    head = {name: value for name, value in reply.items() if name not in ("choices", "usage")}
    head["object"] = _STREAMED.get(str(reply.get("object")), reply.get("object"))
    events = [{**head, "choices": [part]} for choice in choices for part in _parts(choice)]
    if isinstance(usage, dict):
        events.append({**head, "choices": [], "usage": usage})
    return b"".join(b"data: " + encode(event) + b"\n\n" for event in events) + _END


def _parts(choice: Json) -> tuple[Json, Json]:
    """A choice as two chunks: everything that it says, and why it ended."""
    message = choice.get("message")
    end = {"index": choice.get("index", 0), "finish_reason": choice.get("finish_reason") or "stop"}
    if not isinstance(message, dict):  # a text completion
        return {**choice, "finish_reason": None}, {**end, "text": "", "logprobs": None}
    said = {name: value for name, value in choice.items() if name != "message"}
    return {**said, "delta": _delta(message), "finish_reason": None}, {**end, "delta": {}, "logprobs": None}


def _delta(message: Json) -> Json:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return {name: value for name, value in message.items() if name != "tool_calls"}
    return {**message, "tool_calls": [{"index": at, **call} for at, call in enumerate(calls) if isinstance(call, dict)]}


def message_lines(body: bytes) -> bytes:
    """The events that Anthropic would have streamed of a whole message. Raises as `stream_lines`."""
    reply = _object(body)
    if reply.get("type") == "error":
        return _event(reply)
    blocks = reply.get("content") if reply.get("type") == "message" else None
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise MalformedLine("JSON that is no message")
    usage = reply.get("usage") or {}
    ended = {"stop_reason": reply.get("stop_reason") or "end_turn", "stop_sequence": reply.get("stop_sequence")}
    events: list[Json] = [{"type": "message_start", "message": {**reply, "content": [], **dict.fromkeys(ended)}}]
    for at, block in enumerate(blocks):
        deltas = _deltas(block)
        started = {name: "" if isinstance(value, str) else {} for name, value in block.items() if name in _DELTA_OF}
        events.append({"type": "content_block_start", "index": at, "content_block": {**block, **started}})
        events += [{"type": "content_block_delta", "index": at, "delta": delta} for delta in deltas]
        events.append({"type": "content_block_stop", "index": at})
    events += [{"type": "message_delta", "delta": ended, "usage": usage}, {"type": "message_stop"}]
    return b"".join(map(_event, events))


def candidate_lines(body: bytes) -> bytes:
    """The events that Gemini would have streamed: of a whole reply, or of the list of a stream that is no event stream.
    Raises as `stream_lines`."""
    reply = _decoded(body)
    parts = reply if isinstance(reply, list) else [reply]
    if not parts or not all(isinstance(part, dict) and not _OF_GEMINI.isdisjoint(part) for part in parts):
        raise MalformedLine("JSON that is no reply with candidates")
    return b"".join(b"data: " + encode(part) + b"\n\n" for part in parts)


# Fields of Anthropic's blocks that are streamed, and the types of their deltas.
_DELTA_OF = {
    "text": "text_delta",
    "thinking": "thinking_delta",
    "signature": "signature_delta",
    "input": "input_json_delta",
}
_OF_GEMINI = frozenset({"candidates", "promptFeedback", "error"})


def _deltas(block: Json) -> list[Json]:
    given = [(name, kind, block[name]) for name, kind in _DELTA_OF.items() if block.get(name)]
    return [
        {"type": kind, "partial_json": encode(value).decode()} if name == "input" else {"type": kind, name: value}
        for name, kind, value in given
    ]


def _event(fields: Json) -> bytes:
    return b"event: " + str(fields["type"]).encode() + b"\ndata: " + encode(fields) + b"\n\n"


def _decoded(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedLine(f"JSON that cannot be read: {error}") from None


def _object(body: bytes) -> Json:
    reply = _decoded(body)
    if not isinstance(reply, dict):
        raise MalformedLine("JSON that is no completion")
    return reply
