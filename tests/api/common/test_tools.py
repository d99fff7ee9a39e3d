"""Tools in every API: the canonical request, and tool calls in responses and streams."""

import asyncio
import json
import re

import httpx
import msgspec
import pytest

from emberline.api.common.tools import NO_ARGUMENTS
from emberline.api.openai.completions import generate_all
from emberline.protocol.errors import BadInput
from emberline.protocol.events import ChoiceDone, Completed, ToolCallDelta, ToolCallStarted
from emberline.protocol.request import GenerateRequest, Message, Principal, Tool, ToolCall, ToolChoice
from emberline.service.event_collector import collect_answer
from emberline.service.work import Work
from tests.api.fake_service import AGENT, MODEL, FakeService, Wire, agent, app_of, says

CF = "/client/v4/accounts/acme/ai"
RUN = f"{CF}/run/{MODEL}"
MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = {"model": MODEL, "messages": MESSAGES}
SCHEMA = {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}
WEATHER = Tool("weather", "Tells the weather.", SCHEMA)
FUNCTION = {"name": "weather", "description": "Tells the weather.", "parameters": SCHEMA}
NESTED = {"type": "function", "function": FUNCTION}
ANTHROPIC = {"name": "weather", "description": "Tells the weather.", "input_schema": SCHEMA}
CALLS = AGENT[4:]
USAGE_JSON = (
    '{"prompt_tokens":12,"completion_tokens":30,"total_tokens":42,"prompt_tokens_details":{"cached_tokens":8},'
    '"completion_tokens_details":{"reasoning_tokens":4}}'
)


def normal(text: str) -> str:
    text = re.sub(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "ID", text)
    text = re.sub(r'"p":"\w{1,32}"', '"p":"P"', text)
    return re.sub(r'"created":\d+', '"created":0', text)


async def asked(client: httpx.AsyncClient, service: FakeService, path: str, body: dict) -> GenerateRequest:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return service.requests[-1]


@pytest.mark.parametrize("tool", [NESTED, FUNCTION, {"type": "function", **FUNCTION}])
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), (RUN, {"messages": MESSAGES})])
async def test_tool_formats(client: httpx.AsyncClient, service: FakeService, path: str, body: dict, tool: dict) -> None:
    request = await asked(client, service, path, body | {"tools": [tool]})
    assert request.tools == (WEATHER,)
    assert request.tool_choice == ToolChoice()
    assert request.parallel_tool_calls


async def test_strict_and_a_tool_without_arguments(client: httpx.AsyncClient, service: FakeService) -> None:
    tools = [{"type": "function", "function": {"name": "now", "strict": True}}]
    request = await asked(client, service, "/v1/chat/completions", CHAT | {"tools": tools})
    assert request.tools == (Tool("now", "", NO_ARGUMENTS, strict=True),)


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ("any", ToolChoice("required")),
        ({"type": "function", "function": {"name": "weather"}}, ToolChoice("required", "weather")),
        ({"type": "function", "name": "weather"}, ToolChoice("required", "weather")),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", RUN])
async def test_choices(
    client: httpx.AsyncClient, service: FakeService, path: str, given: object, choice: ToolChoice
) -> None:
    body = {"messages": MESSAGES, "model": MODEL, "tools": [NESTED], "tool_choice": given}
    request = await asked(client, service, path, body | {"parallel_tool_calls": False})
    assert request.tool_choice == choice
    assert not request.parallel_tool_calls


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("nested", [True, False])
async def test_allowed_tools_are_the_only_ones(
    client: httpx.AsyncClient, service: FakeService, mode: str, nested: bool
) -> None:
    reference = {"type": "function", "function": {"name": "weather"}} if nested else {"name": "weather"}
    allowed = {"mode": mode, "tools": [reference]}
    choice = {"type": "allowed_tools", **({"allowed_tools": allowed} if nested else allowed)}
    body = CHAT | {"tools": [{"name": "other"}, NESTED], "tool_choice": choice}
    request = await asked(client, service, "/v1/chat/completions", body)
    assert request.tools == (WEATHER,)
    assert request.tool_choice == ToolChoice(mode)


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        (None, ToolChoice()),
        ({"type": "auto"}, ToolChoice()),
        ({"type": "none"}, ToolChoice("none")),
        ({"type": "any"}, ToolChoice("required")),
        ({"type": "tool", "name": "weather"}, ToolChoice("required", "weather")),
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_anthropic_tools(
    client: httpx.AsyncClient, service: FakeService, path: str, given: dict | None, choice: ToolChoice
) -> None:
    body = CHAT | {"tools": [ANTHROPIC | {"type": "custom", "cache_control": {"type": "ephemeral"}}]}
    request = await asked(client, service, path, body | ({"tool_choice": given} if given else {}))
    marked = msgspec.structs.replace(WEATHER, marks={"cache_control": {"type": "ephemeral"}})  # for Anthropic itself
    assert (request.tools, request.tool_choice) == ((marked,), choice)
    assert request.parallel_tool_calls
    alone = {"type": "auto", "disable_parallel_tool_use": True}
    assert not (await asked(client, service, path, body | {"tool_choice": alone})).parallel_tool_calls


