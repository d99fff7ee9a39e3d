"""Suffix decoding: tenants apart, bounded memory, long prompts spread over steps."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.engine.core.limits import Limits
from emberline.engine.core.queues import Queues
from emberline.engine.core.sequence import Sequence
from emberline.engine.speculation import suffix_drafter, suffix_index
from emberline.engine.speculation.drafter import Draft
from emberline.engine.speculation.suffix_drafter import STEP_TOKENS, SuffixDrafter
from emberline.kv.cache import BlockTable, GroupTable, KVCache
from emberline.protocol.block_hash import KVGroup
from emberline.protocol.request import EngineRequest, SamplingParams
from emberline.protocol.token_ids import pack, unpack
from tests.engine.speculation.reference_suffix_drafter import ReferenceSuffixDrafter

pytestmark = pytest.mark.skipif(not suffix_index.available(), reason="needs a C compiler")
LIMITS = Limits(context_len=1 << 20, vocab_size=1 << 16, eos_ids=(0,), max_running=8, token_budget=64)


class Running:
    """Running sequences, for which a drafter is asked as a step does."""

    def __init__(self, drafter=None, n_slots=16):
        self.drafter = drafter or SuffixDrafter()
        self.queues = Queues(n_slots, KVCache([KVGroup("full", (0,), 1, 1, "float32")], [8], chunk=64))

    def add(self, number, prompt, output=(), salt=b"a"):
        """A sequence that runs with these tokens."""
        sampling = SamplingParams(max_tokens=100)
        request = EngineRequest(id=str(number), prompt_ids=pack(prompt), sampling=sampling, salt=salt)
        seq = Sequence(request, number, LIMITS, "model", BlockTable([GroupTable()]), self.queues.rows, 0.0)
        self.queues.run(seq, 0)
        seq.extend(pack(output))
        return seq

    def end(self, seq):
        self.drafter.ended(seq)
        self.queues.vacate(seq)

    def propose(self, *seqs, before=None):
        """Drafts by sequence number: their ids and cells."""
        chosen = self.queues.select(np.array([seq.slot for seq in seqs], np.intp))
        found = self.drafter.propose(chosen, before or {})
        return {seq.number: (unpack(draft.ids), list(draft.cells)) for seq, draft in found}

    def draft(self, seq, most=4):
        return self.propose(seq).get(seq.number, ([], []))[0][:most]


def test_a_sequence_repeats_its_prompt_and_its_reply():
    running = Running()
    seq = running.add(0, [1, 2, 3, 4, 5, 6, 9], [3, 4])
    assert running.draft(seq) == [5, 6, 9, 3]
    seq.extend(pack([20, 21, 22, 30, 20, 21]))
    assert running.draft(seq, 2) == [22, 30]
    seq.extend(pack([22]))
    assert running.draft(seq, 2) == [30, 20]


def test_a_reply_is_remembered_for_its_tenant_alone():
    running = Running()
    early = running.add(9, [9, 50, 51], salt=b"a")
    assert running.draft(early) == []
    running.end(running.add(0, [1, 2, 3], [50, 51, 52, 53], salt=b"a"))
    assert running.draft(early) == [52, 53]
    assert running.draft(running.add(1, [9, 50, 51], salt=b"a")) == [52, 53]
    assert running.draft(running.add(2, [9, 50, 51], salt=b"b")) == []
    assert running.draft(running.add(3, [7, 2, 3], salt=b"a")) == [50, 51, 52, 53]  # the first tokens of a reply, too


@given(st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 9), min_size=1, max_size=6)), max_size=12))
def test_no_token_crosses_tenants(ended):
    """Each tenant writes in token ids of its own: a draft of another's would show."""
    running = Running()
    base = {"a": 100, "b": 200, "c": 300}
    for number, (tenant, output) in enumerate(ended):
        running.end(running.add(number, [1, 2], [base[tenant] + token for token in output], salt=tenant.encode()))
    for number, tenant in enumerate(base):
        for last in (1, 2, *(base[other] + 3 for other in base)):
            seq = running.add(1000 + number, [last], salt=tenant.encode())
            drafts = running.draft(seq)
            running.queues.vacate(seq)
            assert all(token < 100 or base[tenant] <= token < base[tenant] + 10 for token in drafts)


def test_forgetting_a_tenant():
    running = Running()
    other = running.add(1, [50])
    running.end(running.add(0, [1], [50, 51, 52]))
    assert running.draft(other) == [51, 52]
    running.drafter.forget(other.root_key)
    assert running.draft(other) == []
    running.drafter.ended(other)
    assert running.drafter.n_bytes == 0


