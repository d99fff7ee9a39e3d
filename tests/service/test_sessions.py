from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from emberline.protocol.token_ids import pack
from emberline.service.sessions import BLOCK_BYTES, ENTRY_BYTES, SessionOwner, Sessions
from tests.examples import n_examples

BLOCK_IDS = BLOCK_BYTES // 4


def _remember(sessions: Sessions, name: str, ids: Sequence[int], account: str = "a", model: str = "m") -> None:
    sessions.add(account, model, name.encode(), pack(ids), len(name), b"text of " + name.encode())


def _digests(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def test_the_longest_known_beginning_is_found() -> None:
    sessions = Sessions()
    _remember(sessions, "x", [1, 2])
    _remember(sessions, "xyz", [1, 2, 3, 4])
    known = sessions.find("a", "m", _digests("x", "xy", "xyz", "xyzw"))
    assert known is not None
    assert known.ids == pack([1, 2, 3, 4])
    assert [(cut.n_ids, cut.text_len) for cut in known.cuts] == [(2, 1), (4, 3)]
    assert known.cuts[-1].text_digest == b"text of xyz"


def test_an_entry_that_the_longest_does_not_begin_with_is_no_cut() -> None:
    sessions = Sessions()
    _remember(sessions, "x", [9])
    _remember(sessions, "xy", [1, 2])
    known = sessions.find("a", "m", _digests("x", "xy"))
    assert known is not None
    assert [cut.n_ids for cut in known.cuts] == [2]


@pytest.mark.parametrize(("account", "model"), [("b", "m"), ("a", "n")])
def test_accounts_and_models_are_isolated(account: str, model: str) -> None:
    sessions = Sessions()
    _remember(sessions, "x", [1])
    assert sessions.find("a", "m", _digests("x")) is not None
    assert sessions.find(account, model, _digests("x")) is None


def test_a_purge_forgets_a_session_an_account_or_all() -> None:
    sessions = Sessions()
    for account, session in (("a", "s"), ("a", "t"), ("a", None), ("b", "s")):
        owner = SessionOwner(account.encode(), session)
        sessions.add(account, "m", str(session).encode(), pack([1, 2]), 1, b"", owner)
    assert sessions.purge("a", "s") == 1
    assert sessions.find("a", "m", _digests("s")) is None
    assert sessions.find("a", "m", _digests("t")) is not None
    assert sessions.purge("a") == 2
    assert sessions.find("b", "m", _digests("s")) is not None
    assert sessions.purge(None) == 1
    assert (len(sessions), sessions.n_bytes) == (0, 0)


def test_nothing_known() -> None:
    assert Sessions().find("a", "m", []) is None
    assert Sessions().find("a", "m", _digests("x")) is None


def test_remembering_again_replaces() -> None:
    sessions = Sessions()
    _remember(sessions, "x", [1, 2, 3])
    n_bytes = sessions.n_bytes
    _remember(sessions, "x", [4, 5, 6])
    known = sessions.find("a", "m", _digests("x"))
    assert known is not None
    assert known.ids == pack([4, 5, 6])
    assert (len(sessions), sessions.n_bytes) == (1, n_bytes)


def test_turns_share_what_they_have_in_common() -> None:
    sessions = Sessions()
    ids = list(range(40 * BLOCK_IDS))
    for turn in range(1, 41):
        _remember(sessions, "x" * turn, ids[: turn * BLOCK_IDS])
    assert sessions.n_bytes < 4 * len(ids) + 41 * (ENTRY_BYTES + 8 * 40)


def test_the_stalest_is_forgotten_first() -> None:
    sessions = Sessions(3 * (ENTRY_BYTES + 100))
    for name in ("x", "y", "z"):
        _remember(sessions, name, range(ord(name), ord(name) + 20))
    assert sessions.find("a", "m", _digests("x")) is not None
    _remember(sessions, "w", range(20))
    assert sessions.find("a", "m", _digests("y")) is None
    assert sessions.find("a", "m", _digests("x")) is not None


def test_what_is_larger_than_all_room_is_not_kept() -> None:
    sessions = Sessions(2000)
    _remember(sessions, "x", [1])
    _remember(sessions, "y", range(1000))
    assert sessions.find("a", "m", _digests("x")) is not None
    assert sessions.find("a", "m", _digests("y")) is None


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.lists(st.integers(0, 3), min_size=1, max_size=3)), max_size=12))
def test_bytes_are_counted_once_and_given_back(turns: list[tuple[str, list[int]]]) -> None:
    sessions = Sessions()
    for name, runs in turns:
        _remember(sessions, name, [run for run in runs for _ in range(BLOCK_IDS)])
    distinct = {block for entry in sessions._entries.values() for block in entry.blocks}
    entries = sum(entry.n_bytes for entry in sessions._entries.values())
    assert sessions.n_bytes == entries + sum(map(len, distinct))
    sessions.max_bytes = ENTRY_BYTES + 100
    sessions.add("a", "m", b"last", pack([1]), 0, b"")
    assert (len(sessions), len(sessions._blocks)) == (1, 1)


