"""Request bodies that are cheap to send and would be expensive to serve, were anything in a request more than linear.

Each has about `n_bytes`. `cpu_s` measures processor time, so that a busy machine does not fail a test.
"""

import time
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import msgspec

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


class Attack(NamedTuple):
    path: str
    body: bytes


def cpu_s(work: Callable[[], Any]) -> float:
    """Seconds of processor time that `work` takes in this thread."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


@cache
def attacks(model: str, n_bytes: int) -> dict[str, Attack]:
    hello = [{"role": "user", "content": "Hi"}]

    def chat(messages: list[Any], **fields: Any) -> Attack:
        return Attack(CHAT, _json({"model": model, "max_tokens": 1, "messages": messages, **fields}))

    def respond(items: list[Any]) -> Attack:
        return Attack(RESPONSES, _json({"model": model, "max_output_tokens": 1, "input": items}))

    def filled(path: str, field: str, value: bytes, **fields: Any) -> Attack:
        """The field with as many copies of the value as fit, in a list."""
        head = _json({"model": model, "max_tokens": 1, **fields})[:-1]
        values = ((value + b",") * (n_bytes // len(value)))[:-1]
        return Attack(path, head + b',"%b":[%b]}' % (field.encode(), values))

    n_calls = n_bytes // 140
    calls = [{"id": f"c{i}", "function": {"name": "f", "arguments": "{}"}} for i in range(n_calls)]
    results = [{"role": "tool", "tool_call_id": f"c{i}", "content": ""} for i in reversed(range(n_calls))]
    unnamed = [{"role": "tool", "content": ""} for _ in range(n_calls)]
    nested = b'{"x":' * 400 + b"[" + b",".join([b'"y"'] * (n_bytes // 4)) + b"]" + b"}" * 400
    deep_call = {"id": "c", "function": {"name": "f", "arguments": nested.decode()}}
    return {
        "tool results in reverse order": chat([{"role": "assistant", "tool_calls": calls}, *results]),
        "tool results without ids": chat([{"role": "assistant", "tool_calls": calls}, *unnamed]),
        "empty messages": filled(CHAT, "messages", b'{"role":"user","content":""}'),
        "empty tool results": filled(CHAT, "messages", b'{"role":"tool","content":"x"}'),
        "empty parts": chat([{"role": "user", "content": [{"type": "text", "text": ""}] * (n_bytes // 25)}]),
        "a float beside a long list": filled(CHAT, "x", b"1", messages=hello, n=1.0),
        "floats": filled(CHAT, "x", b"1.5", messages=hello, n=1.0),
        "lists": filled(CHAT, "x", b"[]", messages=hello),
        "token ids": filled("/v1/completions", "prompt", b"1"),
        "arguments nested deep": chat([{"role": "assistant", "tool_calls": [deep_call]}, *hello]),
        "a schema of many properties": chat(
            hello, tools=[{"name": "f", "parameters": {"properties": {f"p{i}": {} for i in range(n_bytes // 12)}}}]
        ),
        "one text": chat([{"role": "user", "content": "a, " * (n_bytes // 3)}]),
        "escapes": Attack(
            CHAT, _json({"model": model, "messages": hello})[:-1] + b',"x":"' + rb",\"" * (n_bytes // 3) + b'"}'
        ),
        "reply in pieces": respond([*_pieces(n_bytes // 60), *hello]),
        "an item of a long type": Attack(
            RESPONSES, _json({"model": model, "input": [{"type": ["x"] * (n_bytes // 5)}]})
        ),
        "an unknown call": Attack(
            RESPONSES,
            _json(
                {"model": model, "input": [{"type": "function_call_output", "call_id": "x" * n_bytes, "output": ""}]}
            ),
        ),
        "empty blocks": filled(MESSAGES, "messages", b'{"role":"user","content":[]}'),
        "not JSON": Attack(CHAT, b'{"model":' + b'"' * n_bytes),
    }


def _pieces(n: int) -> list[dict[str, str]]:
    """The text of one reply as items with reasoning between them, which are joined."""
    reasoning = {"type": "reasoning", "encrypted_content": ""}
    text = {"type": "message", "role": "assistant", "content": "piece"}
    return [text if number % 2 else reasoning for number in range(n)]


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value)
