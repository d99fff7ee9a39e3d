"""Encoders of events: what each API makes of the events of a request, as server-sent events or lines."""

import os
from collections.abc import Iterator
from typing import Any

from emberline.api.http.errors import Dialect, error_body
from emberline.api.http.exchange import EVENT_STREAM, encode
from emberline.protocol.errors import EmberlineError
from emberline.protocol.events import (
    ChoiceDone,
    Completed,
    Opaque,
    OutputIds,
    PromptEcho,
    ReasoningDelta,
    Started,
    TextDelta,
    TextEvent,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)

_PADDING = [b"abcdefghijklmnopqrstuvwxyz0123456789"[:length] for length in range(1, 33)]


class EventEncoder:
    """Encodes the events of one request for one API. Each method returns the bytes to send, which may be none."""

    content_type = EVENT_STREAM

    def __init__(self, request_id: str, dialect: Dialect) -> None:
        self._request_id = request_id
        self._dialect = dialect

    def encode(self, event: TextEvent) -> bytes:
        if type(event) is TextDelta:
            return self.text_delta(event)
        if type(event) is ToolCallDelta:
            return self.tool_call_delta(event)
        if type(event) is ReasoningDelta:
            return self.reasoning_delta(event)
        if type(event) is ToolCallStarted:
            return self.tool_call_started(event)
        if type(event) is ChoiceDone:
            return self.choice_done(event)
        if type(event) is Completed:
            return self.completed(event.usage)
        if type(event) is Opaque:
            return self.opaque(event)
        if type(event) is OutputIds:
            return self.output_ids(event)
        if type(event) is PromptEcho:
            return self.prompt_echo(event)
        assert isinstance(event, Started)
        return self.started(event.usage)

    def comment(self, text: str) -> bytes:
        """A comment for a client that waits. Empty without a text, or if the encoding has no comments."""
        return f": {text}\n\n".encode() if text and self.content_type == EVENT_STREAM else b""

    def started(self, usage: Usage) -> bytes:
        return b""

    def text_delta(self, event: TextDelta) -> bytes:
        raise NotImplementedError

    def reasoning_delta(self, event: ReasoningDelta) -> bytes:
        return b""

    def tool_call_started(self, event: ToolCallStarted) -> bytes:
        return b""

    def tool_call_delta(self, event: ToolCallDelta) -> bytes:
        return b""

    def opaque(self, event: Opaque) -> bytes:
        return b""

    def prompt_echo(self, event: PromptEcho) -> bytes:
        return b""

    def output_ids(self, event: OutputIds) -> bytes:
        return b""

    def choice_done(self, event: ChoiceDone) -> bytes:
        raise NotImplementedError

    def completed(self, usage: Usage) -> bytes:
        raise NotImplementedError

    def failed(self, error: EmberlineError) -> bytes:
        return data_event(error_body(error, self._dialect, self._request_id))


def data_event(body: Any) -> bytes:
    return b"data: " + encode(body) + b"\n\n"


def named_event(name: str, body: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode(body))


def random_padding() -> Iterator[bytes]:
    """Padding of random length for each event of a stream, so that packet sizes do not reveal token lengths."""
    while True:
        for byte in os.urandom(128):
            yield _PADDING[byte & 31]
