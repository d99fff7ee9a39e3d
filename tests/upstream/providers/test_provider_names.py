"""An account learns nothing of the providers of another: a name that only another has is answered as one nobody has."""

from typing import Any

import httpx
import pytest

from tests.upstream.providers.conftest import Gateway, Opener, StartProvider, configured
from tests.upstream.providers.test_provider_keys import key_of

MINE, NOBODYS = "p5", "p6"  # a provider of alice, and one of nobody
KNOWN_NAME, OTHER_KNOWN_NAME = "groq", "together"  # both are known by name; alice has a key of the first
MESSAGES = [{"role": "user", "content": "Hi"}]
AI = "/client/v4/accounts/{account}/ai"
GATEWAY = "/v1/{account}/default"
# Method, path and body. `{provider}` is the name that is asked for.
ASKED: list[tuple[str, str, Any]] = [
    ("POST", "/v1/chat/completions", {"model": "{provider}/m", "messages": MESSAGES}),
    ("POST", "/v1/chat/completions", {"model": "{provider}/m", "messages": MESSAGES, "stream": True}),
    ("POST", "/v1/chat/completions", {"model": "{PROVIDER}/m", "messages": MESSAGES}),
    ("POST", "/v1/completions", {"model": "{provider}/m", "prompt": "Hi"}),
    ("POST", "/v1/responses", {"model": "{provider}/m", "input": "Hi"}),
    ("POST", "/v1/responses/input_tokens", {"model": "{provider}/m", "input": "Hi"}),
    ("POST", "/v1/messages", {"model": "{provider}/m", "messages": MESSAGES, "max_tokens": 5}),
    ("POST", "/v1/messages/count_tokens", {"model": "{provider}/m", "messages": MESSAGES}),
    ("POST", "/v1/embeddings", {"model": "{provider}/embed", "input": "Hi"}),
    ("POST", "/v1/rerank", {"model": "{provider}/rerank", "query": "Hi", "documents": ["a"]}),
    ("POST", "/v1/images/generations", {"model": "{provider}/gpt-image", "prompt": "Hi"}),
    ("POST", "/v1/audio/speech", {"model": "{provider}/tts", "input": "Hi", "voice": "a"}),
    ("POST", "/api/chat", {"model": "{provider}/m", "messages": MESSAGES}),
    ("POST", "/api/generate", {"model": "{provider}/m"}),
    ("POST", "/api/embed", {"model": "{provider}/embed", "input": "Hi"}),
    ("POST", "/api/embeddings", {"model": "{provider}/embed", "prompt": "Hi"}),
    ("POST", "/api/show", {"model": "{provider}/m"}),
    ("POST", "/api/pull", {"model": "{provider}/m", "stream": False}),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/{provider}/m", None),
    ("GET", "/api/tags", None),
    ("GET", "/api/ps", None),
    ("GET", "/api/providers", None),
    ("GET", "/api/prices?model={provider}/m", None),
    ("DELETE", "/api/providers/{provider}", None),
    ("POST", "/api/providers/{provider}/test", {}),
    ("GET", AI + "/models/search?search={provider}", None),
    ("GET", AI + "/models/schema?model={provider}/m", None),
    ("POST", AI + "/run/{provider}/m", {"messages": MESSAGES}),
    ("POST", GATEWAY + "/{provider}/chat/completions", {"model": "m", "messages": MESSAGES}),
    ("POST", GATEWAY + "/{provider}/v1/messages", {"model": "m", "messages": MESSAGES, "max_tokens": 5}),
    ("POST", GATEWAY + "/{provider}/v1beta/models/m:generateContent", {"contents": [{"parts": [{"text": "Hi"}]}]}),
    ("POST", GATEWAY + "/compat/chat/completions", {"model": "{provider}/m", "messages": MESSAGES}),
    ("POST", GATEWAY, [{"provider": "{provider}", "endpoint": "chat/completions", "query": {"model": "m"}}]),
]


def named(value: Any, provider: str) -> Any:
    """The value with `{provider}` replaced in all of its texts."""
    if isinstance(value, str):
        return value.replace("{provider}", provider).replace("{PROVIDER}", provider.upper())
    if isinstance(value, list):
        return [named(item, provider) for item in value]
    return {key: named(item, provider) for key, item in value.items()} if isinstance(value, dict) else value


async def answer(made: Gateway, asked: tuple[str, str, Any], provider: str, headers: dict[str, str]) -> Any:
    method, path, body = asked
    path = named(path.replace("{account}", "bob"), provider)
    reply = await made.client.request(method, path, json=named(body, provider), headers=headers)
    text = reply.text.replace(provider.upper(), "NAME").replace(provider, "NAME")
    return reply.status_code, without_ids(text, reply), sorted(set(reply.headers) - {"content-length"})


def without_ids(text: str, reply: httpx.Response) -> str:
    request_id = reply.headers.get("x-request-id", "")
    return text.replace(request_id, "ID") if request_id else text


@pytest.mark.parametrize("own_key", [False, True], ids=["", "with a provider's key of the client's own"])
async def test_a_name_that_another_account_has_is_answered_as_one_that_nobody_has(
    gateway: Opener, provider_server: StartProvider, own_key: bool
) -> None:
    server = await provider_server("anthropic")
    made = await gateway(configured("anthropic", server), keys=True, with_gateways=True)
    alice, bob = await key_of(made, "alice"), await key_of(made, "bob")
    for name, url in ((MINE, "https://llm.alice.example/v1"), (KNOWN_NAME, "")):
        stored = await made.post("/api/providers", {"name": name, "key": "sk-alice", "url": url}, **alice)
        assert stored.status_code == 200
        await made.client.get(f"/v1/models/{name}/m", headers=alice)  # the provider is in memory from now on
    headers = bob
    if own_key:
        headers = {"cf-aig-authorization": bob["authorization"], "authorization": "Bearer sk-bobs-own"}
    differing = []
    for asked in ASKED:
        if own_key and not asked[1].startswith(GATEWAY):
            continue
        for theirs, nobodys in ((MINE, NOBODYS), (KNOWN_NAME, OTHER_KNOWN_NAME)):
            one, other = await answer(made, asked, theirs, headers), await answer(made, asked, nobodys, headers)
            if one != other:
                differing.append((asked[:2], one, other))
    assert not differing, "\n".join(map(str, differing))
    if not own_key:
        seen = await made.client.get(f"/v1/models/{MINE}/m", headers=alice)
        assert seen.json()["id"] == f"{MINE}/m"


async def test_another_accounts_provider_takes_no_name_from_an_alias(
    gateway: Opener, provider_server: StartProvider
) -> None:
    server = await provider_server("anthropic")
    made = await gateway(configured("anthropic", server), keys=True, aliases={f"{MINE}/best": {"anthropic/claude": 1}})
    alice, bob = await key_of(made, "alice"), await key_of(made, "bob")
    body = {"model": f"{MINE}/best", "messages": MESSAGES}
    assert (await made.post("/v1/chat/completions", body, **bob)).status_code == 200
    new = {"name": MINE, "key": "sk-alice", "url": "https://127.0.0.1/v1"}
    assert (await made.post("/api/providers", new, **alice)).status_code == 200
    own = await made.post("/v1/chat/completions", body, **alice)
    assert (own.status_code, "provider_networks" in own.text) == (400, True), "her own provider comes first, for her"
    assert (await made.post("/v1/chat/completions", body, **bob)).status_code == 200
