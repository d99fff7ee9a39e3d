"""Agent loops through the pipeline: on the real model, whose calls the grammar makes valid, and on scripted tokens."""

import json
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from emberline.balancer.endpoint import Endpoint
from emberline.protocol import token_ids as tokens
from emberline.protocol.events import ChoiceDone, Completed, TextEvent, Usage
from emberline.protocol.request import GenerateRequest, Message, Tool, ToolCall, ToolChoice
from emberline.service import Served, Service, open_service
from emberline.text.grammar.compiler_pool import GrammarCompiler
from emberline.text.text_model import TextModel
from tests.engine.client import engine
from tests.service.conftest import offer
from tests.service.test_service import ask, events_of, text_of
from tests.service.test_tools import arguments_of, started, thoughts_of
from tests.standin import standin_thread
from tests.text.tool_calls.models import CALLERS, model

pytestmark = pytest.mark.asyncio(loop_scope="module")  # the loop of the processes that compile grammars

START_S = 60.0
BLOCK = 16
TOKEN = "secret"  # what `engine` starts them with
WEATHER = Tool(
    "get_weather",
    "Tells the weather in a city.",
    {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
)
ADD = Tool(
    "add",
    "Adds two numbers.",
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
)


def reply_of(events: list[TextEvent]) -> Message:
    """The message that a client sends back."""
    calls = [ToolCall(event.id, event.name, arguments_of(events, event.call)) for event in started(events)]
    return Message("assistant", text_of(events), tool_calls=tuple(calls), reasoning=thoughts_of(events) or None)


def usage_of(events: list[TextEvent]) -> Usage:
    (completed,) = [event for event in events if isinstance(event, Completed)]
    return completed.usage


def check_cached(turns: list[list[TextEvent]]) -> None:
    """All that was computed in a turn is there in the next, but for the last block and what an end token would be."""
    usages = list(map(usage_of, turns))
    for before, after in pairwise(usages):
        assert after.cached_tokens >= 0.9 * after.prompt_tokens, usages
        assert after.cached_tokens >= before.prompt_tokens + before.completion_tokens - BLOCK - 1, usages


async def loop(service: Service, request: GenerateRequest, n_turns: int, result: str) -> list[list[TextEvent]]:
    """An agent's: every call gets the result, and the model is asked again."""
    turns: list[list[TextEvent]] = []
    messages = request.messages or ()
    for turn in range(n_turns):
        events = await events_of(
            service, msgspec.structs.replace(request, id=f"{request.id}-{turn}", messages=messages)
        )
        turns.append(events)
        reply = reply_of(events)
        assert reply.tool_calls
        answers = [Message("tool", result, tool_call_id=call.id) for call in reply.tool_calls]
        messages = (*messages, reply, *answers)
    return turns


# --- the real model ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def worker(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    path = tmp_path_factory.mktemp("worker") / "a.sock"
    flags = ("--model", smollm2, "--socket", path, "--device", "cpu", "--threads", 1)
    with engine("emberline.engine.worker", *flags) as (_, address):
        yield Endpoint(name="e0", address=address, token=TOKEN)


@pytest.fixture(scope="module")
def smol(smollm2: Path) -> TextModel:
    return TextModel.load(smollm2)


@pytest_asyncio.fixture(loop_scope="module")
async def real(worker: Endpoint, smol: TextModel, tmp_path: Path, grammars: GrammarCompiler) -> AsyncIterator[Service]:
    service = await open_service([Served(offer(smol).card, smol, (worker,))], data_dir=tmp_path, grammars=grammars)
    assert await service.ready(START_S)
    yield service
    await service.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("parallel", [True, False])
async def test_required_calls_are_declared_and_parseable(real: Service, temperature: float, parallel: bool) -> None:
    for seed in range(2 if temperature else 1):
        request = ask(
            "What is the weather in Oslo, and what is 3 + 4?",
            tools=(WEATHER, ADD),
            tool_choice=ToolChoice("required"),
            parallel_tool_calls=parallel,
            sampling={"temperature": temperature, "seed": seed, "max_tokens": 120},
        )
        events = await events_of(real, request)
        reply = reply_of(events)
        assert reply.content == ""
        assert [event.finish for event in events if isinstance(event, ChoiceDone)] == ["tool_calls"]
        assert reply.tool_calls if parallel else len(reply.tool_calls) == 1
        for call in reply.tool_calls:
            arguments = json.loads(call.arguments)
            assert list(arguments) == (["city", "unit"] if call.name == "get_weather" else ["a", "b"])


async def test_a_named_tool_is_the_one_that_is_called(real: Service) -> None:
    request = ask(
        "Hello!", tools=(WEATHER, ADD), tool_choice=ToolChoice("required", "add"), sampling={"max_tokens": 60}
    )
    reply = reply_of(await events_of(real, request))
    assert {call.name for call in reply.tool_calls} == {"add"}


async def test_no_tool_is_called_when_none_may_be(real: Service) -> None:
    request = ask(
        "What is the weather in Oslo?",
        tools=(WEATHER,),
        tool_choice=ToolChoice("none"),
        sampling={"max_tokens": 40, "temperature": 0.0},
    )
    events = await events_of(real, request)
    assert started(events) == []
    assert "<tool_call>" not in text_of(events)


async def test_five_calls_find_what_came_before_in_the_cache(real: Service) -> None:
    # So long that one block, which may not be cached yet, is less than a tenth of it.
    system = "You are a careful assistant that works for a weather station. Call one function at a time. " * 6
    request = ask(
        messages=(Message("system", system), Message("user", "Is it warmer in Oslo or in Rome?")),
        tools=(WEATHER, ADD),
        tool_choice=ToolChoice("required"),
        parallel_tool_calls=False,
        sampling={"temperature": 0.0, "max_tokens": 80},
    )
    turns = await loop(real, request, 6, "20")
    check_cached(turns)


# --- scripted tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLERS)
async def test_every_familys_loop_finds_what_came_before(name: str, tmp_path: Path, grammars: GrammarCompiler) -> None:
    """The model writes compact JSON, and its template other JSON: ids are kept all the same."""
    text = model(name)
    end_id = _end_id(text)
    written = text.tool_format.write([ToolCall("", "get_weather", '{"city":"Oslo","unit":"celsius"}')])
    said = tokens.unpack(text.encode(("I look.</think>" if name == "kimi" else "") + written, special=True))
    flags = ("--vocab-size", text.vocab_size, "--eos-ids", end_id, "--context-len", 8192)
    with standin_thread(tmp_path / "a.sock", *flags) as endpoint:
        service = await open_service(
            [Served(offer(text).card, text, (endpoint,))], data_dir=tmp_path, grammars=grammars
        )
        assert await service.ready(START_S)
        request = ask(
            messages=(Message("user", "Is it warmer in Oslo or in Rome? " * 20),),
            tools=(WEATHER, ADD),
            session=f"standin:say={'.'.join(map(str, said))}",
        )
        turns = await loop(service, request, 6, "20 C")
        await service.close()
    check_cached(turns)


def _end_id(text: TextModel) -> int:
    """What ends a turn: the last special token of an assistant's."""
    rendered = text.render_guarded((Message("user", "a"), Message("assistant", "b")), {}, add_generation_prompt=False)
    ids = tokens.unpack(text.tokenizer.encode_marked(*rendered))
    return next(token_id for token_id in reversed(ids) if token_id in text.special_ids)
