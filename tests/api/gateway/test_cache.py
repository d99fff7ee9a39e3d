"""The response cache: what is served again, to whom, and what never is."""

import asyncio
from typing import Any

import pytest

from emberline.accounts.account_service import KeyGrant
from emberline.accounts.audit_log import Actor
from emberline.config import ProviderConfig
from emberline.gateway.gateways import GatewayService
from emberline.protocol.gateway import Guardrail
from standins.openai_script import ServerScript
from standins.standin_providers import StandinOpenAI
from tests.api.gateway.conftest import MODEL, Opener

A = f"a/{MODEL}"
CACHED = {"cache_ttl_s": 600}


def text_of(answer: Any) -> str:
    if answer.headers["content-type"] == "application/json":
        return str(answer.json()["choices"][0]["message"]["content"])
    return "".join(part for part in _contents(answer.text))


def _contents(text: str) -> list[str]:
    import json

    found = []
    for line in text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                found.append(choice["delta"].get("content") or "")
    return found


@pytest.mark.parametrize("first", [False, True])
async def test_streamed_and_whole_replies_share_the_cache(bench: Opener, first: bool) -> None:
    gateway = await bench(CACHED)
    miss = await gateway.ask(stream=first)
    assert miss.headers["cf-aig-cache-status"] == "MISS"
    for stream in (True, False):
        hit = await gateway.ask(stream=stream)
        assert hit.headers["cf-aig-cache-status"] == "HIT"
        assert text_of(hit) == text_of(miss)
        if stream:
            assert hit.text.endswith("data: [DONE]\n\n")
    assert gateway.servers["a"].n_asked == 1
    assert len(await gateway.usage()) == 1, "a hit has no usage row"
    hits = await gateway.logs(cached="true")
    assert [(row["cost"], row["output_tokens"], row["cached"], row["attempts"]) for row in hits] == [
        (0, 5, True, [])
    ] * 2


async def test_what_does_not_change_a_reply_does_not_count(bench: Opener) -> None:
    gateway = await bench(CACHED)
    await gateway.ask(max_tokens=5, temperature=0)
    body = {"model": A, "messages": [{"role": "user", "content": "hello there, how are you?"}], "max_tokens": 5}
    answer = await gateway.client.post(
        "/v1/chat/completions",
        json=body | {"temperature": 0, "service_tier": "flex"},
        headers={"cf-aig-gateway-id": "default", "x-session-id": "s"},
    )
    assert answer.headers["cf-aig-cache-status"] == "HIT", answer.text
    assert (await gateway.ask(max_tokens=4, temperature=0)).headers["cf-aig-cache-status"] == "MISS"
    assert (await gateway.ask(max_tokens=5, temperature=1)).headers["cf-aig-cache-status"] == "MISS"


async def test_a_request_decides_about_the_cache(bench: Opener) -> None:
    gateway = await bench()
    assert "cf-aig-cache-status" not in (await gateway.ask()).headers
    assert (await gateway.ask(cf_aig_cache_ttl="60")).headers["cf-aig-cache-status"] == "MISS"
    assert (await gateway.ask(cf_aig_cache_ttl="60")).headers["cf-aig-cache-status"] == "HIT"
    skipped = await gateway.ask(cf_aig_cache_ttl="60", cf_aig_skip_cache="true")
    assert "cf-aig-cache-status" not in skipped.headers
    answer = await gateway.ask(cf_aig_cache_ttl="5")
    assert answer.status_code == 400
    assert "cf-aig-cache-ttl" in answer.text


async def test_the_clients_own_key(bench: Opener) -> None:
    gateway = await bench(CACHED)
    await gateway.ask(cf_aig_cache_key="greeting")
    other = [{"role": "user", "content": "something else"}]
    assert (await gateway.ask(cf_aig_cache_key="greeting", messages=other)).headers["cf-aig-cache-status"] == "HIT"
    assert (await gateway.ask(cf_aig_cache_key="other")).headers["cf-aig-cache-status"] == "MISS"
    assert (await gateway.ask()).headers["cf-aig-cache-status"] == "MISS"


@pytest.mark.parametrize("headers", [{}, {"cf_aig_cache_key": "greeting"}])
async def test_a_reply_from_before_a_guardrail_is_not_served_after_it(bench: Opener, headers: dict[str, str]) -> None:
    gateway = await bench()
    settings = {"name": "default", "cache_ttl_s": 600}
    for guardrails in ([], [{"name": "out", "pattern": "w3-", "on": "response"}]):
        answer = await gateway.client.post("/api/gateways", json=settings | {"guardrails": guardrails})
        assert answer.status_code == 200, answer.text
        answers = [await gateway.ask(**headers) for _ in range(2)]
        if guardrails:
            assert [answer.json()["error"][0]["code"] for answer in answers] == [2017, 2017]
        else:
            assert [answer.headers["cf-aig-cache-status"] for answer in answers] == ["MISS", "HIT"]
    await gateway.client.post("/api/gateways", json=settings)
    assert (await gateway.ask(**headers)).headers["cf-aig-cache-status"] == "HIT", "the rules of then are back"


