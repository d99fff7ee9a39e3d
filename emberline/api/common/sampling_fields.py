"""Sampling fields that the OpenAI and Workers AI request bodies share, and their conversion to SamplingParams.

`service.validation` holds the bounds of the canonical request; an API may only narrow them.
"""

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from emberline.api.common.unsupported_fields import PeerFields
from emberline.protocol.errors import BadInput
from emberline.protocol.request import MAX_DRAFT_TOKENS, MODEL_DEFAULTS, Priority, SamplingParams, Speculation
from emberline.service.validation import (
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_STOP_CHARS,
    MAX_STOPS,
    MAX_TOKENS,
)

MAX_STOP_IDS = 64
_TOKEN_KEY = re.compile("[0-9]{1,9}")
MIN_TOP_P = 1e-6  # clients send 0 for greedy sampling

Temperature = Annotated[float, Meta(ge=0, le=2)]  # the OpenAI API's range; the Workers AI API takes more
Probability = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-MAX_PENALTY, le=MAX_PENALTY)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=MAX_REPETITION_PENALTY)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)]
TokenCount = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
TokenCountOrZero = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
TopK = Annotated[int, Meta(ge=-1, le=MAX_TOKENS)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
NumChoices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings = Annotated[list[StopString], Meta(max_length=MAX_STOPS)]
BadWords = Annotated[list[StopString], Meta(max_length=MAX_BAD_WORDS)]
# Its entries are checked by `biases`, whose errors name the key: those of the decoder cannot.
LogitBias = Annotated[
    dict[str, Any],
    Meta(
        max_length=MAX_BIASES,
        extra_json_schema={
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -MAX_LOGIT_BIAS, "maximum": MAX_LOGIT_BIAS},
        },
    ),
]
AllowedIds = Annotated[list[TokenId], Meta(min_length=1)]
# A model's name. The body that an endpoint reads may lack it: then it is that of the only model (`body.read_wire`).
ModelName = Annotated[str, Meta(extra_json_schema={"type": ["string", "null"]})]
CacheRetention = Literal["in_memory", "in-memory", "24h"]
ServiceTier = Literal["auto", "default", "flex", "priority"]
Metadata = Annotated[dict[str, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]

PRIORITY = {
    None: Priority.DEFAULT,
    "auto": Priority.DEFAULT,
    "default": Priority.DEFAULT,
    "flex": Priority.FLEX,
    "priority": Priority.PRIORITY,
}


class SpeculationField(msgspec.Struct, forbid_unknown_fields=True):
    """Our extension: how much of speculative decoding a request wants, and whether its usage tells what it gave."""

    max_draft_tokens: Annotated[int, Meta(ge=0, le=MAX_DRAFT_TOKENS)] | None = None
    report: bool = False

    @staticmethod
    def setting(asked: "SpeculationField | None") -> Speculation:
        return Speculation() if asked is None else Speculation(asked.max_draft_tokens, asked.report)


class SamplingFields(PeerFields, kw_only=True):
    """Fields that control how tokens are sampled and when replies end, and that name the caller for sessions and
    scheduling."""

    stream: bool | None = None
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    min_tokens: TokenCountOrZero | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: TopK | None = None
    min_p: Probability | None = None
    repetition_penalty: RepetitionPenalty | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    seed: Seed | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: TokenIds | None = None
    allowed_token_ids: AllowedIds | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: BadWords | None = None
    ignore_eos: bool | None = None
    n: NumChoices | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: CacheRetention | None = None
    service_tier: ServiceTier | None = None
    speculation: SpeculationField | None = None

    def sampling(self, default_temperature: float, logprobs: int | None = None) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            min_tokens=self.min_tokens or 0,
            temperature=default_temperature if self.temperature is None else self.temperature,
            top_k=max(self.top_k or 0, 0),
            top_p=clamp_top_p(self.top_p),
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            logit_bias=biases(self.logit_bias) if self.logit_bias else {},
            seed=self.seed,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_ids=tuple(self.stop_token_ids or ()),
            include_stop=bool(self.include_stop_str_in_output),
            bad_words=tuple(self.bad_words or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
            allowed_ids=tuple(self.allowed_token_ids or ()),
        )

    @property
    def cache_ttl_s(self) -> int:
        return cache_ttl_s(self.prompt_cache_retention)

    @property
    def left_to_model(self) -> tuple[str, ...]:
        return left_to_model(self)

    @property
    def priority_class(self) -> Priority:
        return PRIORITY[self.service_tier]

    @property
    def reject_if_busy(self) -> bool:
        """Flex requests take capacity that is free now and are refused instead of waiting."""
        return self.priority_class is Priority.FLEX

    @property
    def tier_echo(self) -> dict[str, str]:
        """The response's `service_tier`, present only if the request named one."""
        return {"service_tier": self.priority_class.name.lower()} if self.service_tier else {}


def required_model(name: str) -> str:
    """The name of a model. Raises BadInput if the body has none, such as a line of a batch."""
    if not name:
        raise BadInput("`model` is missing", param="model")
    return name


def biases(given: dict[str, Any]) -> dict[int, float]:
    """`logit_bias` by token id. Raises BadInput, which names the key that is wrong."""
    found: dict[int, float] = {}
    for key, bias in given.items():
        if not _TOKEN_KEY.fullmatch(key):
            message = f"`logit_bias` has the key {key[:40]!r}: its keys are token ids, as decimal numbers in quotes"
            raise BadInput(message, param="logit_bias")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not abs(bias) <= MAX_LOGIT_BIAS:
            message = f"`logit_bias.{key}` must be a number from -{MAX_LOGIT_BIAS} to {MAX_LOGIT_BIAS}"
            raise BadInput(message, param="logit_bias")
        found[int(key)] = float(bias)
    return found


def left_to_model(body: Any) -> tuple[str, ...]:
    """The sampling parameters of the body that the client has not set, or cannot set in this API."""
    return tuple([name for name in MODEL_DEFAULTS if getattr(body, name, None) is None])


def cache_ttl_s(retention: str | None) -> int:
    """Return the seconds for which the client wants its KV kept; 0 if it does not say."""
    return 86_400 if retention == "24h" else 300 if retention is not None else 0


def clamp_top_p(top_p: float | None) -> float:
    return 1.0 if top_p is None else max(top_p, MIN_TOP_P)
