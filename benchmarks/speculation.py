"""What speculative decoding gains: `python -m benchmarks.speculation`.

On this machine's CPU, in one process: 50 tool calls (`benchmarks/data/tool_calls.json`) with their real grammar, one
after the other, with speculation and without it, call by call in turn. The model computes and samples as ever, then the
recorded token takes the place of the one drawn, so that both write the same text. With `--trace FILE` (one JSON object
per line with `input`, `output` and `session_id`, as github.com/LMCache/lmcache-agent-trace publishes), also how many
tokens a step of suffix decoding would give on recorded replies, without a model. And what speculation costs where
nothing is accepted: replies of random tokens, of 10,000 and of 50, where drafts are found and always wrong.
"""

import argparse
import gzip
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.emberline_contender import default_gguf
from benchmarks.replay_runner import Replay
from emberline.engine.core.step_loop import StepLoop
from emberline.engine.speculation.suffix_drafter import LEAD_TOKENS, TENANT_TOKENS
from emberline.engine.speculation.suffix_index import SuffixIndex, SuffixMatcher
from emberline.engine.worker import main as worker
from emberline.protocol.grammar import encode
from emberline.protocol.request import (
    EngineRequest,
    GenerateRequest,
    Message,
    SamplingParams,
    Tool,
    ToolCall,
    ToolChoice,
)
from emberline.protocol.token_ids import pack, unpack
from emberline.text.grammar.reply_grammar import build
from emberline.text.prompt import grammar_spec
from emberline.text.text_model import TextModel

CALLS = Path(__file__).parent / "data" / "tool_calls.json"
TARGET = 1.15  # times the tokens per second without speculation, for tool calls on two cores
LEAST = 0.98  # the same where nothing is accepted
N_RANDOM, RANDOM_TOKENS = 10, 64  # replies of random tokens, and of each
MOST_DRAFTS = 15


class Engine:
    """The worker's parts, in this process."""

    def __init__(self, gguf: Path, threads: int | None, speculation: str) -> None:
        flags = ["--model", str(gguf), "--socket", "unused", "--device", "cpu", "--speculation", speculation]
        flags += ["--threads", str(threads)] if threads else []
        loop, self.info, *_ = worker.build(worker.parse_arguments(flags))
        assert isinstance(loop, StepLoop)
        self.loop = loop
        self.replay = Replay(loop.runner, self.info.eos_ids[0])
        loop.rank.runner = self.replay
        self.n_tokens, self.n_steps, self.seconds = 0, 0, 0.0

    def run(self, request: EngineRequest, reply: list[int]) -> float:
        """Decode one reply. Returns the seconds from its first token to its end."""
        self.replay.replies[request.id] = reply
        self.loop.submit(request, time.monotonic())
        began_s, n_first, ids, n_steps = 0.0, 0, b"", 0
        while self.loop.busy:
            for delta in self.loop.step(time.monotonic()):
                assert delta.error is None, delta.error
                ids += delta.token_ids
                if ids and not began_s:
                    began_s, n_first, n_steps = time.perf_counter(), len(ids) // 4, 0
            n_steps += 1
        seconds = time.perf_counter() - began_s
        assert unpack(ids)[: len(reply)] == reply, "the reply is what was recorded"
        self.n_tokens += len(ids) // 4 - n_first
        self.n_steps += n_steps - 1
        self.seconds += seconds
        return seconds


