"""The engine with its own drafters: the same tokens as without, of the same distribution, and what is told of them."""

from collections import Counter
from itertools import pairwise

import pytest
from msgspec import structs

from emberline.engine.core import scheduler as scheduling
from emberline.engine.speculation import suffix_index
from emberline.engine.speculation.drafter import Draft
from emberline.engine.speculation.grammar_drafter import GrammarDrafter
from emberline.engine.speculation.head_drafter import HeadDrafter, ModelDrafter
from emberline.engine.speculation.speculator import OFF, SETTINGS, Speculator, open_speculator
from emberline.engine.speculation.suffix_drafter import SuffixDrafter
from emberline.engine.worker import main as worker
from emberline.protocol import block_hash
from emberline.protocol.errors import BadInput
from emberline.protocol.grammar import encode
from emberline.protocol.request import EngineRequest, Message, SamplingParams, Speculation
from emberline.protocol.token_ids import pack, unpack
from emberline.text.text_model import TextModel
from tests.engine.fakes import loop_of as fake_loop_of
from tests.engine.fakes import request
from tests.engine.grammar.samples import PERSON
from tests.engine.runners.cpu.test_torch_runner import run, tokens
from tests.engine.speculation.test_real_models import REQUESTS, OneThreadBackend, answers, loop_of, plain_answers

needs_compiler = pytest.mark.skipif(not suffix_index.available(), reason="needs a C compiler")


class Steady(Speculator):
    """On a machine where every step takes as long as any other."""

    def measured(self, plan, seconds):
        super().measured(plan, 0.01)


def speculator(*drafters):
    return Steady(drafters or (GrammarDrafter(), SuffixDrafter()), marginal=0.0)


def totals(loop):
    return {each.drafter: (sum(each.drafted), sum(each.accepted)) for each in loop.load.drafts}


@needs_compiler
@pytest.mark.parametrize("name", ["full", "window"])
def test_tokens_are_those_without_speculation(name):
    """Over preemptions, penalties, bans and sampling of every kind; the second round hits the cache and the index."""
    plain, _ = plain_answers(name, OneThreadBackend)
    loop = loop_of(name, OneThreadBackend, speculator(), n_blocks=10, max_running=3)
    for _ in range(2):
        again, _ = answers(loop)
        assert again == plain
    drafted, accepted = totals(loop)["suffix"]
    assert loop.load.preemptions > 0
    assert 0 < accepted < drafted


@needs_compiler
def test_a_purge_forgets_the_replies_of_an_account():
    drafter = SuffixDrafter()
    loop = fake_loop_of(speculation=speculator(drafter))
    for salt in (b"one", b"two"):
        loop.submit(request(salt.decode(), [1, 2, 3], salt=salt), 0.0)
        while loop.busy:
            loop.step(0.0)
    n_bytes = drafter.n_bytes
    assert n_bytes > 0
    loop.purge(block_hash.root("fake", b"one"), b"")
    assert drafter.n_bytes == n_bytes // 2, "that of another account is kept"
    loop.submit(request("three", [1, 2, 3], salt=b"three"), 0.0)
    loop.step(0.0)
    loop.abort("three")
    loop.purge(None, b"")
    loop.step(0.0)
    assert drafter.n_bytes == 0


@needs_compiler
def test_a_reply_goes_on_in_another_engine():
    """Failover: an engine is lost in the middle of its replies, and another resumes them; both draft."""
    plain, _ = plain_answers("full", OneThreadBackend)
    lost, other = (loop_of("full", OneThreadBackend, speculator(), max_running=8) for _ in range(2))
    asked = {id: request(id, [5 + n, 6, 7] * 9, max_tokens=40, **how) for n, (id, how) in enumerate(REQUESTS.items())}
    said = {id: [] for id in asked}
    for each in asked.values():
        lost.submit(each, 0.0)
    while min(map(len, said.values())) < 8 and lost.busy:
        for delta in lost.step(0.0):
            said[delta.id] += unpack(delta.token_ids)
    begun = {id: ids for id, ids in said.items() if len(ids) < len(plain[id][0])}
    resumed = [structs.replace(asked[id], output_ids=pack(ids)) for id, ids in begun.items()]
    assert len(resumed) > 3
    for id, deltas in run(other, *resumed).items():
        assert (begun[id] + tokens(deltas), deltas[-1].finish) == plain[id]
    assert totals(lost)["suffix"][1] > 0
    assert totals(other)["suffix"][1] > 0


