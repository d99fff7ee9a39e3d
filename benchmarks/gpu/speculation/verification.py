"""What verifying drafts costs: the time of a decode step with so many draft tokens behind every row, against that of a
step without any, and the share of attention alone.

Every draw gives one token, by its logit bias, and every draft is this token: all drafts are accepted, by the engine's
own draws, which is asserted. Two times are taken: of the step loop, planning included, and on a GPU of the captured
CUDA graph alone, replayed. The average context of the steps that are timed is the one named.
"""

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.large_models import Deadline
from benchmarks.gpu.model_files import LLAMA_8B
from benchmarks.gpu.speculation.engine import build
from emberline.engine.core.feature import Speculation
from emberline.engine.core.sequence import Sequence as Running
from emberline.engine.core.step_loop import StepLoop
from emberline.protocol.request import EngineRequest, SamplingParams
from emberline.protocol.token_ids import pack

TOKEN = 7  # that every draw gives
BIAS = 100.0
WARM_UP_STEPS, REPLAYS = 4, 20


@dataclass(frozen=True)
class Sizes:
    batches: tuple[int, ...] = (1, 4, 16, 32)
    contexts: tuple[int, ...] = (512, 4096)
    drafts: tuple[int, ...] = (0, 1, 2, 4, 8)  # of a row; the first is what the others are compared with
    n_steps: int = 40

    @property
    def cells(self) -> Iterator[tuple[int, int]]:
        return itertools.product(self.contexts, self.batches)


@dataclass(slots=True)
class FixedDraft:
    """n draft tokens of a sequence."""

    seq: Running
    n: int

    def take(self, most: int) -> bytes:
        """All of them, as far as the row may have so many."""
        return pack([TOKEN] * min(most, self.n))


class FixedDrafts(Speculation):
    """n draft tokens behind every row, whether they pay or not."""

    drafts = True

    def __init__(self, n: int = 0) -> None:
        self.n = n
        self.n_drafted = self.n_accepted = 0

    def draft(self, seqs: Sequence[Running]) -> dict[int, FixedDraft]:
        """The same for all."""
        return {seq.number: FixedDraft(seq, self.n) for seq in seqs} if self.n else {}

    def verified(self, seq: Running, n_drafted: int, n_accepted: int) -> None:
        """Count them."""
        self.n_drafted += n_drafted
        self.n_accepted += n_accepted


