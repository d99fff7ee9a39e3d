"""Features of the engine that work together: the one table that `serve`, `plan` and workers refuse from.

Features compose unless a `Refusal` names them together, with its reason. The covering array of the tests walks the
table: a configuration writes the tokens of one plain rank, or is refused as declared here. `docs/compatibility.md` is
this module's output (`python -m emberline.engine.composition`). Nothing here imports torch: a refusal is quick.
"""

import re
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from emberline.protocol.errors import BadInput
from emberline.protocol.parallel_layout import Layout


class Feature(NamedTuple):
    """Actions that an operator can ask of a worker."""

    name: str
    kind: str  # features of one kind are neighbours in the printed table
    asked: str  # as error messages and the table call it
    what: str


FEATURES = (
    Feature("tp", "layout", "--tp", "tensor parallelism"),
    Feature("pp", "layout", "--pp", "pipeline parallelism"),
    Feature("ep", "layout", "--ep", "expert parallelism; needs `--tp`"),
    Feature("dcp", "layout", "--dcp", "decode context parallelism; needs `--tp`"),
    Feature("grammar", "drafts", "--speculation grammar", "tokens that a grammar forces"),
    Feature("suffix", "drafts", "--speculation suffix", "what followed the same tokens before"),
    Feature("draft_model", "drafts", "--draft-model", "a smaller model drafts"),
    Feature("eagle3", "drafts", "--draft-head", "an EAGLE-3 head drafts"),
    Feature("host", "tiers", "--kv-host-bytes", "KV in host memory"),
    Feature("disk", "tiers", "--kv-disk-bytes", "KV on disk"),
    Feature("pool", "tiers", "--kv-store", "KV in the cluster's Mooncake pool"),
    Feature("export", "tiers", "emberline cache export", "a session's KV as a file"),
    Feature("roles", "transfer", "--role", "prefill and decode on different workers"),
    Feature("joined_roles", "transfer", "--role of a worker that joins a cluster", "the same, over mutual TLS"),
    Feature("mooncake", "transfer", "--mooncake", "KV transfer by Mooncake's Transfer Engine"),
    Feature("prompt_logprobs", "requests", "prompt_logprobs", "log-probabilities of prompt tokens"),
    Feature("images", "requests", "an image", "images for models with a vision tower"),
    Feature("deterministic", "modes", "--deterministic", "the same tokens whatever else is in the batch"),
    Feature("quantized", "modes", "a quantized checkpoint", "weights of 4 or 8 bits"),
    Feature("cpu", "devices", "--device cpu", "C kernels, or PyTorch"),
    Feature("gpu", "devices", "--device cuda", "Triton kernels, CUDA graphs"),
)
BY_NAME = {feature.name: feature for feature in FEATURES}


class Refusal(NamedTuple):
    """Features that do not work together."""

    features: tuple[str, ...]
    reason: str
    instead: str  # what the operator can do

    @property
    def message(self) -> str:
        *first, last = (BY_NAME[name].asked for name in self.features)
        return f"{', '.join(first)} does not work with {last}: {self.reason}; {self.instead}"


_DRAFTING = ("draft_model", "eagle3")
_NO_STAGES = "the states and tokens that the last stage drafts from do not pass between GPUs' stages yet"
REFUSALS = (
    *(Refusal((name, "pp", "gpu"), _NO_STAGES, "divide by --tp alone, or leave it out") for name in _DRAFTING),
    Refusal(("draft_model", "eagle3"), "one of them drafts for a sequence, alone", "give one of them"),
    Refusal(
        ("prompt_logprobs", "pp"),
        "the last stage has the logits, and reports nothing but draws",
        "score prompts on a worker without stages",
    ),
)


def of_layout(layout: Layout) -> set[str]:
    """Names of the features that a layout has."""
    return {name for name in ("tp", "pp", "ep", "dcp") if getattr(layout, name) > (name != "ep")}


def asked(settings: Any, device: str = "") -> set[str]:
    """Names of the features that a worker's flags, or the `[engine]` section, ask for.

    device: "cpu" or "cuda", once it is known. What a setting of "auto" leaves out by itself is not asked for.
    """
    names = of_layout(Layout(tp=settings.tp, pp=settings.pp, ep=settings.ep, dcp=settings.dcp))
    if device:
        names.add("cpu" if device == "cpu" else "gpu")
    if settings.speculation != "off":
        if settings.draft_head or settings.speculation == "eagle3":
            names.add("eagle3")
        if settings.draft_model or settings.speculation == "draft_model":
            names.add("draft_model")
    names |= {settings.speculation} & {"grammar", "suffix"}
    if getattr(settings, "role", "both") != "both" or getattr(settings, "prefill_workers", 0):
        names.add("joined_roles" if getattr(settings, "join", None) else "roles")
    if getattr(settings, "mooncake", None):
        names.add("mooncake")
    if settings.deterministic:
        names.add("deterministic")
    return names


def refusals(names: Collection[str]) -> Iterator[Refusal]:
    """Refusals of a combination of features."""
    return (refusal for refusal in REFUSALS if set(refusal.features) <= set(names))


def why_not(*names: str) -> str | None:
    """Message that refuses a combination of features. Returns None if they work together."""
    return next((refusal.message for refusal in refusals(names)), None)


def check(names: Collection[str]) -> None:
    """Raise BadInput if some of the features do not work together."""
    if (message := why_not(*names)) is not None:
        raise BadInput(message)


# --- docs/compatibility.md --------------------------------------------------------------------------------------------

_HEAD = """# What works with what

Printed from `emberline/engine/composition.py` by `python -m emberline.engine.composition`: the table from which
`serve`, `plan` and workers refuse combinations. A covering array of configurations in `tests/engine/composition` holds
it: each writes the tokens of one plain rank, or is refused as declared.

`yes`: the two work together, in every layout and with everything else. A number: not together, or not in a combination
with more features, for the reason below.
"""


def page() -> str:
    """The Markdown of `docs/compatibility.md`."""
    columns = [feature.name for feature in FEATURES]
    lines = [_HEAD, "| feature | as asked for | what it is |", "|---|---|---|"]
    lines += [f"| {each.name} | {_code(each.asked)} | {each.what} |" for each in FEATURES]
    lines += ["", f"| | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for row in columns:
        lines.append(f"| **{row}** | {' | '.join(_cell(row, column) for column in columns)} |")
    lines += ["", "## Refused", ""]
    lines += [f"{n}. {_code(each.message)}." for n, each in enumerate(REFUSALS, 1)]
    return "\n".join(lines) + "\n"


def _cell(row: str, column: str) -> str:
    if row == column or {row, column} == {"cpu", "gpu"}:
        return "–"
    notes = [str(n) for n, each in enumerate(REFUSALS, 1) if {row, column} <= set(each.features)]
    return ", ".join(notes) or "yes"


def _code(text: str) -> str:
    """Mark flags as code."""
    return re.sub(r"--[a-z-]+( cpu| cuda| grammar| suffix)?|emberline cache export|prompt_logprobs", r"`\g<0>`", text)


if __name__ == "__main__":
    print(page(), end="")
