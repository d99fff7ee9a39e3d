"""Requests: as text (`GenerateRequest`, one form for every API) and as token ids (`EngineRequest`)."""

from collections.abc import Iterable
from enum import IntEnum
from hashlib import blake2b
from typing import Any, Literal

import msgspec

from emberline.protocol.block_hash import KVGroup
from emberline.protocol.encoding import EncodeParams, Pooling
from emberline.protocol.errors import Forbidden
from emberline.protocol.images import ImagePlan, PromptImage
from emberline.protocol.prediction import PredictParams
from emberline.protocol.speech import TranscribeParams

_MAX_SESSION_CHARS = 256

MessageRole = Literal["system", "developer", "user", "assistant", "tool"]


class Priority(IntEnum):
    """Admission and scheduling classes; lower values go first."""

    PRIORITY = 0
    DEFAULT = 1
    FLEX = 2
    BATCH = 3


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters and stop conditions. Ranges are validated by the APIs."""

    max_tokens: int | None = None  # None: up to the context length; 0: the prompt is computed and nothing is sampled
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
    stop: tuple[str, ...] = ()  # stop strings, matched on the detokenized text
    stop_ids: tuple[int, ...] = ()  # matched by the engine, in addition to the model's EOS tokens
    include_stop: bool = False  # the text includes what stopped it: the stop string, or the text of the stop token
    bad_words: tuple[str, ...] = ()  # texts that must not be generated
    bad_ids: tuple[bytes, ...] = ()  # the same as token ids, u32 little-endian each; filled in before an engine gets it
    ignore_eos: bool = False
    logprobs: int | None = None  # None: off; k: of the sampled token and the k most likely (0..20)
    prompt_logprobs: int | None = None  # the same for each token of the prompt but the first
    allowed_ids: tuple[int, ...] = ()  # only these tokens are sampled; empty: all


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters that a model's publisher recommends. None: no recommendation."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @property
    def given(self) -> dict[str, float]:
        return {name: value for name in MODEL_DEFAULTS if (value := getattr(self, name)) is not None}

    def apply(self, sampling: SamplingParams, names: tuple[str, ...]) -> SamplingParams:
        """Replace the parameters with these names by the recommendations, where there are any."""
        replaced = {name: value for name, value in self.given.items() if name in names}
        return msgspec.structs.replace(sampling, **replaced) if replaced else sampling


MODEL_DEFAULTS = SamplingDefaults.__struct_fields__


# Values that only a provider understands, by the names under which OpenAI's clients send them: `cache_control` of
# parts, messages and tools, `thinking_blocks` of messages, `extra_content` of tool calls. They are passed on.
Marks = dict[str, Any]


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """A call of a function, made by the assistant."""

    id: str
    name: str
    arguments: str  # JSON text
    marks: Marks = {}


class ContentPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """One part of a message's content. Media are URLs: data: URLs, https: URLs of images, or the id of a stored file
    (`images.sources.FILE_SCHEME`)."""

    kind: Literal["text", "image", "file", "audio"]
    value: str  # the text, or the URL
    name: str = ""  # the file's
    marks: Marks = {}
    detail: str = ""  # of an image, as OpenAI's clients ask for it: "low", "high", "auto", "original"


class PreparedImage(ContentPart, frozen=True, kw_only=True):
    """An image as the model's tower will see it. Its value is the digest of that (`images.image_digest`), in hex."""

    plan: ImagePlan


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn of a conversation.

    `content` is all of its text. `parts` is empty if that says everything; otherwise it has the texts too, in order
    with media and marks.
    """

    role: MessageRole
    content: str
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None  # of an earlier assistant turn; the chat template decides what it keeps
    parts: tuple[ContentPart, ...] = ()
    marks: Marks = {}

    @property
    def content_parts(self) -> tuple[ContentPart, ...]:
        """The content as parts, without empty texts, which providers refuse."""
        parts = self.parts or (ContentPart("text", self.content),)
        return tuple(part for part in parts if part.value or part.kind != "text")

    @property
    def n_media(self) -> int:
        """Number of parts that are not text."""
        return sum(part.kind != "text" for part in self.parts)


class Tool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function the model may call."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}  # JSON Schema of an object
    strict: bool = False
    marks: Marks = {}


class ToolChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None  # with "required": the only function allowed


class OutputFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """The format of the reply's text. Where tools are allowed, tool calls may replace the text."""

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar"]
    value: Any = None  # a JSON schema, a regex, a list of strings, or a grammar's text


class Reasoning(msgspec.Struct, frozen=True, omit_defaults=True):
    """Reasoning settings for models that support it. None: the model's default."""

    enabled: bool | None = None
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    budget_tokens: int | None = None  # maximum reasoning tokens; then reasoning is ended
    is_required: bool = False  # a model that does not reason refuses to; otherwise the reply tells of it

    @property
    def is_asked(self) -> bool:
        """True if the request asks for reasoning, or says how much there should be."""
        return bool(self.enabled or self.effort not in (None, "none") or self.budget_tokens)


