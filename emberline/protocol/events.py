"""Output events: token deltas from an engine, text events from the service, and token usage."""

from typing import Any, Literal

import msgspec

from emberline.protocol.errors import ErrorInfo
from emberline.protocol.price import Price

FinishReason = Literal["stop", "length", "cancelled", "error"]


class Cost(msgspec.Struct, frozen=True):
    """The cost of a request, in pico-units. None: its model has no price, which is not zero."""

    pico: int | None


class DraftUsage(msgspec.Struct, frozen=True, array_like=True):
    """Draft tokens of speculative decoding that were verified, and those of them that became tokens of the reply."""

    drafted: int = 0
    accepted: int = 0


class Usage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Token counts of one request. `cached_by_tier` counts the prompt tokens served from the KV cache, by tier.

    An engine sets `partial` where `prompt_tokens` and `audio_ms` count only what it had computed, or found in a cache,
    when the sequence ended. Without it they count the whole prompt, computed or not.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_by_tier: dict[str, int] = {}  # keys: "device", "host", "disk", "pool"; "pushed" by a prefill worker
    audio_ms: int = 0  # heard, or of a video made
    images: int = 0  # made
    cost: Cost | None = None  # where the client has asked for it
    drafts: DraftUsage | None = None  # where the client has asked for it
    partial: bool = False  # True in the terminal delta of a sequence that was aborted or failed: counts so far

    @property
    def cached_tokens(self) -> int:
        return sum(self.cached_by_tier.values())

    @property
    def cached_below_device(self) -> dict[str, int]:
        """`cached_by_tier` where some tokens came from a tier below the device's own cache; else empty."""
        tiers = {tier: n_tokens for tier, n_tokens in self.cached_by_tier.items() if n_tokens}
        return tiers if tiers.keys() - {"device"} else {}

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class TokenLogprobs(msgspec.Struct, array_like=True):
    """The log-probabilities of a sampled token and of its most likely alternatives, best first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class TokenDelta(msgspec.Struct, array_like=True, omit_defaults=True):
    """The output of one step for one sequence. With `finish` set it is the sequence's terminal event."""

    id: str
    token_ids: bytes = b""  # u32 little-endian
    finish: FinishReason | None = None
    usage: Usage | None = None  # set in the first delta (prompt and cached tokens) and in the last
    logprobs: list[TokenLogprobs] | None = None
    error: ErrorInfo | None = None  # with finish == "error"
    waited_s: float = 0.0  # in the engine's queue; in the first delta
    values: bytes = b""  # of an encoder, with its `finish`: float32 little-endian, a row for each text


# --- events of a task that generates: exactly one Started, then deltas, one ChoiceDone per choice, one Completed ------


class Started(msgspec.Struct):
    """The first token was generated; the prompt's usage is known."""

    usage: Usage


class TextLogprob(msgspec.Struct):
    """One token's log-probability, with the token's text."""

    token: str
    logprob: float
    bytes: list[int]
    top: "list[TextLogprob]" = []


class TextDelta(msgspec.Struct):
    index: int  # of the choice, below the request's n
    text: str
    logprobs: list[TextLogprob] | None = None


class ReasoningDelta(msgspec.Struct):
    """A piece of the model's reasoning text."""

    index: int
    text: str


class ToolCallStarted(msgspec.Struct):
    """The model began a call of one of the request's tools."""

    index: int
    call: int  # index among the choice's calls
    id: str
    name: str


class ToolCallDelta(msgspec.Struct):
    """A piece of a call's arguments; concatenated, the pieces are a JSON object."""

    index: int
    call: int
    arguments: str


class Opaque(msgspec.Struct):
    """A value that only the provider understands. The client sends it back with the next turn, as `request.Marks`."""

    index: int
    name: str
    value: Any  # the whole of it: of several with one name, the last counts
    call: int | None = None  # index of the tool call that it belongs to; None: the message


# Why a choice ended. Only providers end one by a `content_filter`.
Finish = Literal["stop", "length", "tool_calls", "content_filter"]


class ChoiceDone(msgspec.Struct):
    index: int
    finish: Finish
    stop_sequence: str | None = None  # the stop string that ended the choice, if any


class Completed(msgspec.Struct):
    """The terminal event: the usage row is durable."""

    usage: Usage
    price: Price | None = None  # at which the request is charged
    cost_pico: int | None = None  # None: the model has no price
    result: Any = None  # of a task whose result comes whole; the last bytes of a relayed reply


TextEvent = Started | TextDelta | ReasoningDelta | ToolCallStarted | ToolCallDelta | Opaque | ChoiceDone | Completed
