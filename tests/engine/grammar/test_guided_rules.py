"""What a grammar makes of drawn tokens: it reads the sequence, changes the guide alone, and says the rest."""

import pytest

from emberline.engine.core import token_rules
from emberline.engine.core.limits import Limits
from emberline.engine.core.rows import Cell, Rows
from emberline.engine.core.sequence import Flag, Sequence
from emberline.engine.grammar.guided_rules import GuidedRun, bind, follow
from emberline.kv.cache import BlockTable
from emberline.protocol.errors import BadInput
from emberline.protocol.request import EngineRequest, SamplingParams, ThinkingLimit
from emberline.protocol.token_ids import pack
from tests.engine.fakes import Drawn

END, A, B, C = 0, 97, 98, 99
LIMITS = Limits(context_len=200, vocab_size=302, eos_ids=(END,), max_running=2, token_budget=16)


class Letters:
    """Any number of a and b, then c ends it; one b at least must follow an a."""

    n_words = 10

    def __init__(self, text=()):
        self.text = list(text)

    @property
    def complete(self):
        return self.text[-1:] == [C]

    finished = complete

    def allowed(self):
        return [] if self.complete else [B] if self.text[-1:] == [A] else [A, B, C]

    def fill(self, bits):
        for token in self.allowed():
            bits[token >> 5] |= 1 << (token & 31)

    def accept(self, token_id):
        if token_id not in self.allowed():
            return False
        self.text.append(token_id)
        return True

    def rollback(self, n):
        del self.text[len(self.text) - n :]

    def forced(self):
        return [B] if self.text[-1:] == [A] else []

    def closing(self):
        return [] if self.complete else [B, C] if self.text[-1:] == [A] else [C]

    def fits(self, room):
        return len(self.closing()) <= room


class ReadOnly:
    """A sequence that nothing can be written to."""

    def __init__(self, seq):
        object.__setattr__(self, "seq", seq)

    def __getattr__(self, name):
        found = getattr(self.seq, name)
        return bytes(found) if isinstance(found, bytearray) else found

    def __setattr__(self, name, value):
        raise AssertionError(f"a thread writes {name}")


def sequence(output=(), thinking=None, **sampling):
    request = EngineRequest(
        id="a",
        prompt_ids=pack([1, 2, 3]),
        output_ids=pack(output),
        sampling=SamplingParams(**{"max_tokens": 20, **sampling}),
        thinking_limit=None if thinking is None else ThinkingLimit(thinking[0], thinking[1], pack(thinking[2])),
    )
    seq = Sequence(request, 0, LIMITS, "model", BlockTable([]), Rows(1, 1), 0.0)
    seq.set_flag(Flag.THINKING, token_rules.limits_thinking(seq))
    return ReadOnly(seq)


def take(seq, guide, *ids, most=0, can_close=True):
    taken = GuidedRun(seq, guide, can_close, LIMITS.eos_ids).take([Drawn(id) for id in ids], most, True)
    return [entry.token_id for entry in taken.entries], taken


def tokens(mask):
    return [token for token in range(302) if mask[token >> 5] >> (token & 31) & 1]


def test_a_guide_is_bound_to_the_output_that_is_resumed():
    bound = bind(sequence([A, B]), Letters(), LIMITS.eos_ids, True)
    assert (bound.guide.text, tokens(bound.mask), bound.forced_ids) == ([A, B], [A, B, C], b"")
    assert bind(sequence([A]), Letters(), LIMITS.eos_ids, True).forced_ids == pack([B])
    with pytest.raises(BadInput, match=f"token {A}"):
        bind(sequence([A, A]), Letters(), LIMITS.eos_ids, True)


def test_masks_after_drafts_and_the_guide_as_it_was():
    guide = Letters([B])
    mask = bind(sequence(), Letters(), LIMITS.eos_ids, False).mask
    found = follow(sequence(), guide, mask, pack([A, B, A, A]), LIMITS.eos_ids)
    assert [tokens(each) for each in found.after] == [[B], [A, B, C], [B]]
    assert guide.text == [B]


def test_a_run_of_draws():
    guide = Letters()
    ids, taken = take(sequence(), guide, B, A)
    assert (ids, taken.finish, tokens(taken.mask), taken.forced_ids) == ([B, A], None, [B], pack([B]))
    assert (taken.n_accepted, taken.n_appended) == (1, 0)
    assert guide.text == [B, A]
    ids, taken = take(sequence(), guide, B, C, A)
    assert (ids, taken.finish, taken.mask, taken.n_accepted) == ([B, C], "stop", None, 2)


def test_the_only_token_of_a_mask_is_appended():
    ids, taken = take(sequence(), Letters(), B, A, most=3)
    assert (ids, taken.n_appended, tokens(taken.mask)) == ([B, A, B], 1, [A, B, C])


def test_the_output_is_closed_in_time():
    ids, taken = take(sequence(max_tokens=3), Letters(), B, A)
    assert (ids, taken.finish, taken.n_accepted) == ([B, C], "stop", 1)


def test_the_thinking_limit_is_told_and_not_written():
    seq = sequence(thinking=(2, (C,), (A, B)))
    ids, taken = take(seq, Letters(), B, B, B)
    assert (ids, taken.limits_thinking, taken.n_accepted) == ([B, B, A, B], False, 2)
    assert seq.limits_thinking
    ids, taken = take(seq, Letters(), B, A, B)  # its grammar accepts no a here: the limit applies one token later
    assert (ids, taken.limits_thinking) == ([B, A, B, A, B], False)


def test_a_grammar_that_contradicts_itself():
    with pytest.raises(ValueError, match="does not accept"):
        take(sequence(), Letters([A]), A)


def test_a_thread_takes_no_token_of_the_sequence_that_gets_its_slot():
    """A sequence may be preempted while a thread reads it. Its slot then has the tokens of another one."""
    read_only = sequence([A, B], bad_ids=(pack([B, B, A]),))
    seq = read_only.seq
    seq.set_flag(Flag.GUIDED, True)
    seq.slot = 0
    seq.rows.cells[[Cell.N_KNOWN, Cell.N_KEPT], 0] = 9, 6  # the other one lacks three tokens
    every = bind(sequence(), Letters(), LIMITS.eos_ids, False).mask
    found = follow(read_only, Letters([A, B]), every, pack([B]), LIMITS.eos_ids)
    assert [tokens(each) for each in found.after] == [[B, C]], "B B A is banned"
    assert seq.rows.cells[Cell.N_KEPT, 0] == 6
