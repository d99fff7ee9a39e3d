"""Turns a request into its prompt ids, grammar spec and reasoning limit; reuses the token ids of known prefixes.

A conversation is always rendered as a whole, since the template decides what it keeps of old turns. The longest known
prefix of that text keeps its exact ids (for replies those that the model generated), and only the rest is tokenized:
separately where a special token bounds it, so that no token could span the boundary; otherwise the whole text.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from emberline.protocol.errors import BadInput
from emberline.protocol.request import GenerateRequest, Message, ThinkingLimit, Tool, ToolCall
from emberline.protocol.token_ids import unpack
from emberline.text.grammar.reply_grammar import GrammarSpec, ReasoningSpec, ToolCallSpec
from emberline.text.text_model import Rendered, TextModel
from emberline.text.tool_calls import reasoning
from emberline.text.tool_calls.formats import with_sentinels
from emberline.text.tool_calls.parser import Reply

DIGEST_BYTES = 16
_canonical = msgspec.json.Encoder(order="deterministic")


def encode_tools(tools: Sequence[Tool]) -> msgspec.Raw:
    """Encode tools as canonical JSON, for `chain_digests`. Their marks do not reach the model."""
    if any(tool.marks for tool in tools):
        tools = [msgspec.structs.replace(tool, marks={}) for tool in tools]
    return msgspec.Raw(_canonical.encode(tools))


def chain_digests(
    messages: Sequence[Message],
    template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Tool] | msgspec.Raw = (),
) -> list[bytes]:
    """Compute a digest for each message over it and all before it: equal exactly if role, text, images, name, reasoning
    and parsed tool calls are. The chain is rooted in `template_kwargs` and tools, encoded or not, which also decide
    what the template renders."""
    root = _canonical.encode([template_kwargs or {}, tools])
    digest = blake2b(root, key=b"emberline.messages", digest_size=DIGEST_BYTES)
    digests: list[bytes] = []
    parent = digest.digest()
    for message in messages:
        parent = extend_digest(parent, message)
        digests.append(parent)
    return digests


def extend_digest(parent: bytes, message: Message) -> bytes:
    digest = blake2b(key=parent, digest_size=DIGEST_BYTES)
    fields = [b"r", message.role, b"c", message.content]
    if message.name is not None:
        fields += [b"n", message.name]
    if message.tool_call_id is not None:
        fields += [b"i", message.tool_call_id]
    if message.reasoning is not None:
        fields += [b"g", message.reasoning]
    for call in message.tool_calls:
        fields += [b"t", call.id, call.name, _arguments(call)]
    if message.parts and message.n_media:  # images stand between texts; the value of a prepared one is its digest
        for part in message.parts:
            fields += [b"p", part.kind, part.value]
    for field in fields:
        data = field if isinstance(field, bytes) else field.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


class TextHash:
    """An incremental digest of text: `after(piece)` is the digest of all pieces up to this one."""

    def __init__(self) -> None:
        self.n_chars = 0
        self._hash = blake2b(key=b"emberline.text", digest_size=DIGEST_BYTES)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TextHash) and self._hash.digest() == other._hash.digest()

    def after(self, piece: str) -> bytes:
        self.n_chars += len(piece)
        self._hash.update(piece.encode("utf-8", "surrogatepass"))
        return self._hash.digest()

    def copy(self) -> "TextHash":
        """A fork, to be continued independently."""
        other = TextHash()
        other.n_chars, other._hash = self.n_chars, self._hash.copy()
        return other


def _arguments(call: ToolCall) -> bytes:
    """Canonical JSON: clients send the same arguments with other white space and key order."""
    try:
        return b"j" + _canonical.encode(msgspec.json.decode(call.arguments))
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return b"x" + call.arguments.encode("utf-8", "surrogatepass")


_WINDOW_BYTES = 1024
_EARLIER_REPLY = "\U0001fffe"  # a noncharacter, in the place of a reply whose ids are known


class PrefixCut(msgspec.Struct, frozen=True, array_like=True):
    """The first `n_ids` ids are the first `text_len` characters of a rendered conversation."""

    n_ids: int
    text_len: int
    text_digest: bytes


class KnownPrefix(msgspec.Struct, frozen=True, array_like=True):
    """Ids of the beginning of a conversation, and the cuts at which they match its text, shortest first."""

    ids: bytes
    cuts: tuple[PrefixCut, ...]


class EncodedPrefix(msgspec.Struct, frozen=True, array_like=True):
    """Token ids of the first `text_len` characters of a rendered conversation, for the session store."""

    ids: bytes
    text_len: int
    text_digest: bytes


class Prompt(msgspec.Struct, frozen=True):
    ids: bytes
    rendered: Rendered | None = None  # of a conversation
    n_known: int = 0  # ids reused from a known prefix
    known_hash: TextHash = msgspec.field(default_factory=TextHash)  # of the text of the known ids

    @property
    def n_ids(self) -> int:
        return len(self.ids) // 4


def prompt_kwargs(model: TextModel, request: GenerateRequest) -> dict[str, Any]:
    """Template arguments: the request's own, and those that follow from its reasoning parameters."""
    return {**reasoning.template_kwargs(request.reasoning, model.template.variables), **request.template_kwargs}


