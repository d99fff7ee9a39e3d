"""What a grammar is built from, as plain data: it is hashed for the cache and crosses the pipe to the child."""

from typing import Literal

import msgspec

from emberline.protocol.request import OutputFormat, Tool


class ToolGrammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tool calls as one model family writes them."""

    tools: tuple[Tool, ...]
    mode: Literal["auto", "none", "required"]  # "none": text, and what opens a call never occurs in it
    parallel: bool
    form: str  # the family's name, as `text/tools` knows it
    token_ids: dict[str, int] = {}  # the form's special tokens that this model's vocabulary has, by their text


class ThinkingForm(msgspec.Struct, frozen=True, omit_defaults=True):
    """How thinking ends, and, where the prompt leaves it to the reply to begin it, how it begins."""

    end: str  # e.g. "</think>"
    end_id: int | None = None  # where the end is a special token; else `end` is plain text
    after: tuple[str, ...] = ()  # what may stand between the end and the reply, e.g. "\n\n"; nothing may too
    start: str = ""  # empty: it has begun already
    start_id: int | None = None  # where the start is a special token


class GrammarSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """At least one of `output` and `tools` is set. With both, the reply is one or the other."""

    output: OutputFormat | None = None
    tools: ToolGrammar | None = None
    thinking: ThinkingForm | None = None
