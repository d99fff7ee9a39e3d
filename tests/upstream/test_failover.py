"""Requests to upstream servers through the real core: events, usage, failover, resume, and nothing left in flight."""

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing

import pytest

from emberline.accounts.usage_row import UsageRow
from emberline.protocol.complete_response import Answer
from emberline.protocol.errors import BadInput, DeadlineExceeded, EngineLost, Overloaded, Unavailable
from emberline.protocol.events import Completed, Started, TextDelta
from emberline.protocol.frames import EngineLoad
from emberline.protocol.request import GenerateRequest, Priority, SamplingParams
from emberline.protocol.route_request import RouteRequest
from emberline.service.event_collector import collect_answer
from emberline.service.work import RelayRequest, Work
from emberline.telemetry.request_log import JobContext
from emberline.upstream.dialects.dialect import CHAT
from emberline.upstream.servers.server_load import ProbeTimings
from emberline.upstream.target import Target
from emberline.upstream.upstream_request import UpstreamRequest
from standins.openai_script import FIRST_WORD_ID, ServerScript, StandinPrompt
from tests.upstream.conftest import LONG, MODEL, PATIENCE_S, PRINCIPAL, Bench, Opener, request

PAIRS = [("vllm", "nixl"), ("vllm", "mooncake"), ("vllm", "store"), ("sglang", "bootstrap")]


def expected(text: str = LONG, n: int = 50) -> str:
    return "".join(StandinPrompt({"messages": [{"role": "user", "content": text}]}).words(n))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


def forwarded(request_id: str, stream: bool) -> UpstreamRequest:
    """As the OpenAI API passes it on."""
    messages = [{"role": "user", "content": f"{LONG}{request_id}"}]
    options = {"include_usage": True}
    fields = {"model": MODEL, "messages": messages, "stream": True, "stream_options": options}
    route = RouteRequest(
        id=request_id, account="a", model=MODEL, model_version="v", input_tokens=len(LONG) // 4, created_us=1
    )
    return UpstreamRequest(route, CHAT, fields, stream=stream)


async def relay(bench: Bench, asked: UpstreamRequest) -> bytes:
    def make(target: Target, request_id: str) -> UpstreamRequest:
        return asked

    task = RelayRequest(id=asked.route.id, model=MODEL, make=make, stream=asked.stream)
    async with aclosing(bench.service.run(Work(task, PRINCIPAL))) as events:
        return b"".join([event if isinstance(event, bytes) else event.result async for event in events])


async def answer(bench: Bench, asked: GenerateRequest) -> Answer:
    return await collect_answer(bench.service.run(Work(asked, PRINCIPAL)))


async def test_an_openai_server(bench: Opener) -> None:
    made = await bench(("a", "openai", "both"))
    found = await answer(made, request())
    assert found.choices[0].text == expected()
    assert found.choices[0].finish == "stop"
    assert found.usage.prompt_tokens == len(f"user: {LONG}") // 4 + 1
    assert found.usage.completion_tokens == 50
    ((request_id, status, *_),) = await made.rows()
    assert (request_id, status) == ("r1", "finished")
    ((first_us, created_us, finished_us),) = await made.times()
    assert created_us <= first_us <= finished_us
    assert await made.idle()


@pytest.mark.parametrize(("kind", "transfer"), PAIRS)
async def test_a_prefill_decode_pair_replies_as_one_server_and_counts_cached_tokens(
    bench: Opener, kind: str, transfer: str
) -> None:
    made = await bench(("p", kind, "prefill"), ("d", kind, "decode"), transfer=transfer)
    first = await answer(made, request(request_id="r1"))
    second = await answer(made, request(request_id="r2"))
    assert first.choices[0].text == second.choices[0].text == expected()
    assert first.usage.cached_tokens == 0
    n_blocks = len(f"user: {LONG}") // 64
    assert second.usage.cached_tokens == n_blocks * 16
    for standin in made.standins.values():
        assert standin.violations == []
        assert standin.handoffs.leased == []
        assert standin.handoffs.reused == []
    assert made.standins["p"].requests[0]["_id"] == made.standins["d"].requests[0]["_id"] != ""
    assert await made.idle()


