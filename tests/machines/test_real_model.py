"""The real engine with the small model on CPUs: what continues elsewhere is what the first worker would have said."""

import asyncio
from typing import Any

import pytest

from tests.cluster_processes import wait_until
from tests.machines.deployment import Deployment
from tests.machines.machines import Machine
from tests.machines.streams import cut_or_failed, stream
from tests.machines.test_faults import MAX_CUT_S
from tests.soak.streams_client import StreamRecord

N_TOKENS = 192
START_S = 240.0  # an engine loads torch and the weights, two of them at once
ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Write a long story about a ship."}],
    "temperature": 0,
    "ignore_eos": True,
}


@pytest.mark.parametrize("fault", ["kill", "cut"])
async def test_a_reply_continues_on_another_machine(
    fault: str, cluster: Deployment, machines: dict[str, Machine], capsys: pytest.CaptureFixture[str]
) -> None:
    """Token by token the same as without the fault, and billed once."""
    where = {f"{fault}-{name}": machines[name] for name in ("two", "three")}
    workers = {name: cluster.start_worker(name, machine, is_real=True) for name, machine in where.items()}
    await asyncio.to_thread(cluster.wait_connected, *where, patience_s=START_S)
    core = cluster.cores["one"]
    expected = await stream(core, cluster.model, N_TOKENS, **ASK)
    assert not expected.problem
    assert expected.usage[-1]["completion_tokens"] == N_TOKENS
    account = f"real-{fault}"
    key = core.call("POST", "/api/keys", {"account": account})["key"]

    record = StreamRecord()
    running = asyncio.create_task(stream(core, cluster.model, N_TOKENS, key, record, **ASK))
    while len(record.texts.get(0, "")) < len(expected.texts[0]) // 8:
        assert not running.done(), f"it ended before the fault: {record.problem}"
        await asyncio.sleep(0.01)
    members = await asyncio.to_thread(core.members)
    (broken,) = (name for name in where if members[name]["in_flight"])
    if fault == "kill":
        workers[broken].kill()
    else:
        where[broken].cut()
    n_before = len(record.texts[0])
    assert n_before < len(expected.texts[0]) // 2, "too late: most of the reply was there"
    await running
    assert not cut_or_failed([record], expected)
    with capsys.disabled():
        print(f"\nreal model, {fault} after {n_before} of {len(record.texts[0])} characters:", end=" ")
        print(f"the same text; longest silence {record.silence_s:.2f} s")
    assert record.silence_s < MAX_CUT_S

    def billed() -> tuple[int, int]:
        rows = core.call("GET", f"/api/usage?account={account}")["data"]
        return sum(row["requests"] for row in rows), sum(row["output_tokens"] for row in rows)

    wait_until(lambda: billed()[0] > 0, "nothing was billed")
    if fault == "cut":
        where[broken].heal()
        await asyncio.to_thread(cluster.wait_connected, *where)
    else:
        wait_until(lambda: not core.members()[broken]["connected"], "the killed one is still connected")
    assert billed() == (1, N_TOKENS)  # nor does the machine that is back add anything
