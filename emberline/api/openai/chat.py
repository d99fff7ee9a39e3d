"""OpenAI's chat completions: the request body, the response body and the stream of chunks."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from emberline.api.common.chat_fields import ChatFields
from emberline.api.common.chat_messages import AnyMessage, ChatMessage, canonical_messages
from emberline.api.common.prompt_body import prompt_logprobs_body
from emberline.api.common.response_body import logprobs_body, usage_body
from emberline.api.common.response_format import RequestedFormat
from emberline.api.common.sampling_fields import ModelName, SpeculationField, TopLogprobs, required_model
from emberline.api.common.tools import (
    DeclaredFunction,
    DeclaredFunctions,
    DeclaredTool,
    FunctionCallField,
    FunctionName,
    Toolset,
    functions_toolset,
    provider_toolset,
)
from emberline.api.http.errors import Dialect, FieldNames
from emberline.api.http.exchange import encode
from emberline.api.openai.chunk_stream import (
    END,
    ChunkStream,
    StreamOptions,
    UsageOptions,
    check_streaming,
    wants_ids,
)
from emberline.protocol.complete_response import Answer, AnswerChoice
from emberline.protocol.errors import BadInput
from emberline.protocol.events import (
    ChoiceDone,
    Opaque,
    PromptEcho,
    ReasoningDelta,
    TextDelta,
    TextLogprob,
    ToolCallDelta,
    ToolCallStarted,
)
from emberline.protocol.request import GenerateRequest, OutputFormat, session_name
from emberline.protocol.token_ids import unpack


class ChatRequest(ChatFields, kw_only=True):
    model: ModelName = ""
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    stream_options: StreamOptions | None = None
    usage: UsageOptions | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    prompt_logprobs: TopLogprobs | None = None
    return_token_ids: bool | None = None
    functions: DeclaredFunctions | None = None
    function_call: FunctionCallField | None = None

    @property
    def uses_functions(self) -> bool:
        """True if the client uses the deprecated `functions` instead of `tools`."""
        return bool(self.functions)

    def toolset(self) -> Toolset:
        if not self.functions:
            if isinstance(self.function_call, FunctionName):
                raise BadInput("`function_call` names a function, and there are no `functions`", param="function_call")
            return super().toolset()
        if self.tools:
            raise BadInput("`functions` is the older name of `tools`; send one of them", param="functions")
        return functions_toolset(self.functions, self.function_call)

    def to_request(
        self, request_id: str, session: str | None = None, takes_media: bool = False
    ) -> tuple[GenerateRequest, FieldNames]:
        """The canonical request; `session` is the session id from the headers. Refuses media unless `takes_media`."""
        if self.top_logprobs and not self.logprobs:
            raise BadInput("`top_logprobs` needs `logprobs: true`", param="top_logprobs")
        if self.stream_options is not None or self.prompt_logprobs is not None:
            check_streaming(self)
        sampling = self.sampling(1.0, (self.top_logprobs or 0) if self.logprobs else None)
        if self.prompt_logprobs is not None:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=self.prompt_logprobs)
        fields, names = self.chat_request_fields()
        if self.uses_functions:
            fields["parallel_tool_calls"] = False
        request = GenerateRequest(
            api="chat",
            id=request_id,
            model=self.model or required_model(self.model),
            messages=canonical_messages(self.messages, takes_media),
            sampling=sampling,
            left_to_model=self.left_to_model,
            n=self.n or 1,
            session=session_name(session, self.prompt_cache_key, self.user),
            cache_ttl_s=self.cache_ttl_s,
            priority=self.priority_class,
            reject_if_busy=self.reject_if_busy,
            speculation=SpeculationField.setting(self.speculation),
            return_ids=wants_ids(self),
            **fields,
        )
        return request, names


class _AnyFunction(DeclaredFunction):
    name: str


class _AnyTool(DeclaredTool, kw_only=True):
    function: _AnyFunction | None = None
    name: str | None = None


class AnyChatRequest(ChatRequest, kw_only=True):
    """A chat for a provider, who checks it: any number of tools, with any names and also without a schema."""

    messages: list[AnyMessage]  # type: ignore[assignment]
    tools: list[_AnyTool] | None = None  # type: ignore[assignment]
    options: Any = None  # for this server

    def toolset(self) -> Toolset:
        return provider_toolset(self.tools, self.tool_choice)

    def output(self) -> RequestedFormat:
        found, given = super().output(), self.response_format
        if given is not None and given.type == "json_schema" and found.format == OutputFormat("json_object"):
            return RequestedFormat(OutputFormat("json_schema", {}), found.field)
        return found


def chat_body(request_id: str, body: ChatRequest, created: int, answer: Answer) -> dict[str, Any]:
    head = _head(request_id, "chat.completion", created, body)
    choices = [_choice(index, choice, body) for index, choice in enumerate(answer.choices)]
    made = head | {"choices": choices, "usage": usage_body(answer.usage)}
    if answer.choices and (prompt := answer.choices[0].prompt) is not None:
        if body.prompt_logprobs is not None:
            made["prompt_logprobs"] = prompt_logprobs_body(prompt, body.prompt_logprobs)
        if body.return_token_ids:
            made["prompt_token_ids"] = unpack(prompt.ids)
    return made


def _head(request_id: str, kind: str, created: int, body: ChatRequest) -> dict[str, Any]:
    head = {"id": f"chatcmpl-{request_id}", "object": kind, "created": created, "model": body.model}
    return head | body.tier_echo


def _choice(index: int, choice: AnswerChoice, body: ChatRequest) -> dict[str, Any]:
    return {
        "index": index,
        "message": _message(choice, body),
        "logprobs": logprobs_body(choice.logprobs) if body.logprobs else None,
        "finish_reason": "function_call" if body.uses_functions and choice.finish == "tool_calls" else choice.finish,
        **({"token_ids": unpack(choice.token_ids)} if body.return_token_ids else {}),
    }


def _message(choice: AnswerChoice, body: ChatRequest) -> dict[str, Any]:
    reasoning = "" if body.hides_reasoning else choice.reasoning
    content = choice.text if choice.text or not (reasoning or choice.tool_calls) else None
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    calls = [(call, {"name": call.name, "arguments": call.arguments}) for call in choice.tool_calls]
    if calls and body.uses_functions:
        message["function_call"] = calls[0][1]
    elif calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": function} | call.marks for call, function in calls
        ]
    return message if body.hides_reasoning else message | choice.marks


class ChatStream(ChunkStream):
    """A choice's first chunk has its role, its last one the finish reason. Content is null until there is text."""

    before_text = b'"delta":{"content":'
    after_text = b"}"
    last = b'"delta":{}'

    def __init__(self, request_id: str, dialect: Dialect, body: ChatRequest, created: int) -> None:
        head = _head(request_id, "chat.completion.chunk", created, body)
        n_choices = body.n or 1
        super().__init__(request_id, dialect, head, n_choices, body.stream_options, bool(body.return_token_ids))
        self._opened = [False] * n_choices
        self._hides_reasoning = body.hides_reasoning
        self._uses_functions = body.uses_functions

    def logprobs(self, index: int, tokens: list[TextLogprob]) -> dict[str, Any]:
        return logprobs_body(tokens)

    def finish_reason(self, event: ChoiceDone) -> str:
        return "function_call" if self._uses_functions and event.finish == "tool_calls" else event.finish

    def text_delta(self, event: TextDelta) -> bytes:
        if self._opened[event.index]:
            return super().text_delta(event)
        return self._open(event.index, "" if event.text else None) + super().text_delta(event)

    def reasoning_delta(self, event: ReasoningDelta) -> bytes:
        if self._hides_reasoning:
            return b""
        return self._open(event.index) + self._delta_chunk(event.index, {"reasoning_content": event.text})

    def tool_call_started(self, event: ToolCallStarted) -> bytes:
        function = {"name": event.name, "arguments": ""}
        call = {"index": event.call, "id": event.id, "type": "function", "function": function}
        return self._open(event.index) + self._call_chunk(event.index, event.call, call)

    def tool_call_delta(self, event: ToolCallDelta) -> bytes:
        call = {"index": event.call, "function": {"arguments": event.arguments}}
        return self._call_chunk(event.index, event.call, call)

    def opaque(self, event: Opaque) -> bytes:
        """A mark of a call comes with its index. Those of the message are thinking."""
        if event.call is not None:
            return self._call_chunk(event.index, event.call, {"index": event.call, event.name: event.value})
        if self._hides_reasoning:
            return b""
        return self._open(event.index) + self._delta_chunk(event.index, {event.name: event.value})

    def choice_done(self, event: ChoiceDone) -> bytes:
        return self._open(event.index, "") + super().choice_done(event)

    def prompt_echo(self, event: PromptEcho) -> bytes:
        """A first chunk with the token ids of the prompt, if they are wanted."""
        super().prompt_echo(event)
        if not self._returns_ids or event.index:
            return b""
        ids = b',"prompt_token_ids":' + encode(unpack(event.prompt.ids))
        return self._open(0).removesuffix(END) + ids + END

    def _open(self, index: int, content: str | None = None) -> bytes:
        if self._opened[index]:
            return b""
        self._opened[index] = True
        return self._delta_chunk(index, {"role": "assistant", "content": content})

    def _call_chunk(self, index: int, number: int, call: dict[str, Any]) -> bytes:
        if not self._uses_functions:
            return self._delta_chunk(index, {"tool_calls": [call]})
        # `function_call` holds one call, without marks.
        if number or "function" not in call:
            return b""
        return self._delta_chunk(index, {"function_call": call["function"]})
