"""The stream of chunks that OpenAI's chat and text completions share."""

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from emberline.api.common.answer import usage_body
from emberline.api.http.call import Call, encode
from emberline.api.http.errors import error_body
from emberline.api.http.sse import pads
from emberline.protocol.errors import EmberlineError
from emberline.protocol.events import (
    ChoiceDone,
    ReasoningDelta,
    TextDelta,
    TextLogprob,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)

_CONTINUES = b',"finish_reason":null}]'
_END = b"}\n\n"


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ChunkStream:
    """Everything of a chunk but its text is made once per stream: a chunk costs one small encode and a join."""

    before_text: ClassVar[bytes]  # between a choice's index and its text
    after_text: ClassVar[bytes]
    last: ClassVar[bytes]  # what a choice's last chunk has in place of text

    def __init__(self, call: Call, head: Mapping[str, Any], n_choices: int, options: StreamOptions | None) -> None:
        self._call = call
        self._head = b"data: " + encode(head)[:-1] + b',"choices":['
        self._choices = [self._head + b'{"index":%d,' % index for index in range(n_choices)]
        self._prefixes = [choice + self.before_text for choice in self._choices]
        self._suffix = self.after_text + b',"logprobs":null' + _CONTINUES + _END
        options = options or StreamOptions()
        self._with_usage = bool(options.include_usage)
        self._pads = pads() if options.include_obfuscation else None

    def logprobs(self, index: int, tokens: list[TextLogprob]) -> dict[str, Any]:
        """The `logprobs` object of one chunk."""
        raise AssertionError("each dialect has its own")

    def finish_reason(self, event: ChoiceDone) -> str:
        return event.finish

    def started(self, usage: Usage) -> bytes:
        return b""

    def delta(self, event: TextDelta) -> bytes:
        if event.logprobs is None and self._pads is None:
            return self._prefixes[event.index] + encode(event.text) + self._suffix
        found = b"null" if event.logprobs is None else encode(self.logprobs(event.index, event.logprobs))
        text = self._prefixes[event.index] + encode(event.text) + self.after_text
        return text + b',"logprobs":' + found + _CONTINUES + self._pad() + _END

    def reasoning(self, event: ReasoningDelta) -> bytes:
        return b""

    def call_started(self, event: ToolCallStarted) -> bytes:
        return b""

    def call_delta(self, event: ToolCallDelta) -> bytes:
        return b""

    def done(self, event: ChoiceDone) -> bytes:
        finish = self.last + b',"logprobs":null,"finish_reason":"' + self.finish_reason(event).encode() + b'"}]'
        return self._choices[event.index] + finish + _END

    def completed(self, usage: Usage) -> bytes:
        if not self._with_usage:
            return b"data: [DONE]\n\n"
        return self._head + b'],"usage":' + encode(usage_body(usage)) + _END + b"data: [DONE]\n\n"

    def failed(self, error: EmberlineError) -> bytes:
        """No [DONE] follows: a stream that broke must not look whole."""
        return b"data: " + encode(error_body(error, self._call.dialect, self._call.id)) + b"\n\n"

    def _chunk(self, index: int, delta: dict[str, Any]) -> bytes:
        """A chunk of anything but text."""
        return b"".join(
            (self._choices[index], b'"delta":', encode(delta), b',"logprobs":null', _CONTINUES, self._pad(), _END)
        )

    def _pad(self) -> bytes:
        return b"" if self._pads is None else b',"obfuscation":"' + next(self._pads) + b'"'
