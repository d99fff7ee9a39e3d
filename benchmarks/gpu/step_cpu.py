"""CPU of a worker's decode step, by thread and by function: `python -m benchmarks.gpu.step_cpu [--batches 1 64 256]`.

A worker of Llama's 8B shape decodes each batch in steady state, in three windows:

threads    CPU of every thread, user and system, and how often it slept and was preempted, as the kernel counts them
functions  CPU and wall time of the functions below, without those of them that they call, by clocks around them
lines      where the step loop's thread is, asked by a signal for each millisecond of its CPU

Clocks cost a step some microseconds: the windows' own CPU a step is printed beside each. All figures are of one step.
"""

import argparse
import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from benchmarks.gpu.engine import Worker, wait_until_prepared, worker
from benchmarks.gpu.workloads import Prompts

MODES = ("off", "functions", "lines")  # of the worker, in turn by SIGUSR1
SECONDS = {"threads": 4.0, "functions": 4.0, "lines": 8.0}
FUNCTIONS = """
emberline.engine.worker.socket_server Server.run_once Server._poll Server._route Server._flush
emberline.engine.worker.client_connection ClientConnection.send
emberline.protocol.frames encode
emberline.engine.core.step_loop StepLoop.step StepLoop._launch StepLoop._absorb_oldest StepLoop.load.fget
emberline.engine.core.step_times StepTimes.launched StepTimes.predicted_s StepTimes.done
emberline.engine.core.scheduler Scheduler.advance Scheduler.plan Scheduler.absorb Scheduler.catch_up Scheduler.load
emberline.engine.core.planner StepPlanner.plan
emberline.engine.core.rank Rank.run
emberline.engine.speculation.speculator Speculator.draft Speculator.begin_step
emberline.engine.tiers.tiering Tiering.advance Tiering.before_plan Tiering.catch_up Tiering.report
emberline.engine.tiers.saving BlockSaver.dispatch BlockSaver.published BlockSaver.saved
emberline.kv.cache KVCache.grow_all KVCache.publish
emberline.kv.tiers.manager TierManager.execute TierManager._save TierManager._copy_out TierManager._distribute
emberline.kv.tiers.host HostTier.put HostTier.take HostTier.drop HostTier.holds
emberline.engine.runners.gpu.tiers CudaMover.save _Recorded.wait
emberline.engine.runners.gpu.runner GpuRunner.launch GpuRunner.finish GpuRunner.read GpuRunner._observe
emberline.engine.runners.gpu.runner GpuRunner._find_shared
emberline.engine.runners.gpu.slots Slots.take Slots.upload
emberline.engine.runners.gpu.batch StepBatch.of_columns DecodeBuffers.send
emberline.engine.runners.gpu.stream CudaEvent.record CudaEvent.wait CudaEvent.seconds_since StepOutputs.fetch
emberline.engine.runners.gpu.stream StepOutputs.read Upload.array Upload.send
emberline.engine.runners.gpu.graphs CudaGraphs.replay
"""


class Clocks:
    """CPU and wall time of functions, without those of watched functions that they call, by thread."""

    def __init__(self) -> None:
        self.on = False
        self.spent: dict[str, list[float]] = {}  # calls, CPU s, wall s
        self._local = threading.local()

    def watch(self, module: str, name: str) -> None:
        """Put clocks around a function from now on. A name that this version does not have is left out."""
        owner: Any = sys.modules.get(module)
        *path, last = name.removesuffix(".fget").split(".")
        for part in path:
            owner = getattr(owner, part, None)
        found: Any = None if owner is None else vars(owner).get(last)
        if found is None:
            return
        timed = self._timed(name, found.fget if isinstance(found, property) else found)
        setattr(owner, last, property(timed) if isinstance(found, property) else timed)

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **more: Any) -> Any:
            if not self.on:
                return function(*arguments, **more)
            stack: list[list[float]] = self._local.__dict__.setdefault("stack", [])
            stack.append([0.0, 0.0])  # CPU and wall time of watched functions that it calls
            cpu_s, wall_s = time.thread_time(), time.perf_counter()
            try:
                return function(*arguments, **more)
            finally:
                cpu_s, wall_s = time.thread_time() - cpu_s, time.perf_counter() - wall_s
                called_cpu_s, called_wall_s = stack.pop()
                if stack:
                    stack[-1][0] += cpu_s
                    stack[-1][1] += wall_s
                key = f"{threading.current_thread().name}: {name}"
                known = self.spent.setdefault(key, [0, 0.0, 0.0])
                known[0] += 1
                known[1] += cpu_s - called_cpu_s
                known[2] += wall_s - called_wall_s

        return timed


