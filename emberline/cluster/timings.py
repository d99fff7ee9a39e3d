"""Times of a server: how long it waits for engines, cores and workers, and how often it does things."""

from collections.abc import Iterator

import msgspec

from emberline.accounts.usage_ledger import UsageTimings
from emberline.balancer.stall_detector import StallLimits
from emberline.net.link import retry_delays


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds. `serve`, `open_service` and `open_http_worker` hand them on to every part of the server."""

    # --- requests ----------------------------------------------------------------------------------------------------

    connect_wait_s: float = 2.0  # for this process's connection to an engine that the core already sees
    reconnect_wait_s: float = 15.0  # the same after a failover: the core may not have seen the engine's death yet
    restart_wait_s: float = 60.0  # for an engine to come back after a failover: it may have weights to load
    deadline_grace_s: float = 1.0  # engines keep deadlines; the run catches an engine that does not answer
    settle_wait_s: float = 30.0  # for engines to say what they computed of an aborted request: a step may be long
    cached_wait_s: float = 1.0  # for a prefill worker to report its cached tokens, after the first token
    checkpoint_s: float = 1.0  # between two reports of what running requests have used
    close_wait_s: float = 1.0  # for consumers of streams to notice that the connection was cut

    # --- connections -------------------------------------------------------------------------------------------------

    dial_s: float = 10.0
    welcome_s: float = 10.0
    canary_s: float = 30.0  # for an engine that hung to generate a token
    hung_s: float = 300.0  # without a step, where an engine sends no heartbeats: one step may take minutes
    no_step_s: float = 10.0  # without a Step frame from an engine that has requests of ours, and computes
    no_work_s: float = 60.0  # the same from one that computes nothing: a grammar may have to be compiled first
    exclusion_s: float = 60.0  # of a worker that said what cannot be true; doubles each time
    first_retry_s: float = 0.05  # before the first attempt to connect again; doubles each time
    last_retry_s: float = 1.0
    notice_interval_s: float = 1.0  # between two notices of an HTTP worker to the core
    provider_sweep_s: float = 1.0  # between two looks for providers whose last key was removed; two remove one

    # --- workers of a cluster ----------------------------------------------------------------------------------------

    role_s: float = 10.0  # for a worker to say that it has its new role: it does between two steps
    push_s: float = 10.0  # for a worker that drains to send its conversations to others
    remember_s: float = 0.5  # for a process to remember a conversation whose last request has ended
    challenge_s: float = 30.0  # for a worker that joins to answer its challenge
    sweep_s: float = 10.0  # between two looks for members that were lost
    report_s: float = 2.0  # between two load reports of a core to the planner
    planner_round_s: float = 2.0  # between two rounds of the planner

    # --- models ------------------------------------------------------------------------------------------------------

    model_scan_s: float = 1.0  # between two looks at the model store for models that were pulled or removed

    stalls: StallLimits = StallLimits()
    usage: UsageTimings = UsageTimings()

    def reconnect_delays(self) -> Iterator[float]:
        """Seconds before each attempt to connect again."""
        return retry_delays(self.first_retry_s, self.last_retry_s)


DEFAULTS = Timings()
