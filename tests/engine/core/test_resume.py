"""A request resumed with the output of another engine gets the same tokens as one that was not interrupted."""

from itertools import accumulate

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.engine.core.step_loop import StepLoop
from emberline.protocol import block_hash as blockhash
from emberline.protocol.errors import BadInput
from emberline.protocol.request import Message
from emberline.protocol.token_ids import pack, unpack
from emberline.text.text_model import TextModel
from tests.engine.client import LocalEngine
from tests.engine.fakes import FULL, VOCAB, FakeRunner, expected, request, scheduler_of, window_group
from tests.engine.grammar import samples
from tests.engine.grammar.bench import Bench, Taste, compiler
from tests.engine.grammar.test_real_model import request as structured
from tests.examples import n_examples

PROMPT = [n * n % VOCAB for n in range(40)]


def answer(wanted, **setup):
    scheduler, cache = scheduler_of(**setup)
    loop = StepLoop(scheduler, FakeRunner(cache))
    scheduler.submit(wanted, 0.0)
    deltas = []
    while loop.busy:
        deltas += loop.step(0.0)
    assert cache.n_used == 0
    return deltas


def tokens(deltas):
    return [token for delta in deltas for token in unpack(delta.token_ids)]


@settings(max_examples=n_examples(80), deadline=None)
@given(
    n_prompt=st.integers(1, 40),
    sampling=st.fixed_dictionaries(
        {"max_tokens": st.sampled_from([2, 17, 40, None])},
        optional={"ignore_eos": st.booleans(), "min_tokens": st.integers(0, 9), "stop_ids": st.just((3,))},
    ),
    layouts=st.sampled_from([(FULL,), (FULL, window_group(20))]),
    cut=st.integers(1, 60),
)
def test_resuming_at_any_token_gives_the_same_output(n_prompt, sampling, layouts, cut):
    setup = {"layouts": layouts, "context_len": 90, "n_blocks": 12}
    whole = request("a", PROMPT[:n_prompt], **sampling)
    ids, finish = expected(PROMPT[:n_prompt], whole.sampling, layouts, 90)
    if cut >= len(ids):
        return
    deltas = answer(msgspec.structs.replace(whole, output_ids=pack(ids[:cut])), **setup)
    assert tokens(deltas) == ids[cut:]
    assert deltas[-1].finish == finish
    assert deltas[0].usage.prompt_tokens == n_prompt
    assert deltas[0].usage.completion_tokens in (cut, cut + 1)
    assert deltas[-1].usage.completion_tokens == len(ids)


def test_cached_tokens_count_the_prompt_only():
    scheduler, cache = scheduler_of(n_blocks=32)
    loop = StepLoop(scheduler, FakeRunner(cache))
    whole = request("a", PROMPT[:20], max_tokens=60)
    ids, _ = expected(PROMPT[:20], whole.sampling, (FULL,), 512)
    deltas = []
    for each in (whole, msgspec.structs.replace(whole, id="b", output_ids=pack(ids[:50]))):
        scheduler.submit(each, 0.0)
        while loop.busy:
            deltas += loop.step(0.0)
    assert deltas[-1].id == "b"
    assert deltas[-1].usage.cached_tokens == 20
    assert tokens([delta for delta in deltas if delta.id == "b"]) == ids[50:]


@pytest.mark.parametrize("given_ids", [b"\1\2\3", pack([VOCAB]), pack([1] * 4), pack([1] * 600)])
def test_output_that_cannot_be_resumed_is_refused(given_ids):
    scheduler, _ = scheduler_of()
    with pytest.raises(BadInput) as caught:
        scheduler.submit(msgspec.structs.replace(request("a", PROMPT), output_ids=given_ids), 0.0)
    assert caught.value.param == "output_ids"
    assert not scheduler.busy


# --- given block keys ---------------------------------------------------------------------------------------------


def keys_of(ids, salt=b""):
    keys = []
    blockhash.extend(keys, blockhash.root("fake", salt), pack(ids))
    return b"".join(keys)


def test_given_block_keys_are_used_and_extended():
    scheduler, cache = scheduler_of(n_blocks=32)
    loop = StepLoop(scheduler, FakeRunner(cache))
    scheduler.submit(msgspec.structs.replace(request("a", PROMPT, max_tokens=30), keys=keys_of(PROMPT)), 0.0)
    deltas = []
    while loop.busy:
        deltas += loop.step(0.0)
    conversation = PROMPT + tokens(deltas)
    scheduler.submit(request("b", conversation, max_tokens=1), 0.0)
    while loop.busy:
        deltas += loop.step(0.0)
    assert deltas[-1].usage.cached_tokens == (len(conversation) - 1) // 16 * 16
    marked = bytes(32)
    scheduler.submit(msgspec.structs.replace(request("c", PROMPT, max_tokens=1), keys=marked), 0.0)
    while loop.busy:
        deltas += loop.step(0.0)
    assert deltas[-1].usage.cached_tokens == 0, "not cached: it was not hashed again"


