"""Dynamic routes, guardrails and the log, end to end."""

import asyncio
from typing import Any

import pytest

from emberline.accounts.account import Limits
from emberline.accounts.account_service import KeyGrant
from emberline.accounts.audit_log import Actor
from emberline.gateway import log
from emberline.protocol.gateway import Budget, Condition, Guardrail, RateLimit, RouteRule
from emberline.telemetry.status import StatusQuery
from standins.openai_script import ServerScript
from tests.api.gateway.conftest import MODEL, SAYS, Opener

A, B = f"a/{MODEL}", f"b/{MODEL}"
WORKS = ServerScript(tokens=5)


def routes(*rules: RouteRule) -> dict[str, Any]:
    return {"routes": {"tiered": rules}}


async def test_a_route_by_metadata(bench: Opener) -> None:
    paid = RouteRule(models=(A,), when=(Condition(key="plan", value="paid"), Condition(key="n", op="gt", value=3)))
    gateway = await bench(routes(paid, RouteRule(models=(B,))), b=WORKS)
    for metadata, model in (('{"plan":"paid","n":4}', A), ('{"plan":"paid","n":3}', B), ("{}", B)):
        answer = await gateway.ask("dynamic/tiered", cf_aig_metadata=metadata)
        assert answer.headers["cf-aig-model"] == model
    row, *_ = await gateway.logs(limit=1)
    assert row["requested"] == "dynamic/tiered"
    run = "/client/v4/accounts/local/ai/run/dynamic/tiered"
    answer = await gateway.client.post(run, json={"messages": SAYS, "options": {"gateway": {"id": "default"}}})
    assert answer.headers["cf-aig-model"] == B
    answer = await gateway.ask("dynamic/nothing")
    assert answer.status_code == 400
    assert "dynamic/tiered" in answer.text


async def test_a_route_by_rate_and_budget(bench: Opener) -> None:
    rules = (
        RouteRule(models=(A,), rate=RateLimit(requests=2, per_s=86_400, by="user")),
        RouteRule(models=(B,), budget=Budget(amount=1e-9)),
        RouteRule(models=("c/gpt-test",)),
    )
    gateway = await bench(routes(*rules), b=WORKS, c=WORKS)
    seen = [
        (await gateway.ask("dynamic/tiered", cf_aig_metadata='{"user":1}')).headers["cf-aig-provider"] for _ in range(4)
    ]
    assert seen == ["a", "a", "b", "c"]
    other = await gateway.ask("dynamic/tiered", cf_aig_metadata='{"user":2}')
    assert other.headers["cf-aig-provider"] == "a"
    await gateway.gateways.counters.sync()
    counted = await gateway.store.read("SELECT amount FROM gateway_counters ORDER BY amount DESC")
    assert sorted(amount for (amount,) in counted)[:2] == [1, 2]


BUDGET = routes(RouteRule(models=(A,), budget=Budget(amount=1e-9)), RouteRule(models=(B,)))
FREE = '{"per_token_in":0,"per_token_out":0}'


async def test_a_cost_of_the_clients_own_is_logged_and_does_not_lower_what_a_budget_counts(bench: Opener) -> None:
    gateway = await bench(BUDGET, b=WORKS)
    for provider in ("a", "b"):
        answer = await gateway.ask("dynamic/tiered", cf_aig_custom_cost=FREE)
        assert answer.headers["cf-aig-provider"] == provider
    assert [row["cost"] for row in await gateway.logs()] == [0, 0]
    used = await gateway.usage()
    assert used
    assert all(cost > 0 for *_, cost in used)


async def test_budgets_count_custom_costs_where_the_operator_says_so(bench: Opener) -> None:
    gateway = await bench(BUDGET | {"custom_cost_counts": True}, b=WORKS)
    for custom, provider in ((FREE, "a"), ('{"per_token_out":1}', "a"), (FREE, "b")):
        answer = await gateway.ask("dynamic/tiered", cf_aig_custom_cost=custom)
        assert answer.headers["cf-aig-provider"] == provider


