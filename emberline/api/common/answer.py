"""The whole answer to a call, for clients that want no stream."""

from collections.abc import Iterator
from typing import Any

import msgspec

from emberline.api.http.backend import Events
from emberline.api.http.call import Call
from emberline.api.http.disconnect import while_connected
from emberline.protocol.answer import Answer, AnswerChoice, ReasoningPart, TextPart
from emberline.protocol.events import ChoiceDone, ReasoningDelta, TextDelta, TextLogprob, ToolCallDelta, ToolCallStarted
from emberline.protocol.request import ToolCall
from emberline.service.answer import Draft, gather

__all__ = ["Answer", "AnswerChoice", "Draft", "arguments_of", "collect", "gather"]


async def collect(call: Call, events: Events, n_choices: int = 1) -> Answer:
    """Wait for the end of `events`; a client that leaves ends them."""
    return await while_connected(call.receive, gather(events, n_choices))


def arguments_of(call: ToolCall) -> msgspec.Raw | None:
    """A call's arguments as a JSON object, byte for byte; None: the token limit cut them, so that it is no call."""
    try:
        msgspec.json.decode(call.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None
    return msgspec.Raw(call.arguments or "{}")


Piece = TextDelta | ReasoningDelta | ToolCallStarted | ToolCallDelta | ChoiceDone


def pieces_of(answer: Answer) -> Iterator[Piece]:
    for index, choice in enumerate(answer.choices):
        yield from _pieces(index, choice)


def _pieces(index: int, choice: AnswerChoice) -> Iterator[Piece]:
    n_said = sum(isinstance(part, TextPart) for part in choice.parts)
    logprobs, n_calls = list(choice.logprobs), 0
    for part in choice.parts:
        if isinstance(part, TextPart):
            n_said -= 1
            yield TextDelta(index, part.text, _of_text(part.text, logprobs, last=n_said == 0) or None)
        elif isinstance(part, ReasoningPart):
            yield ReasoningDelta(index, part.text)
        else:
            yield ToolCallStarted(index, n_calls, part.id, part.name)
            yield ToolCallDelta(index, n_calls, part.arguments)
            n_calls += 1
    yield ChoiceDone(index, choice.finish, choice.stop_sequence)


def _of_text(text: str, left: list[TextLogprob], last: bool) -> list[TextLogprob]:
    """Of the logprobs that are left, those of this text; taken away."""
    n_taken, n_chars = 0, 0
    while n_taken < len(left) and (last or n_chars < len(text)):
        n_chars += len(left[n_taken].token)
        n_taken += 1
    taken = left[:n_taken]
    del left[:n_taken]
    return taken