class VerifySteps:
    def __init__(self, loop: StepLoop, vocab_size: int) -> None:
        """loop: of an engine that may verify drafts; whose these are is decided here."""
        self._loop, self._runner, self._vocab_size = loop, loop.runner, vocab_size
        self._in_flight = loop._steps_in_flight
        self._drafts = FixedDrafts()
        loop.scheduler.speculation = loop.scheduler._planner._speculation = self._drafts
        self._kinds: list[Any] = []  # of the GPU's steps since the last time
        self._is_gpu = hasattr(self._runner, "_graphs")
        if self._is_gpu:
            self._watch(loop.runner)

    def _watch(self, runner: Any) -> None:
        run = runner._run

        def watched(kind: Any, wanted: Any) -> Any:
            self._kinds.append(kind)
            return run(kind, wanted)

        runner._run = watched

    def time(self, batch: int, context: int, n_drafts: int, n_steps: int) -> dict[str, Any]:
        """Raises AssertionError unless every row of every step had n_drafts drafts, and all were accepted."""
        loop, drafts = self._loop, self._drafts
        ids = self._submit(batch, context - (1 + n_drafts) * (n_steps // 2 + WARM_UP_STEPS))
        drafts.n = 0
        begun: set[str] = set()
        while len(begun) < batch:
            begun |= {delta.id for delta in self._step() if delta.token_ids}
        drafts.n = n_drafts
        for _ in range(WARM_UP_STEPS):
            self._step()
        self._drain()
        drafts.n_drafted = drafts.n_accepted = 0
        self._kinds.clear()
        began_s = time.perf_counter()
        n_tokens = sum(len(delta.token_ids) // 4 for _ in range(n_steps) for delta in self._step())
        n_tokens += self._drain()
        found: dict[str, Any] = {"loop_ms": 1e3 * (time.perf_counter() - began_s) / n_steps}
        self._check(batch, n_drafts, n_steps, n_tokens)
        if self._is_gpu:
            found["graph_ms"] = self._replay_ms()
        for each in ids:
            loop.abort(each)
        self._drain()
        return found

    def _submit(self, batch: int, n_prompt: int) -> list[str]:
        """Prompts that share nothing: cascade attention would read less of the cache. The same ones every time, so
        that they are computed once."""
        assert n_prompt > 0, "the context is too short for so many steps"
        ids = [f"verify-{row}" for row in range(batch)]
        for row, each in enumerate(ids):
            prompt = random.Random(row).choices(range(TOKEN + 1, self._vocab_size), k=n_prompt)
            room = self._loop.scheduler.limits.context_len - n_prompt
            sampling = SamplingParams(temperature=0.0, max_tokens=room, ignore_eos=True, logit_bias={TOKEN: BIAS})
            self._loop.submit(EngineRequest(id=each, prompt_ids=pack(prompt), sampling=sampling), time.monotonic())
        return ids

    def _step(self) -> Sequence[Any]:
        deltas = self._loop.step(time.monotonic())
        for delta in deltas:
            assert delta.error is None, delta.error
            assert delta.finish is None, f"{delta.id} ended before it was measured: {delta.finish}"
        return deltas

    def _drain(self) -> int:
        """Take in the steps in flight; the tokens that they gave."""
        n_tokens = 0
        while self._loop._in_flight:
            n_tokens += sum(len(delta.token_ids) // 4 for delta in self._loop._absorb_oldest())
        return n_tokens

    def _check(self, batch: int, n_drafts: int, n_steps: int, n_tokens: int) -> None:
        drafts = self._drafts
        wanted = batch * n_drafts * n_steps
        assert drafts.n_drafted == wanted, f"{drafts.n_drafted} draft tokens were verified, not {wanted}"
        assert drafts.n_accepted == wanted, f"{drafts.n_accepted} of {wanted} draft tokens were accepted"
        assert n_tokens == batch * (1 + n_drafts) * n_steps, f"{n_tokens} tokens in {n_steps} steps"
        if self._is_gpu:
            shapes = {kind.shape for kind in self._kinds}
            assert shapes == {(batch, batch * (1 + n_drafts)) if n_drafts else batch}, (
                f"steps of other shapes: {shapes}"
            )

    def _replay_ms(self) -> float | None:
        """Of the graph of one more step, replayed with what that has uploaded: its rows name their tokens and
        positions, so each replay computes the same. None: it is not captured."""
        import torch

        from emberline.engine.runners.gpu.stream import device_event

        runner: Any = self._runner
        self._loop._steps_in_flight = 1
        self._kinds.clear()
        self._step()
        self._loop._steps_in_flight = self._in_flight
        [kind] = self._kinds
        if kind not in runner._graphs:
            return None
        began, done = device_event(runner._device), device_event(runner._device)
        with torch.inference_mode():
            runner._graphs.replay(kind)
            began.record()
            for _ in range(REPLAYS):
                runner._graphs.replay(kind)
            done.record()
        done.wait()
        seconds = done.seconds_since(began)
        return None if seconds is None else 1e3 * seconds / REPLAYS


def measure(model: Path, device: str, sizes: Sizes, deadline: Deadline, figures: Any) -> None:
    from emberline.engine.runners.gpu import shapes

    # Also steps that the engine has no graph for, since they would not pay: 32 rows of 9 tokens.
    most = max(sizes.batches) * (1 + max(sizes.drafts))
    shapes.MIN_DRAWS = max(shapes.MIN_DRAWS, most)
    loop, info = build(model, "grammar", device, max(sizes.batches))
    steps = VerifySteps(loop, info.vocab_size)
    for context, batch in sizes.cells:
        rows: dict[str, Any] = {}
        for n_drafts in sizes.drafts:
            if deadline.passed:
                return
            rows[str(n_drafts)] = steps.time(batch, context, n_drafts, sizes.n_steps)
        figures.put(f"batch {batch}, context {context}", with_ratios(rows))


def with_ratios(rows: dict[str, Any]) -> dict[str, Any]:
    """rows: by draft tokens, the first without any."""
    first = next(iter(rows.values()))
    return {
        n: row | {f"{name}_ratio": ms / first[name] for name, ms in row.items() if ms is not None and first[name]}
        for n, row in rows.items()
    }


def measure_attention(sizes: Sizes, deadline: Deadline, figures: Any) -> None:
    """Microseconds of attention in one layer of Llama 8B's shape, in CUDA graphs of its own."""
    from benchmarks.gpu.kernels import LAYERS, Card, decode_case, time_us, verify_case

    card = Card.measured()
    for context, batch in sizes.cells:
        rows: dict[str, Any] = {}
        for n_drafts in sizes.drafts:
            if deadline.passed:
                return
            case = (
                verify_case(card, 1, batch, 1 + n_drafts, context) if n_drafts else decode_case(card, 1, batch, context)
            )
            rows[str(n_drafts)] = {"layer_us": time_us(case.run, 2 * LAYERS)}
        figures.put(f"batch {batch}, context {context}", with_ratios(rows))


def attention_share(facts: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Of the time of a step's graph, by what was measured and draft tokens; facts: of all settings of the part."""
    layers = LLAMA_8B["num_hidden_layers"]
    return {
        cell: {
            n: layers * row["layer_us"] / 1e3 / step["graph_ms"]
            for n, row in rows.items()
            if (step := facts["grammar"][cell].get(n)) and step.get("graph_ms")
        }
        for cell, rows in facts["attention"].items()
        if cell != "failed" and cell in facts["grammar"]
    }
