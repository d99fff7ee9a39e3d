"""Speculative decoding on a GPU, in parts: `python -m benchmarks.gpu.speculation [TOKENS] --only verify,tools,…`.

verify   the time of a decode step with 0 to 8 draft tokens behind every row, against that without any; attention alone
tools    50 tool calls with their grammars, one at a time: forced tokens
coder    the session of a coding agent, written by Qwen2.5-Coder-1.5B (`transcript`): forced tokens and suffix decoding
auto     replies of random tokens, which no draft fits, and recorded ones, 1 to 256 at a time: all drafters against none
head     the draft head that comes with the package, on the default model and held-out prompts, 1, 8 and 32 at a time
replies  recorded replies of agents, 1 and 16 at a time: suffix decoding

All but `head` and `coder` have a model of Llama 8B's shape with random weights, `coder` one of Qwen2.5-Coder-1.5B's or,
with `--coder-model`, that model. Where replies are recorded, it computes and draws as ever, then the recorded token
takes the place of the one drawn (`benchmarks/replay_runner.py`). Prompts are computed before the clock starts: only
decoding is measured. Each setting is a process of its own, since an engine takes all of the device's memory; what it
has measured when its time is over is kept.

TOKENS has the token ids of the requests. `--make` writes it where a tokenizer is, with `--trace` also recorded replies
(as for `benchmarks.speculation`), with `--coder-model` also the session of `coder`. Without TOKENS the ids are made at
the start, of all but the recorded replies. With `--vllm` the recorded replies by vLLM, without speculation and with its
n-grams; run that with a bundle of vLLM on PYTHONPATH, as `benchmarks.gpu --vllm` does.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.gpu import model_files
from benchmarks.gpu.large_models import Deadline
from benchmarks.gpu.speculation import inputs

if TYPE_CHECKING:
    from benchmarks.gpu.speculation.parts import Setup

GRACE_S = 20.0  # after its time, before a process is killed


class Part(NamedTuple):
    """A part of the benchmark: the function of this name in `parts`, once for each setting."""

    name: str
    settings: tuple[str, ...]  # of --speculation; all are compared with the first
    least: dict[str, float] = {}  # of the last setting: times the tokens per second of the first, by what was measured

    def measure(self, setup: "Setup", setting: str, deadline: Deadline, figures: Any) -> None:
        """Measure one setting in this process."""
        from benchmarks.gpu.speculation import parts  # imports torch, which only this process needs

        getattr(parts, self.name)(setup, setting, deadline, figures)


RANDOM_LEAST = 0.98
PARTS = {
    part.name: part
    for part in (
        Part("verify", ("grammar", "attention")),
        Part("tools", ("off", "grammar", "auto"), {"1": 1.4}),
        Part("coder", ("off", "auto"), {"1": 1.4}),
        Part("auto", ("off", "auto"), {"": RANDOM_LEAST}),  # "": of everything
        Part("head", ("off", "eagle3"), {"1": 1.3, "8": 1.0, "32": 0.98}),
        Part("replies", ("off", "suffix"), {"1": 1.8, "16": 1.4}),
    )
}


class Figures(dict[str, Any]):
    """Figures that are written as soon as there are any."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def put(self, name: str, value: Any) -> None:
        self[name] = value
        self._path.write_text(json.dumps(self))


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    if args.make:
        inputs.write(inputs.make(args.trace, args.chat_model, args.coder_model), args.tokens)
        return 0
    facts: dict[str, Any] = json.loads(args.json.read_text()) if args.json.exists() else {}
    if args.vllm:
        from benchmarks.gpu.speculation import vllm

        facts["vllm"] = vllm.measure(
            _model(args.model, model_files.LLAMA_8B), inputs.read(args.tokens).recorded, args.setting
        )
        args.json.write_text(json.dumps(facts, indent=1) + "\n")
        return 0
    if args.setting is not None:
        [name] = args.only
        model, coder = _model(args.model, model_files.LLAMA_8B), _model(args.coder_model, model_files.QWEN_CODER)
        for path in filter(None, (args.model, args.coder_model, args.chat_model, args.draft_head)):
            if not path.exists():
                sys.exit(f"{path}: there is no such file")  # before seconds of imports

        from benchmarks.gpu.speculation.parts import Setup

        setup = Setup(model, args.chat_model, args.draft_head, _inputs(args), args.device, args.quick, coder)
        PARTS[name].measure(setup, args.setting, Deadline(args.limit_s), Figures(args.json))
        return 0
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        if args.tokens is None and set(args.only) - {"verify"}:
            args.tokens = Path(folder) / "tokens"
            inputs.write(inputs.make(None, args.chat_model, args.coder_model), args.tokens)
        for name in args.only:
            facts[name], deadline = {}, Deadline(args.limit_s)
            settings = [each for each in PARTS[name].settings if each != "attention" or args.device.startswith("cuda")]
            for n, setting in enumerate(settings):
                limit_s = (deadline.left_s or 0.0) / (len(settings) - n)
                facts[name][setting] = found = _run(name, setting, limit_s, args, Path(folder))
                failed |= "failed" in found
                print(f"{name} {setting}: {json.dumps(found)}", flush=True)
                args.json.write_text(json.dumps(facts, indent=1) + "\n")
            if "attention" in facts[name]:
                from benchmarks.gpu.speculation import verification

                facts[name]["attention_share"] = verification.attention_share(facts[name])
                args.json.write_text(json.dumps(facts, indent=1) + "\n")
            failed |= not _report(name, facts[name])
    return int(failed)


