"""From a request to token ids, with the ids of what is already known kept as they are.

A conversation is rendered whole, every time: only so does the template decide what it keeps of old turns. Then the
longest known beginning of that text lends its exact ids (the model's own, for replies), and only the rest is tokenised:
alone where a special token bounds it, so that no token could have reached across; otherwise the whole text is.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from emberline.protocol.errors import BadInput
from emberline.protocol.request import GenerateRequest, Message, ThinkingLimit, Tool, ToolCall
from emberline.protocol.token_ids import count, unpack
from emberline.text.grammar.reply_grammar import GrammarSpec, ThinkingForm, ToolGrammar
from emberline.text.text_model import Rendered, TextModel
from emberline.text.tool_calls import reasoning as thinking
from emberline.text.tool_calls.formats import signed
from emberline.text.tool_calls.parser import Reply

DIGEST_BYTES = 16
_canonical = msgspec.json.Encoder(order="deterministic")


def chain_digests(
    messages: Sequence[Message], template_kwargs: Mapping[str, Any] | None = None, tools: Sequence[Tool] = ()
) -> list[bytes]:
    """The digest after each message. `template_kwargs` and tools decide what the template writes: they root the
    chain."""
    root = _canonical.encode([template_kwargs or {}, tools])
    digest = blake2b(root, key=b"emberline.messages", digest_size=DIGEST_BYTES)
    digests: list[bytes] = []
    parent = digest.digest()
    for message in messages:
        parent = extend(parent, message)
        digests.append(parent)
    return digests


def extend(parent: bytes, message: Message) -> bytes:
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
    for field in fields:
        data = field if isinstance(field, bytes) else field.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


class TextHash:
    """A digest of text that grows: `after(piece)` is the digest of all pieces so far."""

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
        """To go on from here more than once."""
        other = TextHash()
        other.n_chars, other._hash = self.n_chars, self._hash.copy()
        return other


def _arguments(call: ToolCall) -> bytes:
    """Arguments as parsed: clients write the same JSON with other spaces and another order of keys."""
    try:
        return b"j" + _canonical.encode(msgspec.json.decode(call.arguments))
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return b"x" + call.arguments.encode("utf-8", "surrogatepass")


_WINDOW_BYTES = 1024


class Cut(msgspec.Struct, frozen=True, array_like=True):
    """The first `n_ids` ids stand for the first `text_len` characters of a rendered conversation."""

    n_ids: int
    text_len: int
    text_digest: bytes


class Known(msgspec.Struct, frozen=True, array_like=True):
    """Ids of a conversation's beginning, with the places up to which they are known to fit; shortest first."""

    ids: bytes
    cuts: tuple[Cut, ...]


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """What is worth remembering: `ids` stand for the first `text_len` characters of the rendered conversation."""

    ids: bytes
    text_len: int
    text_digest: bytes


class Prompt(msgspec.Struct, frozen=True):
    ids: bytes
    rendered: Rendered | None = None  # of a conversation
    n_known: int = 0  # ids taken over as they were
    written: TextHash = msgspec.field(default_factory=TextHash)  # of the text that they stand for

    @property
    def n_ids(self) -> int:
        return count(self.ids)


def prompt_kwargs(model: TextModel, request: GenerateRequest) -> dict[str, Any]:
    """What the template is told: the request's own arguments, and what its reasoning comes to."""
    return {**thinking.template_kwargs(request.reasoning, model.template.variables), **request.template_kwargs}


def render_prompt(model: TextModel, request: GenerateRequest) -> Rendered | None:
    """The text of a conversation; None for a request that brings its prompt."""
    if request.messages is None:
        return None
    rendered = model.render_guarded(request.messages, prompt_kwargs(model, request), request.tools)
    if model.think_form is None:
        return rendered
    variables = model.template.variables
    more = thinking.suffix(model.think_form, rendered.text, request.reasoning, variables)
    return Rendered(rendered.text + more, rendered.mark)


def thinking_begun(model: TextModel, rendered: Rendered | None) -> bool | None:
    """As `thinking.begun`; False where there is none to expect."""
    if model.think_form is None or rendered is None:
        return False
    return thinking.begun(model.think_form, rendered.text)


