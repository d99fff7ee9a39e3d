"""The worker's parts in this process, and requests that are replayed or answered by them."""

import gc
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.replay_runner import Replay
from emberline.engine.core.plan import Runner
from emberline.engine.core.step_loop import StepLoop
from emberline.engine.worker import main as worker
from emberline.protocol.frames import EngineInfo
from emberline.protocol.request import EngineRequest, SamplingParams
from emberline.protocol.token_ids import pack

CPU_FLAGS = ("--threads", "1", "--kv-bytes", str(1 << 26))


class Work(NamedTuple):
    request: EngineRequest
    reply: list[int] | None = None  # None: what the model draws


class Decoded(NamedTuple):
    n_tokens: int  # that came while the clock ran
    n_steps: int
    seconds: float
    n_untimed: int  # tokens that came before

    @property
    def tokens_per_s(self) -> float:
        return self.n_tokens / self.seconds


def build(model: Path, setting: str, device: str, max_running: int, *flags: str) -> tuple[StepLoop, EngineInfo]:
    """Build an engine and prepare its every common step. A folder without weights gets random ones.

    An engine on a CPU has one thread and a small KV cache unless the flags say otherwise: it is a trial.
    """
    args = ["--model", str(model), "--socket", "unused", "--device", device, "--speculation", setting]
    args += ["--max-running", str(max_running), *(CPU_FLAGS if device == "cpu" else ()), *flags]
    if model.is_dir() and not any(model.glob("*.safetensors")):
        args += ["--random-weights", "0"]
    loop, info, *_ = worker.build(worker.parse_arguments(args))
    assert isinstance(loop, StepLoop)
    while loop.has_idle_task:
        loop.run_idle_task()
    gc.collect()
    gc.freeze()  # as the worker does: collections between steps need not scan the model
    return loop, info


class Engine:
    def __init__(self, model: Path, setting: str, device: str, max_running: int, *flags: str) -> None:
        self.loop, self.info = build(model, setting, device, max_running, *flags)
        self._runner, self._replay = self.loop.runner, Replay(self.loop.runner, self.info.eos_ids[0])
        self._serial = 0

    def work(self, prompt: list[int], reply: list[int] | None = None, most: int = 0, **sampling: Any) -> Work:
        """Greedy unless said; `most` tokens, or as many as the reply has."""
        self._serial += 1
        most = most or len(reply or ())
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": most, "ignore_eos": reply is not None} | sampling)
        return Work(EngineRequest(id=str(self._serial), prompt_ids=pack(prompt), sampling=params), reply)

    def run(self, work: Iterable[Work], batch: int) -> Decoded:
        """Run `batch` requests at a time. The clock starts when each of the first batch has its first tokens, of which
        there are several if the reply begins with forced ones."""
        waiting, n_open = deque(work), 0
        replays = waiting[0].reply is not None
        runner: Runner = self._replay if replays else self._runner
        self.loop.rank.runner = runner
        unbegun: set[str] | None = set()  # of the first batch
        n_tokens = n_steps = n_untimed = 0
        began_s = time.perf_counter()
        while waiting or n_open:
            while waiting and n_open < batch:
                request, reply = waiting.popleft()
                assert (reply is not None) == replays, "all are replayed, or none"
                n_open += 1
                if reply is not None:
                    self._replay.replies[request.id] = reply
                if unbegun is not None:
                    unbegun.add(request.id)
                self.loop.submit(request, time.monotonic())
            deltas = self.loop.step(time.monotonic())
            for delta in deltas:
                assert delta.error is None, delta.error
                n_tokens += len(delta.token_ids) // 4
                n_open -= delta.finish is not None
                if unbegun is not None and delta.token_ids:
                    unbegun.discard(delta.id)
            n_steps += bool(deltas)
            if self.loop.blocked:
                time.sleep(1e-4)  # a grammar is compiled, or late: its thread needs the interpreter
            if unbegun is not None and not unbegun:
                unbegun, n_untimed = None, n_tokens
                n_tokens, n_steps, began_s = 0, 0, time.perf_counter()
        return Decoded(n_tokens, n_steps, time.perf_counter() - began_s, n_untimed)

    def drafts(self) -> dict[str, dict[str, list[int]]]:
        """Since the start, by drafter: drafted and accepted by position."""
        return {
            stats.drafter: {"drafted": list(stats.drafted), "accepted": list(stats.accepted)}
            for stats in self.loop.load.drafts
        }

    @property
    def n_drafted(self) -> int:
        return sum(sum(each["drafted"]) for each in self.drafts().values())
