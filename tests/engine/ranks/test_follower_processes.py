"""The followers that rank 0 starts: they end within the time that all of them have together."""

import subprocess
from typing import Any

import pytest

from emberline.engine.ranks import follower_processes
from emberline.engine.ranks.follower_processes import FollowerProcesses


class Hanging:
    """A process that ends only when it is killed."""

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.killed = clock, False

    def wait(self, timeout: float | None = None) -> int:
        if not self.killed:
            assert timeout is not None
            self.clock[0] += timeout
            raise subprocess.TimeoutExpired("worker", timeout)
        return -9

    def kill(self) -> None:
        self.killed = True


def test_followers_that_hang_are_killed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(follower_processes.time, "monotonic", lambda: clock[0])
    processes = FollowerProcesses([], [], "unix:nobody", "token")
    children: dict[int, Any] = {rank: Hanging(clock) for rank in range(1, 8)}
    processes._children = children
    processes.end(5.0)
    assert clock[0] == 105.0
    assert all(child.killed for child in children.values())
