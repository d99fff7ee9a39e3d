"""Kernels by the real compiler, for a GPU that need not be there: of experts, around drafts, between stages, with
assembly, and in Gluon.

The interpreter runs what a compiler rejects, such as a name that changes its type inside a branch.
"""

import subprocess
import sys
from pathlib import Path

import pytest

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def compiled(kernel, types, **constants):
    names = [name for name in kernel.arg_names if name not in constants]
    signature = dict(zip(names, types, strict=True))
    divisible = {(n,): [["tt.divisibility", 16]] for n, kind in enumerate(types) if kind.startswith("*")}
    source = ASTSource(kernel, signature, constants, divisible)
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})

"""
EXPERTS = """
from emberline.kernels.gpu.expert_loading import _interleave
from emberline.kernels.gpu.grouped_gemm import _combine_pairs, _grouped_gemm
from emberline.kernels.gpu.backend.moe_block import _mark_valid
from emberline.kernels.gpu.moe_routing import _norm_and_route, _route

compiled(_interleave, ["*u8", "*i16", *["i32"] * 4], ROWS=64, HALVES_=32, TILES=64)
compiled(_combine_pairs, ["*bf16", "*i32", "*bf16", "i32", "i32"], SLOTS=8, COLS=1024, PDL=1)
compiled(_mark_valid, [*["*i32"] * 5, "i32", "i32"], NULL=0, ROWS=128)
shapes = {"TOP_K": 8, "SLOTS": 16, "LOCAL": 512, "BLOCK_TOKENS": 16, "FIELDS": 4, "PDL": 1}
routing = ["*fp32", "*fp32", "*i32", "*i32", "*fp32", *["*i32"] * 4, *["i32"] * 5, "fp32"]
for groups, experts, shared in ((8, 256, 0), (1, 64, 1)):
    more = {"SIGMOID": 1, "NORMALIZE": 1, "GROUPS": groups, "TOP_GROUPS": 1, "EXPERTS": experts, "N_SHARED": shared}
    compiled(_route, routing, **shapes, **more, CORRECTED=1, MASKED=1)
    one = ["*bf16", "*fp32", "*bf16", "*fp32", "*bf16", "*fp32", *routing[1:9], "i32", "fp32", *["i32"] * 4, "fp32"]
    compiled(_norm_and_route, one, **shapes, **more, CORRECTED=1, MASKED=1, BIAS=1, ROWS=2, WIDTH=2048)
for number, (codes, scale, words) in enumerate(
    (("*bf16", "*bf16", 0), ("*i16", "*i32", 2), ("*i16", "*i32", 1), ("*u8", "*fp32", 0), ("*u8", "*fp32", 0))
):
    types = ["*bf16", codes, scale, "*bf16", "*fp32", "*bf16", *["*i32"] * 3, *["i32"] * 5]
    tile = {"COLS": 128, "TOKENS": 16, "STAGES": 3, "BLOCK": 64, "FIELDS": 4, "PDL": 2}
    more = {"FORMAT": number, "WORDS": words, "SLOTS": 8, "GATE": 1, "BIAS": 1, "WEIGHT": 2, "EVEN": 0}
    for rows in (64, 128) if codes == "*i16" else (64,):
        compiled(_grouped_gemm, types, ROWS=rows, **tile, **more)
print("compiled")
"""
DRAFTS = """
from emberline.kernels.gpu.decode_inputs import _accept, _prepare
from emberline.kernels.gpu.draft_chain import _carry, _keep_accepted
from emberline.kernels.gpu.sampler import _scan
from emberline.kernels.gpu.split_kv import _plan_decode_splits
from emberline.kernels.gpu.verify_attention import _verify_attention

for header, most in ((3, 1), (5, 16)):
    inputs = [*["*i32"] * 14, *["i32"] * 5]
    compiled(_prepare, inputs, HEADER=header, GROUPS=2, ENTRIES=1024, MAX_TOKENS=most, MAX_DRAFTS=8)
counted = [*["*i32"] * 6, "*i16", *["*i32"] * 3, "i32"]
compiled(_accept, counted, FIELDS=16, MAX_TOKENS=16, GUIDED=0)
for drafts in (0, 1):
    hidden = ["*bf16", *["*i32"] * 3, "*bf16", "*i32", "*bf16", "i32"]
    compiled(_carry, hidden, DRAFTS=drafts, BLOCK=1024)
    for shared in (0, 1):
        splits = [*["*i32"] * 4, *["i32"] * 6]
        compiled(_plan_decode_splits, splits, DRAFTS=drafts, SHARED=shared, LOCAL=0, MIN=64, ROWS=256, ITEMS=32)
    scanned = ["*fp32", *["*i32"] * 5, "*i32", "*fp32", "*i32", "*i16", *["*fp32"] * 3, "*i32", "i32", "i32"]
    limits = {"MAX_EDITS": 2048, "MAX_TOP": 20, "MAX_LISTED_K": 256, "CHUNK_STATS": 16, "CHUNK": 4096, "SPAN": 256}
    compiled(_scan, scanned, FIELDS=16, **limits, GUIDED=0, DRAFTS=drafts)
