"""OpenAI's chat completions: the body and the answer."""

from typing import Annotated, Any

from msgspec import Meta

from emberline.api.common.answer import usage_body
from emberline.api.common.chat_fields import Conversation
from emberline.api.common.messages import ChatMessage, canonical
from emberline.api.common.sampling_fields import session_name
from emberline.api.common.tools import FunctionName, FunctionPick, Functions, Toolset, functions_as_tools
from emberline.api.http.body import UnsupportedField
from emberline.api.http.call import Call
from emberline.api.openai.chunk_stream import ChunkStream, StreamOptions
from emberline.protocol.answer import Answer, AnswerChoice
from emberline.protocol.errors import BadInput
from emberline.protocol.events import ChoiceDone, ReasoningDelta, TextDelta, TextLogprob, ToolCallDelta, ToolCallStarted
from emberline.protocol.request import GenerateRequest

LEAST_LOGPROB = -9999.0  # JSON has no -inf; OpenAI's own stand-in


class ChatRequest(Conversation, kw_only=True):
    model: str
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    functions: Functions | None = None
    function_call: FunctionPick | None = None
    audio: UnsupportedField = None
    web_search_options: UnsupportedField = None

    @property
    def legacy(self) -> bool:
        """Whether the caller knows functions, and not yet tools."""
        return bool(self.functions)

    def toolset(self) -> Toolset:
        if not self.functions:
            if isinstance(self.function_call, FunctionName):
                raise BadInput("`function_call` names a function, and there are no `functions`", param="function_call")
            return super().toolset()
        if self.tools:
            raise BadInput("`functions` is the older name of `tools`; send one of them", param="functions")
        return functions_as_tools(self.functions, self.function_call)

    def to_request(self, call: Call) -> GenerateRequest:
        if self.top_logprobs and not self.logprobs:
            raise BadInput("`top_logprobs` needs `logprobs: true`", param="top_logprobs")
        agency = self.agency(call)
        if self.legacy:
            agency["parallel_tool_calls"] = False
        return GenerateRequest(
            id=call.id,
            model=self.model,
            messages=canonical(self.messages),
            sampling=self.sampling(1.0, (self.top_logprobs or 0) if self.logprobs else None),
            n=self.n or 1,
            session=session_name(call, self.prompt_cache_key, self.user),
            priority=self.priority,
            reject_if_busy=self.rejects_waiting,
            **agency,
        )


def chat_body(call: Call, body: ChatRequest, created: int, answer: Answer) -> dict[str, Any]:
    whole = {
        "id": f"chatcmpl-{call.id}",
        "object": "chat.completion",
        "created": created,
        "model": body.model,
        "choices": [_choice(index, choice, body) for index, choice in enumerate(answer.choices)],
        "usage": usage_body(answer.usage),
    }
    return whole | body.tier_echo


def _choice(index: int, choice: AnswerChoice, body: ChatRequest) -> dict[str, Any]:
    return {
        "index": index,
        "message": _message(choice, body),
        "logprobs": logprobs_body(choice.logprobs) if body.logprobs else None,
        "finish_reason": "function_call" if body.legacy and choice.finish == "tool_calls" else choice.finish,
    }


def _message(choice: AnswerChoice, body: ChatRequest) -> dict[str, Any]:
    reasoning = "" if body.hides_reasoning else choice.reasoning
    content = choice.text if choice.text or not (reasoning or choice.tool_calls) else None
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    functions = [{"name": call.name, "arguments": call.arguments} for call in choice.tool_calls]
    if functions and body.legacy:
        message["function_call"] = functions[0]
    elif functions:
        ids = [call.id for call in choice.tool_calls]
        calls = zip(ids, functions, strict=True)
        message["tool_calls"] = [{"id": id, "type": "function", "function": function} for id, function in calls]
    return message


def logprobs_body(tokens: list[TextLogprob]) -> dict[str, Any]:
    content = [{**_token(token), "top_logprobs": [_token(other) for other in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


def _token(token: TextLogprob) -> dict[str, Any]:
    return {"token": token.token, "logprob": max(token.logprob, LEAST_LOGPROB), "bytes": token.bytes}


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
