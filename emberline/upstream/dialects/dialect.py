"""The API of a provider as the transport uses it: where a request goes, in which form, and how its reply is read.

Requests come in OpenAI's form. A provider with another API has a translator of its own, which makes OpenAI's chunks of
its stream: the rest of the pipeline knows one form only.
"""

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from emberline.protocol.errors import BadInput
from emberline.protocol.events import Usage
from emberline.upstream.dialects.sse import encode

T = TypeVar("T")
Fields = Mapping[str, Any]  # the top-level fields of a body in OpenAI's form; some values are `msgspec.Raw`
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"  # Anthropic's, for a request that is in its form already
BYTES_PER_TOKEN = 4  # of a prompt, roughly: for estimates without a tokenizer


class StreamTranslator(Protocol):
    def feed(self, data: bytes) -> bytes:
        """OpenAI's lines for what has arrived; b"" if no line is complete yet. MalformedLine blames the provider."""

    def end(self) -> bytes:
        """OpenAI's lines that are still to be sent when the provider's stream has ended."""


class ProviderCall(NamedTuple):
    path: str  # below the base URL
    body: bytes
    translator: StreamTranslator | None = None  # None: the reply is in OpenAI's form
    content_type: str = "application/json"


class ProviderAPI(Protocol):
    headers: str  # of every request: whole lines, each with its end

    def authorization(self, key: str) -> str:
        """The header lines with the key."""

    def call(self, path: str, fields: Fields) -> ProviderCall:
        """A streamed chat or text completion. Raises Unsupported, which names a field that the provider's API lacks."""


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


def decoded(fields: Fields) -> dict[str, Any]:
    """The fields with nothing left encoded."""
    return {
        name: msgspec.json.decode(value) if isinstance(value, msgspec.Raw) else value for name, value in fields.items()
    }


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
