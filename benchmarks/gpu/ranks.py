"""Ranks of large models on one GPU: `python -m benchmarks.gpu.ranks [plan|alone|drafts|all-reduce|…] [--out FILE]`.

`plan`: what ranks allocate against what `emberline plan` says, for Kimi K2.5 (TP8 and DCP8; stages of PP8 and of TP4 ×
PP2) and Llama 4 Scout (TP2). `alone`: one rank with generated weights and loopback collectives: its KV room under the
memory limit of the GPU it is planned for, its step time by kind of layer and by kernel, and the efficiency of the
division, which is 1/N of one GPU's time by the plan's roofline over the rank's measured time plus the plan's
collectives. `drafts`: the same rank with a draft head (`rank_drafts`). `all-reduce`: 2, 4 and 8 processes on the GPU,
in CUDA graphs under MPS, against a copy of the same bytes. `worker`: workers of two and four ranks on the GPU against
one rank. Only if asked for: `drafting`, `disk` and `nccl` (`rank_workers`). Weights are random: memory and times are
true, texts not.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu import rank_processes, rank_workers
from benchmarks.gpu.rank_alone import BATCHES, CASES, LayerTime, allocate, alone
from benchmarks.gpu.rank_drafts import ACCEPTED, SPEEDUP, VERIFY_RATIO, drafts
from benchmarks.gpu.report import aligned

PARTS = ("plan", "alone", "drafts", "all-reduce", "worker")
MORE_PARTS = ("drafting", "disk", "nccl")  # only if asked for
PLANNED = ("kimi", "kimi-pp8", "kimi-tp4-pp2", "scout")
ALONE = ("kimi", "scout")
DRAFTED = ("kimi",)
PLAN_OFF = 0.02  # asked for: of what a rank allocates, beyond the plan or below it
COPY_RATIO = 1.5  # asked for: an all-reduce of two processes over a copy of the same bytes


class Line(NamedTuple):
    figure: str
    measured: str
    asked: str = ""
    ok: bool | None = None  # None: nothing is asked for


def main() -> int:
    args = _parse()
    args.work.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {}
    for name, measure in _measurements(args):
        began_s = time.perf_counter()
        try:
            figures[name] = measure()
        except Exception as error:  # device time is expensive: the others still run
            figures[name] = {"failed": f"{type(error).__name__}: {error}"}
        print(f"{name}: {time.perf_counter() - began_s:.1f} s {figures[name].get('failed', '')}", flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(figures, indent=1))
    print(table(figures))
    return int(any("failed" in found for found in figures.values()))


def _measurements(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Named `part case`. Other processes first: this one has no CUDA context then."""
    if {"all-reduce", "worker", *MORE_PARTS} & set(args.parts):
        with rank_processes.multi_process_service() as together:
            if not together:
                print("MPS does not start: the GPU switches between processes, and all-reduces take milliseconds")
            if "all-reduce" in args.parts:
                for size in args.sizes:
                    yield f"all-reduce {size}", partial(rank_processes.all_reduce, size)
            if "worker" in args.parts:
                for layout in rank_processes.LAYOUTS:
                    yield f"worker {layout}", partial(rank_processes.same_tokens, args.work, layout)
            if "drafting" in args.parts:
                for layout in rank_workers.DRAFTING:
                    yield f"drafting {layout}", partial(rank_workers.drafting, args.work, layout)
            if "disk" in args.parts:
                for first, second in rank_workers.DISK:
                    yield f"disk {first} to {second}", partial(rank_workers.disk, args.work, first, second)
            if "nccl" in args.parts:
                for layout in rank_workers.NCCL:
                    yield f"nccl {layout}", partial(rank_workers.over_nccl, args.work, layout)
    if "plan" in args.parts:
        for name in args.cases or PLANNED:
            for rank in CASES[name].ranks:
                yield f"plan {name} rank {rank}", partial(allocate, CASES[name], rank)
    if "alone" in args.parts:
        for name in args.cases or ALONE:
            yield f"alone {name}", partial(alone, CASES[name], CASES[name].ranks[0], args.batches)
    if "drafts" in args.parts:
        for name in args.cases or DRAFTED:
            yield f"drafts {name}", partial(drafts, CASES[name], CASES[name].ranks[0])


