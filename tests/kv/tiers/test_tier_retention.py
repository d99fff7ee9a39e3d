"""Retention in tiers below the device: the same rules in host memory and on disk."""

import pytest

from emberline.kv.retention import Retention
from emberline.kv.tiers.disk.disk_tier import DiskTier
from emberline.kv.tiers.host import HostTier
from emberline.kv.tiers.tier import BlockMeta
from tests.kv.tiers.disk.disk_blocks import GROUP, OWNER, block_id, content, open_tier

N_SLOTS = 16
SIZE = GROUP.block_bytes


class Tier:
    """A tier of N_SLOTS blocks, and the conversations of the worker."""

    def __init__(self, tier: HostTier | DiskTier) -> None:
        self.tier, self.retention, self.now_s = tier, Retention(sample=1), 0.0
        tier.follow(self.retention)

    def turn(self, session: str, numbers: list[int], n_hit: int = 0, hint_s: float = 0.0, final: bool = False) -> None:
        """A turn of a session that computes its blocks behind the first n_hit."""
        self.now_s += 1.0
        self.retention.now_s = self.now_s
        name = session.encode().ljust(16, b".")
        keys = [block_id(n).key for n in numbers]
        conversation = self.retention.begin(OWNER, name, keys, n_hit)
        if n_hit:
            self.tier.touch([block_id(n) for n in numbers[:n_hit]], conversation)
        for position, n in list(enumerate(numbers))[n_hit:]:
            meta = BlockMeta(OWNER, name, position, conversation=conversation)
            self.tier.write([block_id(n)], [memoryview(bytearray(content(n)))], [meta])
        self.retention.end(conversation, keys, hint_s, final)

    def held(self, *numbers: int) -> list[int]:
        return [n for n, held in zip(numbers, self.tier.holds([block_id(n) for n in numbers])) if held]


@pytest.fixture(params=["host", "disk"])
def tier(request, tmp_path):
    if request.param == "host":
        made = HostTier(N_SLOTS * SIZE, [SIZE])
        made.allocate_all()
    else:
        made = open_tier(tmp_path, n_slots=N_SLOTS)
    yield Tier(made)
    made.close()


def test_the_least_recent_conversation_goes_first_from_its_end(tier):
    tier.turn("a", list(range(6)))
    tier.turn("b", list(range(10, 16)))
    tier.turn("a", list(range(8)), n_hit=6)
    tier.turn("c", list(range(20, 26)))
    assert tier.held(*range(8)) == list(range(8))
    assert tier.held(*range(10, 16)) == [10, 11]
    assert tier.held(*range(20, 26)) == list(range(20, 26))


def test_a_final_session_goes_before_older_ones(tier):
    tier.turn("a", list(range(6)))
    tier.turn("b", list(range(10, 16)), final=True)
    tier.turn("c", list(range(20, 30)))
    assert tier.held(*range(6)) == list(range(6))
    assert tier.held(*range(10, 16)) == []


def test_the_end_of_an_edited_conversation_goes_first(tier):
    tier.turn("a", list(range(6)))
    tier.turn("b", list(range(10, 18)))
    tier.turn("b", [10, 11, 12, 13, 50, 51], n_hit=4)
    tier.turn("c", list(range(20, 24)))
    assert tier.held(*range(6)) == list(range(6))
    assert tier.held(*range(10, 18)) == [10, 11, 12, 13]
    assert tier.held(50, 51) == [50, 51]


@pytest.mark.parametrize(("after_s", "kept"), [(100.0, True), (400.0, False)])
def test_a_hint_of_five_minutes_protects_for_five_minutes(tier, after_s, kept):
    tier.turn("a", list(range(4)), hint_s=300.0)
    tier.turn("b", list(range(10, 16)))
    tier.now_s += after_s
    tier.turn("c", list(range(20, 28)))
    assert (tier.held(*range(4)) == list(range(4))) is kept
    assert len(tier.held(*range(10, 16))) == (4 if kept else 6)


def test_hints_that_are_over_leave_the_least_recent_first(tier):
    tier.turn("a", [0, 1], hint_s=300.0)
    tier.turn("b", [10, 11], hint_s=300.0)
    tier.now_s += 400.0
    tier.turn("c", list(range(20, 34)))
    assert tier.held(0, 1, 10, 11) == [10, 11]


def test_hints_hold_at_most_a_share(tier):
    tier.turn("a", list(range(4)), hint_s=3600.0)
    tier.turn("b", list(range(10, 14)), hint_s=3600.0)  # more than a quarter of one owner
    tier.turn("c", list(range(20, 30)))
    tier.turn("d", list(range(30, 34)))
    assert tier.held(*range(4)) == list(range(4))
    assert tier.held(*range(10, 14)) == []


def test_a_shared_prefix_outlives_the_conversation_that_wrote_it(tier):
    tier.turn("a", list(range(8)))
    tier.turn("b", [0, 1, 2, 3, 10, 11], n_hit=4)
    tier.turn("a", list(range(8)), n_hit=8, final=True)
    tier.turn("c", list(range(20, 30)))
    assert tier.held(*range(8)) == [0, 1, 2, 3]
    assert tier.held(10, 11) == [10, 11]


def test_blocks_of_an_earlier_process_go_by_session(tmp_path):
    first = Tier(open_tier(tmp_path, n_slots=N_SLOTS))
    for at, (session, numbers) in enumerate([("a", [0, 1, 2, 3, 4, 5]), ("b", [10, 11, 12, 13, 14, 15])]):
        name = session.encode().ljust(16, b".")
        for position, n in enumerate(numbers):
            meta = BlockMeta(OWNER, name, position, used_s=2000.0 - at)
            first.tier.write([block_id(n)], [memoryview(bytearray(content(n)))], [meta])
    first.tier.close()
    second = Tier(open_tier(tmp_path, n_slots=N_SLOTS))
    second.turn("c", list(range(20, 28)))
    assert second.held(*range(6)) == list(range(6))
    assert second.held(*range(10, 16)) == [10, 11], "least recently used first, and from the end"
    second.turn("b", [10, 11, 60, 61], n_hit=2)
    assert second.held(10, 11, 60, 61) == [10, 11, 60, 61]
    assert second.held(*range(6)) == [0, 1, 2, 3]
    second.tier.close()
