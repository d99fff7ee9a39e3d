"""The cluster's KV pool on Mooncake Store, over loopback: bandwidth, a session that changes its worker, a lost master.

python -m benchmarks.kv_pool [--only bandwidth] [--mib 512] [--tokens 3000] [--out FILE]

Bandwidth: blocks through the pool tier, tags computed and verified, against Mooncake's own batch_put_from and
batch_get_into by a client of this process, in turn, in the same pool, whose memory another process lends; ratios are
medians over the rounds. All of it
runs on the cores of one machine, so what the tags cost shows in full.
Session: `emberline serve --kv-store mooncake` with two CPU workers and the default model. One worker computes a session
and is drained; how much of the next turn's prompt the other one takes from the pool. Then the master is killed, and
stopped, while requests run: how many fail.

Needs `pip install 'emberline[mooncake]'` and Debian's libibverbs1 and librdmacm1.
"""

import argparse
import asyncio
import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.process import Process, free_port
from emberline.config import KVConfig, home_dir
from emberline.kv.host_memory import private_pages
from emberline.kv.tiers.pool.pool_tier import open_pool
from emberline.kv.tiers.tier import BlockId, BlockMeta, layout_tag
from emberline.protocol.block_hash import BLOCK_TOKENS, KVGroup
from emberline.protocol.kv_store import StoreSettings
from emberline.supervisor.kv_pool import PoolProcesses, plan_pool

BATCH_BYTES = 32 << 20  # as the tier manager asks for blocks
TARGETS = {"bandwidth_ratio": 0.8, "share_from_pool": 0.95, "failed": 0}
SHAPES = {
    "SmolLM2-135M": KVGroup("full", tuple(range(30)), kv_heads=3, head_dim=64, dtype="float16"),
    "Llama-8B": KVGroup("full", tuple(range(32)), kv_heads=8, head_dim=128, dtype="bfloat16"),
}


# --- bandwidth -------------------------------------------------------------------------------------------------------


async def bandwidth(n_bytes: int) -> dict[str, Any]:
    """Of each shape: bytes per second, medians over the batches, and our ratio."""
    plan = plan_pool(KVConfig(store="mooncake", pool_bytes=1 << 30))
    assert plan is not None
    processes = PoolProcesses(plan)
    await processes.start()
    try:
        return await asyncio.to_thread(
            lambda: {name: shape_bandwidth(plan.store, group, n_bytes) for name, group in SHAPES.items()}
        )
    finally:
        await processes.stop(5)


