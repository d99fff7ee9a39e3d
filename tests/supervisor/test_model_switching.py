"""The rule by which models are loaded and unloaded, in virtual time: nothing running is cut, no request starves."""

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.supervisor.model_switching import Decision, Demand, Limits, ManagedModel, ModelSwitching

TICK_S = 0.5
LOAD_S, UNLOAD_S = 2.0, 0.5
TURN_S = 5.0
LONGEST_S = 8.0  # of a stream


@dataclass
class Request:
    model: str
    arrived_s: float
    takes_s: float
    started_s: float = math.inf
    is_job: bool = False

    @property
    def end_s(self) -> float:
        return self.started_s + self.takes_s


@dataclass
class Machine:
    """Runs every request at once that reaches a loaded model; loading and unloading take a fixed time."""

    rule: ModelSwitching
    now_s: float = 0.0
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def demand(self, model: str) -> Demand:
        def oldest(is_job: bool) -> float | None:
            waits = [self.now_s - r.arrived_s for r in self.waiting if r.model == model and r.is_job == is_job]
            return max(waits, default=None)

        return Demand(sum(r.model == model for r in self.running), oldest(False), oldest(True))

    def tick(self) -> Decision:
        rule, now_s = self.rule, self.now_s
        self.ended += [r for r in self.running if r.end_s <= now_s]
        self.running = [r for r in self.running if r.end_s > now_s]
        for model in rule.models.values():
            if model.state == "loading" and now_s >= model.since_s + LOAD_S:
                rule.set_state(model.id, "loaded", now_s)
            if model.state == "unloading" and now_s >= model.since_s + UNLOAD_S:
                rule.set_state(model.id, "on_disk", now_s)
        decision = rule.decide(self.demand, now_s)
        for name in decision.unload:
            assert rule.models[name].state == "loaded"
            assert not any(r.model == name for r in self.running), "a running stream is cut"
            rule.set_state(name, "unloading", now_s)
        for name in decision.load:
            rule.set_state(name, "loading", now_s)
        self.log += [f"{kind} {name}" for kind, names in decision._asdict().items() for name in names]
        present = [model for model in rule.models.values() if model.takes_memory]
        assert sum(model.memory_bytes for model in present) <= rule.limits.memory_bytes
        assert not rule.limits.max_loaded or len(present) <= rule.limits.max_loaded
        for request in list(self.waiting):
            model = rule.models[request.model]
            if model.state == "loaded" and not model.closed:
                request.started_s = now_s
                self.waiting.remove(request)
                self.running.append(request)
        return decision

    def run(self, until_s: float, arrivals: list[Request] | None = None) -> None:
        coming = sorted(arrivals or [], key=lambda request: request.arrived_s)
        while self.now_s <= until_s:
            while coming and coming[0].arrived_s <= self.now_s:
                self.waiting.append(coming.pop(0))
            self.tick()
            self.now_s += TICK_S


def machine(*models: ManagedModel, **limits: float) -> Machine:
    given = {
        "memory_bytes": 100,
        "switch_after_s": TURN_S,
        "keep_alive_s": 60.0,
        "batch_switch_after_s": 30.0,
        **limits,
    }
    rule = ModelSwitching(Limits(**given))  # type: ignore[arg-type]
    rule.add(models)
    return Machine(rule)


def model(name: str, memory: int = 10, **more: object) -> ManagedModel:
    return ManagedModel(id=name, memory_bytes=memory, **more)  # type: ignore[arg-type]


def state(m: Machine, name: str) -> str:
    return m.rule.models[name].state


def test_a_model_is_loaded_for_its_first_request_and_unloaded_when_idle() -> None:
    m = machine(model("a"), model("b", pinned=True, state="loaded"))
    m.run(10, [Request("a", 1.0, 3.0)])
    assert (state(m, "a"), [r.started_s for r in m.ended]) == ("loaded", [3.0])
    m.run(64)
    assert state(m, "a") == "loaded", "kept alive since its last request"
    m.run(70)
    assert (state(m, "a"), state(m, "b")) == ("on_disk", "loaded")


