"""The wire form of a Worker's `AI` binding, as workerd, miniflare and older wrangler send it."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from emberline.accounts.account_service import AccountService, KeyGrant
from emberline.accounts.audit_log import Actor
from emberline.api.http.guard import BINDING_HOST
from emberline.protocol.errors import Overloaded
from tests.api.fake_service import KEY, MODEL, SPEECH, FakeService, agent, client_of

URL = f"https://{BINDING_HOST}"
INPUTS = {"messages": [{"role": "user", "content": "Hi"}]}


class Sent:
    """A request of the binding, in one of the forms in which it arrives."""

    def __init__(self, form: str) -> None:
        self.form = form

    async def __call__(
        self, client: httpx.AsyncClient, path: str, method: str = "POST", body: Any = None, **headers: str
    ) -> httpx.Response:
        sent = {"content-type": "application/json", "cf-consn-sdk-version": "2.0.0", "cf-consn-model-id": MODEL}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        if self.form == "workerd":
            return await client.request(method, path, content=content, headers=sent | {"host": BINDING_HOST})
        if self.form == "wrangler":
            forwarded = sent | {"x-forwarded": URL + path}
            proxy = "/client/v4/accounts/local/ai/run/proxy"
            return await client.request(method, proxy, content=content, headers=forwarded)
        wrapped = {f"MF-Header-{name}": value for name, value in sent.items()}
        wrapped |= {"MF-URL": URL + path, "MF-Binding": "AI"}
        return await client.request(method, "/", content=content, headers=wrapped)


@pytest.fixture(params=["workerd", "miniflare", "wrangler"])
def send(request: pytest.FixtureRequest) -> Sent:
    return Sent(request.param)


@pytest.mark.parametrize("path", ["/run?version=3", "/ai-gateway/run?version=3"])
async def test_the_result_is_bare(client: httpx.AsyncClient, send: Sent, path: str) -> None:
    answer = await send(client, path, body={"inputs": INPUTS, "options": {}})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["cf-ai-req-id"] == answer.headers["x-request-id"]
    found = answer.json()
    assert (found["response"], found["usage"]["completion_tokens"]) == ("Hello!", 3)
    assert "success" not in found


async def test_a_stream(client: httpx.AsyncClient, send: Sent) -> None:
    answer = await send(client, "/run?version=3", body={"inputs": INPUTS | {"stream": True}, "options": {}})
    assert answer.headers["content-type"] == "text/event-stream"
    *chunks, end, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert "".join(json.loads(chunk)["response"] for chunk in chunks) == "Hello!"
    assert json.loads(end)["usage"]["completion_tokens"] == 3
    assert done == "[DONE]"


async def test_tools(client: httpx.AsyncClient, service: FakeService, send: Sent) -> None:
    service.script = agent
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    found = (await send(client, "/run?version=3", body={"inputs": INPUTS | {"tools": tools}})).json()
    assert [call["arguments"] for call in found["tool_calls"]] == [{"town": "Oslo"}, {"town": "Rome"}]


async def test_headers_and_options_reach_the_request(
    client: httpx.AsyncClient, service: FakeService, send: Sent
) -> None:
    body = {"inputs": {"prompt": "Hi"}, "options": {"rejectIfBusy": True, "tags": ["a"]}}
    answer = await send(
        client, "/run?version=3", body=body, x_session_affinity="ses_1", cf_consn_model_id=f"dev:{MODEL}"
    )
    assert answer.status_code == 200, answer.text
    (request,) = service.requests
    assert (request.session, request.reject_if_busy, request.model) == ("ses_1", True, MODEL)


async def test_models(client: httpx.AsyncClient, send: Sent) -> None:
    answer = await send(client, "/ai-api/models/search?search=smollm2", method="GET")
    assert [row["name"] for row in answer.json()["result"]] == [MODEL]


@pytest.mark.parametrize(
    ("change", "status", "code", "said"),
    [
        ({"headers": {"cf_consn_model_id": "@cf/none/such"}}, 400, 5007, "No such model"),
        ({"headers": {"cf_consn_model_id": ""}}, 400, 5006, "cf-consn-model-id"),
        ({"body": {"inputs": {"prompt": 3}}}, 400, 5006, "prompt"),
        ({"body": {"inputs": [1]}}, 400, 5006, "must be an object"),
        ({"body": {}}, 400, 5006, "inputs"),
        ({"body": b"{"}, 400, 5006, "not valid JSON"),
        ({"body": b"RIFF", "headers": {"content_type": "audio/wav"}}, 400, 5006, "takes no stream of audio/wav"),
    ],
)
async def test_errors_are_what_the_binding_throws(
    client: httpx.AsyncClient, send: Sent, change: dict[str, Any], status: int, code: int, said: str
) -> None:
    body = change.get("body", {"inputs": INPUTS})
    answer = await send(client, "/run?version=3", body=body, **change.get("headers", {}))
    error = answer.json()
    assert (answer.status_code, error["httpCode"], error["internalCode"], error["name"]) == (
        status,
        status,
        code,
        "AiError",
    )
    assert said in error["description"]
    assert error["message"].startswith("AiError: ")
    assert error["errors"][0]["code"] == code
    assert error["requestId"] == answer.headers["x-request-id"]


async def test_overload_is_an_error_to_retry(client: httpx.AsyncClient, service: FakeService, send: Sent) -> None:
    def busy(request: object) -> Any:
        raise Overloaded("too many requests wait", retry_after_s=2)

    service.script = busy
    answer = await send(client, "/run?version=3", body={"inputs": INPUTS})
    assert (answer.status_code, answer.json()["internalCode"], answer.headers["retry-after"]) == (429, 3040, "2")


async def test_streamed_audio(client: httpx.AsyncClient, service: FakeService, send: Sent) -> None:
    headers = {"content_type": "audio/mpeg", "cf_consn_model_id": SPEECH.id}
    answer = await send(client, "/run?version=3&userInputs=%7B%7D", body=b"ID3", **headers)
    assert answer.json()["word_count"] == 2
    await send(client, "/run?version=3&userInputs=%7B%22language%22%3A%22de%22%7D", body=b"ID3", **headers)
    plain, german = service.speech_requests
    assert (plain.audio, plain.language, german.audio, german.language) == (b"ID3", None, b"ID3", "de")


async def test_what_the_binding_has_not(client: httpx.AsyncClient) -> None:
    for form in ("miniflare", "wrangler"):
        for url in ("/api/keys", "/ai-api/tomarkdown", "//evil/run", "/run/"):
            answer = await Sent(form)(client, url, body={})
            assert (answer.status_code, answer.json()["name"]) == (404, "AiError"), url


async def test_a_key_is_needed_where_keys_are_used(service: FakeService, accounts: AccountService, send: Sent) -> None:
    tenant = await accounts.create_key(Actor("test"), "local")
    async with client_of(service, KEY, accounts=accounts) as client:
        refused = await send(client, "/run?version=3", body={"inputs": INPUTS})
        assert (refused.status_code, refused.json()["internalCode"]) == (401, 10000)
        key = f"Bearer {tenant.key.text}"
        assert (await send(client, "/run?version=3", body={"inputs": INPUTS}, authorization=key)).status_code == 200
        assert service.principals[0].account == "local"


async def test_a_keys_scope_holds(service: FakeService, accounts: AccountService, send: Sent) -> None:
    grant = KeyGrant(apis=("models",))
    listing = await accounts.create_key(Actor("test"), "local", grant)
    async with client_of(service, KEY, accounts=accounts) as client:
        key = f"Bearer {listing.key.text}"
        found = await send(client, "/ai-api/models/search", method="GET", authorization=key)
        assert found.status_code == 200
        refused = await send(client, "/run?version=3", body={"inputs": INPUTS}, authorization=key)
        assert (refused.status_code, service.requests) == (403, [])


@pytest.mark.parametrize(
    "get",
    [
        lambda client: client.get("/api/ps", headers={"host": BINDING_HOST}),
        lambda client: client.get("/v1/models", headers={"host": BINDING_HOST}),
        lambda client: client.get(
            "/ai-api/models/search", headers={"host": BINDING_HOST, "origin": f"http://{BINDING_HOST}"}
        ),
        lambda client: client.post("/run", headers={"host": BINDING_HOST, "origin": f"http://{BINDING_HOST}"}),
        lambda client: client.post("/run", headers={"host": "evil.example"}),
    ],
)
async def test_the_bindings_host_is_for_the_binding_alone(
    client: httpx.AsyncClient, get: Callable[[httpx.AsyncClient], Any]
) -> None:
    assert (await get(client)).status_code == 403