def table(figures: dict[str, Any]) -> str:
    """Figures with what is asked of them; of ranks alone also the efficiency, layer by layer, and kernels."""
    rows = [("", "measured", "asked", "")]
    tables = []
    for name, found in figures.items():
        part, _, case = name.partition(" ")
        if "failed" in found:
            rows.append((name, found["failed"], "", "failed"))
            continue
        rows += [
            (line.figure, line.measured, line.asked, "" if line.ok is None else "ok" if line.ok else "short")
            for line in LINES[part](case, found)
        ]
        if part == "alone":
            tables += [efficiency_table(case, found["decode"]), kernel_table(case, found["decode"])]
    return "\n\n".join([aligned(rows), *tables])


def plan_lines(case: str, found: dict[str, Any]) -> list[Line]:
    text = f"{found['device_gib']:.2f} GiB, planned {found['planned_gib']:.2f}: {100 * found['off']:+.2f} %"
    weights = f"{found['weights_gib']:.2f} GiB, planned {found['planned_weights_gib']:.2f}"
    return [
        Line(f"{case}: memory", text, f"± {100 * PLAN_OFF:g} %", abs(found["off"]) <= PLAN_OFF),
        Line(f"{case}: of it weights", f"{weights}: {100 * found['weights_off']:+.2f} %"),
    ]


def alone_lines(case: str, found: dict[str, Any]) -> list[Line]:
    asked, tokens = CASES[case].kv_gib, CASES[case].kv_tokens
    used, limit = found["device_gib"], found["limit_gib"]
    return [
        Line(
            f"{case}: KV of all ranks",
            f"{found['kv_gib']:.1f} GiB",
            "" if asked is None else f"≥ {asked:g}",
            None if asked is None else found["kv_gib"] >= asked,
        ),
        Line(
            f"{case}: tokens of it",
            f"{found['kv_tokens']:,}",
            "" if tokens is None else f"≥ {tokens:,}",
            None if tokens is None else found["kv_tokens"] >= tokens,
        ),
        Line(
            f"{case}: KV beside the plan's",
            f"{100 * found['kv_off']:+.2f} %",
            f"± {100 * PLAN_OFF:g} %",
            abs(found["kv_off"]) <= PLAN_OFF,
        ),
        Line(f"{case}: weights", f"{found['weights_gib']:.2f} GiB: {100 * found['weights_off']:+.2f} %"),
        Line(f"{case}: memory after all steps", f"{used:.2f} GiB", f"≤ {limit:.2f}", used <= limit),
        *(
            Line(f"{case}: step of {n_rows} at {each['context']}", f"{each['step_us'] / 1e3:.2f} ms")
            for n_rows, each in found["decode"].items()
        ),
        *(
            Line(f"{case}: prefill of {which}", f"{each['ms']:.1f} ms, planned {each['planned_ms']:.1f}")
            for which, each in found["prefill"].items()
        ),
    ]


def drafts_lines(case: str, found: dict[str, Any]) -> list[Line]:
    asked = CASES[case].kv_gib
    lines = [
        Line(
            f"{case}: KV of all ranks with a draft head",
            f"{found['kv_gib']:.1f} GiB",
            "" if asked is None else f"≥ {asked:g}",
            None if asked is None else found["kv_gib"] >= asked,
        )
    ]
    for name, cell in found["cells"].items():
        times = f"{cell['plain_us'] / 1e3:.2f} ms plain, {cell['verify_us'] / 1e3:.2f} verify"
        parts = f"{times}, {cell['chain_us'] / 1e3:.2f} chain, {cell['touched']:.0f} → {cell['verified']:.0f} experts"
        lines.append(Line(f"{case}: {name}", f"{parts}, overlap {100 * cell['overlap']:.0f} %"))
        ratio = cell["ratio"]
        lines.append(Line("  over plain + bytes", f"{ratio:.3f}", f"≤ {VERIFY_RATIO:g}", ratio <= VERIFY_RATIO))
        wanted = name.startswith("16 ")
        lines.append(
            Line(
                f"  speed-up, {100 * ACCEPTED:.0f} % accepted",
                f"{cell['speedup']:.2f}×",
                f"≥ {SPEEDUP:g}" if wanted else "",
                cell["speedup"] >= SPEEDUP if wanted else None,
            )
        )
    return lines