def build_prompt(
    model: TextModel, request: GenerateRequest, known: Known | None = None, rendered: Rendered | None = None
) -> Prompt:
    """The request's prompt. `known` comes from the sessions of the same account and model; `rendered`, where it is
    there already, from `render_prompt`."""
    if request.prompt_ids is not None:
        return Prompt(request.prompt_ids)
    if request.prompt is not None:
        return Prompt(model.encode_prompt(request.prompt))
    rendered = rendered or render_prompt(model, request)
    assert rendered is not None
    usable = _usable(model, rendered.text, known) if known is not None else None
    if known is None or usable is None:
        return Prompt(model.with_bos(model.tokenizer.encode_marked(*rendered)), rendered)
    start, written = usable
    ids = known.ids[: 4 * start.n_ids]
    return Prompt(ids + _encode_rest(model, rendered, start.text_len, ids), rendered, start.n_ids, written)


def prompt_entry(model: TextModel, prompt: Prompt) -> Entry | None:
    """The prompt up to its last special token: what a retry, a sibling or the next turn begins with again."""
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
) -> Entry | None:
    """Prompt and reply, if the template writes the reply back as the model did: its text exactly, its calls in JSON
    that means the same.

    None when it does not (it trims, it drops reasoning), when a stop string cut the reply shorter than its ids, and
    when the ids hold special tokens without a meaning in replies, or broken characters. An end token at the end of
    the ids is left out.
    """
    if prompt.rendered is None or request.messages is None:
        return None
    ids = unpack(reply_ids)
    if ids and ids[-1] in model.special_ids and ids[-1] not in model.mark_ids:
        ids.pop()
    if not (model.special_ids - model.mark_ids).isdisjoint(ids):
        return None
    messages = (*request.messages, reply)
    try:
        kwargs = prompt_kwargs(model, request)
        whole = model.render_guarded(messages, kwargs, request.tools, add_generation_prompt=False)
    except BadInput:  # a template may refuse what it has just led to
        return None
    text = _exact_text(model, prompt.ids, ids, whole.mark)
    if text is None or not whole.text.startswith(prompt.rendered.text):
        return None
    end: int | None = len(prompt.rendered.text) + len(text)
    if not whole.text.startswith(text, len(prompt.rendered.text)):
        end = _reworded_end(model, request, prompt, reply, ids, whole) if reply.tool_calls else None
    return None if end is None else _entry(prompt, prompt.ids + reply_ids[: 4 * len(ids)], whole.text, end)


def turn_entries(
    model: TextModel,
    request: GenerateRequest,
    prompt: Prompt,
    digests: Sequence[bytes],
    reply: Message | None = None,
    reply_ids: bytes = b"",
) -> list[tuple[bytes, Entry]]:
    """What to remember of a turn, each entry with the digest of the messages it is about; `digests` are the request's.
    A turn without a usable reply (it failed, it was cut) is remembered for its prompt."""
    if not digests:
        return []
    entries = [(digests[-1], prompt_entry(model, prompt))]
    if reply is not None:
        entries.append((extend(digests[-1], reply), reply_entry(model, request, prompt, reply, reply_ids)))
    return [(digest, entry) for digest, entry in entries if entry is not None]


def _entry(prompt: Prompt, ids: bytes, text: str, text_len: int) -> Entry:
    """`text` begins as the prompt's does: what of that was known is hashed already, unless it is more than `text_len`:
    a reply's text, as the template rewords it, may go on behind its last special token."""
    written = prompt.written.copy() if prompt.written.n_chars <= text_len else TextHash()
    return Entry(ids, text_len, written.after(text[written.n_chars : text_len]))


def _through_last_special(model: TextModel, ids: bytes) -> bytes:
    """Looked for from the end, where it is: prompts are long."""
    for end in range(len(ids), 0, -_WINDOW_BYTES):
        start = max(0, end - _WINDOW_BYTES)
        window = unpack(ids[start:end])
        for index in reversed(range(len(window))):
            if window[index] in model.special_ids:
                return ids[: start + 4 * (index + 1)]
    return b""


def _exact_text(model: TextModel, prompt_ids: bytes, ids: Sequence[int], mark: str) -> str | None:
    """The text that the ids are, byte for byte, with `mark` where a template's text has it; None when they are not
    whole characters."""
    if model.mark_ids.isdisjoint(ids):
        return _exact_run(model, prompt_ids, ids, mark)
    texts: list[str] = []
    run: list[int] = []
    before = prompt_ids
    for token_id in (*ids, None):
        if token_id is not None and token_id not in model.mark_ids:
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
    marked: str = model.guard.mark(text, mark)
    return marked if raw.endswith(text.encode()) else None


