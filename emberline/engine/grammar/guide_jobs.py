"""Threads that apply grammars, so that a slow one delays its own sequence and no step.

A job accepts a sampled token and computes the mask of the next one: tens of microseconds for most grammars, and up to a
tenth of a second for a hostile one, which llguidance's limits allow. llguidance releases the interpreter's lock.
"""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAX_JOB_S = 10.0  # of one job by the clock: a thread that does not return is given up
SLOW_REST = 2.0  # times what a job in the slow lane took, its thread rests: steps need the processor and the lock
SLOW_NICE = 10


@dataclass(slots=True, frozen=True)
class GuideTimings:
    """Limits on the time that steps wait for grammars, and on the CPU time of one grammar."""

    step_wait_s: float = 0.02  # that a step waits for its jobs; what is late comes in a later step
    job_wait_s: float = 0.002  # that a step waits longer for each of its jobs
    slow_cpu_s: float = 0.005  # of a job, beyond which the sequence's next job runs in the slow lane, without a wait
    base_cpu_s: float = 0.5  # of all jobs of a sequence, beyond which the sequence is ended
    token_cpu_s: float = 0.001  # that a sequence may use in addition for each token of its output

    def cpu_limit_s(self, n_tokens: int) -> float:
        """CPU time that all jobs of a sequence with this many output tokens may have used."""
        return self.base_cpu_s + self.token_cpu_s * n_tokens


class GuideJob:
    """One call in a thread. From `done` on it has a result or an error."""

    __slots__ = ("_work", "cpu_s", "done", "error", "result", "slow", "started_s")

    def __init__(self, work: Callable[[], Any], slow: bool) -> None:
        self._work = work
        self.slow = slow
        self.done = False
        self.started_s = 0.0
        self.cpu_s = 0.0
        self.result: Any = None
        self.error: Exception | None = None

    @property
    def stuck(self) -> bool:
        return bool(self.started_s) and not self.done and time.monotonic() > self.started_s + MAX_JOB_S

    def run(self) -> None:
        self.started_s, began_s = time.monotonic(), time.thread_time()
        try:
            self.result = self._work()
        except Exception as error:
            self.error = error
        self.cpu_s = time.thread_time() - began_s
        self.done = True


class _Lane:
    """One thread and its queue; replaced when a job occupies it for too long."""

    def __init__(self, slow: bool) -> None:
        self._slow = slow
        self._jobs: queue.SimpleQueue[GuideJob | threading.Event | None] = queue.SimpleQueue()
        self.current: GuideJob | None = None
        threading.Thread(target=self._run, name=f"guides{'-slow' * slow}", daemon=True).start()

    def put(self, job: GuideJob) -> None:
        self._jobs.put(job)

    def wait(self, timeout_s: float) -> bool:
        """Wait until all jobs so far are done, with one wake-up for all. Returns False if they take too long."""
        done = threading.Event()
        self._jobs.put(done)
        return done.wait(timeout_s)

    def retire(self) -> list[GuideJob]:
        """The thread ends with its current job. Returns those that it has not begun."""
        left: list[GuideJob] = []
        with contextlib.suppress(queue.Empty):
            while True:
                if isinstance(job := self._jobs.get_nowait(), GuideJob):
                    left.append(job)
        self._jobs.put(None)
        return left

    def _run(self) -> None:
        if self._slow:
            with contextlib.suppress(OSError, AttributeError):  # threads have a niceness of their own on Linux
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), SLOW_NICE)
        while (job := self._jobs.get()) is not None:
            if isinstance(job, threading.Event):
                job.set()
                continue
            self.current = job
            job.run()
            self.current = None
            if self._slow:
                time.sleep(SLOW_REST * job.cpu_s)


class GuideThreads:
    """Two lanes: one that steps wait for, briefly, and one for sequences whose grammar is slow."""

    def __init__(self, timings: GuideTimings) -> None:
        self.timings = timings
        self._lanes: dict[bool, _Lane] = {}  # by slow; started on first use

    def start(self, work: Callable[[], Any], slow: bool) -> GuideJob:
        job = GuideJob(work, slow)
        if slow not in self._lanes:
            self._lanes[slow] = _Lane(slow)
        self._lanes[slow].put(job)
        return job

    def wait(self, n_jobs: int) -> None:
        """Wait for the jobs of the quick lane; those behind a job that takes too long go on in another thread."""
        limit_s = self.timings.step_wait_s + self.timings.job_wait_s * n_jobs
        if False in self._lanes and not self._lanes[False].wait(limit_s):
            self._replace(slow=False)

    def replace_stuck(self) -> None:
        """Abandon threads whose job is stuck, whether or not its sequence still exists: others wait behind it."""
        for slow, lane in tuple(self._lanes.items()):
            if (job := lane.current) is not None and job.stuck:
                self._replace(slow)

    def _replace(self, slow: bool) -> None:
        left = self._lanes[slow].retire()
        self._lanes[slow] = _Lane(slow)
        for job in left:
            self._lanes[slow].put(job)
