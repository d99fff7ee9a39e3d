"""Slots of providers: requests of one account that hang leave room for others; accounts' own addresses are apart."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from emberline.balancer.balancer import Balancer
from emberline.balancer.cost_model import Settings
from emberline.balancer.endpoint import Capacity
from emberline.balancer.ledger import InFlightRequest
from emberline.protocol.errors import Overloaded

from .balancing import endpoint, nothing_left, request


def provider(max_running: int = 4, **settings: int) -> Balancer:
    balancer = Balancer(Settings(**settings))
    balancer.fleet.join(endpoint("p"), Capacity(max_running=max_running, events=False, shared=True), 0.0)
    return balancer


def ask(balancer: Balancer, account: str, n: int = 1, **fields: Any) -> list[InFlightRequest]:
    """The records of `n` requests that begin to hang, if they get slots."""
    records = [balancer.enqueue(request(account=account, **fields), 0.0) for _ in range(n)]
    balancer.dispatch(0.0)
    return records


def running(records: list[InFlightRequest]) -> int:
    return sum(record.route is not None for record in records)


@pytest.mark.parametrize(("max_running", "most"), [(1, 1), (2, 1), (4, 3), (8, 6), (64, 48), (1024, 768)])
def test_no_account_gets_all_slots(max_running: int, most: int) -> None:
    balancer = provider(max_running, max_waiting=2000)
    assert running(ask(balancer, "a", max_running + 1)) == most
    assert running(ask(balancer, "b")) == (max_running > 1)


@pytest.mark.parametrize(("max_running", "n"), [(2, 2), (4, 4), (4, 16), (8, 7), (64, 128)])
def test_no_request_gets_all_slots(max_running: int, n: int) -> None:
    balancer = provider(max_running)
    large = balancer.enqueue(request(account="a", n=n), 0.0)
    balancer.dispatch(0.0)
    assert large.route is not None, "it runs all the same"
    assert running(ask(balancer, "b")) == 1


def test_prompts_that_hang_do_not_count_as_a_queue() -> None:
    balancer = provider()
    assert running(ask(balancer, "a", 3, tokens=1_000_000)) == 3
    assert running(ask(balancer, "b")) == 1


def test_a_request_passes_those_of_an_account_that_has_its_share() -> None:
    """All within 0.03 s: before any waiting request is routed again."""
    balancer = provider()
    hanging, late = ask(balancer, "a", 6), ask(balancer, "b")
    assert (running(hanging), running(late)) == (3, 1)
    (waiting,) = ask(balancer, "c", priority="flex")  # of a lower class, too
    assert waiting.route is None, "all slots are taken"
    balancer.ended(late[0].request.id, 0.01, "finished")
    assert waiting in balancer.dispatch(0.01)
    balancer.ended(hanging[0].request.id, 0.02, "cancelled")
    assert balancer.dispatch(0.02) == [], "one slot stays free for another account"
    balancer.ended(waiting.request.id, 0.03, "finished")
    assert hanging[3] in balancer.dispatch(0.03)


def test_an_address_of_its_own_has_slots_of_its_own() -> None:
    balancer = provider()
    assert running(ask(balancer, "a", 5, slots="https://a.example")) == 4
    assert running(ask(balancer, "a", 4)) == 3, "at the provider itself"
    assert running(ask(balancer, "b", 5, slots="https://b.example")) == 4
    assert running(ask(balancer, "c")) == 1


def test_a_full_queue_sheds_the_account_that_fills_it() -> None:
    balancer = provider(1, max_waiting=4)
    first, *waiting = ask(balancer, "a", 5)
    with pytest.raises(Overloaded):
        balancer.enqueue(request(account="a"), 0.0)
    (late,) = ask(balancer, "b")
    assert late.error is None
    assert [record.error is not None for record in waiting] == [False, False, False, True], "the last one makes room"
    balancer.ended(first.request.id, 1.0, "finished")
    assert balancer.dispatch(1.0)


@pytest.mark.parametrize(
    ("new", "shed"),
    [("flex", []), ("default", ["flex"]), ("priority", ["flex"])],
)
def test_a_full_queue_sheds_no_request_of_a_better_class(new: str, shed: list[str]) -> None:
    balancer = provider(1, max_waiting=4)
    ask(balancer, "running")
    waiting = ask(balancer, "a", 3, priority="priority") + ask(balancer, "c", priority="flex")
    if shed:
        assert ask(balancer, "c", priority=new)[0].error is None
    else:
        with pytest.raises(Overloaded):
            balancer.enqueue(request(account="c", priority=new), 0.0)
    assert [record.request.priority for record in waiting if record.error is not None] == shed


def test_in_a_full_queue_an_account_makes_room_in_the_class_of_the_new_request() -> None:
    balancer = provider(1, max_waiting=5)
    ask(balancer, "running")
    better, same = ask(balancer, "a", 3, priority="priority"), ask(balancer, "b", 2, priority="flex")
    assert ask(balancer, "c", priority="flex")[0].error is None
    assert [record.error is not None for record in (*better, *same)] == [False, False, False, False, True]


@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 16), st.booleans(), st.booleans()), max_size=40),
)
@example(4, [("a", 16, False, False), ("b", 1, False, False)])
def test_slots_are_never_exceeded_and_always_given_back(
    max_running: int, steps: list[tuple[str, int, bool, bool]]
) -> None:
    balancer = provider(max_running, max_waiting=1000)
    most = max(1, max_running * 3 // 4)
    open_records: list[InFlightRequest] = []
    for now_s, (account, n, own, ends) in enumerate(steps):
        if ends and open_records:
            balancer.ended(open_records.pop(0).request.id, now_s, "cancelled")
        else:
            slots = f"https://{account}.example" if own else ""
            open_records.append(balancer.enqueue(request(account=account, n=n, slots=slots), now_s))
        balancer.dispatch(now_s)
        held = Counter[tuple[str, str]]()
        for record in open_records:
            if record.decode is not None:
                own = bool(record.request.slots)
                n_slots = min(record.request.n, max_running if own else most)
                held[record.request.slots, record.request.account] += n_slots
        assert all(n <= (max_running if slots else most) for (slots, _), n in held.items())
        free = max_running - sum(n for (slots, _), n in held.items() if not slots)
        for record in open_records:
            key = record.request.slots, record.request.account
            if record.decode is None and not held[key] and (key[0] or free >= min(record.request.n, most)):
                pytest.fail(f"{record.request} waits although it holds nothing and there is room")
    for record in open_records:
        balancer.ended(record.request.id, 100.0, "cancelled")
        balancer.dispatch(100.0)
    assert nothing_left(balancer, 100.0)
