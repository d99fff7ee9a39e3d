"""The paths, headers and bodies by which a request reaches a gateway, and who may use it."""

import json
from typing import Any

import httpx
import pytest

from emberline.accounts.account_service import KeyGrant
from emberline.accounts.audit_log import Actor
from emberline.api.http.guard import BINDING_HOST
from emberline.api.http.wire import MAX_VALUES
from standins.openai_script import ServerScript
from tests.api.gateway.conftest import MODEL, SAYS, Opener

A, B = f"a/{MODEL}", f"b/{MODEL}"
WORKS = ServerScript(tokens=5)
UNIVERSAL = "/v1/local/default"


def step(provider: str, **more: Any) -> dict[str, Any]:
    return {
        "provider": provider,
        "endpoint": "chat/completions",
        "headers": {"Content-Type": "application/json"},
        "query": {"model": MODEL, "messages": SAYS},
        **more,
    }


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/local/default/compat/chat/completions", {"model": A, "messages": SAYS}),
        ("/v1/local/default/compat/v1/chat/completions", {"model": A, "messages": SAYS}),
        ("/v1/local/default/workers-ai/v1/chat/completions", {"model": A, "messages": SAYS}),
        (f"/v1/local/default/workers-ai/{A}", {"messages": SAYS}),
        ("/v1/local/default/a/chat/completions", {"model": MODEL, "messages": SAYS}),
        ("/v1/local/default/a/v1/chat/completions", {"model": MODEL, "messages": SAYS}),
        ("/v1/local/default/a/v1/messages", {"model": MODEL, "messages": SAYS, "max_tokens": 5}),
        ("/v1/local/default/compat/responses", {"model": A, "input": "hello there", "store": False}),
        ("/v1/local/default/compat/completions", {"model": A, "prompt": "hello there", "max_tokens": 5}),
    ],
)
async def test_every_path_reaches_the_model(bench: Opener, path: str, body: dict[str, Any]) -> None:
    gateway = await bench()
    answer = await gateway.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert " w4-" in answer.text
    assert (answer.headers["cf-aig-model"], answer.headers["cf-aig-provider"]) == (A, "a")
    (row,) = await gateway.logs()
    assert row["model"] == A


async def test_geminis_own_api(bench: Opener) -> None:
    gateway = await bench()
    path = f"/v1/local/default/a/v1beta/models/{MODEL}"
    body = {
        "systemInstruction": {"parts": [{"text": "be brief"}]},
        "contents": [
            {"role": "user", "parts": [{"text": "weather?"}]},
            {"role": "model", "parts": [{"functionCall": {"name": "look", "args": {"place": "here"}}}]},
            {"role": "user", "parts": [{"functionResponse": {"name": "look", "response": {"sky": "blue"}}}]},
        ],
        "tools": [{"functionDeclarations": [{"name": "look", "parameters": {"type": "OBJECT", "properties": {}}}]}],
        "generationConfig": {"maxOutputTokens": 5, "temperature": 0, "stopSequences": ["END"]},
    }
    whole = await gateway.client.post(f"{path}:generateContent", json=body)
    assert whole.status_code == 200, whole.text
    candidate = whole.json()["candidates"][0]
    text = candidate["content"]["parts"][0]["text"]
    assert (text.count(" w"), candidate["finishReason"], whole.json()["usageMetadata"]["candidatesTokenCount"]) == (
        5,
        "MAX_TOKENS",
        5,
    )
    sent = gateway.servers["a"].requests[-1]
    assert [message["role"] for message in sent["messages"]] == ["system", "user", "assistant", "tool"]
    assert sent["tools"][0]["function"]["parameters"]["type"] == "object"
    assert (sent["stop"], sent["temperature"]) == (["END"], 0)
    streamed = await gateway.client.post(f"{path}:streamGenerateContent?alt=sse", json=body)
    chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: ")]
    pieces = [part["text"] for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]]
    assert "".join(pieces) == text
    assert chunks[-1]["candidates"][0]["finishReason"] == "MAX_TOKENS"
    assert chunks[-1]["usageMetadata"]["totalTokenCount"] > 5
    wrong = await gateway.client.post(f"{path}:generateContent", json=body | {"safetySettings": []})
    assert wrong.status_code == 400
    assert "safetySettings" in wrong.text


