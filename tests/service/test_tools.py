"""Tool calls, reasoning and formats through the pipeline, with scripted tokens."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from emberline.protocol import grammar
from emberline.protocol import token_ids as tokens
from emberline.protocol.errors import BadInput, ErrorInfo
from emberline.protocol.events import (
    ChoiceDone,
    Completed,
    ReasoningDelta,
    TextDelta,
    TextEvent,
    TokenDelta,
    ToolCallDelta,
    ToolCallStarted,
)
from emberline.protocol.request import Message, OutputFormat, Reasoning, Tool, ToolCall, ToolChoice
from emberline.service import Service, open_service
from emberline.text.grammar.compiler_pool import GrammarCompiler
from tests.service.conftest import ALICE, PATIENCE_S, offer
from tests.service.fake_engine import EOS, FakeEngine
from tests.service.test_service import ask, events_of, row_of, text_of
from tests.text.tool_calls.models import model

WEATHER = Tool("get_weather", "Tells the weather.", {"type": "object", "properties": {"city": {"type": "string"}}})
NOW = Tool("now")
PARIS, NOTHING = ToolCall("", "get_weather", '{"city":"Paris \U0001f680"}'), ToolCall("", "now", "{}")

pytestmark = pytest.mark.asyncio(loop_scope="module")  # the loop of the processes that compile grammars

Tell = Callable[..., Awaitable[tuple[Service, FakeEngine]]]
_sockets = itertools.count()


@pytest_asyncio.fixture(loop_scope="module")
async def tell(tmp_path: Path, grammars: GrammarCompiler) -> AsyncIterator[Tell]:
    """A function that opens a service over an engine which says these texts in turn, in a family's tokens."""
    opened: list[tuple[Service, FakeEngine]] = []

    async def make(name: str, *texts: str, end: bool = True) -> tuple[Service, FakeEngine]:
        n = next(_sockets)
        spoken = [tokens.unpack(model(name).encode(text, special=True)) for text in texts]
        turns = itertools.cycle(spoken)
        engine = FakeEngine(
            tmp_path / f"{n}.sock",
            lambda _: [*next(turns), *([EOS] if end else [])],
            vocab_size=model(name).vocab_size,
            context_len=4096,
        )
        await engine.start()
        service = await open_service([offer(model(name), engine)], data_dir=tmp_path / str(n), grammars=grammars)
        opened.append((service, engine))
        assert await service.ready(PATIENCE_S)
        return service, engine

    yield make
    for service, engine in opened:
        await service.close()
        await engine.die()


def arguments_of(events: list[TextEvent], call: int, index: int = 0) -> str:
    deltas = [event for event in events if isinstance(event, ToolCallDelta) and event.index == index]
    return "".join(delta.arguments for delta in deltas if delta.call == call)


def thoughts_of(events: list[TextEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, ReasoningDelta))


def started(events: list[TextEvent]) -> list[ToolCallStarted]:
    return [event for event in events if isinstance(event, ToolCallStarted)]


def done(events: list[TextEvent]) -> list[ChoiceDone]:
    return [event for event in events if isinstance(event, ChoiceDone)]


def told(events: list[TextEvent]) -> list[TextEvent]:
    return [event for event in events if not isinstance(event, Completed)]


@pytest.mark.parametrize("burst", [1, 3, 1000])
@pytest.mark.parametrize("name", ["qwen", "hermes-special", "generic", "mistral-list", "mistral", "kimi"])
async def test_calls_are_events(tell: Tell, name: str, burst: int) -> None:
    written = model(name).tool_format.write([PARIS, NOTHING])
    service, engine = await tell(name, ("</think>" if name == "kimi" else "") + "Let me see.\n" + written)
    engine.burst = burst
    request = ask(tools=(WEATHER, NOW))
    events = await events_of(service, request)
    assert text_of(events) == "Let me see."
    assert [(event.call, event.name) for event in started(events)] == [(0, "get_weather"), (1, "now")]
    assert [arguments_of(events, call) for call in (0, 1)] == [PARIS.arguments, "{}"]
    assert done(events) == [ChoiceDone(0, "tool_calls")]
    assert len({event.id for event in started(events)}) == 2
    if burst == 1:
        assert sum(isinstance(event, ToolCallDelta) for event in events) > 5
    assert grammar.decode(engine.submitted[0].grammar).rules


