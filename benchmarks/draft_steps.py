"""The host's time between two steps with drafts: `python -m benchmarks.draft_steps [--rows 16,32]`.

A GPU that has verified drafts waits until the host has planned and launched the next step. Measured here without one:
the scheduler, step loop, suffix drafter and the GPU runner's own host code, on a device that computes nothing, takes a
given time for every step and draws what was recorded. For each step that the next one had to wait for:

critical  from its result until the next step is launched, while a GPU would wait
deferred  from there until the step loop has returned: deltas, hashes, averages, while a GPU would compute

Replies repeat pieces of their prompts, as those of agents do. What CUDA itself takes (copies, events, a graph's launch)
is not in these figures.
"""

import argparse
import gc
import json
import random
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from emberline.engine.core.feature import Speculation
from emberline.engine.core.latency_target import LatencyTarget
from emberline.engine.core.limits import Limits
from emberline.engine.core.plan import SLOT, TOKEN, Masks, Sampled, StepPlan
from emberline.engine.core.step_loop import StepLoop
from emberline.engine.runners.gpu.graphs import StepKind
from emberline.engine.runners.gpu.runner import GpuRunner, GpuStep
from emberline.engine.runners.gpu.shapes import GPU_SHAPES, most_drafts
from emberline.engine.speculation.speculator import open_speculator
from emberline.engine.worker.build import build_scheduler
from emberline.kernels.sampling import SamplerRow
from emberline.kv.cache import KVCache
from emberline.models.decoder import StepInputs
from emberline.protocol.block_hash import KVGroup
from emberline.protocol.request import EngineRequest, SamplingParams
from emberline.protocol.token_ids import pack

VOCAB, PROMPT, REPLY = 32_000, 1024, 400
COPIED, OWN = (4, 40), (1, 6)  # lengths of the pieces of a reply: of its prompt, and new
WARM_STEPS = 200  # in which the length policy learns what steps take
KV = KVGroup("full", (0,), 1, 8, "float16")


class Device:
    """One step at a time: it is done so long after its launch, or after the one before it."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self.launched_s = self.read_s = self.done_s = 0.0

    def launch(self) -> None:
        self.launched_s = time.perf_counter()
        self.done_s = max(self.done_s, self.launched_s) + self._step_s


class StepEnd:
    """The event behind a step, in the place of a CUDA event that is spun for."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._done_s = 0.0

    def record(self) -> None:
        self._done_s = self._device.done_s

    def wait(self) -> None:
        while (now_s := time.perf_counter()) < self._done_s:
            pass
        self._device.read_s = now_s

    def seconds_since(self, earlier: Any) -> float:
        return 0.005


class Graphs:
    """In the place of CUDA graphs: every step is captured."""

    enabled = has_room = True

    def __init__(self, device: Device, result: torch.Tensor) -> None:
        self._device, self._result = device, result

    def __contains__(self, kind: StepKind) -> bool:
        return True

    def __iter__(self) -> Iterator[StepKind]:
        return iter(())

    def replay(self, kind: StepKind) -> torch.Tensor:
        self._device.launch()
        return self._result


class NoSampler:
    """Sampling parameters that nobody reads."""

    def set(self, slot: int, row: SamplerRow) -> None: ...
    def ban(self, slot: int, ids: tuple[int, ...]) -> None: ...
    def allow(self, slots: list[int], bits: Any) -> None: ...
    def upload(self) -> None: ...


class NoKernels:
    """What surrounds the forward pass of a step that is too large for a CUDA graph."""

    def sample(self, *args: Any, **options: Any) -> None: ...
    def keep(self, *args: Any) -> None: ...


class Model:
    kv_groups = (KV,)

    def __init__(self, device: Device) -> None:
        self._device = device

    def forward(self, step: StepInputs, kv: Any) -> torch.Tensor:
        self._device.launch()
        return torch.zeros(len(step.sample_tokens), 1)


class Recorded:
    """A GPU runner whose device draws recorded replies."""

    def __init__(self, limits: Limits, n_blocks: int, prefill: LatencyTarget, device: Device) -> None:
        model, kernels = cast(Any, Model(device)), cast(Any, NoKernels())
        runner = GpuRunner(model, [n_blocks], limits, "cpu", kernels, NoSampler(), prefill, speculates=True)
        runner._graphs = Graphs(device, torch.zeros(1))  # type: ignore[assignment]
        for outputs in runner._outputs:
            outputs.done = StepEnd(device)
            outputs._ready = StepEnd(device)
        self._runner = runner
        self._draws = runner._sampled.token_ids.numpy()
        self._slots: dict[int, tuple[list[int], int]] = {}  # recorded reply and length of the prompt, by slot
        self.replies: dict[str, list[int]] = {}

    def launch(self, plan: StepPlan) -> "RecordedStep":
        for admission in plan.admissions:
            request = admission.request
            self._slots[admission.slot] = self.replies[request.id], len(request.prompt_ids) // 4
        return RecordedStep(self, self._runner.launch(plan), plan)

    def draw(self, step: GpuStep, plan: StepPlan) -> None:
        """What the device would have drawn by the time that the host reads it."""
        launched = step._launched
        assert not isinstance(launched, Exception), launched
        if plan.others:
            rows, drafts = [row for row in plan.rows if row.samples], launched.batch.left_out is None
            drawn = [self._reply(row.slot, row.end, 1 + row.n_drafts if drafts else 1) for row in rows]
        else:
            drawn = [self._reply(slot, start + 1, 1) for slot, start in plan.columns.cells[SLOT:TOKEN].T.tolist()]
        self._draws[launched.batch.sample_indices(launched.n_decodes)] = [token for row in drawn for token in row]

    def _reply(self, slot: int, end: int, n: int) -> list[int]:
        """The n tokens of the recorded reply from position `end` on."""
        reply, n_prompt = self._slots[slot]
        return (reply[end - n_prompt :][:n] + [0] * n)[:n]