async def test_deprecated_functions(client: httpx.AsyncClient, service: FakeService) -> None:
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": "{}"}},
        {"role": "function", "name": "weather", "content": "rain"},
    ]
    body = {"model": MODEL, "messages": messages, "functions": [FUNCTION]}
    for pick, choice in (
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("none", ToolChoice("none")),
        ({"name": "weather"}, ToolChoice("required", "weather")),
    ):
        request = await asked(client, service, "/v1/chat/completions", body | {"function_call": pick})
        assert (request.tools, request.tool_choice, request.parallel_tool_calls) == ((WEATHER,), choice, False)
        assert request.messages == (
            Message("user", "Hi"),
            Message("assistant", "", tool_calls=(ToolCall("call_0", "weather", "{}"),)),
            Message("tool", "rain", "weather", tool_call_id="call_0"),
        )


async def test_a_function_call_without_functions_is_refused(client: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "function_call": {"name": "weather"}}
    answer = await client.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "function_call"), answer.text


async def test_results_without_ids_are_paired_by_name_and_order(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    calls = [{"name": name, "arguments": {}} for name in ("a", "b", "a")]
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": calls},
        *({"role": "tool", "name": name, "content": name} for name in ("b", "a", "a")),
        {"role": "assistant", "content": "", "tool_calls": [{"id": "mine", "name": "a", "arguments": {}}]},
        {"role": "tool", "content": "no name"},
        {"role": "tool", "name": "a", "content": "one too many"},
    ]
    request = await asked(client, service, RUN, {"messages": messages})
    results = [message.tool_call_id for message in request.messages or () if message.role == "tool"]
    assert results == ["call_1", "call_0", "call_2", "mine", None]


async def test_history_comes_back_with_its_reasoning(client: httpx.AsyncClient, service: FakeService) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"town":"Oslo"}'}}
    for field in ("reasoning_content", "reasoning"):
        turn = {"role": "assistant", "content": None, "tool_calls": [call], field: "hm", "refusal": None}
        messages = [*MESSAGES, turn, {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "x"}]}]
        request = await asked(client, service, "/v1/chat/completions", {"model": MODEL, "messages": messages})
        assert request.messages is not None
        assert request.messages[1:] == (
            Message("assistant", "", tool_calls=(ToolCall("c1", "weather", '{"town":"Oslo"}'),), reasoning="hm"),
            Message("tool", "x", tool_call_id="c1"),
        )


async def test_anthropic_results(client: httpx.AsyncClient, service: FakeService) -> None:
    blocks = [
        {"type": "tool_result", "tool_use_id": "a", "content": "no road", "is_error": True},
        {"type": "tool_result", "tool_use_id": "b", "is_error": True},
        {"type": "tool_result", "tool_use_id": "c"},
    ]
    request = await asked(
        client, service, "/v1/messages", {"model": MODEL, "messages": [{"role": "user", "content": blocks}]}
    )
    assert [message.content for message in request.messages or ()] == ["Error: no road", "Error", ""]


async def test_chat_answer(client: httpx.AsyncClient, service: FakeService) -> None:
    service.script = agent
    answer = await client.post("/v1/chat/completions", json=CHAT | {"tools": [NESTED]})
    assert normal(answer.text) == (
        '{"id":"chatcmpl-ID","object":"chat.completion","created":0,"model":"' + MODEL + '","choices":[{"index":0,'
        '"message":{"role":"assistant","content":"Let me look.","refusal":null,"reasoning_content":"Two towns.",'
        '"tool_calls":[{"id":"call_a","type":"function","function":{"name":"weather",'
        '"arguments":"{\\"town\\":\\"Oslo\\"}"}},{"id":"call_b","type":"function","function":{"name":"weather",'
        '"arguments":"{\\"town\\":\\"Rome\\"}"}}]},"logprobs":null,"finish_reason":"tool_calls"}],'
        '"usage":' + USAGE_JSON + "}"
    )
    service.script = says(*CALLS)
    (choice,) = (await client.post("/v1/chat/completions", json=CHAT | {"tools": [NESTED]})).json()["choices"]
    assert choice["message"]["content"] is None
    assert "reasoning_content" not in choice["message"]