class AgainstADictionary(RuleBasedStateMachine):
    """With room for everything, sessions are a dictionary from (account, digest) to ids."""

    def __init__(self) -> None:
        super().__init__()
        self.sessions = Sessions()
        self.truth: dict[tuple[str, bytes], bytes] = {}

    names = st.text("xy", min_size=1, max_size=4)

    @rule(account=st.sampled_from("ab"), name=names, ids=st.lists(st.integers(0, 2), min_size=1, max_size=5))
    def remember(self, account: str, name: str, ids: list[int]) -> None:
        ids = ids * (BLOCK_IDS // 2)
        _remember(self.sessions, name, ids, account)
        self.truth[account, name.encode()] = pack(ids)

    @rule(account=st.sampled_from("ab"), name=names)
    def find(self, account: str, name: str) -> None:
        digests = [name[:n].encode() for n in range(1, len(name) + 1)]
        expected = [self.truth[account, digest] for digest in digests if (account, digest) in self.truth]
        known = self.sessions.find(account, "m", digests)
        assert (known.ids if known else None) == (expected[-1] if expected else None)
        if known:
            lengths = [cut.n_ids for cut in known.cuts]
            assert lengths == [len(ids) // 4 for ids in expected if expected[-1].startswith(ids)]

    @invariant()
    def counted(self) -> None:
        assert len(self.sessions) == len(self.truth)


AgainstADictionary.TestCase.settings = settings(max_examples=n_examples(20), stateful_step_count=20, deadline=None)
TestAgainstADictionary = AgainstADictionary.TestCase


def test_recent_conversations_are_the_longest_of_each_newest_first() -> None:
    sessions = Sessions()
    owner = SessionOwner(b"salt", "s1")
    for n_ids in (2000, 3000, 4000):  # three turns
        sessions.add("a", "m", b"talk%d" % n_ids, pack(list(range(n_ids))), 1, b"", owner)
    sessions.add("b", "m", b"same ids", pack(list(range(2000))), 1, b"")
    sessions.add("a", "other", b"of another model", pack([1]), 1, b"")
    sessions.add("a", "m", b"short", pack([5, 6]), 1, b"")
    found = sessions.recent("m", 10)()
    assert [len(each.ids) // 4 for each in found] == [2, 2000, 4000]
    assert (found[-1].ids, found[-1].salt, found[-1].session) == (pack(list(range(4000))), *owner)
    assert len(sessions.recent("m", 1)()) == 1
    sessions.find("a", "m", [b"talk2000"])  # it goes on from an earlier turn
    assert [len(each.ids) // 4 for each in sessions.recent("m", 10)()] == [2000, 2, 2000, 4000]
