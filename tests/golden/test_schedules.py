"""Golden traces of the engine's schedule: which tokens of which sequence each step computes, for seeded arrivals.

The normal form names sequences by their request and says, for each row of a step: the first position, how many tokens,
how many drafts, how many blocks are new. `trace_of` alone knows the plan's structs.
"""

import random
from collections.abc import Callable, Iterable
from math import inf
from typing import Any

import msgspec
import pytest

from emberline.engine.core.prefill_policy import PrefillPolicy
from emberline.kv.tiers.fetch_policy import TierQueue
from emberline.protocol.request import Priority, Push
from tests.engine.fakes import FULL, VOCAB, loop_of, request, window_group
from tests.engine.grammar.bench import Bench, compiler
from tests.engine.speculation.standin import StandinSpeculation
from tests.engine.tiers.test_tier_properties import ScriptedTier, build
from tests.engine.transfer.fake_wire import Wire
from tests.golden import files

MAX_STEPS = 2000
Lines = list[str]


class Trace:
    """Follows one step loop. Steps are numbered from 0; one that computes nothing has no number."""

    def __init__(self, loop: Any, name: str = "") -> None:
        self.lines: Lines = []
        self._loop = loop
        self._name = f"{name} " if name else ""
        self._slots: dict[int, str] = {}
        self._n_steps = 0
        self._launch = loop.runner.launch
        loop.runner.launch = self._traced

    def _traced(self, plan: Any) -> Any:
        self.lines += [f"{self._name}step {self._n_steps}: {line}" for line in trace_of(plan, self._slots)]
        self._n_steps += 1
        return self._launch(plan)

    def take(self, deltas: Iterable[Any]) -> None:
        """Note the ends among the deltas of a step."""
        for delta in deltas:
            if delta.finish is not None:
                usage = delta.usage
                cached = {tier: n for tier, n in usage.cached_by_tier.items() if n}
                counts = f"{usage.prompt_tokens} prompt, {usage.completion_tokens} output tokens, cached {cached}"
                why = f" ({delta.error.kind})" if delta.error is not None else ""
                self.lines.append(f"{self._name}{delta.id} ends: {delta.finish}{why}, {counts}")

    def step(self, now_s: float = 0.0) -> None:
        self.take(self._loop.step(now_s))

    def finish(self) -> Lines:
        for _ in range(MAX_STEPS):
            if not self._loop.busy:
                self.lines.append(f"{self._name}preemptions: {self._loop.load.preemptions}")
                return self.lines
            self.step()
        raise AssertionError("the schedule never ends")


def trace_of(plan: Any, slots: dict[int, str]) -> Lines:
    """One step in the normal form. `slots` remembers which request has which slot."""
    lines = []
    for admission in plan.admissions:
        slots[admission.slot] = admission.request.id
        blocks = "+".join(str(len(group)) for group in admission.blocks)
        resumed = f", {len(admission.output_ids) // 4} output tokens before" if admission.output_ids else ""
        lines.append(f"admit {slots[admission.slot]} with {blocks} cached blocks{resumed}")
    for row in plan.rows:
        parts = [f"{slots[row.slot]} {row.start}+{row.end - row.start}"]
        if row.n_drafts:
            parts.append(f"drafts {row.n_drafts}")
        if row.blocks is not None:
            parts.append(f"blocks {'+'.join(str(len(group)) for group in row.blocks)}")
        if row.samples:
            parts.append("samples")
        lines.append(", ".join(parts))
    if plan.n_preempted:
        lines.append(f"{plan.n_preempted} preempted")
    if plan.masked:
        lines.append("masked")
    return lines


def prompt(seed: int, n: int) -> list[int]:
    """Token ids that differ between seeds and are never the end token."""
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB) for _ in range(n)]


