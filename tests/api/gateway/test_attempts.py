"""Retries, timeouts, fallbacks and circuit breakers, against stand-in providers that fail in every way."""

import asyncio
import json
import time
from typing import Any

import pytest

from emberline.accounts.account import Limits
from emberline.accounts.audit_log import Actor
from standins.openai_script import ServerScript
from tests.api.gateway.conftest import MODEL, SAYS, Opener

A, B = f"a/{MODEL}", f"b/{MODEL}"
QUICK = {"retry_delay_ms": 1}
WORKS = ServerScript(tokens=5)
BUSY = {"a": "1", "b": ""}  # the Retry-After of a busy provider


def code_of(answer: Any) -> int:
    body = answer.json()
    assert (body["success"], body["result"], body["messages"]) == (False, [], [])
    return int(body["error"][0]["code"])


async def test_a_chat_through_a_gateway(bench: Opener) -> None:
    gateway = await bench()
    for stream in (False, True):
        answer = await gateway.ask(stream=stream, cf_aig_metadata='{"user": 42, "team": "x"}')
        assert answer.status_code == 200
        assert answer.headers["cf-aig-model"] == A
        assert answer.headers["cf-aig-provider"] == "a"
        assert answer.headers["cf-aig-step"] == "0"
        assert "cf-aig-cache-status" not in answer.headers  # the cache was not asked
        assert " w4-" in answer.text
        row, *_ = await gateway.logs()
        assert row["id"] == answer.headers["cf-aig-log-id"]
        assert (row["status"], row["model"], row["provider"], row["requested"]) == ("success", A, "a", A)
        assert row["output_tokens"] == 5
        assert row["cost"] == pytest.approx((row["input_tokens"] + 2 * 5) / 1e6)
        assert row["metadata"] == {"user": 42, "team": "x"}
        assert (row["request"], row["response"]) == ("", "")
        assert row["duration_ms"] >= row["ttft_ms"] > 0
        (attempt,) = row["attempts"]
        assert (attempt["model"], attempt.get("error", "")) == (A, "")
    assert [row[2] for row in await gateway.usage()] == ["finished"] * 2


