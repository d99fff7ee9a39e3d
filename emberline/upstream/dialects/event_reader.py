"""Streams of providers whose API is not OpenAI's: read as text events, and these written as OpenAI's chunks."""

import time
import uuid
from collections.abc import Callable
from typing import Any

import msgspec

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
from emberline.upstream.dialects.sse import MAX_LINE_BYTES, MalformedLine, encode

Json = dict[str, Any]
ChoiceEvent = TextDelta | ReasoningDelta | ToolCallStarted | ToolCallDelta | Opaque | ChoiceDone
MAX_CALLS = 128
_MORE = b',"finish_reason":null}]}\n\n'


class EventParser:
    """Cuts a stream into the data of its events. What is not whole at the end is not an event."""

    def __init__(self) -> None:
        self._tail: list[bytes] = []  # the pieces of a line that has not ended yet
        self._n_tail_bytes = 0

    def feed(self, data: bytes) -> list[bytes]:
        cut = data.rfind(b"\n") + 1
        lines: list[bytes] = []
        if cut:
            lines = b"".join((*self._tail, data[:cut])).split(b"\n")
            self._tail, self._n_tail_bytes = [], 0
        if cut < len(data):
            self._tail.append(data[cut:])
            self._n_tail_bytes += len(data) - cut
            if self._n_tail_bytes > MAX_LINE_BYTES:
                raise MalformedLine(f"a line of more than {MAX_LINE_BYTES >> 20} MiB")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class EventReader:
    """Reads the stream of one attempt as text events: to the transport what `StreamEditor` is, which edits lines.

    A subclass reads the provider's events. It raises MalformedLine for what no client could read, which blames the
    provider, and StreamError for an error that the provider reports.
    """

    cached: int | None = None  # see StreamEditor: no provider's request is disaggregated
    whole_calls = False  # True if the provider sends a tool call in one event

    def __init__(self, input_tokens: int, n: int = 1) -> None:
        """`input_tokens` is the estimate that Started tells: the provider counts at the end."""
        self.adjust: Callable[[Json], None] | None = None
        self.ended = False  # nothing follows
        self.n_events = 0  # in the piece read last
        self.reply_id = self.reply_model = ""  # the provider's, once they are known
        self.written_tokens = 0  # to the provider's cache; known with the usage
        self._input_tokens = input_tokens
        self._n = n
        self._parser = EventParser()
        self._began = False
        self._begun: set[int] = set()  # choices that have begun, without a finish reason yet,
        self._done: set[int] = set()  # and those with one
        self._n_calls: dict[int, int] = {}  # by choice

    @property
    def finished(self) -> bool:
        """True if every choice that has begun has its finish reason."""
        return bool(self._done) and not self._begun

    @property
    def usage(self) -> Usage | None:
        """The usage of a finished reply; None until then."""
        return self._usage() if self.finished else None

    def feed(self, piece: bytes) -> list[TextEvent]:
        """Returns the events that are complete now. An empty piece ends the stream."""
        events: list[TextEvent] = []
        for data in self._parser.feed(piece):
            if data:
                self._read(data, events)
        if events and not self._began:
            self._began = True
            events.insert(0, Started(Usage(prompt_tokens=self._input_tokens)))
        self.n_events = len(events)
        return events

    def needs_cached(self, piece: bytes) -> bool:
        return False

    def closing(self) -> list[TextEvent]:
        """Returns no events: what ends a reply for its client is not part of it. Raises MalformedLine if a choice is
        missing."""
        if len(self._done) < self._n:
            raise MalformedLine("a reply without a finish reason")
        return []

    def whole_lines(self, body: bytes) -> bytes:
        """The stream that a provider would have sent, whose reply is JSON instead. Raises MalformedLine."""
        raise NotImplementedError

    def _read(self, data: bytes, events: list[TextEvent]) -> None:
        """Add the events of one event of the provider's."""
        raise NotImplementedError

    def _usage(self) -> Usage:
        raise NotImplementedError

    @staticmethod
    def _decoded(data: bytes, decoder: msgspec.json.Decoder[Any]) -> Any:
        try:
            return decoder.decode(data)
        except (msgspec.DecodeError, RecursionError) as error:
            raise MalformedLine(f"an event that cannot be read: {error}") from None

    def _begin(self, events: list[TextEvent], reply_id: str, model: str) -> None:
        if not self._began:
            self._began, self.reply_id, self.reply_model = True, reply_id, model
            events.append(Started(Usage(prompt_tokens=self._input_tokens)))

    def _finish(self, events: list[TextEvent], done: ChoiceDone) -> None:
        if self._n_calls.get(done.index) and done.finish == "stop":
            done = ChoiceDone(done.index, "tool_calls")
        self._begun.discard(done.index)
        self._done.add(done.index)
        events.append(done)

    def _next_call(self, index: int) -> int:
        """Count a tool call of a choice, and return its number."""
        number = self._n_calls.get(index, 0)
        if number == MAX_CALLS:
            raise MalformedLine(f"more than {MAX_CALLS} tool calls")
        self._n_calls[index] = number + 1
        return number

    def _arguments(self, index: int, piece: str) -> ToolCallDelta:
        if not self._n_calls.get(index):
            raise MalformedLine("arguments of a tool call that it had not begun")
        return ToolCallDelta(index, self._n_calls[index] - 1, piece)


