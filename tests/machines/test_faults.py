"""What a client sees when processes are killed, links are cut and PostgreSQL goes away."""

import asyncio
import time
from collections.abc import Callable

import pytest

from tests.cluster_processes import ApiError, wait_until
from tests.machines.deployment import Deployment, is_connected
from tests.machines.machines import Machine
from tests.machines.postgres_machine import PostgresMachine
from tests.machines.streams import cut_or_failed, stream
from tests.soak.streams_client import StreamRecord

N_TOKENS = 200
SLOW = ("--script", "say=count,itl_ms=50")  # 10 s a stream
ENDED = "incomplete"  # as a response of the given length is called
MAX_CUT_S = 12.0  # from the cut to the next token of a stream that another machine continues


async def started(core_streams: "list[asyncio.Task[StreamRecord]]", is_ready: Callable[[], bool]) -> None:
    """Until the condition holds; the streams run meanwhile."""
    while not await asyncio.to_thread(is_ready):
        assert not any(task.done() for task in core_streams), [
            task.result().problem for task in core_streams if task.done()
        ]
        await asyncio.sleep(0.2)


def running_on(deployment: Deployment, name: str) -> int:
    """Streams of all cores."""
    return sum(core.members()[name]["in_flight"] for core in deployment.cores.values())


async def streams_over(cluster: Deployment, n: int, n_tokens: int = N_TOKENS) -> "list[asyncio.Task[StreamRecord]]":
    """To the cores in turn."""
    cores = list(cluster.cores.values())
    return [asyncio.create_task(stream(cores[i % len(cores)], cluster.model, n_tokens)) for i in range(n)]


async def test_streams_of_a_killed_worker_continue(cluster: Deployment, machines: dict[str, Machine]) -> None:
    cluster.start_worker("k-stays", machines["two"], *SLOW)
    dies = cluster.start_worker("k-dies", machines["three"], *SLOW)
    cluster.wait_connected("k-stays", "k-dies")
    expected, *_ = await asyncio.gather(*await streams_over(cluster, 1))
    assert not expected.problem
    streams = await streams_over(cluster, 20)
    await started(streams, lambda: running_on(cluster, "k-dies") >= 5)
    dies.kill()
    records = await asyncio.gather(*streams)
    assert not cut_or_failed(records, expected)
    print(f"kill -9 of a worker: longest silence {max(record.silence_s for record in records):.2f} s")