@pytest.mark.parametrize(
    "script",
    [
        ServerScript(status=500),
        ServerScript(status=503),
        ServerScript(garbage=True),
        ServerScript(html=True),
        ServerScript(bad_json=True),
        ServerScript(cut_after=3),
    ],
    ids=["500", "503", "garbage", "html", "bad json", "cut"],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_is_retried_and_every_attempt_logged(bench: Opener, script: ServerScript, stream: bool) -> None:
    if stream and script.cut_after >= 0:
        return  # then the client has a byte: see below
    script.times, script.tokens = 1, 5
    gateway = await bench({"max_attempts": 3, **QUICK}, a=script)
    answer = await gateway.ask(stream=stream)
    assert answer.status_code == 200, answer.text
    assert " w4-" in answer.text
    assert gateway.servers["a"].n_asked == 2
    (row,) = await gateway.logs()
    failed, answered = row["attempts"]
    assert failed["error"] == "unavailable"
    assert "error" not in answered
    assert answered["waited_ms"] >= 1
    assert [(output, cost is not None) for _, _, _, output, cost in await gateway.usage()][-1] == (5, True)
    billed = [cost for *_, cost in await gateway.usage() if cost]
    assert len(billed) == 1, "nothing is billed twice"


async def test_all_providers_down(bench: Opener) -> None:
    down = ServerScript(status=500, message="Incorrect API key provided: sk-secret-b-0123456789")
    gateway = await bench({"max_attempts": 2, **QUICK, "fallbacks": {A: (B,)}}, a=ServerScript(status=502), b=down)
    answer = await gateway.ask()
    assert answer.status_code == 502
    assert code_of(answer) == 2005
    assert "retry-after" in answer.headers
    assert "after 4 attempts" in answer.text
    (row,) = await gateway.logs()
    assert (row["status"], row["error"], row["step"]) == ("error", "provider_failed", 1)
    assert [attempt["model"] for attempt in row["attempts"]] == [A, A, B, B]
    assert "sk-secret" not in answer.text + json.dumps(row)
    used = await gateway.usage()
    assert used
    assert all(not cost for *_, cost in used)


async def test_a_fallback_answers(bench: Opener) -> None:
    gateway = await bench({"fallbacks": {A: (B,)}}, a=ServerScript(status=500), b=WORKS)
    for stream in (False, True):
        answer = await gateway.ask(stream=stream)
        assert answer.status_code == 200
        assert (answer.headers["cf-aig-step"], answer.headers["cf-aig-model"]) == ("1", B)
    rows = await gateway.usage()
    assert [(model, status) for _, model, status, *_ in rows] == [(A, "failed"), (B, "finished")] * 2


async def test_a_provider_that_is_busy_is_asked_again_when_it_says(bench: Opener) -> None:
    """One says after a second, the other does not say."""
    busy = {name: ServerScript(status=429, retry_after=after, times=1, tokens=5) for name, after in BUSY.items()}
    gateway = await bench({"max_attempts": 2, **QUICK}, **busy)
    answers = await asyncio.gather(gateway.ask(A), gateway.ask(B))
    assert [answer.status_code for answer in answers] == [200, 200]
    rows = await gateway.logs()
    assert {row["model"] for row in rows} == {A, B}
    for row in rows:
        assert row["attempts"][0]["error"] == "overloaded"
        assert row["attempts"][1]["waited_ms"] >= 1000


async def test_a_provider_that_asks_for_too_long_a_wait(bench: Opener) -> None:
    gateway = await bench({"max_attempts": 5, **QUICK}, a=ServerScript(status=429, retry_after="600"))
    answer = await gateway.ask()
    assert answer.status_code == 429
    assert code_of(answer) == 2005
    assert int(answer.headers["retry-after"]) == 600
    assert gateway.servers["a"].n_asked == 1


async def test_the_request_timeout_is_to_the_first_byte(bench: Opener) -> None:
    hangs = ServerScript(hang=True)
    gateway = await bench({"fallbacks": {A: (B,)}}, a=hangs, b=hangs)
    answer = await gateway.ask(cf_aig_request_timeout="100")
    assert answer.status_code == 504
    assert code_of(answer) == 2014
    (row,) = await gateway.logs()
    tried = [(attempt["model"], attempt["error"]) for attempt in row["attempts"]]
    assert tried == [(A, "provider_timeout"), (B, "provider_timeout")]
    gateway.servers["b"].script = WORKS
    query = {"model": MODEL, "messages": SAYS}
    steps: list[dict[str, Any]] = [
        {"provider": name, "endpoint": "chat/completions", "query": query} for name in ("a", "b")
    ]
    steps[0]["config"] = {"requestTimeout": 100}
    answer = await gateway.client.post("/v1/local/default", json=steps)
    assert answer.headers["cf-aig-model"] == B
    answer = await gateway.ask(B, cf_aig_request_timeout="30000")
    assert answer.status_code == 200


async def test_a_slow_reply_is_no_timeout(bench: Opener) -> None:
    """It takes longer than the timeout, which has time to spare for its first byte."""
    timeout_ms, itl_ms = 1500, 240
    gateway = await bench({"request_timeout_ms": timeout_ms}, a=ServerScript(tokens=4, itl_ms=itl_ms))
    began_s = time.monotonic()
    answers = await asyncio.gather(*(gateway.ask(stream=stream) for stream in (False, True)))
    assert time.monotonic() - began_s > timeout_ms / 1000
    assert [(answer.status_code, "w3-" in answer.text) for answer in answers] == [(200, True)] * 2
    assert len(await gateway.usage()) == 2


async def test_nothing_is_tried_again_once_the_client_has_a_byte(bench: Opener) -> None:
    gateway = await bench({"max_attempts": 5, **QUICK, "fallbacks": {A: (B,)}}, a=ServerScript(cut_after=3), b=WORKS)
    answer = await gateway.ask(stream=True)
    assert answer.status_code == 200
    assert "[DONE]" not in answer.text
    last = json.loads(answer.text.strip().splitlines()[-1].removeprefix("data: "))
    assert last["error"][0]["code"] == 2005
    assert gateway.servers["a"].n_asked == 1
    assert gateway.servers["b"].n_asked == 0
    (row,) = await gateway.logs()
    assert (row["status"], row["error"], len(row["attempts"])) == ("error", "provider_failed", 1)


async def test_a_request_that_is_wrong_is_not_tried_again(bench: Opener) -> None:
    wrong = ServerScript(status=400, message="messages: nonsense")
    gateway = await bench({"max_attempts": 5, **QUICK, "fallbacks": {A: (B,)}}, a=wrong, b=WORKS)
    answer = await gateway.ask()
    assert answer.status_code == 400
    assert "nonsense" in answer.json()["error"][0]["message"]
    assert (gateway.servers["a"].n_asked, gateway.servers["b"].n_asked) == (1, 0)


async def test_a_model_that_the_provider_lacks_has_a_fallback(bench: Opener) -> None:
    gateway = await bench({"fallbacks": {"a/no-such-model": (B,)}}, b=WORKS)
    assert (await gateway.ask("a/no-such-model")).headers["cf-aig-model"] == B
    answer = await gateway.ask("nobody/model")
    assert answer.status_code == 404


async def test_the_circuit_breaker_of_a_provider(bench: Opener) -> None:
    gateway = await bench({"fallbacks": {A: (B,)}}, a=ServerScript(status=500), b=WORKS)
    for _ in range(10):
        assert (await gateway.ask()).status_code == 200
    assert gateway.servers["a"].n_asked == 10
    answer = await gateway.ask()
    assert answer.headers["cf-aig-model"] == B
    assert gateway.servers["a"].n_asked == 10, "the provider is not asked while its breaker is open"
    row, *_ = await gateway.logs(limit=1)
    assert "circuit breaker" in row["attempts"][0]["message"]


async def test_a_client_that_leaves_ends_the_attempt(bench: Opener) -> None:
    gateway = await bench({"max_attempts": 5, **QUICK}, a=ServerScript(hang=True))
    asking = asyncio.create_task(gateway.ask())
    while not gateway.servers["a"].running:
        await asyncio.sleep(0.01)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    (row,) = await gateway.logs()
    assert row["status"] == "cancelled"
    assert gateway.servers["a"].n_asked == 1


async def test_retries_count_as_one_request_of_a_rate_limit(bench: Opener) -> None:
    gateway = await bench({"max_attempts": 4, **QUICK}, a=ServerScript(status=500, times=3, tokens=5))
    await gateway.accounts.create_account(Actor("test"), "acme", Limits(requests_per_minute=2))
    made = await gateway.accounts.create_key(Actor("test"), "acme")
    url = "/v1/acme/default/compat/chat/completions"
    headers = {"authorization": f"Bearer {made.key.text}"}
    body = {"model": A, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    statuses = [(await gateway.client.post(url, json=body, headers=headers)).status_code for _ in range(3)]
    assert statuses == [200, 200, 429]


async def test_an_attempt_that_was_never_admitted_leaves_the_count_to_the_next(bench: Opener) -> None:
    gateway = await bench({"fallbacks": {A: (B,)}}, b=ServerScript(tokens=5))
    await gateway.accounts.create_account(Actor("test"), "acme", Limits(requests_per_minute=2))
    made = await gateway.accounts.create_key(Actor("test"), "acme")
    breaker = gateway.gateways.breakers.find("acme", "a")
    assert breaker is not None
    while breaker.allows:
        breaker.failed(time.monotonic())
    headers = {"authorization": f"Bearer {made.key.text}"}
    url, body = "/v1/acme/default/compat/chat/completions", {"model": A, "messages": SAYS, "max_tokens": 5}
    statuses = [(await gateway.client.post(url, json=body, headers=headers)).status_code for _ in range(3)]
    assert (statuses, gateway.servers["a"].n_asked) == ([200, 200, 429], 0)


async def test_a_provider_that_lies_about_its_usage(bench: Opener) -> None:
    """Counts that cannot be are none; and what is billed stays within what a budget has reserved (see accounts)."""
    gateway = await bench(a=ServerScript(tokens=5))
    gateway.servers["a"].script = ServerScript(tokens=5, event_tokens=5)
    answer = await gateway.ask()
    assert answer.json()["usage"]["completion_tokens"] == 5