def render_prompt(
    model: TextModel, request: GenerateRequest, kwargs: Mapping[str, Any] | None = None
) -> Rendered | None:
    """The text of a conversation; None for a request with a raw prompt. `kwargs` are its `prompt_kwargs`, if known."""
    if request.messages is None:
        return None
    kwargs = prompt_kwargs(model, request) if kwargs is None else kwargs
    rendered = model.render_guarded(request.messages, kwargs, request.tools, continue_final=request.continue_final)
    if model.reasoning_format is None or request.continue_final:
        return rendered
    variables = model.template.variables
    more = reasoning.suffix(model.reasoning_format, rendered.text, request.reasoning, variables)
    return Rendered(rendered.text + more, rendered.mark)


def reasoning_begun(model: TextModel, rendered: Rendered | None, continue_final: bool = False) -> bool | None:
    """Like `reasoning.begun`, but False where the model does not reason or the reply continues an answer."""
    if model.harmony is not None and rendered is not None:
        return False if continue_final else None
    if model.reasoning_format is None or rendered is None:
        return False
    begun = reasoning.begun(model.reasoning_format, rendered.text)
    return bool(begun) if continue_final else begun


def build_prompt(
    model: TextModel, request: GenerateRequest, known: KnownPrefix | None = None, rendered: Rendered | None = None
) -> Prompt:
    """The request's prompt. `known` is from sessions of the same account and model; `rendered` from `render_prompt`, if
    it was called before."""
    if request.prompt_ids is not None:
        return Prompt(request.prompt_ids)
    if request.context_ids:
        return Prompt(request.context_ids + _continuation(model, request))
    if request.prompt is not None and request.suffix is not None:
        assert model.fill_in_middle is not None, "else the request is refused"
        return Prompt(model.with_bos(model.fill_in_middle.encode(request.prompt, request.suffix)))
    if request.prompt is not None:
        return Prompt(model.encode_prompt(request.prompt))
    rendered = rendered or render_prompt(model, request)
    assert rendered is not None
    usable = _usable(model, rendered.text, known) if known is not None else None
    if known is None or usable is None:
        return Prompt(model.with_bos(model.tokenizer.encode_marked(*rendered)), rendered)
    start, text_hash = usable
    ids = known.ids[: 4 * start.n_ids]
    return Prompt(ids + _encode_rest(model, rendered, start.text_len, ids), rendered, start.n_ids, text_hash)


