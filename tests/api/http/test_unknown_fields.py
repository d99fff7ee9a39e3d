"""A field that nobody knows is never ignored in silence: the response names it, and so does the log."""

import logging

import httpx
import msgspec
import pytest

from emberline.api.http.unknown_fields import (
    HEADER,
    LOG_INTERVAL_S,
    LOG_LINES,
    UnknownFieldLog,
    unknown_fields,
    warning,
)
from tests.api.fake_service import MODEL

MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES = {
    "/v1/chat/completions": {"model": MODEL, "messages": MESSAGES},
    "/v1/completions": {"model": MODEL, "prompt": "Hi"},
    "/v1/responses": {"model": MODEL, "input": "Hi", "store": False},
    "/v1/messages": {"model": MODEL, "messages": MESSAGES, "max_tokens": 5},
    f"/client/v4/accounts/a/ai/run/{MODEL}": {"messages": MESSAGES},
    "/api/chat": {"model": MODEL, "messages": MESSAGES},
    "/api/generate": {"model": MODEL, "prompt": "Hi"},
}
CHAT = BODIES["/v1/chat/completions"]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_the_response_names_ignored_fields(client: httpx.AsyncClient, path: str, streams: bool) -> None:
    body = BODIES[path] | {"stream": streams}
    plain = await client.post(path, json=body)
    assert plain.status_code == 200, plain.text
    assert HEADER not in plain.headers
    answer = await client.post(path, json=body | {"max_tokes": 5, "metadata": {"a": "b"}, "temprature": None})
    assert answer.status_code == 200, answer.text
    assert answer.headers[HEADER] == "ignored unknown fields: `max_tokes`, `temprature`"


MESSAGE = {"role": "user", "content": [{"type": "text", "text": "Hi", "txt": 1}], "contnt": "Hi", "reply": None}
TOOL = {"type": "function", "function": {"name": "f", "paramters": {}, "parameters": {"type": "object", "x-own": 1}}}
NESTED: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "/v1/chat/completions": (
        {"messages": [MESSAGE] * 2, "tools": [TOOL], "stream_options": {"include_usge": True}, "stream": True},
        ("messages[].contnt", "messages[].content[].txt", "tools[].function.paramters", "stream_options.include_usge"),
    ),
    "/v1/responses": (
        {
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi", "txt": 1}], "contnt": 1}],
            "tools": [{"type": "function", "name": "f", "paramters": {}}, {"type": "web_search", "filters": {}}],
            "text": {"format": {"type": "text"}, "formt": 1e0},
        },
        ("input[].contnt", "input[].content[].txt", "tools[].paramters", "text.formt"),
    ),
    "/v1/messages": (
        {"messages": [MESSAGE], "thinking": {"type": "disabled", "budget": 1}, "metadata": {"own": "u"}},
        ("messages[].contnt", "messages[].content[].txt", "thinking.budget"),
    ),
    f"/client/v4/accounts/a/ai/run/{MODEL}": ({"options": {"reject": True}}, ("options.reject",)),
    "/api/chat": (
        {"options": {"temprature": 0, "num_gpu": 1}, "messages": [{"role": "user", "content": "Hi", "contnt": 1e0}]},
        ("options.temprature", "messages[].contnt"),
    ),
    "/api/generate": ({"options": {"max_tokens": 5}}, ("options.max_tokens",)),
}


@pytest.mark.parametrize("path", NESTED)
async def test_the_response_names_nested_fields(client: httpx.AsyncClient, path: str) -> None:
    fields, expected = NESTED[path]
    answer = await client.post(path, json=BODIES[path] | fields)
    assert answer.status_code == 200, answer.text
    names = answer.headers[HEADER].removeprefix("ignored unknown fields: ").split(", ")
    assert sorted(names) == sorted(f"`{name}`" for name in expected)


async def test_unknown_values_that_no_struct_reads_do_no_harm(client: httpx.AsyncClient) -> None:
    body = b'{"model":"%s","messages":[{"role":"user","content":"Hi","n":1e999}]}' % MODEL.encode()
    assert (await client.post("/v1/chat/completions", content=body)).status_code == 200
    typed = BODIES["/v1/responses"] | {"input": [{"type": {}, "role": "user", "content": "Hi"}]}
    assert (await client.post("/v1/responses", json=typed)).status_code == 400


async def test_counts_and_vectors_have_it_too(client: httpx.AsyncClient) -> None:
    for path, body in (
        ("/v1/embeddings", {"model": MODEL, "input": "Hi"}),
        ("/v1/messages/count_tokens", {"model": MODEL, "messages": MESSAGES}),
        ("/v1/responses/input_tokens", {"model": MODEL, "input": "Hi"}),
    ):
        answer = await client.post(path, json=body | {"dimnsions": 5})
        assert answer.headers[HEADER] == "ignored unknown fields: `dimnsions`", (path, answer.text)


async def test_a_resumable_stream_has_it(client: httpx.AsyncClient) -> None:
    body = CHAT | {"stream": True, "max_tokes": 5}
    answer = await client.post("/v1/chat/completions", json=body, headers={"x-emberline-resume": "60"})
    assert answer.headers[HEADER] == "ignored unknown fields: `max_tokes`"


@pytest.mark.parametrize("name", ["a\r\nset-cookie: x", "é" * 100, "\x00", "x" * 10_000, "`", "\u2028", "'", '"'])
async def test_a_hostile_name_stays_inside_the_header(client: httpx.AsyncClient, name: str) -> None:
    answer = await client.post("/v1/chat/completions", json=CHAT | {name: 1})
    assert answer.status_code == 200
    shown = answer.headers[HEADER]
    assert shown.isascii()
    assert shown.isprintable()
    assert len(shown) < 500
    assert "set-cookie" not in answer.headers


async def test_a_header_names_few_fields(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/chat/completions", json=CHAT | {f"x{number}": 1 for number in range(1000)})
    assert answer.headers[HEADER].endswith("`x7` and 992 more")


async def test_bodies_that_have_no_model_name_unknown_fields_too(client: httpx.AsyncClient) -> None:
    answer = await client.post("/api/show", json={"model": MODEL, "verbos": True})
    assert answer.headers[HEADER] == "ignored unknown fields: `verbos`"


def test_the_log_has_few_lines_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 100.0
    lines = UnknownFieldLog(lambda: now_s)
    with caplog.at_level(logging.WARNING):
        for number in range(1000):
            lines.add("/v1/chat/completions", (f"field{number}\n",))
        lines.add("/v1/chat/completions", ())
        now_s += LOG_INTERVAL_S
        lines.add("/v1/messages", ("other",))
    first, *_, last = caplog.records
    assert len(caplog.records) == LOG_LINES + 1
    assert first.getMessage() == "a request to /v1/chat/completions had ignored unknown fields: `field0\\n`"
    assert vars(last)["lines_left_out"] == 990


def test_only_structs_know_fields() -> None:
    class Body(msgspec.Struct):
        known: int = 0
        renamed: int = msgspec.field(default=0, name="otherName")

    given = dict.fromkeys(["known", "otherName", "renamed", "user"], msgspec.Raw(b"1"))
    assert unknown_fields(given, Body) == ("renamed",)
    assert unknown_fields(given, dict) == ()
    assert warning(("a",)) == b"ignored unknown fields: `a`"