class RecordedStep:
    def __init__(self, runner: Recorded, step: GpuStep, plan: StepPlan) -> None:
        self._runner, self._step, self._plan = runner, step, plan

    def sample(self, masks: Masks | None = None) -> None:
        self._runner.draw(self._step, self._plan)
        self._step.sample(masks)

    def result(self) -> Sequence[Sampled]:
        return self._step.result()

    def drafts(self) -> Sequence[bytes]:
        return ()


class Figures(NamedTuple):
    critical_us: list[float]
    deferred_us: list[float]
    tokens_per_row: float

    def summary(self) -> dict[str, float]:
        found = {"steps": len(self.critical_us), "tokens_per_row": round(self.tokens_per_row, 2)}
        for name, values in (("critical_us", self.critical_us), ("deferred_us", self.deferred_us)):
            found[name] = round(statistics.median(values), 1)
            found[f"{name[:-3]}_p90_us"] = round(statistics.quantiles(values, n=10)[-1], 1)
        return found


def recorded(rng: random.Random) -> tuple[list[int], list[int]]:
    """A prompt, and a reply of pieces of it."""
    prompt = [rng.randrange(100, VOCAB) for _ in range(PROMPT)]
    reply: list[int] = []
    while len(reply) < REPLY:
        at = rng.randrange(PROMPT)
        reply += prompt[at : at + rng.randint(*COPIED)]
        reply += [rng.randrange(100, VOCAB) for _ in range(rng.randint(*OWN))]
    return prompt, reply[:REPLY]


def open_loop(n_rows: int, device: Device, speculation: Speculation | None = None) -> tuple[StepLoop, Recorded]:
    """A step loop over the GPU runner, for `n_rows` sequences at a time."""
    limits = Limits(context_len=4096, vocab_size=VOCAB, eos_ids=(0,), max_running=n_rows, token_budget=8192)
    n_blocks = 1 + n_rows * limits.context_len // 16
    cache = KVCache(Model.kv_groups, [n_blocks], chunk=limits.token_budget)
    prefill = LatencyTarget(GPU_SHAPES, most_drafts=lambda rows: most_drafts(rows, n_rows))
    runner = Recorded(limits, n_blocks, prefill, device)
    scheduler = build_scheduler(cache, limits, "benchmark", prefill=prefill, speculation=speculation)
    return StepLoop(scheduler, runner, steps_in_flight=2), runner


def submit(loop: StepLoop, runner: Recorded, request_id: str, prompt: Sequence[int], reply: Sequence[int]) -> None:
    """Submit a request to which the device draws `reply`."""
    runner.replies[request_id] = list(reply)
    sampling = SamplingParams(max_tokens=len(reply), temperature=0.0, ignore_eos=True)
    loop.submit(EngineRequest(id=request_id, prompt_ids=pack(prompt), sampling=sampling), time.monotonic())


def measure(n_rows: int, n_steps: int, step_s: float, seed: int = 0) -> Figures:
    """Time the steps with drafts that the next step had to wait for."""
    rng, device = random.Random(seed), Device(step_s)
    loop, runner = open_loop(n_rows, device, open_speculator("suffix", "cuda"))
    critical, deferred, n_tokens, n_open, serial = list[float](), list[float](), 0, 0, 0
    planned: deque[StepPlan] = deque(maxlen=1)
    launch = runner.launch
    runner.launch = lambda plan: (planned.append(plan), launch(plan))[1]  # type: ignore[method-assign]
    gc.collect()
    gc.freeze()
    number = n_drafted_rows = 0
    while len(critical) < n_steps:
        while n_open < n_rows:
            prompt, reply = recorded(rng)
            submit(loop, runner, str(serial), prompt, reply)
            n_open, serial = n_open + 1, serial + 1
        before = planned[0] if planned else None
        deltas = loop.step(time.monotonic())
        returned_s = time.perf_counter()
        number += 1
        for delta in deltas:
            assert delta.error is None, delta.error
            n_open -= delta.finish is not None
        if number > WARM_STEPS and before is not None and waited(before, planned[0], device):
            critical.append(1e6 * (device.launched_s - device.read_s))
            deferred.append(1e6 * (returned_s - device.launched_s))
            n_tokens += sum(len(delta.token_ids) // 4 for delta in deltas)
            n_drafted_rows += len(before.rows)
    return Figures(critical, deferred, n_tokens / n_drafted_rows)


def waited(before: StepPlan, plan: StepPlan, device: Device) -> bool:
    """Whether both steps have drafts, and the second was launched once the first was read; no sequence begins."""
    is_new = plan is not before and device.launched_s > device.read_s
    return is_new and bool(before.n_drafts and plan.n_drafts) and not plan.admissions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="16,32", help="sequences at a time (16,32)")
    parser.add_argument("--steps", type=int, default=600, help="to measure (600)")
    parser.add_argument("--step-ms", type=float, default=3.0, help="that the device takes for one (3)")
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    found = {}
    for n_rows in map(int, args.rows.split(",")):
        found[n_rows] = measure(n_rows, args.steps, args.step_ms / 1e3).summary()
        print(f"{n_rows} rows: " + ", ".join(f"{name} {value}" for name, value in found[n_rows].items()), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
