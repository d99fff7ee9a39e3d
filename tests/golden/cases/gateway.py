"""Gateways: their paths, the cache, guardrails, retries, fallbacks, routes, logs and settings."""

from collections.abc import Iterator

from tests.golden.cases.common import HELLO, LOCAL, chat
from tests.golden.exchange import Case, Client, one, whole_and_streamed

CHAT = "/v1/chat/completions"
OPENAI = "openai/gpt-test"
FORBIDDEN = [{"role": "user", "content": "a forbidden word"}]


def cases() -> Iterator[Case]:
    yield from _paths()
    default = {"cf-aig-gateway-id": "default"}
    yield from whole_and_streamed("gateway/header-local", CHAT, chat(LOCAL), headers=default)
    yield from whole_and_streamed("gateway/header-openai", CHAT, chat(OPENAI), headers=default)
    yield one("gateway/unknown", CHAT, chat(LOCAL), headers={"cf-aig-gateway-id": "nothing"})
    metadata = {"cf-aig-metadata": '{"user": 42}', "cf-aig-event-id": "event-1"}
    yield Case("gateway/log", _logged({**metadata}))
    yield Case(
        "gateway/log-custom-cost", _logged({"cf-aig-custom-cost": '{"per_token_in": 0.5, "per_token_out": 0.25}'})
    )
    yield one("gateway/bad-metadata", CHAT, chat(LOCAL), headers={"cf-aig-metadata": "[1]"})
    yield from _cached()
    yield from _guarded()
    yield from _attempts()
    yield Case("gateway/route", _route)
    yield Case("gateway/universal", _universal)
    yield Case("gateway/universal-all-fail", _universal_fails)
    yield Case("gateway/settings", _settings)
    yield Case("gateway/settings-refused", _bad_settings)
    yield Case("gateway/operators-own", _operators_own)


def _paths() -> Iterator[Case]:
    def path(name: str, rest: str, body: object, **options: object) -> Case:
        name = f"gateway/path-{name}"
        return one(name, f"/v1/{name.replace('/', '-')}/default/{rest}", body, **options)

    gpt = {"model": "gpt-test", "messages": HELLO}
    yield path("compat", "compat/chat/completions", chat(OPENAI))
    yield path("compat-streamed", "compat/chat/completions", {**chat(OPENAI), "stream": True})
    yield path("compat-local", "compat/chat/completions", chat("workers-ai/@cf/huggingfacetb/smollm2-135m-instruct"))
    yield path("openai", "openai/chat/completions", gpt)
    claude = {"model": "claude-opus-5", "messages": HELLO, "max_tokens": 9}
    yield path("anthropic", "anthropic/v1/messages", claude)
    yield path("anthropic-streamed", "anthropic/v1/messages", {**claude, "stream": True})
    contents = {"contents": [{"role": "user", "parts": [{"text": "Hello"}]}]}
    yield path("gemini", "google-ai-studio/v1beta/models/gemini-3-pro:generateContent", contents)
    yield path("gemini-streamed", "google-ai-studio/v1beta/models/gemini-3-pro:streamGenerateContent?alt=sse", contents)
    yield path("workers-ai", "workers-ai/@cf/huggingfacetb/smollm2-135m-instruct", {"prompt": "Hi", "max_tokens": 3})
    yield path("embeddings", "openai/embeddings", {"model": "embed", "input": ["one"]})
    yield path("unknown-provider", "nothing/chat/completions", gpt)
    yield path("unknown-endpoint", "openai/nothing", gpt)
    yield path("no-key", "openai/chat/completions", gpt, key="")
    yield path("models", "compat/models", None, method="GET")
    yield one("gateway/path-other-account", "/v1/somebody/default/openai/chat/completions", gpt)


def _logged(headers: dict[str, str]):  # type: ignore[no-untyped-def]
    async def run(client: Client) -> None:
        await client.post(CHAT, {**chat(OPENAI), "stream": True}, headers={"cf-aig-gateway-id": "default", **headers})
        await client.until("/api/gateways/default/logs", lambda found: len(found["data"]) == 1)

    return run


def _cached() -> Iterator[Case]:
    ttl = {"cf-aig-cache-ttl": "600"}

    def twice(*streams: bool, model: str = OPENAI, **headers: str) -> Case:
        async def run(client: Client) -> None:
            for stream in streams:
                sent = {**ttl, **{name.replace("_", "-"): value for name, value in headers.items()}}
                await client.post(CHAT, {**chat(model), "stream": stream}, headers=sent)
            await client.until("/api/gateways/default/logs", lambda found: len(found["data"]) == len(streams))

        return run  # type: ignore[return-value]

    yield Case("gateway/cache-hit", twice(False, False))  # type: ignore[arg-type]
    yield Case("gateway/cache-hit-streamed", twice(True, True))  # type: ignore[arg-type]
    yield Case("gateway/cache-hit-local", twice(False, True, model=LOCAL))  # type: ignore[arg-type]
    yield Case("gateway/cache-skipped", twice(False, False, cf_aig_skip_cache="true"))  # type: ignore[arg-type]


