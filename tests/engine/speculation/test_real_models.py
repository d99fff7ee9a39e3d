"""The CPU engine with drafts and without, on small random models: tokens and log-probabilities are the same."""

from functools import cache

import pytest

from emberline.engine.core.limits import Limits
from emberline.engine.core.step_loop import StepLoop
from emberline.engine.runners.cpu.torch_runner import TorchRunner
from emberline.engine.worker.build import build_scheduler
from emberline.kernels.cpu.native_backend import NativeBackend
from emberline.kernels.reference import TorchBackend
from emberline.kv.cache import KVCache
from emberline.models.decoder import Decoder
from emberline.models.registry import ARCHITECTURES
from emberline.protocol.token_ids import pack
from emberline.weights.model_config import ModelConfig
from tests.engine.fakes import request
from tests.engine.runners.cpu.test_torch_runner import run, tokens
from tests.engine.speculation.standin import StandinSpeculation, output_of
from tests.models.random_checkpoint import RandomCheckpoint

VOCAB = 97
SIZES = dict(
    vocab_size=VOCAB, hidden_size=64, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=32, mlp_size=96, context_len=256,
    norm_eps=1e-6, rope_theta=10000.0,
)  # fmt: skip
CONFIGS = {
    "full": ModelConfig(architecture="qwen3", qk_norm=True, **SIZES),
    "window": ModelConfig(architecture="llama", windows=(24, None, 24), **SIZES),
}


class OneThreadBackend(NativeBackend):
    """The CPU kernels on one thread: on a busy machine, several threads spend their time in waiting for each other."""

    def __init__(self):
        super().__init__(threads=1)


def loop_of(name, backend, speculation=None, n_blocks=60, **limits):
    config = CONFIGS[name]
    model = Decoder(RandomCheckpoint(config), backend(), ARCHITECTURES[config.architecture])
    limits = Limits(
        **{"context_len": 100, "vocab_size": VOCAB, "eos_ids": (0,), "max_running": 4} | limits, token_budget=64
    )
    sizes = [n_blocks] * len(model.kv_groups)
    kv = KVCache(model.kv_groups, sizes, chunk=limits.token_budget)
    return StepLoop(build_scheduler(kv, limits, "x", speculation=speculation), TorchRunner(model, sizes, limits))


REQUESTS = {
    "greedy": dict(temperature=0.0, logprobs=2),
    "seeded": dict(temperature=0.9, seed=11, logprobs=0),
    "filtered": dict(temperature=1.3, seed=12, top_k=20, top_p=0.8, min_p=0.02),
    "penalized": dict(temperature=0.7, seed=13, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
    "limited": dict(temperature=1.0, seed=14, min_tokens=30, stop_ids=(3, 5, 9), ignore_eos=False),
    "bad words": dict(temperature=1.0, seed=15, bad_ids=tuple(pack([a, b]) for a in range(40) for b in range(9))),
    "biased": dict(temperature=1.0, seed=16, logit_bias={7: 3.0, 8: -5.0}),
}


def answers(loop):
    asked = [request(id, [5 + n, 6, 7] * 9, max_tokens=40, **how) for n, (id, how) in enumerate(REQUESTS.items())]
    deltas = run(loop, *asked)
    entries = {id: [e for delta in each for e in delta.logprobs or []] for id, each in deltas.items()}
    return (
        {id: (tokens(each), each[-1].finish) for id, each in deltas.items()},
        {id: [(e.token_id, e.logprob, e.top) for e in each] for id, each in entries.items()},
    )


@cache
def plain_answers(name, backend):
    """Tokens and log-probabilities without drafts."""
    return answers(loop_of(name, backend, max_running=2))


@pytest.mark.parametrize(
    ("name", "backend", "wrong"),
    [
        ("full", OneThreadBackend, 0),
        ("window", OneThreadBackend, 3),
        ("full", TorchBackend, 3),
        ("window", TorchBackend, 6),
    ],
)
def test_tokens_and_logprobs_are_those_without_drafts(name, backend, wrong):
    plain, plain_logprobs = plain_answers(name, backend)

    def oracle(seq):
        return plain[seq.id][0][len(output_of(seq)) :]

    speculation = StandinSpeculation(oracle, wrong, VOCAB)
    loop = loop_of(name, backend, speculation, n_blocks=10, max_running=3)
    drafted, logprobs = answers(loop)
    assert drafted == plain
    assert loop.load.preemptions > 0
    assert speculation.n_accepted > 60
    for id, entries in plain_logprobs.items():
        assert [entry[0] for entry in logprobs[id]] == [entry[0] for entry in entries]
        for mine, other in zip(logprobs[id], entries):
            assert mine[1] == pytest.approx(other[1], abs=0 if backend is OneThreadBackend else 1e-4)
            assert [t for t, _ in mine[2]] == [t for t, _ in other[2]]