async def test_a_header_or_the_body_names_the_gateway(bench: Opener) -> None:
    gateway = await bench()
    chat = {"model": A, "messages": SAYS}
    plain = await gateway.client.post("/v1/chat/completions", json=chat)
    assert "cf-aig-log-id" not in plain.headers
    named = await gateway.client.post("/v1/chat/completions", json=chat, headers={"cf-aig-gateway-id": "default"})
    assert named.headers["cf-aig-model"] == A
    run = f"/client/v4/accounts/local/ai/run/{A}"
    options = {"gateway": {"id": "default", "cacheTtl": 60, "metadata": {"who": "me"}, "collectLog": True}}
    answer = await gateway.client.post(run, json={"messages": SAYS, "options": options})
    assert answer.headers["cf-aig-cache-status"] == "MISS", answer.text
    assert [row["metadata"] for row in await gateway.logs(metadata="who:me")] == [{"who": "me"}]
    silent = await gateway.ask(cf_aig_collect_log="false")
    assert "cf-aig-log-id" not in silent.headers
    assert len(await gateway.logs()) == 2


async def test_static_routes_win(bench: Opener) -> None:
    gateway = await bench()
    assert (await gateway.client.post("/v1/chat/completions", json={})).json()["error"]["type"]
    assert (await gateway.client.get("/v1/models/x/y")).json()["error"]["code"] == "model_not_found"
    for path in ("/v1/chat/other", "/v1/files/x/y/z", "/v1/images/x"):
        assert (await gateway.client.post(path, json={})).json()["error"]["code"] == "unknown_url", path


async def test_what_is_not_there(bench: Opener) -> None:
    gateway = await bench()

    async def code(path: str, body: Any = None, **headers: str) -> tuple[int, int]:
        answer = await gateway.client.post(path, json=body or {"model": A, "messages": SAYS}, headers=headers)
        return answer.status_code, answer.json()["error"][0]["code"]

    assert await code("/v1/local/nope/compat/chat/completions") == (404, 2001)
    assert await code("/v1/local/default/nobody/chat/completions") == (400, 2008)
    assert await code("/v1/local/default", [step("a"), step("nobody")]) == (400, 2008)
    assert (await code("/v1/local/default/a/images/magic"))[0] == 404
    assert (await code("/v1/local/default", {"not": "a list"}))[0] == 400
    assert (await code("/v1/local/default", []))[0] == 400
    assert (await code("/v1/local/default/compat/chat/completions", **{"cf-aig-nonsense": "1"}))[0] == 400
    for name, value in (("cf-aig-max-attempts", "6"), ("cf-aig-backoff", "wild"), ("cf-aig-metadata", "[1]")):
        answer = await gateway.ask(**{name.replace("-", "_"): value})
        assert answer.status_code == 400
        assert name in answer.json()["error"][0]["message"]


@pytest.mark.parametrize(
    ("field", "status", "problem"),
    [(b'"x":[' + b"1," * MAX_VALUES + b"1]", 413, "values"), (b'"\xff":1', 400, "not valid UTF-8")],
)
async def test_what_is_wrong_with_a_body_on_a_providers_path(
    bench: Opener, field: bytes, status: int, problem: str
) -> None:
    """Not that there is no such model: the model's name is the provider's."""
    gateway = await bench()
    raw = b'{"model":"gpt-test","messages":[],' + field + b"}"
    answer = await gateway.client.post("/v1/local/default/a/chat/completions", content=raw)
    assert answer.status_code == status, answer.text
    assert problem in answer.json()["error"][0]["message"]


