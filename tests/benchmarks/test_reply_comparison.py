"""Replies compared by their logprobs: near ties pass, the KV of one wrong block does not."""

import pytest

from benchmarks.gpu.rank_processes import TINY, TINY_TOLERANCE
from benchmarks.reply_comparison import TOP, RepliesDiffer, compare, difference
from emberline.protocol import block_hash
from emberline.protocol.block_hash import BLOCK_TOKENS
from emberline.protocol.events import TokenLogprobs
from emberline.protocol.token_ids import pack

N_OUT = 8
N_BLOCKS = 64
SEEDS = (352, 209, 71)  # of prompts to which the tiny model replies without near ties
PROMPTS = [[(7 * seed + 3 * at) % 4000 + 2 for at in range(50 + 30 * n)] for n, seed in enumerate(SEEDS)]


def entry(token_id, *top):
    return TokenLogprobs(token_id, dict(top)[token_id], list(top))


PLAIN = [entry(5, (5, -0.5), (6, -1.5)), entry(6, (6, -1.0), (7, -1.03)), entry(7, (7, -0.1), (8, -3.0))]


def test_equal_replies_are_compared_to_their_end():
    assert compare(PLAIN, PLAIN, 0.05) == 3


def test_a_near_tie_ends_the_comparison():
    found = [PLAIN[0], entry(7, (7, -1.01), (6, -1.02)), entry(1, (1, -0.1), (2, -3.0))]
    assert compare(PLAIN, found, 0.05) == 2


@pytest.mark.parametrize("found", [PLAIN[:2], []])
def test_replies_of_other_lengths_differ(found):
    with pytest.raises(RepliesDiffer, match=f"{len(found)} tokens instead of 3"):
        compare(PLAIN, found, 0.05)


def test_another_token_that_was_no_near_tie_differs():
    """Whatever the logprobs say: greedy decoding took the wrong one."""
    with pytest.raises(RepliesDiffer, match="token 1 is another one, less likely by 1"):
        compare(PLAIN, [entry(6, (5, -0.5), (6, -1.5)), *PLAIN[1:]], 0.05)
    assert compare(PLAIN, [entry(6, (5, -0.5), (6, -1.5)), *PLAIN[1:]], 0.05, greedy=False) == 1


@pytest.mark.parametrize(
    ("other", "off"),
    [
        ([(5, -0.5), (6, -1.5)], 0.0),
        ([(6, -1.4), (5, -0.6)], 0.1),
        ([(5, -0.5), (7, -1.45)], 0.05),  # 6 has at most -1.45 there
        ([(7, -0.5), (8, -1.5)], 1.0),
    ],
)
def test_the_largest_difference_counts(other, off):
    assert difference(PLAIN[0].top, other) == pytest.approx(off)
    assert difference(other, PLAIN[0].top) == pytest.approx(off)


class Engine:
    """The tiny model in this process, whose cached KV can be changed."""

    def __init__(self):
        from emberline.engine.core.limits import Limits
        from emberline.engine.core.scheduler import Scheduler
        from emberline.engine.core.step_loop import StepLoop
        from emberline.engine.runners.cpu.torch_runner import TorchRunner
        from emberline.kv.cache import KVCache
        from emberline.models.registry import load_model
        from emberline.weights.generated import generate_checkpoint

        model = load_model(generate_checkpoint(TINY, 1))
        limits = Limits(context_len=500, vocab_size=4096, eos_ids=(1,), max_running=4, token_budget=256)
        self.cache = KVCache(model.kv_groups, [N_BLOCKS], chunk=256)
        self.runner = TorchRunner(model, [N_BLOCKS], limits)
        self.loop = StepLoop(Scheduler(self.cache, limits, "tiny"), self.runner)

    def reply(self, prompt):
        from tests.engine.fakes import request

        self.loop.submit(request("a", prompt, max_tokens=N_OUT, temperature=0.0, logprobs=TOP), 0.0)
        found = []
        while self.loop.busy:
            for delta in self.loop.step(0.0):
                found += delta.logprobs or []
        return found

    def blocks(self, prompt):
        """The KV of the cached blocks of a prompt."""
        keys = []
        block_hash.extend(keys, block_hash.root("tiny", b""), pack(prompt), (len(prompt) - 1) // BLOCK_TOKENS)
        return [self.runner.memory.block(0, self.cache.groups[0].index.block(key)) for key in keys]


@pytest.fixture(scope="module")
def engine():
    return Engine()


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_the_kv_of_a_wrong_block_shows(engine, prompt):
    expected = engine.reply(prompt)
    blocks = engine.blocks(prompt)
    right = [bytes(block) for block in blocks]
    assert compare(expected, engine.reply(prompt), TINY_TOLERANCE) == N_OUT
    for j, block in enumerate(blocks):
        for wrong in (bytes(len(block)), right[j - 1]):
            block[:] = wrong
            with pytest.raises(RepliesDiffer, match="the logprobs of token 1 differ"):
                compare(expected, engine.reply(prompt), TINY_TOLERANCE)
        block[:] = right[j]
    assert compare(expected, engine.reply(prompt), TINY_TOLERANCE) == N_OUT


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_the_prompts_have_no_near_ties(engine, prompt):
    margins = [each.top[0][1] - each.top[1][1] for each in engine.reply(prompt)]
    assert min(margins) > TINY_TOLERANCE
