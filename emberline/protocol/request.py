"""What a caller asks for: as text (`GenerateRequest`, one form for every door) and as token ids (`EngineRequest`)."""

from enum import IntEnum
from typing import Any, Literal

import msgspec

MessageRole = Literal["system", "developer", "user", "assistant", "tool"]


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
    role: MessageRole
    content: str
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None  # of an assistant's earlier turn; the template decides what it keeps of it


class Tool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}  # JSON Schema of an object
    strict: bool = False


class ToolChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None  # with "required": this function and no other


class OutputFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the reply's text must be. Tool calls, where they are allowed, may come instead."""

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar"]
    value: Any = None  # the schema, the pattern, the list of strings, the grammar's text


class Reasoning(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a model that can think before it answers shall do so. None: as it does by itself."""

    enabled: bool | None = None
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    budget_tokens: int | None = None  # most tokens of thinking; then it is ended


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
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    output: OutputFormat | None = None
    reasoning: Reasoning = Reasoning()


class ThinkingLimit(msgspec.Struct, frozen=True):
    """When `most` tokens were drawn and none of `end_ids` was among them, `ids` are put into the reply at once."""

    most: int
    end_ids: tuple[int, ...]
    ids: bytes  # u32 little-endian


class Push(msgspec.Struct, frozen=True, kw_only=True):
    """Where a prefill engine pushes the prompt's KV: to the engine that awaits it under the same transfer's name."""

    transfer: str
    address: str  # of the decode engine, as its clients know it
    token: str = ""  # to join there


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence for one engine: token ids in, token ids out."""

    id: str
    prompt_ids: bytes  # u32 little-endian
    sampling: SamplingParams
    salt: bytes = b""  # the account's; roots the block hashes, so tenants never share KV
    session: str | None = None
    priority: Priority = Priority.DEFAULT
    deadline_s: float | None = None
    grammar: bytes = b""  # an encoded `grammar.Grammar` that the reply must match; empty: anything goes
    thinking_limit: ThinkingLimit | None = None
    output_ids: bytes = b""  # u32 little-endian; what another engine had drawn before it was lost: the reply goes on
    keys: bytes = b""  # content keys of the prompt's full blocks, end to end; empty: the engine computes them
    push: Push | None = None  # compute the prompt's full blocks, push them, draw nothing
    awaits: str = ""  # the transfer that brings the prompt's full blocks; only the rest is computed here


class Principal(msgspec.Struct, frozen=True):
    """The caller of a request, after authentication. The account is the tenant: it salts caches and owns sessions."""

    account: str
    key_id: str = ""  # empty in local mode
    salt: bytes = b""  # 16 bytes derived from the root secret and the account