async def test_chat_stream(client: httpx.AsyncClient, service: FakeService) -> None:
    service.script = agent
    answer = await client.post("/v1/chat/completions", json=CHAT | {"tools": [NESTED], "stream": True})
    head = 'data: {"id":"chatcmpl-ID","object":"chat.completion.chunk","created":0,"model":"' + MODEL + '","choices":['
    deltas = [
        '{"role":"assistant","content":null}',
        '{"reasoning_content":"Two "}',
        '{"reasoning_content":"towns."}',
        '{"content":"Let me "}',
        '{"content":"look."}',
        '{"tool_calls":[{"index":0,"id":"call_a","type":"function","function":{"name":"weather","arguments":""}}]}',
        '{"tool_calls":[{"index":0,"function":{"arguments":"{\\"town\\":"}}]}',
        '{"tool_calls":[{"index":0,"function":{"arguments":"\\"Oslo\\"}"}}]}',
        '{"tool_calls":[{"index":1,"id":"call_b","type":"function","function":{"name":"weather","arguments":""}}]}',
        '{"tool_calls":[{"index":1,"function":{"arguments":"{\\"town\\":\\"Rome\\"}"}}]}',
    ]
    expected = [head + '{"index":0,"delta":' + delta + ',"logprobs":null,"finish_reason":null}]}' for delta in deltas]
    expected += [head + '{"index":0,"delta":{},"logprobs":null,"finish_reason":"tool_calls"}]}', "data: [DONE]", ""]
    assert normal(answer.text).split("\n\n") == expected


async def test_obfuscation_pads_calls_too(client: httpx.AsyncClient, service: FakeService) -> None:
    service.script = agent
    options = {"stream": True, "stream_options": {"include_obfuscation": True}}
    answer = await client.post("/v1/chat/completions", json=CHAT | options)
    assert answer.text.count('"obfuscation"') == 1 + len(AGENT) - 1  # the role, and all but the end


async def test_deprecated_functions_in_the_response(client: httpx.AsyncClient, service: FakeService) -> None:
    service.script = says(*CALLS)
    answer = await client.post("/v1/chat/completions", json=CHAT | {"functions": [FUNCTION]})
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "function_call": {"name": "weather", "arguments": '{"town":"Oslo"}'},
    }
    streamed = await client.post("/v1/chat/completions", json=CHAT | {"functions": [FUNCTION], "stream": True})
    assert re.findall(r'"delta":(.*?),"logprobs"', streamed.text) == [
        '{"role":"assistant","content":null}',
        '{"function_call":{"name":"weather","arguments":""}}',
        '{"function_call":{"arguments":"{\\"town\\":"}}',
        '{"function_call":{"arguments":"\\"Oslo\\"}"}}',
        "{}",
    ]
    assert streamed.text.count('"finish_reason":"function_call"') == 1


async def test_anthropic_answer(client: httpx.AsyncClient, service: FakeService) -> None:
    service.script = agent
    answer = await client.post("/v1/messages", json=CHAT | {"tools": [ANTHROPIC]})
    assert normal(answer.text) == (
        '{"id":"msg_ID","type":"message","role":"assistant","model":"' + MODEL + '","content":['
        '{"type":"thinking","thinking":"Two towns.","signature":"ZW1iZXJsaW5l"},{"type":"text","text":"Let me look."},'
        '{"type":"tool_use","id":"call_a","name":"weather","input":{"town":"Oslo"}},'
        '{"type":"tool_use","id":"call_b","name":"weather","input":{"town":"Rome"}}],'
        '"stop_reason":"tool_use","stop_sequence":null,"usage":{"input_tokens":4,"cache_creation_input_tokens":0,'
        '"cache_read_input_tokens":8,"output_tokens":30,"output_tokens_details":{"thinking_tokens":4}}}'
    )