async def test_the_engine_is_told_which_turns_ended_with_tool_calls(tell: Tell) -> None:
    service, engine = await tell("qwen", model("qwen").tool_format.write([PARIS]), "It rains.")
    for _ in range(2):
        await events_of(service, ask(tools=(WEATHER,)))
    called, _ = await engine.submission(2)
    async with asyncio.timeout(PATIENCE_S):
        while not engine.called_tools:
            await asyncio.sleep(0.001)
    assert engine.called_tools == [called.id]


async def test_a_tool_that_was_not_declared_is_text(tell: Tell) -> None:
    service, _ = await tell("qwen", model("qwen").tool_format.write([ToolCall("", "rm", "{}")]))
    events = await events_of(service, ask(tools=(WEATHER,)))
    assert started(events) == []
    assert '"rm"' in text_of(events)
    assert done(events) == [ChoiceDone(0, "stop")]


async def test_a_call_that_is_cut_is_cut(tell: Tell) -> None:
    service, _ = await tell("qwen", model("qwen").tool_format.write([PARIS])[:-25], end=False)
    events = await events_of(service, ask(tools=(WEATHER,)))
    assert done(events) == [ChoiceDone(0, "length")]
    assert PARIS.arguments.startswith(arguments_of(events, 0))


async def test_calls_that_are_whole_are_calls_though_tokens_ran_out(tell: Tell) -> None:
    service, _ = await tell("qwen", model("qwen").tool_format.write([PARIS]) + "\n", end=False)
    assert done(await events_of(service, ask(tools=(WEATHER,)))) == [ChoiceDone(0, "tool_calls")]
    service, _ = await tell("qwen", model("qwen").tool_format.write([PARIS]) + " And", end=False)
    assert done(await events_of(service, ask(tools=(WEATHER,)))) == [ChoiceDone(0, "length")]


async def test_stop_strings_end_text_and_nothing_else(tell: Tell) -> None:
    written = model("qwen").tool_format.write([PARIS])
    service, _ = await tell("qwen", f"<think>Paris</think>So: {written}", "<think>x</think>In Paris, yes.")
    request = ask(tools=(WEATHER,), sampling={"stop": ("Paris", "So:x")})
    events = await events_of(service, request)
    assert (text_of(events), thoughts_of(events)) == ("So:", "Paris")
    assert arguments_of(events, 0) == PARIS.arguments
    events = await events_of(service, ask(tools=(WEATHER,), sampling={"stop": ("Paris",)}))
    assert text_of(events) == "In "
    assert done(events) == [ChoiceDone(0, "stop", "Paris")]


@pytest.mark.parametrize("burst", [1, 1000])
async def test_a_call_behind_a_stop_string_was_never_made(
    tell: Tell, burst: int, caplog: pytest.LogCaptureFixture
) -> None:
    service, engine = await tell("qwen", "Stop here. " + model("qwen").tool_format.write([PARIS]))
    engine.burst = burst
    request = ask(tools=(WEATHER,), sampling={"stop": ("here",)})
    events = await events_of(service, request)
    assert (text_of(events), started(events)) == ("Stop ", [])
    assert done(events) == [ChoiceDone(0, "stop", "here")]
    assert (await row_of(service, request)).status == "finished"
    assert "not remembered" not in caplog.text


@pytest.mark.parametrize("burst", [1, 1000])
async def test_a_call_cut_before_its_name_is_nobodys_text(tell: Tell, burst: int) -> None:
    text = "I look.\n" + model("qwen").tool_format.write([PARIS])
    n = len(tokens.unpack(model("qwen").encode(text[: text.index("weather")], special=True)))
    service, engine = await tell("qwen", text)
    engine.burst = burst
    events = await events_of(service, ask(tools=(WEATHER,), sampling={"max_tokens": n}))
    assert text_of(events) == "I look."
    assert started(events) == []
    assert done(events) == [ChoiceDone(0, "length")]


