"""Tells an engine that hangs from one that computes for long, by its heartbeats and the tokens that it has computed.

An engine sends heartbeats from a thread of its own, so that none means that its process is stopped or its machine cut
off; with heartbeats, a step that takes far longer than predicted hangs. A suspect's connection is dropped, its requests
move, and it is trusted again once it has generated a token for a canary request.
"""

import msgspec

from emberline.protocol.frames import Heartbeat

STALL_STEPS = 20  # a step hangs after this many times the predicted time


class StallLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds after which an engine hangs."""

    silent_s: float = 5.0  # without a byte
    min_stall_s: float = 5.0  # of a step without a computed token, however short its prediction
    first_step_s: float = 60.0  # of a step without a prediction: kernels may be compiled, weights read from the disk
    prepare_s: float = 600.0  # to compile or capture a part of what is prepared ahead of requests
    check_s: float = 0.5  # between two checks
    max_gap_s: float = 1.0  # that one check counts: if this process was stopped, the engine's frames are still unread


DEFAULTS = StallLimits()


class StallDetector:
    """Watches one engine over all its connections. Its owner calls `check` every `limits.check_s`."""

    def __init__(self, limits: StallLimits = DEFAULTS) -> None:
        self.limits = limits
        self._patience = 1  # doubles each time that a step was given up, until one computes something: no endless loop
        self.connected(0.0)

    def connected(self, now_s: float) -> None:
        """A new connection: nothing that was seen on the last one counts."""
        self._checked_s = now_s
        self._has_received = True
        self._silent_s = 0.0
        self._stuck_s = 0.0
        self._computed_tokens = -1
        self._progress: tuple[int, int, bool] | None = None  # what was computed and prepared when it last advanced
        self._last = Heartbeat()

    def received(self) -> None:
        """Something has arrived."""
        self._has_received = True

    def beat(self, heartbeat: Heartbeat) -> None:
        self._last = heartbeat

    def check(self, computed_tokens: int, now_s: float) -> str:
        """The reason why the engine hangs; empty if it does not. `computed_tokens` is from its last load report."""
        limits = self.limits
        elapsed_s = min(now_s - self._checked_s, limits.max_gap_s)
        self._checked_s = now_s
        self._silent_s = 0.0 if self._has_received else self._silent_s + elapsed_s
        self._has_received = False
        if self._silent_s > limits.silent_s:
            return f"it has sent nothing for {limits.silent_s:.0f} s"
        last, computed_tokens = self._last, max(computed_tokens, self._last.computed_tokens)
        if computed_tokens > self._computed_tokens >= 0:
            self._patience = 1
        self._computed_tokens = computed_tokens
        progress = (computed_tokens, last.n_prepared, last.preparing)
        is_busy = last.in_step or last.preparing
        self._stuck_s = self._stuck_s + elapsed_s if is_busy and progress == self._progress else 0.0
        self._progress = progress
        if self._stuck_s <= self._limit_s(last):
            return ""
        self._patience *= 2
        return f"it has computed no token for {self._stuck_s:.0f} s of a step"

    def _limit_s(self, last: Heartbeat) -> float:
        if last.preparing:
            return self.limits.prepare_s * self._patience
        if not last.step_s:
            return self.limits.first_step_s * self._patience
        return max(self.limits.min_stall_s, STALL_STEPS * last.step_s)