def _continuation(model: TextModel, request: GenerateRequest) -> bytes:
    """Ids of the messages as they stand behind `context_ids`, whose end is a reply: the end of its turn comes first."""
    earlier = (Message("user", "."), Message("assistant", _EARLIER_REPLY))
    rendered = render_prompt(model, msgspec.structs.replace(request, messages=(*earlier, *(request.messages or ()))))
    assert rendered is not None
    text = rendered.text[rendered.text.index(_EARLIER_REPLY) + len(_EARLIER_REPLY) :]
    ids = model.tokenizer.encode_marked(text, rendered.mark)
    return ids[4:] if ids[:4] == request.context_ids[-4:] else ids  # the reply may have ended its turn itself


def prompt_entry(model: TextModel, prompt: Prompt) -> EncodedPrefix | None:
    """The prompt up to its last special token: the prefix of a retry, a sibling or the next turn."""
    if prompt.rendered is None:
        return None
    ids = _through_last_special(model, prompt.ids)
    bound = _last_bound(model, ids)
    if bound is None or bound not in prompt.rendered.text:
        return None
    end = prompt.rendered.text.rindex(bound) + len(bound)
    return _entry(prompt, ids, prompt.rendered.text, end)


def reply_entry(
    model: TextModel, request: GenerateRequest, prompt: Prompt, reply: Message, reply_ids: bytes
) -> EncodedPrefix | None:
    """Prompt and reply, if the template renders the reply as the model generated it: text exactly, calls with equal
    JSON arguments.

    None if it does not (it trims, it drops reasoning), if a stop string made the text shorter than its ids, and if the
    ids contain special tokens without a meaning in replies, or incomplete characters. A final end token is left out.
    A template that has rendered a plain reply exactly is believed to do so again: the next turn compares the digests.
    """
    if prompt.rendered is None or request.messages is None:
        return None
    ids = unpack(reply_ids)
    if ids and ids[-1] in model.special_ids and ids[-1] not in model.marker_ids:
        ids.pop()
    if not (model.special_ids - model.marker_ids).isdisjoint(ids):
        return None
    kwargs = prompt_kwargs(model, request)
    form, plain = repr((sorted(kwargs.items()), bool(request.tools))), None
    if not request.continue_final and not reply.tool_calls and reply.content == reply.content.strip():
        plain = _exact_text(model, prompt.ids, ids, prompt.rendered.mark)
        if plain != reply.content or model.guard.choose(plain):
            plain = None
    if plain is not None and form in model.exact_forms:
        whole = prompt.rendered.text + plain
        return _entry(prompt, prompt.ids + reply_ids[: 4 * len(ids)], whole, len(whole))
    messages = _with_reply(request.messages, reply, request.continue_final)
    try:
        conversation = model.render_guarded(messages, kwargs, request.tools, add_generation_prompt=False)
    except BadInput:  # the template may reject the reply
        return None
    text = _exact_text(model, prompt.ids, ids, conversation.mark)
    if text is None or not conversation.text.startswith(prompt.rendered.text):
        return None
    end: int | None = len(prompt.rendered.text) + len(text)
    if not conversation.text.startswith(text, len(prompt.rendered.text)):
        end = _rewritten_end(model, request, prompt, reply, ids, conversation) if reply.tool_calls else None
    elif plain is not None:
        model.exact_forms.add(form)
    return None if end is None else _entry(prompt, prompt.ids + reply_ids[: 4 * len(ids)], conversation.text, end)


def turn_entries(
    model: TextModel,
    request: GenerateRequest,
    prompt: Prompt,
    digests: Sequence[bytes],
    reply: Message | None = None,
    reply_ids: bytes = b"",
) -> list[tuple[bytes, EncodedPrefix]]:
    """The session entries of a turn, each with the digest of the messages that it covers; `digests` are the request's.
    A turn without a usable reply (it failed, it was cut off) has one for its prompt only."""
    if not digests:
        return []
    entries = [(digests[-1], prompt_entry(model, prompt))]
    before = digests[:-1] if request.continue_final else digests  # of the messages before the reply
    if reply is not None and before:
        *_, last = _with_reply(request.messages or (), reply, request.continue_final)
        entries.append((extend_digest(before[-1], last), reply_entry(model, request, prompt, reply, reply_ids)))
    return [(digest, entry) for digest, entry in entries if entry is not None]


