"""Checks of what an engine worker says, at the border: a worker that says what cannot be true is not believed further.

A worker with a valid join token may be faulty or hostile. Nobody can tell from outside whether it computed the right
tokens, but what contradicts itself or its own announcement is seen before anything of it reaches a client.
"""

import time
from operator import attrgetter

import msgspec

from emberline.balancer.load_reports import implausible
from emberline.protocol.frames import EngineInfo, EngineLoad, Heartbeat, Step

FORGOTTEN_S = 3600.0  # after the end of an exclusion
MAX_EXCLUSION_S = 3600.0
SEEN_ADVANCES = 3  # heartbeats with more computed tokens, without a Step frame: one long step explains fewer


_ids_of = attrgetter("token_ids")
_rest_of_4 = (3).__and__


class StepCheck:
    """Checks the Step frames of one connection."""

    __slots__ = ("_n_received", "_n_steps", "_n_tokens", "_vocab_size")

    def __init__(self, info: EngineInfo, load: EngineLoad) -> None:
        self._vocab_size = info.vocab_size
        self._n_received = 0  # output tokens
        self._n_steps, self._n_tokens = load.steps, load.output_tokens  # in the last report

    def problem(self, step: Step) -> str:
        """Why the frame cannot be true; empty if it can. The hot path: it runs once a step, without Python code for
        each token."""
        pieces = list(map(_ids_of, step.deltas))
        if ids := b"".join(pieces):
            if any(map(_rest_of_4, map(len, pieces))):
                return "it sent a part of a token id"
            if (most := max(memoryview(ids).cast("I"))) >= self._vocab_size:
                return f"it sent token {most}, and its vocabulary has {self._vocab_size}"
            self._n_received += len(ids) >> 2
        if step.n_sent != self._n_received and step.n_sent >= 0:
            return f"it says that it sent {step.n_sent} tokens, and {self._n_received} came: some were repeated or lost"
        load = step.load
        if load.steps < self._n_steps or load.output_tokens < self._n_tokens:
            return "it counts backwards"
        self._n_steps, self._n_tokens = load.steps, load.output_tokens
        counts = load.running, load.waiting, load.waiting_tokens, load.kv_used_blocks, load.prompt_tokens
        if min(counts) < 0 or load.kv_used_blocks > load.kv_total_blocks or load.running_batch > load.running:
            return implausible(load)
        return ""


class RequestProgress:
    """Notices a worker that has requests of ours, is alive by its heartbeats, and tells nothing of their progress."""

    def __init__(self, no_step_s: float, no_work_s: float, max_gap_s: float) -> None:
        """The limits of Timings, and `max_gap_s` of StallLimits."""
        self._no_step_s, self._no_work_s, self._max_gap_s = no_step_s, no_work_s, max_gap_s
        self._checked_s = 0.0
        # The owner sets these with each Step frame, and with the first request after a pause: a call would cost more.
        self.last_s = 0.0  # monotonic time
        self.n_advances = 0  # of the computed tokens in heartbeats since then
        self._computed_tokens = 0
        self._heartbeat = Heartbeat()

    def beat(self, heartbeat: Heartbeat) -> None:
        if heartbeat.computed_tokens > self._computed_tokens:
            self._computed_tokens = heartbeat.computed_tokens
            self.n_advances += 1
        self._heartbeat = heartbeat

    def problem(self, info: EngineInfo, load: EngineLoad, sees_all_reports: bool, now_s: float) -> str:
        """Why the worker is given up; empty if it is not. Call it while requests of ours are there."""
        missed_s = now_s - max(self._checked_s, self.last_s) - self._max_gap_s
        if missed_s > 0:  # this process was stopped: the worker's frames are still unread
            self.last_s += missed_s
        self._checked_s = now_s
        silent_s, beat = now_s - self.last_s, self._heartbeat
        if silent_s < self._no_step_s or info.task != "generate" or beat.preparing:
            return ""
        if self.n_advances >= SEEN_ADVANCES:
            return f"it computes, but has sent no step for {silent_s:.0f} s"
        if silent_s < self._no_work_s or beat.in_step:
            return ""
        if load.awaiting or load.pushing or load.fetching:  # it waits for other workers, or for a tier
            return ""
        if info.transfers and not sees_all_reports:  # it may wait for other workers
            return ""
        return f"it has requests, and has taken no step for {silent_s:.0f} s"


class Exclusion(msgspec.Struct):
    """Period in which the core does not connect to a worker that reported something impossible. The period doubles each
    time, until the worker has reported nothing impossible for FORGOTTEN_S."""

    n_times: int = 0
    until_s: float = 0.0  # monotonic

    def extend(self, first_s: float) -> float:
        """Exclude the worker from now on. Returns for how many seconds."""
        if time.monotonic() > self.until_s + FORGOTTEN_S:
            self.n_times = 0
        seconds = min(MAX_EXCLUSION_S, first_s * 2.0 ** min(self.n_times, 32))
        self.n_times += 1
        self.until_s = time.monotonic() + seconds
        return seconds

    @property
    def left_s(self) -> float:
        return max(0.0, self.until_s - time.monotonic())


class Exclusions:
    """The exclusions of workers by name. They outlast connections: a worker that leaves and joins again stays out."""

    MAX = 1024

    def __init__(self) -> None:
        self._by_name: dict[str, Exclusion] = {}

    def of(self, name: str) -> Exclusion:
        """The worker's own. Forgets one that has ended, once there are MAX."""
        if name not in self._by_name and len(self._by_name) >= self.MAX:
            ended = min(self._by_name, key=lambda known: self._by_name[known].until_s)
            del self._by_name[ended]
        return self._by_name.setdefault(name, Exclusion())
