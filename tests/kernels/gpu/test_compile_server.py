"""The compile server with the real compiler, for a GPU that need not be there."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from emberline.kernels.gpu import compile_server
from emberline.kernels.gpu.compile_server import start_server
from tests.kernels.gpu.test_compiles import HOPPER

PROGRAM = """
import json, sys, time
from pathlib import Path
from types import SimpleNamespace
import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from emberline.kernels.gpu import elementwise
from emberline.kernels.gpu.compile_server import CompileServer
from emberline.kernels.gpu.launch import compiling_only

function = elementwise._embedding
types = ["*bf16", "*i32", "*bf16", "i32", "fp32", "i32", "i32", "constexpr", "constexpr"]
signature = dict(zip(function.arg_names, types, strict=True))
some, block_size = (7,), (8,)
target = GPUTarget("cuda", 90, 32)
cache = Path(sys.argv[1])

def compiled():
    return len(list(cache.glob("*/_embedding.cubin")))

def source(block):
    return ASTSource(function, signature, {some: False, block_size: block}, {})

server = CompileServer(2)
language = ("triton.compiler.compiler", "ASTSource")
constants = {some: False, block_size: 128}
job = (function.__module__, "_embedding", language, signature, constants, {}, ("cuda", 90, 32), {"num_warps": 4})
server._submit(job).result()
by_server = compiled()
kernel = server.compile(source(128), target, {"num_warps": 4})
found = compiled()
wrong = server._submit(("emberline.kernels.gpu.elementwise", "missing", language, {}, {}, {}, ("cuda", 90, 32), {}))
wrong.result()
server._submit(("noisy", "missing", language, {}, {}, {}, ("cuda", 90, 32), {})).result(timeout=300)
gluon = ("triton.experimental.gluon._runtime", "GluonASTSource")
types = {"tensor": f"tensordesc<bf16[64, 64],{shared}>", "numbers": "*i32", "N": "constexpr"}
server._submit(("written", "write", gluon, types, {(2,): 64}, {}, ("cuda", 90, 32), {"num_warps": 4})).result()
of_gluon = len(list(cache.glob("*/write.cubin")))
server.close()
kernel2 = server.compile(source(256), target, {"num_warps": 4})


built = []


class Driver:
    def launcher_cls(self, source, metadata):
        built.append(metadata)

    def get_current_target(self):
        return target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


class Asked(list):
    def compile(self, source, **more):
        self.append(source.name)
        return SimpleNamespace(src=source, metadata=source.name)


triton.runtime.driver.set_active(Driver())
asked = Asked()
with compiling_only(asked):
    for width in (64, 65, 66):
        elementwise.embedding(torch.zeros(8, width), torch.zeros(3, dtype=torch.int32), 1.0, torch.empty(3, width))
backend, context = make_backend(target), ir.context()
options = backend.parse_options({"num_warps": 8})
ir.load_dialects(context)
backend.load_dialects(context)
rest = backend.get_codegen_implementation(options), backend.get_module_map(), context
assert "warp_specialize" in str(gluon_source.make_ir(target, options, *rest)), "a kernel in Gluon"
print(json.dumps([by_server, found, of_gluon, compiled(), asked, built, kernel.name, kernel2.name]))
"""
GLUON = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

@gluon.jit
def write(tensor, numbers, N: gl.constexpr):
    at = gl.arange(0, N, layout=gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(numbers + at, at)
"""


def test_compiles_in_other_processes_and_goes_on_without_them(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    (tmp_path / "noisy.py").write_text("print('a kernel that the assembler rejected\\n' * 9999)")
    (tmp_path / "written.py").write_text(GLUON)
    paths = ":".join([*sys.path, str(tmp_path)])
    cache = tmp_path / "cache"
    environment = {"TRITON_CACHE_DIR": str(cache), "PATH": "/usr/bin:/bin", "PYTHONPATH": paths}
    command = [sys.executable, "-c", HOPPER + PROGRAM, str(cache)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-2000:]
    by_server, found, of_gluon, after_close, asked, built, *names = json.loads(done.stdout.splitlines()[-1])
    assert by_server == 1  # the server's process left it in the cache
    assert found == 1  # and the engine's call took it from there
    assert of_gluon == 1  # a kernel in Gluon, likewise
    assert after_close == 2  # without a server it compiles by itself
    assert asked == ["_embedding"] * 2  # for widths that are multiples of 16 and others; also a kernel's first one
    assert built == asked  # their launchers are C, and compiled as well
    assert names == ["_embedding", "_embedding"]


def test_a_server_is_started_for_a_model_whose_kernels_were_never_compiled_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_server.os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(compile_server, "CompileServer", lambda n_processes, note: note)
    note: Any = start_server("a model")
    assert note.parent == tmp_path
    assert start_server("a model") == note
    note.touch()  # as a server does that has compiled something
    assert start_server("a model") is None
    assert start_server("another") not in (None, note)
    monkeypatch.setattr(compile_server.os, "sched_getaffinity", lambda _: range(2))
    assert start_server("another") is None, "no cores for it"