async def test_anthropic_stream(client: httpx.AsyncClient, service: FakeService) -> None:
    service.script = agent
    answer = await client.post("/v1/messages", json=CHAT | {"tools": [ANTHROPIC], "stream": True})

    def event(kind: str, rest: str) -> str:
        return f'event: {kind}\ndata: {{"type":"{kind}",{rest}}}'

    def start(index: int, block: str) -> str:
        return event("content_block_start", f'"index":{index},"content_block":{block}')

    def delta(index: int, delta: str) -> str:
        return event("content_block_delta", f'"index":{index},"delta":{delta}')

    def stop(index: int) -> str:
        return event("content_block_stop", f'"index":{index}')

    first, *events = normal(answer.text).split("\n\n")
    assert first.startswith("event: message_start\n")
    assert events == [
        start(0, '{"type":"thinking","thinking":"","signature":""}'),
        'event: ping\ndata: {"type":"ping"}',
        delta(0, '{"type":"thinking_delta","thinking":"Two "}'),
        delta(0, '{"type":"thinking_delta","thinking":"towns."}'),
        delta(0, '{"type":"signature_delta","signature":"ZW1iZXJsaW5l"}'),
        stop(0),
        start(1, '{"type":"text","text":""}'),
        delta(1, '{"type":"text_delta","text":"Let me "}'),
        delta(1, '{"type":"text_delta","text":"look."}'),
        stop(1),
        start(2, '{"type":"tool_use","id":"call_a","name":"weather","input":{}}'),
        delta(2, '{"type":"input_json_delta","partial_json":""}'),
        delta(2, '{"type":"input_json_delta","partial_json":"{\\"town\\":"}'),
        delta(2, '{"type":"input_json_delta","partial_json":"\\"Oslo\\"}"}'),
        stop(2),
        start(3, '{"type":"tool_use","id":"call_b","name":"weather","input":{}}'),
        delta(3, '{"type":"input_json_delta","partial_json":""}'),
        delta(3, '{"type":"input_json_delta","partial_json":"{\\"town\\":\\"Rome\\"}"}'),
        stop(3),
        event(
            "message_delta",
            '"delta":{"stop_reason":"tool_use","stop_sequence":null},"usage":{"input_tokens":4,'
            '"cache_creation_input_tokens":0,"cache_read_input_tokens":8,"output_tokens":30,'
            '"output_tokens_details":{"thinking_tokens":4}}',
        ),
        'event: message_stop\ndata: {"type":"message_stop"}',
        "",
    ]


async def test_native_answer(client: httpx.AsyncClient, service: FakeService) -> None:
    service.script = agent
    answer = await client.post(RUN, json={"prompt": "Hi", "tools": [FUNCTION]})
    assert answer.text == (
        '{"result":{"response":"Let me look.","tool_calls":['
        '{"name":"weather","arguments":{"town":"Oslo"},"id":"call_a"},'
        '{"name":"weather","arguments":{"town":"Rome"},"id":"call_b"}],'
        '"reasoning_content":"Two towns.","finish_reason":"tool_calls","usage":' + USAGE_JSON + "},"
        '"success":true,"errors":[],"messages":[]}'
    )
    service.script = says(*CALLS)
    result = (await client.post(RUN, json={"prompt": "Hi", "tools": [FUNCTION]})).json()["result"]
    assert result["response"] is None
    assert "reasoning_content" not in result


async def test_native_stream(client: httpx.AsyncClient, service: FakeService) -> None:
    service.script = agent
    answer = await client.post(RUN, json={"prompt": "Hi", "tools": [FUNCTION], "stream": True})
    assert normal(answer.text).split("\n\n") == [
        'data: {"response":"","reasoning_content":"Two ","p":"P"}',
        'data: {"response":"","reasoning_content":"towns.","p":"P"}',
        'data: {"response":"Let me ","p":"P"}',
        'data: {"response":"look.","p":"P"}',
        'data: {"tool_calls":[{"id":"call_a","type":"function","index":0,"function":'
        '{"name":"weather","arguments":""}}],"p":"P"}',
        'data: {"tool_calls":[{"index":0,"function":{"arguments":"{\\"town\\":"}}],"p":"P"}',
        'data: {"tool_calls":[{"index":0,"function":{"arguments":"\\"Oslo\\"}"}}],"p":"P"}',
        'data: {"tool_calls":[{"id":"call_b","type":"function","index":1,"function":'
        '{"name":"weather","arguments":""}}],"p":"P"}',
        'data: {"tool_calls":[{"index":1,"function":{"arguments":"{\\"town\\":\\"Rome\\"}"}}],"p":"P"}',
        'data: {"response":"","finish_reason":"tool_calls","usage":' + USAGE_JSON + "}",
        "data: [DONE]",
        "",
    ]


