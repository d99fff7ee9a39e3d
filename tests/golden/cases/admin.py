"""The operator's API, and what an account may see of it."""

from collections.abc import Iterator

from tests.golden.cases.common import LOCAL, chat
from tests.golden.exchange import Case, Client, one
from tests.golden.server import ADMIN_KEY

CHAT = "/v1/chat/completions"
MODEL = "@cf/huggingfacetb/smollm2-135m-instruct"


def cases() -> Iterator[Case]:
    yield one("admin/health", "/health", method="GET", key="")
    yield one("admin/health-detail", "/health", method="GET", key=ADMIN_KEY, names_only=2)
    yield one("admin/ps", "/api/ps", method="GET")
    yield one("admin/ps-of-operator", "/api/ps", method="GET", key=ADMIN_KEY, names_only=2)
    yield Case("admin/status", _status)
    yield one("admin/audit", "/api/audit?limit=1", method="GET", key=ADMIN_KEY, names_only=2)
    yield one("admin/cache", "/api/cache", method="GET", key=ADMIN_KEY)
    yield one("admin/cache-purge", "/api/cache/purge", {"session": "nothing"})
    yield one("admin/cache-export-nothing", "/api/cache/export?session=nothing", method="GET")
    yield one("admin/cluster", "/api/cluster", method="GET", key=ADMIN_KEY)
    yield one("admin/audit-verify-refused", "/api/audit/verify", method="GET")
    yield one("admin/load-unknown", "/api/models/load", {"model": "nothing"}, key=ADMIN_KEY)
    yield one("admin/drain-unknown", "/api/workers/drain", {"name": "nothing"}, key=ADMIN_KEY)
    yield one("admin/preflight", CHAT, method="OPTIONS", headers={"origin": "https://evil.example"})
    yield one("admin/favicon", "/favicon.ico", method="GET", key="")
    yield Case("admin/accounts", _accounts)
    yield Case("admin/keys", _keys)
    yield Case("admin/keys-refused", _bad_keys)
    yield Case("admin/prices", _prices)
    yield Case("admin/usage", _usage)
    yield Case("admin/aliases", _aliases)
    yield Case("admin/providers", _providers)
    yield Case("admin/drain", _drain)


async def _status(client: Client) -> None:
    await client.post(CHAT, {**chat(LOCAL), "max_tokens": 3})
    await client.get("/api/status?requests=0&recent=1", key=ADMIN_KEY, names_only=2)


async def _accounts(client: Client) -> None:
    path = f"/api/accounts/{client.account}"
    await client.post("/api/accounts", {"id": client.account}, key=ADMIN_KEY)
    await client.get(path, key=ADMIN_KEY)
    await client.send(
        "PATCH", path, {"requests_per_minute": 5, "budget": "1.50", "budget_period": "month"}, key=ADMIN_KEY
    )
    await client.send("PATCH", path, {"nothing": 5}, key=ADMIN_KEY)
    await client.get("/api/accounts/nobody", key=ADMIN_KEY)


async def _keys(client: Client) -> None:
    await client.get(f"/api/keys?account={client.account}", key=ADMIN_KEY)
    new = {"account": client.account, "name": "second", "models": [LOCAL], "apis": ["chat"], "concurrency": 3}
    made = await client.post("/api/keys", new, key=ADMIN_KEY)
    path = f"/api/keys/{made['id']}"
    await client.get(path, key=ADMIN_KEY)
    await client.send("PATCH", path, {"apis": []}, key=ADMIN_KEY)
    await client.post(f"{path}/rotate", {"overlap_s": 0}, key=ADMIN_KEY)
    await client.post(CHAT, chat(LOCAL), key=made["key"])
    await client.post(f"{path}/revoke", key=ADMIN_KEY)


async def _bad_keys(client: Client) -> None:
    await client.post("/api/keys", {"account": "no spaces"}, key=ADMIN_KEY)
    await client.post("/api/keys", {"account": client.account, "apis": ["nothing"]}, key=ADMIN_KEY)
    await client.post("/api/keys", {"account": client.account, "expires_at": "never"}, key=ADMIN_KEY)
    await client.get("/api/keys/key_nothing", key=ADMIN_KEY)


async def _prices(client: Client) -> None:
    model = f"{client.account}-model"
    await client.post("/api/prices", {"model": model, "input": "0.60", "output": "3.00"}, key=ADMIN_KEY)
    await client.get(f"/api/prices?model={model}", key=ADMIN_KEY)
    await client.post("/api/prices/remove", {"model": model}, key=ADMIN_KEY)
    await client.get(f"/api/prices?model={model}", key=ADMIN_KEY)
    await client.post("/api/prices", {"model": model, "input": "-1"}, key=ADMIN_KEY)
    await client.get(f"/api/prices?model={MODEL}")


async def _usage(client: Client) -> None:
    await client.post(CHAT, {**chat(LOCAL), "max_tokens": 3})
    await client.post(CHAT, chat("compatible-model"))
    await client.get("/api/usage?by=model")
    await client.get("/api/usage?by=model&format=csv")
    await client.get(f"/api/usage?by=account,class&account={client.account}", key=ADMIN_KEY)
    await client.get("/api/usage?by=nothing")
    await client.get("/api/usage?account=somebody")


async def _aliases(client: Client) -> None:
    name = client.account
    await client.post("/api/aliases", {"name": name, "targets": {LOCAL: 1}}, key=ADMIN_KEY)
    await client.post(CHAT, {**chat(name), "max_tokens": 3})
    await client.send("DELETE", f"/api/aliases/{name}", key=ADMIN_KEY)
    await client.get("/api/aliases", key=ADMIN_KEY)
    await client.post("/api/aliases", {"name": name, "targets": {name: 1}}, key=ADMIN_KEY)
    await client.post("/api/aliases", {"name": name, "targets": {}}, key=ADMIN_KEY)


async def _providers(client: Client) -> None:
    url = client.stage.standins["anthropic"].url
    await client.post("/api/providers", {"name": "mine", "kind": "anthropic", "key": "sk-provider", "url": url})
    await client.get("/api/providers")
    await client.post("/api/providers/mine/test")
    await client.post(CHAT, chat("mine/claude-opus-5"))
    await client.send("DELETE", "/api/providers/mine")
    await client.post(CHAT, chat("mine/claude-opus-5"))
    await client.post("/api/providers", {"name": "far", "key": "sk-provider", "url": "http://10.0.0.1/v1"})


async def _drain(client: Client) -> None:
    await client.post("/api/workers/drain", {"name": "sglang"}, key=ADMIN_KEY)
    await client.post(CHAT, {**chat("sglang-model"), "stream": True})
    await client.post("/api/workers/undrain", {"name": "sglang"}, key=ADMIN_KEY)
