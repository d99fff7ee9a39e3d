"""Rate limits in responses: headers on success and on refusal, and errors that name what was exceeded."""

import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import httpx
import pytest

from emberline.api.http.errors import Dialect, error_headers
from emberline.api.http.rate_limit_headers import rate_limit_headers
from emberline.protocol.errors import BudgetExceeded, BudgetReserved, EmberlineError, RateLimited, from_info
from emberline.protocol.events import TextEvent
from emberline.protocol.rate_limits import LimitState, RateLimits
from emberline.protocol.request import GenerateRequest
from tests.api.fake_service import MODEL, FakeService
from tests.lazy_modules import anthropic, openai

LIMITS = RateLimits(LimitState(60, 59, 1.0), LimitState(10_000, 9_400, 3.6))
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
PATHS = {
    f"/client/v4/accounts/acme/ai/run/{MODEL}": {"prompt": "hi"},
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": MODEL, "prompt": ["a", "b"]},
    "/v1/responses": {"model": MODEL, "input": "hi"},
    "/v1/messages": CHAT,
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_every_answer_has_the_headers(
    client: httpx.AsyncClient, service: FakeService, path: str, stream: bool
) -> None:
    service.rate_limits, began_s = LIMITS, time.time()
    answer = await client.post(path, json=PATHS[path] | {"stream": stream})
    assert answer.status_code == 200
    if path == "/v1/messages":
        assert answer.headers["anthropic-ratelimit-requests-limit"] == "60"
        assert answer.headers["anthropic-ratelimit-tokens-remaining"] == "9400"
        reset = datetime.fromisoformat(answer.headers["anthropic-ratelimit-tokens-reset"])
        assert reset.timestamp() > began_s
        assert reset.timestamp() - time.time() <= 6
    else:
        names = ["limit-requests", "remaining-requests", "reset-requests"]
        assert [answer.headers[f"x-ratelimit-{name}"] for name in names] == ["60", "59", "1s"]
        names = ["limit-tokens", "remaining-tokens", "reset-tokens"]
        assert [answer.headers[f"x-ratelimit-{name}"] for name in names] == ["10000", "9400", "3.6s"]


async def test_without_limits_there_are_no_headers(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/chat/completions", json=CHAT)
    assert not [name for name in answer.headers if "ratelimit" in name]


def refuse(service: FakeService, error: EmberlineError) -> None:
    async def script(request: GenerateRequest) -> AsyncIterator[TextEvent]:
        raise from_info(error.info())  # as it arrives from the core
        yield

    service.script = script


RATE = RateLimited("this API key is limited to 60 requests a minute", retry_after_s=1.5, rate_limits=LIMITS)
RESERVED = BudgetReserved("reserved by running requests", retry_after_s=1)
SPENT = BudgetExceeded("spent until the month ends", retry_after_s=86_400)
FOR_EVER = BudgetExceeded("spent for ever")


@pytest.mark.parametrize(
    ("error", "native", "type_and_code"),
    [
        (RATE, 971, ("rate_limit_error", "rate_limit_exceeded")),
        (RESERVED, 3036, ("rate_limit_error", "rate_limit_exceeded")),
        (SPENT, 3036, ("insufficient_quota", "insufficient_quota")),
    ],
)
async def test_refusals_are_distinct(
    client: httpx.AsyncClient, service: FakeService, error: EmberlineError, native: int, type_and_code: tuple[str, str]
) -> None:
    refuse(service, error)
    for path, body in PATHS.items():
        answer = await client.post(path, json=body)
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == str(-(-error.retry_after_s // 1)).partition(".")[0]
        assert answer.headers["retry-after-ms"] == str(int(error.retry_after_s * 1000))
        said = answer.json()
        if "/run/" in path:
            assert said["errors"][0]["code"] == native
            assert error.message in said["errors"][0]["message"]
        elif path == "/v1/messages":
            assert said["error"] == {"type": "rate_limit_error", "message": error.message}
        else:
            assert (said["error"]["type"], said["error"]["code"]) == type_and_code
        name = "anthropic-ratelimit-requests-limit" if path == "/v1/messages" else "x-ratelimit-limit-requests"
        assert (name in answer.headers) == (error is RATE)


def test_clients_do_not_retry_what_stays_refused() -> None:
    for error in (SPENT, FOR_EVER):
        _, headers = error_headers(error, Dialect.OPENAI, "id")
        assert (b"x-should-retry", b"false") in headers
        assert (b"retry-after" in dict(headers)) == (error is SPENT)
    assert b"x-should-retry" not in dict(error_headers(RESERVED, Dialect.OPENAI, "id")[1])
    # What the clients themselves make of the header.
    for sdk in (openai, anthropic):
        retries = sdk.OpenAI(api_key="k") if sdk is openai else sdk.Anthropic(api_key="k")
        response = httpx.Response(429, headers={"x-should-retry": "false"})
        assert not retries._should_retry(response)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, b"0ms"), (0.0075, b"8ms"), (1.0, b"1s"), (59.9, b"59.9s"), (60.0, b"1m0s"), (90.5, b"1m30.5s")],
)
def test_durations_as_openai_writes_them(seconds: float, text: bytes) -> None:
    headers = dict(rate_limit_headers(RateLimits(LimitState(1, 0, seconds)), Dialect.OPENAI))
    assert headers[b"x-ratelimit-reset-requests"] == text


def test_resets_of_the_anthropic_api_are_times() -> None:
    began_s = time.time()
    headers = dict(rate_limit_headers(RateLimits(LimitState(1, 0, 120.0)), Dialect.ANTHROPIC))
    reset = datetime.fromisoformat(headers[b"anthropic-ratelimit-requests-reset"].decode())
    assert reset.tzinfo == UTC
    assert began_s + 119 <= reset.timestamp() <= time.time() + 121
