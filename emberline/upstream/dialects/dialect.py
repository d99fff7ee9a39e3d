"""The API of a provider as the transport uses it: where a request goes, in which form, and how its reply is read.

A provider of OpenAI's API gets bodies in OpenAI's form, and its SSE lines are passed on. One with an API of its own has
a `Dialect`, which writes canonical requests and reads events.
"""

import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from emberline.protocol.errors import BadInput, Unsupported
from emberline.protocol.events import Usage
from emberline.protocol.request import GenerateRequest, SamplingParams, ToolCall
from emberline.upstream.dialects.event_reader import EventReader
from emberline.upstream.dialects.sse import encode

T = TypeVar("T")
Fields = Mapping[str, Any]  # the top-level fields of a body in OpenAI's form; some values are `msgspec.Raw`
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"  # Anthropic's, for a request that is in its form already
BYTES_PER_TOKEN = 4  # of a prompt, roughly: for estimates without a tokenizer


class ProviderCall(NamedTuple):
    path: str  # below the base URL
    body: bytes
    content_type: str = "application/json"


class ProviderAPI(Protocol):
    headers: str  # of every request: whole lines, each with its end

    def authorization(self, key: str) -> str:
        """The header lines with the key."""

    def call(self, path: str, fields: Fields) -> ProviderCall:
        """A streamed request whose body is in the provider's form. Raises Unsupported, which names a field that the
        provider's API lacks."""


class Dialect(ProviderAPI, Protocol):
    """An API that is not OpenAI's."""

    def check(self, request: GenerateRequest) -> None:
        """Raise Unsupported for a setting that the provider's API lacks. Called before the request is admitted."""

    def write(self, request: GenerateRequest, model: str) -> ProviderCall:
        """A streamed request. Raises Unsupported, which names what the provider's API cannot express."""

    def reader(self, request: GenerateRequest, input_tokens: int) -> EventReader:
        """The reader of the request's reply. `input_tokens` is an estimate, told until the provider counts."""


class OpenAIAPI:
    """The API of providers that speak OpenAI's: the body is passed on."""

    headers = ""

    def __init__(self, stream_options: bool = True, completion_tokens: bool = False) -> None:
        """Pass on `stream_options` if True. Rename `max_tokens` to `max_completion_tokens` if that is True."""
        self._stream_options, self._completion_tokens = stream_options, completion_tokens

    def authorization(self, key: str) -> str:
        return f"authorization: Bearer {key}\r\n" if key else ""

    def call(self, path: str, fields: Fields) -> ProviderCall:
        sent = dict(fields)
        if not self._stream_options:
            sent.pop("stream_options", None)
        if self._completion_tokens and "messages" in sent and "max_tokens" in sent:
            sent.setdefault("max_completion_tokens", sent.pop("max_tokens"))
        return ProviderCall(path.removeprefix("/v1"), encode(sent))


# --- canonical requests, as dialects read them -----------------------------------------------------------------------

# Bookkeeping of the client, and hints: without them the reply is the same. The model and the stream are the caller's.
_NO_EFFECT = frozenset(
    {
        *("model", "stream", "stream_options", "service_tier", "usage", "metadata", "store", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "prediction", "verbosity"),
    }
)
_NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})  # values that ask for nothing
_DEFAULTS = SamplingParams()
_OPENAI_NAMES = {"stop_ids": "stop_token_ids", "include_stop": "include_stop_str_in_output"}


def unsupported(provider: str, field: str, hint: str = "") -> Unsupported:
    return Unsupported(f"provider {provider} has no `{field}`{hint and '; ' + hint}", param=field)


def refuse_others(provider: str, fields: Fields, known: Collection[str]) -> None:
    """Raise Unsupported for the first field of OpenAI's that is not `known`, unless it asks for nothing."""
    for name, value in fields.items():
        if name in known or name in _NO_EFFECT:
            continue
        given = msgspec.json.decode(value) if isinstance(value, msgspec.Raw) else value
        if not any(given is item or given == item for item in _NOTHING):
            raise unsupported(provider, name)


def refuse_settings(provider: str, request: GenerateRequest, known: Collection[str]) -> None:
    """Raise Unsupported for the first setting that is not among the `known` ones of a provider's API."""
    if request.messages is None:
        raise Unsupported(f"provider {provider} has no text completions: ask for {CHAT}", param="model")
    for name in SamplingParams.__struct_fields__:
        value = getattr(request.sampling, name)
        is_given = value != getattr(_DEFAULTS, name) and name not in request.left_to_model
        asks = is_given and not (name == "seed" and value == 0)  # which clients send for none
        if asks and name not in known:
            raise unsupported(provider, _OPENAI_NAMES.get(name, name))
    if request.n != 1 and "n" not in known:
        raise unsupported(provider, "n")
    if request.output is not None and request.output.kind not in ("json_object", "json_schema"):
        raise Unsupported(f"the server of this model has no `{request.output.kind}` outputs", param="output")


def chosen(request: GenerateRequest, names: Mapping[str, str]) -> dict[str, Any]:
    """The temperature and the other sampling parameters that are not the default, if the client set them, by the
    provider's names of them."""
    sampling = request.sampling
    return {
        theirs: getattr(sampling, name)
        for name, theirs in names.items()
        if name not in request.left_to_model
        and (name == "temperature" or getattr(sampling, name) != getattr(_DEFAULTS, name))
    }


def arguments_of(call: ToolCall, where: str) -> dict[str, Any]:
    """Arguments of an earlier tool call, as an object."""
    try:
        arguments = msgspec.json.decode(call.arguments) if call.arguments.strip() else {}
    except (msgspec.DecodeError, RecursionError):
        raise BadInput(f"the arguments of {call.name[:64]} are not JSON", param=where) from None
    if not isinstance(arguments, dict):
        raise BadInput(f"the arguments of {call.name[:64]} are not an object", param=where)
    return arguments


_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+);base64,")
_MAX_MIME_CHARS = 100


def split_data_url(url: str, where: str) -> tuple[str, str]:
    """MIME type and base64 of a data: URL; the base64 is not decoded here. Raises BadInput for any other URL."""
    found = _DATA_URL.match(url[: _MAX_MIME_CHARS + 20])
    if found is None:
        raise BadInput("media must be data:<type>;base64,… URLs", param=where)
    return found[1], url[found.end() :]


# --- calls whose reply comes whole -----------------------------------------------------------------------------------


class UnreadableReply(Exception):
    """A reply that cannot be read; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class WholeReply:
    body: bytes
    content_type: str


# Asks for more of a reply: the path below the base URL.
Fetch = Callable[[str], Awaitable[WholeReply]]


@dataclass(frozen=True, slots=True)
class WholeTask(Generic[T]):
    """A call, and how its reply is read: the result and its usage. `poll` fetches the result of a job that the provider
    only began."""

    operation: str  # `gen_ai.operation.name`
    call: ProviderCall
    read: Callable[[WholeReply], tuple[T, Usage]]
    poll: Callable[[WholeReply, Fetch], Awaitable[WholeReply]] | None = None
