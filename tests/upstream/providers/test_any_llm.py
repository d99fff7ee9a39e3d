"""Providers behind `any-llm-sdk`: a small module of that name, and the package itself where it is installed."""

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from emberline.config import ConfigError, ProviderConfig
from emberline.upstream.providers.directory import ProviderDirectory
from tests.upstream.providers.conftest import KEY, PATIENCE_S, SAYS, Opener, StartProvider, events, said
from tests.upstream.providers.test_provider_keys import key_of

MODEL = "aws/anthropic.claude"
BODY = {"model": MODEL, "messages": SAYS, "max_tokens": 100}


class AnyLLMError(Exception):
    def __init__(self, message: str, **more: Any) -> None:
        super().__init__(message)
        self.original_exception: Exception | None = None
        self.__dict__ |= more


def error(name: str, message: str = "scripted", **more: Any) -> Exception:
    return type(name, (AnyLLMError,), {})(message, **more)  # type: ignore[no-any-return]


class Chunk:
    def __init__(self, **fields: Any) -> None:
        self._fields = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m", **fields}

    def model_dump(self, mode: str, exclude_none: bool) -> dict[str, Any]:
        return self._fields


def delta(finish: str | None = None, **fields: Any) -> Chunk:
    ends = {} if finish is None else {"finish_reason": finish}
    return Chunk(choices=[{"index": 0, **ends, "delta": fields}])


class Package:
    """What tests script of the package, and what they see of its use."""

    def __init__(self) -> None:
        self.created: list[Any] = []
        self.calls: list[Any] = []
        self.threads: set[int] = set()
        self.fails: Exception | None = None
        self.fails_inside: Exception | None = None
        self.hangs = False
        self.block = threading.Event()  # the stream blocks its thread until it is set
        self.block.set()
        self.closed = threading.Event()  # a stream has been closed
        self.n_words = 5

    async def stream(self) -> AsyncIterator[Chunk]:
        try:
            yield delta(role="assistant", content="")
            for number in range(self.n_words):
                yield delta(content=f"{number} ")
                self.block.wait(PATIENCE_S)
            if self.fails_inside is not None:
                raise self.fails_inside
            if self.hangs:
                await asyncio.sleep(3600)
            yield delta(finish="stop")
            yield Chunk(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12})
        finally:
            self.closed.set()


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    made, unsupported = Package(), type("UnsupportedParameterError", (AnyLLMError,), {})

    class AnyLLM:
        MISSING_PACKAGES_ERROR: ImportError | None = None

        @staticmethod
        def get_supported_providers() -> list[str]:
            return ["bedrock", "watsonx"]

        @staticmethod
        def get_provider_class(name: str) -> Any:
            missing = ImportError("No module named 'ibm'") if name == "watsonx" else None
            return SimpleNamespace(MISSING_PACKAGES_ERROR=missing)

        @classmethod
        def create(cls, provider: str, **options: Any) -> "AnyLLM":
            if "max_retries" in options:
                raise unsupported("no retries to set")
            made.created.append((provider, options))
            return cls()

        async def alist_models(self) -> list[Any]:
            return [SimpleNamespace(id="anthropic.claude")]

        async def acompletion(self, **fields: Any) -> AsyncIterator[Chunk]:
            made.calls.append(fields)
            made.threads.add(threading.get_ident())
            if made.fails is not None:
                raise made.fails
            return made.stream()

    module: Any = ModuleType("any_llm")
    module.AnyLLM, module.exceptions = AnyLLM, SimpleNamespace(UnsupportedParameterError=unsupported)
    monkeypatch.setitem(sys.modules, "any_llm", module)
    yield made
    made.block.set()


def aws(**more: Any) -> ProviderConfig:
    return ProviderConfig(**{"name": "aws", "kind": "any-llm", "provider": "bedrock", "key": KEY, **more})


async def until(condition: Any) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat(gateway: Opener, package: Package, stream: bool) -> None:
    made = await gateway(aws())
    for _ in range(2):
        answer = await made.post("/v1/chat/completions", {**BODY, "stream": stream})
        assert answer.status_code == 200, answer.text
        text = said(events(answer.text)) if stream else answer.json()["choices"][0]["message"]["content"]
        assert text == "0 1 2 3 4 "
        for choice in [choice for chunk in events(answer.text) for choice in chunk["choices"]]:
            assert "finish_reason" in choice
    assert [row[:5] for row in await made.rows()] == [(MODEL, "finished", 7, 0, 5)] * 2
    call = package.calls[0]
    assert (call["model"], call["messages"], call["stream"]) == ("anthropic.claude", SAYS, True)
    assert threading.get_ident() not in package.threads
    # One client serves both, and retries nothing where that can be set.
    assert package.created == [("bedrock", {"api_key": KEY, "api_base": None, "unified_exceptions": True})]