@pytest.mark.parametrize("cost", ["-1e-9", "1.5", "1e999", "NaN", "Infinity", '"0"'])
async def test_a_cost_that_is_no_price_of_a_token_is_refused(bench: Opener, cost: str) -> None:
    gateway = await bench(BUDGET)
    for field in ("per_token_in", "per_token_out"):
        answer = await gateway.ask(cf_aig_custom_cost=f'{{"{field}":{cost}}}')
        assert (answer.status_code, "cf-aig-custom-cost" in answer.text) == (400, True), answer.text
    assert gateway.servers["a"].n_asked == 0


async def test_a_budget_counts_a_reply_that_its_client_abandons(bench: Opener) -> None:
    gateway = await bench(BUDGET, a=ServerScript(tokens=100, itl_ms=2000), b=WORKS)
    asking = asyncio.create_task(gateway.ask("dynamic/tiered"))
    while not (await gateway.service.operations.status(StatusQuery())).phases.get("decode"):
        await asyncio.sleep(0.005)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    ((_, _, status, _, cost),) = await gateway.usage()
    assert status == "cancelled"
    assert cost > 0
    assert (await gateway.ask("dynamic/tiered")).headers["cf-aig-provider"] == "b"


async def test_a_prompt_that_is_blocked(bench: Opener) -> None:
    rules = (Guardrail(name="words", pattern=r"\bforbidden\b", on="request"),)
    gateway = await bench({"guardrails": rules})
    for stream in (False, True):
        answer = await gateway.ask(stream=stream, messages=[{"role": "user", "content": "a FORBIDDEN word"}])
        assert (answer.status_code, answer.json()["error"][0]["code"]) == (400, 2016)
    assert gateway.servers["a"].n_asked == 0
    for path in ("/v1/chat/completions", "/v1/messages"):
        body = {"model": A, "max_tokens": 5, "messages": [{"role": "user", "content": "forbidden"}]}
        answer = await gateway.client.post(path, json=body, headers={"cf-aig-gateway-id": "default"})
        assert (answer.status_code, answer.json()["error"]["gateway_code"]) == (400, 2016)
    assert (await gateway.ask()).status_code == 200
    rows = await gateway.logs(error="prompt_blocked")
    assert [row["flags"] for row in rows] == [["words"]] * 4


