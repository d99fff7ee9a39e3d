"""Aliases: who gets which model, loops, and what stays over a restart."""

import asyncio
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.catalog.aliases import MAX_CHAIN, MAX_TARGETS, Alias, AliasTable, configured_table, open_aliases
from emberline.catalog.model_card import BUILT_IN
from emberline.protocol.errors import BadInput, Conflict, NotFound
from tests.databases import DatabaseLocation
from tests.faulty_store import FaultyStore


def table(**aliases: dict[str, int]) -> AliasTable:
    return configured_table(aliases)


def everything(name: str) -> bool:
    return True


CALLERS = [f"acme/{i}" for i in range(2000)]
GRAPHS = st.dictionaries(
    st.sampled_from("abcdef"), st.dictionaries(st.sampled_from("abcdefxy"), st.integers(1, 9), min_size=1)
)


def test_a_split_is_sticky_and_near_its_weights() -> None:
    split = table(gpt={"old": 90, "new": 10})
    picked = [split.pick("GPT", caller, everything) for caller in CALLERS]
    assert picked == [split.pick("gpt", caller, everything) for caller in CALLERS]
    assert 0.08 < Counter(picked)["new"] / len(CALLERS) < 0.12


def test_a_change_of_weights_moves_only_the_difference() -> None:
    before = [table(gpt={"new": 10, "old": 90}).pick("gpt", caller, everything) for caller in CALLERS]
    after = [table(gpt={"new": 50, "old": 50}).pick("gpt", caller, everything) for caller in CALLERS]
    assert all(b == "new" for a, b in zip(before, after) if a == "new")


def test_with_more_targets_callers_move_only_to_what_grows_and_from_what_is_gone() -> None:
    def picked(*served: str, **weights: int) -> list[str]:
        return [table(gpt=weights).pick("gpt", caller, served.__contains__) for caller in CALLERS]

    before = picked(*"abc", a=1, b=1, c=1)
    assert picked(*"abc", c=1, b=1, a=1) == before, "in whatever order they are written"
    assert all(b in (a, "a") for a, b in zip(before, picked(*"abc", a=2, b=1, c=1)))
    assert all(b == a for a, b in zip(before, picked(*"bc", a=1, b=1, c=1)) if a != "a")
    counts = Counter(picked(*"abc", a=6, b=3, c=1))
    assert 0.57 < counts["a"] / len(CALLERS) < 0.63
    assert 0.08 < counts["c"] / len(CALLERS) < 0.12


def test_names_end_where_they_end() -> None:
    with pytest.raises(BadInput, match="aliases"):
        configured_table({"gpt\n": {"a": 1}})


def test_without_a_caller_the_largest_weight_is_taken() -> None:
    assert table(gpt={"new": 10, "old": 90}).pick("gpt", "", everything) == "old"
    assert table().pick("other", "", everything) == "other"


def test_targets_that_are_not_served_are_left_out() -> None:
    split = table(gpt={"middle": 99, "new": 1}, middle={"old": 1})
    assert {split.pick("gpt", caller, lambda name: name == "new") for caller in CALLERS[:50]} == {"new"}
    assert {split.pick("gpt", caller, lambda name: name == "old") for caller in CALLERS[:50]} == {"old"}
    assert split.pick("gpt", "a", lambda name: False) in ("old", "new")


@given(GRAPHS)
def test_a_table_never_has_a_cycle(aliases: dict[str, dict[str, int]]) -> None:
    built = AliasTable()
    for name, targets in aliases.items():
        try:
            built = built.changed(Alias(name=name, targets=targets))
        except BadInput:
            continue
    for name in built.aliases:
        assert name not in built._reachable(name)
        assert built.pick(name, "caller", everything) not in built.aliases


@pytest.mark.parametrize("target", ["gpt", "GPT"])
def test_an_alias_of_itself_is_refused(target: str) -> None:
    with pytest.raises(BadInput, match="itself"):
        table(gpt={target: 1})
    with pytest.raises(BadInput, match="itself"):
        table(gpt={"b": 1, "x": 1}, b={"c": 1}, c={target: 1})


def test_long_chains_are_refused() -> None:
    chain = {f"a{i}": {f"a{i + 1}": 1} for i in range(MAX_CHAIN)}
    assert configured_table(chain).pick("a0", "", everything) == f"a{MAX_CHAIN}"
    with pytest.raises(BadInput, match="follow one another"):
        configured_table({"start": {"a0": 1}} | chain)


@pytest.mark.parametrize(
    "alias",
    [
        {"name": "a b", "targets": {"x": 1}},
        {"name": "x" * 1_000_000, "targets": {"x": 1}},
        {"name": "a", "targets": {}},
        {"name": "a", "targets": {"x": 0}},
        {"name": "a", "targets": {"x": -1}},
        {"name": "a", "targets": {"../x": 1}},
        {"name": "a", "targets": {f"x{i}": 1 for i in range(MAX_TARGETS + 1)}},
    ],
)
def test_what_is_no_alias(alias: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(alias, Alias)


def test_the_aliases_of_a_model() -> None:
    split = table(gpt={"old": 1, "new": 1}, best={"gpt": 1})
    card = BUILT_IN[0]
    assert split.names_of(msgspec.structs.replace(card, id="New")) == ("gpt", "best")
    assert split.names_of(msgspec.structs.replace(card, aliases=("old",))) == ("gpt", "best")
    assert split.names_of(card) == ()


async def test_changes_stay_and_configured_aliases_do_not_change(database: DatabaseLocation) -> None:
    store = await database.open()
    aliases = await open_aliases(store, {"fixed": {"m": 1}})
    await aliases.change("gpt-4o", {"m": 9, "n": 1})
    await aliases.change("gpt-4o", {"m": 1})
    await aliases.change("gone", {"m": 1})
    await aliases.change("Gone", None)
    for name, targets, error in (
        ("fixed", {"n": 1}, Conflict),
        ("gone", None, NotFound),
        ("m", {"gpt-4o": 1}, BadInput),
    ):
        with pytest.raises(error):
            await aliases.change(name, targets)
    other = await database.open()  # another core's
    follower = await open_aliases(other, {})
    told: list[AliasTable] = []
    follower.on_change = told.append
    await aliases.change("later", {"m": 1})
    async with asyncio.timeout(60):
        while "later" not in follower.table.aliases:
            await follower.refresh()
    assert told
    await aliases.change("later", None)
    await follower.close()
    await aliases.close()
    await other.close()
    again = await open_aliases(store, {"m": {"gpt-4o": 1}, "fixed": {"m": 1}})
    await again.close()
    assert list(again.table.aliases) == ["m", "fixed"]  # the stored one would now point to itself
    again = await open_aliases(store, {})
    assert {name: alias.targets for name, alias in again.table.aliases.items()} == {"gpt-4o": {"m": 1}}
    await again.close()
    await store.close()


async def test_a_failed_look_at_the_database_is_not_the_last(database: DatabaseLocation) -> None:
    store = FaultyStore(await database.open())
    aliases = await open_aliases(store, {})
    failed = asyncio.Event()

    async def fail(name: str, asked: object) -> None:
        if name == "read":
            failed.set()
            raise OSError("disk I/O error")

    store.before = fail
    await aliases.change("gpt", {"a": 1})
    async with asyncio.timeout(60):
        await failed.wait()
        store.before = None
        await store.write("DELETE FROM model_aliases")
        while aliases.table.aliases:
            await store.notify("model_aliases")
            await asyncio.sleep(0.01)
    await aliases.close()
    await store.close()