@pytest.mark.parametrize(("kind", "transfer"), PAIRS)
@pytest.mark.parametrize("fault", [{"status": 500}, {"garbage": True}, {"cut_after": 0}, {"bad_json": True}])
async def test_failover_of_a_prefill_server(bench: Opener, kind: str, transfer: str, fault: dict[str, object]) -> None:
    if kind == "sglang" and "bad_json" in fault:
        pytest.skip("what prefill says is not read there")
    made = await bench(
        *(("p1", kind, "prefill"), ("p2", kind, "prefill"), ("d", kind, "decode")),
        transfer=transfer,
        p1=ServerScript(times=1, handoff_wait_s=3.0, **fault),  # type: ignore[arg-type]
        p2=ServerScript(times=1, handoff_wait_s=3.0, **fault),  # type: ignore[arg-type]
        d=ServerScript(handoff_wait_s=3.0),
    )
    # Both are scripted to fail once: whichever is chosen fails, and so may the other.
    found = await answer(made, request())
    assert found.choices[0].text == expected()
    assert len(made.standins["p1"].requests) + len(made.standins["p2"].requests) >= 1
    rows = await made.rows()
    assert [row[1] for row in rows] == ["finished"]
    names = [*made.standins["p1"].handoffs.fetched, *made.standins["p2"].handoffs.fetched]
    assert len(names) == len(set(names))
    assert await made.idle()


async def test_an_sglang_decode_server_is_used_with_a_prefill_server_only(bench: Opener) -> None:
    made = await bench(("p", "sglang", "prefill"), ("d", "sglang", "decode"), paired=False)
    for number in range(3):  # a handful of tokens, and cached where they are drawn: others would compute them there
        found = await answer(made, request("hello", f"r{number}"))
        assert found.choices[0].text == expected("hello")
    assert [standin.violations for standin in made.standins.values()] == [[], []]
    assert len(made.standins["p"].requests) == len(made.standins["d"].requests) == 3
    assert await made.idle()


async def test_failover_of_a_decode_server_before_its_first_token(bench: Opener) -> None:
    made = await bench(
        *(("p", "vllm", "prefill"), ("d1", "vllm", "decode"), ("d2", "vllm", "decode")),
        d1=ServerScript(status=503, times=1),
        d2=ServerScript(status=503, times=1),
    )
    found = await answer(made, request())
    assert found.choices[0].text == expected()
    ids = [body["_id"] for body in made.standins["p"].requests]
    assert len(ids) == len(set(ids)) >= 2
    assert await made.idle()


@pytest.mark.parametrize("fault", [{"cut_after": 20}, {"error_after": 20}, {"no_done": True, "cut_after": 30}])
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_broken_stream_is_resumed_at_another_server(bench: Opener, kind: str, fault: dict[str, object]) -> None:
    made = await bench(
        ("a", kind, "both"),
        ("b", kind, "both"),
        a=ServerScript(times=1, itl_ms=1, **fault),  # type: ignore[arg-type]
        b=ServerScript(times=1, itl_ms=1, **fault),  # type: ignore[arg-type]
    )
    found = await answer(made, request())
    assert found.choices[0].text == expected()
    assert found.choices[0].finish == "stop"
    assert found.usage.prompt_tokens == len(f"user: {LONG}") // 4 + 1
    assert found.usage.completion_tokens == 50
    assert [row[1] for row in await made.rows()] == ["finished"]
    assert await made.idle()


@pytest.mark.parametrize("fault", [{"cut_after": 21}, {"error_after": 21}, {"cut_after": 22}, {"no_done": True}])
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_reply_that_is_complete_but_for_its_usage_or_end_marker(
    bench: Opener, kind: str, fault: dict[str, object]
) -> None:
    made = await bench(("a", kind, "both"), a=ServerScript(itl_ms=0.2, **fault))  # type: ignore[arg-type]
    asked = forwarded("r1", stream=True)
    asked.fields["max_tokens"] = 20
    body = await relay(made, asked)
    assert body.endswith(b"data: [DONE]\n\n")
    assert body.count(b"[DONE]") == body.count(b'"usage":{') == body.count(b'"finish_reason":"length"') == 1
    assert b'"completion_tokens":20' in body
    assert [(row[1], row[3]) for row in await made.rows()] == [("finished", 20)]
    assert len(made.standins["a"].requests) == 1


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_stream_that_lost_only_its_end_gets_no_more_tokens(bench: Opener, kind: str) -> None:
    script = ServerScript(cut_after=20, itl_ms=0.2, times=1)
    made = await bench(
        ("a", kind, "both"), ("b", kind, "both"), a=script, b=ServerScript(cut_after=20, itl_ms=0.2, times=1)
    )
    found = await answer(made, request(sampling=SamplingParams(temperature=0, max_tokens=20)))
    assert found.choices[0].text == expected(n=20)
    assert found.choices[0].finish == "length"
    assert found.usage.completion_tokens == 20
    assert [row[3] for row in await made.rows()] == [20]
    assert len(made.standins["a"].requests) + len(made.standins["b"].requests) >= 2