def shape_bandwidth(settings: StoreSettings, group: KVGroup, n_bytes: int) -> dict[str, float]:
    tier = open_pool(settings, bytes(32))
    wait_until(lambda: tier.stats().state == "ok", 30)
    size, n = group.block_bytes, BATCH_BYTES // group.block_bytes
    memory = private_pages(size * n).buffer
    memory[:] = os.urandom(size * n)
    blocks = [memoryview(memory)[at * size : (at + 1) * size] for at in range(n)]
    store = plain_store(settings)
    plain = private_pages(size * n).buffer
    plain[:] = memory[:]
    base = ctypes.addressof(ctypes.c_char.from_buffer(plain))
    store.register_buffer(base, size * n)
    starts, sizes = [base + at * size for at in range(n)], [size] * n
    seconds: dict[str, list[float]] = {"write": [], "put": [], "read": [], "get": []}
    for number in range(max(4, n_bytes // (size * n))):
        ids = [BlockId(os.urandom(16), layout_tag(group)) for _ in range(n)]
        names = [f"plain-{number}-{at}" for at in range(n)]
        timed(seconds["write"], partial(tier.write, ids, blocks, [BlockMeta()] * n))
        check(timed(seconds["put"], partial(store.batch_put_from, names, starts, sizes)), 0)
        check(timed(seconds["read"], partial(tier.read, ids, blocks)), True)
        check(timed(seconds["get"], partial(store.batch_get_into, names, starts, sizes)), size)
        tier.remove(ids)
        store.batch_remove(names, True)
    tier.close()
    rates = {name: size * n / median(taken[1:]) for name, taken in seconds.items()}
    return {
        **rates,
        "write_ratio": ratio(seconds["put"], seconds["write"]),
        "read_ratio": ratio(seconds["get"], seconds["read"]),
    }


def ratio(plain_s: Sequence[float], ours_s: Sequence[float]) -> float:
    """The median over rounds, in which one follows the other: on a busy machine rounds differ more than these two."""
    return median(plain / ours for plain, ours in zip(plain_s[1:], ours_s[1:]))


def plain_store(settings: StoreSettings) -> Any:
    store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    local = f"127.0.0.1:{free_port()}"
    assert store.setup(local, "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", settings.master) == 0
    return store


def timed(taken: list[float], call: Callable[[], Any]) -> Any:
    began_s = time.perf_counter()
    result = call()
    taken.append(time.perf_counter() - began_s)
    return result


def check(found: Sequence[object], expected: object) -> None:
    assert set(found) == {expected}, f"{set(found)} instead of {expected}"


# --- a session that changes its worker, and a master that is lost ----------------------------------------------------


class Server:
    def __init__(self, process: Process, port: int) -> None:
        self.process, self._url = process, f"http://127.0.0.1:{port}"

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self._url + path, timeout=10) as answer:
            return json.load(answer)

    def post(self, path: str, body: object) -> Any:
        request = urllib.request.Request(
            self._url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)

    def chat(self, messages: list[dict[str, str]], max_tokens: int = 8) -> dict[str, Any]:
        body = {"model": "smollm2", "messages": messages, "max_tokens": max_tokens, "temperature": 0}
        began_s = time.perf_counter()
        usage: dict[str, Any] = self.post("/v1/chat/completions", body)["usage"]
        return {**usage, "seconds": time.perf_counter() - began_s}

    def tier_states(self) -> list[str]:
        engines = self.get("/api/ps")["engines"]
        return [tier.get("state", "ok") for engine in engines for tier in engine["load"].get("tiers", ())]

    def master_pid(self) -> int:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError, ValueError):
                words = path.read_bytes().split(b"\0")
                if words[0].endswith(b"/mooncake_master") and _descends(int(path.parent.name), self.process.pid):
                    return int(path.parent.name)
        return 0


def _descends(pid: int, ancestor: int) -> bool:
    while pid > 1 and pid != ancestor:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid == ancestor


@contextlib.contextmanager
def serving(models: Path, log: Path) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as text:
        home, port = Path(text), free_port()
        (home / "models").symlink_to(models)
        flags = ("--port", str(port), "--data-dir", text, "--replicas", "2", "--kv-bytes", "400M")
        command = [sys.executable, "-m", "emberline.cli.main", "serve", "smollm2", *flags, "--kv-store", "mooncake"]
        with Process(command, log, {"EMBERLINE_KV_POOL_BYTES": "512M"}) as process:
            server = Server(process, port)

            def is_ready() -> bool:
                process.check()
                with contextlib.suppress(OSError):
                    return bool(server.get("/health"))
                return False

            wait_until(is_ready, 300)
            wait_until(lambda: server.tier_states() == ["ok", "ok"], 60)
            yield server


