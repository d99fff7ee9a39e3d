"""Several cores share a rate limit: never more than it in all."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable

import pytest

from emberline.accounts import shared_rate_limits as module
from emberline.accounts.rate_limits import RateLimit, Taken
from emberline.accounts.shared_rate_limits import SharedRateLimiter
from emberline.protocol.errors import RateLimited
from emberline.store import Database
from tests.databases import DatabaseLocation, mostly_sqlite, on_both_databases
from tests.faulty_store import FaultyStore

database = mostly_sqlite


class Clock:
    """Of the store and of all cores."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(database: DatabaseLocation, clock: Clock) -> AsyncIterator[FaultyStore]:
    store = FaultyStore(await database.open(), now_us=lambda: int(clock.now_s * 1e6))
    yield store
    await store.close()


Core = Callable[[], SharedRateLimiter]


@pytest.fixture
def core(store: FaultyStore, clock: Clock) -> Core:
    return lambda: SharedRateLimiter(store, clock=clock)


def limit_of(requests: int | None = None, tokens: int | None = None, concurrency: int | None = None) -> RateLimit:
    return RateLimit("key:k", "this API key", requests, tokens, concurrency)


async def admitted(core: SharedRateLimiter, limit: RateLimit, n_in: int = 1, n_out: int = 0) -> Taken | None:
    try:
        return await core.take([limit], n_in, n_out)
    except RateLimited:
        return None


@on_both_databases
async def test_two_cores_admit_one_limit_of_requests(core: Core, clock: Clock) -> None:
    limit = limit_of(requests=6)
    one, two = core(), core()
    found = [await admitted(each, limit) for each in (one, two) * 5]
    assert sum(taken is not None for taken in found) == 6
    with pytest.raises(RateLimited, match=r"6 requests a minute, over all cores: retry in 10 s") as refused:
        await two.take([limit], 1, 0)
    assert refused.value.rate_limits is not None
    assert refused.value.rate_limits.requests is not None
    assert refused.value.rate_limits.requests.remaining == 0
    clock.now_s += 10
    assert [await admitted(each, limit) is not None for each in (one, two)] == [True, False]


async def test_all_of_a_limit_is_for_the_core_that_has_the_requests(core: Core) -> None:
    one, two = core(), core()
    assert await admitted(two, limit_of(requests=100))
    assert sum([await admitted(one, limit_of(requests=100)) is not None for _ in range(110)]) == 99


@on_both_databases
async def test_unused_tokens_are_for_the_other_core(core: Core, clock: Clock) -> None:
    limit = limit_of(tokens=1000)
    one, two = core(), core()
    taken = await one.take([limit], 100, 900)
    assert await admitted(two, limit, 100) is None
    one.put_back(taken, 150)
    clock.now_s += module.KEEP_S
    await one.give_back()
    assert await admitted(two, limit, 850) is not None
    assert await admitted(one, limit, 100) is None


@on_both_databases
async def test_concurrent_requests_of_all_cores(core: Core, clock: Clock) -> None:
    limit = limit_of(concurrency=3)
    one, two = core(), core()
    held = [await one.take([limit], 1, 0), await two.take([limit], 1, 0), await two.take([limit], 1, 0)]
    for each in (one, two):
        with pytest.raises(RateLimited, match="3 concurrent requests, over all cores"):
            await each.take([limit], 1, 0)
    one.put_back(held[0], 1)
    assert await admitted(two, limit) is None, "the other core has not said so yet"
    clock.now_s += module.KEEP_S
    await one.give_back()
    assert await admitted(two, limit)
    clock.now_s += module.LEASE_S / 2
    await two.give_back()  # which renews its lease
    clock.now_s += module.LEASE_S / 2 + 1
    assert await admitted(one, limit) is None
    clock.now_s += module.LEASE_S  # it was killed
    assert await admitted(one, limit)


