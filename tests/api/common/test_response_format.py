"""Structured output in every API, and Cloudflare's JSON mode."""

import json

import httpx
import pytest

from emberline.protocol.errors import BadInput
from emberline.protocol.events import ChoiceDone, TextDelta, ToolCallDelta, ToolCallStarted
from emberline.protocol.request import GenerateRequest, OutputFormat
from tests.api.fake_service import MODEL, FakeService, says

RUN = f"/client/v4/accounts/acme/ai/run/{MODEL}"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": MODEL, "prompt": "Hi"}
ENDPOINTS = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION, RUN: {"prompt": "Hi"}}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}
NAMED = {"properties": {"schema": {"type": "string"}, "name": {}}}  # not an envelope, whatever its properties
OF_SCHEMA = OutputFormat("json_schema", SCHEMA)

FORMATS = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, OutputFormat("json_object")),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, OF_SCHEMA),
    ({"response_format": {"type": "json_schema", "json_schema": SCHEMA}}, OF_SCHEMA),
    ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, OutputFormat("json_schema", NAMED)),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, OutputFormat("json_schema", {})),
    ({"response_format": {"type": "json_schema", "json_schema": True}}, OutputFormat("json_schema", True)),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, OutputFormat("json_object")),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        OF_SCHEMA,
    ),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, OF_SCHEMA),
    ({"guided_json": SCHEMA}, OF_SCHEMA),
    ({"guided_json": json.dumps(SCHEMA)}, OF_SCHEMA),
    ({"guided_regex": "a+"}, OutputFormat("regex", "a+")),
    ({"guided_choice": ["a", "b"]}, OutputFormat("choice", ["a", "b"])),
    ({"guided_grammar": 'root ::= "a"'}, OutputFormat("grammar", 'root ::= "a"')),
    ({"structured_outputs": {"json": SCHEMA}}, OF_SCHEMA),
    ({"structured_outputs": {"regex": "a+"}}, OutputFormat("regex", "a+")),
    ({"structured_outputs": {"choice": ["a"]}}, OutputFormat("choice", ["a"])),
    ({"structured_outputs": {"grammar": "x"}}, OutputFormat("grammar", "x")),
    ({"structured_outputs": {"json_object": True}}, OutputFormat("json_object")),
    ({"structured_outputs": {}, "response_format": {"type": "text"}, "guided_json": SCHEMA}, OF_SCHEMA),
]


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(("fields", "expected"), FORMATS)
async def test_formats(
    client: httpx.AsyncClient, service: FakeService, path: str, fields: dict, expected: OutputFormat | None
) -> None:
    answer = await client.post(path, json=ENDPOINTS[path] | fields)
    assert answer.status_code == 200, answer.text
    assert service.requests[0].output == expected


@pytest.mark.parametrize(
    "fields",
    [{"output_format": {"type": "json_schema", "schema": SCHEMA}}, {"output_config": {"format": {"schema": SCHEMA}}}],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_anthropic(client: httpx.AsyncClient, service: FakeService, path: str, fields: dict) -> None:
    answer = await client.post(path, json=CHAT | fields)
    assert answer.status_code == 200, answer.text
    assert service.requests[0].output == OF_SCHEMA


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            "response_format.json_schema.schema",
        ),
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
            "response_format.json_schema",
        ),
        ("/v1/completions", {"guided_regex": "("}, "guided_regex"),
        ("/v1/chat/completions", {"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice"),
        ("/v1/messages", {"output_config": {"format": {"schema": SCHEMA}}}, "output_config.format.schema"),
        ("/v1/messages", {"output_format": {"schema": SCHEMA}}, "output_format.schema"),
        (RUN, {"response_format": {"type": "json_schema", "json_schema": SCHEMA}}, "response_format.json_schema"),
    ],
)
async def test_errors_use_the_client_field_name(
    client: httpx.AsyncClient, service: FakeService, path: str, fields: dict, named: str
) -> None:
    async def refuses(request: GenerateRequest):
        raise BadInput("`output`: that cannot be built", param="output")
        yield

    service.script = refuses
    answer = await client.post(path, json=ENDPOINTS.get(path, CHAT) | fields)
    assert answer.status_code == 400
    assert f"`{named}`: that cannot be built" in answer.text
    if path.startswith("/v1/c"):
        assert answer.json()["error"]["param"] == named


@pytest.mark.parametrize("schema", [[1], "x", 5])
async def test_an_envelope_around_no_schema(client: httpx.AsyncClient, schema: object) -> None:
    wanted = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    answer = await client.post("/v1/chat/completions", json=CHAT | wanted)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format.json_schema.schema")


JSON_MODE = {"prompt": "Hi", "response_format": {"type": "json_object"}}


@pytest.mark.parametrize("text", ['{"a":1.0,"b":[]}', "[1,2]", "5", '"x"', "null"])
async def test_native_json_mode_answers_with_the_value(
    client: httpx.AsyncClient, service: FakeService, text: str
) -> None:
    service.script = says(TextDelta(0, text[:2]), TextDelta(0, text[2:]), ChoiceDone(0, "stop"))
    answer = await client.post(RUN, json=JSON_MODE)
    assert answer.text.startswith('{"result":{"response":' + text + ',"tool_calls":[]')
    plain = await client.post(RUN, json={"prompt": "Hi", "guided_regex": ".*"})
    assert plain.json()["result"]["response"] == text


async def test_native_json_mode_that_is_no_json(client: httpx.AsyncClient, service: FakeService) -> None:
    service.script = says(TextDelta(0, '{"a":'), ChoiceDone(0, "stop"))
    assert (await client.post(RUN, json=JSON_MODE)).json()["result"]["response"] == '{"a":'
    service.script = says(TextDelta(0, '{"a":'), ChoiceDone(0, "length"))
    cut = await client.post(RUN, json=JSON_MODE)
    assert (cut.status_code, cut.json()["errors"][0]["code"]) == (400, 5024)
    assert "max_tokens" in cut.json()["errors"][0]["message"]
    streamed = (await client.post(RUN, json=JSON_MODE | {"stream": True})).text
    assert '"code":5024' in streamed
    assert "[DONE]" not in streamed
    assert (await client.post(RUN, json={"prompt": "Hi"})).json()["result"]["response"] == '{"a":'


async def test_native_json_mode_streams_text(client: httpx.AsyncClient, service: FakeService) -> None:
    for finish in ("stop", "length"):  # valid at the limit is valid
        service.script = says(TextDelta(0, '{"a":'), TextDelta(0, "1}"), ChoiceDone(0, finish))
        streamed = (await client.post(RUN, json=JSON_MODE | {"stream": True})).text
        pieces = [json.loads(line[6:]) for line in streamed.split("\n\n")[:-2]]
        assert "".join(piece["response"] for piece in pieces) == '{"a":1}'
        assert streamed.endswith("data: [DONE]\n\n")


async def test_native_json_mode_with_a_call_instead(client: httpx.AsyncClient, service: FakeService) -> None:
    service.script = says(ToolCallStarted(0, 0, "a", "f"), ToolCallDelta(0, 0, "{}"), ChoiceDone(0, "tool_calls"))
    result = (await client.post(RUN, json=JSON_MODE | {"tools": [{"name": "f"}]})).json()["result"]
    assert (result["response"], result["tool_calls"]) == (None, [{"name": "f", "arguments": {}, "id": "a"}])
