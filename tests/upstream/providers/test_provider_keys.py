"""Provider keys of accounts: stored, used before the configured one, and seen by nobody else."""

import logging
from pathlib import Path
from typing import Any

import pytest

from emberline.accounts.audit_log import Actor
from emberline.accounts.provider_keys import NewProviderKey
from emberline.net.egress_policy import EgressPolicy
from emberline.upstream.providers.registry import KNOWN, KnownProvider
from tests.upstream.providers.conftest import Gateway, Opener, StartProvider, configured

ACTOR = Actor("test", "")
MODEL = "anthropic/claude-opus-5"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
SECRET = "sk-ant-very-secret-0123456789"


async def key_of(made: Gateway, account: str, admin: bool = False) -> dict[str, str]:
    from emberline.accounts.account_service import KeyGrant

    grant = KeyGrant(role="admin") if admin else KeyGrant()
    issued = await made.accounts.create_key(ACTOR, account, grant)
    return {"authorization": f"Bearer {issued.key.text}"}


async def test_an_accounts_own_key_comes_first(gateway: Opener, provider_server: StartProvider) -> None:
    server = await provider_server("anthropic")
    made = await gateway(configured("anthropic", server), keys=True)
    alice, bob, admin = [await key_of(made, name, name == "root") for name in ("alice", "bob", "root")]
    new = {"name": "anthropic", "key": SECRET}
    assert (await made.post("/api/providers", new, **alice)).status_code == 200
    assert (await made.post("/v1/chat/completions", BODY, **bob)).status_code == 200
    refused = await made.post("/v1/chat/completions", BODY, **alice)  # the stand-in knows the configured key only
    assert (refused.status_code, server.headers["x-api-key"]) == (403, SECRET)
    assert SECRET not in refused.text
    listed = {who: (await made.client.get("/api/providers", headers=keys)).json()["data"] for who, keys in
              {"alice": alice, "bob": bob, "root": admin}.items()}  # fmt: skip
    assert [(row["name"], row["account"]) for row in listed["alice"]] == [("anthropic", "alice"), ("anthropic", None)]
    assert [row["account"] for row in listed["bob"]] == [None]
    assert [row["account"] for row in listed["root"]] == ["alice", None]
    assert (await made.client.delete("/api/providers/anthropic", headers=bob)).status_code == 404
    assert (await made.client.delete("/api/providers/anthropic", headers=alice)).status_code == 200
    assert (await made.post("/v1/chat/completions", BODY, **alice)).status_code == 200
    other = await made.post("/api/providers", {**new, "account": "bob"}, **alice)
    assert other.status_code == 403


async def test_a_stored_key_of_all_accounts_makes_a_provider(gateway: Opener, provider_server: StartProvider) -> None:
    server = await provider_server("gemini")
    made = await gateway(keys=True)
    alice, admin = await key_of(made, "alice"), await key_of(made, "root", admin=True)
    body = BODY | {"model": "gemini/gemini-3-pro"}
    missing = await made.post("/v1/chat/completions", body, **alice)
    assert missing.status_code == 404
    assert "emberline provider add gemini" in missing.json()["error"]["message"]
    new = {"name": "gemini", "key": server.key, "url": server.url}
    assert (await made.post("/api/providers", new, **admin)).status_code == 200
    assert (await made.post("/v1/chat/completions", body, **alice)).status_code == 200
    tested = await made.post("/api/providers/gemini/test", {}, **alice)
    assert tested.json() == {"name": "gemini", "ok": True, "models": ["gemini-3-pro"]}
    assert [row[0] for row in await made.rows()] == ["gemini/gemini-3-pro"]


