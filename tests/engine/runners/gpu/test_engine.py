"""The GPU engine on a CUDA device: no hidden synchronization, graphs equal to eager steps, memory within budget."""

import pytest
import torch

from emberline.engine.core.limits import Limits
from emberline.engine.core.step_loop import StepLoop
from emberline.engine.runners.gpu.batch import MixedShape, VerifyShape
from emberline.engine.runners.gpu.shapes import BURST_TOKENS
from emberline.engine.worker.build import build_scheduler
from emberline.kv.cache import KVCache
from emberline.weights.model_config import ModelConfig
from tests.engine.fakes import request
from tests.engine.runners.cpu.test_torch_runner import tokens
from tests.engine.speculation.standin import StandinSpeculation, output_of

pytestmark = pytest.mark.gpu

CONFIG = ModelConfig(
    architecture="qwen3",
    vocab_size=5000,
    hidden_size=512,
    n_layers=3,
    n_heads=8,
    n_kv_heads=2,
    head_dim=64,
    mlp_size=1024,
    context_len=2048,
    norm_eps=1e-6,
    rope_theta=10000.0,
)


class RandomWeight:
    kind = "f32"

    def __init__(self, name, shape):
        self.name, self.shape = name, shape

    def affine(self, unpack: object = None):
        return None

    def tensor(self, dtype, device):
        generator = torch.Generator().manual_seed(sum(map(ord, self.name)))
        scale = 0.05 if len(self.shape) == 2 else 0.2
        numbers = torch.randn(self.shape, generator=generator) * scale + (len(self.shape) == 1)
        return numbers.to(dtype).to(device)

    def into(self, target):
        target.copy_(self.tensor(target.dtype, "cpu"))


class Source:
    config = CONFIG

    def has(self, name):
        return True

    def weight(self, name):
        c, part = CONFIG, name.removesuffix(".weight").rpartition(".")[2]
        q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
        shapes = {
            "token_embd": (c.vocab_size, c.hidden_size),
            "output": (c.vocab_size, c.hidden_size),
            "attn_q": (q, c.hidden_size),
            "attn_k": (kv, c.hidden_size),
            "attn_v": (kv, c.hidden_size),
            "attn_output": (c.hidden_size, q),
            "ffn_gate": (c.mlp_size, c.hidden_size),
            "ffn_up": (c.mlp_size, c.hidden_size),
            "ffn_down": (c.hidden_size, c.mlp_size),
            "attn_q_norm": (c.head_dim,),
            "attn_k_norm": (c.head_dim,),
        }
        return RandomWeight(name, shapes.get(part, (c.hidden_size,)))


def engine_of(deterministic=False, graphs=True, n_blocks=600, steps_in_flight=2, speculation=None, token_budget=1024):
    from emberline.engine.runners.gpu.engine import GpuEngine
    from emberline.kernels.gpu.backend.triton_backend import TritonBackend
    from emberline.models.decoder import Decoder
    from emberline.models.qwen import qwen3

    model = Decoder(Source(), TritonBackend("cuda", deterministic=deterministic), qwen3)
    limits = Limits(CONFIG.context_len, CONFIG.vocab_size, (0,), 16, token_budget)
    engine = GpuEngine.open(model, limits, "cuda", 64 << 20, speculates=speculation is not None)
    cache = KVCache(model.kv_groups, [n_blocks], chunk=limits.token_budget)
    runner = engine.runner([n_blocks], limits, graphs=graphs)
    if speculation is not None:
        for kind in runner.step_kinds():
            if isinstance(kind.shape, VerifyShape):  # until they are captured, drafts are left out
                runner.capture(kind)
    scheduler = build_scheduler(cache, limits, "gpu", prefill=engine.prefill, speculation=speculation)
    return StepLoop(scheduler, runner, steps_in_flight), engine


