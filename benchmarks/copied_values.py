"""Values copied from the prompt into JSON, forced against free: `python -m benchmarks.copied_values`.

A constrained reply must not change what a model writes. Every request names a value (a name in some script, a path,
code, an id …) and asks for it back: as a tool call (`tool_choice: required` against `auto`) or as JSON (a `json_schema`
against plain text that only the prompt asks to be JSON). Free replies are parsed leniently. A reply scores if its value
equals the prompt's, character by character. The figure is forced ÷ free; at least 0.97 is wanted.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import httpx

from benchmarks.generation_apis import APIS, Ask, GenerationApi, Got
from benchmarks.process import Process, ended_by_sigterm, free_port
from benchmarks.validity import AT_ONCE, ROOT, _ready
from emberline.catalog.model_store import ModelStore
from emberline.catalog.pull import pull
from emberline.config import home_dir

TARGET = 0.97
SEEDS = 3
MAX_TOKENS = 96
N_RESAMPLES = 2000
VALUES: dict[str, tuple[str, ...]] = {
    "names": (
        "Śląskie Zakłady",
        "Müller & Söhne GmbH",
        "山田太郎",
        "Иван Петров",
        "Zoë Ångström",
        "محمد علي",
        "O'Brien's Pub",
        "Nguyễn Thị Hạnh",
        "José Núñez-García",
        "김민준",
        "Ελένη Παππά",
        "D'Artagnan, Jr.",
    ),
    "paths": (
        "/usr/local/lib/node_modules",
        "src/components/App.test.tsx",
        "C:\\Users\\dev\\notes.txt",
        "~/.config/nvim/init.lua",
        "../../etc/nginx/sites-enabled/default",
        "/var/log/app-2026.11.18.log.gz",
        "docs/Über uns.md",
        "./build_x86-64/a.out",
    ),
    "code": (
        "def add(a, b): return a + b",
        "SELECT * FROM users WHERE id = 7;",
        "x => x.map(y => y * 2)",
        "git rebase -i HEAD~3",
        "for (int i = 0; i < n; ++i)",
        "#include <stdio.h>",
        "df[df.age > 30].groupby('city')",
        "rm -rf ./target && make -j4",
    ),
    "quotes": (
        'She said "yes" twice',
        "it's a 'quoted' word",
        'the "final" draft',
        "rock 'n' roll",
        'size 5" x 7"',
        "`tick` marks",
    ),
    "identifiers": (
        "a3f9c2e1-77b4-4d0a-9c1e-5f2b8d6e4a10",
        "INV-2026-000417",
        "user_8f3kq2",
        "0x7ffee4b1c9a8",
        "SKU#44-B/2",
        "v2.13.0-rc.4",
        "sha256:9f86d081884c7d65",
        "ORD_99812_x",
        "node-17.eu-west-3b",
        "PO 4500-0093-71",
    ),
    "addresses": (
        "anna.kowalska@example.org",
        "https://example.com/a?b=1&c=%20d#e",
        "first+tag@mail.example.co.uk",
        "192.168.17.254:8080",
        "ssh://git@example.com:2222/x.git",
        "10 Downing St, London SW1A 2AA",
        "+48 601 234 567",
        "[2001:db8::ff00:42:8329]",
    ),
    "dates": (
        "2026-11-18T02:49:42Z",
        "18.11.2026",
        "Nov 3, 1998",
        "2024-02-29",
        "23:59:07.125",
        "Q3 FY2025",
        "P3DT4H",
        "11/9/01",
    ),
    "numbers": ("1048576", "-273.15", "3.14159265", "99.95", "17", "602214076", "0.0075", "120000"),
}
PROMPTS = ("Create a record whose name is exactly '{}'.", "Create a record. Its name, exactly as written here, is:\n{}")
ASKED_AS_JSON = ' Reply with JSON only, in the form {"name": ...}.'

SEEDED = ("chat", "run", "ollama")  # APIs that take a seed
Task = Literal["tools", "schema"]
Mode = Literal["free", "forced"]


@dataclass(frozen=True)
class Case:
    kind: str
    value: str
    seed: int

    @property
    def prompt(self) -> str:
        return PROMPTS[self.seed % len(PROMPTS)].format(self.value)

    @property
    def schema(self) -> dict[str, Any]:
        name = {"type": "number" if self.kind == "numbers" else "string"}
        return {"type": "object", "properties": {"name": name}, "required": ["name"], "additionalProperties": False}

    def scores(self, value: object) -> bool:
        """True if a reply's value is a copy. A free reply may quote a number, or not."""
        if self.kind != "numbers":
            return value == self.value
        try:
            return not isinstance(value, bool) and float(str(value)) == float(self.value)
        except ValueError:
            return False