async def test_the_key_is_nowhere_to_be_seen(
    gateway: Opener, provider_server: StartProvider, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server = await provider_server("anthropic")
    made = await gateway(configured("anthropic", server), keys=True)
    alice = await key_of(made, "alice")
    await made.post("/api/providers", {"name": "anthropic", "key": SECRET}, **alice)
    seen: list[str] = []
    faults: list[dict[str, Any]] = [
        {},
        {"status": 500, "body": f'{{"error":{{"message":"key {SECRET} broke"}}}}'.encode()},
        {"status": 400, "body": f'{{"error":{{"message":"{SECRET} is bad"}}}}'.encode()},
        {"status": 403, "body": f'{{"error":{{"message":"{SECRET}"}}}}'.encode()},
        {"status": 429, "body": f'{{"error":{{"message":"{SECRET}"}}}}'.encode()},
        {"html": True},
        {"redirect": f"https://evil.example/?{SECRET}"},
    ]
    for fault in faults:
        for name, value in {"status": 0, "body": b"", "html": False, "redirect": "", **fault}.items():
            setattr(server.script, name, value)
        seen.append((await made.post("/v1/chat/completions", BODY, **alice)).text)
        seen.append((await made.post("/v1/messages", BODY | {"max_tokens": 5}, **alice)).text)
        seen.append((await made.post("/api/providers/anthropic/test", {}, **alice)).text)
    seen.append((await made.client.get("/api/providers", headers=alice)).text)
    seen += [f"{entry}" for entry in await made.accounts.audit.entries()]
    seen += [record.getMessage() + str(record.__dict__) for record in caplog.records]
    assert not [text for text in seen if SECRET in text]
    raw = b"".join(path.read_bytes() for path in tmp_path.iterdir() if path.is_file())
    assert SECRET.encode() not in raw
    assert b"anthropic" in raw


@pytest.mark.parametrize("kind", ["anthropic", "gemini", "openai"])
async def test_a_provider_that_repeats_the_key(
    gateway: Opener, provider_server: StartProvider, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Inside a stream, or where its message is cut in the middle of the key."""
    server = await provider_server(kind, error_after=1)
    secret = server.key = "not-of-a-known-form-0123456789"
    said = "x" * 480 + secret + "x" * 480 + secret
    event = server.error_event()
    monkeypatch.setattr(server, "error_event", lambda: event.replace(b'"message":"', b'"message":"' + said.encode()))
    made = await gateway(configured(kind, server))
    body = BODY | {"model": f"{kind}/m", "max_tokens": 5}
    seen = []
    for path in ("/v1/chat/completions", "/v1/messages"):
        seen += [(await made.post(path, body | {"stream": stream})).text for stream in (False, True)]
    server.script.status, server.script.body = 500, server.error(500, "x" * 250 + secret + "x" * 720 + secret)
    seen.append((await made.post("/v1/chat/completions", body)).text)
    assert seen
    assert all("xxxx" in text and secret[:8] not in text for text in seen), seen


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1/v1",
        "https://127.0.0.1/v1",
        "https://169.254.169.254/latest",
        "https://[::1]/v1",
        "https://10.1.2.3/v1",
        "https://0x7f000001/v1",
    ],
)
async def test_an_accounts_url_inside_the_network_is_not_reached(gateway: Opener, url: str) -> None:
    made = await gateway(keys=True)
    alice = await key_of(made, "alice")
    await made.post("/api/providers", {"name": "mine", "key": "k", "url": url}, **alice)
    answer = await made.post("/v1/chat/completions", BODY | {"model": "mine/m"}, **alice)
    assert answer.status_code == 400, answer.text
    assert "provider_networks" in answer.json()["error"]["message"] or "resolved" in answer.json()["error"]["message"]


async def test_a_local_server_that_is_known_by_name_is_the_operators_to_offer(
    gateway: Opener, provider_server: StartProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await provider_server("openai")
    monkeypatch.setitem(KNOWN, "llamacpp", KnownProvider(server.url, needs_key=False))
    made = await gateway(keys=True)
    alice, bob, admin = [await key_of(made, name, name == "root") for name in ("alice", "bob", "root")]
    body = BODY | {"model": "llamacpp/gpt-test"}
    await made.post("/api/providers", {"name": "llamacpp", "key": server.key}, **alice)
    own = await made.post("/v1/chat/completions", body, **alice)
    assert (own.status_code, "provider_networks" in own.text) == (400, True), own.text
    assert (await made.post("/api/providers/llamacpp/test", {}, **alice)).status_code == 400
    assert (await made.post("/v1/chat/completions", body, **bob)).status_code == 404
    assert not server.headers, "nothing was sent"
    await made.post("/api/providers", {"name": "llamacpp", "key": server.key}, **admin)
    assert (await made.post("/v1/chat/completions", body, **bob)).status_code == 200


async def test_a_key_under_another_name_of_a_provider_is_of_that_provider(
    gateway: Opener, provider_server: StartProvider
) -> None:
    server = await provider_server("gemini")
    made = await gateway(configured("gemini", server), keys=True)
    alice, bob = await key_of(made, "alice"), await key_of(made, "bob")
    body = BODY | {"model": "google/gemini-3-pro"}
    assert (await made.post("/v1/chat/completions", body, **bob)).status_code == 200
    assert (await made.post("/api/providers", {"name": "google", "key": SECRET}, **alice)).status_code == 200
    assert (await made.post("/v1/chat/completions", body, **bob)).status_code == 200
    await made.post("/v1/chat/completions", body, **alice)
    assert server.headers["x-goog-api-key"] == SECRET
    assert (await made.client.delete("/api/providers/google", headers=alice)).status_code == 200
    assert (await made.post("/v1/chat/completions", body, **alice)).status_code == 200


async def test_names_are_resolved_for_every_connection_and_the_address_is_pinned(
    gateway: Opener, provider_server: StartProvider
) -> None:
    server = await provider_server("anthropic")
    answers = [["127.0.0.1"], ["10.0.0.9"]]
    asked: list[str] = []

    async def resolve(host: str, port: int) -> list[str]:
        asked.append(host)
        return answers[min(len(asked), len(answers)) - 1]

    made = await gateway(egress=EgressPolicy(["127.0.0.0/8"], resolve, "[accounts] provider_networks"), keys=True)
    alice, bob = await key_of(made, "alice"), await key_of(made, "bob")
    url = f"http://llm.alice.example:{server.port}/v1"
    new = {"name": "mine", "key": server.key, "url": url, "kind": "anthropic"}
    assert (await made.post("/api/providers", new, **alice)).status_code == 200
    body = BODY | {"model": "mine/claude-opus-5"}
    assert (await made.post("/v1/chat/completions", body, **alice)).status_code == 200
    assert server.headers["host"] == f"llm.alice.example:{server.port}"
    for connection in tuple(server._connections):
        connection.transport.abort()
    rebound = await made.post("/v1/chat/completions", body, **alice)  # the name leads inside now
    assert (rebound.status_code, asked) == (400, ["llm.alice.example"] * 2)
    other = await made.post("/v1/chat/completions", body, **bob)
    assert other.status_code == 404
    (worker,) = made.core.admission.snapshot().workers
    assert (worker.name, worker.healthy, worker.state) == ("mine/*", True, "ready")


async def test_too_many_keys(gateway: Opener) -> None:
    from emberline.accounts import provider_keys

    made = await gateway()
    for number in range(provider_keys.MAX_PER_ACCOUNT):
        await made.accounts.provider_keys.add(ACTOR, NewProviderKey("a", f"p{number}", "k", "", "https://x.example"))
    again = NewProviderKey("a", "p0", "k2", "", "https://x.example")
    await made.accounts.provider_keys.add(ACTOR, again)
    answer = await made.post("/api/providers", {"name": "more", "key": "k", "url": "https://x.example", "account": "a"})
    assert answer.status_code == 400