async def test_all_that_is_sent_to_a_model_is_checked(bench: Opener) -> None:
    gateway = await bench({"guardrails": (Guardrail(name="words", pattern="forbidden", on="request"),)})
    schema = {"type": "object", "properties": {"x": {"type": "string", "description": "forbidden"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    call = {"id": "c", "type": "function", "function": {"name": "forbidden", "arguments": "{}"}}
    past = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    past.append({"role": "tool", "tool_call_id": "c", "content": "x"})
    output = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for fields in ({"tools": [tool]}, {"messages": past}, {"response_format": output}):
        answer = await gateway.ask(**fields)
        assert (answer.status_code, answer.json()["error"][0]["code"]) == (400, 2016), fields
    base = "/v1/local/default/a"
    for path, body in (("images/generations", {"prompt": "forbidden"}), ("embeddings", {"input": ["x", "forbidden"]})):
        answer = await gateway.client.post(f"{base}/{path}", json={"model": "m", **body})
        assert (answer.status_code, answer.json()["error"][0]["code"]) == (400, 2016), answer.text
    answer = await gateway.client.post(f"{base}/completions", json={"model": MODEL, "prompt": [1, 2], "max_tokens": 3})
    assert (answer.status_code, "token ids" in answer.text) == (400, True), answer.text
    chat = {"model": A, "messages": [{"role": "user", "content": "look", "images": ["iVBORw0KGgo="]}]}
    answer = await gateway.client.post("/api/chat", json=chat, headers={"cf-aig-gateway-id": "default"})
    assert (answer.status_code, "images" in answer.text) == (400, True), answer.text
    assert gateway.servers["a"].n_asked == 0


@pytest.mark.parametrize("hold", ["sentence", "whole"])
async def test_a_reply_that_is_blocked(bench: Opener, hold: Any) -> None:
    rules = (Guardrail(name="fourth", pattern=r" w3-", on="response", hold=hold),)
    gateway = await bench({"guardrails": rules, "cache_ttl_s": 600})
    for stream in (False, True):
        answer = await gateway.ask(stream=stream)
        assert (answer.status_code, answer.json()["error"][0]["code"]) == (400, 2017)
        assert "w0" not in answer.text
    assert gateway.servers["a"].n_asked == 2, "what is blocked is not cached"
    assert (await gateway.ask(max_tokens=2)).status_code == 200


async def test_a_flag_only_notes_it(bench: Opener) -> None:
    rules = (Guardrail(name="note", pattern="hello", action="flag"), Guardrail(name="out", pattern="w1", action="flag"))
    gateway = await bench({"guardrails": rules})
    answer = await gateway.ask(stream=True)
    assert answer.text.endswith("[DONE]\n\n")
    (row,) = await gateway.logs()
    assert row["flags"] == ["note", "out"]


async def test_a_moderation_model(bench: Opener) -> None:
    """A chat model as the moderator: what it calls unsafe is blocked, and while it is down, nothing passes."""
    moderator = ServerScript(says="safe")
    gateway = await bench({"guardrails": (Guardrail(name="guard", model=B, on="request"),)}, b=moderator)
    assert (await gateway.ask()).status_code == 200
    assert gateway.servers["b"].n_asked == 1
    gateway.servers["b"].script = ServerScript(says="Unsafe S1")
    answer = await gateway.ask()
    assert (answer.status_code, answer.json()["error"][0]["code"]) == (400, 2016)
    assert "guard" in answer.text
    gateway.servers["b"].script = ServerScript(status=500)
    answer = await gateway.ask()
    assert answer.status_code == 502
    assert "guard" in answer.text
    assert gateway.servers["a"].n_asked == 1, "only the prompt that was safe went to the provider"
    assert [row["flags"] for row in await gateway.logs(error="prompt_blocked")] == [["guard"]]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_that_a_moderation_model_blocks(bench: Opener, stream: bool) -> None:
    rules = (Guardrail(name="guard", model=B, on="response", hold="whole"),)
    gateway = await bench({"guardrails": rules}, b=ServerScript(says="unsafe"))
    answer = await gateway.ask(stream=stream)
    assert (answer.status_code, answer.json()["error"][0]["code"]) == (400, 2017)
    assert "w0" not in answer.text
    assert (gateway.servers["a"].n_asked, gateway.servers["b"].n_asked) == (1, 1)


async def test_a_keys_scope_and_its_limit_on_requests_are_not_the_moderators(bench: Opener) -> None:
    gateway = await bench({"guardrails": (Guardrail(name="guard", model=B, on="request"),)}, b=WORKS)
    grant = KeyGrant(models=("a/*",), limits=Limits(requests_per_minute=2))
    made = await gateway.accounts.create_key(Actor("test"), "acme", grant)
    url, headers = "/v1/acme/default/compat/chat/completions", {"authorization": f"Bearer {made.key.text}"}
    body = {"model": A, "messages": SAYS, "max_tokens": 5}
    answers = [await gateway.client.post(url, json=body, headers=headers) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429], answers[0].text


async def test_content_is_logged_only_where_it_is_asked_for(bench: Opener) -> None:
    gateway = await bench()
    await gateway.ask()
    await gateway.ask(cf_aig_collect_log_payload="true", stream=True)
    rows = await gateway.logs()
    assert len(rows) == 2
    logged = await gateway.logs(log=rows[0]["id"])
    assert "hello there" in logged[0]["request"]
    assert "w4-" in logged[0]["response"]
    assert (await gateway.logs(log=rows[1]["id"]))[0]["request"] == ""
    assert [row["id"] for row in await gateway.logs(text="hello there")] == [rows[0]["id"]]


async def test_searching_the_log(bench: Opener) -> None:
    gateway = await bench(b=ServerScript(status=500))
    for number in range(3):
        await gateway.ask(cf_aig_metadata=f'{{"n":{number},"who":"me_%"}}', cf_aig_event_id=f"e{number}")
    await gateway.ask(B)
    assert len(await gateway.logs()) == 4
    assert [row["error"] for row in await gateway.logs(status="error")] == ["provider_failed"]
    assert len(await gateway.logs(provider="a")) == len(await gateway.logs(model=A)) == 3
    assert len(await gateway.logs(metadata="n:1")) == 1
    assert len(await gateway.logs(metadata="who:me_%")) == 3
    assert len(await gateway.logs(metadata="who:me")) == 0
    kept = (await gateway.logs())[0]["id"]
    content = "a" * (64 << 10)  # with LIKE, a word that begins like it takes long at each of its characters
    await gateway.store.write("UPDATE gateway_logs SET request = ? WHERE id = ?", (f"{content} 100%_Sure!", kept))
    assert [row["id"] for row in await gateway.logs(text="100%_sure!")] == [kept]
    assert await gateway.logs(text="100x_sure") == await gateway.logs(text="a" * 900 + "b") == []
    assert [row["event_id"] for row in await gateway.logs(event_id="e2")] == ["e2"]
    assert await gateway.logs(cached="true") == []
    page = (await gateway.client.get("/api/gateways/default/logs", params={"limit": 3})).json()
    rest = (await gateway.client.get("/api/gateways/default/logs", params={"after": page["last_id"]})).json()
    assert (len(page["data"]), page["has_more"], len(rest["data"]), rest["has_more"]) == (3, True, 1, False)
    for wrong in ({"nothing": "1"}, {"status": "odd"}, {"metadata": "x"}, {"after": "x"}, {"since_us": "-1"}):
        assert (await gateway.client.get("/api/gateways/default/logs", params=wrong)).status_code == 400


async def test_the_log_is_bounded(bench: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_SWEEP_ROWS", 1)
    gateway = await bench({"log_max_rows": 2})
    for _ in range(5):
        await gateway.ask()
    assert len(await gateway.logs()) == 5
    await gateway.gateways.logs.sweep()
    assert len(await gateway.logs()) == 2
    await gateway.store.write("UPDATE gateway_logs SET created_us = 0")
    await gateway.gateways.logs.sweep()
    assert await gateway.logs() == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_blocked_reply_is_paid(bench: Opener, stream: bool) -> None:
    """A guardrail that ends a reply ends what is paid: a client could have replies for nothing by provoking it."""
    rule = Guardrail(name="rude", pattern="bad", on="response", hold="sentence")
    says = ServerScript(says="one two. bad three. four five six seven", itl_ms=20)
    gateway = await bench({"guardrails": (rule,)}, a=says)
    answer = await gateway.ask(stream=stream)
    assert "guardrail" in answer.text
    ((_, _, status, n_output, cost_pico),) = await gateway.usage()
    assert status == "cancelled"
    assert n_output > 0
    assert cost_pico > 0


async def test_a_guardrail_reads_what_only_providers_do(bench: Opener) -> None:
    gateway = await bench({"guardrails": (Guardrail(name="rude", pattern="forbidden", on="request"),)})
    thinking = [{"type": "thinking", "thinking": "forbidden", "signature": "s"}]
    said = {"role": "assistant", "content": "Yes.", "thinking_blocks": thinking}
    answer = await gateway.ask(messages=[*SAYS, said, *SAYS])
    assert answer.status_code == 400
    assert not gateway.servers["a"].requests
