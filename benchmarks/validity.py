"""Whether structured answers are valid, on the real model over HTTP: `python -m benchmarks.validity`.

Schemas: those of the official JSON Schema test suite (draft 2020-12) and function schemas as agents send them. Each is
asked for at temperatures 0 and 1, streamed and not; every answer must parse and validate. The function schemas are
asked for once more as tools with `tool_choice: required`. What is refused is counted apart, by the keyword that was
named; a schema that no value fits is no refusal. Exits with 1 when a single answer is not valid.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs

from benchmarks import emberline_contender
from benchmarks.contender import Setup
from benchmarks.process import Process, ended_by_sigterm, free_port

ROOT = Path(__file__).resolve().parent.parent
FUNCTIONS = ROOT / "tests" / "text" / "grammar" / "json_schema" / "function_schemas.json"
SUITE = "jsonschema==4.26.0"  # its source archive carries the official suite
MAX_TOKENS = 160
AT_ONCE = 8
# Of the suite, what is about fetching other documents or about meta-schemas rather than about values.
NOT_ABOUT_VALUES = {"refRemote", "dynamicRef", "vocabulary"}
PROMPT = "Give an example of a value that fits the schema."


@dataclass(frozen=True)
class Case:
    name: str
    schema: Any
    instances: tuple[Any, ...] = ()  # of the suite: values that the schema accepts
    invalid: tuple[Any, ...] = ()  # of the suite: values that the schema rejects
    tool: bool = False


@dataclass
class Outcome:
    valid: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # schemas, by what was named
    impossible: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0


def suite(cache: Path) -> Iterator[Case]:
    """The official suite's schemas, out of the source archive of the package that its authors test with."""
    found = list(cache.glob("jsonschema-*.tar.gz"))
    if not found:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*pip, "--dest", str(cache), SUITE], check=True)
        found = list(cache.glob("jsonschema-*.tar.gz"))
    with tarfile.open(found[0]) as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            path = Path(member.name)
            if path.parts[-3:-1] != ("tests", "draft2020-12") or path.stem in NOT_ABOUT_VALUES:
                continue
            file = archive.extractfile(member)
            assert file is not None
            for group in json.load(file):
                valid, invalid = (
                    tuple(test["data"] for test in group["tests"] if test["valid"] is wanted)
                    for wanted in (True, False)
                )
                yield Case(f"{path.stem}: {group['description']}", group["schema"], valid, invalid)


def functions() -> Iterator[Case]:
    for entry in json.loads(FUNCTIONS.read_text()):
        yield Case(f"function {entry['name']}", entry["parameters"])
        yield Case(f"tool {entry['name']}", entry["parameters"], tool=True)