def _run(name: str, setting: str, limit_s: float, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One setting in a process of its own."""
    out = folder / f"{name}-{setting}.json"
    command = [sys.executable, "-m", "benchmarks.gpu.speculation", "--only", name, "--setting", setting]
    command += ["--json", str(out), "--limit-s", str(limit_s), "--device", args.device]
    for flag in ("model", "chat_model", "draft_head", "coder_model"):
        if getattr(args, flag) is not None:
            command += [f"--{flag.replace('_', '-')}", str(getattr(args, flag))]
    command += ["--quick"] if args.quick else []
    command += [str(args.tokens)] if args.tokens is not None else []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            _, errors = process.communicate(timeout=limit_s + GRACE_S)
            failure = errors[-2000:] if process.returncode else ""
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            failure = f"not done after {limit_s + GRACE_S:.0f} s"
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    return found | {"failed": failure} if failure else found


def _report(name: str, facts: dict[str, Any]) -> bool:
    """Print what was gained; whether all of it is as much as wanted."""
    part, good = PARTS[name], True
    first, *others = part.settings
    if name == "verify":
        for cell, rows in facts[first].items():
            if cell != "failed":
                ratios = {n: row.get("graph_ms_ratio", row["loop_ms_ratio"]) for n, row in rows.items()}
                print(f"{cell}: " + ", ".join(f"{n} drafts {ratio:.3f}" for n, ratio in ratios.items()))
        for cell, shares in facts.get("attention_share", {}).items():
            print(f"{cell}, attention: " + ", ".join(f"{n} drafts {share:.1%}" for n, share in shares.items()))
        return good
    base = facts[first].get("tokens_per_s", {})
    for setting in others:
        for key, rate in facts[setting].get("tokens_per_s", {}).items():
            if key not in base:
                continue
            gain, least = rate / base[key], part.least.get(key, part.least.get("", 0.0))
            wanted = f" (at least {least} wanted)" if least and setting == others[-1] else ""
            print(f"{name}, {setting}, {key if len(key) > 3 else f'batch {key}'}: {gain:.3f}{wanted}")
            good &= not wanted or gain >= least
    return good


def _inputs(args: argparse.Namespace) -> inputs.Inputs | None:
    return None if args.tokens is None else inputs.read(args.tokens)


def _model(given: Path | None, config: dict[str, Any]) -> Path:
    if given is not None:
        return given
    folder = Path(tempfile.gettempdir()) / f"speculation-{config['model_type']}-{config['hidden_size']}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.speculation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tokens", type=Path, nargs="?", help="a file of --make")
    parser.add_argument("--only", default=",".join(PARTS), metavar="PART,…", help="parts to measure (all)")
    parser.add_argument(
        "--limit-s", type=float, default=300.0, metavar="S", help="of each part, the engines' starts included (300)"
    )
    parser.add_argument("--make", action="store_true", help="write TOKENS, and stop")
    parser.add_argument("--trace", type=Path, help="with --make: recorded requests with their text, JSON lines")
    parser.add_argument("--model", type=Path, help="a checkpoint (default: of Llama 8B's shape, with random weights)")
    parser.add_argument("--chat-model", type=Path, metavar="GGUF", help="for `head` (default: the default model)")
    parser.add_argument("--draft-head", type=Path, metavar="FOLDER", help="for `head` (default: the package's)")
    parser.add_argument(
        "--coder-model", type=Path, metavar="GGUF", help="for `coder` (default: of its shape, with random weights)"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="a short trial")
    parser.add_argument(
        "--setting", help="measure this value of --speculation (of vLLM: off or ngram) alone, in this process"
    )
    parser.add_argument("--vllm", action="store_true", help="measure vLLM instead")
    parser.add_argument(
        "--json", type=Path, default=Path("bench-gpu-speculation.json"), help="where to add the figures"
    )
    args = parser.parse_args(argv)
    args.only = args.only.split(",")
    if unknown := set(args.only) - set(PARTS):
        parser.error(f"{', '.join(sorted(unknown))}: there is no such part; there are {', '.join(PARTS)}")
    if (args.make or args.vllm) and args.tokens is None:
        parser.error("TOKENS is needed")
    if not args.make and not args.vllm and args.setting is None and args.tokens is None:
        wanted = {"replies": "recorded replies", "coder": "a session"}
        if args.coder_model is not None:
            del wanted["coder"]
        for name in [each for each in args.only if each in wanted]:
            args.only.remove(name)
            print(f"{name}: left out, for want of TOKENS with {wanted[name]}", flush=True)
        if not args.only:
            parser.error("TOKENS is needed: see --make")
    return args


if __name__ == "__main__":
    sys.exit(main())
