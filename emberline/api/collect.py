"""The events of one request gathered into a whole answer."""

from contextlib import aclosing
from typing import Literal

import msgspec

from emberline.api.call import Call
from emberline.api.departure import while_connected
from emberline.api.ports import Events
from emberline.protocol.errors import Internal
from emberline.protocol.events import ChoiceDone, Completed, TextDelta, TextLogprob, Usage


class Choice(msgspec.Struct):
    text: str = ""
    logprobs: list[TextLogprob] = []
    finish: Literal["stop", "length"] = "stop"
    stop_sequence: str | None = None


class Answer(msgspec.Struct):
    choices: list[Choice]
    usage: Usage


async def collect(call: Call, events: Events, n_choices: int = 1) -> Answer:
    """Wait for the end of `events`; a client that leaves ends them."""
    return await while_connected(call.receive, _gather(events, n_choices))


async def _gather(events: Events, n_choices: int) -> Answer:
    choices = [Choice() for _ in range(n_choices)]
    texts: list[list[str]] = [[] for _ in choices]
    async with aclosing(events):
        async for event in events:
            if isinstance(event, TextDelta):
                texts[event.index].append(event.text)
                if event.logprobs:
                    choices[event.index].logprobs += event.logprobs
            elif isinstance(event, ChoiceDone):
                choices[event.index].finish = event.finish
                choices[event.index].stop_sequence = event.stop_sequence
            elif isinstance(event, Completed):
                for choice, pieces in zip(choices, texts, strict=True):
                    choice.text = "".join(pieces)
                return Answer(choices, event.usage)
    raise Internal("the answer ended before it was complete")