@pytest.mark.parametrize(
    ("fails", "status", "part"),
    [
        (error("AuthenticationError", f"bad key {KEY}"), 403, "does not accept the key"),
        (error("MissingApiKeyError", "set AWS_TOKEN"), 403, "set AWS_TOKEN"),
        (error("RateLimitError", f"too many of {KEY}", retry_after="23"), 429, "no room"),
        (error("ModelNotFoundError"), 404, "no such model"),
        (error("InvalidRequestError", f"wrong {KEY}", param="seed"), 400, "wrong …"),
        (error("InvalidRequestError", status_code=413), 413, "too large"),
        (error("UnsupportedParameterError", "no `n`", parameter_name="n"), 400, "no `n`"),
        (error("ContextLengthExceededError", "too long"), 400, "context length"),
        (error("InsufficientFundsError"), 403, "paid"),
        (error("GatewayTimeoutError"), 503, "answered 504"),
        (error("ProviderError", original_exception=type("APITimeoutError", (Exception,), {})()), 503, "answered 504"),
        (error("ProviderError", status_code=200), 503, "answered 502"),
        (error("ProviderError", f"down {KEY}", status_code=503), 503, "answered 503: down …"),
        (ValueError(f"odd {KEY}"), 503, "answered 502"),
        (NotImplementedError("no completions"), 400, "no completions"),
    ],
)
async def test_errors(gateway: Opener, package: Package, fails: Exception, status: int, part: str) -> None:
    package.fails = fails
    made = await gateway(aws())
    answer = await made.post("/v1/chat/completions", BODY)
    assert (answer.status_code, part in answer.text) == (status, True), answer.text
    assert KEY not in answer.text
    assert status != 429 or answer.headers["retry-after"] == "23"
    assert [row[1] for row in await made.rows()] == ["failed"]
    assert len(package.calls) == 1


async def test_an_error_inside_the_stream(gateway: Opener, package: Package) -> None:
    package.fails_inside = error("ProviderError", f"broke {KEY}")
    made = await gateway(aws())
    answer = await made.post("/v1/chat/completions", {**BODY, "stream": True})
    assert "middle of its reply: broke …" in answer.text
    assert KEY not in answer.text


async def test_a_stream_that_stalls_times_out_and_is_closed(gateway: Opener, package: Package) -> None:
    package.hangs = True
    made = await gateway(aws(timeout_s=0.4))
    answer = await made.post("/v1/chat/completions", BODY)
    assert (answer.status_code, "did not answer" in answer.text) == (503, True), answer.text
    await until(package.closed.is_set)


async def test_a_call_that_blocks_holds_up_nobody_and_ends_with_its_client(gateway: Opener, package: Package) -> None:
    package.block.clear()
    package.n_words = 10_000
    made = await gateway(aws())
    blocked = asyncio.create_task(made.post("/v1/chat/completions", BODY))
    await until(lambda: package.calls)
    assert (await made.client.get("/v1/models")).status_code == 200
    blocked.cancel()
    await asyncio.gather(blocked, return_exceptions=True)
    await until(lambda: not made.service.n_running)
    package.block.set()
    await until(package.closed.is_set)
    package.n_words = 5
    assert (await made.post("/v1/chat/completions", BODY)).status_code == 200
    assert [row[1] for row in await made.rows()] == ["cancelled", "finished"]


async def test_cancelled_calls_that_block_their_threads_leave_threads_for_others(
    gateway: Opener, package: Package
) -> None:
    package.block.clear()
    made = await gateway(aws(max_running=2))
    for number in range(3):
        blocked = asyncio.create_task(made.post("/v1/chat/completions", BODY))
        await until(lambda: len(package.calls) == number + 1)  # noqa: B023
        blocked.cancel()
        await asyncio.gather(blocked, return_exceptions=True)
        await until(lambda: not made.service.n_running)
    package.n_words = 0  # the next stream does not block
    assert (await made.post("/v1/chat/completions", BODY)).status_code == 200


async def test_a_long_reply_arrives_whole_though_it_is_read_slowly(gateway: Opener, package: Package) -> None:
    package.n_words = 20_000
    made = await gateway(aws())
    text = said(events((await made.post("/v1/chat/completions", {**BODY, "stream": True})).text))
    assert text == "".join(f"{number} " for number in range(package.n_words))


