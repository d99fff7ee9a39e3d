"""KV cache tiers on one GPU: `python -m benchmarks.gpu.kv_tiers [--folder DIR] [--only copy,disk,served,plain]`.

Llama-8B's shape with random weights. `copy`: whole blocks between scattered slots of pinned memory and scattered blocks
of the device, against one large copy in the same run. `disk`: blocks from the disk tier to the device, with fetching
forced, against the drive's direct-read rate. `served`: sessions of 32k tokens, more than the device pool holds, return
to a worker, alone and beside 32 streams, and throughput with a host tier. `plain`: throughput without. `ranks`, only if
asked for: the same sessions return to a worker of one rank and to one of two ranks that share the GPU, under MPS.
"""

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks.gpu.engine import Reply, Worker, wait_until_prepared, worker
from benchmarks.gpu.model_files import LLAMA_8B
from benchmarks.gpu.rank_processes import ONE_GPU, multi_process_service
from emberline.protocol import block_hash
from emberline.protocol.block_hash import KVGroup
from emberline.protocol.request import EngineRequest, SamplingParams
from emberline.protocol.token_ids import pack

GROUP = KVGroup("full", tuple(range(32)), kv_heads=8, head_dim=128, dtype="bfloat16")
N_TOKENS = 32_768
N_STREAMS = 32
N_SESSIONS = 5
POOL_TOKENS = 120_000
HOST_BYTES = 28 << 30  # less than is written before streams are timed: no more is pinned then
SECTIONS = ("copy", "disk", "served", "plain")
LIMIT_S = 15.0  # of a part that hangs
RANDOM = ("--random-weights", "1")


def main() -> int:
    args = _parse()
    args.work.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {}
    sections: dict[str, Callable[[], dict[str, Any]]] = {
        "copy": copies,
        "disk": lambda: from_disk(args),
        "served": lambda: served(args),
        "plain": lambda: plain(args),
        "ranks": lambda: ranks(args),
    }
    for name in args.only:
        began_s = time.perf_counter()
        try:
            figures[name] = sections[name]()
        except Exception as error:  # device time is expensive: the other sections still run
            figures[name] = {"failed": f"{type(error).__name__}: {error}"}
        figures[name]["took_s"] = round(time.perf_counter() - began_s, 1)
        print(json.dumps({name: figures[name]}), flush=True)
    print(table(figures))
    if args.out is not None:
        args.out.write_text(json.dumps(figures, indent=1))
    if "served" in figures and "plain" in figures:
        print("saving:", figures["served"].get("with_tier_tok_s"), "of", figures["plain"].get("without_tier_tok_s"))
    return int(any("failed" in found for found in figures.values()))


