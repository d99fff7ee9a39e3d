"""Beyond one cluster: what a core must hold and hear when thousands of workers are behind it.

    python -m benchmarks.scale [--only index,events,heartbeats,join,regions]

4,000 GPUs in 20 regions behind 200 cores, unless flags say otherwise. The index, the frames and the announcements are
the production code's own; only the fleet is arithmetic. `regions` runs the simulator: what a session's next turn costs
where another region computes it. docs/design/scale.md has the figures and what follows from them.
"""

import argparse
import gc
import json
import resource
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from emberline.balancer.prefix_index import FleetPrefixIndex
from emberline.protocol import member as members
from emberline.protocol.block_hash import BLOCK_TOKENS, DIGEST_BYTES
from emberline.protocol.events import TokenDelta
from emberline.protocol.frames import (
    DeviceUse,
    EngineLoad,
    Heartbeat,
    KVEvents,
    Step,
    StepCost,
    decode,
    encode,
    from_engine_decoder,
)
from emberline.simulator import coefficients
from emberline.simulator.experiment import SimulationConfig
from emberline.simulator.simulation import simulate
from emberline.simulator.trace_sources import open_trace

BATCH_BLOCKS = 512  # of one KV event: a chunk of 8,192 tokens
REPORTS_PER_S = 5.0  # of a busy worker to each subscriber


