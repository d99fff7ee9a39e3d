"""From single runs to a table and JSON: medians, spreads, and Emberline's ratio to each peer."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

OURS = "emberline"


@dataclass(frozen=True, slots=True)
class Figure:
    """A column. `better`: the direction, so that a ratio above 1 always means that Emberline is ahead."""

    key: str
    title: str
    better: str  # "more" or "less"
    digits: int = 1


FIGURES = (
    Figure("prefill_tok_s", "prefill tok/s", "more", 0),
    Figure("decode_tok_s", "decode tok/s", "more"),
    Figure("aggregate_tok_s", "streams tok/s", "more"),
    Figure("replay_s", "replay s", "less"),
    Figure("cached_share", "replay cached", "more", 2),
    Figure("long_prefill_tok_s", "long prefill tok/s", "more", 0),
    Figure("start_s", "start s", "less", 2),
    Figure("memory_start_mb", "start MB", "less", 0),
    Figure("memory_mb", "after MB", "less", 0),
)
RATIO_KEYS = ("prefill_tok_s", "decode_tok_s", "aggregate_tok_s", "replay_s", "long_prefill_tok_s", "start_s")

Runs = dict[str, dict[str, list[float]]]  # row -> figure -> one value per repeat


def medians(runs: Runs) -> dict[str, dict[str, float]]:
    return {row: {key: median(values) for key, values in figures.items() if values} for row, figures in runs.items()}


def spread(values: Sequence[float]) -> float:
    """Half the range over the median: ±0.05 means that all repeats are within about 5 % of it."""
    middle = median(values)
    return (max(values) - min(values)) / 2 / middle if middle else 0.0


def ratios(middle: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Emberline's ratio to each peer; above 1 Emberline is ahead, whichever direction is better."""
    ours = middle.get(OURS, {})
    found: dict[str, dict[str, float]] = {}
    for row, theirs in middle.items():
        if row == OURS:
            continue
        for figure in FIGURES:
            if figure.key in RATIO_KEYS and ours.get(figure.key) and theirs.get(figure.key):
                ratio = ours[figure.key] / theirs[figure.key]
                found.setdefault(row, {})[figure.key] = ratio if figure.better == "more" else 1 / ratio
    return found


def tables(runs: Runs) -> str:
    """Two Markdown tables: figures with their spread, and ratios."""
    middle = medians(runs)
    rows = [[row, *(_cell(figures.get(figure.key, []), figure) for figure in FIGURES)] for row, figures in runs.items()]
    text = markdown(["", *(figure.title for figure in FIGURES)], rows)
    compared = ratios(middle)
    if compared:
        titles = {figure.key: figure.title.removesuffix(" tok/s").removesuffix(" s") for figure in FIGURES}
        lines = [
            [f"emberline / {row}", *(f"{r[key]:.2f}x" if key in r else "-" for key in RATIO_KEYS)]
            for row, r in compared.items()
        ]
        heading = "\n\nAbove 1 Emberline is ahead (for seconds: the peer's time over ours).\n\n"
        text += heading + markdown(["", *(titles[key] for key in RATIO_KEYS)], lines)
    return text


def _cell(values: Sequence[float], figure: Figure) -> str:
    if not values:
        return "-"
    text = f"{median(values):,.{figure.digits}f}"
    return f"{text} ±{spread(values):.0%}" if len(values) > 1 else text


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join("| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths)) + " |" for line in lines)


def as_json(runs: Runs, about: dict[str, Any]) -> dict[str, Any]:
    middle = medians(runs)
    return {
        **about,
        "medians": middle,
        "spread": {row: {k: spread(v) for k, v in figures.items() if v} for row, figures in runs.items()},
        "emberline_over": ratios(middle),
        "runs": runs,
    }