def tool_calls(text: TextModel, path: Path) -> list[tuple[EngineRequest, list[int]]]:
    """Requests and their recorded replies. Their prompts do not name the tools: only decoding is measured."""
    data = json.loads(path.read_text())
    tools = tuple(Tool(tool["name"], tool["description"], tool["parameters"], strict=True) for tool in data["tools"])
    choice = ToolChoice("required")
    any_call = GenerateRequest(id="", model="", tools=tools, tool_choice=choice, parallel_tool_calls=False)
    spec = grammar_spec(text, any_call, begun=False)
    assert spec is not None
    grammar = encode(build(spec))  # of all requests, which have the same tools
    found = []
    for number, call in enumerate(data["calls"]):
        arguments = json.dumps(call["arguments"], separators=(",", ":"), ensure_ascii=False)
        reply = text.tool_format.write([ToolCall("", call["name"], arguments)])
        request = EngineRequest(
            id=str(number),
            prompt_ids=text.encode(text.render([Message("user", call["ask"])]), special=True),
            sampling=SamplingParams(max_tokens=400, temperature=0.0),
            grammar=grammar,
        )
        found.append((request, unpack(text.encode(reply, special=True))))
    return found


def measure_calls(gguf: Path, threads: int | None, settings: Sequence[str], rounds: int) -> dict[str, dict[str, Any]]:
    text = TextModel.load(gguf)
    calls = tool_calls(text, CALLS)
    engines = {setting: Engine(gguf, threads, setting) for setting in settings}
    for engine in engines.values():
        engine.loop.set_vocabulary(text.vocabulary)
        for request, reply in calls[:2]:  # compiles the grammar, and caches the prompt that all calls share
            engine.run(request, reply)
        engine.n_tokens, engine.n_steps, engine.seconds = 0, 0, 0.0
    for number in range(rounds):
        for place, (request, reply) in enumerate(calls):
            order = list(engines.values())
            for engine in order if (place + number) % 2 else reversed(order):
                engine.run(request, reply)
    rows: dict[str, dict[str, Any]] = {}
    for setting, engine in engines.items():
        load = engine.loop.load
        rows[setting] = {
            "tokens": engine.n_tokens,
            "tokens_per_s": engine.n_tokens / engine.seconds,
            "tokens_per_step": engine.n_tokens / engine.n_steps,
            "drafted": {stats.drafter: sum(stats.drafted) for stats in load.drafts},
            "accepted": {stats.drafter: sum(stats.accepted) for stats in load.drafts},
        }
    return rows


def random_replies(n_words: int, vocab_size: int, seed: int) -> list[tuple[EngineRequest, list[int]]]:
    """Replies of random tokens, of n_words different ones."""
    rng = random.Random(seed)
    words = rng.sample(range(100, vocab_size - 100), n_words)
    found = []
    for number in range(N_RANDOM):
        prompt, reply = rng.choices(words, k=100), rng.choices(words, k=RANDOM_TOKENS)
        sampling = SamplingParams(max_tokens=RANDOM_TOKENS, temperature=0.0, ignore_eos=True)
        found.append((EngineRequest(id=f"{seed}-{number}", prompt_ids=pack(prompt), sampling=sampling), reply))
    return found


def measure_random(gguf: Path, threads: int | None) -> dict[str, float]:
    """The speed with speculation as a share of that without, for replies that no draft fits: the median of pairs."""
    engines = [Engine(gguf, threads, setting) for setting in ("off", "auto")]
    shares: dict[str, float] = {}
    for seed, n_words in enumerate((10_000, 50)):
        pairs = []
        for number, (request, reply) in enumerate(random_replies(n_words, engines[0].info.vocab_size, seed)):
            order = engines if number % 2 else engines[::-1]
            seconds = {id(engine): engine.run(request, reply) for engine in order}
            pairs.append(seconds[id(engines[0])] / seconds[id(engines[1])])
        shares[f"random tokens of {n_words}"] = statistics.median(pairs[2:])
    return shares