def index(options: argparse.Namespace) -> dict[str, Any]:
    """Memory and time of the prefix index, with as many blocks as `--blocks` says, spread over slots of workers."""
    n_slots = options.gpus // max(1, options.gpus_per_worker)
    found = FleetPrefixIndex(1 << 40)
    slots = [found.take_slot() for _ in range(n_slots)]
    batches = [(slots[n % n_slots], secrets.token_bytes(BATCH_BLOCKS * DIGEST_BYTES)) for n in range(64)]
    gc.collect()
    before, began_s = _rss(), time.process_time()
    n_added = 0
    while n_added < options.blocks:
        found.stored(slots[(n_added // BATCH_BLOCKS) % n_slots], secrets.token_bytes(BATCH_BLOCKS * DIGEST_BYTES))
        n_added += BATCH_BLOCKS
    added_s = time.process_time() - began_s
    entry_bytes = (_rss() - before) / n_added
    for slot, keys in batches:
        found.stored(slot, keys)
    began_s = time.process_time()
    for _, keys in batches:
        found.match(keys)
    match_s = (time.process_time() - began_s) / len(batches)
    kv_blocks = options.gpus * options.kv_tokens // BLOCK_TOKENS
    cluster_blocks = kv_blocks // options.regions
    return {
        "slots": n_slots,
        "entry_bytes": round(entry_bytes, 1),
        "stored_us_per_block": round(1e6 * added_s / n_added, 3),
        "match_us_for_8192_tokens": round(1e6 * match_s, 1),
        "device_blocks_of_all": kv_blocks,
        "index_gib_of_all": round(kv_blocks * entry_bytes / (1 << 30), 1),
        "index_gib_of_a_region": round(cluster_blocks * entry_bytes / (1 << 30), 2),
    }


def _rss() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def events(options: argparse.Namespace) -> dict[str, Any]:
    """KV events per second, and what a core spends to decode and index them."""
    blocks_per_s = options.prompt_tokens_per_s / BLOCK_TOKENS
    frame = encode(KVEvents(secrets.token_bytes(BATCH_BLOCKS * DIGEST_BYTES), b""))
    found = FleetPrefixIndex(1 << 40)
    slot, n = found.take_slot(), 200
    frames = [encode(KVEvents(secrets.token_bytes(BATCH_BLOCKS * DIGEST_BYTES), b"")) for _ in range(n)]
    began_s = time.process_time()
    for each in frames:
        message = decode(from_engine_decoder, each[4:])
        assert isinstance(message, KVEvents)
        found.stored(slot, message.stored)
    block_s = (time.process_time() - began_s) / (n * BATCH_BLOCKS)
    each_worker = 2 * blocks_per_s * len(frame) / BATCH_BLOCKS  # stored, and as many removed once the cache is full
    n_workers = options.gpus // options.gpus_per_worker
    return {
        "bytes_per_block": round(len(frame) / BATCH_BLOCKS, 1),
        "blocks_per_s_of_a_worker": round(blocks_per_s, 1),
        "mb_per_s_into_a_core_from_all": round(n_workers * each_worker / 1e6, 2),
        "mb_per_s_into_a_core_from_a_region": round(n_workers / options.regions * each_worker / 1e6, 3),
        "mb_per_s_out_of_a_worker_to_all_cores": round(options.cores * each_worker / 1e6, 3),
        "core_busy_with_all": round(2 * n_workers * blocks_per_s * block_s, 3),
        "core_busy_with_a_region": round(2 * n_workers * blocks_per_s * block_s / options.regions, 4),
    }


def heartbeats(options: argparse.Namespace) -> dict[str, Any]:
    """Heartbeats and load reports: bytes, frames per second, and the share of a core's processor they take."""
    load = EngineLoad(
        running=64,
        kv_used_blocks=40_000,
        kv_total_blocks=55_000,
        steps=123_456,
        prompt_tokens=10**9,
        output_tokens=10**8,
        utilisation=0.97,
        busy_s=12_345.6,
        step_cost=StepCost(0.004, 1e-5, 3e-8, 2e-5, 1e-9, 10_000, 0.04),
        device=DeviceUse(100 << 30, 139 << 30, 610.0, 700.0),
    )
    report = encode(Step([], load))
    with_token = encode(Step([TokenDelta("r" * 32, b"\0\0\0\0")], load))
    beat = encode(Heartbeat(computed_tokens=10**9, in_step=True, step_s=0.02))
    n = 5000
    began_s = time.process_time()
    for _ in range(n):
        decode(from_engine_decoder, report[4:])
        decode(from_engine_decoder, beat[4:])
    pair_s = (time.process_time() - began_s) / n
    n_workers = options.gpus // options.gpus_per_worker
    links = n_workers * options.cores
    return {
        "report_bytes": len(report),
        "report_bytes_with_one_token": len(with_token),
        "heartbeat_bytes": len(beat),
        "connections_of_all": links,
        "connections_by_region": links // options.regions,
        "frames_per_s_into_a_core_from_all": round(n_workers * (1 + REPORTS_PER_S)),
        "frames_per_s_into_a_core_from_a_region": round(n_workers / options.regions * (1 + REPORTS_PER_S)),
        "decoding_share_of_a_core_from_all": round(n_workers * (1 + REPORTS_PER_S) * pair_s / 2, 4),
        "frames_per_s_out_of_a_worker_to_all_cores": round(options.cores * (1 + REPORTS_PER_S)),
    }


def join(options: argparse.Namespace) -> dict[str, Any]:
    """A region returns: all its workers announce themselves at once, and every core dials them."""
    key = secrets.token_bytes(32)
    said = members.Announcement(
        challenge=secrets.token_hex(32),
        name="worker-0001",
        instance=secrets.token_hex(16),
        address="tcp:10.0.0.1:9000",
        role="both",
        model="kimi-k2.5",
        fingerprint=secrets.token_hex(16),
        version=6,
        node="gpu-host-0001",
        device="cuda:0",
        is_tls=True,
    )
    signed = members.sign(key, said)
    n = 2000
    began_s = time.process_time()
    for _ in range(n):
        members.verified(key, signed, members.Announcement, "no")
    verify_s = (time.process_time() - began_s) / n
    n_workers = options.gpus // options.gpus_per_worker // options.regions
    n_cores = options.cores // options.regions
    blocks = options.kv_tokens // BLOCK_TOKENS * options.gpus_per_worker
    frame = len(encode(KVEvents(secrets.token_bytes(BATCH_BLOCKS * DIGEST_BYTES), b""))) / BATCH_BLOCKS
    return {
        "workers_of_a_region": n_workers,
        "announcement_bytes": len(msgspec.json.encode(signed)),
        "verify_us": round(1e6 * verify_s, 1),
        "announcements_per_s_while_all_is_well": round(options.gpus / options.gpus_per_worker / 10.0, 1),
        "rows_written_at_once": n_workers,
        "dials_by_cores_of_the_region": n_workers * n_cores,
        "dials_by_all_cores": n_workers * options.cores,
        "snapshot_mb_of_a_worker": round(blocks * frame / 1e6, 2),
        "snapshots_gb_into_a_core_of_the_region": round(n_workers * blocks * frame / 1e9, 3),
        "snapshots_gb_into_all_cores": round(n_workers * blocks * frame * options.cores / 1e9, 1),
    }


def regions(options: argparse.Namespace) -> dict[str, Any]:
    """Affinity between regions: sessions that stay in one of four regions, and sessions whose requests are spread.

    A region is four workers. Spread sessions are routed to the least loaded worker of all, whichever region it is in.
    """
    model = coefficients.load("h200-llama-8b")
    trace = open_trace("agents", 1, model.context_len)
    found = {}
    for name, workers, policy, load in (
        ("pinned_to_a_region", 4, "sticky", 0.004),
        ("one_index_over_all", 16, "sticky", 0.016),
        ("spread_over_regions", 16, "plain_least_loaded", 0.016),
    ):
        config = SimulationConfig(
            model=model, load=load, workers=workers, policy=policy, warmup_s=options.seconds / 2,
            measured_s=options.seconds, session_affinity=policy == "sticky",
        )  # fmt: skip
        figures = simulate(trace, config).figures()
        found[name] = {key: figures[key] for key in ("hit_ratio", "ttft_p90_s", "token_p90_ms", "busy", "requests")}
    return found


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "index": index,
    "events": events,
    "heartbeats": heartbeats,
    "join": join,
    "regions": regions,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--only", default=",".join(PARTS), metavar="LIST", help=f"parts, of {', '.join(PARTS)}")
    add("--gpus", type=int, default=4000, metavar="N")
    add("--gpus-per-worker", type=int, default=8, metavar="N", help="ranks of a worker (default 8)")
    add("--regions", type=int, default=20, metavar="N")
    add("--cores", type=int, default=200, metavar="N")
    add("--kv-tokens", type=int, default=73_000, metavar="N", help="on a GPU: Kimi K2.5 on H100s (default 73,000)")
    add("--prompt-tokens-per-s", type=float, default=2000.0, metavar="N", help="computed by a worker (default 2,000)")
    add("--blocks", type=int, default=1 << 20, metavar="N", help="entries of the measured index (default 1 Mi)")
    add("--seconds", type=float, default=300.0, metavar="S", help="measured by the simulator (default 300)")
    options = parser.parse_args(argv)
    for part in options.only.split(","):
        if part not in PARTS:
            parser.error(f"there is no part {part!r}: {', '.join(PARTS)}")
        print(json.dumps({part: PARTS[part](options)}, indent=1), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
