"""A whole answer told again as the events that it was made of, one for each of its parts."""

from collections.abc import Iterator

from emberline.protocol.answer import Answer, Choice, Said, Thought
from emberline.protocol.events import (
    ChoiceDone,
    ReasoningDelta,
    TextDelta,
    TextLogprob,
    ToolCallDelta,
    ToolCallStarted,
)

Piece = TextDelta | ReasoningDelta | ToolCallStarted | ToolCallDelta | ChoiceDone


def pieces_of(answer: Answer) -> Iterator[Piece]:
    for index, choice in enumerate(answer.choices):
        yield from _pieces(index, choice)


def _pieces(index: int, choice: Choice) -> Iterator[Piece]:
    n_said = sum(isinstance(part, Said) for part in choice.parts)
    logprobs, n_calls = list(choice.logprobs), 0
    for part in choice.parts:
        if isinstance(part, Said):
            n_said -= 1
            yield TextDelta(index, part.text, _of_text(part.text, logprobs, last=n_said == 0) or None)
        elif isinstance(part, Thought):
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
