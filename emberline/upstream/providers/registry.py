"""The providers that are known by name: where their APIs are, and which API they speak.

Any other provider needs its `url`, and speaks OpenAI's API unless its `kind` says otherwise.
"""

import re
from typing import NamedTuple

from emberline.balancer.endpoint import Kind
from emberline.catalog.model_card import (
    SPEECH_RECOGNITION,
    TEXT_EMBEDDINGS,
    TEXT_GENERATION,
    TEXT_TO_IMAGE,
    TEXT_TO_SPEECH,
    TEXT_TO_VIDEO,
)
from emberline.config import ConfigError, ProviderConfig
from emberline.net.http_client import Address, parse

DEFAULT_MAX_RUNNING = 1024  # requests at once
DEFAULT_MAX_THREADS = 64  # of kind any-llm: each request has one


class KnownProvider(NamedTuple):
    url: str  # with the version, as the provider's own client has it; empty: it has to be configured
    kind: Kind = "openai"  # the API it speaks
    server: str = ""  # whose fields beyond that API it takes; empty: those of the API alone
    needs_key: bool = True
    stream_options: bool = True  # it is asked for the usage of a stream; if not, it sends it unasked
    completion_tokens: bool = False  # it wants `max_completion_tokens` in place of `max_tokens`


KNOWN: dict[str, KnownProvider] = {
    "openai": KnownProvider("https://api.openai.com/v1", completion_tokens=True),
    "anthropic": KnownProvider("https://api.anthropic.com/v1", "anthropic", "anthropic"),
    "gemini": KnownProvider("https://generativelanguage.googleapis.com/v1beta", "gemini", "gemini"),
    "groq": KnownProvider("https://api.groq.com/openai/v1"),
    "together": KnownProvider("https://api.together.xyz/v1", server="sampling"),
    "fireworks": KnownProvider("https://api.fireworks.ai/inference/v1", server="sampling"),
    "mistral": KnownProvider("https://api.mistral.ai/v1", stream_options=False),
    "deepseek": KnownProvider("https://api.deepseek.com/v1"),
    "openrouter": KnownProvider("https://openrouter.ai/api/v1", server="sampling"),
    "xai": KnownProvider("https://api.x.ai/v1"),
    "cerebras": KnownProvider("https://api.cerebras.ai/v1"),
    "perplexity": KnownProvider("https://api.perplexity.ai"),
    "cohere": KnownProvider("https://api.cohere.ai/compatibility/v1"),
    "deepinfra": KnownProvider("https://api.deepinfra.com/v1/openai", server="sampling"),
    "sambanova": KnownProvider("https://api.sambanova.ai/v1"),
    "nebius": KnownProvider("https://api.studio.nebius.com/v1", server="sampling"),
    "hyperbolic": KnownProvider("https://api.hyperbolic.xyz/v1", server="sampling"),
    "novita": KnownProvider("https://api.novita.ai/v3/openai", server="sampling"),
    "nvidia": KnownProvider("https://integrate.api.nvidia.com/v1"),
    "huggingface": KnownProvider("https://router.huggingface.co/v1"),
    "baseten": KnownProvider("https://inference.baseten.co/v1"),
    "moonshot": KnownProvider("https://api.moonshot.ai/v1"),
    "dashscope": KnownProvider("https://dashscope-intl.aliyuncs.com/compatible-mode/v1"),
    "zai": KnownProvider("https://api.z.ai/api/paas/v4"),
    "github": KnownProvider("https://models.github.ai/inference"),
    "cloudflare": KnownProvider(""),  # https://api.cloudflare.com/client/v4/accounts/<account>/ai/v1
    "azure": KnownProvider("", completion_tokens=True),  # https://<resource>.openai.azure.com/openai/v1
    "ollama": KnownProvider("http://127.0.0.1:11434/v1", needs_key=False),
    "lmstudio": KnownProvider("http://127.0.0.1:1234/v1", needs_key=False),
    "llamacpp": KnownProvider("http://127.0.0.1:8080/v1", needs_key=False),
    "vllm": KnownProvider("http://127.0.0.1:8000/v1", server="vllm", needs_key=False),
    "sglang": KnownProvider("http://127.0.0.1:30000/v1", server="sglang", needs_key=False),
}
# Other names of the same, as Cloudflare's gateway and other clients have them.
ALIASES = {
    "google": "gemini",
    "google-ai-studio": "gemini",
    "grok": "xai",
    "perplexity-ai": "perplexity",
    "together_ai": "together",
    "fireworks_ai": "fireworks",
    "workers-ai": "cloudflare",
}