class ChunkEditor:
    """Writes the events of a reader as OpenAI's chunks, for clients that are sent those."""

    cached: int | None = None

    def __init__(self, reader: EventReader, model: str, hides_usage: bool) -> None:
        """`hides_usage`: the client has not asked for the usage."""
        self.adjust: Callable[[Json], None] | None = None  # a change to the usage that the client gets
        self._reader = reader
        self._model = model
        self._hides_usage = hides_usage
        self._created = int(time.time())
        self._roles: set[int] = set()  # choices that have begun
        self._call: Json = {}  # one that comes whole, until its arguments are known
        self._begin()

    @property
    def usage(self) -> Usage | None:
        return self._reader.usage

    @property
    def finished(self) -> bool:
        return self._reader.finished

    @property
    def ended(self) -> bool:
        return self._reader.ended

    @property
    def n_events(self) -> int:
        return self._reader.n_events

    @n_events.setter
    def n_events(self, n: int) -> None:
        self._reader.n_events = n

    def feed(self, piece: bytes) -> bytes:
        lines = b"".join([self._lines(event) for event in self._reader.feed(piece)])
        return lines + self._end() if self.ended else lines

    def needs_cached(self, piece: bytes) -> bool:
        return False

    def whole_lines(self, body: bytes) -> bytes:
        return self._reader.whole_lines(body)

    def closing(self) -> bytes:
        """Returns the lines to add if the provider closed after a complete reply, without an end of its own."""
        return b"" if self.ended else self._end()

    def _begin(self) -> None:
        reply_id, model = self._reader.reply_id or f"chatcmpl-{uuid.uuid4().hex}", self._reader.reply_model
        head = {"id": reply_id, "object": "chat.completion.chunk", "created": self._created}
        self._head = b"data: " + encode({**head, "model": model or self._model})[:-1] + b',"choices":['
        self._text = self._head + b'{"index":0,"delta":{"content":'

    def _lines(self, event: TextEvent) -> bytes:
        if type(event) is TextDelta and event.index == 0:
            return self._text + encode(event.text) + b"}" + _MORE
        if isinstance(event, Started):
            self._begin()
            return self._role(0)
        assert not isinstance(event, Completed | PromptEcho | OutputIds), "events of our own engines"
        return self._role(event.index) + self._more(event)

    def _role(self, index: int) -> bytes:
        if index in self._roles:
            return b""
        self._roles.add(index)
        return self._delta(index, {"role": "assistant", "content": ""})

    def _more(self, event: ChoiceEvent) -> bytes:
        index = event.index
        if isinstance(event, TextDelta):
            return self._delta(index, {"content": event.text})
        if isinstance(event, ReasoningDelta):
            return self._delta(index, {"reasoning_content": event.text})
        if isinstance(event, ToolCallStarted):
            function = {"name": event.name, "arguments": ""}
            call: Json = {"index": event.call, "id": event.id, "type": "function", "function": function}
            if not self._reader.whole_calls:
                return self._delta(index, {"tool_calls": [call]})
            self._call = call
        elif isinstance(event, ToolCallDelta):
            call, self._call = self._call or {"index": event.call, "function": {}}, {}
            call["function"]["arguments"] = event.arguments
            return self._delta(index, {"tool_calls": [call]})
        elif isinstance(event, ChoiceDone):
            return self._finish(event)
        elif event.call is not None:
            self._call[event.name] = event.value
        else:
            return self._delta(index, {event.name: event.value})
        return b""

    def _delta(self, index: int, delta: Json) -> bytes:
        return self._head + b'{"index":%d,"delta":' % index + encode(delta) + _MORE

    def _finish(self, done: ChoiceDone) -> bytes:
        choice: Json = {"index": done.index, "delta": {}, "finish_reason": done.finish}
        if done.stop_sequence is not None:
            choice["stop_reason"] = done.stop_sequence
        return self._head + encode(choice) + b"]}\n\n"

    def _end(self) -> bytes:
        """The usage, if the client wants it, and the end marker."""
        usage = self.usage
        if usage is None or self._hides_usage:
            return b"data: [DONE]\n\n"
        details: Json = {"cached_tokens": usage.cached_tokens}
        if self._reader.written_tokens:
            details["cache_creation_tokens"] = self._reader.written_tokens
        told: Json = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.total_tokens,
            "prompt_tokens_details": details,
        }
        if usage.reasoning_tokens:
            told["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
        if self.adjust is not None:
            self.adjust(told)
        return self._head + b'],"usage":' + encode(told) + b"}\n\ndata: [DONE]\n\n"