@on_both_databases
@pytest.mark.parametrize("requests", [None, 500])
async def test_slots_of_a_burst_are_given_back_by_a_core_that_stays_busy(
    core: Core, clock: Clock, requests: int | None
) -> None:
    limit = limit_of(requests, concurrency=8)
    one, two = core(), core()
    for taken in [await one.take([limit], 1, 0) for _ in range(8)]:
        one.put_back(taken, 1)
    assert await admitted(two, limit) is None
    for _ in range(2):  # looks for unused slots
        for _ in range(5):
            one.put_back(await one.take([limit], 1, 0), 1)
            clock.now_s += module.KEEP_S / 5
        await one.give_back()
    assert len([taken for taken in [await admitted(two, limit) for _ in range(8)] if taken]) == 7


@on_both_databases
async def test_slots_in_use_stay_leased_while_requests_are_refused(core: Core, clock: Clock) -> None:
    limit = limit_of(tokens=100, concurrency=1)
    one, two = core(), core()
    two.put_back(await two.take([limit], 90, 0), 90)
    await two.close()
    assert await admitted(one, limit, 10)
    for _ in range(7):
        assert await admitted(one, limit_of(tokens=100, concurrency=2), 90) is None  # of the tokens a minute
        clock.now_s += module.LEASE_S / 6
        await one.give_back()
    assert await admitted(two, limit) is None, "the slot is the first core's"


async def test_a_share_lives_while_a_request_waits_for_it(core: Core, store: FaultyStore, clock: Clock) -> None:
    limit = limit_of(concurrency=1)
    one, two = core(), core()
    one.put_back(await one.take([limit], 1, 0), 1)
    clock.now_s += module.KEEP_S
    await one.give_back()
    clock.now_s += 61
    asked, answer = asyncio.Event(), asyncio.Event()

    async def slow(name: str, work: object) -> None:
        if name == "run":
            asked.set()
            await answer.wait()

    store.before = slow
    taking = asyncio.create_task(one.take([limit], 1, 0))
    await asked.wait()
    await one.give_back()  # which forgets shares that are not used
    answer.set()
    one.put_back(await taking, 1)
    assert await admitted(one, limit)
    for _ in range(3):
        clock.now_s += module.LEASE_S / 2
        await one.give_back()
    assert await admitted(two, limit) is None, "the slot is the first core's"


@on_both_databases
async def test_what_a_dead_core_had_taken_ahead_is_regained(core: Core, clock: Clock) -> None:
    limit = limit_of(requests=6000)
    dead, alive = core(), core()
    assert await admitted(dead, limit)
    got = 0
    while await admitted(alive, limit):
        got += 1
    assert 6000 - 6000 / 60 * 2 - 2 <= got < 6000, "all but a second's worth"
    clock.now_s += 60
    got = 0
    while await admitted(alive, limit):
        got += 1
    assert got >= 5800