def _with_reply(messages: Sequence[Message], reply: Message, continue_final: bool) -> tuple[Message, ...]:
    """The conversation with its reply: a message of its own, or the rest of the last one."""
    if not continue_final:
        return (*messages, reply)
    begun = messages[-1]
    merged = msgspec.structs.replace(begun, content=begun.content + reply.content, tool_calls=reply.tool_calls)
    return (*messages[:-1], merged)


def _entry(prompt: Prompt, ids: bytes, text: str, text_len: int) -> EncodedPrefix:
    """`text` begins like the prompt's: the hash of its known part is continued, unless that part is longer than
    `text_len`, as it may be where the template rewrites a reply."""
    text_hash = prompt.known_hash.copy() if prompt.known_hash.n_chars <= text_len else TextHash()
    return EncodedPrefix(ids, text_len, text_hash.after(text[text_hash.n_chars : text_len]))


def _through_last_special(model: TextModel, ids: bytes) -> bytes:
    """Searched from the end in windows, since prompts are long."""
    for end in range(len(ids), 0, -_WINDOW_BYTES):
        start = max(0, end - _WINDOW_BYTES)
        window = unpack(ids[start:end])
        for index in reversed(range(len(window))):
            if window[index] in model.special_ids:
                return ids[: start + 4 * (index + 1)]
    return b""


def _exact_text(model: TextModel, prompt_ids: bytes, ids: Sequence[int], mark: str) -> str | None:
    """The text of the ids, byte for byte, with `mark` where the rendered text has it; None if they end inside a
    character."""
    if model.marker_ids.isdisjoint(ids):
        return _exact_run(model, prompt_ids, ids, mark)
    texts: list[str] = []
    run: list[int] = []
    before = prompt_ids
    for token_id in (*ids, None):
        if token_id is not None and token_id not in model.marker_ids:
            run.append(token_id)
            continue
        text = _exact_run(model, before, run, mark)
        if text is None:
            return None
        texts.append(text)
        if token_id is not None:
            texts.append(model.token_text(token_id).decode())
            before, run = token_id.to_bytes(4, "little"), []
    return "".join(texts)


def _exact_run(model: TextModel, before: bytes, ids: Sequence[int], mark: str) -> str | None:
    detokenizer = model.detokenizer(before)
    text = detokenizer.push(ids)
    if detokenizer.finish():
        return None
    raw = b"".join(map(model.tokenizer.token_bytes.__getitem__, ids))
    marked: str = model.guard.mark(text, mark) if mark else text
    return marked if raw.endswith(text.encode()) else None


def _rewritten_end(
    model: TextModel,
    request: GenerateRequest,
    prompt: Prompt,
    reply: Message,
    ids: Sequence[int],
    conversation: Rendered,
) -> int | None:
    """Return the end of the rendered reply, at the first special token that is not part of it. Returns None unless both
    the rendered text and the ids parse to the reply."""
    assert prompt.rendered is not None
    begun = reasoning_begun(model, prompt.rendered, request.continue_final)
    parser = model.reply_parser(prompt.ids, request.tools, begun, loose=request.output is None)
    if not Reply().add(parser.push(ids)).add(parser.finish()).says(reply):
        return None
    parser = model.reply_parser(prompt.ids, request.tools, begun, loose=request.output is None)
    rendered_reply = Reply()
    end = len(prompt.rendered.text)
    for at, piece in enumerate(model.tokenizer.split_special(conversation.text[end:])):
        if at % 2 and model.tokenizer.special[piece] not in model.marker_ids:
            return end if rendered_reply.add(parser.finish()).says(reply) else None
        text = with_sentinels(piece, model.reply_sentinels) if at % 2 else piece
        rendered_reply.add(parser.push_text(text.replace(conversation.mark, "") if conversation.mark else text))
        end += len(piece)
    return None


