"""Check and measure the GPU engine on this host. `--help` lists the sections."""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu import model_files, quick, report, workloads
from benchmarks.gpu.engine import Worker, compile_kernels, wait_until_prepared, worker
from benchmarks.gpu.start import in_subprocess, measure_starts, write_model
from benchmarks.gpu.workloads import Prompts

SERVED = {"decode", "burst", "prefill", "throughput", "agentic", "mixed", "context"}  # measured in one worker process
SECTIONS = ("kernels", "models", *sorted(SERVED), "start", "bursts", "deterministic", "smollm2")
PEER = Path(__file__).parents[1] / "peers" / "vllm_gpu.py"


def main() -> int:
    args = _parse()
    if args.quick:
        return quick.run(args.work, args.out, args.vllm, args.limit_s)
    args.work.mkdir(parents=True, exist_ok=True)
    before = json.loads(args.out.read_text()) if args.add and args.out.exists() else {"emberline": {}, "vllm": {}}
    figures: dict[str, Any] = before["emberline"] | {"device": _device()}
    peer: dict[str, Any] = before["vllm"]
    for name, measure in _plan(args).items():
        if name in args.only or (name == "served" and SERVED.intersection(args.only)):
            _section(name, measure, figures, peer, args)
    if args.vllm is not None:
        _section("vllm", lambda: _vllm(args, peer), figures, peer, args)
    _save(args, figures, peer)
    print(report.table(figures, peer))
    return 1 if figures.get("failed") else 0


