"""The compile server with the real compiler, for a GPU that need not be there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, sys, time
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from emberline.kernels.gpu import elementwise
from emberline.kernels.gpu.compile_server import CompileServer

function = elementwise._embedding
signature = {"weight": "*bf16", "ids": "*i32", "out": "*bf16", "width": "i32", "factor": "fp32", "BLOCK": "constexpr"}
target = GPUTarget("cuda", 90, 32)
cache = Path(sys.argv[1])

def compiled():
    return len(list(cache.glob("*/_embedding.cubin")))

def source(block):
    return ASTSource(function, signature, {(5,): block}, {})

server = CompileServer(2)
job = (function.__module__, "_embedding", signature, {(5,): 128}, {}, ("cuda", 90, 32), {"num_warps": 4})
server._submit(job).result()
by_server = compiled()
kernel = server.compile(source(128), target, {"num_warps": 4})
found = compiled()
wrong = server._submit(("emberline.kernels.gpu.elementwise", "missing", {}, {}, {}, ("cuda", 90, 32), {}))
wrong.result()
server._submit(("noisy", "missing", {}, {}, {}, ("cuda", 90, 32), {})).result(timeout=60)
server.close()
kernel2 = server.compile(source(256), target, {"num_warps": 4})
print(json.dumps([by_server, found, compiled(), kernel.name, kernel2.name]))
"""


def test_compiles_in_other_processes_and_goes_on_without_them(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    (tmp_path / "noisy.py").write_text("print('a kernel that the assembler rejected\\n' * 9999)")
    paths = ":".join([*sys.path, str(tmp_path)])
    cache = tmp_path / "cache"
    environment = {"TRITON_CACHE_DIR": str(cache), "PATH": "/usr/bin:/bin", "PYTHONPATH": paths}
    command = [sys.executable, "-c", PROGRAM, str(cache)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    by_server, found, after_close, *names = json.loads(done.stdout.splitlines()[-1])
    assert by_server == 1  # the server's process left it in the cache
    assert found == 1  # and the engine's call took it from there
    assert after_close == 2  # without a server it compiles by itself
    assert names == ["_embedding", "_embedding"]