def test_what_a_client_asked_for_counts_until_the_model_is_unloaded() -> None:
    m = machine(model("a"), model("b", pinned=True, state="loaded"))
    m.rule.keep_alive("a", 5.0)
    m.rule.keep_alive("b", -1.0)
    m.run(20, [Request("a", 1.0, 3.0)])
    assert (state(m, "a"), state(m, "b")) == ("on_disk", "loaded")
    m.run(40, [Request("a", 21.0, 3.0)])
    assert state(m, "a") == "loaded", "the server's again"
    m.rule.keep_alive("b", 0.0)
    m.run(42)
    assert state(m, "b") == "on_disk", "a client may unload a model that was named at start"


def test_models_that_fit_are_loaded_beside_each_other() -> None:
    m = machine(model("a", 60), model("b", 40), model("c", 41))
    m.run(5, [Request("a", 0.0, 100.0), Request("b", 0.0, 100.0)])
    assert m.log == ["load b", "load a"]
    m.run(100, [Request("c", 6.0, 1.0)])
    assert state(m, "c") == "on_disk", "both others run, and nothing running is cut"
    m.run(115)
    assert state(m, "c") == "loaded"


def test_the_least_recently_used_idle_model_makes_way_at_once() -> None:
    m = machine(*(model(name, 40) for name in "abc"))
    m.run(4, [Request("a", 0.0, 1.0), Request("b", 2.0, 1.0)])
    m.run(8, [Request("c", 4.5, 1.0)])
    assert m.log == ["load a", "load b", "close a", "unload a", "load c"]


def test_a_busy_model_makes_way_after_its_turn_and_gets_another() -> None:
    m = machine(model("a"), model("b"), max_loaded=1)
    a = [Request("a", t / 2, 2.0) for t in range(120)]
    b = [Request("b", 4.0, 2.0), Request("b", 4.5, 2.0)]
    m.run(70, [*a, *b])
    assert len(m.ended) == 122
    assert m.log == [
        *("load a", "close a", "unload a", "load b", "close b", "unload b", "load a"),
    ]
    assert max(r.started_s for r in b) <= 4 + TURN_S + 2.0 + UNLOAD_S + LOAD_S + 4 * TICK_S


def test_each_turn_lasts_while_both_models_are_busy() -> None:
    """Loading costs time: a model that waited since the last switch does not end the other one's turn early."""
    m = machine(model("a"), model("b"), max_loaded=1)
    arrivals = [Request(name, t / 2, 0.5) for t in range(200) for name in "ab"]
    loaded_s: dict[str, float] = {}
    turns_s: list[float] = []
    while m.now_s < 100:
        m.waiting += [request for request in arrivals if m.now_s <= request.arrived_s < m.now_s + TICK_S]
        before = {name for name in "ab" if state(m, name) == "loaded"}
        turns_s += [m.now_s - loaded_s[name] for name in m.tick().close]
        loaded_s |= {name: m.now_s for name in "ab" if state(m, name) == "loaded" and name not in before}
        m.now_s += TICK_S
    assert len(turns_s) >= 6
    assert min(turns_s) >= TURN_S


def test_a_small_model_does_not_take_the_room_that_a_large_one_waits_for() -> None:
    m = machine(model("a", 50), model("b", 50), model("large", 100), model("small", 40))
    m.run(4, [Request("a", 0.0, 12.0), Request("b", 0.0, 30.0)])
    m.run(60, [Request("large", 5.0, 1.0), *(Request("small", 6.0 + t, 1.0) for t in range(30))])
    loads = [line for line in m.log if line.startswith("load ")]
    assert loads[2:] == ["load large", "load small"], "large waited first, though small fits beside b"


def test_old_requests_of_an_overloaded_model_do_not_bring_it_back_at_once() -> None:
    """Those waited while it was loaded: that was its turn."""
    m = machine(model("a", state="loaded"), model("b"), max_loaded=1)
    m.rule.models["a"].asked = "unload"
    m.waiting = [Request("a", -100.0, 1.0), Request("b", -1.0, 1.0)]
    m.run(6)
    assert m.log[:3] == ["close a", "unload a", "load b"]


def test_a_model_that_made_way_is_opened_again_when_nobody_waits_any_more() -> None:
    m = machine(model("a"), model("b"), max_loaded=1)
    m.run(4, [Request("a", 0.0, 30.0)])
    m.waiting.append(Request("b", 4.0, 1.0))
    m.run(12)
    assert m.rule.models["a"].closed
    m.waiting.clear()
    m.run(14, [Request("a", 13.0, 1.0)])
    assert not m.waiting, "it takes requests again"
    assert state(m, "a") == "loaded"


