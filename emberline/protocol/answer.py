"""A whole answer: what the events of one request add up to. Doors render it; the queue keeps it."""

from typing import Literal

import msgspec

from emberline.protocol.events import TextLogprob, Usage
from emberline.protocol.request import ToolCall


class Said(msgspec.Struct, tag="said"):
    text: str


class Thought(msgspec.Struct, tag="thought"):
    text: str


class Called(ToolCall, frozen=True, tag="called"):
    """A call that the model made; tagged, so that it can be told from text when it is read back."""


Part = Said | Thought | Called


class Choice(msgspec.Struct, omit_defaults=True):
    parts: list[Part] = []  # in the order in which the model wrote them; none is empty text
    logprobs: list[TextLogprob] = []
    finish: Literal["stop", "length", "tool_calls"] = "stop"
    stop_sequence: str | None = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Said))

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Thought))

    @property
    def tool_calls(self) -> list[ToolCall]:
        return [ToolCall(part.id, part.name, part.arguments) for part in self.parts if isinstance(part, Called)]


class Answer(msgspec.Struct):
    choices: list[Choice]
    usage: Usage
