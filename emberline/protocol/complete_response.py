"""A complete answer: the sum of a request's events. The APIs render it; the job queue stores it."""

import sys
from array import array
from collections.abc import Iterator
from typing import Any

import msgspec

from emberline.protocol.encoding import Pooling
from emberline.protocol.events import Finish, PromptTokens, TextLogprob, Usage
from emberline.protocol.request import Marks, ToolCall

# The tags below are stored in the database: they must not change.


class TextPart(msgspec.Struct, tag="said"):
    text: str


class ReasoningPart(msgspec.Struct, tag="thought", omit_defaults=True):
    text: str
    block: dict[str, Any] | None = None  # one of the message's `thinking_blocks`: this reasoning, signed or encrypted


class ToolCallPart(ToolCall, frozen=True, tag="called"):
    pass


AnswerPart = TextPart | ReasoningPart | ToolCallPart


class AnswerChoice(msgspec.Struct, omit_defaults=True):
    parts: list[AnswerPart] = []  # in the order generated; without text are only encrypted reasoning and calls
    logprobs: list[TextLogprob] = []
    finish: Finish = "stop"
    stop_sequence: str | None = None
    marks: Marks = {}  # of the message; those of a tool call are in its part
    token_ids: bytes = b""  # u32 little-endian; if the client wants to have them
    prompt: PromptTokens | None = None  # if the client wants to have something of it back

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, ReasoningPart))

    @property
    def tool_calls(self) -> list[ToolCall]:
        return [
            ToolCall(part.id, part.name, part.arguments, part.marks)
            for part in self.parts
            if isinstance(part, ToolCallPart)
        ]


class Encoded(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The result of an encoder: a row for each text, in order."""

    values: bytes  # float32 little-endian, the rows end to end: vectors, or scores from 0 to 1
    n_rows: int
    usage: Usage
    pooling: Pooling | None = None  # of vectors
    labels: tuple[str, ...] = ()  # of scores: one for each column

    def row_bytes(self) -> Iterator[bytes]:
        width = len(self.values) // self.n_rows
        return (self.values[at : at + width] for at in range(0, len(self.values), width))

    def rows(self) -> Iterator[list[float]]:
        for raw in self.row_bytes():
            row = array("f", raw)
            if sys.byteorder == "big":  # pragma: no cover
                row.byteswap()
            yield row.tolist()


class Answer(msgspec.Struct, omit_defaults=True):
    choices: list[AnswerChoice]
    usage: Usage
    encoded: Encoded | None = None  # of a job that encoded texts; then there are no choices
    prediction: bytes = b""  # the output of a predictor, as JSON; then there are no choices either


MAX_DEPTH = 256  # responses in a chain of parents; a longer conversation is stored as a new root with its full input
MAX_HISTORY_BYTES = 32 << 20  # of one conversation
_ROW_BYTES = 256  # approximate overhead of a stored row beyond its texts


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One stored response. `input` is the JSON list of the items its turn added, `body` the JSON of its answer."""

    id: str
    account: str
    parent: str | None = None  # id of the response it continues
    depth: int = 0  # number of ancestors
    created_us: int
    input: str
    body: str

    @property
    def n_bytes(self) -> int:
        return len(self.input) + len(self.body) + _ROW_BYTES
