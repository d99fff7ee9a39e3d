"""CPU of the host for one engine step: `python -m benchmarks.host_step [--rows 1,16,64,256] [--against DIR] [--quick]`.

The engine's scheduler, KV cache and step loop over a null runner, which computes nothing and draws for every row a
token that no sequence has had. All sequences decode. Two settings:

off   no grammars, no speculation, no host tier
idle  a grammar compiler that no request uses, drafters that find nothing to draft, a host tier that copies nothing

thread   CPU time of the step loop's thread per step
process  CPU time of the whole process per step: the threads of tiers and grammars as well

Each round runs in a fresh process. A figure is the mean of 16 steps, in which every sequence fills a block, which is
hashed, published and saved. It is the least of all rounds and such steps, because whatever else the machine does only
adds to it; ± is how far the second-best round is from it. With `--against DIR`, another checkout is
measured in turn with this one, by its own copy of this module if it has one. Ratios are this checkout's time over the
other's: below 1 this checkout is faster.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

ROWS = (1, 16, 64, 256)
SETTINGS = ("off", "idle")
FIGURES = ("thread_us", "process_us")
VOCAB, PROMPT, BLOCK = 1 << 20, 32, 16
WARM_STEPS, CHUNK_STEPS = 40, BLOCK
Runs = list[dict[str, dict[str, float]]]  # per round: figures by setting and rows
REPOSITORY = Path(__file__).resolve().parent.parent


class NullStep:
    """A step whose result is there at once."""

    def __init__(self, draws: Any) -> None:
        self._draws = draws

    def sample(self, masks: Any = None) -> None: ...

    def result(self) -> Any:
        return self._draws

    def drafts(self) -> list[bytes]:
        return []


class NullRunner:
    """Draws the tokens of `unused`, as the GPU runner does where nobody wants probabilities."""

    def __init__(self, unused: Iterator[int], draws: Callable[[list[int]], Any]) -> None:
        self._unused, self._draws = unused, draws

    def launch(self, plan: Any) -> NullStep:
        assert not plan.n_drafts, "there is nothing to draft from"
        n_draws = len(plan.columns) + sum(row.samples for row in plan.others)
        return NullStep(self._draws(list(islice(self._unused, n_draws))))


class NullCopies:
    """A block mover that copies nothing."""

    def load(self, copies: Sequence[Any]) -> "NullCopies":
        return self

    def save(self, copies: Sequence[Any]) -> "NullCopies":
        return self

    def wait(self) -> None: ...


def open_loop(n_rows: int, n_steps: int, setting: str) -> Any:
    """A step loop with `n_rows` sequences that decode for at least `n_steps` steps."""
    from emberline.engine.core.limits import Limits
    from emberline.engine.core.plan import Draws
    from emberline.engine.core.scheduler import Scheduler
    from emberline.engine.core.step_loop import StepLoop
    from emberline.engine.grammar.compiler import MatcherCompiler
    from emberline.engine.speculation.speculator import open_speculator
    from emberline.engine.worker.build import build_scheduler
    from emberline.kv.cache import KVCache
    from emberline.kv.tiers.group_tiers import GroupTiers
    from emberline.kv.tiers.host import HostTier
    from emberline.kv.tiers.manager import TierManager
    from emberline.protocol.block_hash import KVGroup
    from emberline.protocol.request import EngineRequest, SamplingParams
    from emberline.protocol.token_ids import pack

    group = KVGroup("full", (0,), kv_heads=1, head_dim=8, dtype="float16")
    context = PROMPT + n_steps + WARM_STEPS + 2 * BLOCK
    n_blocks = 1 + n_rows * (context // BLOCK + 2)
    cache = KVCache([group], [n_blocks], chunk=2048)
    limits = Limits(context, VOCAB, eos_ids=(0,), max_running=n_rows, token_budget=max(2048, n_rows))
    if setting == "off":
        scheduler, tiers = Scheduler(cache, limits, "benchmark"), None
    else:
        host = HostTier(2 * n_blocks * group.block_bytes + (64 << 20), [group.block_bytes])
        tiers = GroupTiers(TierManager([group], NullCopies(), host, [], 25e9))
        scheduler = build_scheduler(
            cache,
            limits,
            "benchmark",
            grammars=MatcherCompiler(VOCAB),
            speculation=open_speculator("auto", "cuda"),
            tiers=tiers,
        )
    unused = iter(range(1, VOCAB))
    loop = StepLoop(scheduler, NullRunner(unused, Draws), steps_in_flight=2)
    sampling = SamplingParams(max_tokens=n_steps + WARM_STEPS + BLOCK, temperature=0.0, ignore_eos=True)
    for number in range(n_rows):
        prompt = pack(islice(unused, PROMPT))
        loop.submit(EngineRequest(id=str(number), prompt_ids=prompt, sampling=sampling), time.monotonic())
    return loop


def measure(n_rows: int, n_steps: int, setting: str) -> dict[str, float]:
    """Microseconds of CPU per step, of the calling thread and of the process."""
    loop = open_loop(n_rows, n_steps, setting)
    for _ in range(WARM_STEPS):
        loop.step(time.monotonic())
    gc.collect()
    gc.freeze()  # as a worker does
    found: dict[str, list[float]] = {name: [] for name in FIGURES}
    for _ in range(n_steps // CHUNK_STEPS):
        thread_s, process_s = time.thread_time(), time.process_time()
        for _ in range(CHUNK_STEPS):
            deltas = loop.step(time.monotonic())
            assert len(deltas) == n_rows, "every sequence decodes"
        found["thread_us"].append((time.thread_time() - thread_s) / CHUNK_STEPS * 1e6)
        found["process_us"].append((time.process_time() - process_s) / CHUNK_STEPS * 1e6)
    gc.unfreeze()
    return {name: round(min(values), 2) for name, values in found.items()}


def measure_all(rows: Sequence[int], n_steps: int) -> dict[str, dict[str, float]]:
    """Figures by setting and number of rows, such as `off 16`."""
    return {f"{setting} {n}": measure(n, n_steps, setting) for n in rows for setting in SETTINGS}


def measured_in(checkout: Path, rows: Sequence[int], n_steps: int) -> dict[str, dict[str, float]]:
    """Measure a checkout in a fresh process."""
    script = checkout / "benchmarks" / "host_step.py"
    script = script if script.exists() else Path(__file__)
    flags = ["--measure", "--rows", ",".join(map(str, rows)), "--steps", str(n_steps)]
    done = subprocess.run(
        [sys.executable, "-P", str(script), *flags],  # -P: this folder has modules named as the standard library's
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout), os.environ.get("PYTHONPATH", "")])},
        stdout=subprocess.PIPE,
        check=True,
    )
    return dict(json.loads(done.stdout))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="sequences that decode")
    parser.add_argument("--steps", type=int, default=400, help="to measure (400)")
    parser.add_argument("--rounds", type=int, default=7, help="fresh processes (7)")
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout, measured in turn with this one")
    parser.add_argument("--quick", action="store_true", help="fewer steps, four rounds")
    parser.add_argument("--json", type=Path, default=Path("bench-host-step.json"))
    parser.add_argument("--measure", action="store_true", help="measure once in this process and print JSON")
    options = parser.parse_args(argv)
    rows = [int(n) for n in options.rows.split(",")]
    n_steps, n_rounds = (100, 4) if options.quick else (options.steps, options.rounds)
    if options.measure:
        print(json.dumps(measure_all(rows, options.steps)))
        return 0
    if options.against is not None and not (options.against / "emberline").is_dir():
        parser.error(f"{options.against} is no checkout: it has no folder emberline")
    checkouts = {"this": REPOSITORY} | ({} if options.against is None else {"other": options.against.resolve()})
    runs: dict[str, Runs] = {name: [] for name in checkouts}
    for number in range(n_rounds):
        for name in list(checkouts)[:: 1 if number % 2 == 0 else -1]:
            runs[name].append(measured_in(checkouts[name], rows, n_steps))
    found = {"load_1_min": os.getloadavg()[0], "runs": runs}
    options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(table(runs))
    print(f"\nload {found['load_1_min']:.1f}; written to {options.json}")
    return 0


def least(runs: Runs, name: str, figure: str) -> tuple[float, float]:
    """The least time of several rounds, and the distance of the second-best one in units of it."""
    first, *others = sorted(run[name][figure] for run in runs)
    return first, others[0] / first - 1 if others else 0.0


def table(runs: dict[str, Runs]) -> str:
    """The least times with their noise, and ratios to the other checkout if there is one."""
    from benchmarks.report import markdown

    lines = []
    for name in runs["this"][0]:
        cells = [name]
        for figure in FIGURES:
            ours, noise = least(runs["this"], name, figure)
            cells.append(f"{ours:.1f} µs ±{noise:.0%}")
            if "other" in runs:
                theirs, their_noise = least(runs["other"], name, figure)
                cells.append(f"{ours / theirs:.3f} ±{max(noise, their_noise):.0%}")
        lines.append(cells)
    titles = [title for figure in ("thread", "process") for title in (figure, "ratio")[: 1 + ("other" in runs)]]
    return markdown(["a step, rows", *titles], lines)


if __name__ == "__main__":
    sys.exit(main())
