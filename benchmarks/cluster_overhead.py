"""What a cluster costs: `python -m benchmarks.cluster_overhead [--part join,drain,link,tls,core]`. Prints JSON.

Cores and stand-in workers are processes on this machine, on a PostgreSQL server of its own. The stand-in computes
nothing, so what is measured is the way through the core, at its worst. Rounds alternate, so that other work on the
machine hits all sides alike; ratios are those of rounds beside each other, with their quartiles. On a machine that has
other work, trust the CPU time: that of the cores and the worker which serve the requests.

join    seconds from the worker's ready line to the first answer at a core that it did not announce itself to
tls     a worker with TLS, against one without: throughput, CPU time a token, and of a request of one token
link    milliseconds of a request of one token on the connection itself, with TLS and without
core    the same as tls: a second core is connected to the same worker and idle, or has half of the clients, against
        one core alone
drain   500 streams on two workers, one of which leaves meanwhile: how many failed or were cut
"""

import argparse
import asyncio
import json
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from benchmarks.client import Reply, RequestFailed, stream
from emberline.balancer.endpoint import Endpoint
from emberline.cluster.engine_client import EngineClient
from emberline.cluster.member_table import MemberTable
from emberline.protocol.credential import worker_host
from emberline.protocol.member import connection_token
from emberline.protocol.request import EngineRequest, SamplingParams
from emberline.protocol.token_ids import pack
from emberline.store import open_store
from tests.cluster_processes import ADMIN, ApiError, ClusterProcesses, CoreProcess, cluster_processes, wait_until
from tests.conftest import pulled
from tests.databases import postgres_server

PARTS = ("join", "drain", "link", "tls", "core")
PACES = {"fast": "itl_ms=0", "paced": "itl_ms=10"}
CLIENTS = 16
N_TOKENS = 64
N_SINGLE = 20  # requests of a round, one after another
N_LINK = 1000  # requests on each connection
N_STREAMS, STREAM_TOKENS = 500, 60


async def ask(core: CoreProcess, model: str, n_tokens: int, key: str = ADMIN) -> Reply:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": n_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    port = int(core.url.rpartition(":")[2])
    return await stream(port, "/v1/chat/completions", body, {"authorization": f"Bearer {key}"})


class Side(NamedTuple):
    """One of the things that are compared. Each pace has a worker of its own, reserved for an account."""

    cores: Sequence[CoreProcess]  # which serve
    workers: dict[str, "subprocess.Popen[str]"]  # by pace
    keys: dict[str, str]  # of the accounts, by pace
    enter: Callable[[], None] = lambda: None  # before its rounds


class Round(NamedTuple):
    tokens_per_s: float  # as fast as it goes
    cpu_us_per_token: float  # the same
    paced_cpu_us_per_token: float  # a token every few milliseconds for each client
    cpu_ms_per_request: float  # of one token, one after another
    ms: list[float]  # the times of these


async def measure(side: Side, model: str) -> Round:
    side.enter()
    figures = {}
    for pace in PACES:
        begin_s, begin_cpu_s = time.perf_counter(), cpu_s(side, pace)
        core_of = [side.cores[number % len(side.cores)] for number in range(CLIENTS)]
        await asyncio.gather(*(ask(core, model, N_TOKENS, side.keys[pace]) for core in core_of))
        n_tokens = CLIENTS * N_TOKENS
        took_s, used_s = time.perf_counter() - begin_s, cpu_s(side, pace) - begin_cpu_s
        figures[pace] = n_tokens / took_s, used_s * 1e6 / n_tokens
    begin_cpu_s = cpu_s(side, "fast")
    cores = [side.cores[number % len(side.cores)] for number in range(N_SINGLE)]
    times = [(await ask(core, model, 1, side.keys["fast"])).ttft_s * 1e3 for core in cores]
    single_ms = (cpu_s(side, "fast") - begin_cpu_s) * 1e3 / N_SINGLE
    return Round(*figures["fast"], figures["paced"][1], single_ms, times)


def cpu_s(side: Side, pace: str) -> float:
    """Of the processes which serve at this pace, so far: from their CPU clocks, which count nanoseconds."""
    pids = [*(core.process.pid for core in side.cores), side.workers[pace].pid]
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)  # as clock_getcpuclockid(3) makes them


def connected(core: CoreProcess, *names: str) -> bool:
    members = core.members()
    return all(members.get(name, {}).get("connected") for name in names)


