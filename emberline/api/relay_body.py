"""Bodies for other people's servers: the fields that may go there, each number in its range, all else left out.

Nothing that names an address, a file, a template or a place in a cache can be sent through: such fields are not here,
and media must come inside the body.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from emberline.api.fields import (
    MAX_CHOICES,
    LogitBias,
    Penalty,
    Seed,
    ServiceTier,
    StopString,
    StopStrings,
    TokenCount,
    TokenId,
)
from emberline.api.openai_stream import StreamOptions
from emberline.api.reasoning import Budget, Effort, TemplateKwargs
from emberline.protocol.errors import BadInput

ABSENT = Raw()
_TEXT_PARTS = frozenset({"text", "refusal"})
_MAX_PROMPTS = 128
_OURS = frozenset({"stream_options", "service_tier", "user", "prompt_cache_key"})  # not for the server
_PLAIN = frozenset(  # what any OpenAI server knows; the rest is vLLM's and SGLang's
    {
        *("model", "messages", "prompt", "stream", "max_tokens", "max_completion_tokens", "temperature", "top_p"),
        *("frequency_penalty", "presence_penalty", "logit_bias", "seed", "stop", "n", "response_format", "logprobs"),
        *("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", "top_logprobs"),
        *("reasoning_effort", "echo", "suffix", "best_of"),
    }
)


class Peek(msgspec.Struct):
    """Enough to know whose request it is."""

    model: Any = None


class RelayBody(msgspec.Struct, kw_only=True, omit_defaults=True):
    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: TokenCount | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    seed: Seed | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    service_tier: ServiceTier | None = None
    response_format: Raw = ABSENT
    structured_outputs: Raw = ABSENT
    guided_json: Raw = ABSENT
    guided_regex: Raw = ABSENT
    guided_choice: Raw = ABSENT
    guided_grammar: Raw = ABSENT

    @property
    def prompt_bytes(self) -> tuple[bytes, ...]:
        """What the prompt is made of: it grows at its end from turn to turn."""
        raise AssertionError("each endpoint has its own")

    def fields(self, kind: str) -> dict[str, Any]:
        """The body as the server gets it."""
        own = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}
        known = None if kind in ("vllm", "sglang") else _PLAIN
        return {
            name: value
            for name, value in own.items()
            if value is not ABSENT and name not in _OURS and (known is None or name in known)
        }


class RelayedChat(RelayBody, kw_only=True):
    messages: Raw
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: Raw = ABSENT
    tool_choice: Raw = ABSENT
    parallel_tool_calls: bool | None = None
    functions: Raw = ABSENT
    function_call: Raw = ABSENT
    reasoning_effort: Effort | None = None
    thinking_token_budget: Budget | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None

    @property
    def prompt_bytes(self) -> tuple[bytes, ...]:
        return bytes(self.tools), bytes(self.messages).rstrip()[:-1]

    def check(self) -> None:
        """Messages whose media would have to be fetched are refused: a server must not fetch what clients name."""
        messages = _messages.decode(self.messages)
        if not messages:
            raise BadInput("`messages` is empty; send at least one message", param="messages")
        for number, message in enumerate(messages):
            for part in message.content if isinstance(message.content, list) else ():
                _check_part(part, f"messages[{number}].content")


class RelayedCompletion(RelayBody, kw_only=True):
    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Literal[1] | None = None

    @property
    def prompt_bytes(self) -> tuple[bytes, ...]:
        prompt = self.prompt
        return (prompt.encode("utf-8", "replace") if isinstance(prompt, str) else msgspec.json.encode(prompt)[:-1],)

    @property
    def n_prompts(self) -> int:
        prompt = self.prompt
        return 1 if isinstance(prompt, str) or isinstance(prompt[0], int) else len(prompt)

    def check(self) -> None:
        if self.n_prompts > _MAX_PROMPTS:
            raise BadInput(f"`prompt` may have {_MAX_PROMPTS} entries, not {self.n_prompts}", param="prompt")


class _Url(msgspec.Struct):
    url: str


class _Part(msgspec.Struct):
    type: str = "text"
    image_url: _Url | str | None = None


class _Message(msgspec.Struct):
    content: str | list[_Part] | None = None


_messages = msgspec.json.Decoder(list[_Message])


def _check_part(part: _Part, where: str) -> None:
    if part.type in _TEXT_PARTS or part.type == "input_audio":
        return
    if part.type != "image_url":
        raise BadInput(f"a part of type {part.type[:64]!r} cannot be sent to this model's server", param=where)
    url = part.image_url.url if isinstance(part.image_url, _Url) else part.image_url
    if url is None or not url.startswith("data:image/"):
        raise BadInput("images must come inside the request, as data:image/…;base64,… URLs", param=where)
