"""Servers that answer a streaming request with plain JSON: their reply is used, as the stream that was asked for."""

from typing import Any

import msgspec
import pytest

from emberline.upstream.dialects.anthropic import AnthropicReader
from emberline.upstream.dialects.event_reader import EventReader
from emberline.upstream.dialects.gemini import GeminiReader
from emberline.upstream.dialects.sse import MalformedLine, StreamEditor, StreamError
from emberline.upstream.dialects.whole_reply import stream_lines
from standins.openai_script import ServerScript
from standins.standin_providers import ProviderScript
from tests.upstream.providers.conftest import SAYS, Opener, StartProvider, configured, events, said
from tests.upstream.providers.test_openai_providers import MODEL, REPLY, StartServer, acme

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
MESSAGE = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]}
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def reply(**more: Any) -> bytes:
    choice = {"index": 0, "message": MESSAGE, "finish_reason": "tool_calls"}
    body = {"id": "x", "object": "chat.completion", "model": "m", "choices": [choice], "usage": USAGE}
    return msgspec.json.encode(body | more)


async def test_every_api_uses_the_reply(gateway: Opener, openai_server: StartServer) -> None:
    server = await openai_server(ServerScript(plain_json=True))
    made = await gateway(acme(server))
    for stream in (True, False):
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer = await made.post("/v1/chat/completions", {"model": MODEL, "messages": SAYS, **options})
        assert answer.status_code == 200, answer.text
        chunks = events(answer.text) if stream else []
        shown = said(chunks) if stream else answer.json()["choices"][0]["message"]["content"]
        assert shown == REPLY
        assert (chunks[-1] if stream else answer.json())["usage"]["completion_tokens"] == 50
    for path, body in (
        ("/v1/messages", {"messages": SAYS, "max_tokens": 100, "stream": True}),
        ("/v1/responses", {"input": SAYS[0]["content"]}),
        ("/v1/completions", {"prompt": "once", "max_tokens": 5, "stream": True}),
    ):
        answer = await made.post(path, {"model": MODEL, **body})
        assert answer.status_code == 200, answer.text
    assert [row[1] for row in await made.rows()] == ["finished"] * 5


async def test_json_that_cannot_be_read_is_the_servers_fault(gateway: Opener, openai_server: StartServer) -> None:
    server = await openai_server(ServerScript(plain_json=True, bad_json=True))
    made = await gateway(acme(server))
    answer = await made.post("/v1/chat/completions", {"model": MODEL, "messages": SAYS, "stream": True})
    assert answer.status_code == 503
    assert "JSON that cannot be read" in answer.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["anthropic", "gemini"])
async def test_a_translated_reply_is_the_same_as_a_streamed_one(
    gateway: Opener, provider_server: StartProvider, kind: str
) -> None:
    model = {"anthropic": "anthropic/claude-opus-5", "gemini": "gemini/gemini-3-pro"}[kind]
    script = {"text": "Let me see. ", "thinking": "Hm.", "calls": [("f", {"a": [1, "é"]}), ("g", {})]}
    server = await provider_server(kind, **script)
    made = await gateway(configured(kind, server))
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"]
    shown = []
    for plain_json in (False, True):
        server.script = ProviderScript(**script, plain_json=plain_json)
        body = {"model": model, "messages": SAYS, "tools": tools}
        whole = (await made.post("/v1/chat/completions", body)).json()
        streamed = await made.post("/v1/chat/completions", {**body, "stream": True})
        message = await made.post("/v1/messages", {**body, "tools": [], "max_tokens": 99, "stream": True})
        assert streamed.status_code == message.status_code == 200, streamed.text + message.text
        assert "message_stop" in message.text
        for call in whole["choices"][0]["message"]["tool_calls"]:
            call["id"] = ""  # Gemini has none: they are made here
        shown.append((whole["choices"], whole["usage"], said(events(streamed.text))))
    assert shown[0] == shown[1]
    assert {row[1] for row in await made.rows()} == {"finished"}


@pytest.mark.parametrize(
    ("read", "body", "error"),
    [
        (AnthropicReader(0), {"type": "error", "error": {"type": "overloaded_error", "message": "later"}}, StreamError),
        (GeminiReader(0, 1), {"error": {"code": 503, "message": "later"}}, StreamError),
        (AnthropicReader(0), {"type": "message", "content": [5]}, MalformedLine),
        (AnthropicReader(0), {"choices": []}, MalformedLine),
        (AnthropicReader(0), [], MalformedLine),
        (GeminiReader(0, 1), {"choices": []}, MalformedLine),
        (GeminiReader(0, 1), [5], MalformedLine),
        (GeminiReader(0, 1), [], MalformedLine),
    ],
)
def test_what_is_no_reply_of_a_provider_is_an_error(read: EventReader, body: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        read.feed(read.whole_lines(msgspec.json.encode(body)))


def test_a_reply_with_calls() -> None:
    first, last, usage = events(stream_lines(reply()).decode())
    (choice,) = first["choices"]
    assert first["object"] == "chat.completion.chunk"
    assert choice["delta"] == MESSAGE | {"tool_calls": [{"index": 0, **CALL}]}
    assert choice["finish_reason"] is None
    assert last["choices"] == [{"index": 0, "delta": {}, "finish_reason": "tool_calls", "logprobs": None}]
    assert usage["choices"] == []
    assert usage["usage"] == USAGE


def test_a_reply_without_usage_or_reason_is_complete() -> None:
    lines = stream_lines(reply(usage=None, choices=[{"message": {"content": "Hi"}}]))
    editor = StreamEditor()
    assert editor.feed(lines) == lines
    assert editor.finished
    assert editor.ended


def test_an_error_is_an_error() -> None:
    with pytest.raises(StreamError, match="no quota"):
        StreamEditor().feed(stream_lines(b'{"error": {"message": "no quota", "code": 429}}'))


@pytest.mark.parametrize("body", [b"{}", b"[]", b"null", b"{", b'{"choices": []}', b'{"choices": [5]}', b"[" * 100_000])
def test_other_json_is_refused(body: bytes) -> None:
    with pytest.raises(MalformedLine):
        stream_lines(body)