async def test_an_alias_that_stands_for_another_model_has_other_replies(bench: Opener) -> None:
    gateway = await bench(CACHED, b=ServerScript(tokens=5))
    for target, served in ((A, "a"), (f"b/{MODEL}", "b")):
        await gateway.service.operations.change_alias("smart", {target: 1})
        answers = [await gateway.ask("smart") for _ in range(2)]
        assert [answer.headers["cf-aig-cache-status"] for answer in answers] == ["MISS", "HIT"]
        assert {answer.headers["cf-aig-provider"] for answer in answers} == {served}


async def test_no_account_sees_anothers_reply(bench: Opener) -> None:
    gateway = await bench(CACHED)
    for account in ("one", "two"):
        made = await gateway.accounts.create_key(Actor("test"), account)
        url, headers = f"/v1/{account}/default/compat/chat/completions", {"authorization": f"Bearer {made.key.text}"}
        body = {"model": A, "messages": [{"role": "user", "content": "hi"}]}
        for custom in ({}, {"cf-aig-cache-key": "shared"}):
            answers = [await gateway.client.post(url, json=body, headers=headers | custom) for _ in range(2)]
            assert [answer.headers["cf-aig-cache-status"] for answer in answers] == ["MISS", "HIT"]


async def test_a_key_that_may_not_use_the_model_gets_no_cached_reply(bench: Opener) -> None:
    gateway = await bench(CACHED)
    for models, status in (((), 200), (("b/*",), 403)):
        made = await gateway.accounts.create_key(Actor("test"), "acme", KeyGrant(models=models))
        answer = await gateway.client.post(
            "/v1/acme/default/compat/chat/completions",
            json={"model": A, "messages": [{"role": "user", "content": "hi"}]},
            headers={"authorization": f"Bearer {made.key.text}"},
        )
        assert answer.status_code == status, answer.text


async def test_the_clients_own_key_reads_no_reply_of_a_model_that_it_may_not_use(bench: Opener) -> None:
    gateway = await bench(CACHED, b=ServerScript(tokens=2))
    providers = []
    for models, model in (((), A), (("b/*",), f"b/{MODEL}")):
        made = await gateway.accounts.create_key(Actor("test"), "acme", KeyGrant(models=models))
        answer = await gateway.client.post(
            "/v1/acme/default/compat/chat/completions",
            json={"model": model, "messages": [{"role": "user", "content": "hi"}]},
            headers={"authorization": f"Bearer {made.key.text}", "cf-aig-cache-key": "shared"},
        )
        providers.append(answer.headers["cf-aig-provider"])
    assert providers == ["a", "b"]


async def test_a_missing_model_has_its_fallback_with_the_cache_too(bench: Opener) -> None:
    gateway = await bench(CACHED | {"fallbacks": {"nothing": (A,)}})
    answers = [await gateway.ask("nothing") for _ in range(2)]
    assert [answer.headers["cf-aig-cache-status"] for answer in answers] == ["MISS", "HIT"], answers[0].text


@pytest.mark.parametrize("script", [ServerScript(status=500), ServerScript(cut_after=3), ServerScript(status=400)])
async def test_errors_and_truncated_streams_are_not_cached(bench: Opener, script: ServerScript) -> None:
    script.times, script.tokens = 1, 5
    gateway = await bench(CACHED, a=script)
    await gateway.ask(stream=True)
    answer = await gateway.ask(stream=True)
    assert answer.headers["cf-aig-cache-status"] == "MISS"
    assert answer.text.endswith("[DONE]\n\n")


async def test_a_reply_outlives_the_process(bench: Opener) -> None:
    gateway = await bench(CACHED)
    await gateway.ask()
    end_s = asyncio.get_running_loop().time() + 60
    while not await gateway.store.read("SELECT digest FROM gateway_cache"):
        assert asyncio.get_running_loop().time() < end_s
        await asyncio.sleep(0.01)
    again = GatewayService(gateway.store, [gateway.gateways.settings.find("local", "default")])
    await again.open()
    gateway.gateways.cache = again.cache  # as a new process has it: an empty memory, and the store
    assert (await gateway.ask()).headers["cf-aig-cache-status"] == "HIT"
    await gateway.client.delete("/api/gateways/default/cache")
    assert (await gateway.ask()).headers["cf-aig-cache-status"] == "MISS"
    await again.close()