def all_reduce_lines(case: str, found: dict[str, Any]) -> list[Line]:
    asked = case == "2"
    return [
        Line(
            f"{case} processes, {kib} KiB",
            f"{each['us']:.1f} µs, copy {each['copy_us']:.1f}: {each['ratio']:.2f}×",
            f"≤ {COPY_RATIO:g}×" if asked else "",
            each["ratio"] <= COPY_RATIO if asked else None,
        )
        for kib, each in found.items()
    ]


def worker_lines(case: str, found: dict[str, Any]) -> list[Line]:
    same = "the same" if found["same"] else "others"
    text = f"{same}, {found['several_ranks_s']:.2f} s and {found['one_rank_s']:.2f}"
    return [Line(f"{found['n_tokens']} tokens of {case} and of one rank", text, "the same", found["same"])]


LINES: dict[str, Callable[[str, dict[str, Any]], list[Line]]] = {
    "plan": plan_lines,
    "alone": alone_lines,
    "drafts": drafts_lines,
    "all-reduce": all_reduce_lines,
    "worker": worker_lines,
    "drafting": lambda case, found: [Line(f"drafts in {case}", _facts(found), "the same", found["same"])],
    "disk": lambda case, found: [Line(f"KV on disk, {case}", _facts(found), "found", found["same"])],
    "nccl": lambda case, found: [Line(f"{case} over NCCL", _facts(found), "the same", found["same"])],
}


def _facts(found: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in found.items() if name != "same")


def efficiency_table(case: str, decode: dict[str, Any]) -> str:
    """µs of a layer by kind. Ideal, not divided, beyond the roofline and collectives add up to a rank's whole time."""
    titles = ("one GPU", "ideal", "not divided", "beyond roofline", "collectives", "rank", "efficiency")
    rows: list[tuple[str, ...]] = [(f"{case}: µs of a layer", *titles)]
    for n_rows, found in decode.items():
        for each in found["layers"]:
            layer = LayerTime(**{key: value for key, value in each.items() if key != "efficiency"})
            parts = (layer.single_us, layer.ideal_us, layer.undivided_us, layer.slower_us, layer.collectives_us)
            whole = layer.rank_us + layer.collectives_us
            name = f"{layer.kind} ({layer.n_layers} layers), {n_rows} sequences"
            rows.append((name, *(f"{us:.1f}" for us in (*parts, whole)), f"{100 * layer.efficiency:.0f} %"))
    return aligned(rows)


def kernel_table(case: str, decode: dict[str, Any]) -> str:
    """Kernels of a layer, those that take the most time first, without CUDA graphs."""
    rows = [(f"{case}: kernels of a layer, µs", "")]
    for n_rows, found in decode.items():
        for kind, kernels in found["kernels"].items():
            listed = ", ".join(f"{name[:40]} {us:.1f}" for name, us in kernels.items())
            rows.append((f"{kind}, {n_rows} sequences", listed))
    return aligned(rows)


def _parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.ranks", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all of these); {', '.join(MORE_PARTS)}"
    )
    parser.add_argument("--cases", nargs="+", choices=list(CASES), help="of `plan` and `alone`")
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES), help="sequences that decode, `alone`")
    parser.add_argument("--sizes", nargs="+", type=int, default=list(rank_processes.SIZES), help="of `all-reduce`")
    parser.add_argument("--work", type=Path, default=Path("/tmp/emberline-gpu"), help="for logs and generated files")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    args = parser.parse_args(arguments)
    known = (*PARTS, *MORE_PARTS)
    unknown = [part for part in args.parts if part not in known]
    if unknown:
        parser.error(f"{unknown[0]!r} is none of {', '.join(known)}")
    args.parts = args.parts or list(PARTS)
    return args


if __name__ == "__main__":
    raise SystemExit(main())