def chunked_prefill() -> Lines:
    """A long prompt is computed beside two sequences that decode."""
    loop = loop_of(token_budget=16)
    trace = Trace(loop)
    for name in ("a", "b"):
        loop.submit(request(name, prompt(ord(name), 5), max_tokens=8), 0.0)
    trace.step()
    trace.step()
    loop.submit(request("long", prompt(3, 50), max_tokens=2), 0.0)
    return trace.finish()


def prefix_hits() -> Lines:
    """The same prefix at the same time, afterwards, with a longer prompt, and of another account."""
    loop = loop_of(n_blocks=64, token_budget=64)
    trace = Trace(loop)
    shared = prompt(1, 40)
    for name in ("first", "beside"):
        loop.submit(request(name, shared, max_tokens=2), 0.0)
    trace.finish()
    loop.submit(request("longer", shared + prompt(2, 20), max_tokens=2), 0.0)
    loop.submit(request("whole blocks", shared[:32], max_tokens=2), 0.0)
    loop.submit(request("other account", shared, max_tokens=2, salt=b"x" * 16), 0.0)
    return trace.finish()


def preemption() -> Lines:
    """Four sequences outgrow a pool of twelve blocks."""
    loop = loop_of(n_blocks=12, token_budget=32)
    trace = Trace(loop)
    for n, name in enumerate("abcd"):
        loop.submit(request(name, prompt(n, 20), max_tokens=40), 0.0)
    return trace.finish()


def attention_window() -> Lines:
    """A layer group with a window gives blocks back."""
    loop = loop_of(layouts=(FULL, window_group(20)), n_blocks=[16, 8], token_budget=16)
    trace = Trace(loop)
    loop.submit(request("a", prompt(1, 70), max_tokens=20), 0.0)
    loop.submit(request("b", prompt(2, 30), max_tokens=20), 0.0)
    return trace.finish()


def priorities() -> Lines:
    """Better classes go first, and take the places of worse ones."""
    loop = loop_of(max_running=2, token_budget=32)
    trace = Trace(loop)
    for name, priority in (("batch", Priority.BATCH), ("flex", Priority.FLEX), ("default", Priority.DEFAULT)):
        loop.submit(request(name, prompt(priority, 20), priority=priority, max_tokens=6), 0.0)
    trace.step()
    trace.step()
    loop.submit(request("urgent", prompt(9, 20), priority=Priority.PRIORITY, max_tokens=3), 0.0)
    return trace.finish()


class FewTokens(PrefillPolicy):
    """Five tokens a step while sequences decode: what a latency target decides, without a clock."""

    def chunk(self, work: Any, context: int, most: int, slack: float = 1.0, limit_s: float = inf) -> int:
        return min(most, max(0, 5 - work.n_tokens)) if work.n_decodes and slack < inf else most


def latency_target() -> Lines:
    """Prompts that arrive later are computed in small chunks."""
    loop = loop_of(n_blocks=64, token_budget=32, prefill=FewTokens())
    trace = Trace(loop)
    loop.submit(request("decodes", prompt(1, 20), max_tokens=30), 0.0)
    for _ in range(12):
        trace.step()
    loop.submit(request("late", prompt(2, 12), max_tokens=2), 0.0)
    return trace.finish()


def steps_in_flight() -> Lines:
    """Two steps at a time: a row follows a token that only the device knows."""
    loop = loop_of(2, token_budget=16)
    trace = Trace(loop)
    loop.submit(request("a", prompt(1, 20), max_tokens=6), 0.0)
    loop.submit(request("b", prompt(2, 3), max_tokens=6), 0.0)
    return trace.finish()


def drafts() -> Lines:
    """Every draft is a guess of two tokens, right by chance."""
    loop = loop_of(token_budget=32, speculation=StandinSpeculation(lambda seq: [1, 2]))
    trace = Trace(loop)
    for n, name in enumerate("ab"):
        loop.submit(request(name, prompt(n, 10), max_tokens=12), 0.0)
    return trace.finish()


