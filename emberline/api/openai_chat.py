"""OpenAI's chat completions: the body, the answer, the chunks."""

from typing import Annotated, Any

from msgspec import Meta

from emberline.api.call import Call
from emberline.api.collect import Answer, Choice
from emberline.api.fields import Generation, Unbuilt, session_name
from emberline.api.messages import ChatMessage, canonical
from emberline.api.openai_stream import ChunkStream, StreamOptions
from emberline.api.usage import usage_body
from emberline.protocol.errors import BadInput
from emberline.protocol.events import TextLogprob, Usage
from emberline.protocol.request import GenerateRequest

LEAST_LOGPROB = -9999.0  # JSON has no -inf; OpenAI's own stand-in


class ChatRequest(Generation, kw_only=True):
    model: str
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    audio: Unbuilt = None
    web_search_options: Unbuilt = None

    def to_request(self, call: Call) -> GenerateRequest:
        self.check()
        if self.top_logprobs and not self.logprobs:
            raise BadInput("`top_logprobs` needs `logprobs: true`", param="top_logprobs")
        return GenerateRequest(
            id=call.id,
            model=self.model,
            messages=canonical(self.messages),
            sampling=self.sampling(1.0, (self.top_logprobs or 0) if self.logprobs else None),
            n=self.n or 1,
            session=session_name(call, self.prompt_cache_key, self.user),
            priority=self.priority,
            template_kwargs=self.template_kwargs,
        )


def chat_body(call: Call, body: ChatRequest, created: int, answer: Answer) -> dict[str, Any]:
    whole = {
        "id": f"chatcmpl-{call.id}",
        "object": "chat.completion",
        "created": created,
        "model": body.model,
        "choices": [_choice(index, choice, bool(body.logprobs)) for index, choice in enumerate(answer.choices)],
        "usage": usage_body(answer.usage),
    }
    return whole | body.tier_echo


def _choice(index: int, choice: Choice, with_logprobs: bool) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": _logprobs(choice.logprobs) if with_logprobs else None,
        "finish_reason": choice.finish,
    }


def _logprobs(tokens: list[TextLogprob]) -> dict[str, Any]:
    content = [{**_token(token), "top_logprobs": [_token(other) for other in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


def _token(token: TextLogprob) -> dict[str, Any]:
    return {"token": token.token, "logprob": max(token.logprob, LEAST_LOGPROB), "bytes": token.bytes}


class ChatStream(ChunkStream):
    """A choice's first chunk says its role, its last why it ended."""

    before_text = b'"delta":{"content":'
    after_text = b"}"
    last = b'"delta":{}'

    def __init__(self, call: Call, body: ChatRequest, created: int) -> None:
        head = {"id": f"chatcmpl-{call.id}", "object": "chat.completion.chunk", "created": created, "model": body.model}
        super().__init__(call, head | body.tier_echo, body.n or 1, body.stream_options)

    def logprobs(self, index: int, tokens: list[TextLogprob]) -> dict[str, Any]:
        return _logprobs(tokens)

    def started(self, usage: Usage) -> bytes:
        role = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
        return b"".join(choice + role for choice in self._choices)
