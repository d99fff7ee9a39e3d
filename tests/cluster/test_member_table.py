"""Member rows in both databases."""

import asyncio
import secrets
from collections.abc import AsyncIterator

import pytest

from emberline.cluster.member_table import MemberLimits, MemberTable
from emberline.protocol.errors import Conflict, NotFound, Unauthorized, Unavailable
from emberline.protocol.member import Announcement, Member
from emberline.store import Database
from tests.databases import DatabaseLocation
from tests.protocol.test_member import announcement

UNTIL_US = 1 << 60
PATIENCE_S = 30.0


@pytest.fixture
async def store(database: DatabaseLocation) -> AsyncIterator[Database]:
    store = await database.open()
    yield store
    await store.close()


@pytest.fixture
def table(store: Database) -> MemberTable:
    return MemberTable(store)


def said(name: str = "w0", instance: str = "a", **more: object) -> Announcement:
    return announcement(name=name, instance=instance * 32, challenge=secrets.token_hex(8), **more)


async def join(table: MemberTable, *args: str, **more: object) -> Member:
    return await table.announce(said(*args, **more), UNTIL_US)


async def test_a_worker_joins_announces_itself_again_and_leaves(table: MemberTable) -> None:
    first = await join(table, region="eu", account="acme")
    assert (first.epoch, first.state, first.region, first.account) == (1, "joined", "eu", "acme")
    again = await join(table, region="eu", account="acme", epoch=1)
    assert (again.epoch, again.joined_us) == (1, first.joined_us)
    assert again.seen_us >= first.seen_us
    assert await table.find("w0") == again
    assert await table.all() == [again]
    await table.leave(said(instance="b"))  # another run of it
    assert await table.all() == [again]
    await table.leave(said())
    assert await table.all() == []


async def test_the_newer_run_counts_and_the_older_is_told(table: MemberTable) -> None:
    old = await join(table)
    new = await join(table, "w0", "b", address="tcp:10.0.0.3:1")
    assert new.epoch > old.epoch
    answer = await join(table, epoch=old.epoch)
    assert (answer.instance, answer.epoch) == (new.instance, new.epoch)
    assert await table.find("w0") == new
    await table.leave(said("w0", "a"))  # the old one ends
    assert await table.find("w0") == new


async def test_epochs_rise_even_if_the_row_was_forgotten(table: MemberTable) -> None:
    old = await join(table)
    await table.forget("w0", old.epoch)
    new = await join(table, "w0", "b")
    assert new.epoch > old.epoch
    assert (await join(table, epoch=old.epoch)).instance == new.instance


async def test_a_challenge_is_good_once(table: MemberTable) -> None:
    once = said()
    await table.announce(once, UNTIL_US)
    with pytest.raises(Unauthorized, match="received before"):
        await table.announce(once, UNTIL_US)


async def test_states(table: MemberTable) -> None:
    with pytest.raises(NotFound, match="w0"):
        await table.set_state("w0", "draining")
    await join(table)
    assert (await table.set_state("w0", "draining")).state == "draining"
    assert (await join(table, "w0", "b")).state == "draining", "a drain survives a restart"
    assert (await table.set_state("w0", "leaving")).state == "leaving"
    with pytest.raises(Conflict):
        await table.set_state("w0", "joined")
    assert (await join(table, "w0", "c")).state == "joined"


async def test_the_silent_are_lost_then_forgotten(table: MemberTable, store: Database) -> None:
    member = await join(table)
    await table.sweep()
    assert (await table.all())[0].state == "joined"
    await MemberTable(store, MemberLimits(lost_s=-1.0)).sweep()
    assert (await table.all())[0].state == "lost"
    assert (await join(table)).state == "joined", "it is back"
    await table.reached([("w0", member.epoch), ("gone", 7)])
    await MemberTable(store, MemberLimits(lost_s=-1.0, forget_s=-1.0)).sweep()
    assert await table.all() == []


async def test_a_silent_member_still_drains_when_it_is_back_and_one_that_leaves_is_forgotten(
    table: MemberTable, store: Database
) -> None:
    impatient = MemberTable(store, MemberLimits(lost_s=-1.0))
    await join(table)
    await table.set_state("w0", "draining")
    await impatient.sweep()
    assert (await join(table)).state == "draining"
    await table.set_state("w0", "leaving")
    await impatient.sweep()
    assert await table.all() == []


async def test_who_has_joined_stays_what_it_is(table: MemberTable) -> None:
    first = await join(table, account="acme")
    again = await join(table, epoch=first.epoch, account="other", address="tcp:10.0.0.9:1", model="another")
    assert (again.account, again.address, again.model) == ("acme", first.address, first.model)


async def test_a_worker_that_flaps_is_not_used_at_once(table: MemberTable) -> None:
    holds = []
    for run in "abcdefabcdef":
        member = await join(table, "w0", run)
        holds.append(member.ready_us - member.joined_us)
    assert holds[:3] == [0, 0, 0]
    assert holds[3:6] == [2_000_000, 4_000_000, 8_000_000]
    assert holds[-1] == MemberLimits().max_hold_s * 1e6


async def test_another_core_is_notified(database: DatabaseLocation, table: MemberTable) -> None:
    if database.kind == "sqlite":
        pytest.skip("one core alone uses SQLite")
    other = await database.open()
    heard = MemberTable(other).listen()
    async with asyncio.timeout(PATIENCE_S):
        assert await anext(heard) == ""  # it listens now
        await join(table)
        while await anext(heard) != "w0":
            pass
    await other.close()


async def test_two_clusters_cannot_share_a_database(table: MemberTable) -> None:
    await table.claim("one")
    await table.claim("one")
    with pytest.raises(Unavailable, match=r"belongs to cluster one.*same secret"):
        await table.claim("two")


async def test_workers_of_one_name_that_join_at_once_get_epochs_of_their_own(
    database: DatabaseLocation, table: MemberTable
) -> None:
    other = await database.open()
    tables = (table, MemberTable(other))
    found = await asyncio.gather(*(join(tables[i % 2], "w0", run) for i, run in enumerate("abcdef")))
    assert sorted(member.epoch for member in found) == [1, 2, 3, 4, 5, 6]
    (member,) = await table.all()
    assert member.epoch == 6
    await other.close()


async def test_a_role_that_was_set_stays_until_the_worker_is_started_with_another(table: MemberTable) -> None:
    first = await join(table, role="prefill")
    assert (first.role, first.first_role) == ("prefill", "prefill")
    assert (await table.set_role("w0", "decode")).role == "decode"
    assert (await join(table, role="prefill", epoch=first.epoch)).role == "decode"
    restarted = await join(table, "w0", "b", role="prefill")
    assert (restarted.role, restarted.state) == ("decode", "joined")
    assert restarted.epoch > first.epoch
    assert (await join(table, "w0", "c", role="both")).role == "both"
    await table.set_state("w0", "leaving")
    with pytest.raises(Conflict, match="leaving"):
        await table.set_role("w0", "decode")
    with pytest.raises(NotFound):
        await table.set_role("w1", "decode")
