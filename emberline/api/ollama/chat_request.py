"""The bodies of Ollama's requests, and their conversion to the canonical request."""

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from emberline.api.common.chat_messages import ChatMessage, ToolCallField, canonical_messages
from emberline.api.common.encoding import PeerEncodeFields
from emberline.api.common.image_parts import image_from_base64
from emberline.api.common.sampling_fields import (
    Penalty,
    Probability,
    RepetitionPenalty,
    Seed,
    StopString,
    StopStrings,
    TopK,
    TopLogprobs,
    clamp_top_p,
)
from emberline.api.common.tools import DeclaredTools, toolset
from emberline.api.common.unsupported_fields import (
    EMPTY,
    INSTEAD,
    OneField,
    OptionsFields,
    PeerMessageFields,
    UnsupportedField,
    refuse_unsupported,
)
from emberline.api.http.errors import FieldNames
from emberline.api.http.unknown_fields import UNSUPPORTED
from emberline.protocol.errors import BadInput
from emberline.protocol.request import (
    ContentPart,
    EncodeRequest,
    GenerateRequest,
    Message,
    OutputFormat,
    Reasoning,
    SamplingParams,
)
from emberline.service.validation import MAX_TEMPERATURE, MAX_TOKENS

# Ollama's own, where neither the request nor the model's publisher names one.
TEMPERATURE, TOP_K, TOP_P = 0.8, 40, 0.9
_NUMBER = r"[0-9]{1,18}(?:\.[0-9]{1,9})?"
_DURATION = rf"^-?({_NUMBER}|({_NUMBER}(ns|us|µs|ms|s|m|h)){{1,6}})$"
_PART = re.compile(rf"({_NUMBER})(ns|us|µs|ms|s|m|h|$)")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
_FOREVER_S = 1e9  # and longer

# A field of prompts alone, in a chat.
InGenerate = Annotated[Any, Meta(extra_json_schema={UNSUPPORTED: EMPTY}, extra={INSTEAD: "/api/generate"})]
KeepAlive = float | Annotated[str, Meta(pattern=_DURATION)]


class Options(msgspec.Struct, kw_only=True):
    """Ollama's parameters of a model. `num_gpu` and others that only say how a model is loaded are skipped: it runs on
    the devices that the server was started with."""

    num_ctx: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None  # tokens of prompt and reply; 0: the model's
    num_predict: Annotated[int, Meta(ge=-2, le=MAX_TOKENS)] | None = None  # 0 and less: no limit
    seed: Seed | None = None
    temperature: Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_k: TopK | None = None
    top_p: Probability | None = None
    min_p: Probability | None = None
    repeat_penalty: RepetitionPenalty | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1)] | None = None  # 0: no penalty; otherwise it is for the whole context
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stop: StopString | StopStrings | None = None
    typical_p: OneField = None
    tfs_z: OneField = None
    mirostat: UnsupportedField = None
    penalize_newline: UnsupportedField = None
    logits_all: UnsupportedField = None
    vocab_only: UnsupportedField = None
    embedding_only: UnsupportedField = None

    def sampling(self, logprobs: int | None) -> SamplingParams:
        refuse_unsupported(self, "options.")
        penalty = 1.0 if self.repeat_last_n == 0 else self.repeat_penalty or 1.0
        return SamplingParams(
            max_tokens=self.num_predict if self.num_predict and self.num_predict > 0 else None,
            temperature=TEMPERATURE if self.temperature is None else self.temperature,
            top_k=TOP_K if self.top_k is None else max(self.top_k, 0),
            top_p=TOP_P if self.top_p is None else clamp_top_p(self.top_p),
            min_p=self.min_p or 0.0,
            repetition_penalty=penalty,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            seed=self.seed,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            logprobs=logprobs,
        )

    @property
    def left_to_model(self) -> tuple[str, ...]:
        given = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        given["repetition_penalty"] = self.repeat_penalty
        return tuple(name for name, value in given.items() if value is None)


class ModelRequest:
    """Wishes that every request to a model can have. The subclasses declare the fields."""

    __slots__ = ()
    model: str
    options: Options | None
    keep_alive: KeepAlive | None

    @property
    def keep_alive_s(self) -> float | None:
        """Seconds to keep the model loaded once it is idle; -1: for ever. Returns None if the request names none."""
        alive = self.keep_alive
        if isinstance(alive, str):
            seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(alive))
            alive = -seconds if alive.startswith("-") else seconds
        return alive if alive is None or 0 <= alive < _FOREVER_S else -1.0

    @property
    def context_len(self) -> int | None:
        """Tokens that the client wants the model to take at most. Returns None if it names no number."""
        return None if self.options is None else self.options.num_ctx or None

    @property
    def unloads(self) -> bool:
        """True if the request asks to unload the model immediately."""
        return self.keep_alive_s == 0


class TextRequest(ModelRequest, OptionsFields, kw_only=True):
    """The fields that chat and generate share."""

    model: str
    options: Options | None = None
    keep_alive: KeepAlive | None = None
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    template: UnsupportedField = None
    truncate: bool | None = None  # false: a prompt that does not fit is refused, not cut
    shift: bool | None = None

    @property
    def streams(self) -> bool:
        return self.stream is not False

    def fields(self, request_id: str, session: str | None) -> dict[str, Any]:
        refuse_unsupported(self)
        options = self.options or Options()
        effort = self.think if isinstance(self.think, str) else None
        return {
            "api": "ollama",
            "id": request_id,
            "sampling": options.sampling((self.top_logprobs or 0) if self.logprobs else None),
            "left_to_model": options.left_to_model,
            "session": session,
            "context_len": options.num_ctx or None,
            "truncate": self.truncate is not False,
            "output": self._output(),
            "reasoning": Reasoning(None if self.think is None else bool(self.think), effort, is_required=True),
        }

    def _output(self) -> OutputFormat | None:
        if isinstance(self.format, dict):
            return OutputFormat("json_schema", self.format)
        return OutputFormat("json_object") if self.format else None