class Samples:
    """Where the main thread is, once for each millisecond of its CPU: innermost line first."""

    SIGEV_THREAD_ID, INTERVAL_NS = 4, 1_000_000

    def __init__(self) -> None:
        self.stacks: Counter[tuple[str, ...]] = Counter()
        self._timer = ctypes.c_void_p()
        libc = ctypes.CDLL(None, use_errno=True)
        self._set_time = libc.timer_settime
        signal.signal(signal.SIGPROF, self._take)
        event = (ctypes.c_int * 16)()  # sigevent: value (two words), signal, how, thread
        event[2:5] = [signal.SIGPROF, self.SIGEV_THREAD_ID, threading.get_native_id()]
        clock = time.CLOCK_THREAD_CPUTIME_ID
        if libc.timer_create(clock, ctypes.byref(event), ctypes.byref(self._timer)):
            raise OSError(ctypes.get_errno(), "timer_create")

    def set(self, on: bool) -> None:
        every = self.INTERVAL_NS if on else 0
        self._set_time(self._timer, 0, (ctypes.c_long * 4)(0, every, 0, every), None)

    def _take(self, number: int, frame: FrameType | None) -> None:
        stack = list[str]()
        while frame is not None and len(stack) < 40:
            code = frame.f_code
            file = code.co_filename.rpartition("/")[2].removesuffix(".py")
            stack.append(f"{file}.{getattr(code, 'co_qualname', code.co_name)}:{frame.f_lineno}")
            frame = frame.f_back
        self.stacks[tuple(stack)] += 1


def serve(out: Path, flags: list[str]) -> int:
    """Run a worker that writes to `out`, with each SIGUSR1, what it has counted since the last one."""
    from emberline.engine.worker import main

    clocks, samples = Clocks(), Samples()
    modules = dict.fromkeys(line.split()[0] for line in FUNCTIONS.split("\n") if line)
    for module in modules:
        try:
            __import__(module)
        except ImportError:
            print(f"{module} is not measured: it cannot be imported here", file=sys.stderr)
    for line in FUNCTIONS.split("\n"):
        for name in line.split()[1:]:
            clocks.watch(line.split()[0], name)
    mode = 0

    def go_on(number: int, frame: object) -> None:
        nonlocal mode
        names = {str(thread.native_id): thread.name for thread in threading.enumerate()}
        found = {"names": names, "functions": clocks.spent, "lines": [*samples.stacks.items()]}
        clocks.spent, samples.stacks = {}, Counter()
        mode = (mode + 1) % len(MODES)
        clocks.on = MODES[mode] == "functions"
        samples.set(MODES[mode] == "lines")
        part = out.with_suffix(".part")
        part.write_text(json.dumps(found))
        part.rename(out)

    signal.signal(signal.SIGUSR1, go_on)
    return main.main(flags)


class ThreadUse(NamedTuple):
    """What the kernel has counted of a thread."""

    name: str
    cpu_s: float
    system_share: float  # of ticks
    sleeps: int
    preempted: int


def thread_uses(pid: int) -> dict[str, ThreadUse]:
    """The threads of a process by their ids."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            status = dict(line.split(":\t") for line in (task / "status").read_text().splitlines())
            name = (task / "comm").read_text().strip()
            user, system = int(fields[11]), int(fields[12])
            try:
                cpu_s = int((task / "schedstat").read_text().split()[0]) / 1e9
            except OSError:
                cpu_s = (user + system) / os.sysconf("SC_CLK_TCK")
            switches = int(status["voluntary_ctxt_switches"]), int(status["nonvoluntary_ctxt_switches"])
            found[task.name] = ThreadUse(name, cpu_s, system / max(1, user + system), *switches)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
    return found


class Measured(NamedTuple):
    """A window."""

    n_steps: int
    wall_s: float
    cpu_s: float


def window(engine: Worker, seconds: float) -> Measured:
    """Receive replies for some seconds, and count the worker's steps and CPU."""
    client, began_s = engine.client, time.perf_counter()
    n_steps, cpu_s = client.load.steps, engine.cpu_s()
    client.run(until_s=began_s + seconds)
    return Measured(client.load.steps - n_steps, time.perf_counter() - began_s, engine.cpu_s() - cpu_s)


