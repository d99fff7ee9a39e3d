"""The whole answer to a call, for clients that want no stream."""

from typing import Any

import msgspec

from emberline.api.call import Call
from emberline.api.departure import while_connected
from emberline.api.ports import Events
from emberline.protocol.answer import Answer, Called, Choice, Part, Said, Thought
from emberline.protocol.request import ToolCall
from emberline.service.gathering import Draft, gather

__all__ = ["Answer", "Called", "Choice", "Draft", "Part", "Said", "Thought", "arguments_of", "collect", "gather"]


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