def grammar_rows() -> Lines:
    """A reply that must be JSON, then one beside it that is free."""
    with compiler() as grammars:
        bench = Bench(grammars=grammars, step_wait_s=60.0, slow_cpu_s=60.0)  # a step waits for its masks
        trace = Trace(bench.loop)
        bench.submit("person", "person", "strings:1", prompt=range(1, 20), max_tokens=30)
        while bench.loop.blocked or not trace.lines:  # until the grammar is compiled
            trace.step()
        bench.submit("free", None, "digits:1", prompt=range(30, 40), max_tokens=5)
        return trace.finish()


class QuickTier(ScriptedTier):
    """Host memory that is never busy."""

    def queues(self) -> tuple[dict[str, TierQueue], TierQueue]:
        return {"host": TierQueue(1e9)}, TierQueue(1e9)


def tier_fetches() -> Lines:
    """A session that was evicted from the device comes back from host memory."""
    tier = QuickTier(random.Random(3), dict.fromkeys(("lie", "lose", "miss", "hang"), 0.0), False)
    loop, _, _ = build((FULL,), 24, tier, False, 1)
    trace = Trace(loop)
    now_s = 0.0
    for name, seed in (("session", 3), ("other", 5), ("session again", 3)):
        loop.submit(request(name, prompt(seed, 300), max_tokens=3), now_s)
        while not any(line.startswith(f"{name} ends") for line in trace.lines):
            now_s += 0.001
            tier.act()
            trace.step(now_s)
    return trace.lines


def transfers() -> Lines:
    """One engine computes the prompt and sends its blocks, the other computes the rest and decodes."""
    common = {"context_len": 128, "token_budget": 32}
    wire = Wire(common, common)
    prefill, decode = Trace(wire.prefill.loop, "prefill"), Trace(wire.decode.loop, "decode")
    tokens, push = prompt(4, 50), Push(transfer="t", address="", ticket="")
    wire.prefill.loop.submit(msgspec.structs.replace(request("a-p", tokens), push=push), 0.0)
    wire.decode.loop.submit(msgspec.structs.replace(request("a", tokens), awaits="t"), 0.0)
    for _ in range(MAX_STEPS):
        if wire.quiet and not wire.prefill.busy and not wire.decode.busy:
            return prefill.lines + decode.lines
        wire.tick()
        prefill.step()
        decode.step()
    raise AssertionError("the transfer never ends")


def seeded_arrivals() -> Lines:
    """Prompts of all lengths and classes, some aborted, some with a deadline, in a small pool."""
    rng = random.Random(20)
    loop = loop_of(n_blocks=24, context_len=256, max_running=3, token_budget=24)
    trace = Trace(loop)
    for n in range(10):
        tokens = prompt(rng.randrange(3), rng.randrange(1, 60))
        deadline_s = 5.0 if n == 7 else None
        priority = Priority(rng.randrange(len(Priority)))
        wanted = request(f"r{n}", tokens, priority=priority, max_tokens=rng.randrange(1, 20), deadline_s=deadline_s)
        loop.submit(wanted, float(n))
        for _ in range(rng.randrange(4)):
            trace.step(float(n))
        if n % 4 == 3 and (delta := loop.abort(f"r{n - 1}")) is not None:
            trace.take([delta])
    trace.step(100.0)
    return trace.finish()


SCHEDULES: tuple[Callable[[], Lines], ...] = (
    *(chunked_prefill, prefix_hits, preemption, attention_window, priorities, latency_target, steps_in_flight),
    *(drafts, grammar_rows, tier_fetches, transfers, seeded_arrivals),
)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=[schedule.__name__ for schedule in SCHEDULES])
def test_the_schedule_is_as_recorded(schedule: Callable[[], Lines]) -> None:
    files.check(files.FOLDER / "schedules" / f"{schedule.__name__}.json", schedule())


def test_every_file_has_a_schedule() -> None:
    files.check_all_used(files.FOLDER / "schedules", {schedule.__name__ for schedule in SCHEDULES})
