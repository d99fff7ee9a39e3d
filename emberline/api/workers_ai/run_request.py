"""Workers AI's input: what a model is run with."""

from typing import Annotated

import msgspec
from msgspec import Meta

from emberline.api.common.chat_fields import Conversation
from emberline.api.common.messages import ChatMessage, canonical
from emberline.api.common.sampling_fields import session_name
from emberline.api.http.body import UnsupportedField, unsupported
from emberline.api.http.call import Call
from emberline.protocol.errors import BadInput
from emberline.protocol.request import GenerateRequest, Message

DEFAULT_TEMPERATURE = 0.6


class RunOptions(msgspec.Struct):
    reject_if_busy: bool | None = msgspec.field(default=None, name="rejectIfBusy")
    queue_request: bool | None = msgspec.field(default=None, name="queueRequest")


class RunRequest(Conversation, kw_only=True):
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    raw: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=5)] | None = None
    top_p: Annotated[float, Meta(ge=0.001, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=1, le=50)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0, le=2)] | None = None
    options: RunOptions | None = None
    functions: UnsupportedField = None  # Cloudflare's: code to run there, not OpenAI's older tools
    requests: Annotated[list[msgspec.Raw], Meta(min_length=1)] | None = None  # for the queue, each an input
    request_id: str | None = None  # of what was queued: the call asks how far it is
    logprobs: UnsupportedField = None
    top_logprobs: UnsupportedField = None
    image: UnsupportedField = None
    audio: UnsupportedField = None

    @property
    def queued(self) -> bool:
        """Whether the body itself is about the queue."""
        wanted = self.options is not None and bool(self.options.queue_request)
        return wanted or self.requests is not None or self.request_id is not None

    def to_request(self, call: Call, model: str) -> GenerateRequest:
        agency = self.agency(call)
        if self.n not in (None, 1):
            raise unsupported("n")
        messages, prompt = self._input()
        return GenerateRequest(
            id=call.id,
            model=model,
            messages=messages,
            prompt=prompt,
            sampling=self.sampling(DEFAULT_TEMPERATURE),
            session=session_name(call, self.prompt_cache_key, self.user),
            priority=self.priority,
            reject_if_busy=self.rejects_waiting or bool(self.options and self.options.reject_if_busy),
            **agency,
        )

    def _input(self) -> tuple[tuple[Message, ...] | None, str | None]:
        """A prompt is the user's first message, unless `raw` says that it has been through a template already."""
        if (self.prompt is None) == (self.messages is None):
            raise BadInput("exactly one of `prompt` and `messages` is needed", param="prompt")
        if self.messages is not None:
            if self.raw:
                raise BadInput("`raw` needs `prompt`: messages always go through the chat template", param="raw")
            return canonical(self.messages), None
        if self.raw:
            if self.tools:
                raise BadInput("`tools` need the chat template, which `raw` leaves out", param="tools")
            return None, self.prompt
        return (Message("user", self.prompt or ""),), None


class UniversalRequest(msgspec.Struct):
    model: str
    input: RunRequest