def _reworded_end(
    model: TextModel, request: GenerateRequest, prompt: Prompt, reply: Message, ids: Sequence[int], whole: Rendered
) -> int | None:
    """Where the template's text of the reply ends, if that text says what the ids say, and both what the reply does.

    It ends at the first special token that is no part of it.
    """
    assert prompt.rendered is not None
    begun = thinking_begun(model, prompt.rendered)
    parser = model.reply_parser(prompt.ids, request.tools, begun)
    if not Reply().add(parser.push(ids)).add(parser.finish()).says(reply):
        return None
    parser = model.reply_parser(prompt.ids, request.tools, begun)
    told = Reply()
    end = len(prompt.rendered.text)
    for at, piece in enumerate(model.tokenizer.split_special(whole.text[end:])):
        if at % 2 and model.tokenizer.special[piece] not in model.mark_ids:
            return end if told.add(parser.finish()).says(reply) else None
        text = signed(piece, model.reply_signs) if at % 2 else piece
        told.add(parser.push_text(text.replace(whole.mark, "") if whole.mark else text))
        end += len(piece)
    return None


def _usable(model: TextModel, text: str, known: Known) -> tuple[Cut, TextHash] | None:
    """The longest cut that fits the text and may be continued there, and the hash of the text before it."""
    best: tuple[Cut, TextHash] | None = None
    written = TextHash()
    for cut in known.cuts:
        if cut.text_len > len(text) or written.after(text[written.n_chars : cut.text_len]) != cut.text_digest:
            break
        if _bounded(model, known.ids[4 * cut.n_ids - 4 : 4 * cut.n_ids], text, cut.text_len):
            best = cut, written.copy()
    return best


def _bounded(model: TextModel, ids: bytes, text: str, at: int) -> bool:
    """Whether a special token stands directly before or after the place."""
    if _last_bound(model, ids) is not None:
        return True
    found = model.tokenizer.match_special(text, at)
    return found is not None and model.tokenizer.bound(model.tokenizer.special[found[0]]) is not None


def _last_bound(model: TextModel, ids: bytes) -> str | None:
    return model.tokenizer.bound(int.from_bytes(ids[-4:], "little")) if ids else None


def _encode_rest(model: TextModel, rendered: Rendered, at: int, ids: bytes) -> bytes:
    """Ids of the text from `at` on, where `_bounded` holds. The special token before it, if one is, is tokenised
    along and dropped: it may swallow white space, and text after it may begin differently than text at the start."""
    before = _last_bound(model, ids) or ""
    rest = model.tokenizer.encode_marked(before + rendered.text[at:], rendered.mark)
    return rest[4:] if before else rest


def grammar_spec(model: TextModel, request: GenerateRequest, thinking: bool | None) -> GrammarSpec | None:
    """None: anything goes. `thinking` is what `thinking_begun` says of the prompt."""
    tools = _tools(model, request)
    if request.output is None and tools is None:
        return None
    return GrammarSpec(
        request.output, tools, None if thinking is False else _spec_thinking(model, begun=bool(thinking))
    )


def _tools(model: TextModel, request: GenerateRequest) -> ToolGrammar | None:
    """Where no tool may be called, what opens a call may not be written."""
    choice = request.tool_choice
    if not request.tools:
        return None
    tools = tuple(tool for tool in request.tools if choice.name in (None, tool.name))
    return ToolGrammar(tools, choice.mode, request.parallel_tool_calls, model.tool_form.family, model.tool_form.tokens)


def _spec_thinking(model: TextModel, *, begun: bool) -> ThinkingForm:
    form = model.think_form
    assert form is not None
    return ThinkingForm(
        form.end,
        form.tokens.get(form.end),
        ("\n\n", "\n"),
        "" if begun else form.start,
        None if begun else form.tokens.get(form.start),
    )


def thinking_limit(model: TextModel, request: GenerateRequest, max_tokens: int) -> ThinkingLimit | None:
    """For a reply whose prompt has begun reasoning; None: no bound.

    Engines know the end of reasoning by its token. Where it is several, a budget is refused; an effort, which is a wish
    and no bound, is left to the model.
    """
    form = model.think_form
    assert form is not None
    most = thinking.budget(request.reasoning, model.template.variables, max_tokens)
    if most is None or most >= max_tokens:
        return None
    end_ids = unpack(model.encode(form.end, special=True))
    if len(end_ids) != 1:
        if request.reasoning.budget_tokens is None:
            return None
        message = f"this model's reasoning can have no budget, as its end {form.end} is no single token: leave it out"
        raise BadInput(message, param="reasoning")
    openings = (unpack(model.encode(opening, special=True)) for opening in model.tool_form.openings)
    calls = [ids[0] for ids in openings if len(ids) == 1] if request.tools else []
    ids = model.encode(form.before_end + form.end + form.after_end, special=True)
    return ThinkingLimit(most, (*end_ids, *calls), ids)