def conversation(seed: int, n_tokens: int) -> list[dict[str, str]]:
    words = " ".join(f"item{seed}x{at} is {at * 7 % 13}." for at in range(n_tokens // 11))
    return [{"role": "system", "content": words}, {"role": "user", "content": "Say hi."}]


def continued(server: Server, n_tokens: int) -> dict[str, Any]:
    """One worker computes a session, another one continues it."""
    messages = conversation(0, n_tokens)
    first = server.chat(messages)
    written = {engine["name"]: engine["load"]["prompt_tokens"] for engine in server.get("/api/ps")["engines"]}
    home = max(written, key=lambda name: written[name])
    least = first["prompt_tokens"] // BLOCK_TOKENS * SHAPES["SmolLM2-135M"].block_bytes
    with contextlib.suppress(TimeoutError):  # an idle worker may not report its last blocks
        wait_until(lambda: _pool_bytes(server) >= least, 5)
    server.post("/api/workers/drain", {"name": home})
    second = server.chat([*messages, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "And bye?"}])
    server.post("/api/workers/undrain", {"name": home})
    from_pool = second["prompt_tokens_details"].get("cached_tokens_by_tier", {}).get("pool", 0)
    return {
        "prompt_tokens": second["prompt_tokens"],
        "from_pool": from_pool,
        "share_from_pool": from_pool / second["prompt_tokens"],
        "computed_s": first["seconds"],
        "continued_s": second["seconds"],
    }


def _pool_bytes(server: Server) -> int:
    engines = server.get("/api/ps")["engines"]
    return max((tier.get("written_bytes", 0) for e in engines for tier in e["load"].get("tiers", ())), default=0)


def master_lost(server: Server, how: signal.Signals, seed: int) -> dict[str, Any]:
    """Requests of several sessions run while the master is killed or stopped, and until the pool is back."""
    stop = threading.Event()
    done: list[float] = []
    failed: list[str] = []

    def ask(number: int) -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            try:
                done.append(server.chat(conversation(seed + 10 * number + turn % 2, 300), 4)["seconds"])
            except (OSError, ValueError) as error:
                failed.append(str(error))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(done) >= 2, 300)
    pid = server.master_pid()
    os.kill(pid, how)
    began_s = time.perf_counter()
    wait_until(lambda: any(state != "ok" for state in server.tier_states()), 120)
    noticed_s = time.perf_counter() - began_s
    wait_until(lambda: server.master_pid() not in (0, pid) and server.tier_states() == ["ok", "ok"], 180)
    back_s = time.perf_counter() - began_s
    stop.set()
    for thread in threads:
        thread.join()
    return {
        "noticed_s": noticed_s,
        "back_s": back_s,
        "requests": len(done),
        "failed": len(failed),
        "slowest_s": max(done),
    }


def wait_until(condition: Callable[[], object], limit_s: float) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(f"not within {limit_s:g} s")
        time.sleep(0.05)


# --- report ----------------------------------------------------------------------------------------------------------


def table(figures: dict[str, Any]) -> str:
    lines = []
    if rates := figures.get("bandwidth"):
        lines += ["| shape | write | put_from | ratio | read | get_into | ratio |", "|---|---|---|---|---|---|---|"]
        for name, row in rates.items():
            cells = [f"{row[key] / 1e9:.2f} GB/s" for key in ("write", "put", "read", "get")]
            ratios = [f"{row[key]:.2f}" for key in ("write_ratio", "read_ratio")]
            lines.append("| " + " | ".join((name, *cells[:2], ratios[0], *cells[2:], ratios[1])) + " |")
    if session := figures.get("session"):
        share = f"{session['from_pool']} of {session['prompt_tokens']} tokens ({session['share_from_pool']:.3f})"
        lines.append(f"\nA session on another worker: {share} from the pool, {session['continued_s']:.1f} s")
    for how, row in figures.get("master", {}).items():
        facts = f"{row['failed']} of {row['requests']} requests failed, the slowest took {row['slowest_s']:.1f} s"
        lines.append(f"Master {how}: {facts}; noticed after {row['noticed_s']:.1f} s, back after {row['back_s']:.1f} s")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_pool", description=__doc__)
    parser.add_argument("--only", choices=("bandwidth", "session"))
    parser.add_argument("--mib", type=int, default=512, help="through the pool, of each shape")
    parser.add_argument("--tokens", type=int, default=3000, help="of the session")
    parser.add_argument("--home", type=Path, default=home_dir(os.environ), help="data folder with the default model")
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir()) / "kv_pool.log")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    if args.only != "session":
        figures["bandwidth"] = asyncio.run(bandwidth(args.mib << 20))
    if args.only != "bandwidth":
        with serving(args.home / "models", args.log) as server:
            figures["session"] = continued(server, args.tokens)
            figures["master"] = {
                "killed": master_lost(server, signal.SIGKILL, 100),
                "stopped": master_lost(server, signal.SIGSTOP, 200),
            }
    figures["targets"] = TARGETS
    print(json.dumps(figures, indent=1))
    print(table(figures))
    if args.out is not None:
        args.out.write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
