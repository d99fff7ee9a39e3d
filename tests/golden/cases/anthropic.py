"""Anthropic's API: messages, tokens counted, message batches."""

from collections.abc import Iterator

from tests.golden.cases.common import HELLO, LOCAL, PARAMETERS, WEATHER_CALL
from tests.golden.exchange import Case, Client, one, whole_and_streamed

MESSAGES = "/v1/messages"
VERSION = {"anthropic-version": "2023-06-01"}
TOOL = {"name": "weather", "description": "Tell the weather.", "input_schema": PARAMETERS}


def message(model: str) -> dict[str, object]:
    return {"model": model, "messages": HELLO, "max_tokens": 64}


def cases() -> Iterator[Case]:
    yield from whole_and_streamed("messages/local", MESSAGES, message(LOCAL), headers=VERSION)
    system = {
        **message(LOCAL),
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    }
    yield one("messages/local-system", MESSAGES, system)
    yield one("messages/local-max-tokens", MESSAGES, {**message(LOCAL), "max_tokens": 3})
    yield one("messages/local-stop", MESSAGES, {**message(LOCAL), "stop_sequences": ["helpful"]})
    tools = {**message(LOCAL), "tools": [TOOL]}
    yield from whole_and_streamed("messages/local-tool-use", MESSAGES, tools, say=WEATHER_CALL)
    thinks = {**message(LOCAL), "max_tokens": 500, "thinking": {"type": "enabled", "budget_tokens": 100}}
    thoughts = "<think>\nTwo towns.\n</think>\n\nOslo."
    yield from whole_and_streamed("messages/local-thinking", MESSAGES, thinks, say=thoughts)
    for model in ("vllm-model", "anthropic/claude-opus-5", "gemini/gemini-3-pro", "openai/gpt-test"):
        name = model.partition("/")[0].removesuffix("-model")
        yield from whole_and_streamed(f"messages/{name}", MESSAGES, message(model), headers=VERSION)
    beta = {**VERSION, "anthropic-beta": "context-1m-2025-08-07"}
    yield one("messages/anthropic-beta", MESSAGES, message("anthropic/claude-opus-5"), headers=beta)
    yield from whole_and_streamed("messages/failing-down", MESSAGES, message("down-model"))
    yield from whole_and_streamed("messages/failing-breaking", MESSAGES, message("breaking-model"))
    yield one("messages/failing-limited", MESSAGES, message("limited-model"))
    yield one("messages/overloaded", MESSAGES, message(LOCAL), script="refuse=true")
    fault = {"say": "One two three four five six", "script": "itl_ms=30,error_after=4"}
    yield one("messages/failing-local-streamed", MESSAGES, {**message(LOCAL), "stream": True}, **fault)
    yield one("messages/refused-no-max-tokens", MESSAGES, {"model": LOCAL, "messages": HELLO})
    yield one("messages/refused-unknown-model", MESSAGES, message("nothing"))
    yield one("messages/refused-wrong-type", MESSAGES, {**message(LOCAL), "max_tokens": "many"})
    yield one("messages/refused-unsupported", MESSAGES, {**message(LOCAL), "container": "x"})
    yield one("messages/refused-unknown-field", MESSAGES, {**message(LOCAL), "no_such_field": 1, "max_tokens": 1})
    yield one("messages/refused-bad-json", MESSAGES, content=b"{", headers={"content-type": "application/json"})
    yield one("messages/refused-no-key", MESSAGES, message(LOCAL), key="")
    yield one(
        "messages/refused-too-long",
        MESSAGES,
        {**message(LOCAL), "messages": [{"role": "user", "content": "word " * 1100}]},
    )
    yield Case("messages/key-in-x-api-key", _own_header)
    for model in (LOCAL, "anthropic/claude-opus-5", "vllm-model"):
        name = model.partition("/")[0].removesuffix("-model")
        body = {"model": model, "messages": HELLO}
        yield one(f"messages/count-tokens-{name}", f"{MESSAGES}/count_tokens", body, headers=VERSION)
    yield Case("messages/batch", _batch)
    yield Case("messages/batch-refused", _bad_batch)
    account = "/client/v4/accounts/messages-account-path/ai/v1/messages"
    yield one("messages/account-path", account, {**message(LOCAL), "max_tokens": 3})


async def _own_header(client: Client) -> None:
    await client.post(MESSAGES, {**message(LOCAL), "max_tokens": 3}, key="", headers={"x-api-key": client.key})


async def _batch(client: Client) -> None:
    requests = [
        {"custom_id": "good", "params": {**message(LOCAL), "max_tokens": 3}},
        {"custom_id": "bad", "params": {**message("nothing"), "max_tokens": 3}},
    ]
    made = await client.post(f"{MESSAGES}/batches", {"requests": requests})
    path = f"{MESSAGES}/batches/{made['id']}"
    await client.until(path, lambda found: found["processing_status"] == "ended")
    await client.get(f"{path}/results")
    await client.get(f"{MESSAGES}/batches")
    await client.send("DELETE", path)
    await client.get(path)


async def _bad_batch(client: Client) -> None:
    await client.post(f"{MESSAGES}/batches", {"requests": []})
    await client.post(f"{MESSAGES}/batches", {"requests": [{"custom_id": "x"}]})
    await client.get(f"{MESSAGES}/batches/msgbatch_nothing/results")