async def test_truncated_arguments_are_dropped_where_they_must_be_objects(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    service.script = says(
        ToolCallStarted(0, 0, "a", "weather"), ToolCallDelta(0, 0, '{"town":"Os'), ChoiceDone(0, "length")
    )
    message = (await client.post("/v1/messages", json=CHAT | {"tools": [ANTHROPIC]})).json()
    cut = {"type": "tool_use", "id": "a", "name": "weather", "input": {}}
    assert (message["content"], message["stop_reason"]) == ([cut], "max_tokens")
    result = (await client.post(RUN, json={"prompt": "Hi", "tools": [FUNCTION]})).json()["result"]
    assert result["tool_calls"] == []
    chat = (await client.post("/v1/chat/completions", json=CHAT | {"tools": [NESTED]})).json()["choices"][0]
    assert chat["message"]["tool_calls"][0]["function"]["arguments"] == '{"town":"Os'
    assert chat["finish_reason"] == "length"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", RUN])
async def test_a_client_that_disconnects_during_arguments(service: FakeService, path: str) -> None:
    async def script(request: GenerateRequest):
        async for event in says(*CALLS[:2])(request):
            if isinstance(event, Completed):
                await asyncio.Event().wait()
            yield event

    service.script = script
    body = {"model": MODEL, "messages": MESSAGES, "stream": True, "tools": []}
    wire = Wire(app_of(service), path, json.dumps(body).encode())
    await wire.until_sent(b"town")
    assert service.open == 1
    wire.leave()
    await asyncio.wait_for(wire.task, 60)
    assert service.open == 0


async def test_merged_requests_keep_their_calls_separate() -> None:
    requests = [GenerateRequest(id=str(i), model=MODEL, prompt="x") for i in range(3)]
    service, principal = FakeService(agent), Principal("acme", "k", b"")
    events = generate_all(lambda request: service.run(Work(request, principal)), requests)
    answer = await collect_answer(events, 3)
    (alone,) = (await collect_answer(FakeService(agent).run(Work(requests[0], Principal("acme", "k", b""))))).choices
    assert alone.tool_calls[1] == ToolCall("call_b", "weather", '{"town":"Rome"}')
    assert answer.choices == [alone] * 3


@pytest.mark.parametrize(
    ("path", "body", "canonical", "named"),
    [
        ("/v1/chat/completions", {"tools": [NESTED]}, "tools[0].parameters", "tools[0].function.parameters"),
        ("/v1/chat/completions", {"tools": [FUNCTION]}, "tools[0].parameters", "tools[0].parameters"),
        ("/v1/chat/completions", {"functions": [FUNCTION]}, "tools[0].parameters", "functions[0].parameters"),
        ("/v1/chat/completions", {"functions": [FUNCTION]}, "tools", "functions"),
        ("/v1/chat/completions", {"tools": [NESTED]}, "tools", "tools"),
        (
            "/v1/chat/completions",
            {
                "tools": [{"name": "a"}, NESTED],
                "tool_choice": {"type": "allowed_tools", "tools": [{"name": "weather"}]},
            },
            "tools[0].parameters.properties",
            "tools[1].function.parameters.properties",
        ),
        ("/v1/chat/completions", {}, "messages[0].tool_call_id", "messages[0].tool_call_id"),
        ("/v1/chat/completions", {}, "seed", "seed"),
        ("/v1/messages", {"tools": [ANTHROPIC]}, "tools[0].parameters", "tools[0].input_schema"),
        ("/v1/messages", {"system": "x"}, "messages[0]", "system"),
        ("/v1/messages", {"system": "x"}, "messages[1].content", "messages[0]"),
    ],
)
async def test_service_errors_use_the_client_field_name(
    client: httpx.AsyncClient, service: FakeService, path: str, body: dict, canonical: str, named: str
) -> None:
    async def refuses(request: GenerateRequest):
        raise BadInput(f"`{canonical}` is wrong", param=canonical)
        yield

    service.script = refuses
    for stream in (False, True):
        answer = await client.post(path, json=CHAT | body | {"stream": stream})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == f"`{named}` is wrong"
        assert answer.json()["error"].get("param", named) == named
