"""An engine worker that writes a timeline of its steps: `python -m benchmarks.gpu.traced_worker FILE FLAGS`.

FLAGS are those of `emberline.engine.worker`. When the worker ends it writes FILE, a JSON object a step: sequences that
decode, prompt tokens, seconds at which the host began and ended the launch and had the result, and seconds at which the
device began and was done. All are those of `time.perf_counter`, which the processes of a machine share: a client that
notes when it sent its requests finds its steps.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from emberline.engine.core.plan import StepPlan
from emberline.engine.runners.gpu.runner import GpuRunner, GpuStep
from emberline.engine.runners.gpu.stream import StepOutputs, device_event
from emberline.engine.worker import main as worker


class Timeline:
    """The steps of one runner. Its events are read when the step's result is."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._launched: dict[int, dict[str, float]] = {}  # steps in flight
        self._zero: Any = None  # an event, and when the device came to it
        self._zero_s = 0.0
        self._read: StepOutputs | None = None  # of the step whose result was read last

    def watch(self) -> None:
        """Record the steps of every runner that is made from now on."""
        launch, result, read = GpuRunner.launch, GpuStep.result, StepOutputs.read

        def launched(runner: GpuRunner, plan: StepPlan) -> GpuStep:
            if self._zero is None:
                self._begin()
            prompt = sum(row.end - row.start for row in plan.others if row.end - row.start > 1)
            began_s = time.perf_counter()
            step = launch(runner, plan)
            times = {"launch_s": began_s, "launched_s": time.perf_counter()}
            self._launched[id(step)] = {"decodes": plan.n_rows, "prompt_tokens": prompt, **times}
            return step

        def noted(outputs: StepOutputs, *arguments: Any) -> Any:
            self._read = outputs
            return read(outputs, *arguments)

        def ended(step: GpuStep) -> Any:
            found = result(step)
            record, outputs = self._launched.pop(id(step)), self._read
            assert outputs is not None
            record["result_s"] = time.perf_counter()
            for name, event in ("began_s", outputs.began), ("done_s", outputs.done):
                record[name] = self._zero_s + (event.seconds_since(self._zero) or 0.0)
            self.steps.append(record)
            return found

        for owner, name, function in (
            (GpuRunner, "launch", launched),
            (StepOutputs, "read", noted),
            (GpuStep, "result", ended),
        ):
            setattr(owner, name, function)

    def _begin(self) -> None:
        self._zero = device_event(torch.device("cuda", torch.cuda.current_device()))
        self._zero.record()
        self._zero.wait()
        self._zero_s = time.perf_counter()


def main() -> int:
    timeline = Timeline()
    timeline.watch()
    status = worker.main(sys.argv[2:])
    Path(sys.argv[1]).write_text("\n".join(map(json.dumps, timeline.steps)))
    return status


if __name__ == "__main__":
    raise SystemExit(main())
