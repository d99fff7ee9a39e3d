"""What comes back: token deltas from an engine, text events from the service, and the usage of both."""

from typing import Literal

import msgspec

from emberline.protocol.errors import ErrorInfo

FinishReason = Literal["stop", "length", "cancelled", "error"]


class Usage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Tokens of one request. `cached_tokens` of the prompt were not computed again; `cached_by_tier` splits them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_by_tier: dict[str, int] = {}  # "device", later "host", "disk", "remote"

    @property
    def cached_tokens(self) -> int:
        return sum(self.cached_by_tier.values())

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class TokenLogprobs(msgspec.Struct, array_like=True):
    """The chosen token's log-probability and the likeliest alternatives, best first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class TokenDelta(msgspec.Struct, array_like=True, omit_defaults=True):
    """What one step added to one sequence. A set `finish` makes it the sequence's terminal event."""

    id: str
    token_ids: bytes = b""  # u32 little-endian
    finish: FinishReason | None = None
    usage: Usage | None = None  # with the first delta (prompt and cached tokens known) and with the last
    logprobs: list[TokenLogprobs] | None = None
    error: ErrorInfo | None = None  # with finish == "error"


# --- events of service.generate: exactly one Started, then deltas, one ChoiceDone per choice, one Completed ---------


class Started(msgspec.Struct):
    """The first token is there: the prompt's usage is known."""

    usage: Usage


class TextLogprob(msgspec.Struct):
    """One token's log-probability as a client sees it: with its text."""

    token: str
    logprob: float
    bytes: list[int]
    top: "list[TextLogprob]" = []


class TextDelta(msgspec.Struct):
    index: int  # which of the request's n choices
    text: str
    logprobs: list[TextLogprob] | None = None


class ReasoningDelta(msgspec.Struct):
    """A piece of what the model thinks before it answers."""

    index: int
    text: str


class ToolCallStarted(msgspec.Struct):
    """The model calls a function that the request declared."""

    index: int
    call: int  # which of the choice's calls, from 0
    id: str
    name: str


class ToolCallDelta(msgspec.Struct):
    """A piece of a call's arguments; all of them together are a JSON object's text."""

    index: int
    call: int
    arguments: str


class ChoiceDone(msgspec.Struct):
    index: int
    finish: Literal["stop", "length", "tool_calls"]
    stop_sequence: str | None = None  # the stop string that ended it, if one did


class Completed(msgspec.Struct):
    """The usage row is durable; nothing follows."""

    usage: Usage


TextEvent = Started | TextDelta | ReasoningDelta | ToolCallStarted | ToolCallDelta | ChoiceDone | Completed