def test_a_long_prompt_is_indexed_over_several_steps():
    running = Running()
    seq = running.add(0, [*range(3 * STEP_TOKENS), 2 * STEP_TOKENS + 5])
    assert running.draft(seq) == []
    assert running.draft(seq) == []
    assert running.draft(seq) == [2 * STEP_TOKENS + 6, 2 * STEP_TOKENS + 7]  # a match of one token


def test_memory_stays_within_its_bound():
    running = Running(SuffixDrafter(max_bytes=1 << 20))
    for number in range(200):
        seq = running.add(number, range(3000), [40_000 + number] * 3, salt=b"%d" % (number % 50))
        running.draft(seq)
        assert running.drafter.n_bytes <= 1 << 20
        if number % 2:
            running.end(seq)
        else:
            running.queues.vacate(seq)
    assert running.drafter.n_bytes > 0


def test_running_sequences_do_not_take_each_others_memory():
    """More of them than fit: some draft, the others do without; no index is built again and again."""
    running = Running(SuffixDrafter(max_bytes=1 << 18))
    seqs = [running.add(number, [*range(3000), 2990]) for number in range(10)]
    drafted = []
    for _ in range(4):
        found = running.propose(*seqs)
        drafted.append([seq.number in found for seq in seqs])
    assert 0 < sum(drafted[-1]) < len(seqs)
    assert drafted[1:] == [drafted[-1]] * 3


def test_a_prompt_beyond_the_bound_is_known_by_its_end():
    running = Running(SuffixDrafter(max_bytes=1 << 19))
    seq = running.add(0, [*range(60_000), 59_990])
    assert running.draft(seq) == [59_991, 59_992]
    seq.extend(pack([59_991]))
    assert running.draft(seq) == [59_992, 59_993, 59_994, 59_995]
    assert running.draft(running.add(1, [*range(60_000), 5])) == []


def test_cells_tell_match_length_and_agreement_apart():
    running = Running()
    _, cells = running.propose(running.add(0, [1, 2, 3, 4, 5, 8, 1, 2, 3, 4, 6, 8, 1, 2, 3, 4]))[0]
    priors = [running.drafter.prior(cell) for cell in cells]
    assert priors[0] < priors[1] < 1  # two continuations, then one
    assert suffix_drafter.TENANT_TOKENS * suffix_index.TOKEN_BYTES <= suffix_drafter.DEFAULT_BYTES // 4


def play(drafter, seed):
    """All drafts of a random schedule, step by step: sequences come, rest, gain tokens, move to other slots and end."""
    rng, running, seqs, said = random.Random(seed), Running(drafter), [], []
    n_tokens, many, share = rng.choice([3, 12]), rng.choice([3, 6]), rng.choice([0.4, 0.9])
    for step in range(60):
        if len(seqs) < many and rng.random() < 0.4:
            prompt = [rng.randrange(n_tokens) for _ in range(rng.choice([1, 5, 70, 1200]))]
            seqs.append(running.add(step, prompt, salt=rng.choice([b"a", b"b"])))
        asked = [seq for seq in rng.sample(seqs, len(seqs)) if rng.random() < share]
        before = {seq.number: Draft(pack([1] * n), [0] * n) for seq in asked if (n := rng.choice([0, 0, 0, 0, 2, 16]))}
        said.append(running.propose(*asked, before=before) if asked else {})
        for seq in asked:
            seq.extend(pack(rng.randrange(n_tokens) for _ in range(rng.choice([0, 1, 1, 1, 1, 3]))))
        if seqs and rng.random() < 0.2:
            seq = seqs.pop(rng.randrange(len(seqs)))
            if rng.random() < 0.3:  # preempted: another sequence may have its slot meanwhile
                running.queues.vacate(seq)
                running.queues.free_slots.reverse()
                running.queues.run(seq, 0)
                seqs.append(seq)
            else:
                running.end(seq)
        if rng.random() < 0.05 and seqs:
            drafter.forget(seqs[0].root_key)
        said.append(drafter.n_bytes)
    return said


def check_drafts(seeds):
    n_drafts = 0
    for seed in seeds:
        max_bytes = [1 << 16, 1 << 18, 1 << 26][seed % 3]
        found = play(SuffixDrafter(max_bytes), seed)
        assert found == play(ReferenceSuffixDrafter(max_bytes), seed), f"schedule {seed}"
        n_drafts += sum(len(each) for each in found if isinstance(each, dict))
    assert n_drafts > 10 * len(seeds)


def test_drafts_are_those_of_the_reference_drafter():
    check_drafts(range(6))


@pytest.mark.slow
def test_drafts_of_a_hundred_schedules_are_those_of_the_reference_drafter():
    check_drafts(range(1000, 1100))