class Provider(NamedTuple):
    """One provider as it is used here: what its name tells, replaced by what was configured."""

    name: str
    kind: Kind
    url: str
    server: str = ""  # as of `KnownProvider`; empty: the kind's
    needs_key: bool = True
    stream_options: bool = True
    completion_tokens: bool = False
    models: tuple[str, ...] = ()
    max_running: int = DEFAULT_MAX_RUNNING
    timeout_s: float = 600.0
    any_llm: str = ""  # of kind any-llm: as that package calls it
    any_llm_url: str = ""  # where it is called, if not where the package knows
    is_hosted: bool = False  # a company's servers: it may fetch what a client names, and takes any field

    @property
    def address(self) -> Address:
        """ValueError says what is wrong with the URL."""
        return parse(self.url, keep_version=True)

    @property
    def traits(self) -> str:
        """The kind of server as `upstream_request` knows them: which fields it takes."""
        return self.server or self.kind


_TASKS = (  # what a provider's names of models tell about them; a model card of the operator's may say otherwise
    (re.compile(r"embed", re.IGNORECASE), TEXT_EMBEDDINGS),
    (re.compile(r"whisper|transcribe|voxtral-mini", re.IGNORECASE), SPEECH_RECOGNITION),
    (re.compile(r"\btts\b|-tts|tts-|playai|orpheus", re.IGNORECASE), TEXT_TO_SPEECH),
    (re.compile(r"sora|veo-|text-to-video", re.IGNORECASE), TEXT_TO_VIDEO),
    (re.compile(r"dall-e|gpt-image|imagen|flux|stable-diffusion|-image\b", re.IGNORECASE), TEXT_TO_IMAGE),
)


def task_of(model: str) -> str:
    return next((task for pattern, task in _TASKS if pattern.search(model)), TEXT_GENERATION)


def known(name: str) -> KnownProvider | None:
    return KNOWN.get(ALIASES.get(name, name))


def provider(config: ProviderConfig) -> Provider:
    """The provider of a `[[providers]]` table. Raises ConfigError, which says what is missing or wrong."""
    if config.kind == "any-llm":
        return _any_llm(config)
    if config.provider:
        raise ConfigError(f"provider {config.name}: `provider` is for kind any-llm only", param="providers")
    found = known(config.name) or KnownProvider("")
    engine = config.kind if config.kind in ("vllm", "sglang") else ""
    kind: Kind = "openai" if engine else config.kind or found.kind
    url = config.url or found.url
    if not url:
        raise ConfigError(f"provider {config.name} needs a url: the address of its API", param="providers")
    if kind != found.kind or engine:  # what the name tells is about another API
        found = KnownProvider("", kind, engine or ("" if kind == "openai" else kind), needs_key=not engine)
    made = Provider(
        name=config.name,
        kind=kind,
        url=url,
        server=found.server,
        needs_key=found.needs_key and not config.url,
        stream_options=found.stream_options,
        completion_tokens=found.completion_tokens,
        models=config.models,
        max_running=config.max_running or DEFAULT_MAX_RUNNING,
        timeout_s=config.timeout_s,
        is_hosted=found.needs_key and (not config.url or kind in ("anthropic", "gemini")),
    )
    try:
        _ = made.address
    except ValueError as error:
        raise ConfigError(f"provider {config.name}: url: {error}", param="providers") from None
    return made


def _any_llm(config: ProviderConfig) -> Provider:
    """The package has keys and addresses of its own, from the environment."""
    called = config.provider or config.name
    return Provider(
        name=config.name,
        kind="any-llm",
        url=f"http://{called}.any-llm.invalid",  # shown, and never connected to
        needs_key=False,
        models=config.models,
        max_running=config.max_running or DEFAULT_MAX_THREADS,
        timeout_s=config.timeout_s,
        any_llm=called,
        any_llm_url=config.url,
    )
