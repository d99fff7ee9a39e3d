from hashlib import blake2b

from emberline.kv.eviction_order import EvictionOrder
from emberline.kv.retention import (
    MAX_SESSIONS,
    MAX_TURNS,
    N_BINS,
    OWNER_SHARE,
    PRIORS,
    SIDE_TURNS,
    Kind,
    Retention,
    ReturnTimes,
)

OWNER = b"owner of the chain"


def chain(name, n, prefix=()):
    """Content keys of n blocks, the first of which are those of the prefix."""
    own = (blake2b(f"{name}-{place}".encode(), digest_size=16).digest() for place in range(len(prefix), n))
    return [*prefix, *own]


class Worker:
    """A device's blocks, added when a turn ends; block numbers count up."""

    def __init__(self, n_blocks=4096, max_sessions=MAX_SESSIONS):
        self.retention = Retention(max_sessions=max_sessions)
        self.order = EvictionOrder(n_blocks, self.retention)
        self.blocks = {}  # key -> block
        self.absent = set()  # keys of evicted ones

    def turn(self, session, keys, *, owner=OWNER, tools=False, seconds=1.0, n_shared=0, **end):
        conversation = self.retention.begin(owner, session, keys, n_shared)
        self.order.apply_changes()
        self.order.remove([self.blocks[key] for key in keys if key in self.blocks and key not in self.absent])
        self.retention.now_s += seconds
        self.retention.end(conversation, keys, **end)
        self.absent -= set(keys)
        for key in keys:
            self.blocks.setdefault(key, len(self.blocks))
        blocks = [self.blocks[key] for key in keys]
        self.order.add_shared(blocks[: conversation.n_shared])
        self.order.add(blocks[conversation.n_shared :], conversation)
        if tools:
            self.retention.ended_with_tool_calls(conversation)
        return conversation

    def evict(self, n):
        names = {block: key for key, block in self.blocks.items()}
        evicted = [names[block] for block in self.order.take(n)]
        self.absent |= set(evicted)
        return evicted


def test_a_conversation_that_waits_for_a_tool_outlives_one_whose_user_thinks():
    worker = Worker()
    tool, user = chain("tool", 32), chain("user", 32)
    worker.turn(b"a", tool, tools=True)
    worker.retention.now_s += 20
    worker.turn(b"b", user)
    worker.retention.now_s += 5
    assert worker.evict(64) == [*reversed(user), *reversed(tool)]


def test_priorities_decay():
    """A tool that has not answered for an hour is not expected any more."""
    worker = Worker()
    tool, user = chain("tool", 32), chain("user", 32)
    worker.turn(b"a", tool, tools=True)
    worker.retention.now_s += 3600
    worker.turn(b"b", user)
    assert worker.evict(64) == [*reversed(tool), *reversed(user)]


def test_the_edited_end_of_a_conversation_is_evicted_first():
    worker = Worker()
    old, other = chain("old", 64), chain("other", 32)
    worker.turn(b"b", other)
    worker.retention.now_s += 600
    worker.turn(b"a", old, tools=True)
    edited = chain("edited", 72, prefix=old[:40])
    conversation = worker.retention.begin(OWNER, b"a", edited, 0)
    worker.order.apply_changes()
    gone = worker.evict(17)
    assert gone == [*reversed(old[47:])]  # up to the first sampled key that differs
    assert conversation.kind is Kind.TOOL
    assert worker.evict(32) == [*reversed(other)]


def test_a_side_request_is_evicted_before_its_main_conversation():
    worker = Worker()
    system = chain("system", 16)
    main = chain("main", 200, prefix=system)
    side = chain("side", 24, prefix=system)
    worker.turn(b"a", main, tools=True)
    turn = worker.turn(b"a", side, n_shared=16)
    assert turn.kind is Kind.SIDE
    worker.retention.now_s += 60
    assert worker.evict(8) == [*reversed(side[16:])]
    assert worker.turn(b"a", chain("main", 210, prefix=main), tools=True).kind is Kind.TOOL


def test_after_a_compaction_the_short_conversation_is_the_main_one():
    worker = Worker()
    long, compact = chain("long", 400), chain("compact", 40)
    worker.turn(b"a", long, tools=True)
    for n in range(SIDE_TURNS):
        compact = chain("compact", 40 + 10 * n, prefix=compact)
        kind = worker.turn(b"a", compact, tools=True).kind
        assert kind is (Kind.TOOL if n == SIDE_TURNS - 1 else Kind.SIDE)
    assert worker.evict(400) == [*reversed(long)]