SAMPLED = dict(temperature=1.0, top_k=3, max_tokens=8, ignore_eos=True)


def pairs(speculation, seeds, n=500):
    """How often one token follows another, in replies to one prompt."""
    loop = loop_of("full", OneThreadBackend, speculation, max_running=16)
    asked = [request(f"{seed}", [5, 6, 7] * 6, seed=seed, **SAMPLED) for seed in range(seeds, seeds + n)]
    found = Counter()
    for deltas in run(loop, *asked).values():
        ids = tokens(deltas)
        found.update(pairwise(ids))
    return found, loop


def chi_square(a, b):
    """Per degree of freedom, of two samples: about 1 if they are of one distribution."""
    n_a, n_b = sum(a.values()), sum(b.values())
    total, n_cells = 0.0, 0
    for key in a | b:
        pooled = (a[key] + b[key]) / (n_a + n_b)
        if pooled * min(n_a, n_b) >= 8:
            n_cells += 1
            total += sum((each[key] - n * pooled) ** 2 / (n * pooled) for each, n in ((a, n_a), (b, n_b)))
    assert n_cells > 20
    return total / (n_cells - 1)


@needs_compiler
def test_sampled_output_has_the_same_distribution(monkeypatch):
    """Other seeds with speculation than without. A verifier that accepts what was not drawn is told apart."""
    plain, _ = pairs(None, 0)
    speculated, loop = pairs(speculator(), 10_000)
    assert totals(loop)["suffix"][1] > 200
    assert chi_square(plain, speculated) < 1.5
    monkeypatch.setattr(scheduling, "n_accepted", lambda drawn, draft_ids: len(drawn) - 1)
    credulous, _ = pairs(speculator(), 20_000)
    assert chi_square(plain, credulous) > 2


class Scripted:
    """Drafts the same tokens everywhere."""

    def __init__(self, name, ids):
        self.name, self.ids = name, ids
        self.ended_ids = []

    def propose(self, seqs, before):
        return [(seq, Draft(pack(self.ids), [0] * len(self.ids))) for seq in seqs]

    def prior(self, cell):
        return 0.9

    def ended(self, seq):
        self.ended_ids.append(seq.id)


def test_a_request_may_lower_the_number_of_drafts():
    loop = loop_of("full", OneThreadBackend, speculator(Scripted("one", [1] * 15)), max_running=1)

    def asked(id, **speculation):
        made = request(id, [5, 6, 7] * 6, max_tokens=30, temperature=0.0, ignore_eos=True)
        return EngineRequest(
            id=id, prompt_ids=made.prompt_ids, sampling=made.sampling, speculation=Speculation(**speculation)
        )

    none = run(loop, asked("none", max_draft_tokens=0, report=True))["none"][-1].usage
    assert (none.drafts.drafted, none.drafts.accepted) == (0, 0)
    some = run(loop, asked("some", max_draft_tokens=2, report=True))["some"][-1].usage
    assert some.drafts.drafted > 0
    assert loop.load.drafts[0].drafted[2:] == ()
    assert run(loop, asked("silent"))["silent"][-1].usage.drafts is None
    assert some.completion_tokens == 30
    for most in (-1, 16):
        with pytest.raises(BadInput, match="max_draft_tokens"):
            loop.submit(asked("refused", max_draft_tokens=most), 0.0)


def test_drafters_go_on_where_others_end_and_are_counted_apart():
    first, second = Scripted("first", [1, 2]), Scripted("second", [3] * 9)
    loop = loop_of("full", OneThreadBackend, speculator(first, second), max_running=1)
    run(loop, request("a", [5, 6, 7] * 6, max_tokens=40, temperature=0.0, ignore_eos=True))
    stats = {each.drafter: each.drafted for each in loop.load.drafts}
    assert stats["first"][:2] != (0, 0)
    assert stats["first"][2:] == ()
    if "second" in stats:
        assert stats["second"][:2] == (0, 0)
    assert first.ended_ids == second.ended_ids == ["a"]


