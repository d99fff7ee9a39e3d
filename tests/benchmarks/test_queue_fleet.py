import asyncio
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import queue_fleet
from benchmarks.cpu_usage import Meter, cpu_s, family
from benchmarks.queue_fleet import N_OUTPUT, ROW_S, STEP_S, ModelledFleet, simulate
from benchmarks.virtual_time import RealTimeStore, VirtualLoop
from emberline.store import open_store


@pytest.fixture(autouse=True)
def _same_pauses() -> Iterator[None]:
    """The queue varies its pauses at random, and with them what a run measures."""
    state = random.getstate()
    random.seed(5)
    yield
    random.setstate(state)


def test_virtual_loop_skips_sleep_and_waits_for_threads(tmp_path: Path) -> None:
    loop = VirtualLoop()

    async def run() -> float:
        store = RealTimeStore(await open_store(tmp_path / "t.db"), loop)
        ticks = []

        async def tick() -> None:
            while True:
                await asyncio.sleep(60)
                ticks.append(loop.time())

        ticking = asyncio.create_task(tick())
        await asyncio.sleep(3600)
        assert len(ticks) in (59, 60)
        at_s = loop.time()
        await store.write("CREATE TABLE t (a)")  # on a thread: the clock stands still
        assert loop.time() == at_s
        assert store.now_us() == int(at_s * 1e6)
        ticking.cancel()
        await store.close()
        return loop.time()

    began_s = time.monotonic()
    assert loop.run_until_complete(run()) >= 1_003_600
    assert time.monotonic() - began_s < 60
    loop.close()


def test_single_request_takes_the_modelled_time() -> None:
    loop = VirtualLoop()

    async def run() -> tuple[float, float]:
        fleet, began_s = ModelledFleet(1), loop.time()
        first_s = await fleet.ask("one")
        fleet.close()
        return first_s, loop.time() - began_s

    first_s, took_s = loop.run_until_complete(run())
    loop.close()
    assert STEP_S < first_s < 3 * STEP_S
    assert abs(took_s - first_s - (N_OUTPUT - 1) * (STEP_S + ROW_S)) < 1e-6


def test_queue_keeps_a_simulated_engine_busy() -> None:
    found = simulate(1, 6.0)
    assert 0.9 < found["ratio"] < 1.1
    assert found["age_lines"] > 0
    assert found["age_p95_s"] < 300


def test_queue_beside_requests_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the costs of two CPU cores and requests at 70 %: TTFT at p95 is little higher, jobs alone are not slower."""
    costs = {"STEP_S": 4e-3, "ROW_S": 5.5e-3, "PROMPT_S": 0.82e-3, "N_PROMPT": 100}
    sizes = {"PLACES": 64, "TOKEN_BUDGET": 512, "KV_TOKENS": 4 * 64 * 132}
    for name, value in (costs | sizes).items():
        monkeypatch.setattr(queue_fleet, name, value)
    found = simulate(1, 60.0)
    assert found["ratio"] > 0.97
    assert found["p95_more_ms"] < 100


def test_cpu_time_of_others_is_separate() -> None:
    ours = family(os.getpid())
    assert os.getpid() in ours
    meter, before_s, began_s = Meter(ours), cpu_s(ours), time.perf_counter()
    while cpu_s(ours) - before_s < 0.2:
        sum(range(10_000))
    used_s, outside = meter.read(time.perf_counter() - began_s)
    assert 0.15 < used_s < 1.0 + threading.active_count()
    assert outside >= 0.0