def test_pinned_models_stay_and_the_reason_is_told() -> None:
    m = machine(model("a", 70, pinned=True, state="loaded"), model("b", 40), model("c", 30))
    m.run(30, [Request("b", 0.0, 1.0), Request("c", 0.0, 1.0)])
    assert (state(m, "a"), state(m, "b"), state(m, "c")) == ("loaded", "on_disk", "loaded")
    assert "raise [models] memory_bytes" in m.rule.room_problem("b")
    assert not m.rule.room_problem("c")
    one = machine(model("a", pinned=True, state="loaded"), model("b"), max_loaded=1)
    assert "max_loaded is 1" in one.rule.room_problem("b")


def test_jobs_are_grouped_by_loaded_model_within_a_bound() -> None:
    m = machine(model("a"), model("b"), max_loaded=1)
    a = [Request("a", t / 2, 2.0, is_job=True) for t in range(200)]
    b = [Request("b", 1.0, 1.0, is_job=True), Request("b", 20.0, 1.0, is_job=True)]
    m.run(50, [*a, *b])
    assert m.log[:4] == ["load a", "close a", "unload a", "load b"]
    started = [r.started_s for r in b]
    assert started[0] == started[1], "both in one turn"
    assert 31.0 <= started[0] <= 31.0 + 2 + UNLOAD_S + LOAD_S + 4 * TICK_S
    alone = machine(model("a"), model("b"), max_loaded=1)
    alone.run(60, [Request("a", 0.0, 1.0, is_job=True), Request("b", 0.0, 1.0, is_job=True)])
    assert len(alone.ended) == 2
    assert max(r.started_s for r in alone.ended) < 20, "nothing was left for the loaded model"


def test_an_operator_loads_and_unloads() -> None:
    m = machine(model("a"), model("b"), max_loaded=1)
    m.rule.models["a"].asked = "load"
    m.run(4)
    assert state(m, "a") == "loaded"
    m.run(6, [Request("a", 4.5, 10.0)])
    m.rule.models["a"].asked = "unload"
    m.run(12)
    assert (state(m, "a"), m.rule.models["a"].closed) == ("loaded", True)
    m.run(16)
    assert state(m, "a") == "on_disk"


@pytest.mark.parametrize("n_models", [2, 3])
@given(data=st.data())
def test_no_stream_is_cut_and_every_wait_is_bounded(n_models: int, data: st.DataObject) -> None:
    names = "abc"[:n_models]
    request = st.builds(
        Request,
        model=st.sampled_from(names),
        arrived_s=st.floats(0, 120),
        takes_s=st.floats(0.1, LONGEST_S),
    )
    arrivals = data.draw(st.lists(request, max_size=60))
    if data.draw(st.booleans()):  # one model is asked for all the time
        arrivals += [Request("a", t / 2, 3.0) for t in range(240)]
    m = machine(*(model(name) for name in names), max_loaded=1)
    m.run(400, arrivals)
    assert len(m.ended) == len(arrivals), "every request ends"
    switch_s = LONGEST_S + UNLOAD_S + LOAD_S + 3 * TICK_S
    bound_s = (n_models - 1) * (TURN_S + switch_s) + switch_s
    assert max((r.started_s - r.arrived_s for r in m.ended), default=0.0) <= bound_s


@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=5),
    arrivals=st.lists(st.tuples(st.integers(0, 4), st.floats(0, 60), st.floats(0.1, 8), st.booleans()), max_size=40),
    max_loaded=st.integers(0, 3),
)
def test_memory_is_never_exceeded_and_everything_ends(
    sizes: list[int], arrivals: list[tuple[int, float, float, bool]], max_loaded: int
) -> None:
    m = machine(*(model(f"m{n}", size) for n, size in enumerate(sizes)), max_loaded=max_loaded)
    requests = [Request(f"m{n % len(sizes)}", at, takes, is_job=is_job) for n, at, takes, is_job in arrivals]
    m.run(900, requests)
    assert len(m.ended) == len(requests)
