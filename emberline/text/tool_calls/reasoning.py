"""Reasoning before the answer: how a model writes it, whether a prompt has begun it, how much of it there may be."""

import re
from collections.abc import Collection, Mapping, Set
from typing import Any

import msgspec

from emberline.protocol.request import Reasoning

_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
_SWITCHES = ("enable_thinking", "thinking")  # what templates call the argument that turns it on and off
EFFORT = "reasoning_effort"
_KNOWN_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}  # templates know three
# The share of a reply that may be reasoning, where the template does not know efforts. Above these, all of it.
_SHARES = {"minimal": 0.1, "low": 0.2, "medium": 0.5, "high": 0.8}


class ThinkForm(msgspec.Struct, frozen=True, kw_only=True):
    start: str
    end: str
    before_end: str = ""  # white space that the model writes around the end
    after_end: str = ""
    tokens: dict[str, int] = {}  # of start and end, those that are special tokens


def detect(source: str, added: Collection[str], special: Mapping[str, int]) -> ThinkForm | None:
    """Of a model whose template has this source and whose tokenizer has these added tokens; None: it does not think."""
    for start, end in _MARKS:
        if end not in source and not {start, end} <= set(added):
            continue
        spaced = re.search(rf"(\n|\\n){re.escape(end)}(\n\n|\\n\\n)", source) is not None
        return ThinkForm(
            start=start,
            end=end,
            before_end="\n" if spaced else "",
            after_end="\n\n" if spaced else "",
            tokens={mark: special[mark] for mark in (start, end) if mark in special},
        )
    return None


def begun(form: ThinkForm, prompt: str) -> bool | None:
    """Whether the prompt has begun reasoning (True), has ended it (False), or leaves it to the reply (None)."""
    tail = prompt[-256:].rstrip()
    if tail.endswith(form.start):
        return True
    return False if tail.endswith(form.end) else None


def wanted(reasoning: Reasoning) -> bool | None:
    """Whether the request wants reasoning; None: as the model does by itself."""
    if reasoning.effort == "none" or reasoning.budget_tokens == 0:
        return False
    return reasoning.enabled


def suffix(form: ThinkForm, prompt: str, reasoning: Reasoning, variables: Set[str]) -> str:
    """What the prompt needs beyond what the template wrote: an end, for a template that cannot turn reasoning off; a
    beginning, for reasoning that has a bound and so must be there to be bounded."""
    now = begun(form, prompt)
    if wanted(reasoning) is False:
        if now is False or (now is None and not variables.isdisjoint(_SWITCHES)):
            return ""
        return ("" if now else form.start + form.before_end) + form.before_end + form.end + form.after_end
    bounded = budget(reasoning, variables, 1) is not None
    return form.start + form.before_end if now is None and bounded else ""


def template_kwargs(reasoning: Reasoning, variables: Set[str]) -> dict[str, Any]:
    """What a template that reads these variables is told."""
    on = wanted(reasoning)
    kwargs: dict[str, Any] = {} if on is None else {name: on for name in _SWITCHES if name in variables}
    if EFFORT in variables and reasoning.effort is not None:
        kwargs[EFFORT] = _KNOWN_EFFORTS.get(reasoning.effort, reasoning.effort)
    return kwargs


def budget(reasoning: Reasoning, variables: Set[str], max_tokens: int) -> int | None:
    """The most tokens of reasoning in a reply of `max_tokens`; None: no bound."""
    if wanted(reasoning) is False:
        return 0
    if reasoning.budget_tokens is not None:
        return reasoning.budget_tokens
    share = None if EFFORT in variables else _SHARES.get(reasoning.effort or "")
    return None if share is None else max(1, int(max_tokens * share))
