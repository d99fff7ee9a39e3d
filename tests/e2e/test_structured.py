"""Structured answers and tool loops on the real model, through real clients; `benchmarks.validity` has all schemas."""

import asyncio
import json
import random
from typing import Any
from urllib.parse import urlsplit

import pytest

from benchmarks import validity
from tests.examples import EVERY_EXAMPLE
from tests.lazy_modules import anthropic, openai

MODEL = "@cf/huggingfacetb/smollm2-135m-instruct"
N_CASES = 10 if EVERY_EXAMPLE else 1  # of each kind; four requests each
N_CALLS = 2
LEAST_CACHED = 0.9  # of every turn's prompt but the first
SYSTEM = (
    "You look after the garden of a small school. The beds are numbered from one to nine, the tools are in the shed, "
    "and the children come on Tuesdays and Fridays. Before you speak about a bed, look it up. Before you promise "
    "water, read the gauge of the barrel. Write down what you have found out, in short sentences for a child to read. "
    "If something is missing in the shed, say so at once. If two beds need the same thing, begin with the smaller one. "
) * 4
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "bed": {"type": "integer", "minimum": 1, "maximum": 9},
        "what": {"enum": ["soil", "water", "plants"]},
        "note": {"type": "string", "maxLength": 24},
    },
    "required": ["bed", "what"],
    "additionalProperties": False,
}


def test_schemas_are_followed_in_every_way_of_asking(server: str) -> None:
    """As an object or as a tool's arguments; at temperatures 0 and 1; streamed and whole."""
    drawn, every = random.Random(5), list(validity.functions())
    cases = drawn.sample([case for case in every if case.tool], N_CASES)
    cases += drawn.sample([case for case in every if not case.tool], N_CASES)
    outcome = asyncio.run(validity.run(urlsplit(server).port or 0, MODEL, cases, max_tokens=64))
    assert outcome.wrong == []
    assert not outcome.refused
    assert outcome.valid == 4 * len(cases)


def check_cached(n_cached: int, n_prompt: int) -> None:
    assert n_cached >= LEAST_CACHED * n_prompt, (n_cached, n_prompt)


def check_call(name: str, arguments: str) -> None:
    assert name == "look_up"
    value = json.loads(arguments)
    assert {"bed", "what"} <= value.keys() <= PARAMETERS["properties"].keys()
    assert 1 <= value["bed"] <= 9
    assert value["what"] in PARAMETERS["properties"]["what"]["enum"]


@pytest.fixture
def oai(server: str) -> "openai.OpenAI":
    return openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)


def test_calls_turn_by_turn_through_openai(oai: "openai.OpenAI") -> None:
    tool: Any = {"type": "function", "function": {"name": "look_up", "parameters": PARAMETERS, "strict": True}}
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "How is the garden?"},
    ]
    asked: dict[str, Any] = {
        "model": MODEL,
        "tools": [tool],
        "max_tokens": 40,
        "extra_headers": {"x-session-affinity": "garden-openai"},
    }
    for turn in range(N_CALLS):
        with oai.chat.completions.stream(
            **asked,
            messages=messages,
            tool_choice="required",
            temperature=1,
            seed=turn,
            stream_options={"include_usage": True},
        ) as stream:
            pieces = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
            reply = stream.get_final_completion()
        if turn:
            check_cached(reply.usage.prompt_tokens_details.cached_tokens, reply.usage.prompt_tokens)
        choice = reply.choices[0]
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls"
        assert "".join(pieces) == call.function.arguments
        check_call(call.function.name, call.function.arguments)
        messages.append(choice.message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"dry on top, damp below ({turn})"})
    last = oai.chat.completions.create(**asked, messages=messages, tool_choice="none")
    assert not last.choices[0].message.tool_calls
    check_cached(last.usage.prompt_tokens_details.cached_tokens, last.usage.prompt_tokens)


def test_calls_turn_by_turn_through_anthropic(server: str) -> None:
    client = anthropic.Anthropic(base_url=server, api_key="none", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "How is the garden?"}]
    for turn in range(N_CALLS + 1):
        with client.messages.stream(
            model=MODEL,
            system=SYSTEM,
            messages=messages,
            tools=[{"name": "look_up", "input_schema": PARAMETERS}],
            tool_choice={"type": "any"} if turn < N_CALLS else {"type": "none"},
            max_tokens=40,
            extra_headers={"x-session-affinity": "garden-anthropic"},
        ) as stream:
            pieces = [event.partial_json for event in stream if event.type == "input_json"]
            reply = stream.get_final_message()
        if turn:
            cached, rest = reply.usage.cache_read_input_tokens, reply.usage.input_tokens
            check_cached(cached, cached + rest)
        if turn == N_CALLS:
            assert reply.stop_reason in ("end_turn", "max_tokens")
            return
        assert reply.stop_reason == "tool_use"
        (block,) = [block for block in reply.content if block.type == "tool_use"]
        assert json.loads("".join(pieces)) == block.input
        check_call(block.name, json.dumps(block.input))
        messages.append({"role": "assistant", "content": [part.model_dump() for part in reply.content]})
        result = {"type": "tool_result", "tool_use_id": block.id, "content": f"dry on top, damp below ({turn})"}
        messages.append({"role": "user", "content": [result]})
