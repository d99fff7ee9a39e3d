"""Workers AI's API: run, the queue, the catalog, event subscriptions, and a Worker's binding."""

from collections.abc import Iterator

from tests.golden.cases.common import HELLO, LOCAL, TOOL, WEATHER_CALL
from tests.golden.exchange import Case, Client, one

MODEL = "@cf/huggingfacetb/smollm2-135m-instruct"
CHAT = {"messages": HELLO}
BINDING = {"host": "workers-binding.ai", "cf-consn-model-id": MODEL, "cf-consn-sdk-version": "2.0.0"}


def path_of(name: str, path: str) -> str:
    """A path of the account of the case that has that name."""
    return f"/client/v4/accounts/{name.replace('/', '-')}/ai/{path}"


def run(name: str, body: object, path: str = f"run/{MODEL}", **options: object) -> Case:
    """A case of one request to a path of its own account."""
    return one(name, path_of(name, path), body, **options)


def cases() -> Iterator[Case]:
    for name, body in (("run/local", CHAT), ("run/local-prompt", {"prompt": "Once upon a time", "max_tokens": 5})):
        yield run(f"{name}-whole", body)
        yield run(f"{name}-streamed", {**body, "stream": True})
    yield run("run/local-raw", {"prompt": "Once upon", "raw": True, "max_tokens": 3})
    yield run("run/local-tool-call", {**CHAT, "tools": [TOOL]}, say=WEATHER_CALL)
    yield run("run/local-tool-call-streamed", {**CHAT, "tools": [TOOL], "stream": True}, say=WEATHER_CALL)
    yield run("run/universal", {"model": MODEL, "input": {**CHAT, "max_tokens": 3}}, "run")
    yield run("run/vllm", CHAT, "run/vllm-model")
    yield run("run/vllm-streamed", {**CHAT, "stream": True}, "run/vllm-model")
    yield run("run/anthropic", CHAT, "run/anthropic/claude-opus-5")
    yield run("run/failing-down", CHAT, "run/down-model")
    yield run("run/overloaded", CHAT, script="refuse=true")
    yield run("run/refused-unknown-model", CHAT, "run/@cf/nobody/nothing")
    yield run("run/refused-no-input", {})
    yield run("run/refused-wrong-type", {**CHAT, "max_tokens": "many"})
    yield run("run/refused-unsupported", {**CHAT, "lora": "x"})
    yield run("run/refused-bad-json", None, content=b"{", headers={"content-type": "application/json"})
    yield run("run/refused-no-key", CHAT, key="")
    yield one("run/refused-other-account", "/client/v4/accounts/somebody/ai/run/" + MODEL, CHAT)
    chat = {"model": LOCAL, **CHAT, "max_tokens": 3}
    yield run("run/openai-path", chat, "v1/chat/completions")
    yield run("run/openai-path-refused", {**chat, "model": "nothing"}, "v1/chat/completions")
    yield Case("run/queued", _queued)
    yield Case("run/queued-refused", _queued_refused)
    yield run("catalog/models", None, "models/search", method="GET")
    yield run("catalog/models-filtered", None, "models/search?search=vllm&per_page=1", method="GET")
    yield run("catalog/models-openrouter", None, "models/search?format=openrouter&search=smollm2", method="GET")
    yield run("catalog/schema", None, f"models/schema?model={MODEL}", method="GET")
    yield run("catalog/tasks", None, "tasks/search", method="GET")
    yield run("catalog/authors", None, "authors/search", method="GET")
    yield Case("catalog/event-subscriptions", _subscriptions)
    inputs = {"inputs": {**CHAT, "max_tokens": 3}, "options": {}}
    yield one("binding/run", "/run?version=3", inputs, headers=BINDING)
    streamed = {"inputs": {**CHAT, "max_tokens": 3, "stream": True}}
    yield one("binding/run-streamed", "/run?version=3", streamed, headers=BINDING)
    yield one("binding/models", "/ai-api/models/search?search=smollm2", method="GET", headers=BINDING)
    unknown = {**BINDING, "cf-consn-model-id": "@cf/nobody/nothing"}
    yield one("binding/refused-unknown-model", "/run?version=3", inputs, headers=unknown)
    wrapped = {
        "mf-url": "https://workers-binding.ai/run?version=3",
        "mf-binding": "AI",
        "mf-header-cf-consn-model-id": MODEL,
    }
    yield one("binding/miniflare", "/", inputs, headers={**wrapped, "mf-header-content-type": "application/json"})


async def _queued(client: Client) -> None:
    path = path_of(client.account, f"run/{MODEL}")
    requests = [{"prompt": "Hi", "max_tokens": 3, "external_reference": "a"}, {"prompt": "Hi", "max_tokens": -1}]
    made = await client.post(f"{path}?queueRequest=true", {"requests": requests})
    polled = {"request_id": made["result"]["request_id"]}
    await client.until(path, lambda found: "responses" in found["result"], polled)


async def _queued_refused(client: Client) -> None:
    path = path_of(client.account, f"run/{MODEL}")
    await client.post(path, {"request_id": "nothing"})
    await client.post(f"{path}?queueRequest=true", {"requests": []})


async def _subscriptions(client: Client) -> None:
    path = f"/client/v4/accounts/{client.account}/event_subscriptions/subscriptions"
    new = {
        "name": "mine",
        "source": {"type": "workersAi.model", "model_name": MODEL},
        "destination": {"type": "webhook", "url": client.stage.standins["hook"].url},
        "events": ["batch.succeeded"],
    }
    made = await client.post(path, new)
    await client.get(path)
    await client.send("PATCH", f"{path}/{made['result']['id']}", {"enabled": False})
    await client.send("DELETE", f"{path}/{made['result']['id']}")
    await client.get(f"{path}/nothing")
