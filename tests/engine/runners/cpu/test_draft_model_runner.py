"""A draft model behind the CPU engine: tokens are those without it, and its KV cache is that of the sequence."""

import pytest
import torch

from emberline.engine.core.limits import Limits
from emberline.engine.core.step_loop import StepLoop
from emberline.engine.runners.cpu.torch_runner import TorchRunner
from emberline.engine.speculation.head_drafter import MODEL_DEPTH, ModelDrafter
from emberline.engine.worker.build import build_scheduler
from emberline.kernels.reference import TorchBackend
from emberline.kv.cache import KVCache
from emberline.models.decoder import Decoder
from emberline.models.draft_model import DraftModel
from emberline.models.registry import ARCHITECTURES
from emberline.weights.model_config import ModelConfig
from tests.engine.fakes import request
from tests.engine.runners.cpu.test_head_runner import EagerSpeculator
from tests.engine.runners.cpu.test_torch_runner import run, tokens
from tests.engine.speculation.test_real_models import CONFIGS, SIZES, VOCAB, OneThreadBackend, answers, plain_answers
from tests.models.random_checkpoint import RandomCheckpoint

OTHER = {  # smaller models of the same tokenizer, whose matrices are padded to other sizes
    "smaller": ModelConfig(architecture="llama", **SIZES | dict(hidden_size=32, n_layers=1, n_heads=2, n_kv_heads=1)),
    "padded": ModelConfig(architecture="llama", **SIZES | dict(vocab_size=VOCAB + 7, hidden_size=32, n_layers=2)),
    "cut": ModelConfig(architecture="llama", **SIZES | dict(vocab_size=VOCAB - 20, n_layers=2)),
    "window": CONFIGS["window"],
}


class Drafting(EagerSpeculator):
    """Drafts in every step, so many tokens: always the same, or in turn."""

    def __init__(self, *depths):
        super().__init__([ModelDrafter()], 0.0)
        self._depths, self.n_steps, self.n_drafted, self.n_accepted = depths or (MODEL_DEPTH,), 0, 0, 0

    def begin_step(self, n_running):
        super().begin_step(n_running)
        self.n_steps += 1
        return self._depths[self.n_steps % len(self._depths)]

    def verified(self, seq, n_drafted, n_accepted):
        self.n_drafted, self.n_accepted = self.n_drafted + n_drafted, self.n_accepted + n_accepted


def model_of(config, backend):
    return Decoder(RandomCheckpoint(config), backend(), ARCHITECTURES[config.architecture])


def loop_of(name, backend, draft=None, speculation=None, n_blocks=60, max_running=3):
    model = model_of(CONFIGS[name], backend)
    limits = Limits(context_len=100, vocab_size=VOCAB, eos_ids=(0,), max_running=max_running, token_budget=64)
    head = None
    if draft is not None:
        head = DraftModel(model_of(draft, backend), "0123456789abcdef", model.config.n_layers, VOCAB)
    groups = model.kv_groups if head is None else (*model.kv_groups, *head.kv_groups)
    sizes = [n_blocks] * len(groups)
    runner = TorchRunner(model, sizes, limits, head=head)
    cache = KVCache(groups, sizes, chunk=limits.token_budget)
    return StepLoop(build_scheduler(cache, limits, "x", speculation=speculation), runner)


@pytest.mark.parametrize(
    ("draft", "backend", "depth"),
    [("smaller", TorchBackend, 3), *((draft, OneThreadBackend, MODEL_DEPTH) for draft in ("padded", "cut", "window"))],
)
def test_tokens_are_those_without_a_draft_model(draft, backend, depth):
    plain, _ = plain_answers("full", backend)
    speculation = Drafting(depth)
    loop = loop_of("full", backend, OTHER[draft], speculation, n_blocks=10)
    assert answers(loop)[0] == plain
    assert loop.load.preemptions > 0
    assert speculation.n_drafted > 100


ASKED = {
    "greedy": dict(temperature=0.0),
    "seeded": dict(temperature=0.9, seed=11),
    "filtered": dict(temperature=1.3, seed=12, top_k=20, top_p=0.8, min_p=0.02),
    "penalized": dict(temperature=0.7, seed=13, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
    "biased": dict(temperature=1.0, seed=16, logit_bias={7: 3.0, 8: -5.0}),
}


@pytest.mark.parametrize(("name", "depths"), [("full", (8,)), ("full", (0,) * 40 + (5,)), ("window", (0, 0, 0, 3, 1))])
@torch.inference_mode()
def test_a_model_that_drafts_for_itself_is_always_right(name, depths):
    """Whatever it drafts, and after steps in which it drafts nothing: over chunks of prompts, ends of blocks, cached
    prefixes and slots that are used again. Only a wrong KV cache of the draft model could make a difference."""
    speculation = Drafting(*depths)
    loop = loop_of(name, OneThreadBackend, CONFIGS[name], speculation)
    plain = loop_of(name, OneThreadBackend)
    for first in (1, 2):  # the second time, prompts are in the cache
        asked = [
            request(f"{id}{first}", [5 + n, 6, 7] * (9 + n * 3), max_tokens=40, ignore_eos=True, **how)
            for n, (id, how) in enumerate(ASKED.items())
        ]
        assert {id: tokens(each) for id, each in run(loop, *asked).items()} == {
            id: tokens(each) for id, each in run(plain, *asked).items()
        }
    assert speculation.n_drafted > 20
    assert speculation.n_accepted == speculation.n_drafted
