"""Any invalid body gets a 4xx in the API's error format, and the next request is served."""

import asyncio
import json
import re
import time
from contextlib import suppress

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.api.http import body as bodies
from emberline.api.http.exchange import RequestLimits
from emberline.api.http.wire import MAX_VALUES, decode, has_more_values
from emberline.api.openai.chat import ChatRequest
from emberline.protocol.errors import BadInput
from tests.api.adversarial import attacks
from tests.api.fake_service import MODEL, FakeService, Wire, app_of, client_of
from tests.examples import n_examples

ENDPOINTS = {
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"model": MODEL, "prompt": "Hi"},
    "/v1/messages": {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]},
    f"/client/v4/accounts/a/ai/run/{MODEL}": {"prompt": "Hi"},
    "/client/v4/accounts/a/ai/run": {"model": MODEL, "input": {"prompt": "Hi"}},
    "/client/v4/accounts/a/ai/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]},
}
BROKEN = {
    "empty": b"",
    "no object": b"[1]",
    "truncated": b'{"model":',
    "text after": b"{} {}",
    "NaN": b'{"temperature":NaN}',
    "deep arrays": b'{"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "deep objects": b'{"x":' * 200_000 + b"1" + b"}" * 200_000,
    "invalid UTF-8": b'{"prompt":"\xff"}',
    "invalid UTF-8 in a field that is not read": b'{"nobody":"\xc3\x28"}',
    "lone surrogate": b'{"model":"\\ud800"}',
    "utf-16": '{"prompt":"Hi"}'.encode("utf-16"),
    "wrong types": b'{"model":5,"messages":"x","prompt":{},"input":[]}',
    "huge number": b'{"max_tokens":' + b"9" * 5000 + b',"input":{}}',
}


def message_of(answer: httpx.Response) -> str:
    found = answer.json()
    return found["errors"][0]["message"] if "errors" in found else found["error"]["message"]


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("kind", BROKEN)
async def test_broken_bodies(client: httpx.AsyncClient, path: str, kind: str) -> None:
    answer = await client.post(path, content=BROKEN[kind])
    assert answer.status_code == 400, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert len(message_of(answer)) > 10
    assert (await client.post(path, json=ENDPOINTS[path])).status_code == 200


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_any_content_type_but_media(client: httpx.AsyncClient, path: str) -> None:
    whole = json.dumps(ENDPOINTS[path])
    for kind in ("application/json", "application/x-www-form-urlencoded", "text/plain; charset=utf-8", ""):
        answer = await client.post(path, content=whole, headers={"content-type": kind} if kind else {})
        assert answer.status_code == 200, kind
    for kind in ("multipart/form-data; boundary=x", "audio/wav", "image/png", "Application/Octet-Stream"):
        answer = await client.post(path, content=whole, headers={"content-type": kind})
        assert answer.status_code == 400, kind
    assert (await client.post(path, content=whole, headers={"content-encoding": "gzip"})).status_code == 400


CHAT = ENDPOINTS["/v1/chat/completions"]
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].image_url",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls[0]"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_tokens": 1 << 40}, "max_tokens"),
        ({"seed": 1 << 70}, "seed"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"messages": [{"role": "assistant", "reasoning_content": ["x"]}]}, "messages[0].reasoning_content"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [TOOL, {"type": "custom", "custom": {"name": "f"}}]}, "tools[1].type"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f\n"}}]}, "tools[0].function.name"),
        ({"tools": [{"name": ""}]}, "tools[0].name"),
        ({"tools": [{"name": "x" * 65}]}, "tools[0].name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [{"name": f"f{i}"} for i in range(500)]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": [{"name": "g"}]}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice"),
        ({"functions": [{"name": "f"}], "tools": [TOOL]}, "functions"),
        ({"functions": [{"name": "f"}, {"name": "f"}]}, "functions[1].name"),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call"),
        ({"functions": [{"name": "f"}], "function_call": "required"}, "function_call"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": "x"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format"),
        ({"guided_choice": ["a"], "structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": {}, "grammar": "x"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "5"}, "guided_json"),
        ({"guided_whitespace_pattern": " *"}, "guided_whitespace_pattern"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"lora": "x"}, "lora"),
        ({"audio": {"voice": "alloy"}}, "audio"),
        ({"chat_template_kwargs": {"chat_template": "{{ x }}"}}, "chat_template_kwargs"),
    ],
)
async def test_the_field_is_named(client: httpx.AsyncClient, service: FakeService, change: dict, param: str) -> None:
    answer = await client.post("/v1/chat/completions", json=CHAT | change)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert service.requests == []


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [1 << 32]}, "prompt[0]"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 2}, "n"),
        ({"echo": "yes"}, "echo"),
        ({"echo": True, "suffix": "x"}, "echo"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 6}, "logprobs"),
    ],
)
async def test_the_field_is_named_in_completions(client: httpx.AsyncClient, change: dict, param: str) -> None:
    answer = await client.post("/v1/completions", json={"model": MODEL, "prompt": "Hi"} | change)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


