"""Large models on one GPU, random weights, vLLM beside: Kimi K2.5 cut to 9 layers, Qwen3-30B-A3B, GLM-4.7-Flash, FP8.

Both engines compute with the weights of `emberline.weights.generated`, value by value (see `peers/vllm_generated.py`).
They keep the hidden states of different tokens independent, and each row of a batch is another random prompt that goes
on with tokens drawn at temperature 1: so the router sends rows to as many experts as uniform routing does. The experts
that the last step of each batch touched are counted in both engines and printed beside the figures.

Each engine is started --starts times, in turns, and each workload measured --repeats times a start: the figures are
medians with the smallest and the largest. --limit-s and --only fit a part into the time there is, --add goes on.
--only also runs batches (b24) and prompt lengths (16384) that a model's list lacks.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu import workloads
from benchmarks.gpu.engine import Client, compile_kernels, wait_until_prepared, worker
from benchmarks.gpu.large_shapes import FP8_PER_CHANNEL, GLM_FLASH, KIMI_9, QWEN3_30B
from benchmarks.gpu.model_files import LLAMA_8B
from benchmarks.gpu.start import measure_starts
from benchmarks.gpu.workloads import Prompts
from benchmarks.process import ended_by_sigterm

PEER = Path(__file__).parents[1] / "peers" / "vllm_gpu.py"
VOCAB = 120_000  # of the prompts' tokens; no smaller than that of any of the models
# Tokens that differ, so that rows choose different experts: greedy replies to noise repeat themselves.
SAMPLED: dict[str, Any] = {"temperature": 1.0}
TOP_P: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9}
MIXED_BUDGET = "8192"  # vLLM's token budget in `mixed`
# Workloads: bN decodes N rows, N is a prompt of so many tokens, the others are named in `TITLES`.
SMALL = ("b1", "b64", "8192")
DENSE = ("b1", "b5", "b33", "b64", "b100", "b200", "b256", "8192", "32768")
MODELS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "kimi": (KIMI_9, ("b1", "b8", "b32", "b64", "8192")),
    "qwen3": (QWEN3_30B, ("b1", "b32", "8192")),
    "glm": (GLM_FLASH, ("b1", "b32", "8192")),
    "fp8": (LLAMA_8B | {"quantization_config": FP8_PER_CHANNEL}, SMALL),
    "bf16": (LLAMA_8B, (*DENSE, "top_p_b64", "grammar_b64", "throughput", "agentic", "mixed", "load", "load_empty")),
}
TITLES = {
    "throughput": "512 × 1,024/256",
    "agentic": "agentic 32 × 8",
    "mixed": "prompts of 8,192 every 0.5 s: ITL p99",
    "load": "start beyond reading the weights",
    "load_empty": "the same with nothing compiled",
}
MUST = {
    "kimi": {"b1": 1.15, "b8": 1.10, "b32": 1.10, "b64": 1.10, "8192": 1.0},
    "qwen3": {"b1": 1.1, "b32": 1.1},
    "glm": {"b1": 1.1, "b32": 1.1},
    "fp8": {"b1": 1.1, "b64": 1.1, "8192": 1.0},
    "bf16": {"b1": 1.2, "b64": 1.15, "b256": 1.12, "8192": 1.0, "32768": 1.0, "throughput": 1.06, "agentic": 1.25},
}
LIMITS = {"mixed": 20.0, "load": 3.0, "load_empty": 8.0}  # of the figure itself
FP8_MUST = 1.5  # against our own BF16, at batch 1


class Deadline:
    def __init__(self, limit_s: float | None) -> None:
        self._end_s = None if limit_s is None else time.perf_counter() + limit_s

    @property
    def left_s(self) -> float | None:
        return None if self._end_s is None else max(0.0, self._end_s - time.perf_counter())

    @property
    def passed(self) -> bool:
        return self.left_s is not None and self.left_s <= 0


def main() -> int:
    ended_by_sigterm()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.large_models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("models", nargs="*", default=["kimi", "qwen3", "fp8", "bf16"], help=", ".join(MODELS))
    parser.add_argument("--only", nargs="+", metavar="WORKLOAD", help="b1, 8192, agentic, …; default: a model's list")
    parser.add_argument("--limit-s", type=float, metavar="S", help="begin no workload after so many seconds")
    parser.add_argument("--work", type=Path, default=Path("/tmp/emberline-large"))
    parser.add_argument("--out", type=Path, default=Path("large.json"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--starts", type=int, default=2, help="of each engine")
    parser.add_argument("--compiled", action="store_true", help="Triton's cache is warm: skip compiling kernels")
    parser.add_argument("--engines", nargs="+", default=["emberline", "vllm"])
    parser.add_argument("--add", action="store_true", help="to the figures already in --out")
    parser.add_argument("--vllm", type=Path, metavar="DIR", help="folder of an installed vLLM")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    deadline = Deadline(args.limit_s)
    figures: dict[str, Any] = json.loads(args.out.read_text()) if args.add and args.out.exists() else {}
    for name in args.models:
        config, wanted = MODELS[name]
        wanted = chosen(wanted, args.only)
        folder = args.work / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        figures.setdefault(name, {"emberline": [], "vllm": []})
        for start in range(args.starts):
            for engine, measure in ("emberline", _ours), ("vllm", _theirs):
                if engine not in args.engines or (engine == "vllm" and args.vllm is None) or deadline.passed:
                    continue
                begin = time.perf_counter()
                try:
                    found = measure(folder, wanted, args, deadline, start)
                except Exception as error:
                    found = {"failed": f"{type(error).__name__}: {error}"[:3000]}
                found["whole_s"] = time.perf_counter() - begin
                figures[name][engine].append(found)
                print(f"{name} {engine}: {json.dumps(found)}", flush=True)
                args.out.write_text(json.dumps(figures, indent=1))
    print(table(figures))
    return 0


def chosen(listed: tuple[str, ...], only: list[str] | None) -> tuple[str, ...]:
    """The workloads to run of a model with these listed ones. Batches and prompt lengths need not be listed."""
    if only is None:
        return listed
    return tuple(name for name in only if name in listed or name.isdigit() or decode_rows(name))


def uniform(config: dict[str, Any], batch: int) -> float:
    """Experts that a batch touches if every row chooses at random; 0 for a model without."""
    experts = config.get("n_routed_experts") or config.get("num_experts") or 0
    return experts and experts * (1 - (1 - config["num_experts_per_tok"] / experts) ** batch)


def _ours(
    folder: Path, wanted: tuple[str, ...], args: argparse.Namespace, deadline: Deadline, start: int
) -> dict[str, Any]:
    log = args.work / f"{folder.name}.log"
    flags = ("--random-weights", "0")
    found: dict[str, Any] = {}
    if start == 0 and not args.compiled:
        found["compiled_s"] = compile_kernels(folder, log, *flags)
    served = [name for name in wanted if name not in LIMITS or name == "mixed"]
    counted = args.work / f"{folder.name}-experts.json"
    counted.unlink(missing_ok=True)
    if served:
        with worker(folder, log, *flags, program=("-m", "benchmarks.gpu.counting_worker", str(counted))) as engine:
            found |= {"ready_s": engine.ready_s, "prepared_s": wait_until_prepared(engine, log)}
            found |= {"kv_tokens": engine.facts["kv_tokens"], "kv_bytes": engine.facts["kv_bytes"]}
            client, prompts = engine.client, Prompts(0, VOCAB)
            client.send_vocabulary(_vocabulary(client.info.vocab_size))
            client.generate(prompts.many(2, 64), 8)
            for name in served:
                if deadline.passed:
                    break
                found[name] = [_measure(name, client, prompts, found) for _ in range(args.repeats)]
    touched = json.loads(counted.read_text()) if counted.exists() else {}  # by the worker, at its end
    found |= {f"touched_b{n}": count for n, count in touched.items() if f"b{n}" in found}
    if "load" in wanted and start == 0 and not deadline.passed:
        found["starts"] = starts = measure_starts(args.work / "llama-8b", args.work)
        found |= {"load": [starts["cached"]["beyond_disk_s"]], "load_empty": [starts["empty"]["beyond_disk_s"]]}
    return found


def _measure(name: str, client: Client, prompts: Prompts, found: dict[str, Any]) -> float:
    """One repeat of a workload. What else it tells goes to `found`, by its name."""
    if name.isdigit():
        return workloads.prefill(client, prompts, int(name))
    if rows := decode_rows(name):
        sampling = TOP_P if name.startswith("top_p") else SAMPLED
        grammar = workloads.LETTERS if name.startswith("grammar") else b""
        each = workloads.decode(client, prompts, rows, **sampling, grammar=grammar)
        found.setdefault(f"steady_{name}", []).append(each["steady_tok_s"])
        return each["tok_s"]
    long: dict[str, Callable[[], dict[str, Any]]] = {
        "throughput": lambda: workloads.throughput(client, prompts),
        "agentic": lambda: workloads.agentic(client, prompts),
        "mixed": lambda: workloads.mixed(client, prompts, 0.5),
    }
    details = long[name]()
    found.setdefault(f"{name}_details", []).append(details)
    return float(details["itl_ms"]["p99"] if name == "mixed" else details["s"])


def decode_rows(name: str) -> int:
    """Of `b64`, `top_p_b64` or `grammar_b64`; 0 for other workloads."""
    match = re.fullmatch(r"(?:top_p_|grammar_)?b(\d+)", name)
    return int(match[1]) if match else 0


def _size(name: str) -> tuple[bool, int]:
    """Sorts batches before prompt lengths, both by size."""
    return name.isdigit(), decode_rows(name) or int(name)


def _vocabulary(n: int) -> list[bytes]:
    """Texts for a model that has none: bytes, then words of letters and others that no grammar of letters allows."""
    words = (f"{'word' if i % 3 else '#'}{''.join(chr(97 + int(d)) for d in str(i))}".encode() for i in range(256, n))
    return [*(bytes([i]) for i in range(256)), *words]


def _theirs(
    folder: Path, wanted: tuple[str, ...], args: argparse.Namespace, deadline: Deadline, start: int
) -> dict[str, Any]:
    """Grammars and starts are not measured: the bundle has no grammar library, and its weights come from no drive."""
    out = args.work / f"{folder.name}-vllm.json"
    out.unlink(missing_ok=True)
    env = {**os.environ, "PYTHONPATH": str(args.vllm), "TRITON_CACHE_DIR": str(args.work / "triton-vllm")}
    command = [sys.executable, str(PEER), str(out)]
    served = [name for name in wanted if name not in LIMITS and not name.startswith("grammar")]
    found: dict[str, Any] = {}
    if served:
        more = ["--model", str(folder), "--repeats", str(args.repeats), "--only", *served]
        figures = _peer([*command, *more, *_limit(deadline)], env, out, args.work)
        found = {
            key: figures[key] for key in ("version", "weights", "import_s", "init_s", "kv_tokens") if key in figures
        }
        found |= figures["workloads"]
        found |= {f"touched_{name}": count for name, count in figures.get("touched", {}).items()}
    if "mixed" in wanted and start == 0 and not deadline.passed:
        details = _peer([*command, "--mixed", MIXED_BUDGET], env, out, args.work)[f"budget_{MIXED_BUDGET}"]
        found |= {"mixed": [details["itl_ms"]["p99"]], "mixed_details": [details]}
    return found


def _limit(deadline: Deadline) -> list[str]:
    return [] if deadline.left_s is None else ["--limit-s", str(deadline.left_s)]


def _peer(command: list[str], env: dict[str, str], out: Path, work: Path) -> dict[str, Any]:
    out.unlink(missing_ok=True)
    with (work / "vllm.log").open("ab") as log:
        subprocess.run(command, env=env, stdout=log, stderr=log)
    if not out.exists():
        raise RuntimeError((work / "vllm.log").read_text(errors="replace")[-2500:])
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def table(figures: dict[str, Any]) -> str:
    rows = [("", "Emberline", "vLLM", "ratio", "must", "", "experts touched a layer")]
    for name, engines in figures.items():
        measured = {key for runs in engines.values() for run in runs for key in run}
        more = sorted((key for key in measured if key.isdigit() or decode_rows(key)), key=_size)
        for key in dict.fromkeys([*MODELS[name][1], *more]):
            own, peer = (_all(engines[engine], key) for engine in ("emberline", "vllm"))
            if not own:
                continue
            middle, other = statistics.median(own), statistics.median(peer) if peer else None
            ratio = None if other is None else middle / other if decode_rows(key) else other / middle
            rows.append((_title(name, key), _spread(own), _spread(peer), *_verdict(name, key, middle, ratio),
                         _touched(name, engines, key)))  # fmt: skip
    fp8, bf16 = (_all(figures[name]["emberline"], "b1") if name in figures else [] for name in ("fp8", "bf16"))
    if fp8 and bf16:
        ratio = statistics.median(fp8) / statistics.median(bf16)
        verdict = "ok" if ratio >= FP8_MUST else "short"
        rows.append(("FP8 against our BF16, batch 1", "", "", f"{ratio:.3f}", f"{FP8_MUST}", verdict, ""))
    widths = [max(len(row[i]) for row in rows) for i in range(7)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def _title(model: str, key: str) -> str:
    if key.isdigit():
        return f"{model}, prefill {int(key):,}, s"
    if rows := decode_rows(key):
        kind = {"t": ", top-p 0.9", "g": ", in a grammar"}.get(key[0], "")
        return f"{model}, decode{kind}, batch {rows}, tok/s"
    return f"{model}, {TITLES[key]}, {'ms' if key == 'mixed' else 's'}"


def _verdict(model: str, key: str, figure: float, ratio: float | None) -> tuple[str, str, str]:
    """The ratio, what it or the figure must be, and whether it is."""
    shown = "–" if ratio is None else f"{ratio:.3f}"
    if key in LIMITS:
        return shown, f"≤ {LIMITS[key]:g}", "ok" if figure <= LIMITS[key] else "short"
    must = MUST.get(model, {}).get(key)
    return shown, f"{must or ''}", "" if ratio is None or must is None else "ok" if ratio >= must else "short"


def _touched(name: str, engines: dict[str, Any], key: str) -> str:
    config, _ = MODELS[name]
    if not decode_rows(key) or not uniform(config, 1):
        return ""
    counts = [[run[f"touched_{key}"] for run in engines[e] if f"touched_{key}" in run] for e in ("emberline", "vllm")]
    own, peer = (f"{statistics.mean(each):.0f}" if each else "?" for each in counts)
    return f"{own} and {peer}, uniform {uniform(config, decode_rows(key)):.0f}"


def _all(runs: list[dict[str, Any]], key: str) -> list[float]:
    return [value for run in runs for value in run.get(key, [])]


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.4g} ({min(values):.4g}–{max(values):.4g})" if values else "–"


if __name__ == "__main__":
    raise SystemExit(main())
