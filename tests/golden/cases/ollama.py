"""Ollama's API. It streams unless it is told not to."""

from collections.abc import Iterator

from tests.golden.cases.common import HELLO, LOCAL, TOOL, WEATHER_CALL, chat
from tests.golden.exchange import Case, one

CHAT = "/api/chat"
GENERATE = "/api/generate"
WHOLE = {"stream": False}


def cases() -> Iterator[Case]:
    yield one("ollama/chat-whole", CHAT, {**chat(LOCAL), **WHOLE})
    yield one("ollama/chat-streamed", CHAT, chat(LOCAL))
    yield one(
        "ollama/chat-options",
        CHAT,
        {**chat(LOCAL), **WHOLE, "options": {"num_predict": 3, "temperature": 0, "seed": 1}},
    )
    yield one("ollama/chat-tool-call", CHAT, {**chat(LOCAL), **WHOLE, "tools": [TOOL]}, say=WEATHER_CALL)
    yield one("ollama/chat-tool-call-streamed", CHAT, {**chat(LOCAL), "tools": [TOOL]}, say=WEATHER_CALL)
    yield one("ollama/chat-vllm", CHAT, {**chat("vllm-model"), **WHOLE})
    yield one("ollama/chat-vllm-streamed", CHAT, chat("vllm-model"))
    yield one("ollama/chat-anthropic", CHAT, {**chat("anthropic/claude-opus-5"), **WHOLE})
    yield one("ollama/chat-empty", CHAT, {"model": LOCAL, "messages": []})
    yield one("ollama/generate-whole", GENERATE, {"model": LOCAL, "prompt": "Once upon a time", **WHOLE})
    yield one("ollama/generate-streamed", GENERATE, {"model": LOCAL, "prompt": "Once upon a time"})
    raw = {"model": LOCAL, "prompt": "Once upon", "raw": True, "options": {"num_predict": 3}, **WHOLE}
    yield one("ollama/generate-raw", GENERATE, raw)
    yield one(
        "ollama/generate-json", GENERATE, {"model": LOCAL, "prompt": "x", "format": "json", **WHOLE}, say='{"a": 1}'
    )
    yield one("ollama/tags", "/api/tags", method="GET")
    yield one("ollama/show", "/api/show", {"model": LOCAL})
    yield one("ollama/show-unknown", "/api/show", {"model": "nothing"})
    yield one("ollama/version", "/api/version", method="GET")
    yield one("ollama/pull", "/api/pull", {"model": LOCAL, **WHOLE})
    yield one("ollama/pull-streamed", "/api/pull", {"model": LOCAL})
    yield one("ollama/embed-openai", "/api/embed", {"model": "openai/embed", "input": ["one", "two"]})
    yield one("ollama/embed-chat-model", "/api/embed", {"model": LOCAL, "input": "one"})
    yield one("ollama/failing-down", CHAT, {**chat("down-model"), **WHOLE})
    yield one("ollama/failing-breaking-streamed", CHAT, chat("breaking-model"))
    yield one("ollama/overloaded", CHAT, {**chat(LOCAL), **WHOLE}, script="refuse=true")
    yield one("ollama/refused-unknown-model", CHAT, {"model": "nothing", "messages": HELLO})
    yield one("ollama/refused-wrong-type", CHAT, {**chat(LOCAL), "options": {"temperature": "hot"}})
    yield one("ollama/refused-no-key", CHAT, chat(LOCAL), key="")
