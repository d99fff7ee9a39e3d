"""Start of a large model from the drive: `python -m benchmarks.gpu.large_start [--layers 4] [--work DIR] [--out FILE]`.

Kimi K2.5's shape cut to some layers is written with random weights, as a published checkpoint has them, and read by a
worker with a cold page cache: its rate beside that of plain direct reads, and how long after the last byte it is ready.
The bytes that the worker has read are told by the kernel, process by process.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

from benchmarks.gpu.engine import PROGRAM
from benchmarks.gpu.large_shapes import KIMI_9
from benchmarks.gpu.model_files import direct_rate, drop_from_page_cache

SEED = 1
WRITERS = 8
LOOK_S = 0.02  # between two looks at what was read
READ_SHARE = 0.95  # asked for: of the drive's rate
READY_S = 4.0  # asked for: from the last byte to the first request
_DTYPES = {"bf16": "BF16", "f32": "F32", "fp8": "F8_E4M3", "u8": "U8"}


def stored_tensors(document: dict[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...], Any]]:
    """Name, dtype, shape and bytes of each tensor of the published files."""
    from emberline.weights.generated import generate_tensors
    from emberline.weights.tensor_names import hf_name

    config, tensors = generate_tensors(document, SEED)
    for each in tensors:
        name, shape = hf_name(each.name, config), tuple(each.shape)
        if name.endswith(".weight_packed"):
            yield name, "I32", (*shape[:-1], shape[-1] // 4), each.raw
        else:
            yield name, _DTYPES[each.kind], shape, each.raw


def write_checkpoint(folder: Path, document: dict[str, Any]) -> int:
    """Write config.json and one file of weights, unless they are there. Returns the weights' bytes."""
    import numpy as np

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(document))
    header: dict[str, Any] = {}
    tensors, end = list(stored_tensors(document)), 0
    for name, dtype, shape, raw in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (end, end := end + prod(raw.shape))}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 4096)  # tensors then begin at a page
    path = folder / "model.safetensors"
    if path.exists() and path.stat().st_size == 8 + len(text) + end:
        return end
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()

        def put(name: str, raw: Any) -> None:
            at = 8 + len(text) + header[name]["data_offsets"][0]
            data = memoryview(np.ascontiguousarray(raw)).cast("B")
            while data:
                n = os.pwrite(file.fileno(), data, at)
                data, at = data[n:], at + n

        with ThreadPoolExecutor(WRITERS) as pool:
            list(pool.map(lambda each: put(each[0], each[3]), tensors))
    return end


def start(folder: Path, log: Path, *flags: str) -> dict[str, Any]:
    """Seconds after the process's start, and bytes read by then, of the first and the last bytes and of readiness."""
    with tempfile.TemporaryDirectory() as place, log.open("ab") as sink:
        command = [sys.executable, *PROGRAM, "--model", str(folder), "--socket", f"{place}/socket", *flags]
        began_s = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=sink, text=True)
        seen: list[tuple[float, int]] = []
        done = threading.Event()
        watcher = threading.Thread(target=_watch, args=(process.pid, began_s, seen, done))
        watcher.start()
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline() or "{}")
            ready_s = time.perf_counter() - began_s
        finally:
            done.set()
            watcher.join()
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
    if not ready.get("ready"):
        raise RuntimeError(f"the worker did not start: {ready.get('error')}; see {log}")
    return {"ready_s": ready_s, "seen": seen}


def _watch(pid: int, began_s: float, seen: list[tuple[float, int]], done: threading.Event) -> None:
    """Note how many bytes the process has had from the drive."""
    while not done.wait(LOOK_S):
        try:
            lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        except OSError:
            return
        n_bytes = next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))
        seen.append((time.perf_counter() - began_s, n_bytes))


def reading(seen: list[tuple[float, int]], n_bytes: int) -> dict[str, float]:
    """When 1 and 99 % of the weights were read, and the rate between; when the last bytes were."""
    last = max(n for _, n in seen)
    if last < n_bytes:
        raise RuntimeError(f"{last} bytes came from the drive of the {n_bytes} that the weights have")
    first_s = next(at for at, n in seen if n >= 0.01 * n_bytes)
    most_s = next(at for at, n in seen if n >= 0.99 * n_bytes)
    last_s = next(at for at, n in seen if n == last)
    return {
        "first_s": first_s,
        "last_s": last_s,
        "rate": 0.98 * n_bytes / (most_s - first_s),
        "read_gb": last / 1e9,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.large_start", description=__doc__)
    parser.add_argument("--layers", type=int, default=4, help="the first one is dense; 9 GB for each other one")
    parser.add_argument("--starts", type=int, default=2, help="the first compiles the kernels")
    parser.add_argument("--work", type=Path, default=Path("/tmp/emberline-start"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    folder = args.work / f"kimi-{args.layers}"
    began_s = time.perf_counter()
    n_bytes = write_checkpoint(folder, KIMI_9 | {"num_hidden_layers": args.layers})
    print(f"{n_bytes / 1e9:.1f} GB written in {time.perf_counter() - began_s:.1f} s", flush=True)
    figures: list[dict[str, Any]] = []
    for _ in range(args.starts):
        drop_from_page_cache(folder)
        drive = direct_rate(folder / "model.safetensors")
        drop_from_page_cache(folder)
        found = start(folder, args.work / "start.log", "--device", args.device)
        found |= reading(found.pop("seen"), n_bytes) | {"drive": drive}
        found |= {"share": found["rate"] / drive, "after_last_s": found["ready_s"] - found["last_s"]}
        found["ok"] = found["share"] >= READ_SHARE and found["after_last_s"] <= READY_S
        figures.append(found)
        print(json.dumps(found), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