@pytest.mark.parametrize("burst", [1, 1000])
@pytest.mark.parametrize("until", ["_call>", "weather", '"city'])
async def test_a_forced_call_cut_before_its_arguments_begins(tell: Tell, until: str, burst: int) -> None:
    text = model("hermes-text").tool_format.write([PARIS])
    n = len(tokens.unpack(model("hermes-text").encode(text[: text.index(until)], special=True)))
    service, engine = await tell("hermes-text", text)
    engine.burst = burst
    for named in (None, "get_weather"):
        tools, choice = (
            ((WEATHER,), ToolChoice("required")) if named is None else ((WEATHER, NOW), ToolChoice("required", named))
        )
        events = await events_of(service, ask(tools=tools, tool_choice=choice, sampling={"max_tokens": n}))
        assert (text_of(events), [event.name for event in started(events)]) == ("", ["get_weather"])
        assert done(events) == [ChoiceDone(0, "length")]
    either = ask(tools=(WEATHER, NOW), tool_choice=ToolChoice("required"), sampling={"max_tokens": n})
    events = await events_of(service, either)
    assert (text_of(events), len(started(events))) == ("", until == '"city')
    assert done(events) == [ChoiceDone(0, "length")]


async def test_a_second_call_cut_before_its_name_is_a_cut_reply(tell: Tell) -> None:
    text = model("qwen").tool_format.write([PARIS, NOTHING])
    n = len(tokens.unpack(model("qwen").encode(text[: text.index('now"')], special=True)))
    service, _ = await tell("qwen", text)
    events = await events_of(service, ask(tools=(WEATHER, NOW), sampling={"max_tokens": n}))
    assert text_of(events) == ""
    assert [event.name for event in started(events)] == ["get_weather"]
    assert done(events) == [ChoiceDone(0, "length")]


async def test_min_tokens_are_not_searched_for_stop_strings(tell: Tell) -> None:
    service, _ = await tell("qwen", "stop stop stop")
    n = len(tokens.unpack(model("qwen").encode("stop", special=False)))
    events = await events_of(service, ask(tools=(WEATHER,), sampling={"stop": ("stop",), "min_tokens": n}))
    assert text_of(events) == "stop "


@pytest.mark.parametrize("burst", [1, 4, 1000])
async def test_reasoning_is_separate_and_counted(tell: Tell, burst: int) -> None:
    service, engine = await tell("kimi", "Is it?\nYes.</think>It is.")
    engine.burst = burst
    request = ask()
    events = await events_of(service, request)
    assert thoughts_of(events) == "Is it?\nYes."
    assert text_of(events) == "It is."
    n_reasoning = len(tokens.unpack(model("kimi").encode("Is it?\nYes.</think>", special=True)))
    assert isinstance(events[-1], Completed)
    assert events[-1].usage.reasoning_tokens == n_reasoning
    assert (await row_of(service, request)).reasoning_tokens == n_reasoning
    assert engine.submitted[0].grammar == b""


async def test_reasoning_is_off_when_it_is_not_wanted(tell: Tell) -> None:
    service, engine = await tell("kimi", "It is.")
    events = await events_of(service, ask(reasoning=Reasoning(enabled=False)))
    assert (text_of(events), thoughts_of(events)) == ("It is.", "")
    assert model("kimi").decode(engine.submitted[0].prompt_ids, special=True).endswith("<think></think>")
    assert engine.submitted[0].thinking_limit is None


async def test_a_budget_of_reasoning_reaches_the_engine(tell: Tell) -> None:
    service, engine = await tell("kimi", "Hm.</think>It is.")
    await events_of(service, ask(reasoning=Reasoning(budget_tokens=7)))
    await events_of(service, ask(reasoning=Reasoning(effort="low"), sampling={"max_tokens": 100}))
    limits = [request.thinking_limit for request in engine.submitted]
    assert [limit.most for limit in limits if limit is not None] == [7, 20]


async def test_a_call_inside_reasoning_is_not_lost(tell: Tell) -> None:
    service, _ = await tell("kimi", "I look." + model("kimi").tool_format.write([PARIS]))
    events = await events_of(service, ask(tools=(WEATHER,)))
    assert thoughts_of(events) == "I look."
    assert [event.id for event in started(events)] == ["functions.get_weather:0"]
    assert done(events) == [ChoiceDone(0, "tool_calls")]


async def test_a_model_that_counts_wrongly_gets_ids_that_differ(tell: Tell) -> None:
    call = "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    service, _ = await tell("kimi", call + call)
    events = await events_of(service, ask(tools=(NOW,)))
    assert [event.id for event in started(events)] == ["functions.now:0", "functions.now:1"]