def replay_trace(text: TextModel, path: Path, most: int, tenant: bool) -> dict[str, float]:
    """Tokens per step on recorded replies, each of which the indexes see only once it is written."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        rows = [json.loads(line) for line in lines]
    matcher, replies = SuffixMatcher(), SuffixIndex(TENANT_TOKENS)
    n_tokens = n_steps = n_drafted = n_accepted = n_indexed = 0
    index_s = propose_s = 0.0
    for row in sorted(rows, key=lambda row: row.get("timestamp", 0)):
        prompt, reply = text.encode(row["input"], special=False), text.encode(row["output"], special=False)
        own, ids, at = SuffixIndex((len(prompt) + len(reply)) // 4 + 1), prompt + reply, len(prompt)
        began = time.perf_counter()
        own.extend(prompt)
        index_s += time.perf_counter() - began
        n_indexed += len(prompt) // 4
        while at < len(ids):
            began = time.perf_counter()
            found = matcher.propose(ids[max(0, at - 256) : at], most, own, *([replies] if tenant else []))
            propose_s += time.perf_counter() - began
            draft = found.ids if found is not None else b""
            n = 0
            while n < len(draft) and draft[n : n + 4] == ids[at + n : at + n + 4]:
                n += 4
            n_drafted += len(draft) // 4
            n_accepted += n // 4
            new = ids[at : at + n + 4]
            own.extend(new)
            at += n + 4
            n_tokens += len(new) // 4
            n_steps += 1
        replies.extend(ids[max(0, len(prompt) - 4 * LEAD_TOKENS) :], end=True)
    return {
        "tokens": n_tokens,
        "tokens_per_step": n_tokens / n_steps,
        "drafted_per_step": n_drafted / n_steps,
        "accepted_share": n_accepted / max(1, n_drafted),
        "index_ns_per_token": 1e9 * index_s / n_indexed,
        "propose_us": 1e6 * propose_s / n_steps,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculation", description=__doc__)
    parser.add_argument("--model", type=Path, help="a GGUF file (default: the catalog's default model)")
    parser.add_argument("--threads", type=int, help="CPU threads (one per core)")
    parser.add_argument("--rounds", type=int, default=1, help="times that the calls are replayed (1)")
    parser.add_argument("--settings", default="off,grammar,auto", help="of --speculation to compare (off,grammar,auto)")
    parser.add_argument("--trace", type=Path, help="recorded requests with their text, one JSON object per line")
    parser.add_argument("--json", type=Path, default=Path("bench-speculation.json"), help="where to write it")
    options = parser.parse_args(argv)
    gguf = options.model or default_gguf()
    facts: dict[str, Any] = {"machine": platform.machine(), "model": gguf.stem}
    if options.trace is not None:
        text = TextModel.load(gguf)
        for name, tenant in (("own text", False), ("own text and the tenant's replies", True)):
            facts[f"trace, {name}"] = row = replay_trace(text, options.trace, MOST_DRAFTS, tenant)
            print(f"{name}: " + ", ".join(f"{key} {value:.3g}" for key, value in row.items()))
    rows = facts["tool_calls"] = measure_calls(gguf, options.threads, options.settings.split(","), options.rounds)
    print("\n| speculation | tokens/s | tokens/step | drafted | accepted |\n|---|---|---|---|---|")
    for setting, row in rows.items():
        drafts = f"{sum(row['drafted'].values())} | {sum(row['accepted'].values())}"
        print(f"| {setting} | {row['tokens_per_s']:.1f} | {row['tokens_per_step']:.2f} | {drafts} |")
    options.json.write_text(json.dumps(facts, indent=1) + "\n")
    print(f"written to {options.json}")
    facts["nothing accepted"] = shares = measure_random(gguf, options.threads)
    for name, share in shares.items():
        print(f"{name}: {share:.3f} times the speed without speculation (at least {LEAST} wanted)")
    options.json.write_text(json.dumps(facts, indent=1) + "\n")
    if "off" not in rows or "auto" not in rows:
        return 0
    gain = rows["auto"]["tokens_per_s"] / rows["off"]["tokens_per_s"]
    print(f"tool calls: {gain:.2f} times the tokens per second (at least {TARGET} wanted)")
    return 0 if gain >= TARGET and min(shares.values()) >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
