"""Servers that fail at random while clients connect and disconnect: nothing is lost, doubled, garbled or left over."""

import asyncio
import random

import pytest

from emberline.protocol.errors import EmberlineError
from emberline.service.event_collector import collect_answer
from emberline.service.work import Work
from standins.openai_script import ServerScript
from tests.upstream.conftest import PRINCIPAL, Bench, Opener, request
from tests.upstream.test_failover import expected

FAULTS = (
    {"status": 500},
    {"status": 429},
    {"status": 400},
    {"garbage": True},
    {"cut_after": 3},
    {"error_after": 7},
    {"bad_json": True},
    {"no_params": True},
    {},
)


async def client(bench: Bench, number: int, draw: random.Random) -> str:
    text = f"request {number}: " + "what is it all about? " * draw.randrange(4, 60)
    task = asyncio.create_task(
        collect_answer(bench.service.run(Work(request(text, f"r{number}", session=f"s{number % 5}"), PRINCIPAL)))
    )
    if draw.random() < 0.25:
        await asyncio.sleep(draw.random() * 0.05)
        task.cancel()
    try:
        answer = await task
    except asyncio.CancelledError:
        return "left"
    except EmberlineError as error:
        return f"failed: {error.kind}"
    assert answer.choices[0].text == expected(text)
    assert answer.usage.completion_tokens == 50
    return "answered"


async def inject_faults(bench: Bench, draw: random.Random) -> None:
    while True:
        standin = draw.choice(list(bench.standins.values()))
        fault = draw.choice(FAULTS)
        standin.script = ServerScript(
            times=draw.randrange(1, 4), itl_ms=draw.choice([0, 0.2]), handoff_wait_s=0.3, **fault
        )  # type: ignore[arg-type]
        await asyncio.sleep(draw.random() * 0.03)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("kind", "transfer"), [("vllm", "nixl"), ("vllm", "mooncake"), ("sglang", "bootstrap")])
async def test_random_faults(bench: Opener, kind: str, transfer: str, seed: int) -> None:
    names = [("p1", kind, "prefill"), ("p2", kind, "prefill"), ("d1", kind, "decode"), ("d2", kind, "decode")]
    made = await bench(*names, transfer=transfer, **{name: ServerScript(handoff_wait_s=0.3) for name, _, _ in names})
    for standin in made.standins.values():
        standin.handoffs.wait_s = 0.3
    draw = random.Random(seed)
    faults = asyncio.create_task(inject_faults(made, draw))
    slots = asyncio.Semaphore(8)

    async def one(number: int) -> str:
        async with slots:
            return await client(made, number, random.Random(f"{seed}/{number}"))

    try:
        async with asyncio.timeout(300):
            ends = await asyncio.gather(*(one(number) for number in range(60)))
    finally:
        faults.cancel()
    answered = [number for number, end in enumerate(ends) if end == "answered"]
    assert len(answered) > (len(ends) - ends.count("left")) / 2, "most requests are moved to a server that works"
    assert set(ends) <= {"answered", "left", "failed: overloaded", "failed: unavailable", "failed: bad_input"}
    assert await made.idle()
    rows = await made.rows()
    status = {row[0]: row[1] for row in rows}
    assert len(rows) == len(status), "one row for each request"
    assert {status.get(f"r{number}") for number in answered} == {"finished"}
    failed = [number for number, end in enumerate(ends) if end.startswith("failed")]
    assert {status.get(f"r{number}", "failed") for number in failed} <= {"failed"}
    for standin in made.standins.values():
        standin.script = ServerScript()
        standin.handoffs.wait_s = standin.script.handoff_wait_s
        assert standin.violations == []
        assert standin.handoffs.reused == []
    for server in made.clients.values():
        assert server.pool.n_busy == 0
    async with asyncio.timeout(60):  # and all is well again
        after = await collect_answer(made.service.run(Work(request(request_id="after"), PRINCIPAL)))
    assert after.choices[0].text == expected()
