"""Flex requests on a full engine: refused at once on every API, while other requests wait and are served."""

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

from tests.api.server_process import Running, make_home, serving
from tests.lazy_modules import openai

PLACES = 2
SLOW = 200  # tokens, of 10 ms each
ACCOUNT = "/client/v4/accounts/acme/ai"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
ENDPOINTS: dict[str, dict[str, Any]] = {
    CHAT: {"model": "smollm2", "messages": MESSAGES},
    "/v1/completions": {"model": "smollm2", "prompt": "Hi"},
    "/v1/responses": {"model": "smollm2", "input": "Hi"},
    f"{ACCOUNT}/v1/chat/completions": {"model": "smollm2", "messages": MESSAGES},
    f"{ACCOUNT}/v1/responses": {"model": "smollm2", "input": "Hi"},
    f"{ACCOUNT}/run/@cf/huggingfacetb/smollm2-135m-instruct": {"messages": MESSAGES},
}


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    home = make_home(smollm2, tmp_path_factory.mktemp("flex"))
    with serving(home, "say=count,itl_ms=10", PLACES, "--http-workers", "2") as server:
        yield server


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        yield http


def asked(http: httpx.Client, path: str, n_tokens: int, tier: str, **more: Any) -> httpx.Response:
    limit = "max_output_tokens" if path.endswith("responses") else "max_tokens"
    return http.post(path, json=ENDPOINTS[path] | {limit: n_tokens, "service_tier": tier} | more)


def load(http: httpx.Client) -> dict[str, int]:
    found: dict[str, int] = http.get("/health").json()["detail"]["engines"][0]["load"]
    return found


def is_free(http: httpx.Client) -> bool:
    """True if the engine runs nothing and no HTTP worker counts a request, ended or cancelled, as in flight."""
    figures = re.findall(r"^emberline_endpoint_(?:active|foreign){.*} (.*)$", http.get("/metrics").text, re.MULTILINE)
    assert len(figures) == 2
    return not load(http)["running"] and not any(map(float, figures))


def until(what: Any) -> None:
    end_s = time.monotonic() + 60
    while not what():
        assert time.monotonic() < end_s
        time.sleep(0.02)


@contextmanager
def filled(http: httpx.Client) -> Iterator[None]:
    """Long requests occupy all slots until the block ends."""
    with ExitStack() as stack:
        for _ in range(PLACES):
            body = ENDPOINTS[CHAT] | {"max_tokens": 30 * SLOW, "stream": True}
            stack.enter_context(http.stream("POST", CHAT, json=body))
        until(lambda: load(http)["running"] == PLACES)
        yield
        assert load(http)["running"] == PLACES, "the engine was full all the time"


def test_a_full_engine_refuses_only_flex_on_every_api(http: httpx.Client) -> None:
    with ThreadPoolExecutor(32) as pool:
        with filled(http):
            refused = {path: asked(http, path, 1, "flex") for path in ENDPOINTS}
            streamed = asked(http, CHAT, 1, "flex", stream=True)
            asks = [(path, tier) for tier in ("default", "priority") for path in ENDPOINTS]
            others = {(path, tier): pool.submit(asked, http, path, 1, tier) for path, tier in asks}
        assert {path: answer.status_code for path, answer in refused.items()} == dict.fromkeys(ENDPOINTS, 429)
        assert streamed.status_code == 429
        for answer in [*refused.values(), streamed]:
            assert int(answer.headers["retry-after"]) >= 1
            assert int(answer.headers["retry-after-ms"]) >= 1
        assert refused[CHAT].json()["error"]["code"] == "rate_limit_exceeded"
        native = refused[f"{ACCOUNT}/run/@cf/huggingfacetb/smollm2-135m-instruct"].json()
        assert native["errors"][0]["code"] == 3040
        assert {ask: one.result().status_code for ask, one in others.items()} == dict.fromkeys(asks, 200)
    until(lambda: is_free(http))
    free = {path: asked(http, path, 1, "flex") for path in ENDPOINTS}
    assert {path: answer.status_code for path, answer in free.items()} == dict.fromkeys(ENDPOINTS, 200)
    assert free[CHAT].json()["service_tier"] == "flex"


class Stream:
    """A streamed flex request, read in a thread. It runs, or is refused, once the head of its response is here."""

    def __init__(self, http: httpx.Client, pool: ThreadPoolExecutor, n_tokens: int) -> None:
        self.is_answered = Event()
        self.status = 0
        self._read = pool.submit(self._send, http, n_tokens)

    def _send(self, http: httpx.Client, n_tokens: int) -> str:
        body = ENDPOINTS[CHAT] | {"max_tokens": n_tokens, "service_tier": "flex", "stream": True}
        try:
            with http.stream("POST", CHAT, json=body) as answer:
                self.status = answer.status_code
                self.is_answered.set()
                return answer.read().decode()
        finally:
            self.is_answered.set()

    @property
    def has_ended(self) -> bool:
        """Return True once the whole response is here."""
        return self._read.done()

    def text(self) -> str:
        """Wait for the whole response."""
        return self._read.result()


def started_flex(http: httpx.Client, pool: ThreadPoolExecutor, n_tokens: int) -> Stream:
    """Start a flex request. An HTTP worker whose load report is older than a request's end may refuse it, so it is sent
    again until it runs, as a client does after a 429."""
    end_s = time.monotonic() + 60
    while True:
        stream = Stream(http, pool, n_tokens)
        assert stream.is_answered.wait(60)
        if stream.status != 429:
            assert stream.status == 200
            return stream
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_flex_that_runs_makes_room_for_others(http: httpx.Client) -> None:
    """Flex fills the engine; a default request preempts it, and flex still completes."""
    n_ended = PLACES
    for n_tokens in (SLOW // 2, 2 * SLOW, 8 * SLOW):  # where the machine is so busy that the shorter ones end meanwhile
        until(lambda: is_free(http))
        with ThreadPoolExecutor(8) as pool:
            flex = [started_flex(http, pool, n_tokens) for _ in range(PLACES)]
            answer = asked(http, CHAT, 2, "default")
            n_ended = sum(one.has_ended for one in flex)
            assert answer.status_code == 200
            for one in flex:
                assert '"finish_reason":"length"' in one.text()
                assert "error" not in one.text()
        if not n_ended:
            break
    assert n_ended == 0


def test_queued_work_is_no_reason_to_refuse_flex(server: Running) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    ask: dict[str, Any] = {"model": "smollm2", "input": "Hi", "max_output_tokens": 10 * SLOW, "background": True}
    made = [client.responses.create(**ask).id for _ in range(2 * PLACES)]

    def n_running() -> int:
        return sum(client.responses.retrieve(one).status == "in_progress" for one in made)

    until(lambda: n_running() >= PLACES)
    answer = client.chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": "Hi"}], max_tokens=1, service_tier="flex"
    )
    assert answer.service_tier == "flex"
    assert n_running() >= 1
    for one in made:
        client.responses.cancel(one)
