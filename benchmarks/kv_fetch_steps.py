"""What a returning session costs the step loop: `python -m benchmarks.kv_fetch_steps [--tokens 32768] [--streams 32]`.

The engine's own scheduler, tiers and threads on a CPU, with a device that computes and copies nothing and takes its
time: Llama-8B's blocks at an H200's rates. A session that was evicted from the device pool returns while others decode,
and once more while it is still there. For every step the time of its thread is taken, without that in which it waits
for the device: in steps during a fetch, or while the prefix is looked up; in the one that admits the session; in those
until it has ended; and in those without it. The request's frame counts for the step behind it.
"""

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from emberline.engine.core.limits import Limits
from emberline.engine.core.plan import Masks, StepPlan
from emberline.engine.core.step_loop import StepLoop
from emberline.engine.worker.build import build_scheduler
from emberline.engine.worker.process import SWITCH_INTERVAL_S
from emberline.kv.cache import KVCache
from emberline.kv.tiers.group_tiers import GroupTiers
from emberline.kv.tiers.host import HostTier
from emberline.kv.tiers.manager import TierManager
from emberline.kv.tiers.mover import BlockCopy
from emberline.protocol import block_hash, frames
from emberline.protocol.block_hash import KVGroup
from emberline.protocol.request import EngineRequest, SamplingParams
from emberline.protocol.token_ids import pack

GROUP = KVGroup("full", tuple(range(32)), kv_heads=8, head_dim=128, dtype="bfloat16")
STEP_S = 0.005  # of 32 sequences that decode
PREFILL_RATE = 28_000.0  # tokens per second
COPY_RATE = 45e9  # bytes per second
FINGERPRINT = "standin"
KINDS = ("without", *(f"{kind}: {part}" for kind in ("host", "device") for part in ("before", "admission", "after")))


@dataclass(slots=True, frozen=True)
class Draw:
    token_id: int
    logprob: float | None = None
    top: Sequence[tuple[int, float]] = ()


class Device:
    """Computes one plan after the other; whoever wants a result sleeps until it is due."""

    def __init__(self) -> None:
        self._free_s = 0.0
        self.waited_s = 0.0

    def launch(self, plan: StepPlan) -> "Result":
        n_prompt = plan.n_tokens - len(plan.rows)
        self._free_s = max(time.perf_counter(), self._free_s) + STEP_S + n_prompt / PREFILL_RATE
        return Result(self, self._free_s, [Draw(7) for row in plan.rows if row.samples])

    def wait(self, until_s: float) -> None:
        began_s = time.perf_counter()
        time.sleep(max(0.0, until_s - began_s))
        self.waited_s += time.perf_counter() - began_s


@dataclass(slots=True)
class Result:
    device: Device
    at_s: float
    draws: list[Draw]

    def sample(self, masks: Masks | None = None) -> None:
        """It is."""

    def result(self) -> list[Draw]:
        self.device.wait(self.at_s)
        return self.draws

    def drafts(self) -> list[bytes]:
        return []


class Copies:
    """A `BlockMover` that copies nothing, at the rate of the copy engines."""

    def __init__(self) -> None:
        self._free_s = {"load": 0.0, "save": 0.0}

    def load(self, copies: Sequence[BlockCopy]) -> "Copied":
        return self._begin("load", copies)

    def save(self, copies: Sequence[BlockCopy]) -> "Copied":
        return self._begin("save", copies)

    def _begin(self, direction: str, copies: Sequence[BlockCopy]) -> "Copied":
        took_s = len(copies) * GROUP.block_bytes / COPY_RATE
        self._free_s[direction] = max(time.perf_counter(), self._free_s[direction]) + took_s
        return Copied(self._free_s[direction])


@dataclass(slots=True)
class Copied:
    at_s: float

    def wait(self) -> None:
        time.sleep(max(0.0, self.at_s - time.perf_counter()))


