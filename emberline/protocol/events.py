"""Output events: token deltas from an engine, text events from the service, and token usage."""

import struct
from collections.abc import Iterable, Iterator
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
    image_tokens: int = 0  # of the prompt: they stand for images
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_by_tier: dict[str, int] = {}  # keys: "device", "host", "disk", "pool"; "pushed" by a prefill worker
    audio_ms: int = 0  # heard, or of a video made
    images: int = 0  # made
    predictions: int = 0  # begun by a predictor
    compute_ms: int = 0  # that a predictor took
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


class PromptLogprobs(msgspec.Struct, array_like=True):
    """The log-probabilities of consecutive tokens of a prompt, as columns of little-endian numbers."""

    logprobs: bytes  # float32, one for each token
    ranks: bytes  # u32; 1: no token was more likely
    top_ids: bytes  # u32 [tokens, k], the most likely tokens at each place, best first
    top_logprobs: bytes  # float32 [tokens, k]

    def rows(self) -> Iterator[tuple[float, int, list[tuple[int, float]]]]:
        """Yield, for each token, its log-probability and rank and the most likely tokens with their
        log-probabilities."""
        logprobs, ranks, top_ids, top = (
            [value for (value,) in struct.iter_unpack(kind, column)]
            for kind, column in zip(("<f", "<I", "<I", "<f"), msgspec.structs.astuple(self))
        )
        k = len(top_ids) // len(logprobs) if logprobs else 0
        for n, (logprob, rank) in enumerate(zip(logprobs, ranks)):
            yield logprob, rank, list(zip(top_ids[n * k : n * k + k], top[n * k : n * k + k]))

    @classmethod
    def joined(cls, parts: Iterable["PromptLogprobs"]) -> "PromptLogprobs":
        """Consecutive parts as one."""
        return cls(*map(b"".join, zip(*map(msgspec.structs.astuple, parts))))


class TokenDelta(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The output of one step for one sequence. With `finish` set it is the sequence's terminal event."""

    id: str
    token_ids: bytes = b""  # u32 little-endian
    finish: FinishReason | None = None
    usage: Usage | None = None  # set in the first delta (prompt and cached tokens) and in the last
    logprobs: list[TokenLogprobs] | None = None
    error: ErrorInfo | None = None  # with finish == "error"
    waited_s: float = 0.0  # in the engine's queue; in the first delta
    values: bytes = b""  # of an encoder, with its `finish`: float32 little-endian, a row for each text
    prompt_logprobs: PromptLogprobs | None = None  # in deltas before the first token: each continues the one before it


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


class PromptTokens(msgspec.Struct, omit_defaults=True):
    """A prompt as a client wants to have it back."""

    ids: bytes  # u32 little-endian
    text: str = ""  # of a prompt that is not a conversation: as the client sent it, or what its tokens stand for
    logprobs: PromptLogprobs | None = None  # of all tokens but the first
    spelled: dict[int, str] = {}  # with `logprobs`: what the tokens of the prompt and their alternatives stand for


class PromptEcho(msgspec.Struct):
    """The prompt of a choice, before the choice's own events, if the client wants to have it back."""

    index: int
    prompt: PromptTokens


class OutputIds(msgspec.Struct):
    """Token ids (u32 little-endian) of a choice, before the events made from them, if the client wants to have them."""

    index: int
    token_ids: bytes


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

    @property
    def thinking_blocks(self) -> list[dict[str, Any]]:
        """Blocks of thinking that the provider has signed or encrypted, if that is what the message's value holds."""
        blocks = self.value if self.name == "thinking_blocks" and self.call is None else None
        found = [one for one in blocks if isinstance(one, dict)] if isinstance(blocks, list) else []
        return [one for one in found if one.get("type") in ("thinking", "redacted_thinking")]


# Why a choice ended. Only providers end one by a `content_filter`.
Finish = Literal["stop", "length", "tool_calls", "content_filter"]


class ChoiceDone(msgspec.Struct):
    index: int
    finish: Finish
    stop_sequence: str | None = None  # the stop string that ended the choice, if any


class SequenceIds(msgspec.Struct, frozen=True):
    """Token ids (u32 little-endian) of a finished sequence."""

    prompt: bytes
    reply: bytes


class Completed(msgspec.Struct):
    """The terminal event: the usage row is durable."""

    usage: Usage
    price: Price | None = None  # at which the request is charged
    cost_pico: int | None = None  # None: the model has no price
    # Of a task whose result comes whole; the last bytes of a relayed reply; SequenceIds of our engine's first choice.
    result: Any = None


ChoiceEvent = (
    PromptEcho | OutputIds | TextDelta | ReasoningDelta | ToolCallStarted | ToolCallDelta | Opaque | ChoiceDone
)
TextEvent = Started | ChoiceEvent | Completed
