"""What a caller asks for: as text (`GenerateRequest`, one form for every door) and as token ids (`EngineRequest`)."""

from enum import IntEnum
from typing import Any, Literal

import msgspec

Role = Literal["system", "developer", "user", "assistant", "tool"]


class Priority(IntEnum):
    """Admission and scheduling classes; smaller goes first."""

    PRIORITY = 0
    DEFAULT = 1
    FLEX = 2
    BATCH = 3


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen and when to stop. Ranges are checked once, by `validate`."""

    max_tokens: int | None = None  # None: as many as the context allows
    min_tokens: int = 0
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    stop: tuple[str, ...] = ()  # matched on text, by the text room
    stop_ids: tuple[int, ...] = ()  # matched by the engine, beside the model's own end tokens
    ignore_eos: bool = False
    logprobs: int | None = None  # None: off; k: the chosen token's and the k likeliest (0..20)


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True):
    id: str
    name: str
    arguments: str  # JSON text


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    role: Role
    content: str
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The canonical request: what every door translates its dialect into, and what the queue will store."""

    id: str
    model: str
    messages: tuple[Message, ...] | None = None  # exactly one of messages, prompt, prompt_ids is set
    prompt: str | None = None  # text, no template
    prompt_ids: bytes | None = None  # u32 little-endian token ids
    sampling: SamplingParams = SamplingParams()
    n: int = 1
    session: str | None = None  # the client's own name for the conversation
    priority: Priority = Priority.DEFAULT
    deadline_s: float | None = None  # seconds from acceptance
    reject_if_busy: bool = False  # rather refused than kept waiting for others
    template_kwargs: dict[str, Any] = {}


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence for one engine: token ids in, token ids out."""

    id: str
    prompt_ids: bytes  # u32 little-endian
    sampling: SamplingParams
    salt: bytes = b""  # the account's; roots the block hashes, so tenants never share KV
    session: str | None = None
    priority: Priority = Priority.DEFAULT
    deadline_s: float | None = None
