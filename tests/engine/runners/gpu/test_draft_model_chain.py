"""A draft model behind the GPU runner, on a CPU: tokens are those without it, and its KV cache is the sequence's."""

from functools import partial

import pytest

from emberline.engine.core.latency_target import LatencyTarget
from emberline.engine.core.limits import Limits
from emberline.engine.core.step_loop import StepLoop
from emberline.engine.runners.gpu.draft_model_chain import MODEL_CHAIN_DEPTHS, pool_blocks
from emberline.engine.runners.gpu.runner import GpuRunner
from emberline.engine.runners.gpu.shapes import GPU_SHAPES, most_drafts
from emberline.engine.speculation.head_drafter import ModelDrafter
from emberline.engine.worker.build import build_scheduler
from emberline.kernels import draft_chain as chains
from emberline.kernels.decode_inputs import MAX_DRAFTS
from emberline.kernels.reference import TorchBackend
from emberline.kv.cache import KVCache
from emberline.models.draft_model import DraftModel
from tests.engine.fakes import request
from tests.engine.runners.cpu.test_draft_model_runner import OTHER, model_of
from tests.engine.runners.cpu.test_head_runner import EagerSpeculator
from tests.engine.runners.cpu.test_torch_runner import run, tokens
from tests.engine.runners.gpu.host_sampler import HostKernels, HostTable
from tests.engine.speculation.test_real_models import CONFIGS, VOCAB

EXACT = partial(TorchBackend, row_by_row=True)


class ChainKernels(HostKernels):
    begin_chain = staticmethod(chains.begin_chain)

    def draw_drafts(self, logits, table, target_ids, step, drafts, to):
        chains.draw_drafts(logits, table.rows.__getitem__, target_ids, VOCAB, step, drafts, to)


class Drafting(EagerSpeculator):
    """Drafts in every step, so many tokens in turn; the drafts stay on the device."""

    def __init__(self, *depths):
        super().__init__([ModelDrafter()], 0.0, on_device=True)
        self.depths, self.n_steps, self.n_drafted, self.n_accepted = depths, 0, 0, 0

    def begin_step(self, n_running):
        super().begin_step(n_running)
        self.n_steps += 1
        return self.depths[self.n_steps % len(self.depths)]

    def verified(self, seq, n_drafted, n_accepted):
        self.n_drafted, self.n_accepted = self.n_drafted + n_drafted, self.n_accepted + n_accepted


def loop_of(name, draft=None, speculation=None, n_blocks=60, max_running=3):
    model = model_of(CONFIGS[name], EXACT)
    limits = Limits(context_len=100, vocab_size=VOCAB, eos_ids=(0,), max_running=max_running, token_budget=64)
    head = None
    if draft is not None:
        head = DraftModel(model_of(draft, EXACT), "0123456789abcdef", model.config.n_layers, VOCAB)
    groups = model.kv_groups if head is None else (*model.kv_groups, *head.kv_groups)
    sizes = [n_blocks] * len(groups)
    runner = GpuRunner(
        model, sizes, limits, "cpu", ChainKernels(), HostTable(), graphs=False, speculates=head is not None, head=head
    )
    policy = LatencyTarget(GPU_SHAPES, most_drafts=lambda rows: most_drafts(rows, max_running))
    cache = KVCache(groups, sizes, chunk=limits.token_budget)
    return StepLoop(build_scheduler(cache, limits, "x", speculation=speculation, prefill=policy), runner, 2)


def asked(name, most=24):
    how = {"greedy": dict(temperature=0.0), "seeded": dict(temperature=0.9, seed=11)}
    how |= {"filtered": dict(temperature=1.3, seed=12, top_k=20, top_p=0.8)}
    return [
        request(f"{id} {name}", [5 + n, 6, 7] * (9 + n * 4), max_tokens=most, ignore_eos=True, **each)
        for n, (id, each) in enumerate(how.items())
    ]


def replies(loop, *requests):
    return {id: tokens(each) for id, each in run(loop, *requests).items()}


@pytest.mark.parametrize(("draft", "n_blocks"), [("cut", 8), ("window", 60)])
def test_tokens_are_those_without_a_draft_model(draft, n_blocks):
    speculation = Drafting(8)
    loop = loop_of("full", OTHER[draft], speculation, n_blocks)
    assert replies(loop, *asked("a")) == replies(loop_of("full"), *asked("a"))
    assert speculation.n_drafted > 50
    assert (loop.load.preemptions > 0) == (n_blocks < 60)


@pytest.mark.parametrize(("name", "depths"), [("full", (8, 8, 0, 3)), ("window", (4, 0))])
def test_a_model_that_drafts_for_itself_is_always_right(name, depths):
    """Over chunks of prompts, ends of blocks, cached prefixes and slots that are used again: only a wrong KV cache of
    the draft model could make a difference."""
    speculation = Drafting(*depths)
    loop, plain = loop_of(name, CONFIGS[name], speculation), loop_of(name)
    for turn in "ab":  # the second time, prompts are in the cache
        same = [each for each in asked(turn) if "filtered" not in each.id]
        assert replies(loop, *same) == replies(plain, *same)
    assert speculation.n_drafted > 20
    assert speculation.n_accepted == speculation.n_drafted


def test_scratch_of_every_group():
    head = DraftModel(model_of(OTHER["window"], EXACT), "0123456789abcdef", 3, VOCAB)
    assert pool_blocks([10, 20, 30], 4, head) == [10, 25, 35]
    assert pool_blocks([10, 20, 30], 4, None) == [10, 20, 30]
    assert MODEL_CHAIN_DEPTHS[-1] == MAX_DRAFTS
