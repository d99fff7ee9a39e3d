"""llguidance's own JSON-Schema compiler compared with ours on the schemas of `benchmarks.validity`, without a model.

`python -m benchmarks.native_schema`. For each compiler: how many schemas it refuses, whether the compiled grammar
accepts an invalid instance of the official suite or rejects all valid ones, whether replies drawn at random under its
token masks validate, and how long compiling takes. Then whether the shortest completion, which closes a reply within
`max_tokens`, can be searched for on llguidance's matcher alone.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from statistics import quantiles
from typing import Any, TypeAlias

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from benchmarks.emberline_contender import default_gguf
from benchmarks.validity import ROOT, Case, _validator, functions, suite
from emberline.engine.grammar.closer import Closer
from emberline.engine.grammar.grammar_automaton import Automaton
from emberline.engine.grammar.lark import to_lark
from emberline.engine.grammar.matcher import LIMITS
from emberline.engine.grammar.vocabulary import Vocabulary
from emberline.protocol.errors import BadInput
from emberline.protocol.grammar import Grammar
from emberline.protocol.request import OutputFormat
from emberline.text.grammar.reply_grammar import GrammarSpec, build
from emberline.text.text_model import TextModel

SAMPLES = 20
MAX_TOKENS = 120
ENDING = b'"]},'  # preferred half of the time, so that random replies end
MAX_SEARCHED = 2_000  # states that a search for the shortest completion may visit

Compile: TypeAlias = Callable[[Any], Any]  # schema → LLMatcher; raises Refused


class Refused(Exception):
    """The compiler does not support the schema; the message says why."""


class Impossible(Refused):
    """The compiler says that no value satisfies the schema."""


@dataclass
class Outcome:
    n_schemas: int = 0
    refused: list[str] = field(default_factory=list)
    impossible: list[str] = field(default_factory=list)
    accepts_invalid: list[str] = field(default_factory=list)  # an invalid instance of the suite is accepted
    rejects_valid: list[str] = field(default_factory=list)  # all valid instances of the suite are rejected
    n_samples: int = 0
    n_unfinished: int = 0
    invalid_samples: list[str] = field(default_factory=list)
    dead_ends: list[str] = field(default_factory=list)  # a state that is not accepting allows no token
    compile_ms: list[float] = field(default_factory=list)

    @property
    def n_accepted(self) -> int:
        return self.n_schemas - len(self.refused) - len(self.impossible)

    def figures(self) -> dict[str, Any]:
        wrong = {line.partition(" → ")[0] for line in (*self.accepts_invalid, *self.invalid_samples)}
        return {
            "schemas": self.n_schemas,
            "impossible": len(self.impossible),
            "refused": len(self.refused),
            "refused_share": len(self.refused) / (self.n_schemas - len(self.impossible)),
            "accepted": self.n_accepted,
            "accept_an_invalid_instance": len(self.accepts_invalid),
            "reject_all_valid_instances": len(self.rejects_valid),
            "samples": self.n_samples,
            "samples_unfinished": self.n_unfinished,
            "samples_invalid": len(self.invalid_samples),
            "dead_ends": len(self.dead_ends),
            "schemas_with_invalid_replies": len(wrong),
            "compile_ms_p50": quantiles(self.compile_ms, n=20)[9],
            "compile_ms_p95": quantiles(self.compile_ms, n=20)[18],
            "compile_ms_max": max(self.compile_ms),
        }


class Compilers:
    """Both compilers over one vocabulary and one set of parser limits."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokenizer = vocabulary.llguidance_tokenizer()

    def native(self, **options: bool) -> Compile:
        def compile(schema: Any) -> Any:
            spacing = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # json.dumps'
            settings: Any = {**spacing, "lenient": False, **options}
            try:
                return self._matcher(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=settings))
            except ValueError as error:
                raise Refused(str(error)) from None

        return compile

    def ours(self, schema: Any) -> Any:
        grammar = grammar_of(schema)
        matcher = self._matcher(LLMatcher.grammar_from_lark(to_lark(grammar)))
        Automaton(grammar)  # compiled with every grammar, for the closer
        return matcher

    def _matcher(self, source: str) -> Any:
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=LLParserLimits(**LIMITS))
        if matcher.is_error():
            error = matcher.get_error().splitlines()[0][:200]
            raise Impossible(error) if "nsatisfiable" in error else Refused(error)
        return matcher


