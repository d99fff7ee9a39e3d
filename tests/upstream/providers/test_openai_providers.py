"""`provider/model` through every API, on a provider that speaks OpenAI's API."""

from collections.abc import Awaitable, Callable

import pytest

from emberline.accounts.prices import PriceVersion
from emberline.accounts.usage_row import UsageRow
from emberline.config import ProviderConfig
from emberline.protocol.price import Price
from emberline.protocol.request import GenerateRequest, Message, Principal, Priority
from emberline.service.event_collector import collect_answer
from emberline.service.work import Work
from emberline.telemetry.request_log import JobContext
from emberline.upstream.providers.registry import KNOWN, KnownProvider
from standins.openai_script import ServerScript, StandinPrompt
from standins.standin_openai import StandinServer
from tests.upstream.providers.conftest import KEY, SAYS, Opener, events, said

MODEL = "acme/gpt-test"
REPLY = "".join(StandinPrompt({"messages": SAYS}).words(50))

StartServer = Callable[..., Awaitable[StandinServer]]


def acme(server: StandinServer, **more: object) -> ProviderConfig:
    return ProviderConfig(name="acme", url=f"{server.url}/v1", key=KEY, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat(gateway: Opener, openai_server: StartServer, stream: bool) -> None:
    server = await openai_server()
    made = await gateway(acme(server))
    price = Price(input=1_000_000, cached_input=1_000_000, output=2_000_000)
    version = PriceVersion(model=MODEL, number=1, valid_from_us=0, source="admin", created_us=0, price=price)
    made.core.prices.add(version)
    body = {"model": MODEL, "messages": SAYS, "stream": stream, "stream_options": {"include_usage": True}}
    answer = await made.post("/v1/chat/completions", body if stream else {**body, "stream_options": None})
    assert answer.status_code == 200, answer.text
    if stream:
        chunks = events(answer.text)
        assert said(chunks) == REPLY
        usage = chunks[-1]["usage"]
    else:
        assert answer.json()["choices"][0]["message"]["content"] == REPLY
        usage = answer.json()["usage"]
    ((model, status, n_input, _, n_output, cost),) = await made.rows()
    assert (model, status, n_output) == (MODEL, "finished", 50)
    assert n_input == usage["prompt_tokens"]
    assert cost == n_input * 1_000_000 + 50 * 2_000_000
    (got,) = server.requests
    assert got["model"] == "gpt-test"


async def test_every_other_api(gateway: Opener, openai_server: StartServer) -> None:
    server = await openai_server()
    made = await gateway(acme(server))
    run = "/client/v4/accounts/a/ai/run"
    calls = [
        ("/v1/responses", {"model": MODEL, "input": SAYS[0]["content"]}),
        ("/v1/messages", {"model": MODEL, "messages": SAYS, "max_tokens": 100}),
        (f"{run}/{MODEL}", {"messages": SAYS}),
        (run, {"model": MODEL, "input": {"messages": SAYS}}),
    ]
    for path, body in calls:
        answer = await made.post(path, body)
        assert answer.status_code == 200, answer.text
        assert REPLY.strip() in answer.text.replace("\\n", "\n"), path
    answer = await made.post("/v1/completions", {"model": MODEL, "prompt": "once", "max_tokens": 5})
    assert answer.status_code == 200
    rows = await made.rows()
    assert [(row[0], row[1]) for row in rows] == [(MODEL, "finished")] * 5
    assert {request["model"] for request in server.requests} == {"gpt-test"}


@pytest.mark.parametrize("hosted", [False, True])  # a hosted one gets all fields that a client sends
async def test_drafts_are_not_asked_of_a_provider(
    gateway: Opener, openai_server: StartServer, monkeypatch: pytest.MonkeyPatch, hosted: bool
) -> None:
    server = await openai_server()
    monkeypatch.setitem(KNOWN, "acme", KnownProvider(f"{server.url}/v1"))
    made = await gateway(ProviderConfig(name="acme", key=KEY) if hosted else acme(server))
    bodies = {
        "/v1/chat/completions": {"messages": SAYS},
        "/v1/completions": {"prompt": "once"},
        "/v1/messages": {"messages": SAYS, "max_tokens": 100},
        "/v1/responses": {"input": "Hi"},
    }
    for path, body in bodies.items():
        refused = await made.post(path, {"model": MODEL, **body, "speculation": {"report": True}})
        assert refused.status_code == 400, refused.text
        assert "`speculation`" in refused.text, path
    assert server.requests == []
    ignored = await made.post("/v1/chat/completions", {"model": MODEL, "messages": SAYS, "speculation": None})
    assert ignored.status_code == 200, ignored.text
    assert "speculation" not in server.requests[0]


async def test_listed_models_and_names_in_any_case(gateway: Opener, openai_server: StartServer) -> None:
    server = await openai_server()
    made = await gateway(acme(server, models=("gpt-test", "gpt-more")))
    listed = (await made.client.get("/v1/models")).json()["data"]
    assert {row["id"] for row in listed} == {"acme/gpt-test", "acme/gpt-more"}
    answer = await made.post("/v1/chat/completions", {"model": "ACME/gpt-test", "messages": SAYS})
    assert answer.status_code == 200
    assert (await made.rows())[0][0] == MODEL


async def test_a_provider_that_is_not_configured_is_named(gateway: Opener) -> None:
    made = await gateway()
    answer = await made.post("/v1/chat/completions", {"model": "openai/gpt-9", "messages": SAYS})
    assert answer.status_code == 404
    assert "[[providers]]" in answer.json()["error"]["message"]
    made_up = await made.post("/v1/chat/completions", {"model": "nobody/gpt-9", "messages": SAYS})
    assert "provider" not in made_up.json()["error"]["message"]


async def test_a_hosted_provider_needs_a_key(gateway: Opener) -> None:
    made = await gateway(ProviderConfig(name="openai"))
    answer = await made.post("/v1/chat/completions", {"model": "openai/gpt-9", "messages": SAYS})
    assert answer.status_code == 403
    assert "emberline provider add openai" in answer.json()["error"]["message"]


async def test_a_failing_provider_is_blamed_once_and_billed_nothing(
    gateway: Opener, openai_server: StartServer
) -> None:
    server = await openai_server(ServerScript(cut_after=3))
    made = await gateway(acme(server))
    answer = await made.post("/v1/chat/completions", {"model": MODEL, "messages": SAYS})
    assert answer.status_code == 503
    assert "provider acme" in answer.json()["error"]["message"]
    assert len(server.requests) == 1
    ((_, status, *_),) = await made.rows()
    assert status == "failed"


async def test_a_job_is_granted_its_provider(gateway: Opener, openai_server: StartServer) -> None:
    server = await openai_server()
    made = await gateway(acme(server))
    (grant,) = made.core.grants.issue(MODEL, 1)
    assert grant.engine == "acme"
    rows: list[UsageRow] = []
    job = GenerateRequest(
        id="b-0", model=MODEL, messages=(Message("user", SAYS[0]["content"]),), priority=Priority.BATCH
    )
    answer = await collect_answer(made.service.run(Work(job, Principal("a"), JobContext(grant.engine, rows.append))))
    grant.release()
    assert answer.choices[0].text == REPLY
    assert [(row.model, row.status, row.priority) for row in rows] == [(MODEL, "finished", "batch")]
    assert made.core.grants.issue("acme2/gpt-test", 1) == []


async def test_models_that_clients_make_up_take_no_room(gateway: Opener, openai_server: StartServer) -> None:
    server = await openai_server()
    made = await gateway(acme(server))
    balancer = made.core.admission.balancer
    for number in range(3):
        await made.post("/v1/chat/completions", {"model": f"acme/none-{number}", "messages": SAYS})
    assert set(balancer._pools) == {"acme/*"}
    assert set(balancer.queue._pools) == {"acme/*"}
