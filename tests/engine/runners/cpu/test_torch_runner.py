import os
from math import inf, prod

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from emberline.engine.core.limits import Limits
from emberline.engine.core.scheduler import Scheduler
from emberline.engine.core.step_loop import StepLoop
from emberline.engine.runners.cpu.torch_runner import TorchRunner, allocate_pool
from emberline.kv import host_memory as pages_module
from emberline.kv.cache import KVCache
from emberline.protocol.block_hash import KVGroup
from emberline.protocol.request import ThinkingLimit
from emberline.protocol.token_ids import pack, unpack
from tests.engine.fakes import VOCAB, expected, mix, next_token, request

FULL = KVGroup("full", (0, 2), 1, 4, "float32")
WINDOW = KVGroup("window", (1,), 1, 4, "float32", window=20)


class TorchFake:
    """tests.engine.fakes in tensors: every token depends on all KV that it can see, read back through the tables."""

    def __init__(self, layouts=(FULL,)):
        self.kv_groups = layouts
        self.steps = []
        self.nan = False

    def forward(self, step, kv):
        self.steps.append(step)
        kv = [pool.numpy() for pool in kv]
        assert step.token_ids.dtype == step.positions.dtype == step.query_starts.dtype == torch.int32
        assert step.context_lens.dtype == torch.int32
        assert step.sample_tokens.dtype == torch.int64
        logits = torch.zeros(len(step.sample_tokens), VOCAB)
        if self.nan:
            return logits * torch.nan
        starts, samples = step.query_starts.tolist(), step.sample_tokens.tolist()
        for r, end in enumerate(step.context_lens.tolist()):
            last = starts[r + 1] - 1
            assert step.positions[starts[r] : last + 1].tolist() == list(range(end - (last + 1 - starts[r]), end))
            for pool, table in zip(kv, step.block_tables):
                assert table.is_contiguous()
                self._write(pool, table[r].tolist(), step, starts[r], last)
            for token in range(starts[r], last + 1):
                if token in samples:
                    token_end = end - (last - token)
                    logits[samples.index(token), next_token(self._views(kv, step, r, token_end))] = 9.0
        return logits

    def _write(self, pool, table, step, first, last):
        for t in range(first, last + 1):
            position, token = int(step.positions[t]), int(step.token_ids[t])
            before = self._read(pool, table, position - 1)[1] if position else 0
            state = mix(before, token)
            entry = pool[table[position // 16], :, :, 0, position % 16]  # [layers, 2, dim]
            entry[...] = [token, *((state >> shift) & 0x1FFFFF for shift in (0, 21, 42))]

    def _read(self, pool, table, position):
        assert table[position // 16] != 0
        token, *parts = map(int, pool[table[position // 16], -1, 1, 0, position % 16])
        return token, sum(part << shift for part, shift in zip(parts, (0, 21, 42)))

    def _views(self, kv, step, r, end):
        for layout, pool, table in zip(self.kv_groups, kv, step.block_tables):
            first = 0 if layout.window is None else max(0, end - layout.window)
            yield [self._read(pool, table[r].tolist(), position) for position in range(first, end)]


def loop_of(model, n_blocks=40, **limits):
    defaults = {"context_len": 200, "vocab_size": VOCAB, "eos_ids": (0,), "max_running": 4, "token_budget": 32}
    limits = Limits(**defaults | limits)
    sizes = [n_blocks] * len(model.kv_groups)
    cache = KVCache(model.kv_groups, sizes, chunk=limits.token_budget)
    return StepLoop(Scheduler(cache, limits, "fake"), TorchRunner(model, sizes, limits))


def run(loop, *requests):
    for wanted in requests:
        loop.submit(wanted, 0.0)
    deltas = {wanted.id: [] for wanted in requests}
    for _ in range(2000):
        if not loop.busy:
            return deltas
        for delta in loop.step(0.0):
            deltas[delta.id].append(delta)
    raise AssertionError("it never ends")


def tokens(deltas):
    return [token for delta in deltas for token in unpack(delta.token_ids)]


@pytest.mark.parametrize("layouts", [(FULL,), (FULL, WINDOW)], ids=["full", "window"])
def test_tokens_are_unchanged_by_batching_chunks_hits_and_preemption(layouts):
    loop = loop_of(TorchFake(layouts), n_blocks=9, context_len=100)
    prompts = {f"r{n}": [(n + i * i) % VOCAB for i in range(25 + 9 * n)] for n in range(3)}
    wanted = {id: request(id, ids, max_tokens=40, temperature=0.0) for id, ids in prompts.items()}
    answers = {id: expected(prompts[id], wanted[id].sampling, layouts, 100)[0] for id in prompts}
    together = run(loop, *wanted.values())
    assert {id: tokens(deltas) for id, deltas in together.items()} == answers
    assert loop.load.preemptions > 0
    for id in prompts:
        assert tokens(run(loop, wanted[id])[id]) == answers[id]
        again = run(loop, wanted[id])[id]
        assert tokens(again) == answers[id]
        assert again[0].usage.cached_tokens == (len(prompts[id]) - 1) // 16 * 16


def test_padding_refers_to_the_null_block():
    model = TorchFake()
    loop = loop_of(model, token_budget=64, max_running=2)
    run(loop, request("x", [1] * 60, max_tokens=1))  # leaves its blocks behind in a slot
    loop.submit(request("a", [1] * 40, max_tokens=2, salt=b"1"), 0.0)
    loop.submit(request("b", [2] * 5, max_tokens=2), 0.0)
    loop.step(0.0)
    [table] = model.steps[-1].block_tables
    assert table.shape == (2, 3)
    assert table[1, 1:].tolist() == [0, 0]
    assert (table[0] > 0).all()


def test_an_invalid_row_fails_alone_and_an_exception_fails_its_step():
    model = TorchFake()
    loop = loop_of(model)
    model.nan = True
    assert run(loop, request("a", [1]))["a"][-1].error.message == "the model produced invalid numbers"
    model.nan = False
    forward, model.forward = model.forward, lambda step, kv: 1 / 0
    assert run(loop, request("b", [1]))["b"][-1].error.kind == "internal"
    model.forward = forward
    assert run(loop, request("c", [1]))["c"][-1].finish == "length"


def test_sampling_parameters_reach_the_sampler(monkeypatch):
    seen = []

    def sample(logits, rows):
        from emberline.kernels import sampling

        seen.extend((r.seed, r.position, r.banned, r.prompt_ids, r.output_ids, r.logit_bias) for r in rows)
        return sampling.sample(logits, rows)

    monkeypatch.setattr("emberline.engine.runners.cpu.runner.sample", sample)
    loop = loop_of(TorchFake(), n_blocks=5, context_len=64)  # too few blocks for both: one is preempted
    a = request("a", [1, 2, 3], max_tokens=40, presence_penalty=0.001, seed=5, logit_bias={4: 0.5})
    b = request("b", [3, 2, 1], max_tokens=40, repetition_penalty=1.001, seed=6, min_tokens=60, stop_ids=(6,))
    deltas = run(loop, a, b)
    assert loop.load.preemptions > 0
    for seed, wanted in ((5, a), (6, b)):
        rows = [row for row in seen if row[0] == seed]
        output = tokens(deltas[wanted.id])
        assert [row[1] for row in rows] == list(range(3, 3 + len(output)))
        for n, (_, _, banned, prompt_ids, output_ids, bias) in enumerate(rows):
            assert prompt_ids.tolist() == unpack(wanted.prompt_ids)
            assert output_ids.tolist() == output[:n]
            assert bias == wanted.sampling.logit_bias
            assert banned == ((6,) if seed == 6 else ())
    seen.clear()
    run(loop, request("c", [1], max_tokens=2))
    assert [row[3:5] for row in seen] == [(None, None)] * 2


def test_forced_tokens_of_several_rows_count_for_penalties(monkeypatch):
    seen = []

    def sample(logits, rows):
        from emberline.kernels import sampling

        seen.extend(row.output_ids.tolist() for row in rows)
        return sampling.sample(logits, rows)

    monkeypatch.setattr("emberline.engine.runners.cpu.runner.sample", sample)
    loop = loop_of(TorchFake(), max_running=1, token_budget=4)
    forced = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    limit = ThinkingLimit(4, (), pack(forced))
    asked = replace(request("a", [1, 2, 3], max_tokens=20, presence_penalty=0.001), thinking_limit=limit)
    output = tokens(run(loop, asked)["a"])
    assert output[4 : 4 + len(forced)] == forced
    assert seen == [output[:n] for n in range(20) if not 4 <= n < 4 + len(forced)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("huge_page_bytes", [2 << 20, 512 << 20, inf])
def test_a_pool_is_zeroed_contiguous_and_lazily_allocated(dtype, huge_page_bytes, monkeypatch):
    monkeypatch.setattr(pages_module, "_huge_page_bytes", lambda: huge_page_bytes)
    layout = KVGroup("full", tuple(range(8)), 4, 64, dtype)
    pool = allocate_pool(layout, 400, torch.device("cpu"))
    assert pool.shape == (400, 8, 2, 4, 16, 64)
    assert pool.is_contiguous()
    assert pool[0].nbytes == layout.block_bytes
    assert pool.nbytes == 400 * layout.block_bytes == prod(pool.shape) * pool.itemsize
    before = _resident_bytes()
    pool[3] = 1
    assert _resident_bytes() - before <= 4 * layout.block_bytes + (2 << 20 if huge_page_bytes == 2 << 20 else 0)
    assert not pool[2].any()
    assert np.isfinite(pool[399].float().numpy()).all()


def _resident_bytes():
    """Resident memory of no file: the first use of a function of torch maps pages of its library."""
    with open("/proc/self/statm") as statm:
        _, resident, of_files, *_ = map(int, statm.read().split())
    return (resident - of_files) * os.sysconf("SC_PAGE_SIZE")