def copies() -> dict[str, Any]:
    """The mover alone, without a model; every block is compared."""
    import torch

    from emberline.engine.runners.gpu.tiers import CudaMover, PinnedAllocator
    from emberline.kv.tiers.host import HostTier
    from emberline.kv.tiers.mover import BlockCopy

    n_blocks = N_TOKENS // 16
    pool = torch.randint(-(2**31), 2**31 - 1, (n_blocks + 1, GROUP.block_bytes // 4), dtype=torch.int32, device="cuda")
    before = pool.clone()
    host = HostTier((n_blocks + 256) * GROUP.block_bytes, [GROUP.block_bytes], allocate=PinnedAllocator("cuda"))
    began_s = time.perf_counter()
    host.allocate_all()
    pinned_s = time.perf_counter() - began_s
    mover = CudaMover([pool], [GROUP])
    rng = random.Random(1)
    blocks = rng.sample(range(1, n_blocks + 1), n_blocks)
    slots = host.take(GROUP.block_bytes, n_blocks)
    rng.shuffle(slots)
    wanted = [BlockCopy(0, block, slot) for block, slot in zip(blocks, slots)]
    batches = [wanted[at : at + 16] for at in range(0, len(wanted), 16)]

    def run(copy: Callable[[Any], Any]) -> float:
        """Bytes per second, with two batches in flight, as the loader has them."""
        began_s, before = time.perf_counter(), None
        for batch in batches:
            ticket = copy(batch)
            if before is not None:
                before.wait()
            before = ticket
        before.wait()
        return n_blocks * GROUP.block_bytes / (time.perf_counter() - began_s)

    def plain(to_device: bool) -> float:
        large = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        best = 0.0
        for _ in range(4):
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            (there if to_device else large).copy_(large if to_device else there, non_blocking=True)
            torch.cuda.synchronize()
            best = max(best, (1 << 30) / (time.perf_counter() - began_s))
        return best

    saved = max(run(mover.save) for _ in range(3))
    pool.zero_()
    torch.cuda.synchronize()
    loaded = max(run(mover.load) for _ in range(3))
    h2d, d2h = plain(True), plain(False)
    return {
        "identical": bool(torch.equal(pool[1:], before[1:])),
        "load_gbs": round(loaded / 1e9, 1),
        "save_gbs": round(saved / 1e9, 1),
        "plain_h2d_gbs": round(h2d / 1e9, 1),
        "plain_d2h_gbs": round(d2h / 1e9, 1),
        "load_share": round(loaded / h2d, 3),
        "pinned_gbs": round(n_blocks * GROUP.block_bytes / pinned_s / 1e9, 2),
    }


def served(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    log = args.work / "tiers.log"
    with worker(_model(args.work), log, *RANDOM, *_pool(POOL_TOKENS), "--kv-host-bytes", str(HOST_BYTES)) as engine:
        warm_up(engine, log)
        tell(found, "with_tier_tok_s", throughput(engine))
        tell(found, "sessions", returning(engine))
        tell(found, "beside_streams", beside_streams(engine))
        engine.client.generate([[7] * 40], 2)
        tell(found, "tiers", [msgspec.to_builtins(each) for each in engine.client.load.tiers])
    return found


def plain(args: argparse.Namespace) -> dict[str, Any]:
    """The same worker without a tier."""
    log = args.work / "plain.log"
    with worker(_model(args.work), log, *RANDOM, *_pool(POOL_TOKENS)) as engine:
        warm_up(engine, log)
        return {"without_tier_tok_s": throughput(engine)}


def ranks(args: argparse.Namespace) -> dict[str, Any]:
    """TTFT of sessions that return to one rank and to two, and what these do to other streams."""
    found: dict[str, Any] = {}
    flags = (*RANDOM, *_pool(POOL_TOKENS), "--kv-host-bytes", str(HOST_BYTES), "--memory-share", "0.45")
    with multi_process_service() as together:
        found["mps"] = together
        for name, layout in (("one", ()), ("two", ("--tp", "2"))):
            log = args.work / f"ranks-{name}.log"
            with worker(_model(args.work), log, *flags, *layout, env=ONE_GPU) as engine:
                warm_up(engine, log)
                tell(found, f"{name}: sessions", returning(engine))
                tell(found, f"{name}: beside streams", beside_streams(engine))
    one, two = (found[f"{name}: sessions"]["fetched_ttft_s"] for name in ("one", "two"))
    if one and two:
        found["fetched_ttft_ratio"] = round(two / one, 3)
    return found


def tell(found: dict[str, Any], name: str, value: Any) -> None:
    """Print as it goes: device time may end at any moment."""
    found[name] = value
    print(json.dumps({name: value}), flush=True)


def warm_up(engine: Worker, log: Path) -> None:
    """The kernels and CUDA graphs that are needed: requests that come one after the other leave no time to capture any,
    and steps are padded to up to four times their size meanwhile."""
    wait_until_prepared(engine, log)
    engine.client.generate([prompt_of(2000, N_TOKENS)], 4)
    engine.client.generate([prompt_of(3000 + n, 200) for n in range(N_STREAMS + 1)], 16)
    throughput(engine, 64)


def throughput(engine: Worker, n_out: int = 192) -> int:
    """Tokens per second of prompts and replies together."""
    first = 10_000 + engine.client.load.steps
    took_s, replies = engine.client.generate([prompt_of(first + n, 1024) for n in range(64)], n_out)
    return round(sum(reply.n_prompt + len(reply.tokens) for reply in replies) / took_s)


def session(engine: Worker, seed: int) -> EngineRequest:
    """A request of N_TOKENS with content keys, as the core sends them."""
    ids = pack(prompt_of(seed, N_TOKENS))
    keys = block_hash.chain(block_hash.root(engine.client.info.fingerprint, b""), ids)
    sampling = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.0, seed=1)
    return EngineRequest(id=f"s{time.perf_counter_ns()}", prompt_ids=ids, sampling=sampling, keys=keys)


def returning(engine: Worker) -> dict[str, Any]:
    """TTFT of new sessions, more than the device pool holds, and of the same ones when they return. What they draw
    then is compared with what the step that only computes their last block draws from the device pool, as they were
    computed: a step of another size rounds otherwise."""
    client = engine.client

    def ask(seed: int) -> Reply:
        reply = client.begin(session(engine, seed))
        client.run()
        return reply

    fresh, computed, again = [], [], []
    for seed in range(N_SESSIONS):
        fresh.append(ask(seed))
        computed.append(ask(seed))
    for seed in range(N_SESSIONS):
        again.append(ask(seed))
    fetched = [reply for reply in again if reply.by_tier.get("host", 0) > 0.9 * N_TOKENS]
    same = [one.tokens == other.tokens for one, other in zip(again, computed, strict=True)]
    return {
        "recomputed_ttft_s": round(median(reply.ttft_s for reply in fresh), 4),
        "fetched_ttft_s": round(median(reply.ttft_s for reply in fetched), 4) if fetched else None,
        "all_s": [(round(reply.ttft_s, 4), reply.by_tier) for reply in again],
        "same_tokens": all(same),
        "as_in_one_step": all(one.tokens == other.tokens for one, other in zip(computed, fresh, strict=True)),
    }


def beside_streams(engine: Worker) -> dict[str, Any]:
    """Inter-token p99 of 32 streams: alone, while sessions hit the device pool, and while they are fetched. Their
    requests are made before: meanwhile this process would not see the streams' tokens."""
    client = engine.client
    gaps: dict[str, list[float]] = {}
    ttfts: dict[str, list[Any]] = {}
    for name, seeds in (("alone", ()), ("device", (0,) * 6), ("fetched", (1, 2, 3, 4, 1, 2))):
        if name == "device":
            client.begin(session(engine, 0))
            client.run()
        sessions = [session(engine, seed) for seed in seeds]
        streams = client.submit([prompt_of(500 + n, 200) for n in range(N_STREAMS)], 500)
        client.run(time.perf_counter() + 0.6)
        began_s = time.perf_counter()
        for request in sessions:
            reply = client.begin(request)
            while reply.finish is None:
                client.run(time.perf_counter() + 0.005)
            ttfts.setdefault(name, []).append((round(reply.ttft_s, 3), reply.by_tier))
            client.run(time.perf_counter() + 0.1)
        if not sessions:
            client.run(time.perf_counter() + 1.0)
        ended_s = time.perf_counter()
        client.run()
        for stream in streams:
            times = [at for at in stream.times_s if began_s <= at <= ended_s]
            gaps.setdefault(name, []).extend(b - a for a, b in pairwise(times))
    p99 = {name: 1e3 * sorted(values)[int(0.99 * len(values))] for name, values in gaps.items() if values}
    p50 = {name: 1e3 * median(values) for name, values in gaps.items() if values}
    longest = {name: sorted(values)[-1 : -12 * N_STREAMS : -N_STREAMS] for name, values in gaps.items()}
    return {
        "itl_p99_ms": {name: round(value, 2) for name, value in p99.items()},
        "itl_p50_ms": {name: round(value, 2) for name, value in p50.items()},
        "longest_steps_ms": {name: [round(1e3 * gap, 1) for gap in values] for name, values in longest.items()},
        "p99_ratio": {name: round(p99["fetched"] / p99[name], 3) for name in ("alone", "device") if name in p99},
        "ttft_s": ttfts,
    }


def from_disk(args: argparse.Namespace) -> dict[str, Any]:
    """The tiers' own path from the drive to the device, without a model: fetching is forced."""
    import torch

    from benchmarks.kv_disk import plain_rate
    from emberline.engine.runners.gpu.tiers import CudaMover, PinnedAllocator
    from emberline.kv.tiers.disk.disk_tier import DiskTier
    from emberline.kv.tiers.host import HostTier
    from emberline.kv.tiers.manager import TierManager
    from emberline.kv.tiers.messages import BlocksFetched, Saved, SavedBlock, WantedBlock
    from emberline.kv.tiers.orders import Save
    from emberline.kv.tiers.tier import BlockId, BlockMeta, layout_tag

    n_blocks = args.disk_tokens // 16
    n_bytes = n_blocks * GROUP.block_bytes
    pool = torch.randint(-(2**31), 2**31 - 1, (n_blocks + 1, GROUP.block_bytes // 4), dtype=torch.int32, device="cuda")
    before = pool.clone()
    with tempfile.TemporaryDirectory(dir=args.folder) as text:
        folder = Path(text)
        plain_rate(folder, n_bytes, os.pwritev, 8)
        plain = max(plain_rate(folder, n_bytes, os.preadv, n_threads) for n_threads in (1, 8))
        (folder / "plain").unlink(missing_ok=True)
        disk = DiskTier(folder / "tier", [GROUP], n_bytes + (1 << 30), b"k" * 32)
        host = HostTier(512 << 20, [GROUP.block_bytes], keep=False, allocate=PinnedAllocator("cuda"))
        manager = TierManager([GROUP], CudaMover([pool], [GROUP]), host, [disk], 25e9)
        ids = [BlockId(n.to_bytes(16, "little"), layout_tag(GROUP)) for n in range(n_blocks)]
        began_s, unsaved = time.perf_counter(), 0
        for at in range(0, n_blocks, 16):
            part = range(at, min(at + 16, n_blocks))
            blocks = [SavedBlock(0, n + 1, ids[n].key, BlockMeta(b"o" * 16, position=n)) for n in part]
            manager.execute([Save(at, blocks)])
            unsaved += len(blocks)
            while manager.max_saving - unsaved * GROUP.block_bytes < (64 << 20):
                unsaved -= sum(16 for each in manager.reports() if isinstance(each, Saved))
                if time.perf_counter() - began_s > LIMIT_S:
                    break
                time.sleep(0.001)
        while not all(disk.holds(ids)) and time.perf_counter() - began_s < LIMIT_S:
            manager.reports()
            time.sleep(0.01)
        saved_s = time.perf_counter() - began_s
        held = torch.tensor(disk.holds(ids), device="cuda")  # a tier may drop blocks that come too fast
        pool.zero_()
        torch.cuda.synchronize()
        rates = []
        for number in range(2):
            began_s, n_done, missing = time.perf_counter(), 0, 0
            manager.fetch(
                number,
                [
                    WantedBlock((0, n), n + 1, ids[n].key, BlockMeta(b"o" * 16, position=n), "disk")
                    for n in range(n_blocks)
                ],
            )
            while n_done < n_blocks and time.perf_counter() - began_s < LIMIT_S:
                for each in manager.reports():
                    if isinstance(each, BlocksFetched):
                        n_done += len(each.fetched) + len(each.missing)
                        missing += len(each.missing)
                time.sleep(0.0005)
            rates.append(n_bytes / (time.perf_counter() - began_s))
            manager.cancel(number)
        manager.close()
    return {
        "identical": bool(torch.equal(pool[1:][held], before[1:][held])),
        "state": disk.stats().state,
        "held": int(held.sum()),
        "missing": missing,
        "plain_read_gbs": round(plain / 1e9, 2),
        "fetch_gbs": round(max(rates) / 1e9, 2),
        "share": round(max(rates) / plain, 3),
        "save_gbs": round(n_bytes / saved_s / 1e9, 2),
    }


def prompt_of(seed: int, n_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 100_000) for _ in range(n_tokens)]


def _pool(n_tokens: int) -> tuple[str, ...]:
    return "--kv-bytes", str(n_tokens // 16 * GROUP.block_bytes)


def _model(work: Path) -> Path:
    """A folder with a configuration and no weights."""
    folder = work / "llama-8b-config"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    return folder


def table(figures: dict[str, Any]) -> str:
    lines = ["| figure | value |", "|---|---|"]
    for section, found in figures.items():
        lines += [f"| {section}: {name} | {value} |" for name, value in found.items()]
    return "\n".join(lines)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.kv_tiers", description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("/tmp/emberline-gpu"), help="for logs and generated files")
    parser.add_argument("--folder", type=Path, help="on the drive to measure; default: that of temporary files")
    parser.add_argument("--disk-tokens", type=int, default=N_TOKENS)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(SECTIONS), help=", ".join(SECTIONS))
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
