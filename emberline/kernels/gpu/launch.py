# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Launch helpers shared by all kernels: interpreter mode, launch options and programmatic dependent launch (PDL).

With PDL a kernel may start while its predecessor still runs. It may load weights, which no kernel writes, at once, and
must call `pdl_wait` before it touches anything else. Every program of every PDL kernel calls it, even one without work:
only then does the end of a kernel imply that all earlier kernels have ended.
PDL is 0 (off), 1 (the next kernel may start as soon as this one has) or 2 (once this one has finished reading).
"""

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from threading import get_ident
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from emberline.kernels.gpu.compile_server import CompileServer

_log = logging.getLogger(__name__)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_compiling = False
_prepared = False
SM_COUNT = 2 if INTERPRETED else 132  # of an H200


@cache
def sm_count() -> int:
    """Multiprocessors of this device, over which tiles are balanced; an H200's where there is none, to plan for one."""
    if INTERPRETED or not torch.cuda.is_available():
        return SM_COUNT
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


def supports_pdl() -> bool:
    """True if this device supports programmatic dependent launch."""
    return not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


@contextmanager
def compiling_only(server: CompileServer | None = None) -> Iterator[None]:
    """Inside, kernels are not launched but compiled, on all cores: on threads, or by the server's processes. Kernels of
    other threads, which pack weights meanwhile, are launched.

    Waits for the compilers in the end.
    """
    global _compiling
    thread = get_ident()
    kernel_class = triton.JITFunction
    run = kernel_class.run
    compile_kernel = triton.compile if server is None else server.compile

    def compile_and_build(source, **more):
        if _prepared:
            _warn_of(source)
        kernel = compile_kernel(source, **more)
        triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)  # by a C compiler, to a file
        return kernel

    def compile_only(self, *args, grid, warmup, **kwargs):
        if get_ident() != thread:
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)
        _ = self.device_caches[triton.runtime.driver.active.get_current_device()]  # its first use sets `compile`
        self.compile = compile_and_build
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool):
        kernel_class.run, _compiling = compile_only, True
        try:
            yield
        finally:
            kernel_class.run, _compiling = run, False


def warn_of_compiling() -> None:
    """Log, from now on, each kernel that a step still has to compile: requests wait for it."""
    global _prepared
    _prepared = True


def _warn_of(source: Any) -> None:
    aligned = sorted(source.fn.arg_names[path[0]] for path in source.attrs)  # as Triton specialized it
    constants = {source.fn.arg_names[path[0]]: str(value) for path, value in source.constants.items()}
    facts = {"aligned": ", ".join(aligned), "constants": constants}
    _log.warning("kernel %s was not prepared: a step waits until it is compiled", source.name, extra=facts)


def is_compiling() -> bool:
    """Inside `compiling_only`: a library need not compute anything either."""
    return _compiling


def launch_options(pdl: bool, **more: Any) -> dict[str, Any]:
    """Launch options such as num_warps; the interpreter accepts none of them."""
    if INTERPRETED:
        return {}
    return {**more, "launch_pdl": True} if pdl else more


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Wait until all preceding kernels have completed."""
    if PDL:
        gdc_wait()


@triton.jit
def pdl_launch_early(PDL: tl.constexpr):
    """Called at the start of a kernel: allow the next kernel to start."""
    if PDL == 1:
        gdc_launch_dependents()


@triton.jit
def pdl_launch_late(PDL: tl.constexpr):
    """Called after a kernel's last read: allow the next kernel to start."""
    if PDL == 2:
        gdc_launch_dependents()


@triton.jit
def prefetch_l2(rows, BYTES: tl.constexpr):
    """Prefetch BYTES (a power of two, at least 128) from each pointer into the L2 cache, without waiting."""
    lines = rows.to(tl.pointer_type(tl.int8))[:, None] + tl.arange(0, BYTES // 128)[None, :] * 128
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
    )


def next_power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
