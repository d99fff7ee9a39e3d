"""A fake model in pure Python whose every token depends on all the KV it attends to, read back from the blocks.

Any error of paging, prefix cache, windows or preemption shows as wrong tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from emberline.engine.core.limits import Limits, WorkLimits
from emberline.engine.core.plan import StepPlan, n_accepted
from emberline.engine.core.step_loop import StepLoop
from emberline.engine.worker.build import build_scheduler
from emberline.kv.block_pool import NULL_BLOCK
from emberline.kv.cache import KVCache
from emberline.protocol.block_hash import KVGroup
from emberline.protocol.request import EngineRequest, SamplingParams
from emberline.protocol.token_ids import pack, unpack

FULL = KVGroup("full", (0,), 1, 1, "float32")
EOS = 0
VOCAB = 7


def window_group(window):
    return KVGroup(f"window{window}", (1,), 1, 1, "float32", window=window)


def chunk_group(size):
    return KVGroup(f"chunk{size}", (1,), 1, 1, "float32", window=size, chunked=True)


def first_seen(layout, end):
    """The first position that the token at end - 1 sees."""
    if layout.window is None:
        return 0
    return (end - 1) // layout.window * layout.window if layout.chunked else max(0, end - layout.window)


@dataclass
class Drawn:
    token_id: int
    logprob: float | None = -1.0
    top: list = field(default_factory=list)


@dataclass
class Handle:
    sampled: list

    def sample(self, masks=None):
        pass

    def result(self):
        if isinstance(self.sampled, Exception):
            raise self.sampled
        return self.sampled


def mix(state, token):
    return (state * 1_000_003 + token + 17) % (1 << 61)


def next_token(views, vocab=VOCAB):
    """`views`: per group, the visible (token, state) pairs."""
    total = 0
    for view in views:
        for token, state in view:
            total = mix(total, token * 31 + state)
    return total % vocab


def expected(prompt_ids, sampling, layouts, context_len, vocab=VOCAB, salt=b""):
    """The output of the fake model, computed without blocks: (ids, finish)"""
    stops = {*sampling.stop_ids, *(() if sampling.ignore_eos else (EOS,))}
    room = context_len - len(prompt_ids)
    limit = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
    entries = [[] for _ in layouts]

    def add(token):
        for layout, known in zip(layouts, entries):
            starts = first_seen(layout, len(known) + 1) == len(known)
            state = mix(len(salt) if starts else known[-1][1], token)  # a salted chain: KV of another salt is wrong
            known.append((token, state))

    for token in prompt_ids:
        add(token)
    output = []
    while True:
        token = next_token([known[first_seen(layout, len(known)) :] for layout, known in zip(layouts, entries)], vocab)
        if len(output) < sampling.min_tokens and token in stops:
            token = next(t for t in range(vocab) if t not in stops)
        output.append(token)
        if token in stops:
            return output, "stop"
        if len(output) >= limit:
            return output, "length"
        add(token)


class FakeRunner:
    """Blocks are lists of 16 (token, state) pairs; the state is a chain over the prefix, read from the blocks."""

    def __init__(self, cache: KVCache, vocab=VOCAB):
        self.layouts = [group.layout for group in cache.groups]
        self.blocks = [[[None] * 16 for _ in range(group.pool.n_total + 1)] for group in cache.groups]
        self.tables = {}
        self.last = {}
        self.vocab = vocab
        self.fail_next = None
        self.poison_ids = set()  # requests with which a step fails
        self.max_tokens = None  # of a step; more and it fails
        self.failed = False  # some step has
        self.broken = set()  # slots whose last step failed: what follows in them fails, too
        self.nan_ids = set()  # requests whose next token is not a number
        self.requests = {}
        self.plans = []

    def launch(self, plan: StepPlan):
        self.plans.append(plan)
        return self._compute(plan)

    def _compute(self, plan):
        for admission in plan.admissions:
            self.tables[admission.slot] = [list(blocks) for blocks in admission.blocks]
            self.requests[admission.slot] = admission.request
            self.broken.discard(admission.slot)
        if (error := self._error(plan)) is not None:
            self.broken |= {row.slot for row in plan.rows}
            self.failed = True
            return Handle(error)
        return Handle([drawn for row in plan.rows for drawn in self._row(row)])

    def _error(self, plan):
        error, self.fail_next = self.fail_next, None
        if any(self.requests[row.slot].id in self.poison_ids for row in plan.rows):
            error = ValueError("a bad request")
        if self.max_tokens is not None and plan.n_tokens > self.max_tokens:
            error = MemoryError("out of memory")
        if any(row.slot in self.broken for row in plan.rows):
            error = RuntimeError("behind a failed step")
        return error

    def _row(self, row):
        tables = self.tables[row.slot]
        for table, new, n_passed in zip(tables, row.blocks or [[]] * len(tables), row.passed):
            table.extend(new)
            table[:n_passed] = [NULL_BLOCK] * n_passed
        assert not row.follows or not row.token_ids
        known = [self.last[row.slot]] if row.follows else unpack(row.token_ids)
        for position, token in enumerate(known + unpack(row.draft_ids), row.start):
            for g, table in enumerate(tables):
                assert len(table) >= -(-row.stop // 16)
                starts = first_seen(self.layouts[g], position + 1) == position
                before = len(self.requests[row.slot].salt) if starts else self._entry(g, table, position - 1)[1]
                state = mix(before, token)
                self.blocks[g][table[position // 16]][position % 16] = (token, state)
                assert table[position // 16] != NULL_BLOCK
        if not row.samples:
            assert not row.draft_ids
            return []
        if self.requests[row.slot].id in self.nan_ids:
            self.last[row.slot] = 0
            return [Drawn(-1)] * (1 + row.n_drafts)
        drawn = [self.draw(row, tables, end) for end in range(row.end, row.stop + 1)]
        self.last[row.slot] = drawn[n_accepted([each.token_id for each in drawn], row.draft_ids)].token_id
        return drawn

    def draw(self, row, tables, end):
        views = []
        for g, table in enumerate(tables):
            views.append([self._entry(g, table, position) for position in range(first_seen(self.layouts[g], end), end)])
        token = next_token(views, self.vocab)
        if token in row.banned:
            token = next(t for t in range(self.vocab) if t not in row.banned)
        return Drawn(token)

    def _entry(self, g, table, position):
        assert table[position // 16] != NULL_BLOCK, "a visible token's block was given back"
        return self.blocks[g][table[position // 16]][position % 16]


class LateRunner(FakeRunner):
    """Like a device: a step is computed some time after its launch. Here when its result is waited for."""

    def __init__(self, cache, vocab=VOCAB):
        super().__init__(cache, vocab)
        self.meanwhile = lambda: None  # what other threads do while the step loop waits

    def launch(self, plan: StepPlan):
        self.plans.append(plan)
        return LateHandle(lambda: self.meanwhile() or self._compute(plan))


@dataclass
class LateHandle:
    compute: Callable[[], Handle]

    def sample(self, masks=None):
        pass

    def result(self):
        return self.compute().result()


def scheduler_of(
    layouts=(FULL,),
    n_blocks=64,
    context_len=512,
    max_running=4,
    token_budget=32,
    listener=None,
    transfers=None,
    speculation=None,
    micro_batches=1,
    prefill=None,
    **work,
):
    """`work`: fields of WorkLimits."""
    sizes = [n_blocks] * len(layouts) if isinstance(n_blocks, int) else n_blocks
    cache = KVCache(layouts, sizes, chunk=token_budget, listener=listener)
    limits = Limits(
        min(context_len, cache.capacity),
        VOCAB,
        (EOS,),
        max_running,
        token_budget,
        WorkLimits(**work),
    )
    made = build_scheduler(
        cache,
        limits,
        "fake",
        transfers=transfers,
        speculation=speculation,
        micro_batches=micro_batches,
        prefill=prefill,
    )
    return made, cache


def loop_of(steps_in_flight=1, runner=FakeRunner, **setup):
    """A step loop over the fake model; `setup`: settings of `scheduler_of`."""
    scheduler, cache = scheduler_of(**setup)
    return StepLoop(scheduler, runner(cache), steps_in_flight)


def request(id, prompt_ids, priority=1, salt=b"", deadline_s=None, session=None, **sampling):
    return EngineRequest(
        id=id,
        prompt_ids=pack(prompt_ids),
        sampling=SamplingParams(**{"ignore_eos": True, "max_tokens": 4, "seed": 1, **sampling}),
        priority=priority,
        salt=salt,
        deadline_s=deadline_s,
        session=session,
    )