async def test_the_universal_endpoint_tries_steps_in_order(bench: Opener) -> None:
    gateway = await bench(a=ServerScript(status=500), b=WORKS)
    config = {"maxAttempts": 2, "retryDelay": 1, "backoff": "constant", "requestTimeout": 5000}
    answer = await gateway.client.post(UNIVERSAL, json=[step("a", config=config), step("b")])
    assert answer.status_code == 200, answer.text
    assert (answer.headers["cf-aig-step"], answer.headers["cf-aig-provider"]) == ("1", "b")
    (row,) = await gateway.logs()
    assert [attempt["provider"] for attempt in row["attempts"]] == ["a", "a", "b"]
    assert [attempt["step"] for attempt in row["attempts"]] == [0, 0, 1]
    gateway.servers["b"].script = ServerScript(status=500)
    answer = await gateway.client.post(UNIVERSAL, json=[step("a"), step("b")])
    assert (answer.status_code, answer.json()["error"][0]["code"]) == (502, 2005)
    assert len(await gateway.logs()) == 2
    wrong = step("b", query={"model": MODEL, "messages": "nonsense"})
    answer = await gateway.client.post(UNIVERSAL, json=[step("a"), wrong])
    assert answer.status_code == 400
    row, *_ = await gateway.logs(limit=1)
    assert (row["status"], row["error"]) == ("error", "bad_input")
    assert [attempt["error"] for attempt in row["attempts"]] == ["unavailable", "bad_input"]
    answer = await gateway.client.post(UNIVERSAL, json=[step("a"), step("b", query={"model": MODEL, "messages": 5})])
    assert answer.status_code == 400


@pytest.mark.parametrize("resume", [False, True])
async def test_a_streamed_step_that_fails_before_its_first_byte_is_followed_by_the_next(
    bench: Opener, resume: bool
) -> None:
    gateway = await bench(a=ServerScript(status=500), b=WORKS)
    query = {"model": MODEL, "messages": SAYS, "stream": True}
    headers = {"x-emberline-resume": "60"} if resume else {}
    both = [step("a", query=query), step("b", query=query)]
    answer = await gateway.client.post(UNIVERSAL, json=both, headers=headers)
    assert (answer.status_code, answer.headers["cf-aig-step"]) == (200, "1"), answer.text
    assert answer.text.endswith("data: [DONE]\n\n")
    assert ("x-emberline-stream-id" in answer.headers) is resume
    gateway.servers["b"].script = ServerScript(status=500)
    answer = await gateway.client.post(UNIVERSAL, json=both, headers=headers)
    assert (answer.status_code, answer.json()["error"][0]["code"]) == (502, 2005)
    assert len(await gateway.logs()) == 2


async def test_a_step_decides_about_the_cache(bench: Opener) -> None:
    gateway = await bench()
    configs: tuple[dict[str, Any], ...] = ({}, {"cacheTtl": 60}, {"cacheTtl": 60}, {"cacheTtl": 60, "skipCache": True})
    answers = [await gateway.client.post(UNIVERSAL, json=[step("a", config=config)]) for config in configs]
    assert [answer.headers.get("cf-aig-cache-status") for answer in answers] == [None, "MISS", "HIT", None]