async def test_tool_calls_are_replayed(bench: Opener) -> None:
    """Whatever a reply is made of comes back: see `test_response_cache` for every kind of part."""
    gateway = await bench(CACHED)
    body = {"prompt": "hello", "max_tokens": 5}
    run = f"/client/v4/accounts/local/ai/run/{A}"
    options = {"options": {"gateway": {"id": "default"}}}
    first = await gateway.client.post(run, json=body | options)
    second = await gateway.client.post(run, json=body | options | {"stream": True})
    assert (first.headers["cf-aig-cache-status"], second.headers["cf-aig-cache-status"]) == ("MISS", "HIT")
    assert first.json()["result"]["response"][:3] == " w0"


async def test_what_cannot_be_read_is_passed_on_uncached(bench: Opener) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "what is this?"}, image]}]
    functions = [{"type": "function", "function": {"name": f"f{at}", "parameters": {}}} for at in range(129)]
    long = {"type": "function", "function": {"name": 65 * "f", "parameters": {}}}
    custom = {"id": "c", "type": "custom", "custom": {"name": "f", "input": "x"}}
    called = [{"role": "assistant", "tool_calls": [custom]}, {"role": "tool", "tool_call_id": "c", "content": "x"}]
    gateway = await bench(CACHED)
    unreadable: tuple[dict[str, Any], ...] = (
        {"messages": [{"role": "user", "content": "x"}, *called]},
        {"tools": functions},
        {"tools": [long]},
        {"tools": functions[:1] * 2},
        {"tools": [{"type": "web_search"}]},
        {"response_format": {"type": "structural_tag", "structures": []}},
    )
    for fields in unreadable:
        answer = await gateway.ask(**fields)
        assert answer.status_code == 200, (fields, answer.text)
        assert "cf-aig-cache-status" not in answer.headers
    assert (await gateway.ask(temperature="hot")).status_code == 400
    for fields in ({"tools": functions[:128]}, {"messages": messages}):
        assert (await gateway.ask(**fields)).headers["cf-aig-cache-status"] == "MISS"
    guarded = await bench({"guardrails": (Guardrail(name="g", pattern="x"),)})
    for fields in unreadable:
        assert (await guarded.ask(**fields)).status_code == 400, fields


async def test_embeddings_images_and_speech(bench: Opener) -> None:
    server = StandinOpenAI()
    await server.start()
    media = ProviderConfig(name="acme", url=server.url, key=server.key)
    gateway = await bench(CACHED | {"fallbacks": {"a/gpt-image": ("acme/gpt-image",)}}, more=(media,))
    body = {"model": "acme/embed-1", "input": ["a", "b"]}
    paths = ("/v1/local/default/compat/embeddings", "/v1/local/default/compat/v1/embeddings")
    answers = [await gateway.client.post(path, json=body) for path in paths]
    assert [answer.headers["cf-aig-cache-status"] for answer in answers] == ["MISS", "HIT"], answers[0].text
    assert answers[0].json()["data"] == answers[1].json()["data"]
    image = {"model": "gpt-image", "prompt": "a cat"}
    answer = await gateway.client.post("/v1/local/default/acme/images/generations", json=image)
    assert answer.status_code == 200, answer.text
    assert answer.headers["cf-aig-provider"] == "acme"
    speech = {"model": "acme/tts-1", "input": "hi", "voice": "x"}
    answer = await gateway.client.post("/v1/local/default/compat/audio/speech", json=speech)
    assert answer.status_code == 200, answer.text
    assert len(await gateway.logs()) == 4
    await server.close()


async def test_a_step_that_fails_leaves_nothing_in_the_reply_of_the_next(bench: Opener) -> None:
    """A universal request whose chat fails is answered by embeddings, from the cache the second time."""
    server = StandinOpenAI()
    await server.start()
    acme = ProviderConfig(name="acme", url=server.url, key=server.key)
    gateway = await bench(CACHED | {"log_content": True}, more=(acme,), a=ServerScript(status=500))
    messages = [{"role": "user", "content": "Hi"}]
    chat = {"provider": "a", "endpoint": "chat/completions", "query": {"model": MODEL, "messages": messages}}
    embeddings = {"provider": "acme", "endpoint": "embeddings", "query": {"model": "embed-1", "input": "x"}}
    answers = [await gateway.client.post("/v1/local/default", json=[chat, embeddings]) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200], [answer.text for answer in answers]
    assert answers[1].headers["cf-aig-cache-status"] == "HIT"
    assert answers[0].json()["data"] == answers[1].json()["data"]
    await server.close()
