"""The engine's scheduler and prefill policy in virtual time: bursts and steady loads of prompts beside running streams.

    python -m benchmarks.burst_rule

The scheduler, the planner and the latency target are those of the engine; a step takes what the fitted coefficients of
one H200 say. It shows what a rule of the prefill budget does to inter-token latency, TTFT and throughput.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from emberline.engine.core.latency_target import LatencyTarget
from emberline.engine.core.limits import Limits
from emberline.engine.core.plan import START, Draws, Masks, StepPlan
from emberline.engine.core.prefill_policy import StepWork
from emberline.engine.core.scheduler import Scheduler
from emberline.engine.core.step_loop import StepLoop
from emberline.engine.runners.gpu.shapes import GPU_SHAPES
from emberline.kv.cache import KVCache
from emberline.protocol.block_hash import KVGroup
from emberline.protocol.request import EngineRequest, SamplingParams
from emberline.protocol.token_ids import pack
from emberline.simulator import coefficients
from emberline.simulator.coefficients import Coefficients

HOST_S = 0.0003  # between a step's end and the moment at which clients have its tokens


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0


@dataclass
class Request:
    at_s: float
    n_in: int
    n_out: int
    times_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.at_s


class ModelledDevice:
    """A runner whose steps take modelled time: the device computes one after the other, the host waits for results."""

    def __init__(self, model: Coefficients, policy: LatencyTarget, clock: Clock) -> None:
        self._model, self._policy, self._clock = model, policy, clock
        self._free_s = 0.0

    def launch(self, plan: StepPlan) -> "ModelledStep":
        chunks = [row for row in plan.others if row.stop - row.start > 1]
        decodes = [row for row in plan.others if row.stop - row.start == 1]
        n_decodes = len(plan.columns) + len(decodes)
        context = int(plan.columns.cells[START].sum()) + sum(row.start for row in decodes)
        work = StepWork.of(n_decodes, chunks)
        model = self._model
        tokens = -(-(work.n_tokens + n_decodes) // model.tile) * model.tile if chunks else 0
        pairs = sum((row.end - row.start) * (row.start + row.end) / 2 for row in chunks)
        seconds = model.pair_s * pairs + model.context_s * context
        matmuls = model.step_s + model.row_s * n_decodes
        seconds += max(matmuls, model.token_s * tokens) if chunks else matmuls
        began_s = max(self._free_s, self._clock.now_s)
        self._free_s = began_s + seconds
        n_draws = sum(row.samples for row in plan.rows)
        return ModelledStep(self, work, seconds, self._free_s, n_draws)

    def done(self, step: "ModelledStep") -> None:
        self._clock.now_s = max(self._clock.now_s, step.done_s + HOST_S)
        self._policy.observe(step.work, step.seconds)


@dataclass
class ModelledStep:
    device: ModelledDevice
    work: StepWork
    seconds: float
    done_s: float
    n_draws: int

    def sample(self, masks: Masks | None = None) -> None: ...

    def result(self) -> Draws:
        self.device.done(self)
        return Draws([7] * self.n_draws)

    def drafts(self) -> Sequence[bytes]:
        return ()

    def scores(self) -> Sequence[Any]:
        return ()


def serve(requests: list[Request], max_running: int = 256, model: Coefficients | None = None) -> list[StepWork]:
    """Serve the requests in virtual time; fills in when their tokens came. Returns the steps."""
    model = model or coefficients.load("h200-llama-8b")
    cache = KVCache((KVGroup("full", (0,), 1, 1, "float32"),), [model.kv_tokens // 16], chunk=model.token_budget)
    policy, clock = LatencyTarget(GPU_SHAPES), Clock()
    limits = Limits(40_960, 128_256, (), max_running, model.token_budget)
    device = ModelledDevice(model, policy, clock)
    loop = StepLoop(Scheduler(cache, limits, "model", prefill=policy), device, 2)
    steps: list[StepWork] = []
    launch = device.launch

    def recorded(plan: StepPlan) -> ModelledStep:
        step = launch(plan)
        steps.append(step.work)
        return step

    device.launch = recorded  # type: ignore[method-assign]
    source, waiting = random.Random(1), sorted(requests, key=lambda each: each.at_s)
    n_sent, by_id = 0, dict[str, Request]()
    while n_sent < len(waiting) or loop.busy:
        while n_sent < len(waiting) and (waiting[n_sent].at_s <= clock.now_s or not loop.busy):
            one = waiting[n_sent]
            clock.now_s = max(clock.now_s, one.at_s)
            by_id[f"r{n_sent}"] = one
            prompt = pack([source.randrange(1000, 120_000) for _ in range(one.n_in)])
            sampling = SamplingParams(max_tokens=one.n_out, ignore_eos=True, seed=1)
            loop.submit(EngineRequest(id=f"r{n_sent}", prompt_ids=prompt, sampling=sampling), clock.now_s)
            n_sent += 1
        for delta in loop.step(clock.now_s):
            by_id[delta.id].times_s += [clock.now_s] * (len(delta.token_ids) // 4)
    return steps


def burst(n: int, n_in: int = 512, n_out: int = 256) -> list[Request]:
    return [Request(0.0, n_in, n_out) for _ in range(n)]


def steady(rate: float, seconds: float = 8.0, n_in: int = 512, n_out: int = 60) -> list[Request]:
    source, at_s, found = random.Random(3), 0.0, []
    while at_s < seconds:
        found.append(Request(at_s, n_in, n_out))
        at_s += source.expovariate(rate)
    return found


def quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def summary(requests: list[Request]) -> dict[str, float]:
    gaps = [1e3 * (b - a) for one in requests for a, b in pairwise(one.times_s)] or [0.0]
    end_s = max(one.times_s[-1] for one in requests)
    waits = [one.ttft_s for one in requests]
    return {
        "tok_s": round(sum(one.n_out for one in requests) / end_s),
        "s": round(end_s, 3),
        "itl_p50": round(quantile(gaps, 0.5), 1),
        "itl_p99": round(quantile(gaps, 0.99), 1),
        "itl_max": round(max(gaps), 1),
        "ttft_p50": round(quantile(waits, 0.5), 3),
        "ttft_max": round(max(waits), 3),
    }


def decode_rate(n: int) -> float:
    """By the formula of `benchmarks.gpu.workloads.decode`."""
    first, whole = burst(n, 512, 1), burst(n, 512, 129)
    serve(first), serve(whole)
    return round(128 * n / (summary(whole)["s"] - summary(first)["s"]))


def main() -> int:
    for name, requests in (
        ("burst of 256, 512/256", burst(256)),
        ("55 requests/s, 512/60", steady(55)),
        ("70 requests/s, 512/60", steady(70)),
        ("512 x 1,024/256", burst(512, 1024, 256)),
    ):
        serve(requests)
        print(name, json.dumps(summary(requests)), flush=True)
    print("decode by the peer's formula", {n: decode_rate(n) for n in (24, 64, 96, 256)}, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