def grammar_of(schema: Any) -> Grammar:
    try:
        return build(GrammarSpec(output=OutputFormat("json_schema", schema)))
    except BadInput as error:
        raise Impossible(error.message) if "no value" in error.message else Refused(error.message) from None


def accepts(matcher: Any, vocabulary: Vocabulary, value: Any) -> bool:
    text = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    ids = vocabulary.spell(text)
    matcher.reset()
    found = ids is not None and matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
    matcher.reset()
    return bool(found)


def allowed(matcher: Any, vocabulary: Vocabulary) -> Any:
    """Token ids of the mask, without the end of the reply."""
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.flatnonzero(np.unpackbits(bits, bitorder="little")[: vocabulary.n_tokens])


def sample(matcher: Any, vocabulary: Vocabulary, rng: random.Random) -> tuple[bytes, str]:
    """A reply of random tokens under the mask, and how it ended: "stop", "length" or "dead end"."""
    endings = {token_id for byte in ENDING for token_id in vocabulary.spell(bytes([byte])) or ()}
    text = b""
    matcher.reset()
    for _ in range(MAX_TOKENS):
        accepting = matcher.is_accepting()
        if matcher.is_stopped() or (accepting and rng.random() < 0.2):
            return text, "stop" if accepting else "dead end"
        ids = allowed(matcher, vocabulary)
        if not len(ids):
            return text, "stop" if accepting else "dead end"
        preferred = [one for one in ids.tolist() if one in endings] if rng.random() < 0.5 else []
        token_id = rng.choice(preferred or ids.tolist())
        matcher.consume_token(token_id)
        text += vocabulary.tokens[token_id]
    return text, "length"


def check_schema(case: Case, compile: Compile, vocabulary: Vocabulary, outcome: Outcome) -> None:
    outcome.n_schemas += 1
    began = time.perf_counter()
    try:
        matcher = compile(case.schema)
    except Impossible as error:
        refused = outcome.refused if case.instances else outcome.impossible
        refused.append(f"{case.name} → {error}")
        return
    except Refused as error:
        outcome.refused.append(f"{case.name} → {error}")
        return
    outcome.compile_ms.append(1e3 * (time.perf_counter() - began))
    wrong = [value for value in case.invalid if accepts(matcher, vocabulary, value)]
    if wrong:
        outcome.accepts_invalid.append(f"{case.name} → {json.dumps(wrong[0])[:120]}")
    if case.instances and not any(accepts(matcher, vocabulary, value) for value in case.instances):
        outcome.rejects_valid.append(case.name)
    try:
        validator = _validator(case.schema)
    except Exception as error:  # a dialect that the validator does not know
        print(f"not validated: {case.name}: {str(error).splitlines()[0]}")
        return
    rng = random.Random(case.name)
    for _ in range(SAMPLES):
        text, end = sample(matcher, vocabulary, rng)
        outcome.n_samples += 1
        if end == "length":
            outcome.n_unfinished += 1
        elif end == "dead end":
            outcome.dead_ends.append(f"{case.name} → {text[:120]!r}")
        elif not _valid(validator, text):
            outcome.invalid_samples.append(f"{case.name} → {text[:120]!r}")


def _valid(validator: Any, text: bytes) -> bool:
    try:
        return bool(validator.is_valid(json.loads(text)))
    except ValueError:
        return False