async def test_a_stream_of_an_openai_server_is_not_resumed(bench: Opener) -> None:
    made = await bench(
        ("a", "openai", "both"), ("b", "openai", "both"), a=ServerScript(cut_after=5), b=ServerScript(cut_after=5)
    )
    with pytest.raises(EngineLost):
        await answer(made, request())
    ((_, status, _, n_output, _),) = await made.rows()
    assert status == "failed"
    assert 0 < n_output <= 50
    assert await made.idle()


async def test_a_client_error_is_reported_and_counts_against_no_server(bench: Opener) -> None:
    made = await bench(
        ("a", "vllm", "both"), ("b", "vllm", "both"), a=ServerScript(status=400), b=ServerScript(status=400)
    )
    for number in range(12):
        with pytest.raises(BadInput, match="scripted"):
            await answer(made, request(request_id=f"r{number}"))
    workers = made.core.admission.snapshot().workers
    assert workers
    assert all(worker.healthy for worker in workers)
    for standin in made.standins.values():
        standin.script = ServerScript()
    assert (await answer(made, request(request_id="after"))).choices[0].text == expected()
    assert sum(len(standin.requests) for standin in made.standins.values()) == 1


async def test_failover_from_a_server_without_room(bench: Opener) -> None:
    made = await bench(("a", "vllm", "both"), ("b", "vllm", "both"), a=ServerScript(status=429), b=ServerScript())
    found = await answer(made, request())
    assert found.choices[0].text == expected()


async def test_no_server_with_room_is_reported_with_retry_after(bench: Opener) -> None:
    made = await bench(("a", "vllm", "both"), a=ServerScript(status=429))
    with pytest.raises(Overloaded) as caught:
        await answer(made, request())
    assert caught.value.retry_after_s == 3
    assert await made.idle()


async def test_a_moved_prompt_is_pending_on_the_new_server_until_its_first_token(bench: Opener) -> None:
    script = ServerScript(cut_after=5, itl_ms=1, ttft_ms=200)
    made = await bench(("a", "vllm", "both"), ("b", "vllm", "both"), a=script, b=script)
    task = asyncio.create_task(answer(made, request()))
    ledger = made.core.admission.balancer.ledger
    await until(lambda: any(standin.running for standin in made.standins.values()))
    first = next(name for name, standin in made.standins.items() if standin.running)
    other = "b" if first == "a" else "a"
    made.standins[other].script = ServerScript(stall_after=10, ttft_ms=200)
    await until(lambda: made.standins[other].running == 1)
    (record,) = ledger
    (old, new) = (made.core.admission.balancer.fleet.workers[name] for name in (first, other))
    assert record.phase == "prefill"
    assert (list(old.in_flight.pending), old.in_flight.active, old.in_flight.prefill_tokens) == ([], 0, 0)
    assert (list(new.in_flight.pending), new.in_flight.active) == (["r1"], 1)
    await until(lambda: record.phase == "decode")
    assert (list(new.in_flight.pending), new.in_flight.prefill_tokens, new.in_flight.work_us) == ([], 0, 0)
    await until(lambda: made.standins[other].stalled)
    made.standins[other].stalled, made.standins[other].script = False, ServerScript()
    assert (await task).choices[0].text == expected()


