import time
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.balancer import fleet as fleet_module
from emberline.balancer.endpoint import Endpoint
from emberline.balancer.engine_client import EngineClient
from emberline.balancer.fleet import Fleet, Member
from emberline.protocol.errors import Overloaded, Unavailable
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


def make(n: int, max_running: int = 4, max_waiting: int = 8) -> tuple[Fleet, list[Engine]]:
    engines = [Engine(f"e{i}", max_running) for i in range(n)]
    return Fleet({"m": engines}, max_waiting), engines


def test_without_affinity_the_least_loaded_is_chosen() -> None:
    fleet, _ = make(3)
    assert Counter(fleet.choose("m", None, 1).name for _ in range(9)) == {"e0": 3, "e1": 3, "e2": 3}


def test_a_session_keeps_its_engine_while_it_has_room() -> None:
    fleet, _ = make(3)
    home = fleet.choose("m", "alice/s1", 1)
    assert {fleet.choose("m", "alice/s1", 1).name for _ in range(3)} == {home.name}
    assert home.in_flight == 4
    assert fleet.choose("m", "alice/s1", 1) is not home  # full: spilled to the least loaded
    home.give_back(1, took_s=0.5)
    assert fleet.choose("m", "alice/s1", 1) is home


def test_when_all_are_full_a_session_waits_at_home() -> None:
    fleet, _ = make(2, max_running=1)
    home = fleet.choose("m", "s", 1)
    fleet.choose("m", None, 1)
    assert fleet.choose("m", "s", 1) is home


def test_sessions_spread_and_move_little_when_an_engine_leaves() -> None:
    fleet, engines = make(4, max_running=1 << 20)
    sessions = [f"s{i}" for i in range(400)]
    before = {session: fleet.choose("m", session, 1).name for session in sessions}
    assert min(Counter(before.values()).values()) > 60
    engines[0].up = False
    after = {session: fleet.choose("m", session, 1).name for session in sessions}
    assert all(after[session] == before[session] for session in sessions if before[session] != "e0")


def test_the_bound_on_waiting_refuses_with_a_time() -> None:
    fleet, _ = make(1, max_running=2, max_waiting=3)
    for _ in range(5):
        fleet.choose("m", None, 1)
    with pytest.raises(Overloaded) as refused:
        fleet.choose("m", None, 1)
    assert refused.value.retry_after_s is not None
    assert 1 <= refused.value.retry_after_s <= 60
    fleet["e0"].give_back(1, took_s=1.0)
    fleet.choose("m", None, 1)


def test_a_request_that_must_not_wait_is_refused_where_it_would() -> None:
    fleet, engines = make(2, max_running=2)

    def choose(n: int) -> str:
        return fleet.choose("m", "alice/s1", n, reject_if_busy=True).name

    assert Counter(choose(1) for _ in range(4)) == {"e0": 2, "e1": 2}
    with pytest.raises(Overloaded) as refused:
        choose(1)
    assert refused.value.retry_after_s
    fleet["e0"].give_back(1, took_s=1.0)
    with pytest.raises(Overloaded):
        choose(2)
    engines[0].load = EngineLoad(running=1, waiting=1)  # out of KV: it has a queue although a slot is free
    with pytest.raises(Overloaded):
        choose(1)
    engines[0].load = EngineLoad(running=1)
    assert choose(1) == "e0"
    assert fleet.choose("m", "alice/s1", 1).in_flight == 3  # others may wait


def test_avoided_and_stalled_engines_are_last_resorts(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, engines = make(2)
    assert fleet.choose("m", None, 1, avoid=("e0",)).name == "e1"
    assert fleet.choose("m", None, 1, avoid=("e0", "e1")).name in ("e0", "e1")
    monkeypatch.setattr(fleet_module, "STALLED_S", -1.0)  # whoever has work counts as stuck
    assert fleet["e0"].in_flight + fleet["e1"].in_flight == 2
    idle = [member for member in fleet if not member.in_flight]
    for _ in range(2):
        assert fleet.choose("m", None, 1).name in {member.name for member in idle} or not idle
    engines[0].up = engines[1].up = False
    with pytest.raises(Unavailable, match="no engine of m"):
        fleet.choose("m", None, 1)
    with pytest.raises(Unavailable):
        fleet.choose("unknown", None, 1)


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


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4), st.booleans()), max_size=60))
def test_in_flight_is_what_was_chosen_and_not_given_back(script: list[tuple[int, int, bool]]) -> None:
    fleet, _ = make(3, max_running=4, max_waiting=6)
    held: list[tuple[Member, int]] = []
    for session, n, release in script:
        if release and held:
            member, size = held.pop()
            member.give_back(size, took_s=0.1)
        else:
            try:
                held.append((fleet.choose("m", f"s{session}" if session else None, n), n))
            except Overloaded:
                assert any(member.in_flight + n > 10 for member in fleet)
        assert sum(member.in_flight for member in fleet) == sum(size for _, size in held)
        assert all(0 <= member.in_flight <= 10 for member in fleet)
