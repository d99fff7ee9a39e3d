"""The pool tier over a real Mooncake Store on loopback, whose processes are killed and stopped under load."""

import os
import random
import signal
import threading
import time

import pytest

from emberline.kv.tiers.pool.pool_tier import PoolTier
from emberline.kv.tiers.tier import BlockId, BlockMeta
from tests.kv.tiers.pool.mooncake_pool import MooncakePool, mooncake_pool, require_mooncake, until

require_mooncake()
BLOCK_BYTES = 200_000


@pytest.fixture
def pool():
    with mooncake_pool() as started:
        yield started


def some_blocks(n: int) -> tuple[list[BlockId], list[memoryview]]:
    ids = [BlockId(os.urandom(16), b"layout-1") for _ in range(n)]
    return ids, [memoryview(bytearray(random.randbytes(BLOCK_BYTES))) for _ in ids]


def save(tier: PoolTier, ids: list[BlockId], data: list[memoryview]) -> None:
    tier.write(ids, data, [BlockMeta(owner=b"owner", session=b"session")] * len(ids))


def load(tier: PoolTier, ids: list[BlockId]) -> list[bytes | None]:
    buffers = [memoryview(bytearray(BLOCK_BYTES)) for _ in ids]
    return [bytes(buffer) if ok else None for ok, buffer in zip(tier.read(ids, buffers), buffers)]


def test_what_one_worker_writes_another_reads_until_it_is_purged(pool: MooncakePool) -> None:
    here, there = pool.tier(), pool.tier()
    stranger = pool.tier(bytes(32))
    ids, data = some_blocks(100)
    save(here, ids, data)
    there.look_up(ids)
    assert all(there.holds(ids))
    assert load(there, ids) == [bytes(each) for each in data]
    stranger.look_up(ids)
    assert not any(stranger.holds(ids)), "another key, another part of the pool"
    until(lambda: there.stats().blocks == 100 and there.stats().used_bytes >= 100 * BLOCK_BYTES)
    assert there.stats().capacity_bytes == 64 << 20
    assert stranger.purge() == 0
    assert there.purge(session=b"another") == 0
    assert there.purge(owner=b"owner", session=b"session") == 100
    assert load(here, ids) == [None] * 100
    until(lambda: there.stats().blocks == 0)


def test_a_full_pool_evicts_and_a_worker_goes_on(pool: MooncakePool) -> None:
    tier = pool.tier()
    for _ in range(5):
        save(tier, *some_blocks(100))  # 20 MB each into 64 MB
    assert tier.stats().state == "ok"
    ids, data = some_blocks(20)
    until(lambda: (save(tier, ids, data), all(tier.holds(ids)))[1])
    assert load(tier, ids) == [bytes(each) for each in data]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_master_lost_under_load(pool: MooncakePool, how: signal.Signals) -> None:
    """Reads and writes fail at once instead of blocking, no wrong byte is returned, and all recovers by itself."""
    tier = pool.tier(call_limit_s=1.0)
    ids, data = some_blocks(30)
    save(tier, ids, data)
    stop, longest, wrong = threading.Event(), [0.0], []

    def work() -> None:
        while not stop.is_set():
            began_s = time.monotonic()
            tier.look_up(ids)
            got = load(tier, ids)
            save(tier, *some_blocks(2))
            longest[0] = max(longest[0], time.monotonic() - began_s)
            wrong.extend(each for each, expected in zip(got, data) if each not in (None, bytes(expected)))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: tier.stats().hits > 60)
    os.kill(pool.master_pid, how)
    until(lambda: tier.stats().state.startswith("degraded"))
    assert not any(tier.holds(ids))
    began_s = time.monotonic()
    assert load(tier, ids) == [None] * 30
    assert time.monotonic() - began_s < 1.0, "while the pool is lost nothing waits for it"
    if how == signal.SIGKILL:
        pool.start_master()
    else:
        os.kill(pool.master_pid, signal.SIGCONT)
    until(lambda: tier.stats().state == "ok")
    stop.set()
    for thread in threads:
        thread.join()
    ids, data = some_blocks(5)
    until(lambda: (save(tier, ids, data), all(tier.holds(ids)))[1])
    assert load(tier, ids) == [bytes(each) for each in data]
    assert not wrong
    assert longest[0] < 20.0  # seconds on a busy machine; the library alone blocks for 30 to 60


def test_a_peer_that_is_killed_or_stopped_costs_its_own_blocks_only(pool: MooncakePool) -> None:
    tier = pool.tier(call_limit_s=1.0)
    ids, data = some_blocks(30)
    save(tier, ids, data)
    pool.memory.send_signal(signal.SIGSTOP)
    began_s = time.monotonic()
    got = load(tier, ids)
    assert all(each in (None, bytes(expected)) for each, expected in zip(got, data))
    assert time.monotonic() - began_s < 15
    pool.memory.kill()
    pool.lend(64 << 20)
    ids, data = some_blocks(5)
    until(lambda: (save(tier, ids, data), all(tier.holds(ids)))[1])
    until(lambda: load(tier, ids) == [bytes(each) for each in data])
