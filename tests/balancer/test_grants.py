import time

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from emberline.balancer.fleet import Fleet, Member
from emberline.balancer.grants import QUIET_S, Grants
from emberline.protocol.frames import EngineLoad
from tests.balancer.test_fleet import Engine


class Bench:
    """A fleet whose engines take a step every `step_s` of a clock that the test turns."""

    def __init__(self, n: int = 1, max_running: int = 32, share: float = 0.5) -> None:
        self.now_s = 100.0
        self.engines = [Engine(f"e{i}", max_running) for i in range(n)]
        self.fleet = Fleet({"m": self.engines})
        self.grants = Grants(self.fleet, share, lambda: self.now_s)

    def run(self, seconds: float, step_s: float = 0.02, most: int = 0) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 0.25
            for engine in self.engines:
                engine.load.steps += round(0.25 / step_s)
                engine.progress_s = time.monotonic()
            for grant in self.grants.issue("m", most):
                grant.give_back()

    def ask(self) -> Member:
        """A request that comes, and where it runs."""
        member = self.fleet["e0"]
        member.take(1)
        return member

    def free(self) -> int:
        grants = self.grants.issue("m", 1000)
        for grant in grants:
            grant.give_back()
        return len(grants)


def test_when_nobody_else_is_there_the_engine_is_full_and_a_little_ahead() -> None:
    bench = Bench(max_running=32)
    assert bench.free() == 32 + 4
    held = bench.grants.issue("m", 10)
    assert len(held) == 10
    assert bench.free() == 26


def test_requests_leave_queued_work_its_share() -> None:
    bench = Bench(max_running=32, share=0.25)
    member = bench.ask()
    assert bench.free() == 8
    member.take(28)
    assert bench.free() == 3  # places that are free
    member.give_back(29)
    bench.run(QUIET_S / 2)
    assert bench.free() == 8  # another request may come any moment
    bench.run(QUIET_S)
    assert bench.free() == 36


def test_some_room_is_always_granted() -> None:
    bench = Bench(max_running=32)
    bench.ask().take(31 + 100)
    bench.engines[0].load.waiting = 50
    assert bench.free() == 2
    held = bench.grants.issue("m", 10)
    assert bench.free() == 0
    held[0].give_back()
    assert bench.free() == 1


def test_none_is_granted_beyond_the_floor_while_requests_wait_in_the_engine() -> None:
    bench = Bench(max_running=32)
    bench.engines[0].load = EngineLoad(running=10, waiting=3, waiting_batch=3)
    assert bench.free() > 2  # what waits is queued work itself
    bench.engines[0].load = EngineLoad(running=10, waiting=3, waiting_batch=2)
    assert bench.free() == 2


def test_a_full_cache_takes_no_more_lines() -> None:
    bench = Bench(max_running=32)
    held = bench.grants.issue("m", 20)
    bench.engines[0].load = EngineLoad(kv_used_blocks=95, kv_total_blocks=100)
    assert bench.free() == 0
    bench.engines[0].load = EngineLoad(kv_used_blocks=50, kv_total_blocks=100)
    assert bench.free() == 16
    assert len(held) == 20


def test_slow_steps_take_room_away_and_quick_ones_give_it_back() -> None:
    bench = Bench(max_running=32)
    bench.ask()
    held = bench.grants.issue("m", 4)
    assert bench.free() == 12
    bench.run(5, step_s=0.1)
    assert bench.free() == 0
    bench.run(15, step_s=0.01)
    assert bench.free() == 12
    assert len(held) == 4


def test_late_first_tokens_take_room_away() -> None:
    bench = Bench(max_running=32)
    member = bench.ask()
    for _ in range(10):
        bench.grants.heard(member, 0.1, mixed=False)
        bench.grants.heard(member, 0.3, mixed=True)
    bench.grants.issue("m", 2)
    bench.run(5)
    assert bench.free() == 0
    for _ in range(30):
        bench.grants.heard(member, 0.12, mixed=True)
    bench.run(15)
    assert bench.free() == 14


def test_an_accelerator_with_nothing_to_give_gives_nothing() -> None:
    bench = Bench(max_running=32)
    bench.ask()
    bench.grants.issue("m", 2)
    bench.engines[0].load.utilisation = 0.99
    bench.run(5)
    assert bench.free() == 0


def test_an_engine_that_is_gone_has_no_room() -> None:
    bench = Bench(n=2, max_running=8)
    assert bench.free() == 18
    bench.engines[0].up = False
    assert {grant.engine for grant in bench.grants.issue("m", 100)} == {"e1"}


def test_a_line_that_shall_run_alone_has_an_engine_emptied_for_it() -> None:
    bench = Bench(n=2, max_running=8)
    held = bench.grants.issue("m", 18)
    here = [grant for grant in held if grant.engine == "e0"]
    there = [grant for grant in held if grant.engine == "e1"]
    there.pop().give_back()
    assert bench.grants.issue_alone("m") is None
    assert bench.free() == 0  # e1 is being emptied
    for grant in there:
        grant.give_back()
    alone = bench.grants.issue_alone("m")
    assert alone is not None
    assert alone.engine == "e1"
    assert bench.grants.issue_alone("m") is None
    for grant in here:
        grant.give_back()
    assert bench.free() == 9
    bench.grants.call_off("m")
    assert bench.free() == 9  # e0 again; e1 is still taken
    alone.give_back()
    assert bench.free() == 18


def test_an_engine_for_prompts_alone_is_given_no_lines() -> None:
    bench = Bench(n=2, max_running=8)
    assert bench.engines[0].info is not None
    bench.engines[0].info = msgspec.structs.replace(bench.engines[0].info, role="prefill")
    assert {grant.engine for grant in bench.grants.issue("m", 100)} == {"e1"}


@given(
    st.lists(st.tuples(st.sampled_from(["issue", "back", "sync", "end", "wait", "go"]), st.integers(1, 8)), max_size=40)
)
def test_room_is_never_counted_twice(acts: list[tuple[str, int]]) -> None:
    bench = Bench(max_running=8)
    member = next(iter(bench.fleet))
    held = []
    for act, n in acts:
        if act == "issue":
            held += bench.grants.issue("m", n)
        elif act == "back" and held:
            held.pop().give_back()
        elif act == "sync":
            member.take(n)
        elif act == "end" and member.in_flight:
            member.give_back(1)
        elif act == "wait":
            bench.engines[0].load.waiting = n
        else:
            bench.run(n)
        assert len(held) <= 8 + 1
        most = bench.free() + len(held)
        assert most >= min(1, most)
    for grant in held:
        grant.give_back()
    assert bench.free() >= 1
