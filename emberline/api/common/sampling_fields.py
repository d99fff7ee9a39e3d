"""The fields that OpenAI's and Cloudflare's bodies share, their ranges, and their way into SamplingParams.

Unknown fields are tolerated; one that exists in a dialect and is not built yet is not (`unbuilt.py`).
"""

from hashlib import blake2b
from typing import Annotated, Literal

from msgspec import Meta

from emberline.api.common.response_format import Constrained
from emberline.api.http.body import UnsupportedField
from emberline.api.http.call import Call
from emberline.protocol.request import Priority, SamplingParams

MAX_CHOICES = 16
LEAST_TOP_P = 1e-6  # clients write 0 and mean the likeliest token alone
_SESSION_CHARS = 256

Penalty = Annotated[float, Meta(ge=-2, le=2)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]
TokenCount = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
StopString = Annotated[str, Meta(min_length=1, max_length=256)]
StopStrings = Annotated[list[StopString], Meta(max_length=16)]
LogitBias = Annotated[
    dict[Annotated[str, Meta(pattern="^[0-9]{1,9}$")], Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)
]
ServiceTier = Literal["auto", "default", "flex", "priority"]

PRIORITY = {
    None: Priority.DEFAULT,
    "auto": Priority.DEFAULT,
    "default": Priority.DEFAULT,
    "flex": Priority.FLEX,
    "priority": Priority.PRIORITY,
}


class Generation(Constrained, kw_only=True):
    """A body that asks for text. Doors inherit from it and narrow what their dialect narrows."""

    stream: bool | None = None
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    seed: Seed | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    service_tier: ServiceTier | None = None
    lora: UnsupportedField = None

    def sampling(self, default_temperature: float, logprobs: int | None = None) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_completion_tokens or self.max_tokens,
            min_tokens=self.min_tokens or 0,
            temperature=default_temperature if self.temperature is None else self.temperature,
            top_k=max(self.top_k or 0, 0),
            top_p=1.0 if self.top_p is None else max(self.top_p, LEAST_TOP_P),
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            logit_bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
            seed=self.seed,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
        )

    @property
    def priority(self) -> Priority:
        return PRIORITY[self.service_tier]

    @property
    def rejects_waiting(self) -> bool:
        """Flex has what is free now, and is told at once when nothing is."""
        return self.priority is Priority.FLEX

    @property
    def tier_echo(self) -> dict[str, str]:
        """The tier as OpenAI says it back to those who asked for one."""
        return {"service_tier": self.priority.name.lower()} if self.service_tier else {}


def session_name(call: Call, *from_body: str | None) -> str | None:
    """The client's own name for the conversation: a header's, else the first the body has. Bounded in length."""
    name = call.session or next((name for name in from_body if name), None)
    if name and len(name) > _SESSION_CHARS:
        return blake2b(name.encode(), digest_size=16).hexdigest()
    return name
