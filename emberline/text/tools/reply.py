"""A whole reply, put together from its pieces."""

from collections.abc import Iterable

import msgspec

from emberline.protocol.request import Message
from emberline.text.tools.pieces import Argued, CallBegun, Piece, Said, Thought


class Call(msgspec.Struct):
    name: str
    number: str  # the model's own, where its family writes one
    arguments: str = ""


class Reply(msgspec.Struct):
    text: str = ""
    reasoning: str = ""
    calls: list[Call] = []

    def add(self, pieces: Iterable[Piece]) -> "Reply":
        for piece in pieces:
            if isinstance(piece, Said):
                self.text += piece.text
            elif isinstance(piece, Thought):
                self.reasoning += piece.text
            elif isinstance(piece, CallBegun):
                self.calls.append(Call(piece.name, piece.number))
            elif isinstance(piece, Argued):
                self.calls[-1].arguments += piece.text
        return self

    def says(self, message: Message) -> bool:
        """Whether the message is this reply: the same text and reasoning, and calls that mean the same."""
        if self.text != message.content or self.reasoning != (message.reasoning or ""):
            return False
        ours = [(call.name, parsed(call.arguments)) for call in self.calls]
        return ours == [(call.name, parsed(call.arguments)) for call in message.tool_calls]


def parsed(arguments: str) -> object:
    """JSON as it means, whatever its spaces and the order of its keys; text that is none, as it is."""
    try:
        return msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return arguments