async def test_a_cancelled_stream_is_aborted_on_the_server(bench: Opener) -> None:
    made = await bench(("a", "vllm", "both"), a=ServerScript(itl_ms=20))
    async with aclosing(made.service.run(Work(request(), PRINCIPAL))) as events:
        async for event in events:
            if isinstance(event, TextDelta):
                break
    standin = made.standins["a"]
    await until(lambda: standin.n_aborted > 0 and not standin.running)
    assert standin.n_aborted == 1
    assert [row[1] for row in await made.rows()] == ["cancelled"]
    assert await made.idle()


async def test_cancelling_between_prefill_and_decode_frees_the_lease(bench: Opener) -> None:
    """Decode is not reachable yet when the request is cancelled: only a request to it frees the blocks of prefill."""
    made = await bench(("p", "vllm", "prefill"), ("d", "vllm", "decode"))
    prefill, decode = made.standins["p"], made.standins["d"]
    pool = made.clients["d"].pool
    dial, dialled, gate = pool._dial, asyncio.Event(), asyncio.Event()

    async def slow_dial():  # type: ignore[no-untyped-def]
        dialled.set()
        await gate.wait()
        return await dial()

    pool._dial = slow_dial  # type: ignore[method-assign]
    task = asyncio.create_task(answer(made, request()))
    await until(lambda: bool(prefill.handoffs.leased) and dialled.is_set())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert prefill.handoffs.leased
    gate.set()
    await until(lambda: not prefill.handoffs.leased)
    assert decode.requests[-1]["max_tokens"] == 1
    assert [row[1] for row in await made.rows()] == ["cancelled"]
    assert await made.idle()


async def test_failover_from_a_server_that_hangs(bench: Opener) -> None:
    made = await bench(
        ("a", "vllm", "both"),
        ("b", "vllm", "both"),
        a=ServerScript(hang=True),
        b=ServerScript(hang=True),
        timings=ProbeTimings(interval_s=0.05, timeout_s=0.1),
    )
    task = asyncio.create_task(answer(made, request()))
    servers = made.clients
    await until(lambda: any(server.pool.n_connections for server in servers.values()))
    used = next(name for name, server in servers.items() if server.pool.n_connections)
    other = made.standins["b" if used == "a" else "a"]
    other.script = ServerScript()
    made.standins[used].script = ServerScript(hang=True, unhealthy=True)
    found = await asyncio.wait_for(task, 60)
    assert found.choices[0].text == expected()
    assert not made.clients[used].connected
    assert await made.idle()


SHORT = ProbeTimings(interval_s=0.02, canary_s=0.1, min_patience_s=1.0, first_patience_s=1.0)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_streams_move_from_a_server_that_answers_probes_and_computes_nothing(bench: Opener, kind: str) -> None:
    script = ServerScript(stall_after=10, times=1, itl_ms=1)
    made = await bench(("a", kind, "both"), ("b", kind, "both"), a=script, b=ServerScript(itl_ms=1), timings=SHORT)
    made.standins["b"].script.slots = 1  # so that some go to each
    tasks = [asyncio.create_task(answer(made, request(f"{LONG}{number}", f"r{number}"))) for number in range(4)]
    stalled = made.standins["a"]
    await until(lambda: stalled.stalled)
    for number, task in enumerate(tasks):
        assert (await asyncio.wait_for(task, PATIENCE_S)).choices[0].text == expected(f"{LONG}{number}")
    await until(lambda: not made.clients["a"].connected)
    assert "computes no tokens" in made.clients["a"].problem
    stalled.stalled = False
    stalled.script = ServerScript()
    assert await made.clients["a"].wait_connected(PATIENCE_S)
    assert {row[1] for row in await made.rows()} == {"finished"}
    assert await made.idle()


async def test_a_slow_server_is_not_taken_for_a_stuck_one(bench: Opener) -> None:
    """It computes nothing for one request, as a decode server that waits for KV: others are computed meanwhile."""
    timings = ProbeTimings(
        interval_s=0.02, canary_s=PATIENCE_S, min_patience_s=1.2, first_patience_s=1.2, suspect_share=0.1
    )
    made = await bench(("a", "vllm", "both"), a=ServerScript(ttft_ms=1500), timings=timings)
    standin = made.standins["a"]
    task = asyncio.create_task(answer(made, request()))
    await until(lambda: standin.running == 1)
    standin.script = ServerScript()  # of canaries
    assert (await task).choices[0].text == expected()
    assert made.clients["a"].connected
    n_canaries = sum(each.get("prompt") == "1" for each in standin.requests)
    assert (len(standin.requests) - n_canaries, n_canaries > 1) == (1, True)


