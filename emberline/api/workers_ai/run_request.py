"""The input of a Workers AI model, and its conversion to the canonical request."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from emberline.api.common.chat_fields import ChatFields
from emberline.api.common.chat_messages import ChatMessage, canonical_messages
from emberline.api.common.image_parts import image_from_array
from emberline.api.common.sampling_fields import SpeculationField
from emberline.api.common.unsupported_fields import UnsupportedField, unsupported
from emberline.api.http.errors import FieldNames
from emberline.protocol.errors import BadInput
from emberline.protocol.gateway import GatewayOptions
from emberline.protocol.request import GenerateRequest, Message, session_name
from emberline.service.validation import MAX_REPETITION_PENALTY, MAX_TEMPERATURE

DEFAULT_TEMPERATURE = 0.6


_BYTES = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 255}}
ImageField = Annotated[msgspec.Raw, Meta(extra_json_schema={"anyOf": [{"type": "string"}, _BYTES]})]


class RunOptions(msgspec.Struct):
    reject_if_busy: bool | None = msgspec.field(default=None, name="rejectIfBusy")
    queue_request: bool | None = msgspec.field(default=None, name="queueRequest")
    gateway: GatewayOptions | None = None


def read_options(given: Any) -> RunOptions:
    """The `options` of a decoded body; None: it has none. Raises BadInput."""
    try:
        return RunOptions() if given is None else msgspec.convert(given, RunOptions)
    except msgspec.ValidationError as error:
        raise BadInput(f"`options` cannot be read: {error}", param="options") from None


class RunRequest(ChatFields, kw_only=True):
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    raw: bool | None = None
    image: ImageField = msgspec.field(default_factory=msgspec.Raw)  # of the prompt, or of the user's last message
    # The ranges that Cloudflare documents.
    temperature: Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Meta(ge=0.001, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=1, le=50)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0, le=MAX_REPETITION_PENALTY)] | None = None
    options: RunOptions | None = None
    functions: UnsupportedField = None  # code that Cloudflare would run, not OpenAI's older name of tools
    requests: Annotated[list[msgspec.Raw], Meta(min_length=1)] | None = None  # inputs for the queue
    request_id: str | None = None  # of queued inputs: asks for their status
    logprobs: UnsupportedField = None
    top_logprobs: UnsupportedField = None

    @property
    def for_queue(self) -> bool:
        """True if the body submits to the queue or polls it."""
        queued = self.options is not None and bool(self.options.queue_request)
        return queued or self.requests is not None or self.request_id is not None

    @property
    def has_image(self) -> bool:
        return bytes(self.image) not in (b"", b"null", b'""', b"[]")

    def to_request(self, request_id: str, session: str | None, model: str) -> tuple[GenerateRequest, FieldNames]:
        """Make the canonical request. `session` is the session id from the headers, `model` is named by the path."""
        fields, names = self.chat_request_fields()
        if self.n not in (None, 1):
            raise unsupported("n")
        messages, prompt = self._input()
        if self.has_image and messages is not None:
            names = replace(names, parts=self._part_fields(messages))
        request = GenerateRequest(
            api="run",
            id=request_id,
            model=model,
            messages=messages,
            prompt=prompt,
            sampling=self.sampling(DEFAULT_TEMPERATURE),
            left_to_model=self.left_to_model,
            session=session_name(session, self.prompt_cache_key, self.user),
            cache_ttl_s=self.cache_ttl_s,
            priority=self.priority_class,
            reject_if_busy=self.reject_if_busy or bool(self.options and self.options.reject_if_busy),
            speculation=SpeculationField.setting(self.speculation),
            **fields,
        )
        return request, names

    def _input(self) -> tuple[tuple[Message, ...] | None, str | None]:
        """A prompt becomes the first message of the user, unless `raw` says that no chat template applies to it."""
        if (self.prompt is None) == (self.messages is None):
            raise BadInput("exactly one of `prompt` and `messages` is needed", param="prompt")
        if self.messages is not None:
            if self.raw:
                raise BadInput("`raw` needs `prompt`: messages always go through the chat template", param="raw")
            return self._with_image(canonical_messages(self.messages)), None
        if self.raw:
            for name, is_given in (("tools", bool(self.tools)), ("image", self.has_image)):
                if is_given:
                    raise BadInput(f"`{name}` needs the chat template, which `raw` leaves out", param=name)
            return None, self.prompt
        return self._with_image((Message("user", self.prompt or ""),)), None

    def _with_image(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """The messages with `image`, if there is one, at the beginning of the user's last."""
        if not self.has_image:
            return messages
        image = image_from_array(self.image, "image")
        at = _last_of_user(messages)
        if at < 0:
            raise BadInput("`image` needs a message of the user", param="image")
        asked = msgspec.structs.replace(messages[at], parts=(image, *messages[at].content_parts))
        return (*messages[:at], asked, *messages[at + 1 :])

    def _part_fields(self, messages: Sequence[Message]) -> dict[int, list[str]]:
        """The fields of the parts of the message that has `image` before its own parts."""
        at = _last_of_user(messages)
        own = [f"messages[{at}].content[{number}]" for number in range(len(messages[at].parts) - 1)]
        return {at: ["image", *(own if self.prompt is None else ["prompt"])]}


def _last_of_user(messages: Sequence[Message]) -> int:
    """Number of the user's last message; -1 if there is none."""
    return max((at for at, message in enumerate(messages) if message.role == "user"), default=-1)


class UniversalRequest(msgspec.Struct):
    model: str
    input: RunRequest
