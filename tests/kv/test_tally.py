"""Reports of several ranks about the same items: the last one completes an item, one that is lost is lost for all."""

from emberline.kv.tally import Tally
from emberline.kv.tiers.messages import Saved
from emberline.kv.tiers.orders import Flushed


def test_an_item_is_done_when_all_have_named_it():
    tally = Tally("ab", 2)
    assert tally.said("ab") == ([], [])
    assert tally.said("b") == (["b"], [])
    assert list(tally) == ["a"]
    tally.expect("c", 1)
    assert tally.said("ac") == (["a", "c"], [])
    assert not tally


def test_what_one_has_lost_is_lost_once_all_have_named_it():
    tally = Tally("abc", 2)
    assert tally.said("a", lost="bc") == ([], [])
    assert tally.said("c", lost="ab") == ([], ["a", "b", "c"])
    tally.expect("c", 1)
    assert tally.said("c") == (["c"], []), "nothing is remembered of the last time"


def test_what_nobody_expects_is_ignored():
    tally = Tally("a", 1)
    assert tally.said("x", lost="y") == ([], [])
    assert tally.said("a") == (["a"], [])
    assert tally.said("a", lost="a") == ([], [])


def test_an_order_is_answered_when_all_have_answered():
    tally = Tally()
    tally.expect([(Saved, 1)], 2)
    tally.expect([(Saved, 2)], 1)
    assert tally.said([(Saved, 1)]) == ([], [])
    assert tally.said([(Flushed, 1)]) == ([], []), "another kind, which no order expects"
    assert tally.said([(Saved, 2)]) == ([(Saved, 2)], [])
    assert tally.said([(Saved, 1)]) == ([(Saved, 1)], [])
    assert tally.said([(Saved, 1)]) == ([], []), "once"
