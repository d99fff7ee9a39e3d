"""Suffix decoding: tenants apart, bounded memory, long prompts spread over steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.engine.core.limits import Limits
from emberline.engine.core.rows import Rows
from emberline.engine.core.sequence import Sequence
from emberline.engine.speculation import suffix_drafter, suffix_index
from emberline.engine.speculation.suffix_drafter import STEP_TOKENS, SuffixDrafter
from emberline.kv.cache import BlockTable
from emberline.protocol.request import EngineRequest, SamplingParams
from emberline.protocol.token_ids import pack, unpack

pytestmark = pytest.mark.skipif(not suffix_index.available(), reason="needs a C compiler")
LIMITS = Limits(context_len=1 << 20, vocab_size=1 << 16, eos_ids=(0,), max_running=8, token_budget=64)


def sequence(number, prompt, output=(), salt=b"a"):
    request = EngineRequest(id=str(number), prompt_ids=pack(prompt), sampling=SamplingParams(max_tokens=100), salt=salt)
    seq = Sequence(request, number, LIMITS, "model", BlockTable([]), Rows(1, 1), 0.0)
    seq.ids += pack(output)
    return seq


def draft(drafter, seq, most=4):
    return [token_id for _, found in drafter.propose([seq], {}) for token_id in unpack(found.ids)[:most]]


def test_a_sequence_repeats_its_prompt_and_its_reply():
    drafter = SuffixDrafter()
    seq = sequence(0, [1, 2, 3, 4, 5, 6, 9], [3, 4])
    assert draft(drafter, seq) == [5, 6, 9, 3]
    seq.ids += pack([20, 21, 22, 30, 20, 21])
    assert draft(drafter, seq, 2) == [22, 30]


def test_a_reply_is_remembered_for_its_tenant_alone():
    drafter = SuffixDrafter()
    drafter.ended(sequence(0, [1, 2, 3], [50, 51, 52, 53], salt=b"a"))
    assert draft(drafter, sequence(1, [9, 50, 51], salt=b"a")) == [52, 53]
    assert draft(drafter, sequence(2, [9, 50, 51], salt=b"b")) == []
    assert draft(drafter, sequence(3, [7, 2, 3], salt=b"a")) == [50, 51, 52, 53]  # the first tokens of a reply, too


@given(st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 9), min_size=1, max_size=6)), max_size=12))
def test_no_token_crosses_tenants(ended):
    """Each tenant writes in token ids of its own: a draft of another's would show."""
    drafter = SuffixDrafter()
    base = {"a": 100, "b": 200, "c": 300}
    for number, (tenant, output) in enumerate(ended):
        drafter.ended(sequence(number, [1, 2], [base[tenant] + token for token in output], salt=tenant.encode()))
    for number, tenant in enumerate(base):
        for last in (1, 2, *(base[other] + 3 for other in base)):
            drafts = draft(drafter, sequence(1000 + number, [last], salt=tenant.encode()))
            assert all(token < 100 or base[tenant] <= token < base[tenant] + 10 for token in drafts)


def test_forgetting_a_tenant():
    drafter = SuffixDrafter()
    seq = sequence(0, [1], [50, 51, 52])
    drafter.ended(seq)
    drafter.forget(seq.root_key)
    assert drafter.n_bytes == 0
    assert draft(drafter, sequence(1, [50])) == []


def test_a_long_prompt_is_indexed_over_several_steps():
    drafter = SuffixDrafter()
    seq = sequence(0, [*range(3 * STEP_TOKENS), 2 * STEP_TOKENS + 5])
    assert draft(drafter, seq) == []
    assert draft(drafter, seq) == []
    assert draft(drafter, seq) == [2 * STEP_TOKENS + 6, 2 * STEP_TOKENS + 7]  # a match of one token


def test_memory_stays_within_its_bound():
    drafter = SuffixDrafter(max_bytes=1 << 20)
    for number in range(200):
        seq = sequence(number, range(3000), [40_000 + number] * 3, salt=b"%d" % (number % 50))
        drafter.propose([seq], {})
        assert drafter.n_bytes <= 1 << 20
        if number % 2:
            drafter.ended(seq)
    assert drafter.n_bytes > 0


def test_running_sequences_do_not_take_each_others_memory():
    """More of them than fit: some draft, the others do without; no index is built again and again."""
    drafter = SuffixDrafter(max_bytes=1 << 18)
    seqs = [sequence(number, [*range(3000), 2990]) for number in range(10)]
    drafted = []
    for _ in range(4):
        found = {seq.number for seq, _ in drafter.propose(seqs, {})}
        drafted.append([seq.number in found for seq in seqs])
    assert 0 < sum(drafted[-1]) < len(seqs)
    assert drafted[1:] == [drafted[-1]] * 3


def test_a_prompt_beyond_the_bound_is_known_by_its_end():
    drafter = SuffixDrafter(max_bytes=1 << 19)
    seq = sequence(0, [*range(60_000), 59_990])
    assert draft(drafter, seq) == [59_991, 59_992]
    seq = sequence(1, [*range(60_000), 5])
    assert draft(drafter, seq) == []


def test_cells_tell_match_length_and_agreement_apart():
    drafter = SuffixDrafter()
    [(_, found)] = drafter.propose([sequence(0, [1, 2, 3, 4, 5, 8, 1, 2, 3, 4, 6, 8, 1, 2, 3, 4])], {})
    priors = [drafter.prior(cell) for cell in found.cells]
    assert priors[0] < priors[1] < 1  # two continuations, then one
    assert suffix_drafter.TENANT_TOKENS * suffix_index.TOKEN_BYTES <= suffix_drafter.DEFAULT_BYTES // 4
