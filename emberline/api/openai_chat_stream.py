"""The chunks of a chat completion."""

from typing import Any

from emberline.api.call import Call
from emberline.api.openai_chat import ChatRequest, logprobs_body
from emberline.api.openai_stream import ChunkStream
from emberline.protocol.events import ChoiceDone, ReasoningDelta, TextDelta, TextLogprob, ToolCallDelta, ToolCallStarted


class ChatStream(ChunkStream):
    """A choice's first chunk says its role, its last why it ended. Content is null until there is text."""

    before_text = b'"delta":{"content":'
    after_text = b"}"
    last = b'"delta":{}'

    def __init__(self, call: Call, body: ChatRequest, created: int) -> None:
        head = {"id": f"chatcmpl-{call.id}", "object": "chat.completion.chunk", "created": created, "model": body.model}
        super().__init__(call, head | body.tier_echo, body.n or 1, body.stream_options)
        self._begun = [False] * (body.n or 1)
        self._hides_reasoning = body.hides_reasoning
        self._legacy = body.legacy

    def logprobs(self, index: int, tokens: list[TextLogprob]) -> dict[str, Any]:
        return logprobs_body(tokens)

    def finish_reason(self, event: ChoiceDone) -> str:
        return "function_call" if self._legacy and event.finish == "tool_calls" else event.finish

    def delta(self, event: TextDelta) -> bytes:
        if self._begun[event.index]:
            return super().delta(event)
        return self._begin(event.index, "" if event.text else None) + super().delta(event)

    def reasoning(self, event: ReasoningDelta) -> bytes:
        if self._hides_reasoning:
            return b""
        return self._begin(event.index) + self._chunk(event.index, {"reasoning_content": event.text})

    def call_started(self, event: ToolCallStarted) -> bytes:
        function = {"name": event.name, "arguments": ""}
        if self._legacy:
            return self._begin(event.index) + self._function(event.index, event.call, function)
        called = {"index": event.call, "id": event.id, "type": "function", "function": function}
        return self._begin(event.index) + self._chunk(event.index, {"tool_calls": [called]})

    def call_delta(self, event: ToolCallDelta) -> bytes:
        function = {"arguments": event.arguments}
        if self._legacy:
            return self._function(event.index, event.call, function)
        return self._chunk(event.index, {"tool_calls": [{"index": event.call, "function": function}]})

    def done(self, event: ChoiceDone) -> bytes:
        return self._begin(event.index, "") + super().done(event)

    def _begin(self, index: int, content: str | None = None) -> bytes:
        if self._begun[index]:
            return b""
        self._begun[index] = True
        return self._chunk(index, {"role": "assistant", "content": content})

    def _function(self, index: int, call: int, function: dict[str, str]) -> bytes:
        """The older form has room for one call."""
        return b"" if call else self._chunk(index, {"function_call": function})
