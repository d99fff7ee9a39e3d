"""Reasoning before the answer: its delimiters in a model's replies, whether a prompt has begun it, its token budget."""

import re
from collections.abc import Collection, Mapping, Set
from typing import Any

import msgspec

from emberline.protocol.request import Reasoning

_DELIMITERS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
_SWITCHES = ("enable_thinking", "thinking")  # template arguments that turn reasoning on and off
EFFORT = "reasoning_effort"
_KNOWN_EFFORTS = {
    "none": "low",
    "minimal": "low",
    "xhigh": "high",
    "max": "high",
}
# The share of a reply that may be reasoning, where the template has no effort argument. Higher efforts: all of it.
_SHARES = {"minimal": 0.1, "low": 0.2, "medium": 0.5, "high": 0.8}


class ReasoningFormat(msgspec.Struct, frozen=True, kw_only=True):
    start: str
    end: str
    before_end: str = ""  # white space that the model writes around the end
    after_end: str = ""
    tokens: dict[str, int] = {}  # start and end, where they are special tokens


def detect_reasoning_format(source: str, added: Collection[str], special: Mapping[str, int]) -> ReasoningFormat | None:
    """Return the reasoning format of a model with this template source and these added tokens, or None if it does not
    reason."""
    for start, end in _DELIMITERS:
        if end not in source and not {start, end} <= set(added):
            continue
        spaced = re.search(rf"(\n|\\n){re.escape(end)}(\n\n|\\n\\n)", source) is not None
        return ReasoningFormat(
            start=start,
            end=end,
            before_end="\n" if spaced else "",
            after_end="\n\n" if spaced else "",
            tokens={delimiter: special[delimiter] for delimiter in (start, end) if delimiter in special},
        )
    return None


def begun(format: ReasoningFormat, prompt: str) -> bool | None:
    """Return True if the prompt has begun reasoning, False if it has ended it, and None if it leaves that to the
    reply."""
    tail = prompt[-256:].rstrip()
    if tail.endswith(format.start):
        return True
    return False if tail.endswith(format.end) else None


def wanted(reasoning: Reasoning) -> bool | None:
    """Return True or False if the request asks for reasoning or against it, and None for the model's default."""
    if reasoning.effort == "none" or reasoning.budget_tokens == 0:
        return False
    return reasoning.enabled


def suffix(format: ReasoningFormat, prompt: str, reasoning: Reasoning, variables: Set[str]) -> str:
    """Return the text to append to the rendered prompt: the end of reasoning, for a template that cannot turn it off;
    its start, for reasoning with a budget, which must have begun to be limited."""
    state = begun(format, prompt)
    if wanted(reasoning) is False:
        if state is False or (state is None and not variables.isdisjoint(_SWITCHES)):
            return ""
        return ("" if state else format.start + format.before_end) + format.before_end + format.end + format.after_end
    bounded = budget(reasoning, variables, 1) is not None
    return format.start + format.before_end if state is None and bounded else ""


def template_kwargs(reasoning: Reasoning, variables: Set[str]) -> dict[str, Any]:
    """Arguments for a template that reads these variables."""
    on = wanted(reasoning)
    kwargs: dict[str, Any] = {} if on is None else {name: on for name in _SWITCHES if name in variables}
    if EFFORT in variables and reasoning.effort is not None:
        kwargs[EFFORT] = _KNOWN_EFFORTS.get(reasoning.effort, reasoning.effort)
    return kwargs


def budget(reasoning: Reasoning, variables: Set[str], max_tokens: int) -> int | None:
    """The most reasoning tokens in a reply of `max_tokens`; None: no limit."""
    if wanted(reasoning) is False:
        return 0
    if reasoning.budget_tokens is not None:
        return reasoning.budget_tokens
    share = None if EFFORT in variables else _SHARES.get(reasoning.effort or "")
    return None if share is None else max(1, int(max_tokens * share))