MAX_DRAFT_TOKENS = 15  # of a sequence in one step


class Speculation(msgspec.Struct, frozen=True, omit_defaults=True):
    """Speculative decoding of one request. It never changes what is generated."""

    max_draft_tokens: int | None = None  # per step; None: as many as pay
    report: bool = False  # the usage tells how many were drafted and accepted


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The canonical request: every API translates into it, and the job queue stores it."""

    id: str
    model: str
    messages: tuple[Message, ...] | None = None  # exactly one of messages, prompt, prompt_ids is set
    prompt: str | None = None  # raw text, no chat template
    prompt_ids: bytes | None = None  # u32 little-endian token ids
    suffix: str | None = None  # with `prompt`: the reply is what stands between the two
    sampling: SamplingParams = SamplingParams()
    left_to_model: tuple[str, ...] = ()  # sampling parameters that the client did not set: the model's defaults apply
    n: int = 1
    session: str | None = None  # the client's id of the conversation
    priority: Priority = Priority.DEFAULT
    deadline_s: float | None = None  # seconds from acceptance
    reject_if_busy: bool = False  # reject instead of queueing under load
    continue_final: bool = False  # the reply continues the last message, which is the assistant's
    echo: bool = False  # the answer has the prompt's text
    return_ids: bool = False  # the answer has the token ids of prompt and reply
    template_kwargs: dict[str, Any] = {}
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    output: OutputFormat | None = None
    reasoning: Reasoning = Reasoning()
    speculation: Speculation = Speculation()
    api: str = ""  # that the client used: "chat", "completions", "responses", "messages", "run" or "ollama"
    cache_ttl_s: int = 0  # a wish: the conversation's KV stays so long after the turn; 0: as long as the server thinks
    session_final: bool = False  # the session ends with this turn: its KV need not be kept
    end_user: str = ""  # the client's name of its own user, for a provider's abuse detection
    keep_alive_s: float | None = None  # of its model, once idle; below 0: for ever; None: as the server has it
    context_len: int | None = None  # tokens of prompt and reply together; None: as many as the model takes
    truncate: bool = False  # a prompt that is too long is cut; otherwise it is refused
    context_ids: bytes = b""  # u32 little-endian: earlier turns, which end with a reply and which `messages` continue
    encode: "EncodeRequest | None" = None  # of a queued job only: these texts are encoded, and nothing is generated
    predict: "PredictRequest | None" = None  # of a queued job only: a prediction is made, and nothing is generated

    @property
    def returns_prompt(self) -> bool:
        """True if the answer has something of the prompt."""
        return self.echo or self.return_ids or self.sampling.prompt_logprobs is not None


class EncodeRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The canonical request to encode texts. Its model says into what: vectors, relevance scores or labels."""

    id: str
    model: str
    texts: tuple[str, ...] = ()  # exactly one of texts and token_ids has entries
    token_ids: tuple[bytes, ...] = ()  # u32 little-endian; taken as they are, without special tokens added
    query: str | None = None  # of a reranker: each text is scored against it
    pooling: Pooling | None = None  # None: as the model was trained
    dimensions: int | None = None  # of the vectors; None: all
    truncate: bool = False  # a text that is too long is cut; otherwise it is refused
    session: str | None = None  # the client's id of the conversation
    priority: Priority = Priority.DEFAULT
    deadline_s: float | None = None  # seconds from acceptance
    reject_if_busy: bool = False  # reject instead of queueing under load
    api: str = ""  # that the client used: "embeddings", "rerank" or "run"
    keep_alive_s: float | None = None  # see GenerateRequest
    context_len: int | None = None  # tokens of each text, special ones included; None: as many as the model takes

    @property
    def n_texts(self) -> int:
        return len(self.texts) or len(self.token_ids)


class SpeechRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The canonical request to transcribe recorded speech."""

    id: str
    model: str
    audio: bytes  # a whole file: WAV, MP3, FLAC, Ogg, WebM, MP4, …
    language: str | None = None  # ISO 639-1; None: detected
    translate: bool = False  # into English
    prompt: str = ""  # text that comes before, or names and terms to expect
    temperature: float = 0.0
    words: bool = True  # with the times of words
    session: str | None = None  # the client's id of the conversation
    priority: Priority = Priority.DEFAULT
    deadline_s: float | None = None  # seconds from acceptance
    reject_if_busy: bool = False  # reject instead of queueing under load
    api: str = ""  # that the client used: "audio" or "run"


class PredictRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The canonical request for a prediction of a model that a user brought along."""

    id: str
    model: str
    input: dict[str, Any]
    stream: bool = False  # outputs as they come, where the predictor yields them
    context: dict[str, str] = {}  # that the predictor finds in its scope
    session: str | None = None
    priority: Priority = Priority.DEFAULT
    deadline_s: float | None = None  # seconds from acceptance
    reject_if_busy: bool = False  # reject instead of queueing under load
    api: str = ""
    keep_alive_s: float | None = None  # how long the model stays loaded after its last request; None: the default


