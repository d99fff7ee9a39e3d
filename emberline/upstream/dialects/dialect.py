"""What the API of a provider is to the transport: where a request goes, in which form, and how its reply is read.

Requests come in OpenAI's form. A provider with another API has a translator of its own, which makes OpenAI's chunks of
its stream: the rest of the pipeline knows one form only.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import msgspec

from emberline.upstream.providers.registry import Provider
from emberline.upstream.servers.disaggregation import encode

Fields = Mapping[str, Any]  # of a body in OpenAI's form; some values are `msgspec.Raw`


class StreamTranslator(Protocol):
    def feed(self, data: bytes) -> bytes:
        """OpenAI's lines for what has arrived; b"": nothing whole yet. MalformedLine blames the provider."""

    def end(self) -> bytes:
        """The stream has ended: what is still to be told."""


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
        """A streamed chat or text completion. Unsupported names a field that the provider's API lacks."""


class OpenAIAPI:
    """Of providers that speak OpenAI's API: the body is passed on."""

    headers = ""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider

    def authorization(self, key: str) -> str:
        return f"authorization: Bearer {key}\r\n" if key else ""

    def call(self, path: str, fields: Fields) -> ProviderCall:
        provider, sent = self._provider, dict(fields)
        if not provider.stream_options:
            sent.pop("stream_options", None)
        if provider.completion_tokens and "messages" in sent and "max_tokens" in sent:
            sent.setdefault("max_completion_tokens", sent.pop("max_tokens"))
        return ProviderCall(path.removeprefix("/v1"), encode(sent))


def decoded(fields: Fields) -> dict[str, Any]:
    """The fields with nothing left encoded."""
    return {
        name: msgspec.json.decode(value) if isinstance(value, msgspec.Raw) else value for name, value in fields.items()
    }
