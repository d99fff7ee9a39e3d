"""What a rank group costs beside the computation: `python -m benchmarks.rank_group`.

Broadcast: rank 0 encodes the plan of a decode step and writes it for all followers, which are processes that decode it;
rank 0's time is what a step pays (target: 50 µs at 8 followers and 64 rows), the followers' is when the last of them
could begin. CPU time is the robust figure where the machine is busy. Overhead: steps of a model of SmolLM2-135M's shape
with random weights, in turn through the plain runner and as a group of one rank, which encodes and writes each plan for
nobody (target: 1 %).
"""

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import shared_memory
from pathlib import Path
from statistics import median

from benchmarks.report import markdown
from emberline.engine.core.plan import Row, StepPlan
from emberline.engine.ranks.messages import End, Launch
from emberline.engine.ranks.plan_channel import PlanWriter, SharedMemoryReader
from emberline.engine.ranks.plan_ring import RingReader, RingWriter

WARM_UP = 50
PAUSE_S = 0.002  # between two plans: followers wait again, as they do between steps
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 576,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "tie_word_embeddings": True,
    "eos_token_id": 2, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip


def decode_plan(n_rows: int, number: int = 0, start: int = 1000) -> StepPlan:
    """One token for each sequence; every sixteenth takes a new block."""
    rows = [
        Row(n, n, start, (number + n).to_bytes(4, "little"), None if n % 16 else [[n + 1]], [0], True, admission=n)
        for n in range(n_rows)
    ]
    return StepPlan(others=rows, n_tokens=n_rows, number=number)


def _follow(descriptor: int, number: int, times_name: str, n_plans: int) -> None:
    times = shared_memory.SharedMemory(times_name)
    seen = times.buf.cast("q")
    reader = SharedMemoryReader(RingReader(descriptor, number))
    n = 0
    while not isinstance(reader.read(60.0), End):
        seen[number * n_plans + n] = time.monotonic_ns()
        n += 1
    seen.release()
    times.close()


def broadcast(n_followers: int, n_rows: int, n_plans: int) -> dict[str, float]:
    """Microseconds: of rank 0, and until the first and the last follower has the plan."""
    ring = RingWriter(n_followers)
    writer = PlanWriter(ring)
    times = shared_memory.SharedMemory(create=True, size=8 * n_followers * n_plans)
    context = multiprocessing.get_context("fork")
    followers = [
        context.Process(target=_follow, args=(ring.descriptor, number, times.name, n_plans), daemon=True)
        for number in range(n_followers)
    ]
    for follower in followers:
        follower.start()
    began, spent, cpu = [], [], []
    for number in range(n_plans):
        plan = decode_plan(n_rows, number)
        start_ns, cpu_ns = time.monotonic_ns(), time.thread_time_ns()
        writer.write(Launch(plan))
        cpu.append((time.thread_time_ns() - cpu_ns) / 1e3)
        spent.append((time.monotonic_ns() - start_ns) / 1e3)
        began.append(start_ns)
        time.sleep(PAUSE_S)
    writer.write(End())
    for follower in followers:
        follower.join()
    seen = times.buf.cast("q")
    received = [
        sorted((seen[each * n_plans + n] - began[n]) / 1e3 for each in range(n_followers)) for n in range(n_plans)
    ]
    seen.release()
    times.close()
    times.unlink()
    os.close(ring.descriptor)
    spent = sorted(spent[WARM_UP:])
    return {
        "followers": n_followers,
        "rows": n_rows,
        "rank_0_cpu_p50_us": median(cpu[WARM_UP:]),
        "rank_0_p50_us": median(spent),
        "rank_0_p90_us": spent[len(spent) * 9 // 10],
        "first_p50_us": median(each[0] for each in received[WARM_UP:]),
        "last_p50_us": median(each[-1] for each in received[WARM_UP:]),
    }


def overhead(n_rows: int, n_steps: int) -> dict[str, float]:
    """Of steps in turn through the plain runner and through a group of one rank."""
    from emberline.engine.core.limits import Limits
    from emberline.engine.core.plan import Admission, Runner
    from emberline.engine.ranks.rank_group import Leader
    from emberline.engine.ranks.rank_runner import LeaderRunner
    from emberline.engine.runners.cpu.torch_runner import TorchRunner
    from emberline.kernels.collectives import ALONE
    from emberline.models.registry import load_model
    from emberline.protocol.parallel_layout import Layout
    from emberline.protocol.request import EngineRequest, SamplingParams
    from emberline.weights.generated import generate_checkpoint

    model = load_model(generate_checkpoint(SHAPE, 1))
    limits = Limits(context_len=256, vocab_size=SHAPE["vocab_size"], eos_ids=(2,), max_running=n_rows, token_budget=512)
    runner = TorchRunner(model, [1 + 16 * n_rows], limits)
    leader = Leader(Layout(), ALONE, [], PlanWriter(RingWriter(0)))
    through = LeaderRunner(leader, runner)
    request = EngineRequest(id="a", prompt_ids=bytes(4), sampling=SamplingParams(temperature=0.0))
    tables = [[[1 + 16 * n + at for at in range(16)]] for n in range(n_rows)]
    admissions = [Admission(n, request, n, b"", tables[n]) for n in range(n_rows)]

    def seconds(run: Runner, plan: StepPlan) -> float:
        start_s = time.perf_counter()
        step = run.launch(plan)
        step.sample()
        step.result()
        return time.perf_counter() - start_s

    first = decode_plan(n_rows, start=200)
    first.admissions = admissions
    seconds(runner, first)
    taken: dict[str, list[float]] = {"plain": [], "group": []}
    for number in range(2 * n_steps):
        plan = decode_plan(n_rows, number, start=200)
        for row in plan.rows:
            row.blocks = None
        name, run = ("group", through) if number % 2 else ("plain", runner)
        taken[name].append(seconds(run, plan))
    machinery = _machinery_s(leader.publish, n_rows)
    plain, group = median(taken["plain"]), median(taken["group"])
    return {
        "rows": n_rows,
        "plain_ms": 1e3 * plain,
        "group_ms": 1e3 * group,
        "difference_percent": 100 * (group / plain - 1),
        "machinery_us": 1e6 * machinery,
        "machinery_percent": 100 * machinery / plain,
    }


def _machinery_s(publish: Callable[[Launch], None], n_rows: int) -> float:
    """Seconds of one step's part that a plain runner does not have."""
    plans = [decode_plan(n_rows, number) for number in range(500)]
    taken = []
    for plan in plans:
        start_s = time.perf_counter()
        publish(Launch(plan))
        taken.append(time.perf_counter() - start_s)
    return median(taken)


def _table(rows: Sequence[Mapping[str, float]]) -> str:
    return markdown(list(rows[0]), [[f"{value:.4g}" for value in row.values()] for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--followers", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--plans", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=20, help="of each kind, for the overhead; 0: skip")
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir()) / "rank_group.json")
    args = parser.parse_args()
    broadcasts = [broadcast(n, args.rows, args.plans) for n in args.followers]
    print(_table(broadcasts))
    overheads = [overhead(args.rows, args.steps)] if args.steps else []
    if overheads:
        print(_table(overheads))
    args.output.write_text(json.dumps({"broadcast": broadcasts, "overhead": overheads}, indent=1))
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
