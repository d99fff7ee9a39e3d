"""What two cores share, how fast a worker joins, and a busy worker that leaves."""

import asyncio
import http.client
import time
from collections import Counter
from collections.abc import Callable

import pytest

from tests.cluster_processes import ApiError, wait_until
from tests.machines.deployment import Deployment, MachineCore
from tests.machines.machines import Machine
from tests.machines.streams import cut_or_failed, stream

MAX_JOIN_S = 2.0
N_STREAMS, STREAM_TOKENS = 500, 60
LIMIT, BUDGET = 20, 5


async def statuses(cores: list[MachineCore], model: str, key: str, n: int, at_once: int) -> Counter[int]:
    """Of n requests, to the cores in turn."""
    places = asyncio.Semaphore(at_once)

    async def one(number: int) -> int:
        async with places:
            try:
                await asyncio.to_thread(cores[number % len(cores)].chat, model, key=key)
            except ApiError as error:
                return error.status
            except (OSError, http.client.HTTPException):
                return 0  # the core was killed
            return 200

    return Counter(await asyncio.gather(*(one(number) for number in range(n))))


def wait_known(cores: list[MachineCore], key: str) -> None:
    def is_known(core: MachineCore) -> bool:
        try:
            core.call("GET", "/v1/models", key=key)
        except ApiError:
            return False
        return True

    wait_until(lambda: all(is_known(core) for core in cores), "a core does not know the key")


def test_a_worker_is_used_two_seconds_after_it_started(
    cluster: Deployment, machines: dict[str, Machine], capsys: pytest.CaptureFixture[str]
) -> None:
    """From the line that it prints once it listens, to the first answer of a core that it did not ask."""
    first, second = cluster.cores.values()
    took_s = []
    for number in range(3):
        worker = cluster.start_worker(f"join{number}", machines["three"], joins=[first])
        assert worker.stdout is not None
        assert worker.stdout.readline()
        begin_s = time.monotonic()
        while not answers(second, cluster.model):
            assert time.monotonic() - begin_s < 60
            time.sleep(0.01)
        took_s.append(time.monotonic() - begin_s)
        worker.terminate()
        assert worker.wait(60) == 0
        wait_until(lambda: not _connected(first) and not _connected(second), "it did not leave")
    with capsys.disabled():
        print(f"\njoin to first answer: {', '.join(f'{each:.2f}' for each in sorted(took_s))} s")
    assert sorted(took_s)[1] < MAX_JOIN_S


def answers(core: MachineCore, model: str) -> bool:
    try:
        core.chat(model)
    except ApiError:
        return False
    return True


def _connected(core: MachineCore) -> list[str]:
    return [name for name, member in core.members().items() if member["connected"]]


async def test_a_busy_worker_leaves_and_no_stream_is_cut(
    cluster: Deployment, machines: dict[str, Machine], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--script", "say=count,itl_ms=100", "--max-running", "512")
    cluster.start_worker("stays", machines["two"], *flags)
    leaves = cluster.start_worker("leaves", machines["three"], *flags)
    cluster.wait_connected("stays", "leaves")
    cores = list(cluster.cores.values())
    expected = await stream(cores[0], cluster.model, STREAM_TOKENS)
    streams = []
    for number in range(N_STREAMS):
        streams.append(asyncio.create_task(stream(cores[number % 2], cluster.model, STREAM_TOKENS)))
        await asyncio.sleep(0.004)
        if number == N_STREAMS // 2:
            member = (await asyncio.to_thread(cores[0].members))["leaves"]
            await asyncio.to_thread(cores[0].call, "POST", "/api/workers/leave", {"name": "leaves"})
    records = await asyncio.gather(*streams)
    bad = cut_or_failed(records, expected)
    with capsys.disabled():
        print(f"\n{N_STREAMS} streams, {member['running']} of them on the worker that left: {len(bad)} failed or cut")
    assert not bad
    assert member["running"] > 10
    assert await asyncio.to_thread(leaves.wait, 60) == 0
    wait_until(lambda: "leaves" not in cores[1].members(), "it is still a member")


async def test_two_cores_share_one_rate_limit_and_one_budget(cluster: Deployment, machines: dict[str, Machine]) -> None:
    """Never over, also when one of them is killed: what it had leased is lost until it expires, and not spent twice."""
    cluster.start_worker("limit-w", machines["three"])
    cluster.wait_connected("limit-w")
    cores = list(cluster.cores.values())
    first, second = cores
    limited = first.call("POST", "/api/keys", {"account": "limited", "requests_per_minute": LIMIT})["key"]
    wait_known(cores, limited)
    begin_s = time.monotonic()
    found = await statuses(cores, cluster.model, limited, 2 * LIMIT, at_once=4)
    refilled = (time.monotonic() - begin_s) / 60 * LIMIT
    assert LIMIT <= found[200] <= LIMIT + refilled
    assert set(found) == {200, 429}

    first.call("POST", "/api/prices", {"model": cluster.model, "input": "4000", "output": "4000"})
    body = {"account": "spender", "budget": str(BUDGET), "budget_period": "total"}
    spender = first.call("POST", "/api/keys", body)["key"]
    wait_known(cores, spender)

    def spent() -> float:
        rows = second.call("GET", "/api/usage?account=spender")["data"]
        return sum(float(row["cost"] or 0) for row in rows)

    for core in cores:  # the price is known once it is billed
        wait_until(lambda core=core: spent() < _spend(core, cluster.model, spender, spent), "no price")
    running = asyncio.create_task(statuses(cores, cluster.model, spender, 40, at_once=4))
    before = spent()
    while spent() <= before and not running.done():
        await asyncio.sleep(0.05)
    first.kill()
    await running
    found = await statuses([second], cluster.model, spender, 60, at_once=4)
    assert set(found) <= {200, 429}
    assert found[429], "the budget was not reached"
    (restarted,) = cluster.start_cores(first.machine)  # it reports what it had not
    found = await statuses([restarted, second], cluster.model, spender, 60, at_once=4)
    assert found[429]
    assert 0.5 * BUDGET < spent() <= BUDGET


def _spend(core: MachineCore, model: str, key: str, spent: Callable[[], float]) -> float:
    core.chat(model, key=key)
    return spent()