def compare(model: str, n_rounds: int, sides: dict[str, Side]) -> dict[str, Any]:
    """All sides in turn; the others against the first one."""
    found: dict[str, list[Round]] = {name: [] for name in sides}
    for number in range(-1, n_rounds):  # one round to warm up
        order = list(sides)[:: 1 if number % 2 else -1]
        for name in order:
            one = asyncio.run(measure(sides[name], model))
            if number >= 0:
                found[name].append(one)
    base, *others = found
    result: dict[str, Any] = {}
    for field in Round._fields[:-1]:
        values = {name: [float(getattr(one, field)) for one in rounds] for name, rounds in found.items()}
        result[field] = {name: round(statistics.median(each), 2) for name, each in values.items()}
        for name in others:
            ratios = [b / a for a, b in zip(values[base], values[name], strict=True)]
            result[field][f"{name}_ratio"] = [round(each, 3) for each in statistics.quantiles(ratios, n=4)]
    times = {name: sorted(ms for one in rounds for ms in one.ms) for name, rounds in found.items()}
    for label, part in (("p10_ms", 10), ("p50_ms", 2)):
        result[label] = {name: round(each[len(each) // part], 2) for name, each in times.items()}
    return result


def dedicated(
    cluster: ClusterProcesses, cores: Sequence[CoreProcess], name: str, tls: bool = True
) -> tuple[dict[str, "subprocess.Popen[str]"], dict[str, str]]:
    """A worker for each pace, and the keys of the accounts that they are reserved for."""
    workers, keys = {}, {}
    for pace, script in PACES.items():
        account = f"{name}-{pace}"
        flags = ("--script", f"say=count,{script}", "--account", account)
        workers[pace] = cluster.start_worker(account, cores[0], flags=flags, tls=tls)
        keys[pace] = cores[0].call("POST", "/api/keys", {"account": account})["key"]
        for core in cores:
            wait_until(lambda core=core, account=account: connected(core, account), "no worker")  # type: ignore[misc]
            wait_until(lambda core=core, key=keys[pace]: is_known(core, key), "no key")  # type: ignore[misc]
    return workers, keys


def is_known(core: CoreProcess, key: str) -> bool:
    try:
        core.call("GET", "/v1/models", key=key)
    except ApiError:
        return False
    return True


def leave_all(core: CoreProcess) -> None:
    for name in core.members():
        core.call("POST", "/api/workers/leave", {"name": name})
    wait_until(lambda: not core.members(), "they did not leave")


def join(cluster: ClusterProcesses, cores: list[CoreProcess], n_rounds: int) -> dict[str, Any]:
    took = []
    for number in range(min(n_rounds, 5)):
        worker = cluster.start_worker(f"join{number}", cores[0])
        assert worker.stdout is not None
        worker.stdout.readline()
        begin_s = time.perf_counter()
        while True:
            try:
                asyncio.run(ask(cores[1], cluster.model, 1))
                break
            except RequestFailed:
                time.sleep(0.01)
        took.append(time.perf_counter() - begin_s)
        worker.terminate()
        worker.wait()
        wait_until(lambda: not cores[0].members() and not cores[1].members(), "it did not leave")
    return {"seconds": [round(each, 3) for each in sorted(took)], "median": round(statistics.median(took), 3)}


def tls(cluster: ClusterProcesses, cores: list[CoreProcess], n_rounds: int) -> dict[str, Any]:
    sides = {}
    for name in ("plain", "tls"):
        workers, keys = dedicated(cluster, cores[:1], name, name == "tls")
        sides[name] = Side(cores[:1], workers, keys)
    found = compare(cluster.model, n_rounds, sides)
    leave_all(cores[0])
    return found


def link(cluster: ClusterProcesses, cores: list[CoreProcess], store_url: str) -> dict[str, Any]:
    core = cores[0]
    for name in ("plain", "tls"):
        cluster.start_worker(name, core, tls=name == "tls")
    wait_until(lambda: connected(core, "plain", "tls"), "no workers")
    found = uvloop.run(link_ms(cluster, store_url))  # as a core
    leave_all(core)
    return found


async def link_ms(cluster: ClusterProcesses, store_url: str) -> dict[str, Any]:
    """Requests on connections to both workers, in turn."""
    store = await open_store(store_url)
    context, clients = cluster.core_context(), []
    for member in sorted(await MemberTable(store).all(), key=lambda member: member.is_tls):
        endpoint = Endpoint(
            name=member.name,
            address=member.address,
            token=connection_token(cluster.key_of(member.name), member.instance),
            models=(member.model,),
            tls_host=worker_host(member.name) if member.is_tls else "",
        )
        clients.append(EngineClient(endpoint, context))
        clients[-1].start()
        assert await clients[-1].wait_connected(10), clients[-1].problem
    times: list[list[float]] = [[], []]
    for number in range(N_LINK):
        for client, took in zip(clients, times, strict=True):
            begin_s = time.perf_counter()
            sampling = SamplingParams(max_tokens=1)
            request = EngineRequest(id=f"r{number}", prompt_ids=pack(list(range(3, 40))), sampling=sampling)
            await client.stream([request]).next()
            took.append((time.perf_counter() - begin_s) * 1e3)
            await asyncio.sleep(0.002)
    for client in clients:
        await client.close()
    await store.close()
    plain, tls = (sorted(took) for took in times)
    at = {"p10": N_LINK // 10, "p50": N_LINK // 2}
    return {
        "plain_ms": {name: round(plain[index], 3) for name, index in at.items()},
        "tls_ms": {name: round(tls[index], 3) for name, index in at.items()},
        "added_ms": {name: round(tls[index] - plain[index], 3) for name, index in at.items()},
    }


def second_core(cluster: ClusterProcesses, cores: list[CoreProcess], n_rounds: int) -> dict[str, Any]:
    """The second core is stopped and continued: a stopped process costs nothing. Of the worker's frames to it, the
    kernel takes those of a round."""
    workers, keys = dedicated(cluster, cores, "core")
    other = cores[1]

    def stop() -> None:
        other.process.send_signal(signal.SIGSTOP)

    def go_on() -> None:
        other.process.send_signal(signal.SIGCONT)
        wait_until(lambda: connected(other, "core-fast", "core-paced"), "the second core lost the workers")

    sides = {
        "alone": Side(cores[:1], workers, keys, stop),
        "idle_second": Side(cores[:1], workers, keys, go_on),
        "both": Side(cores, workers, keys, go_on),
    }
    try:
        found = compare(cluster.model, n_rounds, sides)
    finally:
        go_on()
    leave_all(cores[0])
    return found


def drain(cluster: ClusterProcesses, cores: list[CoreProcess]) -> dict[str, Any]:
    flags = ("--script", "say=count,itl_ms=40", "--max-running", "512")
    workers = {name: cluster.start_worker(name, *cores, flags=flags) for name in ("stays", "leaves")}
    wait_until(lambda: all(connected(core, *workers) for core in cores), "no workers")

    async def one(number: int) -> str:
        await asyncio.sleep(number * 0.004)
        try:
            reply = await ask(cores[number % 2], cluster.model, STREAM_TOKENS)
        except RequestFailed as error:
            return f"failed: {error}"[:200]
        whole = reply.finish == "length" and reply.output_tokens == STREAM_TOKENS
        return "" if whole else f"cut after {reply.output_tokens} tokens: {reply.finish}"

    async def run() -> tuple[list[str], int]:
        streams = [asyncio.create_task(one(number)) for number in range(N_STREAMS)]
        await asyncio.sleep(N_STREAMS * 0.004 / 2)
        busy = await asyncio.to_thread(lambda: cores[0].members()["leaves"]["running"])
        await asyncio.to_thread(cores[0].call, "POST", "/api/workers/leave", {"name": "leaves"})
        return list(await asyncio.gather(*streams)), busy

    problems, busy = asyncio.run(run())
    status = workers["leaves"].wait(60)
    bad = [problem for problem in problems if problem]
    leave_all(cores[0])
    found = {"streams": N_STREAMS, "on_it_when_it_left": busy, "failed_or_cut": len(bad), "exit": status}
    return {**found, "first": bad[:3]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster_overhead", description=__doc__)
    parser.add_argument("--part", default=",".join(PARTS), help="some of " + ", ".join(PARTS))
    parser.add_argument("--rounds", type=int, default=15, help="of each side (default 15)")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    weights = pulled("smollm2")
    with (
        tempfile.TemporaryDirectory(prefix="emberline-cluster-") as folder,
        postgres_server() as url,
        cluster_processes(Path(folder), url, weights) as cluster,
    ):
        cores = cluster.start_cores("core0", "core1")
        for part in args.part.split(","):
            if part == "drain":
                found[part] = drain(cluster, cores)
            elif part == "link":
                found[part] = link(cluster, cores, url)
            else:
                found[part] = {"join": join, "tls": tls, "core": second_core}[part](cluster, cores, args.rounds)
            print(f"{part:6} {json.dumps(found[part])}", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
