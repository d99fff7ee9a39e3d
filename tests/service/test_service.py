import asyncio
import errno
import itertools
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from emberline.accounts.usage_ledger import UsageLedger, UsageTimings
from emberline.accounts.usage_row import UsageRow
from emberline.balancer.circuit_breaker import FAILURES
from emberline.catalog.model_card import ModelCard
from emberline.cluster.timings import Timings
from emberline.protocol import token_ids as tokens
from emberline.protocol.block_hash import KVGroup
from emberline.protocol.errors import (
    BadInput,
    ContextExceeded,
    DeadlineExceeded,
    EmberlineError,
    ErrorInfo,
    Internal,
    MalformedModelId,
    ModelNotFound,
    Overloaded,
    Unavailable,
    Unsupported,
)
from emberline.protocol.events import (
    ChoiceDone,
    Completed,
    DraftUsage,
    Started,
    TextDelta,
    TextEvent,
    TokenDelta,
    TokenLogprobs,
    Usage,
)
from emberline.protocol.request import (
    ContentPart,
    EncodeRequest,
    EngineRequest,
    GenerateRequest,
    Message,
    OutputFormat,
    Principal,
    Priority,
    SamplingDefaults,
    SamplingParams,
    Speculation,
    Tool,
    ToolChoice,
)
from emberline.service import Service
from emberline.service.core import LocalCore, SessionEntry
from emberline.service.prepare import Preparer
from emberline.service.request_run import MAX_FAILOVERS
from emberline.service.work import Work
from emberline.store import open_store
from emberline.telemetry.request_log import Clock
from emberline.text.grammar.compiler_pool import GrammarCompiler
from emberline.text.text_model import TextModel
from tests.faulty_store import FaultyStore
from tests.service.conftest import ALICE, MODEL, PATIENCE_S, Opener, offer
from tests.service.fake_engine import EOS, FakeEngine, Script

_ids = itertools.count()


def ask(content: str = "hi", **fields: Any) -> GenerateRequest:
    sampling = SamplingParams(**fields.pop("sampling", {}))
    if not {"prompt", "prompt_ids", "messages"} & fields.keys():
        fields["messages"] = (Message("user", content),)
    return GenerateRequest(id=f"req-{next(_ids)}", **({"model": MODEL, "sampling": sampling} | fields))


async def events_of(service: Service, request: GenerateRequest, principal: Principal = ALICE) -> list[TextEvent]:
    async with aclosing(service.run(Work(request, principal))) as events:
        return [event async for event in events]


def text_of(events: list[TextEvent], index: int = 0) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta) and event.index == index)


def ledger_of(service: Service) -> UsageLedger:
    assert isinstance(service.core, LocalCore)
    return service.core.usage


async def row_of(service: Service, request: GenerateRequest | EncodeRequest | str) -> UsageRow:
    """The usage row of a request, or of an id; it may still be on its way to the disk."""
    request_id = request if isinstance(request, str) else request.id
    async with asyncio.timeout(PATIENCE_S):
        while (row := await ledger_of(service).find(request_id)) is None:
            await asyncio.sleep(0.002)
    return row


async def rows(service: Service) -> int:
    ((n,),) = await ledger_of(service).store.read("SELECT count(*) FROM usage")
    assert isinstance(n, int)
    return n


def in_flight(service: Service) -> int:
    assert isinstance(service.core, LocalCore)
    return sum(r.request.n for r in service.core.admission.balancer.ledger if r.phase != "waiting")


async def until_admission_knows(service: Service, *requests: GenerateRequest) -> None:
    """They run or wait for room."""
    assert isinstance(service.core, LocalCore)
    async with asyncio.timeout(PATIENCE_S):
        while any(service.core.admission.find(request.id) is None for request in requests):
            await asyncio.sleep(0.001)


async def settled(service: Service) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while service.n_running:
            await asyncio.sleep(0.001)


