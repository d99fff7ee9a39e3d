"""The result table: figures, the peer's, their ratio and the target."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Line:
    title: str
    key: str  # a dotted path into the figures
    better: str  # "more" or "less"
    must: float | None = None  # minimum ratio to the peer
    limit: float | None = None  # bound of the figure itself
    unit: str = ""


LINES = (
    *(
        Line(f"decode, batch {batch}", f"decode.b{batch}.tok_s", "more", must, unit="tok/s")
        for batch, must in ((1, 1.20), (8, 1.12), (32, 1.12), (64, 1.15), (128, 1.15), (256, 1.12))
    ),
    *(
        Line(f"batch {batch}, steady state", f"decode.b{batch}.steady_tok_s", "more", unit="tok/s")
        for batch in (1, 8, 32, 64, 128, 256)
    ),
    *(Line(f"decode, temperature 0.7, batch {b}", f"warm.b{b}.tok_s", "more", unit="tok/s") for b in (1, 64)),
    Line("prefill 8,192", "prefill.8192", "less", 1.0, unit="s"),
    Line("prefill 32,768", "prefill.32768", "less", 1.0, unit="s"),
    Line("512 × 1,024/256", "throughput.s", "less", 1.06, unit="s"),
    Line("agentic 32 × 8", "agentic.s", "less", 1.25, unit="s"),
    Line("mixed, every 0.5 s: ITL p99", "mixed.every_0.5s.itl_ms.p99", "less", limit=20.0, unit="ms"),
    Line("mixed, every 0.5 s: TTFT p50", "mixed.every_0.5s.ttft_s.p50", "less", limit=0.23, unit="s"),
    Line("256 streams at once", "burst.tok_s", "more", limit=10_000.0, unit="tok/s"),
    Line("the same: ITL p99", "burst.itl_ms.p99", "less", limit=65.0, unit="ms"),
    Line("the same: last first token", "burst.ttft_max_s", "less", limit=3.8, unit="s"),
    Line("start beyond reading weights, kernels cached", "start.cached.beyond_disk_s", "less", limit=3.0, unit="s"),
    Line("start beyond reading weights, empty kernel cache", "start.empty.beyond_disk_s", "less", limit=8.0, unit="s"),
    Line(
        "first 64 requests, quantized model: longest pause",
        "bursts.cached.first_64.longest_pause_s",
        "less",
        limit=0.1,
        unit="s",
    ),
    Line("the same, empty kernel cache", "bursts.empty.first_64.longest_pause_s", "less", limit=0.1, unit="s"),
    Line("memory beyond weights and KV", "memory.beside_gib", "less", limit=1.5, unit="GiB"),
    Line("the same, after all workloads", "memory_after.beside_gib", "less", limit=1.45, unit="GiB"),
    Line("CPU per decode step, batch 64", "cpu_ms_per_step_b64", "less", limit=1.0, unit="ms"),
    Line("CPU per decode step, batch 256", "cpu_ms_per_step_b256", "less", limit=1.5, unit="ms"),
    Line("context of 131,072", "whole_context_s", "less", unit="s"),
    Line("SmolLM2-135M, batch 1", "smollm2.tok_s", "more", limit=1200.0, unit="tok/s"),
)


def pick(figures: Figures, key: str) -> float | None:
    """`mixed.every_0.5s.itl_ms.p99`: keys may contain dots, so the longest match is taken."""
    if key in figures:
        value = figures[key]
        return float(value) if isinstance(value, int | float) else None
    for end in range(len(key) - 1, 0, -1):
        if key[end] == "." and isinstance(inner := figures.get(key[:end]), dict):
            return pick(inner, key[end + 1 :])
    return None


def table(ours: Figures, theirs: Figures) -> str:
    rows = [("", "Emberline", "vLLM", "ratio", "must", "")]
    for line in LINES:
        own, peer = pick(ours, line.key), pick(theirs, line.key.replace("steady_tok_s", "tok_s"))
        if own is None:
            continue
        ratio = None if not peer or not own else own / peer if line.better == "more" else peer / own
        rows.append(
            (
                line.title,
                f"{own:.4g} {line.unit}",
                *map(_text, (peer, ratio)),
                _must(line),
                _verdict(line, own, ratio),
            )
        )
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """The first row has the titles."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def _text(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _must(line: Line) -> str:
    if line.must is not None:
        return f"≥ {line.must:.2f}×"
    return "" if line.limit is None else f"{'≥' if line.better == 'more' else '≤'} {line.limit:g}"


def _verdict(line: Line, own: float, ratio: float | None) -> str:
    if line.limit is not None:
        limit = line.limit
        return "ok" if (own >= limit if line.better == "more" else own <= limit) else "short"
    if line.must is None or ratio is None:
        return ""
    return "ok" if ratio >= line.must else "short"
