import asyncio
import time
from contextlib import aclosing

import msgspec
import pytest

from emberline.balancer.ledger import InFlightRequest
from emberline.protocol import token_ids as tokens
from emberline.protocol.events import TokenDelta, Usage
from emberline.protocol.route_request import RouteRequest
from emberline.service import Service
from emberline.service.core import LocalCore
from emberline.service.core_link import CoreServer
from emberline.service.work import Work
from emberline.telemetry.status import StatusQuery
from tests.service.conftest import ALICE, MODEL
from tests.service.fake_engine import FakeEngine
from tests.service.test_remote_core import http_worker, server
from tests.service.test_service import ask, events_of

__all__ = ["http_worker", "server"]  # fixtures


async def test_a_request_is_listed_with_its_phase_and_then_as_ended(service: Service, engine: FakeEngine) -> None:
    engine.script = None
    request = ask("hello")
    async with aclosing(service.run(Work(request, ALICE))) as events:
        first = asyncio.ensure_future(anext(events))
        (sequence,) = await engine.submission()
        engine.step(TokenDelta(sequence.id, tokens.pack([70]), usage=Usage(prompt_tokens=5)))
        await first
        found = await service.operations.status(StatusQuery())
        (listed,) = found.requests
        assert (listed.id, listed.account, listed.model, listed.phase) == (request.id, "alice", MODEL, "decode")
        assert (listed.worker, listed.is_job) == ("e0", False)
        assert 0 <= listed.phase_s <= listed.age_s
        assert found.phases == {"waiting": 0, "prefill": 0, "decode": 1}
        assert found.workers[0].kv_used == 0.001  # one of the fake engine's 1,024 blocks, in thousandths
        engine.step(TokenDelta(sequence.id, tokens.pack([71]), "length", Usage(prompt_tokens=5, completion_tokens=2)))
        async for _ in events:
            pass
    found = await service.operations.status(StatusQuery())
    assert found.requests == []
    assert (found.recent[0].id, found.recent[0].status) == (request.id, "finished")
    assert found.models[0].requests == {"finished": 1}
    assert found.ok
    assert found.problem == ""
    (worker,) = found.workers
    assert (worker.name, worker.model, worker.role, worker.state, worker.ok) == ("e0", MODEL, "both", "ready", True)
    assert worker.kv_used == 0


async def test_an_http_worker_gets_the_status_of_the_core(
    service: Service, http_worker: Service, server: CoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await events_of(http_worker, ask())
    core = service.core
    assert isinstance(core, LocalCore)
    core.history.close_point()
    monkeypatch.setattr(core.history, "close_point", lambda: None)  # its own task closes no more
    ours, theirs = await service.operations.status(StatusQuery()), await http_worker.operations.status(StatusQuery())
    assert theirs.series == ours.series
    assert theirs.recent == ours.recent
    assert sum(n or 0 for n in theirs.series["requests"]) == 1  # one point has it; the task may have closed others


async def test_ten_thousand_requests_in_flight_cost_little(service: Service) -> None:
    core = service.core
    assert isinstance(core, LocalCore)
    ledger = core.admission.balancer.ledger
    records = [
        InFlightRequest(
            RouteRequest(id=f"r{n}", account="a", model=MODEL, model_version="v", input_tokens=9, created_us=0),
            None,
            0.0,
        )
        for n in range(10_000)
    ]
    for record in records:
        ledger.add(record)
    for _ in range(400):
        core.history.close_point()
    try:
        costs = []
        for _ in range(3):
            began_s = time.thread_time()
            found = await service.operations.status(StatusQuery(requests=1000, recent=200))
            body = msgspec.json.encode(found)
            costs.append(time.thread_time() - began_s)
        assert found.phases["waiting"] == 10_000
        assert len(found.requests) == 1000
        assert len(body) < 1_000_000
        assert min(costs) < 0.5  # 0.01 on an idle machine
    finally:
        for record in records:
            ledger.remove(record)
