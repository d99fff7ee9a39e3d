"""Anthropic's own stream on its way to a client of the Messages API: unchanged, and read only for its usage.

A request in Anthropic's form reaches Anthropic as it came, so what only its API has (cache breakpoints, signed
thinking, its server tools, citations) survives both ways.
"""

from typing import Any

import msgspec

from emberline.upstream.dialects.chunks import MAX_BODY_BYTES, UnreadableChunk
from emberline.upstream.dialects.sse import MalformedLine, StreamEditor, StreamError, data_of, encode, read_usage

_DELTA = b'"content_block_delta"'
_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
_TEXTS = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}


class MessagesEditor(StreamEditor):
    """The stream of one attempt, which ends with `message_stop`."""

    _may_skip = False  # the type of an event says what it is

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[str, Any] = {}

    def closing(self) -> bytes:
        return (b"" if self._last.endswith(b"\n\n") else b"\n") + _STOP

    def _data(self, line: bytes) -> bytes | None:
        payload = line[5:].strip()
        if _DELTA in payload[:40]:  # nearly all of them, where the type comes first, as Anthropic has it
            if not payload.endswith(b"}"):
                _decode(payload)
            return line
        event = _decode(payload)
        kind = event.get("type")
        if kind == "message_start":
            message = event.get("message")
            usage = message.get("usage") if isinstance(message, dict) else None
            return self._told(line, event, usage)
        if kind == "message_delta":
            delta = event.get("delta")
            self.finished = self.finished or (isinstance(delta, dict) and bool(delta.get("stop_reason")))
            return self._told(line, event, event.get("usage"))
        if kind == "message_stop":
            self.ended = True
        elif kind == "error":
            error = event.get("error")
            error = error if isinstance(error, dict) else {}
            code = 400 if error.get("type") == "invalid_request_error" else 500
            raise StreamError(str(error.get("message", "")), code)
        return line

    def _told(self, line: bytes, event: dict[str, Any], usage: Any) -> bytes:
        """Counts are cumulative; one that is null or left out stays as it was."""
        if not isinstance(usage, dict):
            return line
        self._counts |= {name: value for name, value in usage.items() if value is not None}
        self._usage = read_usage(self._counts)
        if self.adjust is None:
            return line
        self.adjust(usage)
        return b"data: " + encode(event)


class MessageAssembler:
    """Called with whole lines, returns nothing until the last of them: then the message."""

    def __init__(self) -> None:
        self._message: dict[str, Any] = {}
        self._blocks: dict[int, dict[str, Any]] = {}
        self._pieces: dict[tuple[int, str], list[str]] = {}  # of texts, joined once
        self._n_bytes = 0

    def __call__(self, lines: bytes, last: bool) -> bytes:
        self._n_bytes += len(lines)
        if self._n_bytes > MAX_BODY_BYTES:
            raise UnreadableChunk(f"more than {MAX_BODY_BYTES >> 20} MiB")
        try:
            for line in lines.splitlines():
                if data := data_of(line):
                    self._add(msgspec.json.decode(data))
            return encode(self._whole()) if last else b""
        except (msgspec.DecodeError, RecursionError, AttributeError, TypeError, KeyError) as error:
            raise UnreadableChunk(f"an event that cannot be read: {error!r}") from None

    def _add(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        if kind == "message_start":
            self._message = dict(event["message"])
        elif kind == "content_block_start":
            self._blocks[event["index"]] = dict(event["content_block"])
        elif kind == "content_block_delta":
            index, delta = event["index"], event["delta"]
            if (name := _TEXTS.get(delta["type"])) is not None:
                self._pieces.setdefault((index, name), []).append(delta[name])
            elif delta["type"] == "input_json_delta":
                self._pieces.setdefault((index, "input"), []).append(delta["partial_json"])
            elif delta["type"] == "citations_delta":
                block = self._blocks[index]
                block["citations"] = [*(block.get("citations") or ()), delta["citation"]]
        elif kind == "message_delta":
            self._message |= event["delta"]
            usage = {name: value for name, value in event.get("usage", {}).items() if value is not None}
            self._message["usage"] = {**self._message.get("usage", {}), **usage}

    def _whole(self) -> dict[str, Any]:
        for (index, name), pieces in self._pieces.items():
            text = "".join(pieces)
            block = self._blocks[index]
            if name == "input":
                block["input"] = msgspec.json.decode(text) if text else block.get("input", {})
            else:
                block[name] = block.get(name, "") + text
        if not self._message.get("stop_reason"):
            raise UnreadableChunk("a message without a stop reason")
        return {**self._message, "content": [self._blocks[index] for index in sorted(self._blocks)]}


def _decode(payload: bytes) -> dict[str, Any]:
    try:
        event = msgspec.json.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedLine(f"an event that cannot be read: {error}") from None
    if not isinstance(event, dict):
        raise MalformedLine("an event that is no object")
    return event