def _plan(args: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """The sections in their order."""
    folder = args.work / "llama-8b"
    return {
        "kernels": lambda: _kernels(),
        "models": lambda: _models(),
        "served": lambda: _served(folder, args),
        "start": lambda: {"start": measure_starts(folder, args.work)},
        "bursts": lambda: _bursts(args),
        "deterministic": lambda: _deterministic(args),
        "smollm2": lambda: _smollm2(args),
    }


def _section(
    name: str, measure: Callable[[], Any], figures: dict[str, Any], peer: dict[str, Any], args: argparse.Namespace
) -> None:
    """Run a section; a failure is reported and the next sections still run, as device time is expensive."""
    begin = time.perf_counter()
    try:
        found = measure()
    except Exception as error:
        if args.strict:
            raise
        figures.setdefault("failed", {})[name] = f"{type(error).__name__}: {error}"[:2000]
        print(f"{name}: FAILED: {error}", flush=True)
    else:
        if isinstance(found, dict):
            figures |= found
        print(f"{name}: {time.perf_counter() - begin:.1f} s {json.dumps(found)}", flush=True)
    _save(args, figures, peer)


def _kernels() -> dict[str, Any]:
    return {"kernels": in_subprocess("from benchmarks.gpu import kernels; print(json.dumps(kernels.check()))")}


def _models() -> dict[str, Any]:
    return {
        "models": in_subprocess("from benchmarks.gpu import checks; print(json.dumps(checks.against_transformers()))")
    }


def _served(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    begin = time.perf_counter()
    n_bytes = write_model(folder, 32)
    figures["written_s"] = time.perf_counter() - begin
    flags = ("--max-running", str(args.max_running))
    if not args.compiled:
        figures["compiled_s"] = compile_kernels(folder, args.work / "worker.log", *flags)
    with worker(folder, args.work / "worker.log", *flags) as engine:
        figures["ready_s"], figures["all_captured_s"] = (
            engine.ready_s,
            wait_until_prepared(engine, args.work / "worker.log"),
        )
        figures["memory"] = _memory(engine, n_bytes)
        client, prompts = engine.client, Prompts(0)
        client.generate(prompts.many(2, 64), 8)

        def part(name: str, measure: Callable[[], Any]) -> None:
            begun = time.perf_counter()
            if name.partition(".")[0] in args.only:
                figures[name.rpartition(".")[2]] = found = measure()
                print(f"  {name}: {time.perf_counter() - begun:.1f} s {json.dumps(found)}", flush=True)

        try:
            part("decode", lambda: {f"b{b}": workloads.decode(client, prompts, b) for b in args.batches})
            part("decode.warm", lambda: {f"b{b}": workloads.decode(client, prompts, b, 0.7) for b in (1, 64)})
            for b in (1, 64, 256):
                part(f"decode.cpu_ms_per_step_b{b}", lambda b=b: 1e3 * workloads.cpu_per_step(engine, prompts, b))
            part("burst", lambda: workloads.burst(client, prompts))
            part("prefill", lambda: {str(n): workloads.prefill(client, prompts, n) for n in (8192, 32768)})
            part("throughput", lambda: workloads.throughput(client, prompts))
            part("agentic", lambda: workloads.agentic(client, prompts))
            part("mixed", lambda: {f"every_{s}s": workloads.mixed(client, prompts, s) for s in args.every})
            part("context.whole_context_s", lambda: workloads.whole_context(client, prompts, client.info.context_len))
        except Exception as error:  # keep what was measured before
            figures["failed"] = {"served": f"{type(error).__name__}: {error}"}
        figures["memory_after"] = _memory(engine, n_bytes)
    return figures


def _memory(engine: Worker, weights: int) -> dict[str, float]:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    used = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[0]) << 20
    kv = int(str(engine.facts["kv_bytes"]))
    gib = 1 << 30
    return {
        "used_gib": used / gib,
        "kv_gib": kv / gib,
        "kv_tokens": float(str(engine.facts["kv_tokens"])),
        "beside_gib": (used - weights - kv) / gib,
    }


def _bursts(args: argparse.Namespace) -> dict[str, Any]:
    """First bursts of requests to a quantized model, right after its start, with and without compiled kernels."""
    path = args.work / "smollm2-shape.gguf"
    model_files.write_gguf(path)
    found: dict[str, Any] = {}
    for name in ("empty", "cached"):
        env = {"TRITON_CACHE_DIR": str(args.work / "triton-of-bursts")}
        with worker(path, args.work / "bursts.log", env=env) as engine:
            prompts = Prompts(11, engine.client.info.vocab_size)
            sizes = {n: workloads.first_burst(engine.client, prompts, n) for n in (64, 16, 200)}
            again = workloads.first_burst(engine.client, prompts, 64)
            prepared_s = wait_until_prepared(engine, args.work / "bursts.log")
            prepared = workloads.first_burst(engine.client, prompts, 64)
        found[name] = {
            "ready_s": engine.ready_s,
            **{f"first_{n}": burst for n, burst in sizes.items()},
            "second_64": again,
            "prepared_s": prepared_s,
            "prepared_64": prepared,
        }
    return {"bursts": found}


def _deterministic(args: argparse.Namespace) -> dict[str, Any]:
    folder = args.work / "llama-8b-short"
    write_model(folder, 6)
    with worker(folder, args.work / "deterministic.log", "--deterministic", "--kv-bytes", str(8 << 30)) as engine:
        return {"deterministic": {"same_in_any_batch": workloads.same_in_any_batch(engine.client, Prompts(5))}}


def _smollm2(args: argparse.Namespace) -> dict[str, Any]:
    if args.smollm2 is None:
        return {}
    with worker(args.smollm2, args.work / "smollm2.log") as engine:
        prompts = Prompts(7, engine.client.info.vocab_size)
        found = workloads.decode(engine.client, prompts, 1)
        return {"smollm2": {"tok_s": found["steady_tok_s"], "ready_s": engine.ready_s}}


def _vllm(args: argparse.Namespace, peer: dict[str, Any]) -> None:
    """Fill `peer`. vLLM holds the device until its process ends, so each part has a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(args.vllm), "TRITON_CACHE_DIR": str(args.work / "triton-vllm")}
    parts: list[tuple[str, ...]] = [(), *(("--mixed", budget) for budget in args.vllm_mixed)]
    for part in parts:
        out = args.work / f"vllm{'-'.join(part)}.json"
        with (args.work / "vllm.log").open("ab") as log:
            done = subprocess.run([sys.executable, str(PEER), str(out), *part], env=env, stdout=log, stderr=log)
        found = json.loads(out.read_text()) if out.exists() else {}
        peer |= {"mixed": {"every_0.5s": next(iter(found.values()))}} | found if part and found else found
        print(f"  vllm {' '.join(part)}: {json.dumps(found)}", flush=True)
        done.check_returncode()


def _device() -> str:
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        raise SystemExit("no CUDA device: nvidia-smi finds none") from None


def _save(args: argparse.Namespace, figures: dict[str, Any], peer: dict[str, Any]) -> None:
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"emberline": figures, "vllm": peer}, indent=1))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("/tmp/emberline-gpu"), help="working folder with 20 GB free")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="the figures as JSON")
    parser.add_argument("--add", action="store_true", help="add to the figures already in --out")
    parser.add_argument(
        "--only", nargs="*", default=SECTIONS, choices=SECTIONS, metavar="SECTION", help=f"of {', '.join(SECTIONS)}"
    )
    parser.add_argument("--batches", nargs="+", type=int, default=list(workloads.BATCHES))
    parser.add_argument(
        "--every",
        nargs="+",
        type=float,
        default=[0.5],
        metavar="S",
        help="between prompts in `mixed`",
    )
    parser.add_argument("--max-running", type=int, default=256)
    parser.add_argument("--compiled", action="store_true", help="Triton's cache is warm: skip compiling kernels")
    parser.add_argument("--smollm2", type=Path, metavar="GGUF", help="real weights")
    parser.add_argument("--vllm", type=Path, metavar="DIR", help="folder of an installed vLLM")
    parser.add_argument("--vllm-mixed", nargs="*", default=["8192"], metavar="N", help="its token budgets in `mixed`")
    parser.add_argument(
        "--quick", action="store_true", help="only the comparison with vLLM, offline and over HTTP, in about 8 minutes"
    )
    parser.add_argument("--limit-s", type=float, default=580.0, help="of --quick: end the part that runs by then")
    parser.add_argument("--strict", action="store_true", help="stop at the first failure")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
