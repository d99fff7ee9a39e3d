"""What grammars cost an engine on this machine's CPU: `python -m benchmarks.grammar`.

In one process, the worker's own scheduler and model: compiling, and what a step spends on grammars (accepted tokens,
shortest completions, the next masks, and waiting for the thread that computes them) with eight sequences at once.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.emberline_contender import default_gguf
from emberline.engine.core.scheduler import Scheduler
from emberline.engine.grammar.compiler import MatcherCompiler
from emberline.engine.grammar.guided_decoding import GuidedDecoding
from emberline.engine.worker import main as worker
from emberline.protocol.grammar import encode
from emberline.protocol.request import EngineRequest, Message, OutputFormat, SamplingParams
from emberline.text.grammar.reply_grammar import GrammarSpec, build
from emberline.text.text_model import TextModel

STREAMS = 8
TARGET = 0.10  # of decode time may go to grammars
SCHEMAS: dict[str, dict[str, Any]] = {
    "numbers": {"type": "array", "items": {"type": "number"}},
    "person": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "role": {"enum": ["admin", "user", "guest"]},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["name", "age", "role", "tags"],
    },
    "bounded": {
        "type": "object",
        "properties": {
            "title": {"type": "string", "maxLength": 80},
            "body": {"type": "string", "maxLength": 2000},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 50},
        },
        "required": ["title", "body", "tags"],
    },
    "linked": {
        "type": "object",
        "properties": {"value": {"type": "integer"}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}},
        "required": ["value", "next"],
    },
    "anything": {"type": "object"},
}


class Timed:
    """How long each call of a method takes, wherever it comes from."""

    def __init__(self, owner: Any, name: str) -> None:
        self.last_s = 0.0
        self._call: Callable[..., Any] = getattr(owner, name)
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return self._call(*args, **kwargs)
        finally:
            self.last_s = time.perf_counter() - began


class Engine:
    """The worker's parts, in this process."""

    def __init__(self, gguf: Path, threads: int | None) -> None:
        flags = ["--model", str(gguf), "--socket", "unused", "--device", "cpu"]
        flags += ["--threads", str(threads)] if threads else []
        self.loop, self.info, *_ = worker.build(worker.parse_arguments(flags))
        self.text = TextModel.load(gguf)
        self.scheduler: Scheduler = self.loop.scheduler
        grammars = self.scheduler.feature(GuidedDecoding).grammars
        assert isinstance(grammars, MatcherCompiler)
        self.grammars = grammars
        self.scheduler.set_vocabulary(self.text.vocabulary)

    def submit(self, id: str, ask: str, grammar: bytes, max_tokens: int, temperature: float) -> None:
        ids = self.text.encode(self.text.render([Message("user", ask)]), special=True)
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=len(id), ignore_eos=not grammar)
        self.loop.submit(EngineRequest(id=id, prompt_ids=ids, sampling=sampling, grammar=grammar), 0.0)


def compile_ms(engine: Engine, encoded: bytes) -> float:
    began = time.perf_counter()
    pending = engine.grammars.request(encoded)
    while not pending.ready:
        time.sleep(0.0002)
    pending.guide()
    return 1e3 * (time.perf_counter() - began)


def decode(engine: Engine, name: str, encoded: bytes, n_tokens: int, temperature: float) -> dict[str, float]:
    """Eight replies at once; only steps in which all of them decode count."""
    masks, absorb = Timed(engine.scheduler, "masks"), Timed(engine.scheduler, "absorb")
    for n in range(STREAMS):
        engine.submit(f"{name} {n}", f"Reply in JSON, number {n}: everything you know.", encoded, n_tokens, temperature)
    rows: list[tuple[float, float]] = []  # whole step, of which for grammars
    while engine.loop.busy:
        load = engine.loop.load
        full = load.running == STREAMS and not load.waiting_tokens
        began = time.perf_counter()
        engine.loop.step(0.0)
        if full:
            rows.append((time.perf_counter() - began, masks.last_s + absorb.last_s))
    del engine.scheduler.masks, engine.scheduler.absorb
    steps, guided = zip(*rows, strict=True)
    return {
        "steps": len(steps),
        "step_ms": 1e3 * median(steps),
        "us_row": 1e6 * median(guided) / STREAMS,
        "longest_ms": 1e3 * max(guided),
        "share": sum(guided) / sum(steps),
    }


def measure(engine: Engine, n_tokens: int) -> dict[str, dict[str, float]]:
    rows: dict[str, dict[str, float]] = {}
    compile_ms(engine, encode(build(GrammarSpec(output=OutputFormat("json_schema", {"const": 0})))))  # the library
    for name, schema in SCHEMAS.items():
        encoded = encode(build(GrammarSpec(output=OutputFormat("json_schema", schema))))
        row = {"compile_ms": compile_ms(engine, encoded), "cached_ms": compile_ms(engine, encoded)}
        for temperature in (0.0, 1.0):
            figures = decode(engine, f"{name} {temperature}", encoded, n_tokens, temperature)
            if temperature == 1.0:
                row |= figures
            else:
                row["share_greedy"] = figures["share"]
        rows[name] = row
    rows["no grammar"] = decode(engine, "none", b"", n_tokens, 1.0)
    return rows


def table(rows: dict[str, dict[str, float]]) -> str:
    columns = ["compile_ms", "cached_ms", "step_ms", "us_row", "longest_ms", "share", "steps"]
    lines = ["| schema | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, row in rows.items():
        cells = (f"{row[c]:.3g}" if c in row else "" for c in columns)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grammar", description=__doc__)
    parser.add_argument("--model", type=Path, help="a GGUF file (default: the catalog's default model)")
    parser.add_argument("--threads", type=int, help="CPU threads (one per core)")
    parser.add_argument("--tokens", type=int, default=150, help="most of a reply (150)")
    parser.add_argument("--json", type=Path, default=Path("bench-grammar.json"), help="where to write it")
    options = parser.parse_args(argv)
    engine = Engine(options.model or default_gguf(), options.threads)
    rows = measure(engine, options.tokens)
    print(table(rows))
    structured = [row for name, row in rows.items() if name != "no grammar"]
    share = mean(row["share"] for row in structured)
    print(f"\ngrammars take {share:.1%} of decode time at {STREAMS} streams (at most {TARGET:.0%} wanted);")
    print(f"compiling takes {median(row['compile_ms'] for row in structured):.1f} ms (median)")
    facts = {"machine": platform.machine(), "streams": STREAMS, "model": engine.info.model, "rows": rows}
    options.json.write_text(json.dumps(facts, indent=1) + "\n")
    print(f"written to {options.json}")
    return 0 if share <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