@pytest.mark.parametrize("is_wrapped", [False, True])
async def test_a_workers_binding_reaches_a_gateway(bench: Opener, is_wrapped: bool) -> None:
    """`env.AI.gateway(id)`, and `env.AI.run(…, {gateway: {id}})`."""
    gateway = await bench(a=ServerScript(status=500), b=WORKS)

    async def send(method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        if not is_wrapped:
            sent = {"host": BINDING_HOST, **{name.replace("_", "-"): value for name, value in headers.items()}}
            return await gateway.client.request(method, path, json=body, headers=sent)
        sent = {f"MF-Header-{name.replace('_', '-')}": value for name, value in headers.items()}
        sent |= {"MF-URL": f"https://{BINDING_HOST}{path}", "MF-Binding": "AI"}
        return await gateway.client.request(method, "/", json=body, headers=sent)

    answer = await send("POST", "/ai-gateway/universal/run/default", [step("a"), step("b")])
    assert (answer.status_code, answer.headers["cf-aig-step"]) == (200, "1"), answer.text
    assert answer.json()["choices"]
    missing = await send("POST", "/ai-gateway/universal/run/nothing", [step("b")])
    assert (missing.status_code, missing.json()["error"][0]["code"]) == (404, 2001)
    url = (await send("GET", "/ai-gateway/gateways/default/url/openai")).json()["result"]["url"]
    assert url.endswith("/v1/local/default/openai")
    assert BINDING_HOST not in url
    assert (await send("GET", "/ai-gateway/gateways/default/logs/1")).status_code == 404
    body = {"inputs": {"messages": SAYS}, "options": {"gateway": {"id": "default"}}}
    ran = await send("POST", "/ai-gateway/run?version=3", body, cf_consn_model_id=f"b/{MODEL}")
    assert (ran.status_code, ran.headers["cf-aig-provider"]) == (200, "b"), ran.text
    assert ran.json()["response"]


async def test_no_field_names_an_address(bench: Opener) -> None:
    gateway = await bench()
    for bad in (
        step("a", endpoint="http://127.0.0.1:1/chat/completions"),
        step("a", endpoint="../../admin"),
        step("http://127.0.0.1:1", endpoint="chat/completions"),
        step("a", headers={"Host": "evil.example"}),
        step("a", url="http://127.0.0.1:1"),
        step("a", query={"model": MODEL, "messages": SAYS, "api_base": "http://127.0.0.1:1", "base_url": "x"}),
    ):
        answer = await gateway.client.post(UNIVERSAL, json=[bad])
        if answer.status_code == 200:  # then the field had no meaning
            assert answer.headers["cf-aig-provider"] == "a"
            assert gateway.servers["a"].n_asked == 1
        else:
            assert answer.status_code in (400, 404), answer.text


async def test_a_providers_key_of_the_clients_own(bench: Opener) -> None:
    gateway = await bench(a=ServerScript(status=500), b=WORKS)
    own = {"Authorization": "Bearer sk-own-key-of-the-client"}
    answer = await gateway.client.post(UNIVERSAL, json=[step("a", headers=own), step("b")])
    assert answer.status_code == 200
    assert gateway.servers["b"].headers["authorization"] == "Bearer sk-secret-b-0123456789", "not another provider's"
    answer = await gateway.client.post(UNIVERSAL, json=[step("b", headers=own)])
    assert gateway.servers["b"].headers["authorization"] == "Bearer sk-own-key-of-the-client"
    path = "/v1/local/default/b/chat/completions"
    body = {"model": MODEL, "messages": SAYS}
    await gateway.client.post(path, json=body, headers=own)
    assert gateway.servers["b"].headers["authorization"] == "Bearer sk-secret-b-0123456789"
    await gateway.client.post(path, json=body, headers={**own, "cf-aig-authorization": "Bearer anything"})
    assert gateway.servers["b"].headers["authorization"] == "Bearer sk-own-key-of-the-client"
    assert "sk-own" not in json.dumps(await gateway.logs())


async def test_a_clients_own_key_by_another_name_of_the_provider(bench: Opener) -> None:
    gateway = await bench(xai=WORKS)
    own = {"authorization": "Bearer sk-own-key-of-the-client", "cf-aig-authorization": "Bearer anything"}
    for path, model in (("grok/chat/completions", MODEL), ("compat/chat/completions", f"grok/{MODEL}")):
        body = {"model": model, "messages": SAYS}
        answer = await gateway.client.post(f"/v1/local/default/{path}", json=body, headers=own)
        assert answer.status_code == 200, answer.text
        assert gateway.servers["xai"].headers["authorization"] == own["authorization"]


async def test_who_may_use_a_gateway(bench: Opener) -> None:
    gateway = await bench(required=True)
    made = await gateway.accounts.create_key(Actor("test"), "acme")
    narrow = await gateway.accounts.create_key(Actor("test"), "acme", KeyGrant(apis=("embeddings",)))
    body = {"model": A, "messages": SAYS}

    async def ask(account: str, **headers: str) -> tuple[int, int]:
        url = f"/v1/{account}/default/compat/chat/completions"
        answer = await gateway.client.post(url, json=body, headers={n.replace("_", "-"): v for n, v in headers.items()})
        found = answer.json()
        return answer.status_code, found["error"][0]["code"] if "error" in found else 0

    key = f"Bearer {made.key.text}"
    assert await ask("acme", authorization=key) == (200, 0)
    assert await ask("acme", cf_aig_authorization=key) == (200, 0)
    assert await ask("acme", cf_aig_authorization=key, authorization="Bearer sk-of-a-provider") == (200, 0)
    assert await ask("acme") == (401, 2009)
    assert await ask("acme", authorization="Bearer wrong") == (401, 2009)
    assert await ask("acme", cf_aig_authorization="Bearer wrong", authorization=key) == (401, 2009)
    assert await ask("other", authorization=key) == (403, 2009)
    assert await ask("acme", authorization=f"Bearer {narrow.key.text}") == (403, 2009)


async def test_settings_over_the_api(bench: Opener) -> None:
    gateway = await bench()
    client = gateway.client

    async def put(**settings: Any) -> tuple[int, str]:
        answer = await client.post("/api/gateways", json={"name": "support", **settings})
        return answer.status_code, answer.text

    assert (await put(cache_ttl_s=60, fallbacks={A: [B]}))[0] == 200
    shown = (await client.get("/api/gateways/support")).json()
    assert (shown["cache_ttl_s"], shown["fallbacks"], shown["source"]) == (60, {A: [B]}, "api")
    assert [one["name"] for one in (await client.get("/api/gateways")).json()["data"]] == ["default", "support"]
    answer = await client.post("/v1/local/support/compat/chat/completions", json={"model": A, "messages": SAYS})
    assert answer.headers["cf-aig-cache-status"] == "MISS"
    for wrong in (
        {"fallbacks": {A: [B], B: [A]}},
        {"fallbacks": {A: ["dynamic/nothing"]}},
        {"routes": {"x": [{"models": ["dynamic/y"]}], "y": [{"models": ["dynamic/x"]}]}},
        {"guardrails": [{"name": "g", "pattern": "(unclosed"}]},
        {"guardrails": [{"name": "g"}]},
        {"cache_ttl_s": -1},
        {"max_attempts": 6},
        {"surprise": True},
    ):
        status, text = await put(**wrong)
        assert status == 400, text
    assert (await client.delete("/api/gateways/support")).status_code == 200
    assert (await client.get("/api/gateways/support")).status_code == 404
    assert (await client.get("/api/gateways/support/logs")).json()["data"], "its rows stay"


async def test_accounts_have_their_own_gateways(bench: Opener) -> None:
    gateway = await bench(required=True)
    keys = [await gateway.accounts.create_key(Actor("test"), account) for account in ("one", "two")]
    one, two = ({"authorization": f"Bearer {made.key.text}"} for made in keys)
    client = gateway.client
    assert (await client.post("/api/gateways", json={"name": "mine"}, headers=one)).status_code == 200
    assert (await client.get("/api/gateways/mine", headers=two)).status_code == 404
    assert (await client.get("/api/gateways/mine?account=one", headers=two)).status_code == 403
    answer = await client.post("/api/gateways", json={"name": "mine", "account": "one"}, headers=two)
    assert answer.status_code == 403
    assert (await client.delete("/api/gateways/mine", headers=two)).status_code == 404
    body = {"model": A, "messages": SAYS}
    answer = await client.post("/v1/two/mine/compat/chat/completions", json=body, headers=two)
    assert answer.json()["error"][0]["code"] == 2001
    await client.post("/v1/one/mine/compat/chat/completions", json=body, headers=one)
    rows = (await client.get("/api/gateways/mine/logs", headers=one)).json()["data"]
    assert len(rows) == 1
    assert (await client.get("/api/gateways/mine/logs", headers=two)).status_code == 404
