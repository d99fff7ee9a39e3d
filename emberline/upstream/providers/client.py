"""A provider as an endpoint of the balancer: connections, and whether requests to it succeed.

Providers are not probed: whether one works is learnt from the requests that it is sent, by its circuit breaker.
"""

from emberline.balancer.endpoint import Capacity, Endpoint, provider_pool
from emberline.net.http_client import ConnectionPool
from emberline.upstream.dialects.anthropic import AnthropicAPI
from emberline.upstream.dialects.dialect import OpenAIAPI, ProviderAPI
from emberline.upstream.dialects.gemini import GeminiAPI
from emberline.upstream.providers.access import Access
from emberline.upstream.providers.any_llm_pool import AnyLLMPool
from emberline.upstream.providers.any_llm_sdk import AnyLLMAPI
from emberline.upstream.providers.errors import ProviderFailed
from emberline.upstream.providers.registry import Provider
from emberline.upstream.servers.client import UpstreamClient, UpstreamConfig


class ProviderClient(UpstreamClient):
    def __init__(self, provider: Provider, key: str = "", is_configured: bool = True) -> None:
        """`is_configured`: by the operator's file; otherwise only stored keys name it.

        Accounts choose the names of the latter, so that their workers have a name that no worker of the operator has.
        """
        self.provider = provider
        self.is_configured = is_configured
        self.access = Access(key)  # of accounts without a key of their own
        self.api: ProviderAPI = api_of(provider)
        pool = provider_pool(provider.name)
        name = provider.name if is_configured else pool
        endpoint = Endpoint(name=name, address=provider.url, kind=provider.kind, models=(pool,))
        super().__init__(UpstreamConfig(endpoint=endpoint, max_running=provider.max_running))
        self.pool.close()
        if provider.kind == "any-llm":
            self.pool = AnyLLMPool(provider)
        else:
            self.pool = ConnectionPool(provider.address, read_timeout_s=provider.timeout_s)

    def start(self, watch: bool = True) -> None:
        self.problem = ""
        self._ready.set()
        if watch and self.listener is not None:
            capacity = Capacity(max_running=self.config.max_running, events=False, shared=True)
            self.listener.joined(self.endpoint, capacity, None)

    def lost(self, what: str) -> ProviderFailed:
        return ProviderFailed(self.provider.name, what)


def api_of(provider: Provider) -> ProviderAPI:
    if provider.kind == "anthropic":
        return AnthropicAPI(provider.name)
    if provider.kind == "gemini":
        return GeminiAPI(provider.name)
    if provider.kind == "any-llm":
        return AnyLLMAPI(provider)
    return OpenAIAPI(provider.stream_options, provider.completion_tokens)