compiled(_keep_accepted, ["*bf16", *["*i32"] * 4, "*bf16", "*i32", "i32"], BLOCK=1024)
cache = ["*bf16", *["*i32"] * 3, "*fp32", "*i32", "*bf16"]
attention = ["*bf16", "*bf16", "*fp32", "*fp32", "*bf16", "*bf16", *cache, *["fp32"] * 3, *["i32"] * 4]
for local in (0, 1):
    tile = {"GROUP": 4, "QUERIES": 64, "NEW": 16, "DIM": 128, "PAD": 128, "TILE": 32, "STAGES": 6}
    compiled(_verify_attention, attention, **tile, OPS=2, ALIGNED=1, LOCAL=local, SINKS=local, PDL=1)
print("compiled")
"""
GEMV = """
from emberline.kernels.gpu.fp8_gemm import _fp8_gemv
from emberline.kernels.gpu.quantized_gemm import _quantized_gemv

for gate in (0, 1):
    shared = {"NORM": 1, "BIAS": 0, "GATE": gate, "ADD": 1 - gate, "PDL": 1}
    for block in (0, 128):
        types = ["*bf16", "*i32", "*fp32", "*bf16", "*fp32", "*bf16", "i32", "i32", "fp32"]
        compiled(_fp8_gemv, types, **shared, ROW_BLOCK=block, ROWS=2, WORDS=1024)
    for bits in (4, 8):
        types = ["*bf16", "*i32", "*i32", "*bf16", "*fp32", "*bf16", *["i32"] * 5, "fp32"]
        compiled(_quantized_gemv, types, **shared, BITS=bits, ROWS=8, WORDS=128)
print("compiled")
"""
STAGES = """
from emberline.kernels.gpu.peer_stages import _recv, _send

for kernel in (_send, _recv):
    for item in ("*bf16", "*fp32"):
        sizes = {"MAX_BYTES": 8 << 20, "DATA_AT": 256, "BLOCK": 2048}
        compiled(kernel, [item, "*i64", "*i64", "i32"], RANK=1, **sizes)
print("compiled")
"""
SHARES = """
from emberline.kernels.gpu.mla.shares import _merge_shares

rows = next(param for param in _merge_shares.params if param.name == "rows")
sizes = {"SHARES": 8, "WIDTH": 520, "LSE_STRIDE": 260, "LATENT": 512, "LATENT_PAD": 512, "RANKS": 8}
one = {} if rows.do_not_specialize else {"rows": 1}  # as Triton compiles it for one token of one head
types = {"parts": "*bf16", "lse": "*fp32", "out": "*bf16", "rows": "constexpr" if one else "i32"}
source = ASTSource(_merge_shares, types | dict.fromkeys(sizes, "constexpr"), sizes | one, {})
triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
print("compiled")
"""
LATENTS = """
from emberline.kernels.gpu.mla import attention, hopper, projections, splits

ANYWHERE = {"positions", "query_starts", "context_lens"}  # a part of a step's rows or tokens begins anywhere
for kernel in (
    attention._latent_attention, attention._merge_partials, projections._absorb_queries, projections._rotate_and_cache,
    splits._plan, hopper._latent_attention_hopper,
):
    found = [param for param in kernel.params if param.name in ANYWHERE]
    assert found and all(param.do_not_specialize for param in found), kernel.fn.__name__
print("not specialized")
"""
HOPPER = """
from triton.experimental.gluon._runtime import GluonASTSource
from emberline.kernels.gpu.mla import hopper

shared, (_, _, *names) = repr(hopper._SHARED), hopper._latent_attention_hopper.arg_names
types = {"q": f"tensordesc<bf16[64, 64],{shared}>", "kv": f"tensordesc<bf16[16, 64],{shared}>"}
others = ["*bf16", *["*i32"] * 4, "*fp32", "*fp32", "fp32", "i32", "i32", "constexpr", "constexpr"]
types |= dict(zip(names, others, strict=True))
constants = {(len(names),): 64, (len(names) + 1,): 1}
gluon_source = GluonASTSource(hopper._latent_attention_hopper, types, constants, {})
warps = hopper.WARPS
"""
LOSSLESS = """
from emberline.kernels.gpu.lossless import _decode_rows
from emberline.kernels.gpu.lossless_gemm import _lossless_gemv
from emberline.kernels.gpu.lossless_hopper import _finish_product
from emberline.kernels.gpu.lossless_packing import _pack_rows