class Engine:
    """A step loop with a host tier that holds all sessions, and a device pool that does not."""

    def __init__(self, n_tokens: int, n_streams: int, n_sessions: int) -> None:
        n_blocks = 2 * n_tokens // 16 + n_streams * 64 + 512
        self.cache = KVCache([GROUP], [n_blocks], chunk=2048)
        host = HostTier((n_sessions + 1) * (n_tokens // 16 + 64) * GROUP.block_bytes, [GROUP.block_bytes])
        self.tiers = GroupTiers(TierManager([GROUP], Copies(), host, [], COPY_RATE))
        limits = Limits(n_tokens + 2048, 128_000, (), n_streams + 1, 2048)
        self.device = Device()
        self.loop = StepLoop(build_scheduler(self.cache, limits, FINGERPRINT, tiers=self.tiers), self.device, 2)
        self.loop.kv_events().subscribe()
        self.usage: dict[str, dict[str, int]] = {}
        self.timed: set[str] = set()  # requests that had a token
        self.ended: set[str] = set()
        self._received = (0.0, 0.0)  # seconds on the clock and of the processor, before the next step

    def submit(self, name: str, prompt: tuple[bytes, bytes], n_out: int) -> None:
        ids, keys = prompt
        sampling = SamplingParams(max_tokens=n_out, ignore_eos=True, temperature=0.0, seed=1)
        request = EngineRequest(id=name, prompt_ids=ids, sampling=sampling, keys=keys, session=name.partition("#")[0])
        payload = frames.encode(frames.Submit([request]))[frames.LENGTH.size :]
        began_s, cpu_s = time.perf_counter(), time.thread_time()
        message = frames.decode(frames.to_engine_decoder, payload)
        assert isinstance(message, frames.Submit)
        self.loop.submit(message.requests[0], time.monotonic())
        self._received = time.perf_counter() - began_s, time.thread_time() - cpu_s

    def step(self) -> tuple[float, float, set[str]]:
        """Seconds on the clock and of the processor that the thread took, and who got a token."""
        waited_s, cpu_s, began_s = self.device.waited_s, time.thread_time(), time.perf_counter()
        deltas = self.loop.step(time.monotonic())
        took_s = time.perf_counter() - began_s - (self.device.waited_s - waited_s) + self._received[0]
        cpu_s = time.thread_time() - cpu_s + self._received[1]
        self._received = (0.0, 0.0)
        for delta in deltas:
            if delta.finish is not None:
                self.ended.add(delta.id)
            if delta.usage is not None:
                self.usage[delta.id] = dict(delta.usage.cached_by_tier)
        if self.loop.blocked:
            time.sleep(0.0005)
        return took_s, cpu_s, {delta.id for delta in deltas}

    def finish(self, name: str) -> None:
        while self.is_known(name):
            self.step()

    def is_known(self, name: str) -> bool:
        """True if the request was submitted and has not ended."""
        return name not in self.ended

    @property
    def fetching(self) -> bool:
        return bool(self.loop.scheduler.load().fetching)


def prompt_of(seed: int, n_tokens: int) -> tuple[bytes, bytes]:
    """Token ids and content keys, as the core sends them."""
    rng = random.Random(seed)
    ids = pack([rng.randrange(1000, 100_000) for _ in range(n_tokens)])
    return ids, block_hash.chain(block_hash.root(FINGERPRINT, b""), ids)


def main() -> int:
    args = _parse()
    sessions = [prompt_of(n, args.tokens) for n in range(4)]
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    engine = Engine(args.tokens, args.streams, 4)
    for n in range(4):
        engine.submit(f"session {n}#0", sessions[n], 2)
        engine.finish(f"session {n}#0")
    engine.tiers.own.flush()
    for n in range(args.streams):
        engine.submit(f"stream {n}", prompt_of(100 + n, 200), 2000)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in KINDS}
    ttfts: dict[str, list[float]] = {"host": [], "device": []}
    for _ in range(100):
        engine.step()
    gc.freeze()  # as a worker does
    for turn in range(args.repeat):
        for kind in ("host", "device"):
            for _ in range(30):
                times["without"].append(engine.step()[:2])
            name = f"session {turn % 4}#{turn + 1} {kind}"
            engine.submit(name, sessions[turn % 4], 2)
            began_s, admitted = time.perf_counter(), False
            while engine.is_known(name):
                running = engine.loop.load.running
                *taken, got = engine.step()
                admits = not admitted and engine.loop.load.running > running
                admitted = admitted or admits
                if name in got and name not in engine.timed:
                    engine.timed.add(name)
                    assert engine.usage[name].get(kind, 0) > 0.9 * args.tokens, "it is where it should be"
                    ttfts[kind].append(time.perf_counter() - began_s)
                part = "admission" if admits else "after" if admitted else "before"
                times[f"{kind}: {part}"].append((taken[0], taken[1]))
    engine.tiers.close()
    figures: dict[str, Any] = {name: summary(found) for name, found in times.items()}
    figures["ttft_s"] = {kind: round(median(found), 4) for kind, found in ttfts.items()}
    print(json.dumps(figures, indent=1))
    print(table(figures))
    if args.out is not None:
        args.out.write_text(json.dumps(figures, indent=1))
    return 0


def summary(found: list[tuple[float, float]]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    if not found:
        return {"steps": 0}
    for name, values in (("clock_ms", [each[0] for each in found]), ("processor_ms", [each[1] for each in found])):
        ordered = sorted(values)
        p = {f"p{q}": ordered[min(len(ordered) - 1, len(ordered) * q // 100)] for q in (50, 90, 99)}
        rows[name] = {key: round(1e3 * value, 3) for key, value in (p | {"max": ordered[-1]}).items()}
    return {"steps": len(found)} | rows


def table(figures: dict[str, Any]) -> str:
    lines = ["| steps | number | p50 | p90 | p99 | max | processor: p50 | p99 | max |", "|---|" + "---|" * 8]
    for name in (name for name in KINDS if figures[name]["steps"]):
        clock, cpu = figures[name]["clock_ms"], figures[name]["processor_ms"]
        values = [*clock.values(), cpu["p50"], cpu["p99"], cpu["max"]]
        lines.append(f"| {name} | {figures[name]['steps']} | " + " | ".join(f"{value:.2f}" for value in values) + " |")
    lines.append(f"\nTTFT of returning sessions, median seconds: {figures['ttft_s']}")
    return "\n".join(lines)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_fetch_steps", description=__doc__)
    parser.add_argument("--tokens", type=int, default=32_768, help="of the returning session")
    parser.add_argument("--streams", type=int, default=32, help="that decode meanwhile")
    parser.add_argument("--repeat", type=int, default=6)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
