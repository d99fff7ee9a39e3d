"""How long an engine takes to start with a model on the drive, beyond the time that reading it takes."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu import model_files
from benchmarks.gpu.engine import worker
from benchmarks.gpu.workloads import Prompts


def in_subprocess(code: str, *arguments: str) -> Any:
    """Run Python code in a process of its own, which frees the device when it ends; returns the JSON it prints."""
    command = [sys.executable, "-c", f"import json, sys; from pathlib import Path; {code}", *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])
    return json.loads(done.stdout.splitlines()[-1])


def write_model(folder: Path, n_layers: int) -> int:
    """Write a model of random weights unless it exists; returns its bytes."""
    code = "from benchmarks.gpu.model_files import LLAMA_8B as shape, write"
    code += "; print(write(Path(sys.argv[1]), shape | {'num_hidden_layers': int(sys.argv[2])}))"
    return int(in_subprocess(code, str(folder), str(n_layers)))


def measure_starts(folder: Path, work: Path) -> dict[str, Any]:
    """Seconds from process start to the first token with a cold page cache, with and without compiled kernels."""
    n_bytes = write_model(folder, 32)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=work) as kernels:
        for name in ("empty", "cached"):
            model_files.drop_from_page_cache(folder)
            rate = model_files.direct_rate(folder / "model.safetensors")
            model_files.drop_from_page_cache(folder)
            with worker(folder, work / "start.log", env={"TRITON_CACHE_DIR": kernels}) as engine:
                engine.client.generate([Prompts(3).of(64)], 1)
                first_s = time.perf_counter() - engine.began_s
            found[name] = {
                "first_token_s": first_s,
                "ready_s": engine.ready_s,
                "disk_gb_s": rate / 1e9,
                "beyond_disk_s": first_s - n_bytes / rate,
            }
    return found