@dataclass(frozen=True)
class Answer:
    case: Case
    mode: Mode
    copied: bool
    text: str
    n_tokens: int


def cases(n_seeds: int, per_kind: int | None) -> list[Case]:
    rows = ((kind, value) for kind, values in VALUES.items() for value in values[:per_kind])
    return [Case(kind, value, seed) for kind, value in rows for seed in range(n_seeds)]


def ask_for(model: str, case: Case, task: Task, mode: Mode, *, seeded: bool) -> Ask:
    """The model's own defaults for sampling, as a client gets them that sets none."""
    seed = case.seed if seeded else None
    if task == "tools":
        tool = {"name": "create_record", "description": "Create a record.", "parameters": case.schema}
        return Ask(model, case.prompt, MAX_TOKENS, (tool,), mode == "forced", seed=seed)
    schema = case.schema if mode == "forced" else None
    return Ask(model, case.prompt + ASKED_AS_JSON, MAX_TOKENS, schema=schema, seed=seed)


def copied(case: Case, got: Got, mode: Mode) -> bool:
    """True if the reply carries a copy of the value; of a free reply, any JSON object or quoted field counts."""
    text = got.calls[0][1] if got.calls else got.text
    if mode == "forced":
        return case.scores(json.loads(text)["name"])
    return any(case.scores(value) for value in lenient_values(text))


def lenient_values(text: str) -> Iterator[object]:
    """The values of `name` in every JSON object of a text, and of fields that only look like JSON."""
    decoder = json.JSONDecoder(strict=False)
    for start in re.finditer(r"\{", text):
        try:
            value, _ = decoder.raw_decode(text, start.start())
        except ValueError:
            continue
        yield value.get("name")
        yield from (inner["name"] for inner in value.values() if isinstance(inner, dict) and "name" in inner)
    for field in re.finditer(r'"?name"?\s*:\s*(?:"(.*?)"|([^\s",}]+))\s*(?:[,}\n]|\Z)', text):
        yield field[1] if field[1] is not None else field[2]


async def measure(
    port: int, api: GenerationApi, model: str, task: Task, todo: Sequence[Case], *, stream: bool
) -> list[Answer]:
    """Both modes of every case, so that a busy machine slows both alike."""
    pending = iter([(case, mode) for case in todo for mode in ("free", "forced")])
    answers: list[Answer] = []
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=1800.0) as client:
        await _ready(client)

        async def work() -> None:
            for case, each in pending:
                mode: Mode = "free" if each == "free" else "forced"
                asked = ask_for(model, case, task, mode, seeded=api.name in SEEDED)
                got = await api.ask(client, asked, stream=stream)
                text = got.calls[0][1] if got.calls else got.text
                answers.append(Answer(case, mode, copied(case, got, mode), text, got.n_tokens))

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return answers


