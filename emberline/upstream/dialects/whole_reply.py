"""A whole chat or text completion as the lines of a stream, for servers that answer a streaming request with JSON."""

from typing import Any

import msgspec

from emberline.upstream.dialects.sse import MalformedLine, encode

Json = dict[str, Any]
_STREAMED = {"chat.completion": "chat.completion.chunk"}
_END = b"data: [DONE]\n\n"


def stream_lines(body: bytes) -> bytes:
    """The lines that the server would have streamed. Raises MalformedLine if `body` is neither a completion nor an
    error."""
    try:
        reply = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedLine(f"JSON that cannot be read: {error}") from None
    if not isinstance(reply, dict):
        raise MalformedLine("JSON that is no completion")
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
