"""A whole answer: what the events of one request add up to. Doors render it; the queue keeps it."""

from typing import Literal

import msgspec

from emberline.protocol.events import TextLogprob, Usage
from emberline.protocol.request import ToolCall


class TextPart(msgspec.Struct, tag="said"):
    text: str


class ReasoningPart(msgspec.Struct, tag="thought"):
    text: str


class ToolCallPart(ToolCall, frozen=True, tag="called"):
    """A call that the model made; tagged, so that it can be told from text when it is read back."""


AnswerPart = TextPart | ReasoningPart | ToolCallPart


class AnswerChoice(msgspec.Struct, omit_defaults=True):
    parts: list[AnswerPart] = []  # in the order in which the model wrote them; none is empty text
    logprobs: list[TextLogprob] = []
    finish: Literal["stop", "length", "tool_calls"] = "stop"
    stop_sequence: str | None = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, ReasoningPart))

    @property
    def tool_calls(self) -> list[ToolCall]:
        return [ToolCall(part.id, part.name, part.arguments) for part in self.parts if isinstance(part, ToolCallPart)]


class Answer(msgspec.Struct):
    choices: list[AnswerChoice]
    usage: Usage


MAX_DEPTH = 256  # records of one walk; whoever continues a longer conversation writes it down whole
MAX_HISTORY_BYTES = 32 << 20  # of one conversation
_ROW_BYTES = 256  # what a row takes beside its texts, roughly


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One response. `input` is the JSON list of the items its turn brought, `body` the JSON of its answer."""

    id: str
    account: str
    parent: str | None = None  # the response it continues
    depth: int = 0  # how many records it is built on
    created_us: int
    input: str
    body: str

    @property
    def n_bytes(self) -> int:
        return len(self.input) + len(self.body) + _ROW_BYTES