async def test_a_server_that_reports_no_load_is_never_taken_for_stalled(bench: Opener) -> None:
    timings = ProbeTimings(interval_s=0.02, canary_s=0.05, min_patience_s=0.1, first_patience_s=0.1)
    made = await bench(("a", "openai", "both"), a=ServerScript(ttft_ms=400), timings=timings)
    task = asyncio.create_task(answer(made, request()))
    await until(lambda: made.standins["a"].running == 1)
    (worker,) = made.core.admission.balancer.fleet.workers_of(MODEL)
    assert not worker.is_stalled(time.monotonic() + 3600)
    assert (await task).choices[0].text == expected()
    assert made.clients["a"].connected


async def test_a_server_whose_engine_is_dead_gets_no_requests(bench: Opener) -> None:
    made = await bench(("a", "vllm", "both"), ("b", "vllm", "both"), timings=SHORT)
    made.standins["a"].script = ServerScript(dead_engine=True)
    await until(lambda: not made.clients["a"].connected)
    assert "503 to health checks" in made.clients["a"].problem
    await answer(made, request())
    assert made.standins["a"].requests == []


async def test_a_load_report_that_cannot_be_handled_does_not_end_the_health_checks(
    bench: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await bench(("a", "vllm", "both"), timings=SHORT)

    def broken(metrics: str) -> EngineLoad:
        raise ValueError(metrics)

    with monkeypatch.context() as patch:
        patch.setattr("emberline.upstream.servers.client.vllm_load", broken)
        await until(lambda: not made.clients["a"].connected)
    assert await made.clients["a"].wait_connected(PATIENCE_S)


async def test_a_proxy_without_health_checks_is_no_dead_server(bench: Opener) -> None:
    made = await bench(("a", "vllm", "both"), timings=SHORT)
    standin, n_asked = made.standins["a"], 0
    status = standin._status

    def without_health(path: str) -> bytes | None:
        nonlocal n_asked
        n_asked += path == "/health"
        return None if path == "/health" else status(path)

    standin._status = without_health  # type: ignore[method-assign]
    await until(lambda: n_asked > 5)
    assert made.clients["a"].connected


async def test_no_server_is_an_error(bench: Opener) -> None:
    made = await bench(("a", "vllm", "both"))
    await made.standins["a"].close()
    with pytest.raises(Unavailable):
        await asyncio.wait_for(answer(made, request()), 120)
    assert await made.idle()


@pytest.mark.parametrize("kind", ["vllm", "openai"])
async def test_a_server_without_a_configured_limit_gets_hundreds_of_requests_at_once(bench: Opener, kind: str) -> None:
    made = await bench(
        ("a", kind, "both"), ("b", kind, "both"), a=ServerScript(itl_ms=1000), b=ServerScript(itl_ms=1000)
    )
    tasks = [asyncio.create_task(relay(made, forwarded(f"r{number}", stream=number % 4 == 0))) for number in range(200)]
    await until(lambda: sum(standin.running for standin in made.standins.values()) == 200)
    assert min(standin.running for standin in made.standins.values()) > 16
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert await made.idle()


async def test_what_a_server_cannot_run_waits_here(bench: Opener) -> None:
    made = await bench(("a", "vllm", "both"), a=ServerScript(slots=3), timings=ProbeTimings(interval_s=0.02))
    made.standins["a"].stalled = True
    tasks = [asyncio.create_task(answer(made, request(request_id=f"r{number}"))) for number in range(8)]
    await until(lambda: made.core.admission.balancer.fleet.workers_of("standin")[0].capacity.max_running == 3)
    late = asyncio.create_task(answer(made, request(request_id="late")))
    await until(lambda: sum(made.core.admission.snapshot().waiting.values()) == 1)
    made.standins["a"].stalled = False
    for task in (*tasks, late):
        assert (await task).choices[0].text == expected()
    assert await made.idle()


async def test_started_comes_first_and_completed_last(bench: Opener) -> None:
    made = await bench(("a", "vllm", "both"), a=ServerScript(tokens=3, split=7))
    events = [event async for event in made.service.run(Work(request(), PRINCIPAL))]
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Completed)
    assert sum(isinstance(event, Completed) for event in events) == 1


