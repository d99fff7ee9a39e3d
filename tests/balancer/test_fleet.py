import time
from collections.abc import Iterator

import pytest

from emberline.balancer import fleet as fleet_module
from emberline.balancer.endpoint import Endpoint
from emberline.balancer.engine_client import EngineClient
from emberline.balancer.fleet import Member
from emberline.protocol.frames import EngineInfo, EngineLoad


class Engine(EngineClient):
    """A client that is connected because it says so."""

    def __init__(self, name: str, max_running: int = 4) -> None:
        self.endpoint = Endpoint(name=name, address="unix:/nowhere")
        self.info = EngineInfo(
            model="m", fingerprint="f", context_len=64, vocab_size=8, eos_ids=(), max_running=max_running
        )
        self.load = EngineLoad()
        self.progress_s = time.monotonic()
        self.problem = ""
        self.up = True

    @property
    def connected(self) -> bool:
        return self.up


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [1000.0]
    monkeypatch.setattr(fleet_module.time, "monotonic", lambda: now[0])
    return now


def test_stalled_means_work_without_steps(clock: list[float]) -> None:
    engine = Engine("e0")
    engine.progress_s = clock[0]
    member = Member("m", engine)
    clock[0] += 3600
    assert member.healthy  # idle for an hour
    member.take(1)
    clock[0] += 20
    assert member.healthy
    clock[0] += 20
    assert not member.healthy
    member.observe(EngineLoad(running=1, steps=5), age_s=1.0)  # a door saw a step
    assert member.healthy
    assert member.load.running == 1
    clock[0] += 60
    assert not member.healthy
    engine.progress_s = clock[0]  # our own connection saw one
    engine.load = EngineLoad(running=2)
    assert member.healthy
    assert member.load.running == 2
    engine.up = False
    assert not member.healthy