def request(case: Case, model: str, temperature: float, stream: bool, max_tokens: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": PROMPT}],
        "temperature": temperature,
        "max_tokens": max_tokens,
        "stream": stream,
        "seed": 7,
    }
    if case.tool:
        function = {"name": "the_tool", "parameters": case.schema, "strict": True}
        body |= {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    else:
        envelope = {"name": "value", "schema": case.schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": envelope}
    return body


async def answer(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[list[str], str, int]:
    """The text or each call's arguments, the finish reason, and the tokens."""
    if not body["stream"]:
        reply = await client.post("/v1/chat/completions", json=body)
        _raise(reply.status_code, reply.content)
        whole = reply.json()
        choice = whole["choices"][0]
        calls = [_declared(call["function"]) for call in choice["message"].get("tool_calls") or ()]
        tokens = whole["usage"]["completion_tokens"]
        return calls or [choice["message"]["content"] or ""], choice["finish_reason"], tokens
    text, finish, tokens = "", "", 0
    names: list[str] = []
    arguments: list[str] = []
    async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        if reply.status_code != 200:
            _raise(reply.status_code, await reply.aread())
        async for event in _events(reply):
            tokens += 1
            choice = event["choices"][0]
            text += choice["delta"].get("content") or ""
            for part in choice["delta"].get("tool_calls") or ():
                if part["index"] == len(names):
                    names.append(part["function"]["name"])
                    arguments.append("")
                arguments[part["index"]] += part["function"].get("arguments") or ""
            finish = choice["finish_reason"] or finish
    calls = [_declared({"name": name, "arguments": piece}) for name, piece in zip(names, arguments, strict=True)]
    return calls or [text], finish, tokens


async def _events(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in reply.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            event = json.loads(line[6:])
            if "error" in event:
                raise Wrong(f"an error in the stream: {event['error']}")
            if event["choices"]:
                yield event


class Refused(Exception):
    """The server said no, with 400."""


class Wrong(Exception):
    """An answer that must not be."""


def _raise(status: int, body: bytes) -> None:
    if status == 400:
        raise Refused(json.loads(body)["error"]["message"])
    if status != 200:
        raise Wrong(f"status {status}: {body[:300]!r}")


def _declared(function: dict[str, str]) -> str:
    if function["name"] != "the_tool":
        raise Wrong(f"a call of {function['name']!r}, which was not declared")
    return function["arguments"]


def check(case: Case, texts: list[str], finish: str) -> None:
    if finish != ("tool_calls" if case.tool else "stop"):
        raise Wrong(f"finish_reason {finish!r} after {texts[0][:200]!r}")
    validator = _validator(case.schema)
    for text in texts:
        try:
            value = json.loads(text, parse_constant=lambda name: _no_constant(name))
        except ValueError as error:
            raise Wrong(f"no JSON: {error}: {text[:200]!r}") from None
        if (error := next(iter(validator.iter_errors(value)), None)) is not None:
            raise Wrong(f"{error.message[:200]}: {text[:200]!r}")


def _validator(schema: Any) -> Any:
    try:
        return jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    except jsonschema_rs.ValidationError:  # spelled as in draft 4: a boolean exclusiveMinimum
        return jsonschema_rs.Draft4Validator(schema, validate_formats=True)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


async def one(client: httpx.AsyncClient, model: str, case: Case, outcome: Outcome, max_tokens: int) -> None:
    """All four ways of asking for one schema; a refusal ends them."""
    for temperature in (0.0, 1.0):
        for stream in (False, True):
            try:
                texts, finish, tokens = await answer(client, request(case, model, temperature, stream, max_tokens))
                check(case, texts, finish)
                outcome.valid += 1
                outcome.tokens += tokens
            except Refused as refusal:
                if not case.instances and "no value" in str(refusal):
                    outcome.impossible.append(case.name)
                else:
                    outcome.refused[f"{case.name}: {refusal}"] += 1
                return
            except (Wrong, httpx.HTTPError) as wrong:
                how = f"temperature {temperature:g}, {'streamed' if stream else 'whole'}"
                outcome.wrong.append(f"{case.name} ({how}): {type(wrong).__name__} {wrong}")


async def run(port: int, model: str, cases: list[Case], max_tokens: int = MAX_TOKENS) -> Outcome:
    outcome = Outcome()
    began = time.perf_counter()
    todo = iter(cases)
    timeout = httpx.Timeout(300.0)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=timeout) as client:
        await _ready(client)

        async def work() -> None:
            for case in todo:
                await one(client, model, case, outcome, max_tokens)

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    outcome.seconds = time.perf_counter() - began
    return outcome


async def _ready(client: httpx.AsyncClient, limit_s: float = 120.0) -> None:
    give_up = time.monotonic() + limit_s
    while time.monotonic() < give_up:
        try:
            if (await client.get("/health")).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        await asyncio.sleep(0.2)
    raise SystemExit("the server was not ready in time")


def report(cases: list[Case], outcome: Outcome) -> int:
    n_refused = len(outcome.refused)
    share = n_refused / max(1, len(cases) - len(outcome.impossible))
    for line in sorted(outcome.refused):
        print(f"refused     {line}")
    for line in outcome.impossible:
        print(f"impossible  {line}")
    for line in outcome.wrong:
        print(f"WRONG       {line}")
    asked = outcome.valid + len(outcome.wrong)
    print(
        f"\n{len(cases)} schemas, of them {len(outcome.impossible)} that no value fits and {n_refused} refused as "
        f"unsupported ({share:.1%}); {outcome.valid} of {asked} answers valid ({outcome.valid / max(1, asked):.2%}); "
        f"{outcome.seconds:.0f} s"
    )
    return 1 if outcome.wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.validity", description=__doc__)
    parser.add_argument("--port", type=int, help="of a running Emberline; default: one is started")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="as the running server calls it")
    parser.add_argument("--sample", type=int, metavar="N", help="N schemas at random instead of all")
    parser.add_argument("--json", type=Path, default=Path("bench-validity.json"), help="where the figures go")
    args = parser.parse_args()
    ended_by_sigterm()
    cache = ROOT / ".cache" / "suites"
    cache.mkdir(parents=True, exist_ok=True)
    cases = [*suite(cache), *functions()]
    if args.sample:
        cases = random.Random(7).sample(cases, args.sample)
    if args.port:
        outcome = asyncio.run(run(args.port, args.model, cases))
    else:
        contender = emberline_contender.contender(Setup(emberline_contender.default_gguf(), cache, print))
        port = free_port()
        with Process(contender.command(port, AT_ONCE), cache / "emberline.log"):
            outcome = asyncio.run(run(port, contender.model, cases))
    figures = {
        "schemas": len(cases),
        "impossible": outcome.impossible,
        "refused": sorted(outcome.refused),
        "valid": outcome.valid,
        "wrong": outcome.wrong,
        "seconds": outcome.seconds,
    }
    args.json.write_text(json.dumps(figures, indent=1))
    return report(cases, outcome)


if __name__ == "__main__":
    sys.exit(main())