def next_mode(engine: Worker, out: Path) -> dict[str, Any]:
    """Let the worker measure something else, and return what it has counted so far."""
    out.unlink(missing_ok=True)
    os.kill(engine.pid, signal.SIGUSR1)
    until_s = time.perf_counter() + 5
    while not out.exists():
        if time.perf_counter() > until_s:
            raise TimeoutError("the worker does not answer the signal")
        engine.client.run(until_s=time.perf_counter() + 0.01)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def measure(engine: Worker, prompts: Prompts, batch: int, out: Path) -> None:
    """Print the figures of one batch."""
    client = engine.client
    n_out = min(client.info.context_len - 600, 8000)
    replies = client.submit(prompts.many(batch, 512), n_out)
    while min(len(reply.times_s) for reply in replies) < 40:
        client.run(until_s=time.perf_counter() + 0.02)
    before = thread_uses(engine.pid)
    plain = window(engine, SECONDS["threads"])
    after = thread_uses(engine.pid)
    names = next_mode(engine, out)["names"]
    clocked = window(engine, SECONDS["functions"])
    functions = next_mode(engine, out)["functions"]
    sampled = window(engine, SECONDS["lines"])
    lines = next_mode(engine, out)["lines"]
    running = client.load.running
    client.abort_all()

    def title(name: str, found: Measured) -> None:
        per_step = 1e3 / max(1, found.n_steps)
        print(f"\n{batch} rows, {name}: {found.n_steps} steps of {per_step * found.wall_s:.2f} ms, ", end="")
        print(f"process CPU {per_step * found.cpu_s:.3f} ms a step", flush=True)

    assert running == batch, "the batch decodes until the end of the last window"
    title("threads", plain)
    uses = []
    for task, use in after.items():
        earlier = before.get(task, ThreadUse("", 0.0, 0.0, 0, 0))
        uses.append((use.cpu_s - earlier.cpu_s, task, use, earlier))
    n = max(1, plain.n_steps)
    for cpu_s, task, use, earlier in sorted(uses, reverse=True)[:16]:
        if cpu_s > 0:
            slept, cut = (use.sleeps - earlier.sleeps) / n, (use.preempted - earlier.preempted) / n
            name = names.get(task, use.name)
            print(
                f"{1e6 * cpu_s / n:9.1f} µs  {name:24s} {use.name:16s} system {use.system_share:4.0%} of its life, ",
                end="",
            )
            print(f"sleeps {slept:6.2f}, preempted {cut:.2f}")
    title("functions", clocked)
    n = max(1, clocked.n_steps)
    for name, (calls, cpu_s, wall_s) in sorted(functions.items(), key=lambda each: -each[1][1])[:45]:
        print(f"{1e6 * cpu_s / n:9.1f} µs CPU {1e6 * wall_s / n:9.1f} µs wall {calls / n:7.2f} calls  {name}")
    title("lines", sampled)
    total = sum(count for _, count in lines)
    print(f"{total} samples; share of the step loop's thread, by innermost line:")
    for found, most in ((innermost(lines), 40), (inclusive(lines), 45)):
        for line, count in found.most_common(most):
            print(f"{count / max(1, total):7.1%}  {line}")
        print("and by function, with all that it calls:" if most == 40 else "")


def innermost(lines: list[tuple[list[str], int]]) -> Counter[str]:
    """Samples by the line that ran."""
    found = Counter[str]()
    for stack, count in lines:
        found[" < ".join(stack[:2])] += count
    return found


def inclusive(lines: list[tuple[list[str], int]]) -> Counter[str]:
    """Samples by function, its callees included."""
    found = Counter[str]()
    for stack, count in lines:
        for function in {line.rpartition(":")[0] for line in stack}:
            found[function] += count
    return found


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        return serve(Path(sys.argv[2]), sys.argv[3:])
    from benchmarks.gpu.start import write_model

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.step_cpu", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--work", type=Path, default=Path("/tmp/emberline-gpu"), help="working folder with 20 GB free")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 64, 256])
    parser.add_argument("--model", type=Path, help="instead of Llama's 8B shape")
    args, flags = parser.parse_known_args()
    args.work.mkdir(parents=True, exist_ok=True)
    folder = args.model or args.work / "llama-8b"
    if args.model is None:
        write_model(folder, 32)
    out, log = args.work / "step-cpu.json", args.work / "step-cpu.log"
    program = ("-m", "benchmarks.gpu.step_cpu", "--worker", str(out))
    with worker(folder, log, *flags, program=program) as engine:
        print(
            f"ready after {engine.ready_s:.1f} s, prepared after {wait_until_prepared(engine, log):.1f} s", flush=True
        )
        engine.client.generate(Prompts(0, engine.client.info.vocab_size).many(2, 64), 8)
        for batch in args.batches:
            measure(engine, Prompts(batch, engine.client.info.vocab_size), batch, out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