async def test_a_job_runs_where_it_was_granted_and_its_owner_records_the_usage(bench: Opener) -> None:
    made = await bench(("a", "vllm", "both"), ("b", "vllm", "both"))
    booked: list[UsageRow] = []
    job = JobContext("b", booked.append)
    found = await collect_answer(made.service.run(Work(request(priority=Priority.BATCH), PRINCIPAL, job)))
    assert found.choices[0].text == expected()
    assert [len(standin.requests) for standin in made.standins.values()] == [0, 1]
    assert [(row.status, row.output_tokens) for row in booked] == [("finished", 50)]
    assert await made.rows() == []
    assert await made.idle()


async def test_a_job_is_not_retried_here_when_its_server_fails(bench: Opener) -> None:
    made = await bench(("a", "vllm", "both"), ("b", "vllm", "both"), b=ServerScript(status=500))
    booked: list[UsageRow] = []
    with pytest.raises(EngineLost):
        await collect_answer(
            made.service.run(Work(request(priority=Priority.BATCH), PRINCIPAL, JobContext("b", booked.append)))
        )
    assert made.standins["a"].requests == []
    assert [row.status for row in booked] == ["failed"]
    assert await made.idle()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_the_tokens_before_a_failure_are_counted_not_the_events(bench: Opener, kind: str) -> None:
    made = await bench(("a", kind, "both"), a=ServerScript(cut_after=4, event_tokens=5, itl_ms=1))
    booked: list[UsageRow] = []
    with pytest.raises(EngineLost):
        await collect_answer(
            made.service.run(Work(request(priority=Priority.BATCH), PRINCIPAL, JobContext("a", booked.append)))
        )
    n_prompt = len(f"user: {LONG}") // 4 + 1
    assert [(row.status, row.input_tokens, row.output_tokens) for row in booked] == [("failed", n_prompt, 20)]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_the_tokens_of_a_cancelled_stream_are_counted(bench: Opener, kind: str) -> None:
    made = await bench(("a", kind, "both"), a=ServerScript(event_tokens=5, itl_ms=50))
    async with aclosing(made.service.run(Work(request(), PRINCIPAL))) as events:
        async for event in events:
            if isinstance(event, TextDelta) and " w9-" in event.text:
                break
    assert await made.idle()
    ((_, status, n_input, n_output, _),) = await made.rows()
    assert (status, n_input, n_output) == ("cancelled", len(f"user: {LONG}") // 4 + 1, 10)


async def test_a_stream_is_resumed_by_token_ids_where_the_server_gives_them(bench: Opener) -> None:
    script = ServerScript(cut_after=4, event_tokens=5, itl_ms=1, times=1)
    made = await bench(("a", "vllm", "both"), ("b", "vllm", "both"), a=script, b=script)
    sampling = SamplingParams(temperature=0, max_tokens=40)
    found = await answer(made, request(sampling=sampling))
    assert found.choices[0].text == expected(n=40)
    assert found.choices[0].finish == "length"
    (resumed,) = (body for standin in made.standins.values() for body in standin.requests if "prompt" in body)
    text_ids, reply_ids = [ord(char) for char in f"user: {LONG}"], [FIRST_WORD_ID + number for number in range(20)]
    assert resumed["prompt"] == text_ids + reply_ids
    assert (resumed["max_tokens"], "messages" in resumed) == (20, False)
    ((_, status, n_input, n_output, _),) = await made.rows()
    assert (status, n_input, n_output) == ("finished", len(f"user: {LONG}") // 4 + 1, 40)


async def test_a_deadline_ends_a_slow_reply(bench: Opener) -> None:
    made = await bench(("a", "vllm", "both"), a=ServerScript(itl_ms=500))
    with pytest.raises(DeadlineExceeded):
        await answer(made, request(deadline_s=0.5))
    assert [row[1] for row in await made.rows()] == ["failed"]
    assert await made.idle()
    await until(lambda: made.standins["a"].running == 0)