def test_auto_on_a_gpu_has_a_head_alone_or_what_needs_none():
    def names(*args, **more):
        made = open_speculator(*args, **more)
        return None if made is None else [drafter.name for drafter in made.drafters]

    assert names("auto", "cuda") == ["grammar", "suffix"]
    assert names("auto", "cuda", head=HeadDrafter()) == ["eagle3"]
    assert names("auto", "cuda", head=ModelDrafter()) == ["draft_model"]
    assert names("auto", "cuda", n_ranks=2) is None
    assert names("grammar", "cuda", n_ranks=2) == ["grammar"]


def test_settings():
    assert open_speculator(OFF, "cpu") is None
    for setting in SETTINGS:
        made = open_speculator(setting, "cpu", head=ModelDrafter() if setting == ModelDrafter.name else HeadDrafter())
        assert (made is None) == (setting == OFF)


# --- the worker's engine ----------------------------------------------------------------------------------------------

REPEAT = (
    "Repeat this text word by word, three times: the quick brown fox jumps over the lazy dog,"
    " while seven green frogs watch from the bank of the old river."
)


def play(path, text, setting, kv_bytes, temperature):
    """Run greedy and sampled requests, with a grammar and without, in a cache that is too small for all of them.

    The second round has other seeds, so that drafts from the first round's sampled replies are wrong sooner or later.
    """
    flags = ["--model", str(path), "--socket", "unused", "--device", "cpu", "--threads", "1", "--kv-bytes", kv_bytes]
    loop = worker.build(worker.parse_arguments([*flags, "--speculation", setting, "--max-running", "3"])).loop
    loop.set_vocabulary(text.vocabulary)
    if (speculation := loop.scheduler.speculation) is not None:
        speculation.__class__ = Steady  # on a busy machine it may not pay
    replies = {}

    def step():
        for delta in loop.step(0.0):
            assert delta.error is None
            replies[delta.id] = replies.get(delta.id, []) + unpack(delta.token_ids)

    for round in range(2):
        for n, (ask, grammar, how) in enumerate(
            (("Invent a person. Reply in JSON.", encode(PERSON), 0.8), (REPEAT, b"", 0.0), (REPEAT, b"", temperature))
        ):
            loop.submit(
                EngineRequest(
                    id=f"{round}-{n}",
                    prompt_ids=text.encode(text.render([Message("user", ask)]), special=True),
                    sampling=SamplingParams(max_tokens=40, temperature=how, seed=3 + round),
                    grammar=grammar,
                ),
                0.0,
            )
            while grammar and f"{round}-{n}" not in replies:
                step()  # its grammar is compiled meanwhile: which steps it is in must not depend on how long that takes
        while loop.busy:
            step()
    return replies, loop


@needs_compiler
@pytest.mark.parametrize(
    ("model", "kv_bytes", "temperature"),
    [("tiny_model", "150000", 0.2), pytest.param("smollm2", "6000000", 0.7, marks=pytest.mark.slow)],
)
def test_a_worker_writes_the_same(request, model, kv_bytes, temperature):
    path = request.getfixturevalue(model)
    text = TextModel.load(path)
    plain, _ = play(path, text, "off", kv_bytes, temperature)
    replies, loop = play(path, text, "auto", kv_bytes, temperature)
    assert replies == plain
    assert loop.load.cached_tokens > 0
    drafted, accepted = map(sum, zip(*totals(loop).values(), strict=True))
    assert 0 < accepted < drafted


def test_where_a_head_is_not_asked_no_row_is():
    """What a head has proposed waits for a few steps; a step that may have no drafts costs its planning nothing."""
    speculator = Speculator([HeadDrafter()], 0.02, on_device=True)
    policy, depths = speculator.policy, iter([2, 0, 0, 0, 0, 0, 0, 1])
    assert not speculator.drafts
    policy.begin_step, policy.depth = lambda n_rows: True, lambda cells: next(depths)
    asked = []
    for _ in range(8):
        speculator.begin_step(4)
        asked.append(speculator.drafts)
    assert asked == [True] * 5 + [False] * 2 + [True]
    policy.begin_step = lambda n_rows: False
    assert speculator.begin_step(4) == 0
    assert not speculator.drafts