async def test_streams_of_a_machine_that_is_cut_off_continue(
    cluster: Deployment, machines: dict[str, Machine], capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing tells the cores that the machine is gone. When it is back, it is used again."""
    cluster.start_worker("c-stays", machines["two"], *SLOW)
    cluster.start_worker("c-cut", machines["three"], *SLOW)
    cluster.wait_connected("c-stays", "c-cut")
    expected, *_ = await asyncio.gather(*await streams_over(cluster, 1))
    streams = await streams_over(cluster, 20)
    await started(streams, lambda: running_on(cluster, "c-cut") >= 5)
    machines["three"].cut()
    records = await asyncio.gather(*streams)
    assert not cut_or_failed(records, expected)
    silence_s = max(record.silence_s for record in records)
    with capsys.disabled():
        print(f"\ncut link: streams continue elsewhere after {silence_s:.2f} s")
    assert 1.0 < silence_s < MAX_CUT_S
    machines["three"].heal()
    cluster.wait_connected("c-cut")


async def test_a_killed_core_ends_its_own_requests_only(cluster: Deployment, machines: dict[str, Machine]) -> None:
    cluster.start_worker("core-w", machines["three"], *SLOW)
    cluster.wait_connected("core-w")
    first, second = cluster.cores.values()
    expected = await stream(second, cluster.model, N_TOKENS)
    streams = await streams_over(cluster, 6)
    await started(streams, lambda: running_on(cluster, "core-w") == 6)
    first.kill()
    records = await asyncio.gather(*streams)
    assert all(record.broke and not record.n_done for record in records[::2])  # at the killed core: visibly
    assert not cut_or_failed(records[1::2], expected)
    wait_until(lambda: second.members()["core-w"]["running"] == 0, "the killed core's requests still run")


def test_a_retry_after_a_core_was_killed_is_billed_once(cluster: Deployment, machines: dict[str, Machine]) -> None:
    """The job of a killed core is run by the other when its lease ends; the retry finds it, and starts no second."""
    cluster.start_worker("once-w", machines["three"], *SLOW)
    cluster.wait_connected("once-w")
    first, second = cluster.cores.values()
    key = first.call("POST", "/api/keys", {"account": "once"})["key"]
    body = {"model": cluster.model, "input": "hello", "background": True, "max_output_tokens": N_TOKENS}
    header = {"idempotency-key": "only-once"}
    made = first.call("POST", "/v1/responses", body, key, **header)
    wait_until(lambda: second.members()["once-w"]["running"] == 1, "the job does not run")
    first.kill()
    again = second.call("POST", "/v1/responses", body, key, **header)
    assert again["id"] == made["id"]
    path = f"/v1/responses/{made['id']}"
    wait_until(lambda: _status(cluster, path, key) == ENDED, "it was not run again", patience_s=180)
    assert second.call("GET", path, key=key)["usage"]["output_tokens"] == N_TOKENS
    cluster.start_cores(first.machine)  # which may have something to report
    restarted = cluster.cores["one"]

    def billed() -> tuple[int, int]:
        rows = restarted.call("GET", "/api/usage?account=once")["data"]
        return sum(row["requests"] for row in rows), sum(row["output_tokens"] for row in rows)

    wait_until(lambda: billed()[0] > 0, "nothing was billed")
    assert billed() == (1, N_TOKENS)


def _status(cluster: Deployment, path: str, key: str) -> str:
    core = cluster.cores["two"]
    try:
        return str(core.call("GET", path, key=key)["status"])
    except ApiError as error:
        return f"{error.status}"


async def test_requests_go_on_while_postgresql_restarts(
    cluster: Deployment, machines: dict[str, Machine], database: PostgresMachine
) -> None:
    cluster.start_worker("pg-w", machines["three"], *SLOW)
    cluster.wait_connected("pg-w")
    first, second = cluster.cores.values()
    expected = await stream(second, cluster.model, N_TOKENS)
    body = {"model": cluster.model, "input": "hello", "background": True, "max_output_tokens": N_TOKENS}
    job = await asyncio.to_thread(first.call, "POST", "/v1/responses", body)
    streams = await streams_over(cluster, 6)
    await started(streams, lambda: running_on(cluster, "pg-w") >= 7)  # with the job
    await asyncio.to_thread(database.stop)
    without = await asyncio.gather(*await streams_over(cluster, 2, 20))  # accepted while it is away
    assert [record.problem for record in without] == ["", ""]
    await asyncio.to_thread(database.start)
    assert not cut_or_failed(await asyncio.gather(*streams), expected)
    path = f"/v1/responses/{job['id']}"
    await asyncio.to_thread(wait_until, lambda: second.call("GET", path)["status"] == ENDED, "the job was lost", 180)
    assert second.call("GET", path)["usage"]["output_tokens"] == N_TOKENS
    # and membership works again: notifications are heard
    cluster.start_worker("pg-w2", machines["two"], joins=[first])
    cluster.wait_connected("pg-w2")


async def test_a_core_that_is_cut_off_from_postgresql_serves_on(
    cluster: Deployment, machines: dict[str, Machine]
) -> None:
    """No connection is closed: packets get lost."""
    cluster.start_worker("cutdb-w", machines["three"], *SLOW)
    cluster.wait_connected("cutdb-w")
    expected = await stream(cluster.cores["one"], cluster.model, N_TOKENS)
    streams = await streams_over(cluster, 4)
    await started(streams, lambda: running_on(cluster, "cutdb-w") >= 4)
    machines["db"].cut()
    without = await asyncio.gather(*await streams_over(cluster, 2, 20))
    assert [record.problem for record in without] == ["", ""]
    assert not cut_or_failed(await asyncio.gather(*streams), expected)
    machines["db"].heal()
    cluster.start_worker("cutdb-w2", machines["two"], joins=[cluster.cores["one"]])
    cluster.wait_connected("cutdb-w2")


def test_an_old_worker_never_answers_for_the_new_one(cluster: Deployment, machines: dict[str, Machine]) -> None:
    """Cut off, replaced elsewhere under its name, and connected again: it ends, and has computed nothing since."""
    old_log, new_log = cluster.folder / "old.journal", cluster.folder / "new.journal"
    old = cluster.start_worker("twin", machines["three"], "--journal", str(old_log))
    cluster.wait_connected("twin")
    first, second = cluster.cores.values()
    first.chat(cluster.model)
    epoch = second.members()["twin"]["epoch"]
    machines["three"].cut()
    cluster.start_worker("twin", machines["two"], "--journal", str(new_log))
    wait_until(lambda: second.members()["twin"]["epoch"] > epoch, "the new one did not join")
    cluster.wait_connected("twin")
    assert first.members()["twin"]["address"].startswith(f"tcp:{machines['two'].address}:")
    n_old = len(old_log.read_text().splitlines())
    first.chat(cluster.model)
    healed_s = time.monotonic()
    machines["three"].heal()
    while old.poll() is None:  # requests all the while
        assert time.monotonic() - healed_s < 60, "the old one did not end"
        for core in (first, second):
            core.chat(cluster.model)
    print(f"the old worker ended {time.monotonic() - healed_s:.1f} s after healing")
    assert old.returncode in (0, 1)  # by itself
    assert len(old_log.read_text().splitlines()) == n_old
    assert len(new_log.read_text().splitlines()) >= 3
    log = cluster.log_of("twin")  # a core has told it to end, or the answer to its next announcement
    assert '"message": "draining"' in log or "a newer worker called twin has joined" in log
    for core in (first, second):
        assert is_connected(core, "twin")
