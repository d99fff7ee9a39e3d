"""Guardrails: patterns that must not occur in a prompt or a reply, and how much of a streamed reply is held back for
them.

Patterns are matched by RE2, in time linear to the text whatever the pattern. A moderation model is asked by the
service, which owns the models; this module says what to ask about.
"""

import asyncio
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from emberline.protocol.errors import BadInput
from emberline.protocol.events import (
    ChoiceDone,
    Completed,
    Opaque,
    ReasoningDelta,
    Started,
    TextDelta,
    TextEvent,
    ToolCallDelta,
    ToolCallStarted,
)
from emberline.protocol.gateway import Guardrail
from emberline.protocol.request import GenerateRequest

MAX_PATTERN_BYTES = 1 << 20  # of a compiled pattern
OFF_LOOP_CHARS = 64 << 10
CONTEXT_CHARS = 1000  # of what was checked before, so that a match over the end of a sentence is found
MAX_HELD_CHARS = 4096  # of a sentence that does not end

Side = Literal["request", "response"]


def check_guardrails(rules: Sequence[Guardrail]) -> None:
    """BadInput for a rule that cannot be applied."""
    names = [rule.name for rule in rules]
    for rule in rules:
        if names.count(rule.name) > 1:
            raise BadInput(f"two guardrails are named {rule.name!r}", param="guardrails")
        if bool(rule.pattern) == bool(rule.model):
            raise BadInput(f"guardrail {rule.name}: give either a pattern or a model", param="guardrails")
        if rule.pattern:
            _compiled(rule.pattern, rule.ignore_case)


@lru_cache(256)
def _compiled(pattern: str, ignore_case: bool) -> Any:
    try:
        import re2  # type: ignore[import-untyped]
    except ImportError:
        raise BadInput(
            "guardrails with a pattern need RE2: pip install 'emberline[guardrails]'", param="guardrails"
        ) from None
    options = re2.Options()
    options.max_mem = MAX_PATTERN_BYTES
    options.case_sensitive = not ignore_case
    options.log_errors = False
    try:
        return re2.compile(pattern, options=options)
    except UnicodeEncodeError:
        raise BadInput("a pattern is valid Unicode", param="guardrails") from None
    except re2.error as error:
        reason = error.args[0].decode() if isinstance(error.args[0], bytes) else error.args[0]
        raise BadInput(f"the pattern {pattern[:100]!r} cannot be used: {reason}", param="guardrails") from None


def applicable(rules: Sequence[Guardrail], side: Side) -> tuple[Guardrail, ...]:
    return tuple(rule for rule in rules if rule.on in (side, "both"))


async def matches(rule: Guardrail, text: str) -> bool:
    """True if the rule's pattern occurs in the text. A long text is searched on a thread."""
    pattern = _compiled(rule.pattern, rule.ignore_case)
    text = text.encode("utf-8", "replace").decode()  # RE2 takes no lone surrogates
    if len(text) <= OFF_LOOP_CHARS:
        return pattern.search(text) is not None
    return await asyncio.to_thread(pattern.search, text) is not None


def prompt_text(request: GenerateRequest) -> str:
    """All that a client sends to the model, one text after the other."""
    texts = [request.prompt or ""]
    for message in request.messages or ():
        texts += [message.name or "", message.reasoning or "", message.content]
        texts += [f"{call.name} {call.arguments}" for call in message.tool_calls]
        marks = (message.marks, *(part.marks for part in message.parts), *(call.marks for call in message.tool_calls))
        texts += strings(marks)  # providers read them, too
    for tool in request.tools:
        texts += [tool.name, tool.description, *strings(tool.parameters), *strings(tool.marks)]
    texts += strings(request.template_kwargs)
    if request.output is not None:
        texts += strings(request.output.value)
    return "\n".join(filter(None, texts))


def strings(value: Any, numbers: bool = False) -> list[str]:
    """All texts in decoded JSON, names of fields too; with `numbers` also whole numbers."""
    found: list[str] = []
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            found.append(one)
        elif numbers and type(one) is int:
            found.append(str(one))
        elif isinstance(one, Mapping):
            waiting += [*one.values(), *one]
        elif isinstance(one, list | tuple):
            waiting += reversed(one)
    return found


class HeldReply:
    """Holds the events of a reply back until they are checked.

    `add` each event; where it returns a text, check that, and then send `take()` on.
    """

    def __init__(self, whole: bool) -> None:
        self._whole = whole
        self._held: list[TextEvent] = []
        # By choice, as several come interleaved; the texts in marks apart (True), as they must not split the others.
        self._texts: dict[tuple[int, bool], list[str]] = {}
        self._n_chars = 0
        self._contexts: dict[tuple[int, bool], str] = {}
        self._n_blocks: dict[int, int] = {}  # of thinking, by choice: each time all come again

    def add(self, event: TextEvent) -> str | None:
        """The text that must be checked before anything more is sent; None: hold on."""
        self._held.append(event)
        text = ""
        if isinstance(event, TextDelta | ReasoningDelta):
            text = event.text
        elif isinstance(event, ToolCallDelta):
            text = event.arguments
        elif isinstance(event, ToolCallStarted):
            text = f"\n{event.name} "
        elif isinstance(event, Opaque):
            text = "\n".join(["", *self._marked(event)])
        if text and not isinstance(event, Started | Completed):
            self._texts.setdefault((event.index, isinstance(event, Opaque)), []).append(text)
        self._n_chars += len(text)
        if self._whole:
            return None
        is_end = isinstance(event, ChoiceDone) or (
            isinstance(event, TextDelta | ReasoningDelta) and (_ends_sentence(text) or self._n_chars > MAX_HELD_CHARS)
        )
        return self.text() if is_end else None

    def _marked(self, event: Opaque) -> list[str]:
        """Texts of a mark that no other event has; the thinking that a block signs came as reasoning."""
        blocks = event.thinking_blocks
        if not blocks:
            return strings(event.value)
        n_before = self._n_blocks.get(event.index, 0)
        self._n_blocks[event.index] = len(blocks)
        return strings([(block.get("data"), block.get("signature")) for block in blocks[n_before:]])

    def text(self) -> str:
        """The held text, after the end of what was checked before, one choice after the other."""
        return "\n".join(self._text_of(source) for source in sorted(self._texts))

    def _text_of(self, source: tuple[int, bool]) -> str:
        return self._contexts.get(source, "") + "".join(self._texts[source])

    def take(self) -> list[TextEvent]:
        """The held events, which have been checked."""
        self._contexts |= {source: self._text_of(source)[-CONTEXT_CHARS:] for source in self._texts}
        held, self._held, self._texts, self._n_chars = self._held, [], {}, 0
        return held


def _ends_sentence(text: str) -> bool:
    return text.rstrip(" \"')*").endswith((".", "!", "?", "\n", "。", "！", "？"))