texts = st.text(alphabet='a,"\\[{é')
values = st.recursive(texts | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(texts, inner))


@given(values, st.integers(1, 64))
def test_values_are_counted_outside_strings(value: object, scan_bytes: int) -> None:
    encoded = json.dumps(value).encode()
    without_strings = re.sub(rb'"(\\.|[^"\\])*"', b"", encoded)
    n_values = sum(without_strings.count(mark) for mark in (b",", b"[", b"{"))
    assert not has_more_values(encoded, n_values, scan_bytes)
    assert not n_values or has_more_values(encoded, n_values - 1, scan_bytes)


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_more_values_than_any_client_sends(client: httpx.AsyncClient, path: str) -> None:
    padded = json.dumps(ENDPOINTS[path] | {"x": [[]] * (MAX_VALUES // 2)})
    answer = await client.post(path, content=padded)
    assert answer.status_code == 413, answer.text
    assert "262,144 values" in message_of(answer)


@pytest.mark.parametrize("name", attacks(MODEL, 8))
async def test_no_body_takes_more_than_linear_time(client: httpx.AsyncClient, name: str) -> None:
    path, body = attacks(MODEL, 1 << 20)[name]
    began = time.thread_time()
    answer = await client.post(path, content=body)
    assert time.thread_time() - began < 3
    assert answer.status_code < 500
    assert len(answer.content) < 10_000


@pytest.mark.parametrize("announced", [True, False])
async def test_too_large(service: FakeService, announced: bool) -> None:
    client = client_of(service, limits=RequestLimits(max_body_bytes=1 << 20))
    whole = json.dumps(CHAT | {"padding": "x" * (1 << 20)}).encode()

    async def pieces():
        yield whole[:500_000]
        yield whole[500_000:]

    for path, code in (("/v1/chat/completions", None), (f"/client/v4/accounts/a/ai/run/{MODEL}", 3006)):
        answer = await client.post(path, content=whole if announced else pieces())
        assert answer.status_code == 413
        assert code is None or answer.json()["errors"][0]["code"] == code


async def test_a_body_that_stops_arriving(service: FakeService) -> None:
    wire = Wire(app_of(service, limits=RequestLimits(idle_s=0.01)), "/v1/completions", b"")
    wire.inbox.get_nowait()
    wire.inbox.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
    await asyncio.wait_for(wire.task, 60)
    assert wire.sent[0]["status"] == 408


async def test_a_body_that_arrives_slowly(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte before each pause is over would hold memory and a connection for days."""
    now_s, passed_s = asyncio.get_running_loop().time, 0.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s() + passed_s)
    wire = Wire(app_of(service), "/v1/completions", b"")
    wire.inbox.get_nowait()
    while not wire.task.done():
        passed_s += RequestLimits().idle_s / 2
        wire.inbox.put_nowait({"type": "http.request", "body": b" ", "more_body": True})
        while not (wire.inbox.empty() or wire.task.done()):
            await asyncio.sleep(0)
    assert wire.sent[0]["status"] == 408
    assert "KiB/s" in wire.body.decode()


async def test_bodies_in_memory_are_bounded(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies.held_bodies, "most", 1 << 20)
    half = {"type": "http.request", "body": b" " * (300 << 10), "more_body": True}
    wires = [Wire(app_of(service), "/v1/completions", b"") for _ in range(4)]
    for wire in wires:
        wire.inbox.get_nowait()
        wire.inbox.put_nowait(half)
    done, waiting = await asyncio.wait([wire.task for wire in wires], timeout=60, return_when=asyncio.FIRST_COMPLETED)
    assert (len(done), len(waiting)) == (1, 3)
    (refused,) = (wire for wire in wires if wire.task.done())
    headers = dict(refused.sent[0]["headers"])
    assert (refused.sent[0]["status"], headers[b"retry-after"]) == (503, b"5")
    assert bodies.held_bodies.n_bytes == 3 * (300 << 10)
    for wire in wires:
        wire.leave()
    await asyncio.gather(*(wire.task for wire in wires))
    assert bodies.held_bodies.n_bytes == 0


_decoder = msgspec.json.Decoder(ChatRequest)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=n_examples(200), deadline=None)
@given(st.sampled_from(ChatRequest.__struct_fields__), _json | st.binary(max_size=20))
def test_decoding_either_works_or_is_bad_input(field: str, value: object) -> None:
    body = json.dumps(CHAT | {field: None if isinstance(value, bytes) else value}).encode()
    raw = body.replace(b"null", value) if isinstance(value, bytes) else body
    with suppress(BadInput):
        assert isinstance(decode(raw, _decoder), ChatRequest)


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_no_body(client: httpx.AsyncClient, path: str) -> None:
    answer = (await client.post(path)).json()
    assert "no body" in json.dumps(answer)
    if path.startswith("/client"):
        assert answer["errors"][0]["code"] == 3003


async def test_integers_sent_as_floats(client: httpx.AsyncClient, service: FakeService) -> None:
    arguments = {"x": 1.0, "y": [2.5]}
    call = {"id": "a", "function": {"name": "f", "arguments": arguments}}
    body = CHAT | {"max_tokens": 5.0, "n": 1e0, "seed": -3.0, "temperature": 0.5, "top_k": None}
    body["messages"] = [{"role": "assistant", "tool_calls": [call]}, *CHAT["messages"]]
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    sampling = service.requests[0].sampling
    assert (sampling.max_tokens, sampling.seed, sampling.temperature) == (5, -3, 0.5)
    assert type(sampling.max_tokens) is int
    ids = {"model": MODEL, "prompt": [1.0, 2]}
    assert (await client.post("/v1/completions", json=ids)).status_code == 200


@pytest.mark.parametrize("value", ["5.5", "1e300", "-0.5", "1e999", '"5"', "true"])
async def test_other_numbers_are_refused(client: httpx.AsyncClient, value: str) -> None:
    body = json.dumps(CHAT | {"max_tokens": "X", "seed": 1 << 70}).replace('"X"', value)
    answer = await client.post("/v1/chat/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in ("max_tokens", "seed")


@pytest.mark.parametrize(("limit", "shown"), [(1000, "1,000 bytes"), (4096, "4 KiB"), (2 << 20, "2 MiB")])
async def test_a_limit_is_told_exactly(service: FakeService, limit: int, shown: str) -> None:
    app = app_of(service, limits=RequestLimits(max_body_bytes=limit))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client:
        answer = await client.post("/v1/chat/completions", content=b" " * (limit + 1))
    assert answer.status_code == 413
    assert answer.json()["error"]["message"] == f"the request body is larger than {shown}"
