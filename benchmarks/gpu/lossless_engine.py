"""A whole model with `--weights plain` and `compressed` on this GPU: `python -m benchmarks.gpu.lossless_engine`.

A Llama-3.1-8B of random weights: tokens per second by batch, seconds of a prompt, room for KV, and the seconds from a
cold drive until the engine is ready, from the source's folder and, with the package zstandard, from the compressed one.
A shorter model of that shape decodes in deterministic mode: its tokens must be the same. Prints a table and, with
--out, JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.gpu import workloads
from benchmarks.gpu.engine import wait_until_prepared, worker
from benchmarks.gpu.model_files import PIECE_BYTES, drop_from_page_cache
from benchmarks.gpu.start import write_model
from benchmarks.gpu.workloads import Prompts

STORAGES = ("plain", "compressed")
PARTS = ("decode", "deterministic", "start")
PHASE_LINES = ("started in", "weights were read", "the essential steps are prepared")


def decode(args: argparse.Namespace, storage: str) -> dict[str, Any]:
    """Tokens per second by batch, seconds of prompts, and the room for KV."""
    folder, log = args.work / "llama-8b", args.work / f"{storage}.log"
    write_model(folder, args.layers)
    found: dict[str, Any] = {}
    with worker(folder, log, "--weights", storage, "--max-running", "256") as engine:
        found["ready s"] = engine.ready_s
        wait_until_prepared(engine, log)
        found["KV GiB"] = int(str(engine.facts["kv_bytes"])) / (1 << 30)
        prompts = Prompts(0)
        engine.client.generate(prompts.many(2, 64), 8)
        for batch in args.batches:
            found[f"batch {batch}"] = workloads.decode(engine.client, prompts, batch)["steady_tok_s"]
        found["prefill 8192 s"] = workloads.prefill(engine.client, prompts, 8192)
    return found


def deterministic(args: argparse.Namespace, storage: str) -> list[list[int]]:
    """The tokens of several requests, one at a time and together."""
    folder, log, prompts = args.work / "llama-8b-short", args.work / f"{storage}-deterministic.log", Prompts(5)
    write_model(folder, 4)
    requests = [(prompts.of(60 + i * 41), 24) for i in range(12)]
    flags = ("--deterministic", "--weights", storage, "--kv-bytes", str(8 << 30))
    with worker(folder, log, *flags) as engine:
        alone, together = (workloads.closed_loop(engine.client, requests, n) for n in (1, 8))
        if alone != together:
            raise AssertionError(f"{storage}: a batch changes the tokens in deterministic mode")
        return alone


def start(args: argparse.Namespace, _: str) -> dict[str, Any]:
    """Seconds from a cold drive until the engine is ready, in turn, the first round not counted; then with the weights
    in the page cache. Each with its phases, and with what the threads did that read the weights."""
    source, packed, log = args.work / "llama-8b", args.work / "llama-8b-lossless", args.work / "start.log"
    write_model(source, args.layers)
    begin = time.perf_counter()
    if not packed.exists():
        subprocess.run([sys.executable, "-m", "emberline.cli.main", "compress", str(source)], check=True)
    found: dict[str, Any] = {"compress s": time.perf_counter() - begin}
    plans = {"plain": (source, "plain"), "disk": (packed, "plain"), "disk and memory": (packed, "compressed")}
    for turn, name in [(turn, name) for turn in ("first", "cold", "cached") for name in plans]:
        folder, storage = plans[name]
        if turn != "cached":
            drop_from_page_cache(source)
            drop_from_page_cache(packed)
        else:
            read_files(folder)
        with worker(folder, log, "--weights", storage) as engine:
            engine.client.generate([Prompts(3).of(64)], 1)
            total_s = time.perf_counter() - engine.began_s
            found[f"{turn} {name}"] = {"s": total_s, **phases(log, engine.log_start)}
        print(f"  start {turn} {name}: {total_s:.2f} s {found[f'{turn} {name}']}", flush=True)
    return found


def read_files(folder: Path) -> None:
    """Have the weights of a folder in the page cache."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file, ThreadPoolExecutor(8) as threads:
            for at in range(0, path.stat().st_size, PIECE_BYTES):
                threads.submit(os.pread, file.fileno(), PIECE_BYTES, at)


def phases(log: Path, log_start: int) -> dict[str, Any]:
    """The fields of the log lines that tell where the time of a start went."""
    found: dict[str, Any] = {}
    for line in log.read_bytes()[log_start:].splitlines():
        with suppress(ValueError):
            record = json.loads(line)
            if any(record["message"].startswith(text) for text in PHASE_LINES):
                found |= {key: value for key, value in record.items() if isinstance(value, int | float | dict)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("/tmp/emberline-lossless"), help="folder with 40 GB free")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 64, 256])
    parser.add_argument("--only", nargs="*", default=PARTS, choices=PARTS)
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Any]] = {}
    for part, run in {"decode": decode, "deterministic": deterministic}.items():
        if part in args.only:
            found[part] = {storage: measure(f"{part} {storage}", run, args, storage) for storage in STORAGES}
    for name, plain in (found.get("decode", {}).get("plain") or {}).items():
        packed = (found["decode"]["compressed"] or {}).get(name, float("nan"))
        print(f"{name:16} plain {plain:10.2f}  compressed {packed:10.2f}  {packed / plain:.3f}x", flush=True)
    if "deterministic" in found:
        plain, packed = (found["deterministic"][storage] for storage in STORAGES)
        same = plain is not None and plain == packed
        print(f"deterministic: {'the same tokens' if same else 'OTHER TOKENS'}", flush=True)
    if "start" in args.only:
        found["start"] = measure("start", start, args, "")
        print(f"start: {found['start']}", flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1))


def measure(
    name: str, run: Callable[[argparse.Namespace, str], Any], args: argparse.Namespace, storage: str
) -> Any:  # fmt: skip
    """Run one part. A failure is reported and the next parts still run, as device time is expensive."""
    begin = time.perf_counter()
    try:
        return run(args, storage)
    except Exception as error:
        print(f"{name} FAILED: {type(error).__name__}: {error}", flush=True)
        return None
    finally:
        print(f"{name}: {time.perf_counter() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main()
