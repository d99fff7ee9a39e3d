"""Share of tool calls whose arguments match the tool's schema: `python -m benchmarks.tool_validity`.

The tools are those of real agents and MCP servers (`benchmarks.tool_schemas`). Every request declares one of them
beside two others and asks in words that it be called; the model is free to (`tool_choice: auto`) unless `--forced` is
given. The figures: prompts that were answered by a call, and calls that name a declared tool and validate. Exits with 1
when a single call does not.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs

from benchmarks.copied_values import served
from benchmarks.generation_apis import APIS, Ask, GenerationApi, Got, Refused, Wrong
from benchmarks.process import Process, ended_by_sigterm, free_port
from benchmarks.tool_schemas import ToolSchema, load
from benchmarks.validity import AT_ONCE, ROOT, _ready

N_SCHEMAS = 200
MAX_TOKENS = 256
MAX_SCHEMA_CHARS = 2500  # of a tool: longer ones take a CPU minutes to read
DESCRIPTION_CHARS = 200
TEMPERATURES = (0.0, 0.7, 1.2)
PROMPT = "Call {} with arguments that you make up."


@dataclass(frozen=True)
class Case:
    tools: tuple[ToolSchema, ...]  # the first is asked for
    temperature: float
    stream: bool


@dataclass(frozen=True)
class Outcome:
    tool: str
    temperature: float
    stream: bool
    finish: str
    calls: list[tuple[str, str]]
    text: str
    wrong: str  # why some call is not valid; empty: all are


def cases(tools: Sequence[ToolSchema], n: int, *, both: bool) -> Iterator[Case]:
    """`both`: each streamed and whole; otherwise in turns."""
    draw = random.Random(7)
    fitting = [tool for tool in tools if len(json.dumps(tool.parameters)) <= MAX_SCHEMA_CHARS]
    chosen = draw.sample(fitting, min(n, len(fitting)))
    short = [tool for tool in fitting if len(json.dumps(tool.parameters)) <= MAX_SCHEMA_CHARS // 8]
    for number, tool in enumerate(chosen):
        beside = [other for other in draw.sample(short, 3) if other.name != tool.name][:2]
        for at, temperature in enumerate(TEMPERATURES):
            for stream in (False, True) if both else (bool((number + at) % 2),):
                yield Case((tool, *beside), temperature, stream)


def checked(case: Case, got: Got) -> str:
    """Why some call of a reply is not valid."""
    declared = {tool.name: tool.parameters for tool in case.tools}
    for name, arguments in got.calls:
        if name not in declared:
            return f"{name!r} was not declared"
        try:
            value = json.loads(arguments)
        except ValueError as error:
            return f"no JSON: {error}: {arguments[:200]!r}"
        error = next(iter(jsonschema_rs.validator_for(declared[name]).iter_errors(value)), None)
        if error is not None:
            return f"{name}: {error.message[:200]}: {arguments[:200]!r}"
    return ""


async def one(client: httpx.AsyncClient, api: GenerationApi, model: str, case: Case, *, forced: bool) -> Outcome:
    tools: tuple[dict[str, Any], ...] = tuple(
        {"name": tool.name, "description": tool.description[:DESCRIPTION_CHARS], "parameters": tool.parameters}
        for tool in case.tools
    )
    ask = Ask(model, PROMPT.format(case.tools[0].name), MAX_TOKENS, tools, forced, None, case.temperature, 7)
    try:
        got = await api.ask(client, ask, stream=case.stream)
        wrong = checked(case, got)
        if forced and not got.calls:
            wrong = "no call"
    except (Refused, Wrong, httpx.HTTPError) as error:
        got, wrong = Got(), f"{type(error).__name__} {error}"
    row = (case.tools[0].name, case.temperature, case.stream, got.finish, got.calls, got.text, wrong)
    return Outcome(*row)


async def measure(
    port: int, api: GenerationApi, model: str, todo: Sequence[Case], *, forced: bool, partial: Path
) -> list[Outcome]:
    """Ask every case. Outcomes are appended to `partial` as they come, one JSON line each: a run may take hours."""
    outcomes: list[Outcome] = []
    pending = iter(todo)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=1800.0) as client:
        await _ready(client)

        async def work() -> None:
            for case in pending:
                outcomes.append(await one(client, api, model, case, forced=forced))
                with partial.open("a") as file:
                    file.write(json.dumps({"api": api.name} | asdict(outcomes[-1]), ensure_ascii=False) + "\n")

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return outcomes


def report(name: str, outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    n_calling, n_wrong = sum(bool(o.calls) for o in outcomes), sum(bool(o.wrong) for o in outcomes)
    for outcome in outcomes:
        if outcome.wrong:
            print(f"WRONG {outcome.tool} ({outcome.temperature:g}, {outcome.stream=}): {outcome.wrong}")
    n_calls = sum(len(outcome.calls) for outcome in outcomes)
    print(
        f"| {name} | {len({outcome.tool for outcome in outcomes})} | {len(outcomes)} | {n_calling} "
        f"({n_calling / max(1, len(outcomes)):.1%}) | {n_calls} | {n_wrong} | {seconds:.0f} |",
        flush=True,
    )
    return {"run": name, "seconds": seconds, "outcomes": [asdict(outcome) for outcome in outcomes]}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tool_validity", description=__doc__)
    parser.add_argument("--model", default="qwen2.5-coder", help="a model of the store")
    parser.add_argument("--apis", default="chat", help=f"of {', '.join(APIS)}")
    parser.add_argument("--schemas", type=int, default=N_SCHEMAS, help=f"tools to ask for ({N_SCHEMAS})")
    parser.add_argument("--both", action="store_true", help="each request streamed and whole, not in turns")
    parser.add_argument("--forced", action="store_true", help="the reply must be a call")
    parser.add_argument("--port", type=int, help="of a running Emberline with the model; default: one is started")
    parser.add_argument("--json", type=Path, default=Path("bench-tool-validity.json"), help="where the figures go")
    options = parser.parse_args(argv)
    if options.forced and "ollama" in options.apis.split(","):
        parser.error("Ollama's API cannot force a call: leave --forced or ollama out")
    ended_by_sigterm()
    todo = list(cases(load(), options.schemas, both=options.both))
    data = ROOT / ".cache" / "tool-validity"
    model = served(options.model, data)
    port = options.port or free_port()
    command = [sys.executable, "-m", "emberline.cli.main", "serve", model, "--port", str(port)]
    started = None if options.port else Process([*command, "--data-dir", str(data)], data / "server.log")
    print("| run | tools | requests | answered by a call | calls | not valid | s |\n|---|---|---|---|---|---|---|")
    results: list[dict[str, Any]] = []
    partial = options.json.with_suffix(".partial.jsonl")
    partial.unlink(missing_ok=True)
    try:
        for api in (APIS[name] for name in options.apis.split(",")):
            began = time.perf_counter()
            outcomes = asyncio.run(measure(port, api, model, todo, forced=options.forced, partial=partial))
            results.append(report(f"{options.model}, {api.name}", outcomes, time.perf_counter() - began))
            options.json.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    finally:
        if started is not None:
            started.stop()
    n_wrong = sum(bool(row["wrong"]) for result in results for row in result["outcomes"])
    return 1 if n_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