@pytest.mark.parametrize("per_minute", [30, 1200])
async def test_no_window_has_more_than_the_limit(core: Core, clock: Clock, per_minute: int) -> None:
    """Random cores, at random times: in any t seconds at most `limit * (1 + t / 60)`."""
    rng, cores, times = random.Random(7), [core(), core(), core()], []
    limit = limit_of(requests=per_minute)
    for _ in range(100):
        clock.now_s += rng.choice([0.0, 0.01, 0.2, 2.0, 4.0])
        which = rng.choice(cores)
        for _ in range(rng.randrange(1, 1 + per_minute // 20)):
            if (taken := await admitted(which, limit)) is None:
                break
            times.append(clock.now_s)
            which.put_back(taken, 1)
        if rng.random() < 0.3:
            await rng.choice(cores).give_back()
    assert len(times) > per_minute / 2
    for i in range(0, len(times), max(1, len(times) // 200)):
        for j in range(i, len(times), max(1, len(times) // 200)):
            assert j - i + 1 <= per_minute * (1 + (times[j] - times[i]) / 60) + 1e-6


async def test_requests_at_once_share_what_is_fetched(core: Core) -> None:
    limit = limit_of(requests=50, concurrency=20)
    one, two = core(), core()
    found = await asyncio.gather(*(admitted(random.choice((one, two)), limit) for _ in range(60)))
    assert sum(taken is not None for taken in found) == 20


async def test_a_request_that_is_cancelled_while_it_waits_holds_nothing(core: Core, clock: Clock) -> None:
    limit = limit_of(concurrency=1)
    one, two = core(), core()
    waiting = asyncio.create_task(one.take([limit], 1, 0))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    async with asyncio.timeout(60):
        while await admitted(two, limit) is None:
            clock.now_s += module.KEEP_S
            await one.give_back()
            await asyncio.sleep(0.01)


async def test_without_the_store_each_core_limits_its_own(core: Core, store: FaultyStore) -> None:
    limit, one = limit_of(requests=3), core()
    store.away = True
    assert [await admitted(one, limit) is not None for _ in range(5)] == [True, True, True, False, False]


@on_both_databases
async def test_a_limit_that_is_not_set_counts_for_nothing(core: Core, store: Database) -> None:
    one = core()
    taken = await one.take([limit_of(tokens=1000)], 10, 10)
    one.put_back(taken, 5)
    await one.close()
    assert await store.read("SELECT n_requests FROM rate_buckets") == [(0,)]


@on_both_databases
async def test_slots_are_leased_further_while_tokens_are_overspent(
    core: Core, store: FaultyStore, clock: Clock
) -> None:
    limit, one = limit_of(tokens=100, concurrency=1), core()
    short = await one.take([limit], 1, 0)
    one.put_back(short, 5000)  # far more than it took
    await one._extend(one._share(limit), 1, 1.0)  # the bucket hears of it, and has nothing for long
    clock.now_s += 60
    one._share(limit).slots = one._share(limit).n_running = 1
    await one.give_back()
    clock.now_s += module.LEASE_S - 1
    ((until_us,),) = await store.read("SELECT until_us FROM rate_slots WHERE n = 1")
    assert isinstance(until_us, int)
    assert until_us > clock.now_s * 1e6


async def test_what_is_being_given_back_is_not_used(core: Core, store: FaultyStore, clock: Clock) -> None:
    """A request that comes while the store is asked waits for its answer."""
    limit, one = limit_of(requests=6000, concurrency=5), core()
    held = [await one.take([limit], 1, 0) for _ in range(3)]
    for taken in held[1:]:
        one.put_back(taken, 1)
    clock.now_s += module.KEEP_S
    asked, answer = asyncio.Event(), asyncio.Event()

    async def slow(name: str, work: object) -> None:
        if name == "run":
            asked.set()
            await answer.wait()

    store.before = slow
    giving = asyncio.create_task(one.give_back())
    await asked.wait()
    share = one._share(limit)
    assert (share.requests, share.slots) == (0.0, 1)
    taking = asyncio.create_task(one.take([limit], 1, 0))
    answer.set()
    await giving
    await taking
    assert await store.read("SELECT n FROM rate_slots") == [(2,)]
    assert share.requests >= 0


@on_both_databases
async def test_a_request_for_other_than_slots_keeps_those_that_are_leased(core: Core, store: Database) -> None:
    limit, one = limit_of(requests=20, concurrency=10), core()
    held = [await one.take([limit], 1, 0) for _ in range(5)]
    for taken in held[:3]:
        one.put_back(taken, 1)
    await one.take([limit], 1, 0)  # one of the limit of requests; slots are free
    ((n,),) = await store.read("SELECT n FROM rate_slots")
    assert n == one._share(limit).slots == 5


async def test_a_store_that_does_not_answer_is_not_asked_for_a_while(store: FaultyStore, clock: Clock) -> None:
    limit, one = limit_of(requests=3), SharedRateLimiter(store, clock=clock, ask_s=0.01)
    store.hangs = True
    assert [await admitted(one, limit) is not None for _ in range(4)] == [True, True, True, False]
    assert store.refused == 1
    clock.now_s += module.AWAY_S + 60
    assert await admitted(one, limit)
    assert store.refused == 2
