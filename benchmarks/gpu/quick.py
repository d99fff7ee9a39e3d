"""Ours, vLLM and both over HTTP within ten minutes on one GPU: the short form of `large_models` and `http`.

Each part runs in a process of its own and writes its figures as they come: the table shows whatever was measured when
the time is up.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.process import ended_by_sigterm

BATCHES, PROMPTS = (1, 5, 24, 64, 96, 256), (8192, 32768)
STREAMS = (1, 32, 64, 128, 256)
# Minimum ratios to vLLM.
DECODE_MUST = dict(zip(BATCHES, (1.23, 1.20, 1.18, 1.16, 1.14, 1.14)))
PREFILL_MUST = dict(zip(PROMPTS, (1.04, 1.03)))
HTTP_MUST = dict(zip(STREAMS, (1.22, 1.18, 1.15, 1.12, 1.12)))
MODEL = "bf16"  # of `large_models`: Llama's 8B shape


def run(work: Path, out: Path, vllm: Path | None, limit_s: float) -> int:
    """Measure, write the figures to `out` and print the table. Returns 1 if a part failed or had no time."""
    ended_by_sigterm()
    end_s = time.perf_counter() + limit_s
    work.mkdir(parents=True, exist_ok=True)
    offline, served = work / "quick-offline.json", work / "quick-http.json"
    failed: dict[str, str] = {}
    for file in offline, served:
        file.unlink(missing_ok=True)
    for engine in ("emberline", "vllm") if vllm else ("emberline",):
        for name, command in _parts(engine, work, offline, served).items():
            begin = time.perf_counter()
            if error := _run([*command, *(["--vllm", str(vllm)] if vllm else [])], end_s - begin):
                failed[name] = error
            print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)
    figures: dict[str, Any] = {
        "offline": _read(offline).get(MODEL, {}),
        "http": _read(served),
        "failed": failed,
    }
    out.write_text(json.dumps(figures, indent=1))
    print(table(figures))
    return 1 if failed else 0


def _run(command: list[str], limit_s: float) -> str:
    """Run a module with its arguments. Returns why it did not succeed; its servers have ended in any case."""
    if limit_s <= 0:
        return "no time left"
    part = subprocess.Popen([sys.executable, "-m", *command])
    try:
        status = part.wait(limit_s)
    except subprocess.TimeoutExpired:
        return "no time left to finish"
    finally:
        part.terminate()  # does nothing if it has ended
        part.wait()
    return f"it ended with status {status}" if status else ""


def _parts(engine: str, work: Path, offline: Path, served: Path) -> dict[str, list[str]]:
    """Modules of an engine's parts, with their arguments."""
    workloads = [*(f"b{n}" for n in BATCHES), *map(str, PROMPTS), "throughput", "agentic"]
    common = ["--engines", engine, "--add", "--work", str(work)]
    alone = ["benchmarks.gpu.large_models", MODEL, *common, "--out", str(offline), "--only", *workloads]
    streams = ["benchmarks.gpu.http", *common, "--out", str(served), "--streams", *map(str, STREAMS)]
    return {
        f"{engine} alone": [*alone, "--starts", "1", "--repeats", "1", "--compiled"],
        f"{engine} over HTTP": [*streams, "--repeats", "2"],
    }


def _read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def table(figures: dict[str, Any]) -> str:
    """Ours, vLLM's, the ratio that is above 1 where ours is better, and the minimum ratio."""
    rows = [("", "Emberline", "vLLM", "ratio", "must")]

    def add(title: str, own: float | None, peer: float | None, must: float, more_is_better: bool = True) -> None:
        ratio = None if not own or not peer else own / peer if more_is_better else peer / own
        cells = (f"{each:.5g}" if each else "–" for each in (own, peer))
        verdict = "" if ratio is None else " ok" if ratio >= must else " short"
        rows.append((title, *cells, "–" if ratio is None else f"{ratio:.3f}", f"{must:.2f}{verdict}"))  # type: ignore[arg-type]

    def alone(engine: str, key: str) -> float | None:
        found = [value for start in figures["offline"].get(engine, []) for value in start.get(key, [])]
        return found[0] if found else None

    def http(engine: str, n: int) -> float | None:
        found: float | None = figures["http"].get(engine, {}).get(f"streams_{n}", {}).get("tok_s")
        return found

    for n, must in DECODE_MUST.items():
        add(f"decode, batch {n}, tok/s", alone("emberline", f"b{n}"), alone("vllm", f"b{n}"), must)
        add("  while all rows decode", alone("emberline", f"steady_b{n}"), None, must)
    for n, must in PREFILL_MUST.items():
        add(f"prefill {n:,}, s", alone("emberline", str(n)), alone("vllm", str(n)), must, False)
    for key, title, must in (("throughput", "512 × 1,024/256, s", 1.04), ("agentic", "agentic 32 × 8, s", 1.35)):
        add(title, alone("emberline", key), alone("vllm", key), must, False)
    for n, must in HTTP_MUST.items():
        add(f"HTTP, {n} streams, tok/s", http("emberline", n), http("vllm", n), must)
    for part, error in figures["failed"].items():
        rows.append((f"{part}: {error.splitlines()[-1]}", "", "", "", ""))
    widths = [max(len(row[i]) for row in rows[: len(rows) - len(figures["failed"])]) for i in range(5)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)
