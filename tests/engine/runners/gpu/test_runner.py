"""The GPU runner's logic on the CPU: its tokens against those of a model computed without blocks."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from emberline.engine.core import plan as plan_module
from emberline.engine.core.latency_target import LatencyTarget
from emberline.engine.core.limits import Limits
from emberline.engine.core.plan import Admission, DeviceLost, Masks, Row, StepPlan
from emberline.engine.core.step_loop import StepLoop
from emberline.engine.runners.gpu import runner as gpu_runner
from emberline.engine.runners.gpu.batch import MixedShape, StepBatch, VerifyShape, packet_of
from emberline.engine.runners.gpu.graphs import CudaGraphs, StepKind
from emberline.engine.runners.gpu.runner import GpuRunner
from emberline.engine.runners.gpu.shapes import (
    GPU_SHAPES,
    all_verify_shapes,
    is_essential,
    max_draws,
    most_drafts,
    verify_shape,
)
from emberline.engine.runners.gpu.shapes import decode_rows as bucket
from emberline.engine.worker.build import build_scheduler
from emberline.kernels import decode_inputs as inputs
from emberline.kernels.decode_inputs import LAST_SAMPLED, PADDING, DecodeInputs, SlotState
from emberline.kv.cache import KVCache
from emberline.models.decoder import StepInputs
from emberline.protocol.request import ThinkingLimit
from emberline.protocol.token_ids import pack
from tests.engine.fakes import VOCAB, expected, request
from tests.engine.runners.cpu.test_torch_runner import FULL, WINDOW, TorchFake, run, tokens
from tests.engine.runners.gpu.host_sampler import HostKernels, HostTable, as_int32
from tests.engine.speculation.standin import StandinSpeculation, output_of


class Padded(TorchFake):
    """Also takes padding rows: they must reach no block but the null block."""

    def owned(self, step, r, tokens):
        """The row's tokens that have blocks: padding behind its drafts may have none."""
        assert all(int(step.context_lens[r]) <= 16 * table.shape[1] for table in step.block_tables)
        positions = step.positions.tolist()
        return [t for t in tokens if all(int(table[r, positions[t] // 16]) for table in step.block_tables)]

    def forward(self, step, kv, taps=None):
        shape, starts, contexts = step.shape, step.query_starts.tolist(), step.context_lens.tolist()
        for chunk in shape.chunks or ():
            assert (chunk.start, chunk.n) == (starts[chunk.row], starts[chunk.row + 1] - starts[chunk.row])
            assert chunk.context == contexts[chunk.row]
        real, kept, lengths = [], [], []
        for r, context in enumerate(contexts):
            n_own = starts[r + 1] - starts[r]
            first = context - n_own if shape.drafts else context - 1
            owner = any(int(table[r, first // 16]) for table in step.block_tables) if context else False
            has_tokens = context or not shape.max_query
            assert r >= shape.decode_rows or n_own == bool(has_tokens) or (shape.drafts and n_own <= 16)
            assert n_own or not context
            if owner:
                real.append(r)
                own = range(starts[r], starts[r + 1])
                own = self.owned(step, r, own) if shape.drafts else own
                kept += own
                lengths.append(len(own))
            elif context:  # padding: it has the remaining tokens, and reaches only the null block
                assert r == len(contexts) - 1
                assert not any(table[r].any() for table in step.block_tables)
        place = {token: n for n, token in enumerate(kept)}
        ends = [sum(lengths[: n + 1]) for n in range(len(lengths))]
        wanted = step.sample_tokens.tolist()
        compact = StepInputs(
            step.token_ids[kept],
            step.positions[kept],
            as_int32([0, *ends]),
            as_int32([int(step.positions[kept[end - 1]]) + 1 for end in ends]),
            [table[real].contiguous() for table in step.block_tables],
            torch.tensor(sorted({place[token] for token in wanted if token in place}), dtype=torch.int64),
        )
        logits = super().forward(compact, kv)
        rows = {token: n for n, token in enumerate(compact.sample_tokens.tolist())}
        out = torch.zeros(len(wanted), VOCAB)
        for n, token in enumerate(wanted):
            if token in place:
                out[n] = logits[rows[place[token]]]
        return out


def loop_of(model, n_blocks=40, graphs=True, steps_in_flight=2, speculation=None, **limits):
    defaults = {"context_len": 200, "vocab_size": VOCAB, "eos_ids": (0,), "max_running": 4, "token_budget": 32}
    limits = Limits(**defaults | limits)
    sizes = [n_blocks] * len(model.kv_groups)
    cache = KVCache(model.kv_groups, sizes, chunk=limits.token_budget)
    kernels, table = HostKernels(), HostTable()
    speculates = speculation is not None
    runner = GpuRunner(model, sizes, limits, "cpu", kernels, table, graphs=graphs, speculates=speculates)
    policy = LatencyTarget(GPU_SHAPES, most_drafts=lambda rows: most_drafts(rows, limits.max_running))
    scheduler = build_scheduler(cache, limits, "fake", prefill=policy if speculates else None, speculation=speculation)
    return StepLoop(scheduler, runner, steps_in_flight), kernels


@pytest.mark.parametrize("layouts", [(FULL,), (FULL, WINDOW)], ids=["full", "window"])
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_tokens_are_unchanged_by_batching_chunks_hits_and_preemption(layouts, graphs, steps_in_flight):
    loop, _ = loop_of(Padded(layouts), 7, graphs, steps_in_flight, context_len=70)
    prompts = {f"r{n}": [(n + i * i) % VOCAB for i in range(25 + 9 * n)] for n in range(3)}
    wanted = {id: request(id, ids, max_tokens=24, temperature=0.0) for id, ids in prompts.items()}
    answers = {id: expected(prompts[id], wanted[id].sampling, layouts, 70)[0] for id in prompts}
    together = run(loop, *wanted.values())
    assert {id: tokens(deltas) for id, deltas in together.items()} == answers
    assert loop.load.preemptions > 0
    for id in prompts:
        assert tokens(run(loop, wanted[id])[id]) == answers[id]
        again = run(loop, wanted[id])[id]
        assert tokens(again) == answers[id]
        assert again[0].usage.cached_tokens == (len(prompts[id]) - 1) // 16 * 16


def test_an_invalid_row_fails_alone_and_an_exception_fails_its_step():
    model = Padded()
    loop, _ = loop_of(model)
    model.nan = True
    assert run(loop, request("a", [1]))["a"][-1].error.message == "the model produced invalid numbers"
    model.nan = False
    forward, model.forward = model.forward, lambda step, kv: 1 / 0
    assert run(loop, request("b", [1]))["b"][-1].error.kind == "internal"
    model.forward = forward
    assert run(loop, request("c", [1]))["c"][-1].finish == "length"


def test_a_step_that_runs_out_of_memory_is_retried():
    model = Padded()
    loop, _ = loop_of(model, max_running=3)
    forward, n_steps = model.forward, itertools.count()

    def crowded(step, kv):
        if next(n_steps) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return forward(step, kv)

    model.forward = crowded
    asked = {id: request(id, ids, max_tokens=5, temperature=0.0) for id, ids in (("a", [1, 2]), ("b", [3]), ("c", [4]))}
    together = run(loop, *asked.values())
    for id, each in asked.items():
        ids = np.frombuffer(each.prompt_ids, "<u4").tolist()
        assert tokens(together[id]) == expected(ids, each.sampling, (FULL,), 200)[0]


def test_sampling_parameters_and_histories_reach_the_sampler():
    loop, kernels = loop_of(Padded(), n_blocks=5, context_len=64)  # too few blocks for both: one is preempted
    a = request("a", [1, 2, 3], max_tokens=40, presence_penalty=0.001, seed=5, logit_bias={4: 0.5})
    b = request("b", [3, 2, 1], max_tokens=40, repetition_penalty=1.001, seed=6, min_tokens=60, stop_ids=(6,))
    deltas = run(loop, a, b)
    assert loop.load.preemptions > 0
    for seed, wanted in ((5, a), (6, b)):
        output = tokens(deltas[wanted.id])
        rows = {row.position: row for row in kernels.sampled_rows if row.seed == seed}  # the last one counts
        assert sorted(rows) == list(range(3, 3 + len(output)))
        for position, row in rows.items():
            assert row.output_ids.tolist() == output[: position - 3]
            assert row.logit_bias == wanted.sampling.logit_bias
            assert row.banned == ((6,) if seed == 6 else ())


def test_logprobs_are_returned_only_where_requested():
    loop, _ = loop_of(Padded())
    deltas = run(loop, request("a", [1, 2], logprobs=3, temperature=0.0), request("b", [2, 1], temperature=0.0))
    for delta in deltas["a"]:
        [one] = delta.logprobs
        assert len(one.top) == 3
        assert one.logprob == pytest.approx(one.top[0][1])
    assert all(delta.logprobs is None for delta in deltas["b"])


def runner_of(model=None, max_running=4):
    limits = Limits(200, VOCAB, (0,), max_running, max(32, max_running))
    model = model or Padded()
    return GpuRunner(model, [40] * len(model.kv_groups), limits, "cpu", HostKernels(), HostTable(), graphs=True)


def admitted(slot, ids, blocks=(), **sampling):
    return Admission(slot, request(f"s{slot}", ids, temperature=0.0, **sampling), 1, b"", [list(blocks)])


def drawn(step):
    step.sample()
    return [draw.token_id for draw in step.result()]


@pytest.mark.parametrize("with_prefill", [False, True])
def test_a_row_continues_from_the_token_on_the_device(with_prefill):
    """In a decode step, and in a mixed step with a chunk."""
    ids = [1, 2, 3]
    answer = expected(ids, request("x", ids, max_tokens=3).sampling, (FULL,), 200)[0]
    runner = runner_of()
    first = runner.launch(StepPlan([admitted(2, ids)], [Row(0, 2, 0, pack(ids), [[5]], [0], True)], 3))
    first.sample()
    steps = [first]
    for n in range(2):
        plan = StepPlan([], [Row(0, 2, 3 + n, b"", None, [0], True, follows=True)], 1)
        if with_prefill:
            plan.admissions.append(admitted(n, [4] * 20))
            plan.rows.append(Row(1 + n, n, 0, pack([4] * 20), [[10 + 2 * n, 11 + 2 * n]], [0], False))
        steps.append(runner.launch(plan))
        steps[-1].sample()
    assert [step.result()[0].token_id for step in steps] == answer


def test_masks_apply_to_their_rows_only():
    runner = runner_of()
    grammar = {"max_tokens": 2}
    plan = StepPlan()
    for slot in range(3):
        admission = admitted(slot, [1, slot], **grammar)
        if slot != 1:
            admission.request = msgspec_replace(admission.request, grammar=b"g")
        plan.admissions.append(admission)
        plan.rows.append(Row(slot, slot, 0, pack([1, slot]), [[slot + 1]], [0], True))
    free = [expected([1, slot], request("x", [1], max_tokens=1).sampling, (FULL,), 200)[0][0] for slot in range(3)]
    only = [next(t for t in range(VOCAB) if t != free[slot]) for slot in range(3)]
    masks = Masks([0, 2], np.array([[1 << only[0]], [1 << only[2]]], np.uint32))
    step = runner.launch(plan)
    step.sample(masks)
    assert [draw.token_id for draw in step.result()] == [only[0], free[1], only[2]]


def msgspec_replace(struct, **changes):
    import msgspec

    return msgspec.structs.replace(struct, **changes)


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (2, 2), (3, 4), (9, 16), (17, 32), (64, 64), (65, 96), (257, 320)])
def test_decode_row_buckets(rows, size):
    assert bucket(rows, 512) == size
    assert bucket(rows, max(rows, 1)) >= rows


def test_every_bucket_holds_its_rows():
    for most in (1, 5, 64, 300):
        sizes = {bucket(rows, most) for rows in range(1, most + 1)}
        assert all(bucket(rows, most) >= rows for rows in range(1, most + 1))
        assert max(sizes) == most
    assert len({bucket(rows, 512) for rows in range(1, 513)}) < 20


def decode_inputs(rows, groups, width):
    return DecodeInputs(
        *(torch.full((rows,), 9, dtype=torch.int32) for _ in range(4)),
        as_int32([9]).repeat(groups, rows, width),
        *(torch.full((rows,), 9, dtype=torch.int32) for _ in range(3)),
    )


def test_prepare_applies_changes_and_builds_inputs():
    tables = torch.arange(1, 13, dtype=torch.int32).view(1, 3, 4)
    state = SlotState(
        as_int32([70, 71, 72]), tables, as_int32([5, 6, 31]), as_int32([0, 0, 0]), as_int32([[0] * 8] * 3)
    )
    to = decode_inputs(4, 1, 4)
    packet = as_int32([[2, 0, 0], [32, 17, PADDING], [LAST_SAMPLED, 5, 0], [40, -1, -1], [2, 0, 0]])
    inputs.prepare(packet, state, to)
    assert to.slots[:3].tolist() == [2, 0, -1]
    assert to.token_ids[:3].tolist() == [72, 5, 0]
    assert to.positions[:3].tolist() == [31, 17, 0]  # of the first the device knows more than the packet
    assert to.context_lens[:3].tolist() == [32, 18, 0]
    assert to.tables[0, :3, :3].tolist() == [[9, 0, 40], [1, 2, 0], [0, 0, 0]]
    assert state.tables[0, 2].tolist() == [9, 0, 40, 12]
    inputs.keep(as_int32([3, -1, 8]), to.slots[:3], to.context_lens[:3], state)
    assert state.last_tokens.tolist() == [0, 71, 3]
    assert state.positions.tolist() == [18, 6, 32]


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("Triton Error [CUDA]: misaligned address"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False),
        (RuntimeError("shape '[2]' is invalid"), False),
        (ValueError("CUDA error"), False),
    ],
)
def test_a_lost_device_is_distinguished_from_a_failed_step(error, lost):
    model = Padded()
    runner = runner_of(model)

    def forward(step, kv):
        raise error

    model.forward = forward
    step = runner.launch(StepPlan([admitted(0, [1, 2])], [Row(0, 0, 0, pack([1, 2]), [[1]], [0], True)], 2))
    step.sample()
    with pytest.raises(DeviceLost if lost else type(error)) as raised:
        step.result()
    assert str(error) in str(raised.value)


def test_nothing_runs_in_a_slot_that_a_failed_step_left_without_its_table():
    """The step behind it was launched before anybody knew: the device has the table of the slot's last sequence."""
    runner = runner_of()
    drawn(runner.launch(StepPlan([admitted(0, [1, 2, 3])], [Row(0, 0, 0, pack([1, 2, 3]), [[1]], [0], True)], 3)))
    before = runner.pools[0][1].clone()
    table = runner._slots.sampler
    given, table.set = table.set, lambda slot, row: 1 / 0
    failed = runner.launch(StepPlan([admitted(0, [4])], [Row(1, 0, 0, pack([4]), [[2]], [0], True)], 1))
    table.set = given
    behind = runner.launch(StepPlan([], [Row(1, 0, 1, b"", None, [0], True, follows=True)], 1))
    for step in (failed, behind):
        with pytest.raises((ZeroDivisionError, KeyError)):
            drawn(step)
    assert torch.equal(runner.pools[0][1], before), "the block of another sequence"
    again = runner.launch(StepPlan([admitted(0, [4])], [Row(1, 0, 0, pack([4]), [[2]], [0], True)], 1))
    assert drawn(again) == expected([4], request("x", [4], max_tokens=1).sampling, (FULL,), 200)[0]


def test_a_failed_step_ends_when_the_device_has_done_what_was_launched_of_it(monkeypatch):
    model, done = Padded(), []
    runner = runner_of(model)
    event = SimpleNamespace(record=lambda: done.append("record"), wait=lambda: done.append("wait"))
    monkeypatch.setattr(gpu_runner, "device_event", lambda device: event)
    model.forward = lambda step, kv: 1 / 0
    step = runner.launch(StepPlan([admitted(0, [1, 2])], [Row(0, 0, 0, pack([1, 2]), [[1]], [0], True)], 2))
    step.sample()
    assert not done, "a launch does not block"
    with pytest.raises(ZeroDivisionError):
        step.result()
    assert done == ["record", "wait"]


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("token_budget", [3, 4, 32])  # of 3: the last row of forced tokens has one
def test_penalties_remember_what_came_before_forced_tokens(steps_in_flight, token_budget):
    loop, kernels = loop_of(Padded(), 40, True, steps_in_flight, token_budget=token_budget, max_running=2)
    forced = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    asked = request("a", [1, 2, 3], max_tokens=20, presence_penalty=0.001, seed=5)
    limit = ThinkingLimit(4, (), pack(forced))
    output = tokens(run(loop, structs.replace(asked, thinking_limit=limit))["a"])
    assert output[4 : 4 + len(forced)] == forced
    rows = {row.position: row for row in kernels.sampled_rows if row.seed == 5}
    for position, row in rows.items():
        assert sorted(row.output_ids.tolist()) == sorted(output[: position - 3])


def test_forced_tokens_count_for_penalties():
    """A thinking limit inserts tokens that were not sampled; the next row computes several at once."""
    runner = runner_of()
    kernels = runner._kernels
    ids = [1, 2, 3]
    plan = StepPlan([admitted(0, ids, presence_penalty=0.1)], [Row(0, 0, 0, pack(ids), [[5]], [0], True, (4,))], 3)
    [first] = drawn(runner.launch(plan))
    forced = StepPlan([], [Row(0, 0, 3, pack([first, 6, 6]), None, [0], True, (4,))], 3)
    [second] = drawn(runner.launch(forced))
    assert kernels.sampled_rows[-1].output_ids.tolist() == [first, 6, 6]
    assert kernels.sampled_rows[-1].banned == (4,)
    drawn(runner.launch(StepPlan([], [Row(0, 0, 6, b"", None, [0], True, follows=True)], 1)))
    assert kernels.sampled_rows[-1].output_ids.tolist() == [first, 6, 6, second]


@pytest.mark.parametrize("with_prefill", [False, True], ids=["decode step", "mixed step"])
def test_a_shared_prefix_is_uploaded(with_prefill, monkeypatch):
    monkeypatch.setattr(gpu_runner, "MIN_SAVED_BYTES", 1)
    seen = []

    class Seeing(Padded):
        def forward(self, step, kv):
            prefix, lens = step.shape.shared_prefix, step.shape.prefix_lens
            seen.append(None if prefix is None else (prefix.tolist(), lens.tolist()))
            return super().forward(step, kv)

    runner = runner_of(Seeing(), max_running=8)
    system = [1, 2, 3, 4] * 8  # two blocks
    runner.launch(StepPlan([admitted(0, system)], [Row(0, 0, 0, pack(system), [[1, 2]], [0], False)], 32)).sample()
    plan = StepPlan()
    for slot in range(1, 6):
        plan.admissions.append(admitted(slot, [*system, slot], blocks=[1, 2]))
        plan.rows.append(Row(slot, slot, 32, pack([slot]), [[10 + slot]], [0], True))
    plan.admissions.append(admitted(6, [5] * 17, blocks=[20]))  # a block that no other row has
    plan.rows.append(Row(6, 6, 16, pack([5]), [[21]], [0], True))
    if with_prefill:
        plan.admissions.append(admitted(7, [4] * 20))
        plan.rows.append(Row(7, 7, 0, pack([4] * 20), [[30, 31]], [0], False))
    drawn(runner.launch(plan))
    (row, n_tokens), shares = seen[-1]
    assert (n_tokens, shares[:6]) == (32, [32, 32, 32, 32, 32, 0])
    assert not any(shares[6:])
    assert row < 5


class Captured(CudaGraphs):
    """Runs steps instead of replaying them."""

    def __init__(self, kinds=()):
        super().__init__(torch.device("cpu"))
        self.enabled, self._captured, self.replayed = True, dict.fromkeys(kinds), []

    def capture(self, key, body):
        body()
        self._captured[key] = body

    def replay(self, key):
        self.replayed.append(key)
        return self._captured[key]()


def test_common_steps_are_captured_ahead_without_side_effects(monkeypatch):
    monkeypatch.setattr(gpu_runner, "MIN_SAVED_BYTES", 1)
    seen = []

    class Counting(Padded):
        def forward(self, step, kv):
            seen.append(step)
            return super().forward(step, kv)

    runner = runner_of(Counting(), max_running=80)
    runner._graphs = Captured()
    kinds = runner.step_kinds()
    for kind in kinds:
        runner.capture(kind)
    assert runner.n_graphs == len(kinds) == len(seen)
    assert not any(pool.any() for pool in runner._kv)
    for kind in kinds:
        runner.run_padding(kind)
    runner.run_eager_padding([(3, 9)])
    assert not runner._kernels.sampled_rows
    for pool in runner._kv:
        assert not pool[1:].any()
    plan = StepPlan()
    for slot in range(6):
        plan.admissions.append(admitted(slot, [1, 2, slot]))
        plan.rows.append(Row(slot, slot, 0, pack([1, 2, slot]), [[slot + 1]], [0], True))
    one = request("x", [1], max_tokens=1).sampling
    answers = [expected([1, 2, slot], one, (FULL,), 200)[0][0] for slot in range(6)]
    assert drawn(runner.launch(plan)) == answers
    decodes = [Row(slot, slot, 3, b"", None, [0], True, follows=True) for slot in range(6)]
    drawn(runner.launch(StepPlan([], decodes)))
    assert [kind.shape for kind in runner._graphs.replayed] == [MixedShape(16, 128, 32, True), 8]


def test_a_step_that_is_not_captured_yet_is_padded_to_one_that_is():
    runner = runner_of(max_running=80)
    runner._graphs = graphs = Captured()
    for kind in runner.step_kinds():
        shape = kind.shape
        essential = (shape, None) if isinstance(shape, int) else (shape.n_decodes, shape.n_tokens)
        if not kind.cascade and is_essential(*essential, 80):
            runner.capture(kind)
    n_graphs = runner.n_graphs
    assert n_graphs < 12
    assert all(runner._prepared(kind) in graphs for kind in runner.step_kinds())
    beside = StepKind(MixedShape(64, 128, 32, True))
    assert runner._prepared(beside) == beside, "the end of a cached prompt beside many streams is not padded"
    plan, later = StepPlan(), StepPlan()
    for slot in range(20):
        plan.admissions.append(admitted(slot, [1, 2, slot % 7]))
        plan.rows.append(Row(slot, slot, 0, pack([1, 2, slot % 7]), [[slot + 1]], [0], True))
        later.rows.append(Row(slot, slot, 3, b"", None, [0], True, follows=True))
    replies = zip(drawn(runner.launch(plan)), drawn(runner.launch(later)))
    two = request("x", [1], max_tokens=2).sampling
    assert [list(reply) for reply in replies] == [
        expected([1, 2, slot % 7], two, (FULL,), 200)[0] for slot in range(20)
    ]
    assert [kind.shape for kind in graphs.replayed] == [MixedShape(16, 128, 32, True), 64]
    assert runner.n_graphs == n_graphs, "nothing is captured while requests wait"
    runner.capture(StepKind(32))
    later = StepPlan(others=[Row(n, n, 4, b"", None, [0], True, follows=True) for n in range(20)])
    drawn(runner.launch(later))
    assert graphs.replayed[-1] == StepKind(32)


def test_only_steps_in_their_own_shape_tell_how_long_such_steps_take():
    seen = []
    runner = runner_of(max_running=80)
    runner._graphs = Captured()
    runner._prefill = SimpleNamespace(observe=lambda work, seconds: seen.append(work.n_decodes))
    for outputs in runner._outputs:
        outputs.done.seconds_since = lambda earlier: 0.01
    runner.capture(StepKind(16))
    plan = StepPlan([admitted(0, [1])], [Row(0, 0, 0, pack([1]), [[1]], [0], True)])
    drawn(runner.launch(plan))
    assert seen == [], "padded from 1 to 16 rows"
    runner.capture(StepKind(1))
    drawn(runner.launch(StepPlan([], [Row(0, 0, 1, b"", None, [0], True, follows=True)])))
    assert seen == [1]


def test_a_plan_has_the_constants_of_the_kernels_packet():
    assert (plan_module.LAST_SAMPLED, plan_module.NO_BLOCK) == (LAST_SAMPLED, inputs.NO_BLOCK)
    assert plan_module.BLOCKS - plan_module.SLOT == inputs.HEADER_ROWS


def test_padded_shapes_are_among_the_common_steps():
    for most in (1, 5, 64, 100, 256, 600):
        sizes = MixedShape.all_padded(most)
        assert len(set(sizes)) == len(sizes)
        for n_decodes, n_chunks, n_tokens in itertools.product((0, 1, 16, 17, 64, 65, 200, 600), (1, 31), (31, 600)):
            if n_decodes + n_chunks > most or n_decodes + n_tokens > 1024:
                continue
            batch = StepBatch(packet_of([Row(0, 0, 5, b"", None, [0], True, follows=True)] * n_decodes, 1))
            batch.chunks = [Row(0, 0, 0, bytes(4), None, [0], False)] * (n_chunks - 1)
            batch.chunks.append(Row(0, 0, 0, bytes(4 * (n_tokens - n_chunks + 1)), None, [0], False))
            assert MixedShape.of(batch, most) in sizes


def replayed(plain, wrong):
    def oracle(seq):
        return plain[seq.id][len(output_of(seq)) :]

    return StandinSpeculation(oracle, wrong, VOCAB)


@pytest.mark.parametrize("layouts", [(FULL,), (FULL, WINDOW)], ids=["full", "window"])
@pytest.mark.parametrize(("steps_in_flight", "wrong"), [(1, 0), (2, 0), (2, 4)])
def test_drafts_change_no_token(layouts, steps_in_flight, wrong):
    """Through preemption, with penalties and seeds: what was drawn is counted on the device alone."""
    how = [
        {"temperature": 0.0},
        {"temperature": 3.0, "seed": 5, "presence_penalty": 0.9, "logprobs": 2},
        {"temperature": 2.0, "seed": 6, "repetition_penalty": 1.5, "min_tokens": 20, "stop_ids": (3,)},
        {"temperature": 4.0, "seed": 7, "frequency_penalty": 0.5, "ignore_eos": False, "min_tokens": 9},
    ]
    asked = [request(f"r{n}", [n + 1, 2, 3] * (4 + n), max_tokens=50, **each) for n, each in enumerate(how)]
    loop, _ = loop_of(Padded(layouts))
    plain = {id: tokens(deltas) for id, deltas in run(loop, *asked).items()}
    speculation = replayed(plain, wrong)
    loop, kernels = loop_of(Padded(layouts), 8, True, steps_in_flight, speculation, context_len=90, max_running=3)
    drafted = run(loop, *asked)
    assert {id: tokens(deltas) for id, deltas in drafted.items()} == plain
    assert loop.load.preemptions > 0
    assert kernels.n_accepted >= speculation.n_accepted > 20
    entries = [entry for delta in drafted["r1"] for entry in delta.logprobs]
    assert [entry.token_id for entry in entries] == plain["r1"]
    assert all(len(entry.top) == 2 for entry in entries)


def test_drafts_are_left_out_beside_prompts_and_before_a_shape_is_captured():
    """The scheduler does not plan them beside prompts; a runner that gets them all the same draws once."""
    ids = [1, 2, 3]
    answer = expected(ids, request("x", ids, max_tokens=3).sampling, (FULL,), 200)[0]
    runner = runner_of()  # it has no shapes for drafts
    first = runner.launch(StepPlan([admitted(2, ids)], [Row(0, 2, 0, pack(ids), [[5]], [0], True)], 3))
    assert drawn(first) == answer[:1]
    drafts = pack([answer[1]] * 14)
    row = Row(0, 2, 3, pack(answer[:1]), [[6]], [0], True, draft_ids=drafts)
    assert drawn(runner.launch(StepPlan([], [row], 15, n_drafts=14, n_drafting=1))) == [answer[1], *[-1] * 14]
    row = Row(0, 2, 4, pack(answer[1:2]), None, [0], True)
    assert drawn(runner.launch(StepPlan([], [row], 1))) == [answer[2]]
    assert runner._slots.tables[0, 2, :2].tolist() == [5, 6]


def test_shapes_of_steps_that_verify_drafts():
    for most in (1, 3, 64, 256):
        shapes = all_verify_shapes(most)
        assert all(rows < n <= max_draws(most) for rows, n in shapes)
        for rows in range(1, min(most, 128) + 1):
            n = most_drafts(rows, most)
            assert n == 0 or verify_shape(rows, rows + n, most) is not None
    assert (most_drafts(1, 256), most_drafts(8, 256), most_drafts(16, 256)) == (15, 120, 128)
    assert verify_shape(3, 15, 256) == (4, 16)
    assert verify_shape(129, 258, 256) is None


@given(st.lists(st.integers(0, 15), min_size=1, max_size=32))
def test_rows_of_a_step_that_verifies_drafts_have_room_for_theirs(n_drafts):
    drafts = [bytes(4 * n) for n in n_drafts]
    shape = verify_shape(len(drafts), len(drafts) + sum(n_drafts), 256)
    if shape is None:
        assert sum(n_drafts) > most_drafts(len(drafts), 256)
        return
    ends = [*VerifyShape(*shape).starts(drafts), shape[1]]
    lengths = [end - first for first, end in itertools.pairwise(ends)]
    assert len(lengths) == shape[0]
    assert all(0 <= n <= 16 for n in lengths)
    assert all(n >= 1 + d for n, d in zip(lengths, n_drafts))


@pytest.mark.parametrize("speculates", [True, False])
def test_masks_of_draws_reach_them(speculates):
    """Where drafts are left out, those of each row's first draw."""
    model = Padded()
    limits = Limits(200, VOCAB, (0,), 4, 32)
    table = HostTable()
    runner = GpuRunner(model, [40], limits, "cpu", HostKernels(), table, graphs=True, speculates=speculates)
    plan = StepPlan()
    for slot in range(3):
        admission = admitted(slot, [1, slot])
        if slot:
            admission.request = msgspec_replace(admission.request, grammar=b"g")
        plan.admissions.append(admission)
        plan.rows.append(Row(slot, slot, 0, pack([1, slot]), [[slot + 1]], [0], True))
    runner.launch(plan).sample(Masks([1, 2], np.full((2, 1), 127, np.uint32)))
    drafts = [[1, 2], [3], [2]]
    rows = [Row(n, n, 2, pack([4]), None, [0], True, draft_ids=pack(ids)) for n, ids in enumerate(drafts)]
    bits = np.array([[1 << 3], [1 << 6], [1 << 2], [1 << 5]], np.uint32)
    step = runner.launch(StepPlan([], rows, 7, n_drafts=4, n_drafting=3))
    step.sample(Masks([3, 4, 5, 6], bits))
    ids = [draw.token_id for draw in step.result()][3:]
    assert ids == ([3, 6, 2, 5] if speculates else [3, -1, 2, -1])
