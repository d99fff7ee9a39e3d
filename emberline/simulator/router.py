"""What decides where a job goes, as the simulated fleet sees it."""

from collections.abc import Callable
from typing import Protocol

from emberline.simulator.job import Job
from emberline.simulator.worker import Worker

Send = Callable[[Job, str, str], None]  # job, the worker that decodes, the one that prefills if another ("": the same)


class Router(Protocol):
    """Told of everything a router in front of real engines would know, at the time it would know it."""

    def arrived(self, job: Job) -> None:
        """Send it now, or later."""

    def prefilled(self, job: Job) -> None: ...
    def began(self, job: Job) -> None: ...
    def ended(self, job: Job) -> None: ...
    def reported(self, worker: Worker) -> None: ...
    def cached(self, worker: Worker, stored: bool, segment: int, start: int, end: int) -> None: ...
    def refused(self) -> int:
        """Jobs that were turned away."""
