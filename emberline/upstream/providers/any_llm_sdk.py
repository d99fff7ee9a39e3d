"""Providers that the package `any-llm-sdk` knows, as Amazon Bedrock: an optional extra, for those with their own APIs.

The package takes requests, and gives streams, in OpenAI's form. `any_llm_pool` calls it.
"""

import importlib
import logging
from typing import Any

from emberline.config import ConfigError
from emberline.protocol.errors import Unsupported
from emberline.upstream.dialects.dialect import CHAT, Fields, ProviderCall, refuse_others
from emberline.upstream.dialects.sse import encode
from emberline.upstream.providers.registry import Provider
from emberline.upstream.servers.attempt import CONTEXT_EXCEEDED

# What a request may set. Any other name would reach the package's own options, such as where to connect.
_FIELDS = frozenset(
    {
        *(
            "model",
            "messages",
            "tools",
            "tool_choice",
            "temperature",
            "top_p",
            "max_tokens",
            "response_format",
            "stream",
        ),
        *("n", "stop", "presence_penalty", "frequency_penalty", "seed", "user", "parallel_tool_calls", "logprobs"),
        *("top_logprobs", "logit_bias", "stream_options", "max_completion_tokens", "reasoning_effort"),
    }
)
# The package's errors as the statuses that `providers.errors` knows. Others have the provider's own status, or 502.
_STATUSES = {
    "AuthenticationError": 401,
    "MissingApiKeyError": 403,  # its message says which variable could have the key
    "InsufficientFundsError": 402,
    "RateLimitError": 429,
    "ModelNotFoundError": 404,
    "InvalidRequestError": 400,
    "UnsupportedParameterError": 400,
    "ContentFilterError": 400,
    "ContextLengthExceededError": 400,
    "NotImplementedError": 400,  # the provider has no such call
    "GatewayTimeoutError": 504,
    "TimeoutError": 504,
}

# Per request, the HTTP client would log the URL, in which a provider may want its key, and the package that it blocks.
_LOG_LEVELS = {"httpx": logging.WARNING, "httpx2": logging.WARNING, "any_llm": logging.ERROR}


class AnyLLMAPI:
    """Chats only. ConfigError where the package, or the provider in it, is missing."""

    headers = ""

    def __init__(self, provider: Provider) -> None:
        self._name = provider.name
        check_installed(provider)
        for logger, level in _LOG_LEVELS.items():
            logging.getLogger(logger).setLevel(level)

    def authorization(self, key: str) -> str:
        return f"authorization: Bearer {key}\r\n" if key else ""

    def call(self, path: str, fields: Fields) -> ProviderCall:
        if path != CHAT:
            raise Unsupported(f"provider {self._name} has no text completions: ask for {CHAT}", param="model")
        refuse_others(self._name, fields, _FIELDS)
        return ProviderCall("/chat/completions", encode({k: v for k, v in fields.items() if k in _FIELDS}))


def check_installed(provider: Provider) -> None:
    def wrong(what: str) -> ConfigError:
        return ConfigError(f"provider {provider.name}: {what}", param="providers")

    try:
        package: Any = importlib.import_module("any_llm")
    except ImportError as error:
        missing = "" if error.name == "any_llm" else f" ({error})"
        message = f"kind any-llm needs a package{missing}: pip install 'emberline[any-llm]'"
        raise wrong(message) from None
    known = package.AnyLLM.get_supported_providers()
    if provider.any_llm not in known:
        raise wrong(f"any-llm has no provider {provider.any_llm!r}; it has {', '.join(sorted(known))}")
    if (problem := package.AnyLLM.get_provider_class(provider.any_llm).MISSING_PACKAGES_ERROR) is not None:
        raise wrong(f"{problem}: pip install 'any-llm-sdk[{provider.any_llm}]'")


def failure(error: Exception) -> tuple[int, dict[str, str], str, str | None]:
    """Status, headers, message and `param`, as the provider would have answered."""
    names = [each.__name__ for each in type(error).__mro__]
    original = getattr(error, "original_exception", None) or error.__cause__
    status, said = next((_STATUSES[name] for name in names if name in _STATUSES), 0), getattr(error, "status_code", 0)
    if status in (0, 400) and isinstance(said, int) and 400 <= said < 600:
        status = said
    elif not status:
        status = 504 if any("Timeout" in each.__name__ for each in type(original).__mro__) else 502
    body = getattr(original, "body", None)  # of SDKs in OpenAI's manner: its message without their own words
    message = str(body["message"] if isinstance(body, dict) and body.get("message") else error)
    if "ContextLengthExceededError" in names and not CONTEXT_EXCEEDED.search(message):
        message = f"the context length is exceeded: {message}"
    retry_after, param = getattr(error, "retry_after", None), getattr(error, "param", None)
    headers = {"retry-after": str(retry_after)} if retry_after else {}
    return status, headers, message, param or getattr(error, "parameter_name", None)
