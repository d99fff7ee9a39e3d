"""OpenAI's API without Responses: chat, completions, models, embeddings, media, and what is refused."""

from collections.abc import Iterator

from tests.golden.cases.common import HELLO, LOCAL, LONG_STEPS, TOOL, WEATHER_CALL, chat
from tests.golden.exchange import Case, Client, one, whole_and_streamed

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USAGE = {"stream_options": {"include_usage": True}}


def cases() -> Iterator[Case]:
    yield from _local()
    yield from _relayed()
    yield from _completions()
    yield from _models()
    yield from _encode_and_media()
    yield from _refused()
    yield from _limited()
    yield from _failing()


def _local() -> Iterator[Case]:
    yield from whole_and_streamed("chat/local", CHAT, chat(LOCAL))
    yield one("chat/local-streamed-usage", CHAT, {**chat(LOCAL), "stream": True, **USAGE})
    yield one("chat/local-alias", CHAT, chat("assistant"))
    yield one("chat/local-full-id", CHAT, chat("@cf/huggingfacetb/smollm2-135m-instruct"))
    yield one("chat/local-max-tokens", CHAT, {**chat(LOCAL), "max_completion_tokens": 5})
    yield one("chat/local-stop", CHAT, {**chat(LOCAL), "stop": ["assistant named"]})
    yield one(
        "chat/local-system", CHAT, {**chat(LOCAL), "messages": [{"role": "system", "content": "Be brief."}, *HELLO]}
    )
    yield one(
        "chat/local-parts",
        CHAT,
        {
            **chat(LOCAL),
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]}
            ],
        },
    )
    yield one("chat/local-two-choices", CHAT, {**chat(LOCAL), "n": 2, "max_tokens": 3})
    told = {"prompt_logprobs": 0, "return_token_ids": True, "max_tokens": 2}
    yield one("chat/local-prompt-logprobs", CHAT, {**chat(LOCAL), **told})
    yield one(
        "chat/local-token-ids-streamed",
        CHAT,
        {**chat(LOCAL), "return_token_ids": True, "max_tokens": 1, "stream": True},
    )
    yield one("chat/local-logprobs", CHAT, {**chat(LOCAL), "logprobs": True, "top_logprobs": 2, "max_tokens": 2})
    yield one(
        "chat/local-metadata-and-tier",
        CHAT,
        {**chat(LOCAL), "metadata": {"a": "b"}, "service_tier": "flex", "max_tokens": 2},
    )
    yield from whole_and_streamed("chat/local-tool-call", CHAT, {**chat(LOCAL), "tools": [TOOL]}, say=WEATHER_CALL)
    yield one(
        "chat/local-tool-required", CHAT, {**chat(LOCAL), "tools": [TOOL], "tool_choice": "required"}, say=WEATHER_CALL
    )
    yield from whole_and_streamed(
        "chat/local-reasoning", CHAT, chat(LOCAL), say="<think>\nTwo towns.\n</think>\n\nOslo."
    )
    yield one(
        "chat/local-tool-result",
        CHAT,
        {
            **chat(LOCAL),
            "tools": [TOOL],
            "messages": [
                *HELLO,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "call_1",
                            "type": "function",
                            "function": {"name": "weather", "arguments": '{"town": "Oslo"}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": "Rain."},
            ],
        },
        say="It rains.",
    )
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    yield one("chat/local-json-schema", CHAT, {**chat(LOCAL), "response_format": form}, say='{"a": 1}')
    yield one(
        "chat/local-json-object", CHAT, {**chat(LOCAL), "response_format": {"type": "json_object"}}, say='{"a": 1}'
    )

    async def twice(client: Client) -> None:
        long = [{"role": "user", "content": "Hello there, " * 20}]
        await client.post(CHAT, {"model": LOCAL, "messages": long, "max_tokens": 2})
        await client.post(CHAT, {"model": LOCAL, "messages": long, "max_tokens": 2})

    yield Case("chat/local-prefix-cached", twice)

    async def resumed(client: Client) -> None:
        events = await client.post(CHAT, {**chat(LOCAL), "stream": True}, headers={"x-emberline-resume": "60"})
        path = f"/v1/streams/{client.last.headers['x-emberline-stream-id']}"
        await client.get(path)
        await client.get(f"{path}?starting_after={len(events) - 3}", shown_path=f"{path}?starting_after=<all but two>")
        await client.send("DELETE", path)
        await client.get("/v1/streams/nothing")

    yield Case("chat/local-resumed-stream", resumed)

    async def leaves(client: Client) -> None:
        """The client leaves while the engine computes its second token, and pays for the prompt and both tokens."""
        await client.leave(CHAT, {**chat(LOCAL), "stream": True}, after="One", say="One", script=LONG_STEPS)
        await client.billed()

    yield Case("chat/local-client-leaves", leaves)


def _relayed() -> Iterator[Case]:
    for server in ("vllm", "sglang", "compatible"):
        yield from whole_and_streamed(f"chat/{server}", CHAT, chat(f"{server}-model"))
    every = {
        **chat("vllm-model"),
        **{"temperature": 0.5, "top_p": 0.9, "seed": 7, "max_completion_tokens": 3, "stop": ["x"], "user": "someone"},
        **{
            "tools": [TOOL],
            "tool_choice": "auto",
            "presence_penalty": 0.1,
            "frequency_penalty": 0.2,
            "metadata": {"k": "v"},
        },
    }
    yield one("chat/vllm-every-field", CHAT, every)
    yield one("chat/vllm-streamed-usage", CHAT, {**chat("vllm-model"), "stream": True, **USAGE})
    yield one("chat/vllm-unknown-field", CHAT, {**chat("vllm-model"), "no_such_field": 1})
    for provider, model in (("anthropic", "claude-opus-5"), ("gemini", "gemini-3-pro"), ("openai", "gpt-test")):
        yield from whole_and_streamed(f"chat/{provider}", CHAT, chat(f"{provider}/{model}"))
    for provider, model in (("anthropic", "claude-opus-5"), ("gemini", "gemini-3-pro")):
        yield _scripted_provider(
            f"chat/{provider}-tool-call", provider, {**chat(f"{provider}/{model}"), "tools": [TOOL]}
        )
        yield _scripted_provider(
            f"chat/{provider}-tool-call-streamed",
            provider,
            {**chat(f"{provider}/{model}"), "tools": [TOOL], "stream": True},
        )


def _scripted_provider(name: str, provider: str, body: object) -> Case:
    async def run(client: Client) -> None:
        script = client.stage.standins[provider].script
        script.text, script.thinking, script.calls = "Let me look.", "Oslo.", [("weather", {"town": "Oslo"})]
        script.cached_tokens = 8
        await client.post(CHAT, body)

    return Case(name, run)


def _completions() -> Iterator[Case]:
    body = {"model": LOCAL, "prompt": "Once upon a time", "max_tokens": 8}
    yield from whole_and_streamed("completions/local", TEXT, body)
    yield one("completions/local-several", TEXT, {**body, "prompt": ["One", "Two"], "max_tokens": 2})
    yield one("completions/local-token-ids", TEXT, {**body, "prompt": [504, 905]})
    yield one("completions/local-echo", TEXT, {**body, "echo": True, "max_tokens": 2})
    yield one("completions/local-logprobs", TEXT, {**body, "logprobs": 1, "max_tokens": 2})
    yield one("completions/local-default-length", TEXT, {"model": LOCAL, "prompt": "Once"})
    scored = {**body, "prompt": "One two", "echo": True, "logprobs": 1}
    yield from whole_and_streamed("completions/local-echo-logprobs", TEXT, {**scored, "max_tokens": 1})
    yield one("completions/local-prompt-alone", TEXT, {**scored, "max_tokens": 0})
    told = {"return_token_ids": True, "max_tokens": 2}
    yield one("completions/local-prompt-logprobs", TEXT, {**body, **told, "prompt": "One two", "prompt_logprobs": 1})
    usage = {"stream_options": {"continuous_usage_stats": True}}
    yield one("completions/local-tokens-streamed", TEXT, {**body, **told, **usage, "max_tokens": 1, "stream": True})
    yield one("completions/local-suffix", TEXT, {**body, "suffix": "The end."})
    yield one("completions/local-stream-options", TEXT, {**body, "stream_options": {"include_usage": True}})
    yield one("completions/local-logit-bias", TEXT, {**body, "logit_bias": {"17": 1, "18": 101}})
    yield one("completions/vllm-continuous-usage", TEXT, {**body, "model": "vllm-model", **usage, "stream": True})
    yield one("completions/tokenize", "/tokenize", {"model": LOCAL, "prompt": "One two", "return_token_strs": True})
    yield one("completions/tokenize-chat", "/tokenize", {"model": LOCAL, "messages": HELLO})
    yield one("completions/tokenize-vllm", "/tokenize", {"model": "vllm-model", "prompt": "One"})
    yield one("completions/detokenize", "/detokenize", {"model": LOCAL, "tokens": [1, 905, 2]})
    yield one("completions/tokenizer-info", "/tokenizer_info?model=smollm2", method="GET")
    yield from whole_and_streamed("completions/vllm", TEXT, {**body, "model": "vllm-model"})
    yield one("completions/anthropic", TEXT, {**body, "model": "anthropic/claude-opus-5"})


def _models() -> Iterator[Case]:
    yield one("models/list", "/v1/models", method="GET")
    yield one("models/local", "/v1/models/smollm2", method="GET")
    yield one("models/vllm", "/v1/models/vllm-model", method="GET")
    yield one("models/unknown", "/v1/models/nothing", method="GET")


def _encode_and_media() -> Iterator[Case]:
    yield one("embeddings/openai", "/v1/embeddings", {"model": "openai/embed", "input": ["one", "two"]})
    yield one("embeddings/gemini", "/v1/embeddings", {"model": "gemini/embed", "input": "one"})
    yield one("embeddings/chat-model", "/v1/embeddings", {"model": LOCAL, "input": "one"})
    yield one("embeddings/wrong-type", "/v1/embeddings", {"model": LOCAL, "input": 5})
    yield one("rerank/chat-model", "/v1/rerank", {"model": LOCAL, "query": "x", "documents": ["a", "b"]})
    yield one("media/image", "/v1/images/generations", {"model": "openai/gpt-image", "prompt": "a cat"})
    yield one("media/image-chat-model", "/v1/images/generations", {"model": LOCAL, "prompt": "a cat"})
    yield one("media/speech", "/v1/audio/speech", {"model": "openai/tts", "input": "Hello", "voice": "alloy"})

    async def transcribe(client: Client) -> None:
        sound = {"file": ("a.wav", b"RIFF0000WAVE", "audio/wav"), "model": (None, "openai/whisper")}
        await client.send("POST", "/v1/audio/transcriptions", files=sound)
        client.stage.standins["openai"].received.clear()  # a form's boundary is random

    yield Case("media/transcription", transcribe)


def _refused() -> Iterator[Case]:
    yield one("refused/bad-json", CHAT, content=b'{"model": ', headers={"content-type": "application/json"})
    yield one("refused/not-an-object", CHAT, [1])
    yield one("refused/empty", CHAT, content=b"", headers={"content-type": "application/json"})
    yield one("refused/content-type", CHAT, content=b"model=x", headers={"content-type": "text/csv"})
    yield one("refused/no-messages", CHAT, {"model": LOCAL})
    yield one("refused/empty-messages", CHAT, {"model": LOCAL, "messages": []})
    yield one("refused/unknown-model", CHAT, chat("no-such-model"))
    yield one("refused/unknown-provider-model", CHAT, chat("nowhere/model"))
    yield one("chat/no-model", CHAT, {"messages": HELLO})
    yield one("refused/wrong-type", CHAT, {**chat(LOCAL), "temperature": "hot"})
    yield one("refused/out-of-range", CHAT, {**chat(LOCAL), "temperature": 9})
    yield one("refused/unsupported-field", CHAT, {**chat(LOCAL), "audio": {"voice": "alloy", "format": "wav"}})
    yield one("refused/unsupported-audio", CHAT, {**chat(LOCAL), "modalities": ["text", "audio"]})
    yield one(
        "refused/image-in-text-model",
        CHAT,
        {
            **chat(LOCAL),
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}
            ],
        },
    )
    yield one("refused/unknown-field", CHAT, {**chat(LOCAL), "no_such_field": 1, "max_tokens": 1})
    yield one(
        "refused/bad-schema",
        CHAT,
        {
            **chat(LOCAL),
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}},
        },
    )
    yield one(
        "refused/tool-choice-unknown",
        CHAT,
        {**chat(LOCAL), "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
    )
    yield one("refused/too-long", CHAT, {"model": LOCAL, "messages": [{"role": "user", "content": "word " * 1100}]})
    yield one("refused/output-too-long", CHAT, {**chat(LOCAL), "max_tokens": 5000})
    yield one("refused/no-key", CHAT, chat(LOCAL), key="")
    yield one("refused/wrong-key", CHAT, chat(LOCAL), key="sk-emberline-wrong")
    yield one("refused/two-keys", CHAT, chat(LOCAL), headers={"x-api-key": "another"})
    yield one("refused/no-route", "/v1/nothing", {})
    yield one("refused/wrong-method", CHAT, method="DELETE")
    yield one("refused/wrong-host", CHAT, chat(LOCAL), headers={"host": "evil.example"})
    yield one("refused/wrong-origin", CHAT, chat(LOCAL), headers={"origin": "https://evil.example"})
    yield one("refused/model-out-of-scope", CHAT, chat(LOCAL), account_key={"models": ["vllm-model"]})
    yield one("refused/api-out-of-scope", CHAT, chat(LOCAL), account_key={"apis": ["messages"]})
    yield one("refused/admin-only", "/api/accounts", method="GET")

    async def disabled(client: Client) -> None:
        await client.admin("PATCH", f"/api/accounts/{client.account}", {"disabled": True})
        await client.post(CHAT, chat(LOCAL))

    yield Case("refused/disabled-account", disabled)


def _limited() -> Iterator[Case]:
    async def twice(client: Client) -> None:
        for _ in range(2):
            await client.post(CHAT, {**chat(LOCAL), "max_tokens": 2})

    yield Case("limited/requests-per-minute", twice, {"requests_per_minute": 1})
    yield Case("limited/key-requests-per-minute", twice, key={"requests_per_minute": 1})
    yield Case("limited/budget", twice, {"budget": "0.00005"})
    yield one("limited/tokens-per-minute", CHAT, {**chat(LOCAL), "max_tokens": 200}, limits={"tokens_per_minute": 100})
    yield one("limited/budget-without-price", CHAT, chat("compatible-model"), limits={"budget": "1"})
    yield one("limited/overloaded", CHAT, chat(LOCAL), script="refuse=true")
    yield one("limited/overloaded-streamed", CHAT, {**chat(LOCAL), "stream": True}, script="refuse=true")


def _failing() -> Iterator[Case]:
    for fault in ("down", "limited", "refusing", "breaking", "cutting"):
        yield from whole_and_streamed(f"failing/{fault}", CHAT, chat(f"{fault}-model"))
    yield from whole_and_streamed("failing/hanging", CHAT, chat("hanging/model"))
    fault = {"say": "One two three four five six", "script": "itl_ms=30,error_after=4"}
    yield from whole_and_streamed("failing/local-error", CHAT, chat(LOCAL), **fault)
    for provider, model in (("anthropic", "claude-opus-5"), ("gemini", "gemini-3-pro"), ("openai", "gpt-test")):
        for status in (400, 401, 429, 500):
            yield _provider_status(f"failing/{provider}-{status}", provider, chat(f"{provider}/{model}"), status)


def _provider_status(name: str, provider: str, body: object, status: int) -> Case:
    """The account has a key of its own for the provider: its failures open nobody else's circuit breaker."""

    async def run(client: Client) -> None:
        standin = client.stage.standins[provider]
        stored = {"name": provider, "key": "sk-provider", "url": standin.url}
        made = await client.send("POST", "/api/providers", stored, record=False)
        assert made["name"] == provider, made
        standin.script.status, standin.script.retry_after = status, "7" if status == 429 else ""
        await client.post(CHAT, body)

    return Case(name, run)