def prompts(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = [5 + 61 * i for i in range(n)]
    return [torch.randint(1, CONFIG.vocab_size, (length,), generator=generator).tolist() for length in lengths]


def run(loop, *requests):
    for wanted in requests:
        loop.submit(wanted, 0.0)
    deltas = {wanted.id: [] for wanted in requests}
    while loop.busy:
        for delta in loop.step(0.0):
            deltas[delta.id].append(delta)
    return {id: tokens(list_) for id, list_ in deltas.items()}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_deterministic_tokens_in_any_batch_with_and_without_graphs(temperature):
    asked = [request(f"r{n}", ids, max_tokens=24, temperature=temperature, seed=n) for n, ids in enumerate(prompts(8))]
    together = run(engine_of(deterministic=True)[0], *asked)
    assert all(len(reply) == 24 for reply in together.values())
    assert run(engine_of(deterministic=True, graphs=False, steps_in_flight=1)[0], *asked) == together
    loop, _ = engine_of(deterministic=True)
    for wanted in asked:
        assert run(loop, wanted)[wanted.id] == together[wanted.id]


def test_a_burst_beside_a_stream_changes_no_token():
    generator = torch.Generator().manual_seed(7)
    ids = [torch.randint(1, CONFIG.vocab_size, (512,), generator=generator).tolist() for _ in range(7)]
    stream, *burst = [request(f"r{n}", each, max_tokens=24, temperature=0.0) for n, each in enumerate(ids)]
    loop, _ = engine_of(deterministic=True, token_budget=BURST_TOKENS)
    for kind in loop.runner.step_kinds():
        if isinstance(kind.shape, MixedShape) and kind.shape.n_tokens == BURST_TOKENS:
            loop.runner.capture(kind)
    assert loop.runner.n_graphs == 1
    loop.submit(stream, 0.0)
    deltas = [delta for _ in range(4) for delta in loop.step(0.0)]
    assert deltas, "it decodes"
    for one in burst:
        loop.submit(one, 0.0)
    while loop.busy:
        deltas += loop.step(0.0)
    alone, _ = engine_of(deterministic=True, graphs=False, steps_in_flight=1)
    for one in (stream, *burst):
        assert tokens([delta for delta in deltas if delta.id == one.id]) == run(alone, one)[one.id]


@pytest.mark.parametrize("graphs", [True, False])
def test_drafts_change_no_token_in_deterministic_mode(graphs):
    how = [{"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.8, "presence_penalty": 0.5, "logprobs": 2}]
    asked = [request(f"r{n}", ids, max_tokens=60, seed=n, **how[n % 3]) for n, ids in enumerate(prompts(7))]
    plain = run(engine_of(deterministic=True)[0], *asked)
    for wrong in (0, 4):
        drafts = StandinSpeculation(lambda seq: plain[seq.id][len(output_of(seq)) :], wrong, CONFIG.vocab_size)
        loop, _ = engine_of(deterministic=True, graphs=graphs, speculation=drafts, n_blocks=2048 // 16 + 1)
        assert run(loop, *asked) == plain
        assert drafts.n_accepted > 100


def test_preemption_changes_no_token():
    asked = [request(f"r{n}", ids, max_tokens=60, temperature=0.0) for n, ids in enumerate(prompts(6))]
    roomy = run(engine_of(deterministic=True)[0], *asked)
    loop, _ = engine_of(deterministic=True, n_blocks=2048 // 16 + 1)
    for n in range(3):  # several times the pool
        asked += [
            request(f"s{n}{i}", ids, max_tokens=60, temperature=0.0) for i, ids in enumerate(prompts(6, seed=n + 1))
        ]
    tight = run(loop, *asked)
    assert {id: tight[id] for id in roomy} == roomy


def test_no_step_blocks_on_the_device():
    """Also with penalties, bans, biases and logprobs, once their kernels are compiled."""
    plain = {"max_tokens": 12, "temperature": 0.7}
    kinds = [
        plain,
        plain | {"temperature": 0.0},
        plain | {"top_p": 0.9, "top_k": 40},
        plain | {"presence_penalty": 0.5, "repetition_penalty": 1.1},
        plain | {"logprobs": 5, "logit_bias": {7: 2.0}},
        plain | {"min_tokens": 6, "ignore_eos": False},
    ]
    loop, _ = engine_of()
    asked = [request(f"r{n}", ids, **kinds[n]) for n, ids in enumerate(prompts(len(kinds)))]
    run(loop, *asked)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = [request(f"a{n}", ids, **kinds[n]) for n, ids in enumerate(prompts(len(kinds), seed=9))]
        replies = run(loop, *again)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(len(reply) == 12 for reply in replies.values())


def test_memory_stays_within_the_budget():
    loop, engine = engine_of()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    asked = [request(f"r{n}", ids * 4, max_tokens=20) for n, ids in enumerate(prompts(8))]
    run(loop, *asked)
    grown = torch.cuda.max_memory_allocated() - before
    assert grown < engine.memory.reserve // 4, "what a step needs beyond the workspace comes out of the reserve"