def _usable(model: TextModel, text: str, known: KnownPrefix) -> tuple[PrefixCut, TextHash] | None:
    """The longest cut that matches the text and may be continued there, and the hash of the text before it."""
    best: tuple[PrefixCut, TextHash] | None = None
    text_hash = TextHash()
    for cut in known.cuts:
        if cut.text_len > len(text) or text_hash.after(text[text_hash.n_chars : cut.text_len]) != cut.text_digest:
            break
        if _bounded(model, known.ids[4 * cut.n_ids - 4 : 4 * cut.n_ids], text, cut.text_len):
            best = cut, text_hash.copy()
    return best


def _bounded(model: TextModel, ids: bytes, text: str, at: int) -> bool:
    """True if a special token is directly before or after the offset."""
    if _last_bound(model, ids) is not None:
        return True
    found = model.tokenizer.match_special(text, at)
    return found is not None and model.tokenizer.bound(model.tokenizer.special[found[0]]) is not None


def _last_bound(model: TextModel, ids: bytes) -> str | None:
    return model.tokenizer.bound(int.from_bytes(ids[-4:], "little")) if ids else None


def _encode_rest(model: TextModel, rendered: Rendered, at: int, ids: bytes) -> bytes:
    """Ids of the text from `at` on, where `_bounded` holds. A special token before it is tokenized along and dropped,
    since it may swallow white space and changes how the following text begins."""
    before = _last_bound(model, ids) or ""
    rest = model.tokenizer.encode_marked(before + rendered.text[at:], rendered.mark)
    return rest[4:] if before else rest


def grammar_spec(model: TextModel, request: GenerateRequest, begun: bool | None) -> GrammarSpec | None:
    """The grammar of the reply; None: unconstrained. `begun` is from `reasoning_begun`."""
    tools = _tools(model, request)
    if request.output is None and tools is None:
        return None
    if model.harmony is not None and begun is None:
        return GrammarSpec(request.output, tools, channels=model.harmony.tokens)
    return GrammarSpec(request.output, tools, None if begun is False else _reasoning_spec(model, begun=bool(begun)))


def _tools(model: TextModel, request: GenerateRequest) -> ToolCallSpec | None:
    """With tool_choice "none" too: then the opening of a call must not be generated."""
    choice = request.tool_choice
    if not request.tools:
        return None
    tools = tuple(tool for tool in request.tools if choice.name in (None, tool.name))
    return ToolCallSpec(
        tools, choice.mode, request.parallel_tool_calls, model.tool_format.family, model.tool_format.tokens
    )


def _reasoning_spec(model: TextModel, *, begun: bool) -> ReasoningSpec:
    format = model.reasoning_format
    assert format is not None
    return ReasoningSpec(
        format.end,
        format.tokens.get(format.end),
        ("\n\n", "\n"),
        "" if begun else format.start,
        None if begun else format.tokens.get(format.start),
    )


def reasoning_limit(model: TextModel, request: GenerateRequest, max_tokens: int) -> ThinkingLimit | None:
    """Return the limit of a reply whose prompt has begun reasoning, or None for no limit.

    Engines recognize the end of reasoning by its one token. Where it is several tokens, a budget is refused; an effort,
    which is only a hint, is left to the model.
    """
    format = model.reasoning_format
    assert format is not None
    most = reasoning.budget(request.reasoning, model.template.variables, max_tokens)
    if most is None or most >= max_tokens:
        return None
    end_ids = unpack(model.encode(format.end, special=True))
    if len(end_ids) != 1:
        if request.reasoning.budget_tokens is None:
            return None
        message = f"this model does not support a reasoning budget: its delimiter {format.end} is not a single token"
        raise BadInput(message, param="reasoning")
    openings = (unpack(model.encode(opening, special=True)) for opening in model.tool_format.openings)
    calls = [ids[0] for ids in openings if len(ids) == 1] if request.tools else []
    ids = model.encode(format.before_end + format.end + format.after_end, special=True)
    return ThinkingLimit(most, (*end_ids, *calls), ids)