async def test_log_probabilities_are_of_text(tell: Tell) -> None:
    service, _ = await tell("kimi", "Hm.</think>It is.")
    events = await events_of(service, ask(sampling={"logprobs": 0}))
    entries = [entry for event in events if isinstance(event, TextDelta) for entry in event.logprobs or ()]
    assert "".join(entry.token for entry in entries) == "It is."


async def test_every_choice_has_its_own_calls(tell: Tell) -> None:
    service, _ = await tell("qwen", model("qwen").tool_format.write([PARIS]), "Hello.")
    events = await events_of(service, ask(tools=(WEATHER,), n=2))
    assert sorted((event.index, event.finish) for event in done(events)) == [(0, "tool_calls"), (1, "stop")]


async def test_the_grammar_binds_the_reply(tell: Tell) -> None:
    service, engine = await tell("qwen", "yes")
    await events_of(service, ask(output=OutputFormat("choice", ["yes", "no"]), reasoning=Reasoning(enabled=False)))
    assert grammar.decode(engine.submitted[0].grammar) == grammar.Grammar(
        (grammar.OneOf((grammar.Text("yes"), grammar.Text("no"))),)
    )
    await events_of(service, ask())
    assert engine.submitted[1].grammar == b""


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"tools": (Tool("no spaces"),)}, "'no spaces'", "tools[0].name"),
        ({"tools": (Tool(""),)}, "1 to 64", "tools[0].name"),
        ({"tools": (NOW, NOW)}, "two tools are named now", "tools[1].name"),
        ({"tools": tuple(Tool(f"t{n}") for n in range(500))}, "128 tools, not 500", "tools"),
        ({"tools": (Tool("f", "", {"type": "string"}),)}, "schema of an object", "tools[0].parameters"),
        ({"tools": (Tool("f", "\ud800"),)}, "lone surrogate", "tools"),
        ({"tool_choice": ToolChoice("required")}, "tools is empty", "tool_choice"),
        ({"tools": (NOW,), "tool_choice": ToolChoice("required", "then")}, "'then'", "tool_choice"),
        ({"messages": (Message("tool", "x", tool_call_id="call_9"),)}, "'call_9'", "messages[0].tool_call_id"),
        ({"reasoning": Reasoning(budget_tokens=-1)}, "reasoning", "reasoning"),
        ({"tools": (Tool("f", "", {"properties": {"a": {"maximum": 10**30}}}),)}, "64 bits", "tools"),
        ({"output": OutputFormat("json_schema", {"type": "string", "minLength": 10**30})}, "64 bits", "output"),
        ({"tools": (Tool("f", "", {"properties": {"a": {"$recursiveRef": "#"}}}, True),)}, "recursiveRef", "tools"),
    ],
)
async def test_what_cannot_be_is_refused(tell: Tell, fields: dict[str, Any], message: str, param: str) -> None:
    service, engine = await tell("qwen", "never said")
    with pytest.raises(BadInput) as caught:
        await events_of(service, ask(**fields))
    assert message in caught.value.message
    assert caught.value.param == param
    assert engine.submitted == []


@pytest.mark.parametrize(
    ("fields", "param"), [({"tools": (NOW,)}, "tools"), ({"output": OutputFormat("choice", ["a"])}, "output")]
)
async def test_a_grammar_that_an_engine_refuses_is_named_by_what_demanded_it(
    tell: Tell, fields: dict[str, Any], param: str
) -> None:
    service, engine = await tell("generic", "never said")
    engine.script = None
    request = ask(**fields)
    asking = asyncio.create_task(events_of(service, request))
    while not engine.submitted:
        await asyncio.sleep(0.01)
    refused = ErrorInfo("bad_input", "the grammar is too complex", param="grammar")
    engine.step(TokenDelta(engine.submitted[0].id, finish="error", error=refused))
    with pytest.raises(BadInput, match="too complex") as caught:
        await asking
    assert caught.value.param == param


async def test_parameters_nested_without_end_are_refused(tell: Tell) -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"properties": {"a": deep}}
    service, _ = await tell("qwen", "never said")
    with pytest.raises(BadInput, match="nested deeper"):
        await events_of(service, ask(tools=(Tool("f", "", deep),)))


async def test_counting_counts_tools(tell: Tell) -> None:
    service, _ = await tell("qwen", "never said")
    few = await service.count_tokens(ask(), ALICE)
    assert await service.count_tokens(ask(tools=(WEATHER,)), ALICE) > few