async def test_only_fields_of_a_chat_reach_the_package(gateway: Opener, package: Package) -> None:
    made = await gateway(aws())
    for name in ("api_base", "api_key", "client_args", "extra_headers", "base_url"):
        await made.post("/v1/chat/completions", {**BODY, name: "http://10.0.0.1"})
    image = {"type": "image_url", "image_url": {"url": "http://10.0.0.1/a.png"}}
    answer = await made.post("/v1/chat/completions", {**BODY, "messages": [{"role": "user", "content": [image]}]})
    assert answer.status_code == 400
    assert "10.0.0.1" not in str(package.calls)
    assert len(package.created) <= 1
    answer = await made.post("/v1/completions", {"model": MODEL, "prompt": "once"})
    assert (answer.status_code, "text completions" in answer.text) == (400, True), answer.text
    answer = await made.post("/v1/embeddings", {"model": "aws/titan-embed", "input": "once"})
    assert (answer.status_code, "chats only" in answer.text) == (400, True), answer.text


async def test_an_account_has_its_own_key_but_no_url(gateway: Opener, package: Package) -> None:
    made = await gateway(aws(), keys=True)
    headers = await key_of(made, "alice")
    for more, status in (({}, 200), ({"url": "https://203.0.113.9/v1"}, 403)):
        stored = await made.post("/api/providers", {"name": "aws", "key": "sk-alice", **more}, **headers)
        assert stored.status_code == 200, stored.text
        answer = await made.post("/v1/chat/completions", BODY, **headers)
        assert answer.status_code == status, answer.text
    assert "without one" in answer.text
    assert [options["api_key"] for _, options in package.created] == ["sk-alice"]


@pytest.mark.parametrize(
    ("provider", "part"),
    [("betrock", "any-llm has no provider 'betrock'"), ("watsonx", "pip install 'any-llm-sdk[watsonx]'")],
)
def test_a_provider_that_the_package_lacks(package: Package, provider: str, part: str) -> None:
    with pytest.raises(ConfigError) as raised:
        ProviderDirectory([aws(provider=provider)])
    assert part in str(raised.value)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "any_llm", None)
    with pytest.raises(ConfigError, match=r"provider aws: .*pip install 'emberline\[any-llm\]'"):
        ProviderDirectory([aws()])
    with pytest.raises(ConfigError, match="kind any-llm only"):
        ProviderDirectory([ProviderConfig(name="openai", provider="bedrock")])


# --- the package itself -----------------------------------------------------------------------------------------------


async def test_the_real_package(
    gateway: Opener, provider_server: StartProvider, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("any_llm")
    caplog.set_level("INFO")
    server = await provider_server("openai")
    made = await gateway(aws(provider="openai", url=server.url, key=server.key))
    for stream in (False, True):
        answer = await made.post("/v1/chat/completions", {**BODY, "stream": stream})
        assert answer.status_code == 200, answer.text
        text = said(events(answer.text)) if stream else answer.json()["choices"][0]["message"]["content"]
        assert text == server.script.text
    assert [row[:5] for row in await made.rows()] == [(MODEL, "finished", 20, 0, 9)] * 2
    assert {request["model"] for request in server.requests} == {"anthropic.claude"}
    assert server.url not in caplog.text
    client = made.service.upstream.providers.clients["aws"]
    assert await made.service.upstream.providers.test(client.name, SimpleNamespace(account="a")) == ["gpt-image"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("script", "status", "part"),
    [
        ({"status": 429, "retry_after": "23"}, 429, "no room"),
        ({"status": 401}, 403, "does not accept the key"),
        ({"status": 400}, 400, "scripted"),
        ({"status": 404}, 404, "no such model"),
        ({"status": 503}, 503, "answered 503"),
        ({"hang": True}, 503, "did not answer"),
        ({"hang_after": 300}, 503, "did not answer"),
        ({"cut_after": 400}, 503, "failed"),
        ({"error_after": 3}, 503, "middle of its reply"),
    ],
)
async def test_failures_of_the_real_package(
    gateway: Opener, provider_server: StartProvider, script: Any, status: int, part: str
) -> None:
    pytest.importorskip("any_llm")
    server = await provider_server("openai", **script)
    handle, n_sent = server._handle, 0

    async def count(*request: Any) -> None:
        nonlocal n_sent
        n_sent += 1
        await handle(*request)

    server._handle = count  # type: ignore[method-assign]
    hangs = "hang" in script or "hang_after" in script
    made = await gateway(aws(provider="openai", url=server.url, key=server.key, timeout_s=2 if hangs else 60))
    answer = await made.post("/v1/chat/completions", BODY)
    assert (answer.status_code, part in answer.text) == (status, True), answer.text
    assert server.key not in answer.text
    assert status != 429 or answer.headers["retry-after"] == "23"
    assert [row[1] for row in await made.rows()] == ["failed"]
    assert n_sent == 1  # the package's own retries are off