def ratio(answers: Sequence[Answer]) -> tuple[float, float, float]:
    """Forced ÷ free and its 95 % interval, by a bootstrap over the values: seeds of one value are not independent."""
    by_value: dict[str, tuple[int, int]] = {}
    for answer in answers:
        free, forced = by_value.get(answer.case.value, (0, 0))
        by_value[answer.case.value] = (
            free + (answer.copied and answer.mode == "free"),
            forced + (answer.copied and answer.mode == "forced"),
        )
    counts = list(by_value.values())
    draw = random.Random(7)
    samples = sorted(_ratio(draw.choices(counts, k=len(counts))) for _ in range(N_RESAMPLES))
    return _ratio(counts), samples[N_RESAMPLES // 40], samples[-1 - N_RESAMPLES // 40]


def _ratio(counts: Sequence[tuple[int, int]]) -> float:
    return sum(forced for _, forced in counts) / max(1, sum(free for free, _ in counts))


def served(name: str, data: Path) -> str:
    """Make a model of the user's store available under `data`; returns its id."""
    found = pull(name, ModelStore(home_dir(os.environ)))
    link = data / "models" / found.path.parent.name
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.exists():
        link.symlink_to(found.path.parent)
    return found.card.id


RUNS: tuple[tuple[str, Task], ...] = (("qwen2.5-coder", "tools"), ("qwen2.5-coder", "schema"), ("smollm2", "schema"))


def report(name: str, task: Task, answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    n = len(answers) // 2
    n_copied = {mode: sum(a.copied for a in answers if a.mode == mode) for mode in ("free", "forced")}
    tokens = {mode: sum(a.n_tokens for a in answers if a.mode == mode) / max(1, n) for mode in ("free", "forced")}
    value, low, high = ratio(answers)
    print(
        f"| {name}, {task} | {n} | {n_copied['free']} | {n_copied['forced']} | {value:.3f} ({low:.3f}–{high:.3f}) |"
        f" {tokens['free']:.0f} | {tokens['forced']:.0f} | {seconds:.0f} |",
        flush=True,
    )
    by_kind = {
        kind: [sum(a.copied for a in answers if a.case.kind == kind and a.mode == mode) for mode in ("free", "forced")]
        for kind in VALUES
    }
    rows = [asdict(answer) for answer in answers]
    figures = {"model": name, "task": task, "requests": n, "copied": n_copied, "ratio": value, "interval": [low, high]}
    return {**figures, "tokens": tokens, "by_kind": by_kind, "seconds": seconds, "answers": rows}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.copied_values", description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"requests for each value ({SEEDS})")
    parser.add_argument("--quick", action="store_true", help="two values of each kind, one seed")
    parser.add_argument("--only", help="runs to measure, e.g. qwen2.5-coder:tools,smollm2:schema")
    parser.add_argument("--apis", default="chat", help=f"of {', '.join(APIS)}")
    parser.add_argument("--streams", default="whole", choices=("whole", "streamed", "both"), help="how replies come")
    parser.add_argument("--port", type=int, help="of a running Emberline with the models; default: one is started")
    parser.add_argument("--json", type=Path, default=Path("bench-copied-values.json"), help="where the figures go")
    options = parser.parse_args(argv)
    ended_by_sigterm()
    todo = cases(1 if options.quick else options.seeds, 2 if options.quick else None)
    wanted = [run for run in RUNS if options.only is None or ":".join(run) in options.only.split(",")]
    streams = {"whole": (False,), "streamed": (True,), "both": (False, True)}[options.streams]
    data = ROOT / ".cache" / "copied-values"
    print("| run | requests | free: copied | forced: copied | forced ÷ free | free: tokens | forced: tokens | s |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    results: list[dict[str, Any]] = []
    for name in dict.fromkeys(name for name, _ in wanted):
        model = served(name, data)
        port = options.port or free_port()
        command = [sys.executable, "-m", "emberline.cli.main", "serve", model, "--port", str(port)]
        started = None if options.port else Process([*command, "--data-dir", str(data)], data / "server.log")
        try:
            tasks = [task for each, task in wanted if each == name]
            for api, stream, task in product((APIS[each] for each in options.apis.split(",")), streams, tasks):
                if task == "tools" and not api.forces_calls:
                    continue
                began = time.perf_counter()
                answers = asyncio.run(measure(port, api, model, task, todo, stream=stream))
                run = f"{name}, {api.name}, {'streamed' if stream else 'whole'}"
                results.append(report(run, task, answers, time.perf_counter() - began))
                facts = {"machine": platform.machine(), "results": results}
                options.json.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
        finally:
            if started is not None:
                started.stop()
    worst = min((row["ratio"] for row in results), default=1.0)
    print(f"\nforced ÷ free is {worst:.3f} at worst (at least {TARGET} wanted); written to {options.json}")
    return 0 if worst >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