apart = ["*fp32", "*i32", "*i32", "*bf16", "*bf16"]  # scales, escapes and raw rows
rows = ["*i16", *apart, "*i32", "*bf16", *["i32"] * 5, "fp32"]
compiled(_decode_rows, rows, FACTOR=0, IDS=0, TILE_HALVES=64, ROWS=16, HALVES=128, SLOTS=64)
rows = {"WINDOW": 16, "ZERO": 112}
windows = {"FIRST": 1, "LAST": 239, "RAW_SHARE": 64, "TILE_HALVES": 64}
packed = ["*i16", "*i16", "*fp32", *["*i32"] * 4, "*i16", "*i16", *["i32"] * 5]
compiled(_pack_rows, packed, **rows, **windows, HALVES=512, COLS=2048)
for gate in (0, 1):
    shared = {"BIAS": 0, "GATE": gate, "ADD": 1 - gate, "PDL": 1}
    types = ["*bf16", "*i32", *apart, "*bf16", "*fp32", "*bf16", "i32", "i32", "i32", "fp32"]
    compiled(_lossless_gemv, types, **shared, NORM=1, TILE_HALVES=64, WORDS=512, THREADS=128)
    types = ["*fp32", "*bf16", "*bf16", "i32", *apart, "*bf16", "*bf16", *["i32"] * 9]
    compiled(_finish_product, types, **shared, ROWS=16, TOKENS=64, TILE_TOKENS=64, PARTS=4, SLOTS=64)
print("compiled")
"""
LOSSLESS_HOPPER = """
from triton.experimental.gluon._runtime import GluonASTSource
from emberline.kernels.gpu.lossless_hopper import _SHARED, _lossless_hopper

names = _lossless_hopper.arg_names
others = ["*bf16", "i32", "*bf16", "*fp32", *["i32"] * 6, *["constexpr"] * 4]
maps = [f"tensordesc<bf16[256, 64],{_SHARED!r}>", f"tensordesc<i16[128, 64],{_SHARED!r}>"]
constants = dict(zip([(i,) for i in range(12, 16)], [256, 2, 2, 1], strict=True))
gluon_source = GluonASTSource(_lossless_hopper, dict(zip(names, [*maps, *others], strict=True)), constants, {})
warps = 4
"""
LOSSLESS_SMALL_BATCH = """
from triton.experimental.gluon._runtime import GluonASTSource
from emberline.kernels.gpu.lossless_small_batch import _CODES_SHARED, _TOKENS_SHARED, _multiply_codes

types = [f"tensordesc<bf16[16, 64],{_TOKENS_SHARED!r}>", f"tensordesc<i32[64, 32],{_CODES_SHARED!r}>"]
types += ["*fp32", *["i32"] * 3, *["constexpr"] * 5]
constants = dict(zip([(i,) for i in range(6, 11)], [3, 4, 144, 24, 1], strict=True))
gluon_source = GluonASTSource(
    _multiply_codes, dict(zip(_multiply_codes.arg_names, types, strict=True)), constants, {}
)
warps = 4
"""
LOSSLESS_SMALL_BATCH_END = """
from triton.experimental.gluon._runtime import GluonASTSource
from emberline.kernels.gpu.lossless_small_batch import _finish_product

apart = ["*bf16", "i32", "*fp32", "*i32", "*i32", "*bf16", "*bf16"]
types = ["*fp32", *apart, "*bf16", "*bf16", *["i32"] * 7, *["constexpr"] * 6]
constants = dict(zip([(i,) for i in range(17, 23)], [0, 1, 0, 32, 4, 1], strict=True))
gluon_source = GluonASTSource(
    _finish_product, dict(zip(_finish_product.arg_names, types, strict=True)), constants, {}
)
warps = 4
"""
COMPILED_BY_GLUON = """
import triton
from triton.backends.compiler import GPUTarget

triton.compile(gluon_source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
print("compiled")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "says"),
    [
        (COMPILED + EXPERTS, "compiled"),
        (COMPILED + DRAFTS, "compiled"),
        (COMPILED + GEMV, "compiled"),
        (COMPILED + STAGES, "compiled"),
        (COMPILED + SHARES, "compiled"),
        (LATENTS, "not specialized"),
        (HOPPER + COMPILED_BY_GLUON, "compiled"),
        (COMPILED + LOSSLESS, "compiled"),
        (LOSSLESS_HOPPER + COMPILED_BY_GLUON, "compiled"),
        (LOSSLESS_SMALL_BATCH + COMPILED_BY_GLUON, "compiled"),
        (LOSSLESS_SMALL_BATCH_END + COMPILED_BY_GLUON, "compiled"),
    ],
)
def test_kernels_compile(tmp_path: Path, program: str, says: str) -> None:
    pytest.importorskip("triton")
    environment = {"TRITON_CACHE_DIR": str(tmp_path), "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == says