def _guarded() -> Iterator[Case]:
    guarded = {"cf-aig-gateway-id": "guarded"}
    blocked = {**chat(LOCAL), "messages": FORBIDDEN}
    yield from whole_and_streamed("gateway/guardrail-prompt", CHAT, blocked, headers=guarded)
    yield from whole_and_streamed("gateway/guardrail-reply", CHAT, chat("vllm-model"), headers=guarded)
    passes = {**chat(LOCAL), "messages": [{"role": "user", "content": "a remarkable word"}], "max_tokens": 3}
    yield one("gateway/guardrail-flag", CHAT, passes, headers=guarded)
    anthropic = {**blocked, "max_tokens": 9}
    yield one("gateway/guardrail-messages", "/v1/messages", anthropic, headers=guarded)


def _attempts() -> Iterator[Case]:
    patient = {"cf-aig-gateway-id": "patient"}
    yield from whole_and_streamed("gateway/fallback", CHAT, chat("down-model"), headers=patient)
    yield from whole_and_streamed("gateway/all-attempts-fail", CHAT, chat("refusing-model"), headers=patient)
    hasty = {"cf-aig-gateway-id": "hasty"}
    yield from whole_and_streamed("gateway/timeout", CHAT, chat("hanging/model"), headers=hasty)

    def retried(stream: bool):  # type: ignore[no-untyped-def]
        async def run(client: Client) -> None:
            client.stage.standins["compatible"].script.status = 500
            client.stage.standins["compatible"].script.times = 1
            await client.post(CHAT, {**chat("compatible-model"), "stream": stream}, headers=patient)
            await client.until("/api/gateways/patient/logs", lambda found: len(found["data"]) == 1)

        return run

    yield Case("gateway/retry", retried(False))
    yield Case("gateway/retry-streamed", retried(True))


async def _route(client: Client) -> None:
    rules = [
        {"models": [OPENAI], "when": [{"key": "plan", "value": "paid"}]},
        {"models": [LOCAL]},
    ]
    await client.post("/api/gateways", {"name": "routed", "routes": {"tiered": rules}})
    for metadata in ('{"plan": "paid"}', "{}"):
        headers = {"cf-aig-gateway-id": "routed", "cf-aig-metadata": metadata}
        await client.post(CHAT, {**chat("dynamic/tiered"), "max_tokens": 3}, headers=headers)
    await client.post(CHAT, chat("dynamic/nothing"), headers={"cf-aig-gateway-id": "routed"})


def step(provider: str, model: str) -> dict[str, object]:
    """One step of the universal endpoint."""
    query = {"model": model, "messages": HELLO, "max_tokens": 5}
    return {"provider": provider, "endpoint": "chat/completions", "headers": {}, "query": query}


async def _universal(client: Client) -> None:
    steps = [step("compat", "down-model"), step("openai", "gpt-test")]
    await client.post(f"/v1/{client.account}/default", steps)


async def _universal_fails(client: Client) -> None:
    await client.post(f"/v1/{client.account}/default", [step("compat", "down-model"), step("compat", "nothing")])


async def _settings(client: Client) -> None:
    await client.post("/api/gateways", {"name": "mine", "cache_ttl_s": 60, "max_attempts": 2})
    await client.get("/api/gateways")
    await client.get("/api/gateways/mine")
    await client.send("DELETE", "/api/gateways/mine/cache")
    await client.send("DELETE", "/api/gateways/mine")
    await client.get("/api/gateways/mine")
    await client.get("/api/gateways/default")


async def _bad_settings(client: Client) -> None:
    for body in ({"name": "no spaces"}, {"name": "x", "max_attempts": 9}, {"name": "x", "nothing": 1}):
        await client.post("/api/gateways", body)
    await client.post("/api/gateways", {"name": "x", "fallbacks": {"a": ["b"], "b": ["a"]}})
    await client.post("/api/gateways", {"name": "x", "guardrails": [{"name": "y"}]})
    await client.post("/api/gateways", {"name": "x", "guardrails": [{"name": "y", "pattern": "("}]})


async def _operators_own(client: Client) -> None:
    """An account replaces a gateway that the operator has configured."""
    await client.post("/api/gateways", {"name": "guarded"})
    headers = {"cf-aig-gateway-id": "guarded"}
    await client.post(CHAT, {**chat(LOCAL), "messages": FORBIDDEN, "max_tokens": 3}, headers=headers)
