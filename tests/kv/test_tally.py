"""Reports of several ranks about the same items: the last one completes an item, one that is lost is lost for all."""

from emberline.kv.tally import Answers, Tally
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
    answers = Answers()
    answers.expect(Saved, 1, 2)
    answers.expect(Saved, 2, 1)
    assert answers.said(Saved(1), 1) is None
    assert answers.said(Flushed(1), 1) is None, "another kind, which no order expects"
    assert answers.said(Saved(2), 2) == Saved(2)
    assert answers.said(Saved(1), 1) == Saved(1)
    assert answers.said(Saved(1), 1) is None, "once"


def test_answers_that_differ_merge_by_the_rule_of_their_kind():
    answers = Answers({Flushed: Flushed.merged})
    answers.expect(Flushed, 1, 3)
    assert answers.said(Flushed(1, {"host": 3}), 1) is None
    assert answers.said(Flushed(1, {"host": 2, "disk": 4}, "rank 1 failed"), 1) is None
    assert answers.said(Flushed(1, {}, "rank 2 failed"), 1) == Flushed(1, {"host": 3, "disk": 4}, "rank 1 failed")