class ThinkingLimit(msgspec.Struct, frozen=True):
    """Once `most` tokens were generated without any of `end_ids`, the engine forces `ids` into the output."""

    most: int
    end_ids: tuple[int, ...]
    ids: bytes  # u32 little-endian


class RankEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """Address at which one rank of a decode worker receives its slice of every block."""

    address: str  # empty: the worker's own
    kv_groups: tuple[KVGroup, ...]


class Push(msgspec.Struct, frozen=True, kw_only=True):
    """Order to a prefill worker to send the prompt's KV to the decode worker that awaits the same transfer id."""

    transfer: str
    address: str  # of the decode worker, as used by its clients
    sender: str = "sender"  # the prefill worker's name there
    ticket: str = ""  # `frames.transfer_ticket` of that name: it may send KV and nothing else
    tls_host: str = ""  # the name in the decode worker's certificate; empty: the connection is not encrypted
    version: int = 5  # of the protocol, that the decode worker speaks
    ranks: tuple[RankEndpoint, ...] = ()  # of the decode worker, where it or the prefill worker has several


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence for one engine: token ids in, token ids out."""

    id: str
    prompt_ids: bytes  # u32 little-endian
    sampling: SamplingParams
    salt: bytes = b""  # of the account; part of the block hashes' root, so that tenants never share KV
    session: str | None = None
    cache_ttl_s: int = 0  # see GenerateRequest
    session_final: bool = False
    priority: Priority = Priority.DEFAULT
    deadline_s: float | None = None
    grammar: bytes = b""  # an encoded `grammar.Grammar` that the output must match; empty: unconstrained
    thinking_limit: ThinkingLimit | None = None
    output_ids: bytes = b""  # u32 little-endian; generated by an engine that was lost: generation resumes behind them
    keys: bytes = b""  # content keys of the prompt's full blocks, concatenated; empty: the engine computes them
    push: Push | None = None  # prefill only: compute the prompt's full blocks and send them
    speculation: Speculation = Speculation()
    trace_id: str = ""  # for the engine's log lines
    awaits: str = ""  # id of the transfer that delivers the prompt's full blocks; only the rest is computed here
    encode: EncodeParams | None = None  # for an encoder: `prompt_ids` are texts to encode, and nothing is generated
    transcribe: TranscribeParams | None = None  # for a speech model: nothing but its audio is computed
    images: tuple[PromptImage, ...] = ()  # of the prompt, in its order
    predict: PredictParams | None = None  # for a predictor

    @property
    def masked(self) -> bool:
        """True if each draw has a mask of the tokens that it may sample."""
        return bool(self.grammar or self.sampling.allowed_ids)


class Principal(msgspec.Struct, frozen=True):
    """The authenticated caller. The account is the tenant: it salts block hashes and owns sessions."""

    account: str
    key_id: str = ""  # empty in local mode
    salt: bytes = b""  # 16 bytes derived from the root secret and the account
    role: Literal["user", "admin"] = "user"
    models: tuple[str, ...] = ()  # ids and aliases that it may use, or prefixes that end in *; empty: all
    apis: tuple[str, ...] = ()  # that it may call; empty: all

    @property
    def is_admin(self) -> bool:
        return self.role == "admin"

    def may_use(self, names: Iterable[str]) -> bool:
        """True if a model with these names (its id and aliases) is in the scope."""
        return not self.models or any(_matches(name, self.models) for name in names)

    def check_model(self, model_id: str, names: Iterable[str]) -> None:
        """Raise Forbidden unless the model is in the scope."""
        if not self.may_use((model_id, *names)):
            raise Forbidden(f"this key may not use {model_id}; it may use {', '.join(self.models)}", param="model")


def _matches(model: str, patterns: tuple[str, ...]) -> bool:
    name = model.lower()
    for pattern in patterns:
        wanted = pattern.lower()
        if name == wanted or (wanted.endswith("*") and name.startswith(wanted[:-1])):
            return True
    return False


def session_name(*names: str | None) -> str | None:
    """The first session id that the client sent, by precedence. Returns a digest of a long one."""
    for name in names:
        if name:
            return name if len(name) <= _MAX_SESSION_CHARS else blake2b(name.encode(), digest_size=16).hexdigest()
    return None


def alias_caller(account: str, session: str | None, request_id: str) -> str:
    """The key that selects a target of an alias: the session, or the request if it has no session."""
    return f"{account}/{session}" if session else request_id
