"""From a request to token ids, with the ids of what is already known kept as they are.

A conversation is rendered whole, every time: only so does the template decide what it keeps of old turns. Then the
longest known beginning of that text lends its exact ids (the model's own, for replies), and only the rest is tokenised:
alone where a special token bounds it, so that no token could have reached across; otherwise the whole text is.
"""

from collections.abc import Sequence

import msgspec

from emberline.protocol.errors import BadInput
from emberline.protocol.request import GenerateRequest, Message
from emberline.protocol.tokens import count, unpack
from emberline.text.digest import TextHash, extend
from emberline.text.model import Rendered, TextModel

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

    @property
    def n_ids(self) -> int:
        return count(self.ids)


def build_prompt(model: TextModel, request: GenerateRequest, known: Known | None = None) -> Prompt:
    """The request's prompt. `known` comes from the sessions of the same account and model."""
    if request.prompt_ids is not None:
        return Prompt(request.prompt_ids)
    if request.prompt is not None:
        return Prompt(model.encode_prompt(request.prompt))
    assert request.messages is not None
    rendered = model.render_guarded(request.messages, request.template_kwargs)
    start = _usable(model, rendered.text, known) if known is not None else None
    if known is None or start is None:
        return Prompt(model.with_bos(model.tokenizer.encode_marked(*rendered)), rendered)
    ids = known.ids[: 4 * start.n_ids]
    return Prompt(ids + _encode_rest(model, rendered, start.text_len, ids), rendered, start.n_ids)


def prompt_entry(model: TextModel, prompt: Prompt) -> Entry | None:
    """The prompt up to its last special token: what a retry, a sibling or the next turn begins with again."""
    if prompt.rendered is None:
        return None
    ids = _through_last_special(model, prompt.ids)
    bound = _last_bound(model, ids)
    if bound is None or bound not in prompt.rendered.text:
        return None
    end = prompt.rendered.text.rindex(bound) + len(bound)
    return _entry(ids, prompt.rendered.text, end)


def reply_entry(
    model: TextModel, request: GenerateRequest, prompt: Prompt, reply: Message, reply_ids: bytes
) -> Entry | None:
    """Prompt and reply, if the template writes the reply back exactly as the model did.

    None when it does not (it trims, it drops reasoning), when a stop string cut the reply shorter than its ids, and
    when the ids hold special tokens or broken characters. An end token at the end of the ids is left out.
    """
    if prompt.rendered is None or request.messages is None:
        return None
    ids = unpack(reply_ids)
    if ids and ids[-1] in model.special_ids:
        ids.pop()
    if not model.special_ids.isdisjoint(ids):
        return None
    text = _exact_text(model, prompt.ids, ids)
    if text is None:
        return None
    try:
        whole = model.render_guarded((*request.messages, reply), request.template_kwargs, add_generation_prompt=False)
    except BadInput:  # a template may refuse what it has just led to
        return None
    beginning = prompt.rendered.text + model.guard.mark(text, whole.mark)
    if not whole.text.startswith(beginning):
        return None
    return _entry(prompt.ids + reply_ids[: 4 * len(ids)], beginning, len(beginning))


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


def _entry(ids: bytes, text: str, text_len: int) -> Entry:
    return Entry(ids, text_len, TextHash().after(text[:text_len]))


def _through_last_special(model: TextModel, ids: bytes) -> bytes:
    """Looked for from the end, where it is: prompts are long."""
    for end in range(len(ids), 0, -_WINDOW_BYTES):
        start = max(0, end - _WINDOW_BYTES)
        window = unpack(ids[start:end])
        for index in reversed(range(len(window))):
            if window[index] in model.special_ids:
                return ids[: start + 4 * (index + 1)]
    return b""


def _exact_text(model: TextModel, prompt_ids: bytes, ids: Sequence[int]) -> str | None:
    """The text that the ids are, byte for byte; None when they are not whole characters."""
    detokenizer = model.detokenizer(prompt_ids)
    text = detokenizer.push(ids)
    if detokenizer.finish():
        return None
    raw = b"".join(map(model.tokenizer.token_bytes.__getitem__, ids))
    return text if raw.endswith(text.encode()) else None


def _usable(model: TextModel, text: str, known: Known) -> Cut | None:
    """The longest cut that fits the text and may be continued there."""
    best: Cut | None = None
    digest = TextHash()
    done = 0
    for cut in known.cuts:
        if cut.text_len > len(text) or digest.after(text[done : cut.text_len]) != cut.text_digest:
            break
        done = cut.text_len
        if _bounded(model, known.ids[: 4 * cut.n_ids], text, cut.text_len):
            best = cut
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
