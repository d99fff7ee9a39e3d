"""What a killed core had leased of a budget and of concurrent requests: withheld from the others, and no longer than
until the lease expires."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster_processes import ApiError, wait_until
from tests.machines.deployment import Deployment, MachineCore
from tests.machines.machines import Machine
from tests.machines.postgres_machine import PostgresMachine
from tests.machines.streams import stream
from tests.machines.test_sharing import wait_known

LEASE_S = 30.0  # of a budget; slots have the same
RENEWED_S = LEASE_S / 6  # so much of it has passed at most, when a core dies
BUDGET, COST = 100, 5  # in cents; a request generates 5 tokens, which cost one each
SLICE = BUDGET // 20  # that a lease has beyond what was needed
SLOTS = 4
SHORT = {"EMBERLINE_ACCOUNTS_BUDGET_LEASE_S": str(LEASE_S)}


@pytest.fixture(scope="module")
def cluster(
    machines: dict[str, Machine], database: PostgresMachine, smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """Two cores with short leases, one worker."""
    cluster = Deployment(tmp_path_factory.mktemp("leases"), database.new_database(), smollm2)
    cluster.init(machines["one"])
    try:
        cluster.start_cores(machines["one"], machines["two"], env=SHORT)
        cluster.start_worker("w", machines["three"], "--script", "say=count,itl_ms=50")
        cluster.wait_connected("w")
        yield cluster
    finally:
        cluster.close()


def spend(core: MachineCore, model: str, key: str) -> bool:
    """Whether a request of `COST` was admitted."""
    try:
        core.chat(model, key=key, max_tokens=COST)
    except ApiError as error:
        if error.status != 429:
            raise
        return False
    return True


def test_a_killed_core_withholds_one_lease_of_a_budget(cluster: Deployment, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = cluster.cores["one"], cluster.cores["two"]
    first.call("POST", "/api/prices", {"model": cluster.model, "input": "0", "output": "10000"})
    body = {"account": "spender", "budget": str(BUDGET // 100), "budget_period": "total"}
    key = first.call("POST", "/api/keys", body)["key"]
    other = first.call("POST", "/api/keys", {"account": "other"})["key"]
    wait_known([first, second], key)

    def cost(account: str) -> int:
        rows = second.call("GET", f"/api/usage?account={account}")["data"]
        return round(sum(100 * float(row["cost"] or 0) for row in rows))

    def has_price(core: MachineCore) -> bool:
        before = cost("other")
        return spend(core, cluster.model, other) and cost("other") > before

    for core in (first, second):
        wait_until(lambda core=core: has_price(core), "no price")  # type: ignore[misc]
    n_first = 3
    assert all(spend(first, cluster.model, key) for _ in range(n_first))
    wait_until(lambda: cost("spender") == n_first * COST, "not billed")
    first.kill()
    killed_s = time.monotonic()
    n_second = 0
    while spend(second, cluster.model, key):
        n_second += 1
    refused_s = time.monotonic() - killed_s
    withheld = BUDGET - (n_first + n_second) * COST
    with capsys.disabled():
        print(f"\na killed core withholds {withheld} of a budget of {BUDGET}, a lease having {SLICE} unused", end="")
    assert withheld < SLICE + COST  # what remains of a lease, and less than a request
    if refused_s < LEASE_S - RENEWED_S:
        assert withheld >= COST, "the lease of the killed core was used by another"
    wait_until(lambda: spend(second, cluster.model, key), "it is never free again", 2 * LEASE_S + 60)
    n_second += 1
    with capsys.disabled():
        print(f": free again {time.monotonic() - killed_s:.0f} s after the kill")
    while spend(second, cluster.model, key):
        n_second += 1
    assert (n_first + n_second) * COST == BUDGET  # all of it, and not more
    wait_until(lambda: cost("spender") == BUDGET, "not billed")
    cluster.start_cores(first.machine, env=SHORT)
    cluster.wait_connected("w")
    assert not spend(cluster.cores["one"], cluster.model, key)
    assert cost("spender") == BUDGET


async def test_a_killed_core_withholds_its_concurrent_requests(
    cluster: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = cluster.cores["one"], cluster.cores["two"]
    key = first.call("POST", "/api/keys", {"account": "many", "concurrency": SLOTS})["key"]
    await asyncio.to_thread(wait_known, [first, second], key)
    held = SLOTS // 2
    running = [asyncio.create_task(stream(first, cluster.model, 400, key)) for _ in range(held)]
    while (await asyncio.to_thread(first.members))["w"]["in_flight"] < held:
        assert not any(task.done() for task in running), "they ended before the kill"
        await asyncio.sleep(0.05)
    await asyncio.to_thread(first.kill)
    killed_s = time.monotonic()

    async def admitted() -> int:
        """Of as many as the limit allows, all at once."""
        records = await asyncio.gather(*(stream(second, cluster.model, 60, key) for _ in range(SLOTS)))
        assert all(not record.problem or record.problem.startswith("429") for record in records), records
        return sum(not record.problem for record in records)

    asked_s = time.monotonic() - killed_s
    n = await admitted()
    assert n >= SLOTS - held
    if asked_s < LEASE_S * 2 / 3 - 5:
        assert n == SLOTS - held, "slots of the killed core were used by another"
    while n < SLOTS:
        assert time.monotonic() - killed_s < 2 * LEASE_S + 60, "they are never free again"
        n = await admitted()
    with capsys.disabled():
        print(f"\na killed core withholds {held} of {SLOTS} concurrent requests, and none", end=" ")
        print(f"{time.monotonic() - killed_s:.0f} s after the kill")
    assert all(record.broke for record in await asyncio.gather(*running))
    await asyncio.to_thread(cluster.start_cores, first.machine, env=SHORT)