async def until_aborted(engine: FakeEngine, *ids: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while engine.aborted != list(ids):
            await asyncio.sleep(0.001)


async def test_a_request_from_beginning_to_end(service: Service, engine: FakeEngine) -> None:
    engine.cached = 4
    request = ask("hi", priority=Priority.FLEX)
    events = await events_of(service, request)
    assert isinstance(events[0], Started)
    assert events[0].usage.cached_tokens == 4
    assert text_of(events) == "Hello!"
    assert events[-2] == ChoiceDone(0, "stop")
    n_prompt = len("<|start|>user\nhi<|end|>\n<|start|>assistant\n") - len("<|start|><|end|><|start|>") + 3
    usage = Usage(prompt_tokens=n_prompt, completion_tokens=7, cached_by_tier={"device": 4})
    (sent,) = engine.submitted
    completed = events[-1]
    assert isinstance(completed, Completed)
    assert completed.usage == usage
    assert completed.result.prompt == sent.prompt_ids
    assert len(completed.result.reply) == 4 * usage.completion_tokens
    assert sent.salt == ALICE.salt
    assert sent.sampling.max_tokens == 256 - n_prompt
    row = await row_of(service, request)
    assert row.created_us <= (row.first_token_us or 0) <= row.finished_us
    assert row == UsageRow(
        id=request.id,
        account="alice",
        model=MODEL,
        model_version="f" * 32,
        priority="flex",
        input_tokens=n_prompt,
        cached_by_tier={"device": 4},
        output_tokens=7,
        status="finished",
        created_us=row.created_us,
        first_token_us=row.first_token_us,
        finished_us=row.finished_us,
        device_ms=row.device_ms,
    )
    assert 0 <= row.device_ms <= (row.finished_us - row.created_us) / 1000 + 1
    assert in_flight(service) == 0


async def test_the_row_is_durable_before_completed(service: Service) -> None:
    request = ask()
    async with aclosing(service.run(Work(request, ALICE))) as events:
        async for event in events:
            if isinstance(event, Completed):
                assert await ledger_of(service).find(request.id) is not None
                return
    pytest.fail("never completed")


async def test_tokens_that_wait_together_become_one_delta(service: Service, engine: FakeEngine) -> None:
    engine.burst = 100
    events = await events_of(service, ask())
    assert [event.text for event in events if isinstance(event, TextDelta)] == ["Hello!"]
    engine.burst, engine.script = 1, None
    async with aclosing(service.run(Work(ask(), ALICE))) as stream:
        started = asyncio.ensure_future(anext(stream))
        request = (await engine.submission(2))[-1]
        for number, letter in enumerate(b"abc"):
            await asyncio.sleep(0)
            engine.step(TokenDelta(request.id, tokens.pack([letter - 33 + 3]), "length" if number == 2 else None))
        await asyncio.sleep(0.05)
        await started
        rest = [event async for event in stream]
    assert text_of(rest) == "abc"
    assert len([event for event in rest if isinstance(event, TextDelta)]) <= 2


async def test_raw_prompts_and_ids(service: Service, engine: FakeEngine, text_model: TextModel) -> None:
    await events_of(service, ask(prompt="plain <|end|> text"))
    assert text_model.decode(engine.submitted[0].prompt_ids, special=True) == "plain <|end|> text"
    ids = tokens.pack([5, 6, 7])
    await events_of(service, ask(prompt_ids=ids))
    assert engine.submitted[1].prompt_ids == ids


async def test_length(service: Service) -> None:
    events = await events_of(service, ask(sampling={"max_tokens": 3}))
    assert text_of(events) == "Hel"
    assert events[-2] == ChoiceDone(0, "length")


async def test_a_long_prompt_leaves_what_it_leaves(service: Service, engine: FakeEngine) -> None:
    await events_of(service, ask(prompt="x" * 255, sampling={"max_tokens": 100, "min_tokens": 50}))
    assert (engine.submitted[0].sampling.max_tokens, engine.submitted[0].sampling.min_tokens) == (1, 1)
    with pytest.raises(ContextExceeded, match=r"256 tokens.*context of 256.*255"):
        await events_of(service, ask(prompt="x" * 256))
    with pytest.raises(ContextExceeded):
        await events_of(service, ask(prompt="x" * 40_000))  # through the thread pool
    with pytest.raises(ContextExceeded, match="10000000 characters"):
        await events_of(service, ask(prompt="x" * 10_000_000))  # not tokenized at all
    assert await rows(service) == 1


async def test_a_stop_string_ends_the_text_and_the_work(
    service: Service, engine: FakeEngine, say: Callable[..., Script]
) -> None:
    engine.script = say("one, two, three" * 10)
    request = ask(sampling={"stop": (", tw", "zzz")})
    events = await events_of(service, request)
    assert text_of(events) == "one"
    assert events[-2] == ChoiceDone(0, "stop", ", tw")
    await until_aborted(engine, request.id)
    assert (await row_of(service, request)).output_tokens >= len("one, tw")
    engine.script = say("ends like a sto")
    events = await events_of(service, ask(sampling={"stop": ("stop",)}))
    assert text_of(events) == "ends like a sto"  # what was held back comes out
    assert events[-2] == ChoiceDone(0, "stop")


async def test_the_text_can_include_what_stopped_it(
    service: Service, engine: FakeEngine, say: Callable[..., Script], text_model: TextModel
) -> None:
    engine.script = say("one, two, three")
    events = await events_of(service, ask(sampling={"stop": (", tw",), "include_stop": True}))
    assert text_of(events) == "one, tw"
    assert events[-2] == ChoiceDone(0, "stop", ", tw")
    (comma,) = tokens.unpack(text_model.encode(",", special=False))
    engine.script = None
    for n, (included, text) in enumerate(((False, "one"), (True, "one,")), 2):
        sampling = {"stop_ids": (comma,), "include_stop": included}
        task = asyncio.create_task(events_of(service, ask(sampling=sampling)))
        *_, sent = await engine.submission(n)
        engine.step(TokenDelta(sent.id, text_model.encode("one,", special=False), "stop"))
        assert text_of(await task) == text


async def test_the_model_s_sampling_defaults(
    open_one: Opener, engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = SamplingDefaults(temperature=0.2, top_p=0.9, repetition_penalty=1.1)
    monkeypatch.setattr(ModelCard, "defaults", property(lambda card: defaults))
    engine.info = msgspec.structs.replace(engine.info, context_len=4096)  # declared tools take hundreds of tokens
    service = await open_one(engine)
    given = {"temperature": 0.7, "top_k": 5}
    await events_of(service, ask(sampling=given, left_to_model=("top_p", "min_p")))
    await events_of(service, ask(sampling=given))
    tools, all_left = (Tool("now"),), ("top_p", "repetition_penalty")
    for choice in ("auto", "required"):
        await events_of(service, ask(tools=tools, tool_choice=ToolChoice(choice), left_to_model=all_left))
    await events_of(service, ask(output=OutputFormat("choice", ["yes", "no"]), left_to_model=all_left))
    await events_of(service, ask(left_to_model=all_left))
    left, kept, *copying, prose = (sent.sampling for sent in engine.submitted)
    assert (left.temperature, left.top_p, left.top_k, left.min_p) == (0.7, 0.9, 5, 0.0)
    assert (kept.temperature, kept.top_p) == (0.7, 1.0)
    assert (prose.top_p, prose.repetition_penalty) == (0.9, 1.1)
    assert len(copying) == 3
    for each in copying:
        assert (each.top_p, each.repetition_penalty) == (0.9, 1.0), "a penalty for prose changes copied values"


async def test_bad_words_reach_the_engine_as_ids(service: Service, engine: FakeEngine, text_model: TextModel) -> None:
    await events_of(service, ask(sampling={"bad_words": ("no", " yes")}))
    (sent,) = engine.submitted
    spelled = [text_model.decode(ids) for ids in sent.sampling.bad_ids]
    assert spelled == ["no", " no", " yes"]
    for bad, message in ((("",), "white space"), (("x",) * 200, "128"), (("x" * 300,), "256")):
        with pytest.raises(BadInput, match=message) as refused:
            await events_of(service, ask(sampling={"bad_words": bad}))
        assert refused.value.param == "bad_words"


async def test_a_reply_continues_the_last_message(
    service: Service, engine: FakeEngine, say: Callable[..., Script], text_model: TextModel
) -> None:
    engine.script = say(" is Paris.")
    begun = (Message("user", "Capital?"), Message("assistant", "It"))
    assert text_of(await events_of(service, ask(messages=begun, continue_final=True))) == " is Paris."
    prompt = "<|start|>user\nCapital?<|end|>\n<|start|>assistant\nIt"
    assert text_model.decode(engine.submitted[0].prompt_ids, special=True) == prompt
    whole = (begun[0], Message("assistant", "It is Paris."), Message("user", "Sure?"))
    await events_of(service, ask(messages=whole))
    reply = tokens.unpack(text_model.encode(" is Paris.", special=False))
    known = tokens.unpack(engine.submitted[0].prompt_ids) + reply
    assert tokens.unpack(engine.submitted[1].prompt_ids)[: len(known)] == known
    for messages in ((Message("user", "x"),), (Message("user", "x"), Message("system", "y"))):
        with pytest.raises(BadInput, match="must be the assistant's"):
            await events_of(service, ask(messages=messages, continue_final=True))


async def test_a_reply_ends_with_the_token_that_completes_a_stop_string(
    service: Service, engine: FakeEngine, say: Callable[..., Script]
) -> None:
    """However many tokens come at once: usage and log-probabilities are those of single tokens."""
    engine.script = say("one, two, three")
    for engine.burst in (1, 2, 5, 9):
        request = ask(sampling={"stop": ("wo",), "logprobs": 0})
        events = await events_of(service, request)
        assert text_of(events) == "one, t"
        assert (await row_of(service, request)).output_tokens == len("one, two")
        deltas = [event for event in events if isinstance(event, TextDelta)]
        assert "".join(entry.token for each in deltas for entry in each.logprobs or []) == "one, two"
        assert len(deltas) <= -(-len("one, two") // engine.burst) + 1


async def test_stop_strings_wait_for_min_tokens(
    service: Service, engine: FakeEngine, say: Callable[..., Script]
) -> None:
    engine.script = say("aXbXc")
    for engine.burst in (1, 2, 3, 9):
        events = await events_of(service, ask(sampling={"stop": ("X",), "min_tokens": 2}))
        assert text_of(events) == "aXb"


async def test_a_character_cut_in_two_waits_for_its_end(
    service: Service, engine: FakeEngine, say: Callable[..., Script]
) -> None:
    engine.script = say("né€🙂")
    events = await events_of(service, ask())
    deltas = [event.text for event in events if isinstance(event, TextDelta)]
    assert "".join(deltas) == "né€🙂"
    assert "" not in deltas
    engine.script = say("🙂")
    assert text_of(await events_of(service, ask(sampling={"max_tokens": 2}))) == "\ufffd"


async def test_logprobs_come_with_their_text(service: Service, engine: FakeEngine, say: Callable[..., Script]) -> None:
    engine.script = say("aé")
    events = await events_of(service, ask(sampling={"logprobs": 2}))
    deltas = [event for event in events if isinstance(event, TextDelta)]
    assert "".join(delta.text for delta in deltas) == "aé"
    assert deltas
    assert all(delta.text and delta.logprobs for delta in deltas)
    entries = [entry for delta in deltas for entry in delta.logprobs or ()]
    assert [entry.bytes for entry in entries] == [[97], [0xC3], [0xA9]]  # and not the end token's
    assert (entries[0].token, entries[0].logprob) == ("a", -0.5)
    assert [entry.token for entry in entries[0].top] == ["a", "b"]


async def test_several_choices(service: Service, engine: FakeEngine, text_model: TextModel) -> None:
    def script(request: Any) -> list[int]:
        return [*tokens.unpack(text_model.encode(f"seed {request.sampling.seed % 100}", special=False)), EOS]

    engine.script = script
    request = ask(n=3, sampling={"seed": -1})
    events = await events_of(service, request)
    assert [text_of(events, index) for index in range(3)] == ["seed 15", "seed 0", "seed 1"]
    assert sorted(event.index for event in events if isinstance(event, ChoiceDone)) == [0, 1, 2]
    assert [type(event) for event in events].count(Started) == 1
    assert isinstance(events[-1], Completed)
    assert events[-1].usage.completion_tokens == 8 + 7 + 7
    assert events[-1].usage.prompt_tokens == len(engine.submitted[0].prompt_ids) // 4
    assert engine.submitted[0].sampling.seed == 2**64 - 1
    assert await rows(service) == 1
    assert in_flight(service) == 0


async def test_the_other_choices_follow_the_first_token(service: Service, engine: FakeEngine) -> None:
    engine.script = None
    async with aclosing(service.run(Work(ask(n=2), ALICE))) as events:
        started = asyncio.ensure_future(anext(events))
        (first,) = await engine.submission()
        await asyncio.sleep(0.01)
        assert len(engine.submitted) == 1
        engine.step(TokenDelta(first.id, tokens.pack([70])))
        await started
        assert len(await engine.submission(2)) == 2


async def test_a_choice_that_fails_ends_the_others(service: Service, engine: FakeEngine) -> None:
    engine.script = None
    request = ask(n=3)
    task = asyncio.create_task(events_of(service, request))
    (first,) = await engine.submission()
    engine.step(TokenDelta(first.id, tokens.pack([70])))
    _, second, third = await engine.submission(3)
    engine.step(TokenDelta(first.id, tokens.pack([EOS]), "stop"), TokenDelta(third.id, tokens.pack([70])))
    engine.step(TokenDelta(second.id, tokens.pack([71]), "error", error=ErrorInfo("internal", "invalid numbers")))
    with pytest.raises(Internal, match="invalid numbers"):
        await task
    await until_aborted(engine, third.id)  # what had ended is left alone
    row = await row_of(service, request)
    assert (row.status, row.output_tokens) == ("failed", 4)
    assert await rows(service) == 1
    assert in_flight(service) == 0


async def test_a_first_choice_that_fails_at_its_first_token_begins_no_others(
    service: Service, engine: FakeEngine
) -> None:
    engine.script = None
    task = asyncio.create_task(events_of(service, ask(n=3)))
    (first,) = await engine.submission()
    engine.step(TokenDelta(first.id, tokens.pack([70]), "error", error=ErrorInfo("internal", "invalid numbers")))
    with pytest.raises(Internal, match="invalid numbers"):
        await task
    await settled(service)
    assert len(engine.submitted) == 1


async def test_a_choice_that_stops_early_leaves_the_others_alone(service: Service, engine: FakeEngine) -> None:
    engine.script = None
    task = asyncio.create_task(events_of(service, ask(n=2, sampling={"stop": ("g",)})))
    (first,) = await engine.submission()
    engine.step(TokenDelta(first.id, tokens.pack([ord("f") - 33 + 3, ord("g") - 33 + 3])))
    _, second = await engine.submission(2)
    engine.step(TokenDelta(first.id, tokens.pack([70])), TokenDelta(second.id, tokens.pack([ord("h") - 33 + 3])))
    engine.step(TokenDelta(first.id, finish="cancelled"), TokenDelta(second.id, tokens.pack([EOS]), "stop"))
    events = await task
    await until_aborted(engine, first.id)
    assert [text_of(events, index) for index in range(2)] == ["f", "h"]
    done = [event for event in events if isinstance(event, ChoiceDone)]
    assert done == [ChoiceDone(0, "stop", "g"), ChoiceDone(1, "stop")]


async def test_turn_two_reuses_turn_one_whole(
    service: Service, engine: FakeEngine, say: Callable[..., Script], text_model: TextModel
) -> None:
    """The reply's ids here are not what tokenizing its text would give, and still come back unchanged."""
    odd = [*tokens.unpack(text_model.encode("Hi ", special=False)), 0x20, EOS]
    engine.script = lambda request: odd
    first = ask("hello")
    reply = text_of(await events_of(service, first))
    history = (*(first.messages or ()), Message("assistant", reply), Message("user", "and?"))
    await events_of(service, ask(messages=history))
    one, two = engine.submitted
    assert two.prompt_ids.startswith(one.prompt_ids + tokens.pack(odd[:-1]))
    await events_of(service, ask(messages=history), Principal("bob"))
    assert text_model.decode(engine.submitted[2].prompt_ids) == text_model.decode(two.prompt_ids)


async def test_aclose_cancels_the_work(service: Service, engine: FakeEngine) -> None:
    engine.script = None
    request = ask()
    events = service.run(Work(request, ALICE))
    started = asyncio.ensure_future(anext(events))
    await engine.submission()
    engine.step(TokenDelta(request.id, tokens.pack([70]), usage=Usage(prompt_tokens=9)))
    await started
    await events.aclose()
    await until_aborted(engine, request.id)
    row = await row_of(service, request)
    assert (row.status, row.output_tokens) == ("cancelled", 1)
    assert in_flight(service) == 0


async def test_a_cancelled_task_cancels_the_work(service: Service, engine: FakeEngine) -> None:
    engine.script = None
    request = ask()
    task = asyncio.create_task(events_of(service, request))
    await engine.submission()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    row = await row_of(service, request)
    assert (row.status, row.output_tokens, row.first_token_us) == ("cancelled", 0, None)
    await until_aborted(engine, request.id)


@pytest.mark.parametrize(
    ("request_", "error", "param"),
    [
        (ask(model="@cf/no/such"), ModelNotFound, "model"),
        (ask(model="a b"), MalformedModelId, "model"),
        (ask(model=""), MalformedModelId, "model"),
        (ask(model="../../etc"), MalformedModelId, "model"),
        (ask(model="x" * 300), MalformedModelId, "model"),
        (ask(messages=()), BadInput, "messages"),
        (ask(prompt=""), BadInput, "prompt"),
        (ask(sampling={"temperature": float("nan")}), BadInput, "temperature"),
        (ask(n=17), BadInput, "n"),
    ],
)
async def test_what_is_refused_leaves_no_row(
    service: Service, request_: GenerateRequest, error: type[EmberlineError], param: str
) -> None:
    with pytest.raises(error) as refused:
        await events_of(service, request_)
    assert refused.value.param == param
    assert await rows(service) == 0
    assert (
        f'emberline_requests_refused_total{{error="{error.kind}"}} 1.0' in (await service.operations.metrics()).decode()
    )
    assert text_of(await events_of(service, ask())) == "Hello!"


async def test_aliases_in_any_case(service: Service) -> None:
    assert service.models.find("BYTES", None).id == service.models.find("@CF/test/bytes", None).id == MODEL
    assert [card.id for card in service.models.cards()] == [MODEL]
    assert text_of(await events_of(service, ask(model="Bytes"))) == "Hello!"


async def test_an_engine_error_is_that_request_s(service: Service, engine: FakeEngine) -> None:
    engine.script = None
    request = ask()
    task = asyncio.create_task(events_of(service, request))
    await engine.submission()
    engine.step(TokenDelta(request.id, finish="error", error=ErrorInfo("internal", "invalid numbers")))
    with pytest.raises(Internal, match="invalid numbers"):
        await task
    assert (await row_of(service, request)).status == "failed"


async def test_tokens_that_come_together_with_an_error_are_delivered_before_it(
    service: Service, engine: FakeEngine
) -> None:
    engine.script, request = None, ask()
    came: list[TextEvent] = []

    async def read() -> None:
        async with aclosing(service.run(Work(request, ALICE))) as events:
            async for event in events:
                came.append(event)

    reading = asyncio.create_task(read())
    (sent,) = await engine.submission()
    failed = TokenDelta(sent.id, finish="error", error=ErrorInfo("internal", "invalid numbers"))
    engine.step(TokenDelta(sent.id, tokens.pack([70, 71])), failed)
    with pytest.raises(Internal, match="invalid numbers"):
        await reading
    assert text_of(came) == "de"
    row = await row_of(service, request)
    assert (row.status, row.output_tokens) == ("failed", 2)


async def test_an_engine_that_fails_every_request_is_ejected(
    tmp_path: Path, open_one: Opener, say: Callable[..., Script]
) -> None:
    bad, good = [await FakeEngine(tmp_path / f"{name}.sock", say("Hello!"), name=name).start() for name in ("a", "b")]

    def invalid_numbers(sent: EngineRequest) -> list[int]:
        bad.step(TokenDelta(sent.id, finish="error", error=ErrorInfo("internal", "invalid numbers")))
        return []

    bad.script = invalid_numbers
    service = await open_one(bad, good)
    n_failed = 0
    for turn in range(8 * FAILURES):
        try:
            await events_of(service, ask(f"{turn:016}", session=f"s{turn}"))
        except Internal:
            n_failed += 1
        await settled(service)
    assert n_failed == FAILURES
    states = {engine["name"]: engine["state"] for engine in (await service.operations.health()).detail["engines"]}
    assert states == {"a": "open", "b": "ready"}
    for engine in (bad, good):
        await engine.die()


@pytest.mark.parametrize("burst", [1, 3])
async def test_an_engine_that_ignores_max_tokens_is_cut(
    service: Service, engine: FakeEngine, text_model: TextModel, burst: int
) -> None:
    engine.script = None
    request = ask(sampling={"max_tokens": 4, "logprobs": 1})
    task = asyncio.create_task(events_of(service, request))
    await engine.submission()
    ids = tokens.unpack(text_model.encode("abcdefgh", special=False))
    for start in range(0, 6, burst):
        some = ids[start : start + burst]
        logprobs = [TokenLogprobs(token_id, -0.5) for token_id in some]
        engine.step(TokenDelta(request.id, tokens.pack(some), logprobs=logprobs))
        await asyncio.sleep(0)
    events = await asyncio.wait_for(task, PATIENCE_S)
    assert text_of(events) == "abcd"
    assert [event.finish for event in events if isinstance(event, ChoiceDone)] == ["length"]
    assert sum(len(event.logprobs or ()) for event in events if isinstance(event, TextDelta)) == 4
    assert (await row_of(service, request)).output_tokens == 4
    async with asyncio.timeout(PATIENCE_S):
        while engine.aborted != [request.id]:
            await asyncio.sleep(0.001)
    assert in_flight(service) == 0


async def test_deltas_that_waited_together_keep_the_last_counts(
    service: Service, engine: FakeEngine, text_model: TextModel
) -> None:
    engine.script = None
    request = ask(speculation=Speculation(report=True))
    task = asyncio.create_task(events_of(service, request))
    await engine.submission()
    ids = tokens.unpack(text_model.encode("ab", special=False))
    engine.step(TokenDelta(request.id, tokens.pack(ids[:1]), usage=Usage(prompt_tokens=5, drafts=DraftUsage(1, 0))))
    counts = Usage(prompt_tokens=5, completion_tokens=3, drafts=DraftUsage(4, 1))
    engine.step(TokenDelta(request.id, tokens.pack([ids[1], EOS]), "stop", usage=counts))
    *_, completed = await asyncio.wait_for(task, PATIENCE_S)
    assert isinstance(completed, Completed)
    assert completed.usage.drafts == DraftUsage(4, 1)


async def test_the_engine_dies_before_the_first_token_and_comes_back(service: Service, engine: FakeEngine) -> None:
    script, engine.script = engine.script, None
    request = ask()
    task = asyncio.create_task(events_of(service, request))
    await engine.submission()
    await engine.die()
    engine.script = script
    await engine.start()
    assert text_of(await task) == "Hello!"
    assert len({sent.id for sent in engine.submitted}) == 2
    assert (await row_of(service, request)).status == "finished"
    assert await rows(service) == 1
    assert in_flight(service) == 0


async def test_what_a_lost_engine_drew_unseen_is_not_counted(service: Service, engine: FakeEngine) -> None:
    script, engine.script = engine.script, None
    request = ask()
    task = asyncio.create_task(events_of(service, request))
    (sent,) = await engine.submission()
    engine.script = script
    gone = ErrorInfo("unavailable", "shut down")
    engine.step(TokenDelta(sent.id, tokens.pack([70, 71])), TokenDelta(sent.id, finish="error", error=gone))
    assert text_of(await task) == "Hello!"
    assert (await row_of(service, request)).output_tokens == 7


async def test_another_engine_takes_over(tmp_path: Path, open_one: Opener, say: Callable[..., Script]) -> None:
    engines = [await FakeEngine(tmp_path / f"{name}.sock", name=name).start() for name in ("a", "b")]
    service = await open_one(*engines)
    task = asyncio.create_task(events_of(service, ask()))
    async with asyncio.timeout(PATIENCE_S):
        while not any(engine.submitted for engine in engines):
            await asyncio.sleep(0.001)
    first, second = engines if engines[0].submitted else reversed(engines)
    second.script = say("from the other")
    await first.die()
    assert text_of(await task) == "from the other"
    await second.die()


async def test_a_request_that_loses_every_engine_ends(service: Service, engine: FakeEngine) -> None:
    engine.script = None
    last = asyncio.create_task(events_of(service, ask()))
    for n in range(MAX_FAILOVERS + 1):
        await engine.submission(n + 1)
        await engine.die()
        await engine.start()
    with pytest.raises(Unavailable, match="went away"):
        await last
    await settled(service)
    assert in_flight(service) == 0
    assert len({sent.id for sent in engine.submitted}) == MAX_FAILOVERS + 1


async def cut(service: Service, engine: FakeEngine, request: GenerateRequest) -> "asyncio.Task[list[TextEvent]]":
    """A request whose engine dies when the client has seen its first token."""
    script, engine.script = engine.script, None
    events: list[TextEvent] = []

    async def consume() -> list[TextEvent]:
        async for event in service.run(Work(request, ALICE)):
            events.append(event)
        return events

    task = asyncio.create_task(consume())
    (sent,) = await engine.submission()
    assert script is not None
    engine.step(TokenDelta(request.id, tokens.pack(script(sent)[:1]), usage=Usage(cached_by_tier={"device": 3})))
    async with asyncio.timeout(PATIENCE_S):
        while len(events) < 2:
            await asyncio.sleep(0.001)
    await engine.die()
    engine.script = script
    return task


async def test_the_engine_dies_in_the_middle_and_comes_back(
    service: Service, engine: FakeEngine, say: Callable[..., Script]
) -> None:
    engine.script = lambda sent: say("Hello!")(sent)[tokens.count(sent.output_ids) :]
    request = ask()
    task = await cut(service, engine, request)
    await engine.start()
    events = await task
    assert text_of(events) == "Hello!"
    assert [type(event) for event in events].count(Started) == 1
    assert [tokens.unpack(sent.output_ids) for sent in engine.submitted] == [[], list(say("H", end=False)(ask()))]
    row = await row_of(service, request)
    assert (row.status, row.output_tokens, row.cached_tokens) == ("finished", 7, 3)
    assert await rows(service) == 1
    assert in_flight(service) == 0


async def test_the_engine_dies_in_the_middle_for_good(engine: FakeEngine, open_one: Opener) -> None:
    service = await open_one(engine, timings=Timings(restart_wait_s=0.1))
    request = ask()
    with pytest.raises(Unavailable, match="no engine"):
        await (await cut(service, engine, request))
    row = await row_of(service, request)
    assert (row.status, row.output_tokens) == ("failed", 1)
    with pytest.raises(Unavailable) as refused:
        await events_of(service, ask())
    assert refused.value.retry_after_s
    assert await rows(service) == 1


async def test_admission_has_a_bound(tmp_path: Path, open_one: Opener, say: Callable[..., Script]) -> None:
    engine = await FakeEngine(tmp_path / "e.sock", max_running=1).start()
    service = await open_one(engine, max_waiting=2)
    requests = [ask() for _ in range(3)]
    tasks = [asyncio.create_task(events_of(service, request)) for request in requests]
    await engine.submission(1)
    await until_admission_knows(service, *requests)
    with pytest.raises(Overloaded) as refused:
        await events_of(service, ask())
    assert refused.value.retry_after_s
    engine.script = say("so be it")
    for sent in engine.submitted:
        engine.step(TokenDelta(sent.id, tokens.pack([EOS]), "stop"))
    await asyncio.gather(*tasks)  # who waited is served, one after the other
    assert await rows(service) == 3
    await engine.die()


async def test_a_request_may_rather_be_refused_than_wait(
    tmp_path: Path, open_one: Opener, say: Callable[..., Script]
) -> None:
    engine = await FakeEngine(tmp_path / "e.sock", max_running=1).start()
    service = await open_one(engine)
    first = asyncio.create_task(events_of(service, ask(reject_if_busy=True)))
    await engine.submission()
    with pytest.raises(Overloaded) as refused:
        await events_of(service, ask(reject_if_busy=True))
    assert refused.value.retry_after_s
    waiting = ask()
    second = asyncio.create_task(events_of(service, waiting))
    await until_admission_knows(service, waiting)
    await engine.die()
    engine.script = say("at last")
    await engine.start()  # accepted is accepted: having lost its engine, it waits like any other
    assert {text_of(events) for events in await asyncio.gather(first, second)} == {"at last"}
    await engine.die()


async def test_deadlines(engine: FakeEngine, open_one: Opener) -> None:
    service = await open_one(engine, timings=Timings(deadline_grace_s=0.0))
    engine.script = None  # it never answers
    async with asyncio.timeout(PATIENCE_S):
        while not engine.submitted:  # on a busy machine, a request may end before it gets there
            request = ask(deadline_s=1.0)
            with pytest.raises(DeadlineExceeded):
                await events_of(service, request)
    assert 0 < (engine.submitted[0].deadline_s or 0) <= 1.0
    assert (await row_of(service, request)).status == "failed"
    await until_aborted(engine, *(sent.id for sent in engine.submitted))


async def test_a_deadline_also_ends_the_wait_for_a_lost_engine(service: Service, engine: FakeEngine) -> None:
    engine.script = None
    async with asyncio.timeout(PATIENCE_S):
        while not engine.submitted:  # on a busy machine, a request may end before it gets there
            task = asyncio.create_task(events_of(service, ask(deadline_s=1.0)))
            while not engine.submitted and not task.done():
                await asyncio.sleep(0.001)
        await engine.die()
        with pytest.raises((DeadlineExceeded, Unavailable)):
            await task


async def test_a_full_disk_fails_the_request_and_not_the_server(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ledger_of(service).store

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)  # of the journal
    ((pages,),) = await store.write("PRAGMA page_count")
    await store.write(f"PRAGMA max_page_count = {pages}")
    rounds = asyncio.gather(*(events_of(service, ask("x" * 100)) for _ in range(50)))
    with pytest.raises(Unavailable, match="cannot record usage: No space left"):
        await rounds
    await settled(service)
    await store.write("PRAGMA max_page_count = 100000")
    monkeypatch.undo()
    await events_of(service, ask())
    assert in_flight(service) == 0


async def test_requests_are_served_while_the_store_is_away(
    engine: FakeEngine, open_one: Opener, tmp_path: Path
) -> None:
    store = FaultyStore(await open_store(tmp_path / "db"))
    timings = Timings(usage=UsageTimings(forward_s=0.02))
    service = await open_one(engine, timings=timings, store=store)
    store.away = True
    requests = [ask() for _ in range(5)]
    for request in requests:
        assert text_of(await events_of(service, request)) == "Hello!"
    assert await rows(service) == 0
    store.away = False
    for request in requests:
        assert (await row_of(service, request)).output_tokens == 7
    assert await rows(service) == 5


async def test_requests_that_are_cancelled_before_anything_is_computed_are_billed_nothing(
    service: Service, engine: FakeEngine
) -> None:
    engine.script = None
    n = engine.info.max_running
    running = [asyncio.create_task(events_of(service, ask())) for _ in range(n)]
    await engine.submission(n)
    waiting = ask("waits for room")
    task = asyncio.create_task(events_of(service, waiting))
    await until_admission_knows(service, waiting)
    for leaving in (task, *running):
        leaving.cancel()
        await asyncio.wait([leaving])
    row = await row_of(service, waiting)
    assert (row.status, row.input_tokens, row.output_tokens) == ("cancelled", 0, 0)
    ((n_tokens,),) = await ledger_of(service).store.read("SELECT SUM(input_tokens + output_tokens) FROM usage")
    assert n_tokens == 0  # the engine had computed nothing of the other prompts either; what it computes is paid


async def test_a_cancelled_request_is_billed_what_was_produced(service: Service, engine: FakeEngine) -> None:
    engine.script = None
    request = ask("hello")
    events = service.run(Work(request, ALICE))
    first = asyncio.ensure_future(anext(events))
    (sent,) = await engine.submission()
    engine.step(TokenDelta(sent.id, tokens.pack([70, 71, 72]), usage=Usage(prompt_tokens=9)))
    await first
    await events.aclose()
    row = await row_of(service, request)
    assert (row.status, row.input_tokens, row.output_tokens) == ("cancelled", len(sent.prompt_ids) // 4, 3)


async def test_count_tokens(service: Service, engine: FakeEngine) -> None:
    request = ask("how many?")
    n = await service.count_tokens(request, ALICE)
    events = await events_of(service, request)
    assert isinstance(events[-1], Completed)
    assert n == events[-1].usage.prompt_tokens
    with pytest.raises(BadInput):
        await service.count_tokens(ask(messages=()), ALICE)
    await engine.die()
    assert await service.count_tokens(ask("how many?"), ALICE) == n


async def test_drain(service: Service, engine: FakeEngine) -> None:
    engine.script = None
    task = asyncio.create_task(events_of(service, ask()))
    (sent,) = await engine.submission()
    draining = asyncio.create_task(service.drain(PATIENCE_S))
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="shutting down"):
        await events_of(service, ask())
    assert not (await service.operations.health()).ok
    assert not draining.done()
    engine.step(TokenDelta(sent.id, tokens.pack([EOS]), "stop"))
    await task
    await draining


async def test_drain_gives_up_in_time(service: Service, engine: FakeEngine) -> None:
    engine.script = None
    task = asyncio.create_task(events_of(service, ask()))
    await engine.submission()
    await service.drain(0.01)
    task.cancel()
    await asyncio.wait([task])


async def test_close_settles_what_was_cancelled(
    service: Service, engine: FakeEngine, tmp_path: Path, open_one: Opener
) -> None:
    engine.script = None
    request = ask()
    task = asyncio.create_task(events_of(service, request))
    await engine.submission()
    task.cancel()
    await asyncio.wait([task])
    await service.close()
    assert (await row_of(await open_one(engine), request)).status == "cancelled"


@pytest.mark.parametrize("started", [False, True])
async def test_close_ends_what_runs(service: Service, engine: FakeEngine, open_one: Opener, started: bool) -> None:
    engine.script = None
    request = ask()
    task = asyncio.create_task(events_of(service, request))
    await engine.submission()
    if started:
        engine.step(TokenDelta(request.id, tokens.pack([70])))
        await asyncio.sleep(0.02)
    await service.close()
    with pytest.raises(Unavailable):
        await task
    assert (await row_of(await open_one(engine), request)).status == "failed"


async def test_close_settles_what_nobody_reads(engine: FakeEngine, open_one: Opener) -> None:
    service = await open_one(engine, timings=Timings(close_wait_s=0.01))
    engine.script = None
    request = ask()
    events = service.run(Work(request, ALICE))
    started = asyncio.ensure_future(anext(events))
    await engine.submission()
    engine.step(TokenDelta(request.id, tokens.pack([70])))
    await started
    await service.close()
    again = await open_one(engine)
    row = await row_of(again, request)
    assert (row.status, row.output_tokens) == ("failed", 1)
    with pytest.raises(Unavailable):
        async for _ in events:
            pass
    assert await rows(again) == 1


async def test_leaving_after_the_last_token_is_no_cancellation(service: Service) -> None:
    request = ask()
    async with aclosing(service.run(Work(request, ALICE))) as events:
        async for event in events:
            if isinstance(event, ChoiceDone):
                break
    assert (await row_of(service, request)).status == "finished"


async def test_one_log_line_per_request(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "emberline.request"):
        request = ask()
        await events_of(service, request)
        await settled(service)
        with pytest.raises(BadInput):
            await events_of(service, ask(n=0))
    done, refused = (vars(record) for record in caplog.records if record.name == "emberline.request")
    assert (done["request_id"], done["account"], done["engine"]) == (request.id, "alice", "e0")
    assert done["completion_tokens"] == 7
    assert done["ttft_ms"] <= done["duration_ms"]
    assert refused["error"] == "bad_input"


async def test_every_request_ends_once_whatever_happens(
    tmp_path: Path, open_one: Opener, say: Callable[..., Script]
) -> None:
    """Clients leave, engines die and return, at (seeded) random moments; the books balance."""
    import random

    dice = random.Random(7)
    engines = [await FakeEngine(tmp_path / f"{i}.sock", say("some words to say"), name=f"e{i}").start() for i in (0, 1)]
    service = await open_one(*engines)
    admitted: list[str] = []
    admit = service.core.admit

    async def noting(ask: Any) -> str:
        engine = await admit(ask)
        admitted.append(ask.id)
        return engine

    service.core.admit = noting  # type: ignore[method-assign]

    async def client() -> str:
        request = ask("x" * dice.randrange(60), n=dice.choice([1, 1, 2]))
        patience = dice.choice([None, dice.randrange(6)])
        try:
            async with aclosing(service.run(Work(request, ALICE))) as events:
                seen = 0
                async for _ in events:
                    seen += 1
                    if seen == patience:
                        break
        except (Unavailable, Overloaded):
            return "failed"
        return "done"

    async def chaos() -> None:
        for _ in range(6):
            await asyncio.sleep(0.01)
            victim = dice.choice(engines)
            await victim.die()
            await asyncio.sleep(0.005)
            await victim.start()

    disturbing = asyncio.create_task(chaos())
    outcomes = []
    for _ in range(12):
        outcomes += await asyncio.gather(*(client() for _ in range(10)))
    await disturbing
    await settled(service)
    assert "done" in outcomes
    assert in_flight(service) == 0
    assert await rows(service) == len(set(admitted))
    assert not any(engine_client.n_streams for engine_client in service.engines.values())
    for engine in engines:
        await engine.die()


async def test_end_survives_msgpack(service: Service) -> None:
    """The frame of a finalized request is the same after encoding and decoding."""
    from emberline.service.core import RequestEnd

    seen: list[RequestEnd] = []
    finalize = service.core.finalize

    async def noting(end: RequestEnd) -> None:
        seen.append(end)
        await finalize(end)

    service.core.finalize = noting  # type: ignore[method-assign]
    await events_of(service, ask())
    (end,) = seen
    raw = msgspec.msgpack.encode(end)
    assert msgspec.msgpack.decode(raw, type=RequestEnd) == end


async def test_a_conversation_is_remembered_after_its_last_event(service: Service) -> None:
    """Rendering it again takes time, and no client waits for that; a service that closes does."""
    core = service.core
    assert isinstance(core, LocalCore)
    seen = [len(core.sessions) async for _ in service.run(Work(ask(), ALICE))]
    assert seen[-1] == 0
    await service.close()
    assert len(core.sessions) == 2  # up to the prompt, and with the reply


class RecordingCore:
    """Notes the calls that concern sessions."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def find(self, account: str, model_version: str, digests: list[bytes]) -> None:
        self.calls.append("find")

    def remember(self, entries: Sequence[SessionEntry]) -> None:
        self.calls.append("remember")


@pytest.mark.parametrize(("next_turn", "calls"), [("hi", ["find", "remember", "find"]), ("ho", ["find", "find"])])
async def test_a_turn_waits_for_the_one_before_it_to_be_remembered(
    engine: FakeEngine, text_model: TextModel, next_turn: str, calls: list[str]
) -> None:
    core = RecordingCore()
    preparer = Preparer(core, GrammarCompiler())  # type: ignore[arg-type]
    served = offer(text_model, engine)
    prepared = await preparer.prepare(ask(), ALICE, served, engine.info, Clock())
    reply = Message("assistant", "ab")
    preparer.remember(prepared, [(reply, tokens.pack([97, 98]))])
    turn = ask(messages=(Message("user", next_turn), reply, Message("user", "and?")))
    await preparer.prepare(turn, ALICE, served, engine.info, Clock())
    assert core.calls == calls
    await preparer.close()
    assert core.calls.count("remember") == 1


async def test_images_are_refused_by_a_model_of_this_machine(service: Service) -> None:
    image = ContentPart("image", "data:image/png;base64,iVBORw0K")
    request = ask(messages=(Message("user", "What is this?", parts=(image,)),))
    with pytest.raises(Unsupported, match="takes no images") as refused:
        await events_of(service, request)
    assert refused.value.param == "messages[0].content[0]"


async def test_a_request_for_a_connected_worker_does_not_look_for_providers(service: Service) -> None:
    asked: list[str] = []
    assert isinstance(service.core, LocalCore)

    async def know_model(model: str) -> None:  # it may read the store, and wait before
        asked.append(model)

    service.core.know_model = know_model
    await events_of(service, ask())
    assert not asked


async def test_a_decode_worker_computes_prompts_itself_if_the_prefill_worker_has_another_drafter(
    tmp_path: Path, open_one: Opener, say: Callable[..., Script]
) -> None:
    group = KVGroup("full", (0, 1), kv_heads=1, head_dim=8, dtype="float16")
    drafts = KVGroup("draft", (2,), kv_heads=1, head_dim=8, dtype="float16")
    prefill = await FakeEngine(
        tmp_path / "p.sock", name="p", role="prefill", transfers=("tcp",), kv_groups=(group,)
    ).start()
    decode = await FakeEngine(
        tmp_path / "d.sock", say("alone"), name="d", role="decode", transfers=("tcp",), kv_groups=(group, drafts)
    ).start()
    service = await open_one(prefill, decode)
    assert text_of(await events_of(service, ask())) == "alone"
    assert [sent.awaits for sent in decode.submitted] == [""]
    assert prefill.submitted == []
    for engine in (prefill, decode):
        await engine.die()