class OllamaMessage(PeerMessageFields, kw_only=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[ToolCallField] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    function_call: UnsupportedField = None

    def chat_message(self, field: str) -> ChatMessage:
        if self.prefix or self.function_call:
            refuse_unsupported(self, f"{field}.")
        return ChatMessage(
            role=self.role,
            content=self.content,
            name=self.tool_name,
            tool_calls=self.tool_calls,
            tool_call_id=self.tool_call_id,
            reasoning_content=self.thinking,
        )


class OllamaChat(TextRequest, kw_only=True):
    messages: list[OllamaMessage] | None = None
    tools: DeclaredTools | None = None
    raw: InGenerate = None
    suffix: InGenerate = None
    context: InGenerate = None

    @property
    def is_empty(self) -> bool:
        """True if there are no messages: the request is for the model itself, to load or unload it."""
        return not self.messages

    def to_request(self, model: str, request_id: str, session: str | None) -> tuple[GenerateRequest, FieldNames]:
        found = toolset(self.tools, None)
        given = self.messages or []
        messages = canonical_messages([message.chat_message(f"messages[{i}]") for i, message in enumerate(given)])
        request = GenerateRequest(
            model=model,
            messages=tuple(
                _with_images(message, body.images, f"messages[{i}].images")
                for i, (message, body) in enumerate(zip(messages, given, strict=True))
            ),
            tools=found.tools,
            tool_choice=found.choice,
            **self.fields(request_id, session),
        )
        parts = {i: _image_fields(body.images, f"messages[{i}].images") for i, body in enumerate(given) if body.images}
        return request, FieldNames(output="format", tools=found.fields, parts=parts)


class OllamaPrompt(TextRequest, kw_only=True):
    """The body of `/api/generate`."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[str] | None = None
    suffix: str | None = None  # the reply is what stands between the prompt and this text
    context: list[int] | None = None  # of an earlier reply
    width: UnsupportedField = None
    height: UnsupportedField = None
    steps: UnsupportedField = None

    @property
    def is_empty(self) -> bool:
        return not (self.prompt or self.suffix)

    def to_request(self, model: str, request_id: str, session: str | None) -> tuple[GenerateRequest, FieldNames]:
        prompt, names = self.prompt or "", FieldNames(output="format")
        fields = self.fields(request_id, session)
        if self.raw or self.suffix:
            plain = "suffix" if self.suffix else "raw"
            for name in ("images", "system"):
                if getattr(self, name):
                    raise BadInput(f"`{name}` needs the chat template, which `{plain}` leaves out", param=name)
            if self.suffix and self.context:
                raise BadInput("`context` continues a conversation, which `suffix` leaves out", param="context")
            if self.suffix:
                fields["truncate"] = False  # the end of such a prompt alone means nothing
            return GenerateRequest(model=model, prompt=prompt, suffix=self.suffix or None, **fields), names
        system = (Message("system", self.system),) if self.system else ()
        question = _with_images(Message("user", prompt), self.images, "images")
        if self.images:
            names = FieldNames(output="format", parts={len(system): _image_fields(self.images, "images")})
        return GenerateRequest(model=model, messages=(*system, question), **fields), names


class OllamaEmbed(ModelRequest, PeerEncodeFields, kw_only=True):
    model: str
    input: str | list[str]
    options: Options | None = None
    keep_alive: KeepAlive | None = None
    truncate: bool | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None

    def to_request(self, model: str, request_id: str) -> tuple[EncodeRequest, FieldNames]:
        refuse_unsupported(self)
        is_one = isinstance(self.input, str)
        request = EncodeRequest(
            id=request_id,
            model=model,
            texts=(self.input,) if isinstance(self.input, str) else tuple(self.input),
            dimensions=self.dimensions,
            truncate=self.truncate is not False,
            api="embeddings",
            context_len=self.context_len,
        )
        return request, FieldNames(texts="input", one_text=is_one)


class OllamaEmbeddings(ModelRequest, PeerEncodeFields, kw_only=True):
    """Ollama's older form: one text."""

    model: str
    prompt: str
    options: Options | None = None
    keep_alive: KeepAlive | None = None
    dimensions: UnsupportedField = None

    def to_request(self, model: str, request_id: str) -> tuple[EncodeRequest, FieldNames]:
        refuse_unsupported(self)
        request = EncodeRequest(id=request_id, model=model, texts=(self.prompt,), truncate=True, api="embeddings")
        request = msgspec.structs.replace(request, context_len=self.context_len)
        return request, FieldNames(texts="prompt", one_text=True)


class OllamaShow(msgspec.Struct, kw_only=True):
    model: str = ""
    name: str = ""  # its older name
    verbose: bool | None = None


class OllamaPull(msgspec.Struct, kw_only=True):
    model: str = ""
    name: str = ""
    stream: bool | None = None
    insecure: bool | None = None


def _image_fields(images: list[str], field: str) -> list[str]:
    """The fields of the parts that `_with_images` adds."""
    return [f"{field}[{number}]" for number in range(len(images))]


def _with_images(message: Message, images: list[str] | None, field: str) -> Message:
    """Add images, which come as bare base64, before the text: there Ollama has them in the prompt."""
    if not images:
        return message
    media = [image_from_base64(image, f"{field}[{number}]") for number, image in enumerate(images)]
    return msgspec.structs.replace(message, parts=(*media, ContentPart("text", message.content)))