@pytest.mark.parametrize("n_bytes", [16, 31, 33, 48])
def test_block_keys_of_a_wrong_length_are_refused(n_bytes):
    scheduler, _ = scheduler_of()
    with pytest.raises(BadInput) as caught:
        scheduler.submit(msgspec.structs.replace(request("a", PROMPT), keys=bytes(n_bytes)), 0.0)
    assert caught.value.param == "keys"


# --- grammars and thinking ----------------------------------------------------------------------------------------

BOUND = {
    "linked": ("linked", "none", None),
    "numbers": ("numbers", "digits", None),
    "thinking": ("thinking", "strings", (6, (samples.SPECIAL,), (samples.SPECIAL,))),
    "free": (None, "strings", (6, (samples.SPECIAL,), (samples.SPECIAL, 65))),
    "no end among them": (None, "strings", (6, (samples.SPECIAL,), (65, 66))),
    "no room": (None, "strings", (28, (samples.SPECIAL,), (65, 66, 67))),
}


@pytest.fixture(scope="module")
def grammars():
    with compiler() as made:
        yield made


@pytest.mark.parametrize("name", BOUND)
def test_grammar_and_thinking_limit_resume_at_any_delta(name, grammars):
    grammar, taste, thinking = BOUND[name]
    whole = Bench(grammars=grammars)
    whole.submit("a", grammar, taste, max_tokens=30, thinking=thinking)
    whole.finish()
    wanted, end = whole.tokens("a"), whole.end("a").finish
    asked = next(iter(whole.runner.requests.values()))
    cut = 0
    for delta in whole.deltas["a"][:-1]:
        cut += len(delta.token_ids) // 4
        bench = Bench(grammars=grammars, runner=Taste())
        bench.scheduler.submit(msgspec.structs.replace(asked, output_ids=pack(wanted[:cut])), 0.0)
        bench.finish()
        assert bench.tokens("a") == wanted[cut:]
        assert bench.end("a").finish == end
        assert bench.end("a").usage.completion_tokens == len(wanted)


def test_resumed_output_that_violates_its_grammar_is_refused(grammars):
    bench = Bench(grammars=grammars)
    bench.submit("a", "linked", max_tokens=20)
    bench.finish()
    asked = next(iter(bench.runner.requests.values()))
    bench.scheduler.submit(msgspec.structs.replace(asked, id="b", output_ids=pack([ord("x")])), 0.0)
    bench.finish()
    assert (bench.end("b").error.kind, bench.end("b").error.param) == ("bad_input", "output_ids")
    assert not bench.guided.n_compiling


# --- computed models --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["tiny_model", pytest.param("smollm2", marks=pytest.mark.slow)])
def model(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def text(model):
    return TextModel.load(model)


@pytest.fixture(scope="module")
def pair(model, text):
    """Two engines: one begins a request, the other resumes it."""
    flags = ("--deterministic", "--token-budget", 64, "--max-running", 8, "--kv-bytes", 12 << 20)
    engines = LocalEngine(model, *flags), LocalEngine(model, *flags)
    for each in engines:
        each.set_vocabulary(text.vocabulary)
    return engines


@pytest.mark.parametrize("name", ["greedy", "seeded", "penalties", "grammar"])
def test_a_computed_reply_resumes_on_another_engine(pair, text, name):
    prompt = unpack(text.encode(text.render([Message("user", "Why is the sky blue?")]), special=True))
    sampling = {
        "greedy": {"temperature": 0.0},
        "seeded": {"temperature": 1.0, "top_p": 0.9, "seed": 11},
        "penalties": {"temperature": 0.2, "seed": 3, "frequency_penalty": 2.0, "repetition_penalty": 1.5},
        "grammar": {},
    }[name]
    if name == "grammar":
        whole = structured(name, text, "linked", max_tokens=40, temperature=1.0)
    else:
        whole = request(name, prompt, **{"max_tokens": 40, "min_tokens": 40, **sampling})
    first, second = pair
    first.submit(whole)
    first.finish(whole.id)
    ids = first.tokens(whole.id)
    bounds = list(accumulate(len(delta.token_ids) // 4 for delta in first.deltas[whole.id][:-1]))
    cuts = [cut for cut in (1, 7, 16, 23, bounds[-1]) if cut in bounds]
    again = [msgspec.structs.replace(whole, id=f"{name} {cut}", output_ids=pack(ids[:cut])) for cut in cuts]
    second.submit(*again)
    second.finish(*(each.id for each in again))
    for cut, each in zip(cuts, again):
        assert second.tokens(each.id) == ids[cut:]
        assert second.deltas[each.id][-1].usage.completion_tokens == len(ids)
