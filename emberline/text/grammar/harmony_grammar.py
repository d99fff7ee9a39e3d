"""The grammar of a reply in GPT-OSS's Harmony format: reasoning and commentary, then the answer or one tool call."""

from collections.abc import Mapping

from emberline.protocol.grammar import Expression, Free, Text, Token
from emberline.text.grammar.expressions.builder import Builder, choice, repeat, sequence

MAX_MESSAGES = 16  # before the answer: ends a model that repeats itself


def harmony_expression(
    builder: Builder, tokens: Mapping[str, int], answer: Expression | None, call: Expression | None
) -> Expression:
    """`answer`: what the final message must match; None: the reply must be a call. `call`: a call's message, from its
    channel on; None: there is none."""
    channel, message, end, start = (Token(tokens[f"<|{name}|>"]) for name in ("channel", "message", "end", "start"))
    before = builder.add(
        sequence(
            channel, choice([Text("analysis"), Text("commentary")]), message, Free(), end, start, Text("assistant")
        )
    )
    endings = [] if answer is None else [sequence(channel, Text("final"), message, answer)]
    return sequence(repeat(before, 0, MAX_MESSAGES), choice([*endings, *([] if call is None else [call])]))