def test_a_shared_prefix_outlives_the_conversations_that_have_it():
    worker = Worker()
    system = chain("system", 16)
    worker.turn(b"a", chain("a", 64, prefix=system), tools=True)
    worker.turn(b"b", chain("b", 64, prefix=system), tools=True, n_shared=16)
    worker.retention.now_s += 100
    evicted = worker.evict(96)
    assert not set(evicted) & set(system)
    assert len(evicted) == 96


def test_a_final_session_goes_first_and_may_still_go_on():
    worker = Worker()
    waiting, done = chain("waiting", 32), chain("done", 32)
    worker.turn(b"a", waiting)
    worker.retention.now_s += 500
    worker.turn(b"b", done, tools=True, hint_s=3600.0, final=True)
    assert worker.evict(32) == [*reversed(done)]
    again = worker.turn(b"b", chain("done", 48, prefix=done))
    assert again.kind is Kind.IDLE


def test_a_hint_keeps_blocks_until_its_time_is_over():
    worker = Worker(1024)
    hinted, used = chain("hinted", 64), chain("used", 64)
    worker.turn(b"a", hinted, hint_s=3600.0)
    worker.retention.now_s += 3550
    worker.turn(b"b", used, tools=True)
    assert worker.evict(8) == [*reversed(used[-8:])]
    worker.retention.now_s += 60
    worker.order._victim = None
    assert worker.evict(8) == [*reversed(hinted[-8:])]


def test_a_hint_of_minutes_does_not_act_on_the_device():
    worker = Worker(1024)
    hinted, used = chain("hinted", 64), chain("used", 64)
    worker.turn(b"a", hinted, hint_s=300.0)
    worker.retention.now_s += 100
    worker.turn(b"b", used, tools=True)
    assert worker.evict(8) == [*reversed(hinted[-8:])]


def test_an_owners_hints_keep_a_bounded_share():
    worker = Worker(2048)
    others = chain("others", 64)
    worker.turn(b"x", others, owner=b"someone else", tools=True)
    for n in range(12):
        worker.turn(b"%d" % n, chain(f"greedy{n}", 64), hint_s=86_400.0)
    n_kept = sum(worker.order.charged.values())
    assert n_kept <= OWNER_SHARE * 2048
    worker.retention.now_s += 20
    evicted = worker.evict(12 * 64 - n_kept)
    assert not set(evicted) & set(others)  # the greedy owner's unprotected conversations wait for their users
    for n in range(9):
        worker.turn(b"%d" % n, chain(f"second{n}", 64), owner=b"second", hint_s=86_400.0)
        worker.turn(b"%d" % n, chain(f"third{n}", 64), owner=b"third", hint_s=86_400.0)
    assert sum(worker.order.charged.values()) <= 1024


def test_a_conversation_without_a_session_is_found_by_its_blocks():
    worker = Worker()
    first = worker.turn(b"", chain("x", 64))
    assert worker.turn(b"", chain("x", 80, prefix=chain("x", 64))) is first
    assert worker.turn(b"", chain("y", 64)) is not first
    assert worker.turn(b"", chain("x", 96, prefix=chain("x", 80)), owner=b"other") is not first


def test_memory_of_sessions_is_bounded():
    worker = Worker(8192, max_sessions=10)
    for n in range(50):
        worker.turn(b"%d" % n, chain(f"named{n}", 16))
        worker.turn(b"", chain(f"unnamed{n}", 16))
        for k in range(8):
            worker.turn(b"many", chain(f"branch{n}-{k}", 16))
    assert worker.retention.n_remembered == 10 + 9 + 4  # unnamed, of one turn each, and branches of one session


def test_return_times_are_learned():
    times = ReturnTimes()
    assert times.rate(Kind.TOOL, 10.0) > 5 * times.rate(Kind.IDLE, 10.0)
    for _ in range(2 * MAX_TURNS):
        times.ended(Kind.IDLE)
        times.returned(Kind.IDLE, 3.0)
        times.ended(Kind.TOOL)
        times.returned(Kind.TOOL, 3000.0)
    assert times.rate(Kind.IDLE, 2.0) > 10 * times.rate(Kind.TOOL, 2.0)
    assert times._ended[Kind.IDLE] <= MAX_TURNS


def test_rates_fall_with_age():
    times = ReturnTimes()
    for kind in PRIORS:
        rates = [times.rate(kind, 2.0**place) for place in range(N_BINS + 3)]
        assert rates == sorted(rates, reverse=True)
        assert times.rate(kind, 0.0) == rates[0]