def shortest_completion(matcher: Any, vocabulary: Vocabulary) -> int | None:
    """Uniform-cost search over single-byte tokens; None when `MAX_SEARCHED` states were not enough.

    The matcher has no identity of states, so the mask stands for it: two states with one mask count as one, which is
    wrong where items are counted (`minLength`, `minItems`) but is the only way to keep the search finite in practice.
    """
    single = {token_id for byte in range(256) for token_id in vocabulary.spell(bytes([byte])) or ()}
    queue: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ())]
    seen: set[bytes] = set()
    n = 0
    while queue and n < MAX_SEARCHED:
        cost, _, path = heappop(queue)
        copy = matcher.deep_copy()
        copy.consume_tokens(list(path))
        if copy.is_accepting():
            return cost
        mask = copy.compute_bitmask()
        if mask in seen:
            continue
        seen.add(mask)
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        for token_id in single:
            if bits[token_id]:
                n += 1
                heappush(queue, (cost + 1, n, (*path, token_id)))
    return None


def search(cases: Sequence[Case], compilers: Compilers, vocabulary: Vocabulary) -> dict[str, float]:
    """Completions from random prefixes of replies: our closer on our grammar, the search on the same matcher."""
    rng = random.Random(7)
    native_ms: list[float] = []
    ours_ms: list[float] = []
    n_failed = n_longer = 0
    for case in cases:
        try:
            grammar, matcher = grammar_of(case.schema), compilers.ours(case.schema)
        except Refused:
            continue
        closer = Closer(Automaton(grammar), vocabulary)
        ids = [rng.choice(allowed(matcher, vocabulary).tolist())]
        if not closer.accept(ids[0]):
            continue
        matcher.consume_token(ids[0])
        began = time.perf_counter()
        closer.closing()
        ours_ms.append(1e3 * (time.perf_counter() - began))
        began = time.perf_counter()
        found = shortest_completion(matcher, vocabulary)
        native_ms.append(1e3 * (time.perf_counter() - began))
        n_failed += found is None
        n_longer += found is not None and found > closer.fewest_bytes
    return {
        "prefixes": len(native_ms),
        "not_found": n_failed,
        "longer_than_shortest": n_longer,
        "search_ms_p50": quantiles(native_ms, n=20)[9],
        "search_ms_p95": quantiles(native_ms, n=20)[18],
        "closer_ms_p50": quantiles(ours_ms, n=20)[9],
        "closer_ms_p95": quantiles(ours_ms, n=20)[18],
    }


def table(columns: dict[str, dict[str, Any]]) -> str:
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name in next(iter(columns.values())):
        cells = [
            f"{column[name]:.3g}" if isinstance(column[name], float) else str(column[name])
            for column in columns.values()
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.native_schema", description=__doc__)
    parser.add_argument(
        "--model", type=Path, help="a GGUF file for its vocabulary (default: the catalog's default model)"
    )
    parser.add_argument("--sample", type=int, metavar="N", help="N schemas at random instead of all")
    parser.add_argument("--json", type=Path, default=Path("bench-native-schema.json"), help="where the figures go")
    args = parser.parse_args(argv)
    frame = TextModel.load(args.model or default_gguf()).vocabulary
    vocabulary = Vocabulary(frame, len(frame.tokens))
    cache = ROOT / ".cache" / "suites"
    cache.mkdir(parents=True, exist_ok=True)
    cases = [*suite(cache), *(case for case in functions() if not case.tool)]
    if args.sample:
        cases = random.Random(7).sample(cases, args.sample)
    compilers = Compilers(vocabulary)
    contenders: dict[str, Compile] = {
        "llguidance": compilers.native(),
        "llguidance, coerce_one_of": compilers.native(coerce_one_of=True),
        "emberline": compilers.ours,
    }
    outcomes = {name: Outcome() for name in contenders}
    for name, compile in contenders.items():
        for case in cases:
            check_schema(case, compile, vocabulary, outcomes[name])
        print(f"{name}: done", file=sys.stderr, flush=True)
    columns = {name: outcome.figures() for name, outcome in outcomes.items()}
    searched = search(cases, compilers, vocabulary)
    print(table(columns))
    print()
    print(table({"shortest completion": searched}))
    details = {name: outcome.__dict__ for name, outcome in outcomes.items()}
    args.json.write_text(json.dumps({"figures": columns, "search": searched, "details": details}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
