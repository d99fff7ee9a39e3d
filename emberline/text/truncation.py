"""Cutting a prompt to a number of tokens: first the oldest turns, then the beginning of the last message."""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import structs

from emberline.protocol.errors import ContextExceeded
from emberline.protocol.request import GenerateRequest, Message
from emberline.protocol.token_ids import count
from emberline.text.prompt import build_prompt, render_prompt
from emberline.text.text_model import TextModel

KEEP = 4  # tokens at the beginning that are kept where a text is cut behind them, as llama.cpp's `num_keep`
_SYSTEM = ("system", "developer")


class Truncated(NamedTuple):
    ids: bytes
    messages: Sequence[Message] = ()  # of a conversation: those that are left of it


def truncate_prompt(model: TextModel, request: GenerateRequest, most: int) -> Truncated:
    """Ids of at most `most` tokens for a request whose prompt is longer.

    System messages and the last message stay, and as many of the turns before it as fit; what is kept of them begins
    with a user's message. Of a last message that does not fit alone the end is kept, unless it has images: then
    ContextExceeded is raised."""
    if request.messages is None or request.context_ids:
        return Truncated(_cut(build_prompt(model, request).ids, most))
    system = [message for message in request.messages if message.role in _SYSTEM]
    turns = [message for message in request.messages if message.role not in _SYSTEM] or [system.pop()]
    starts = [n for n, message in enumerate(turns) if message.role == "user" and n] or [len(turns) - 1]
    low, high = 0, len(starts) - 1  # the first start that fits is in this range, or none is
    while low < high:
        middle = (low + high) // 2
        if count(_encode(model, request, [*system, *turns[starts[middle] :]])) <= most:
            high = middle
        else:
            low = middle + 1
    kept = [*system, *turns[starts[low] :]]
    ids = _encode(model, request, kept)
    if count(ids) <= most:
        return Truncated(ids, kept)
    if turns[-1].n_media:
        raise ContextExceeded(
            f"the last message and its images do not fit into {most} tokens: send fewer or smaller images",
            param="messages",
        )
    return Truncated(_cut_last(model, request, [*system, turns[-1]], most))


def _encode(model: TextModel, request: GenerateRequest, messages: Sequence[Message]) -> bytes:
    return build_prompt(model, _with_messages(request, messages)).ids


def _cut_last(model: TextModel, request: GenerateRequest, messages: Sequence[Message], most: int) -> bytes:
    """The conversation with the end of its last message's text, if the template shows where that text is."""
    rendered = render_prompt(model, _with_messages(request, messages))
    assert rendered is not None
    content = messages[-1].content.strip()
    at = rendered.text.rfind(content) if content else -1
    if at >= 0:
        pieces = rendered.text[:at], content, rendered.text[at + len(content) :]
        before, inside, after = (model.tokenizer.encode_marked(piece, rendered.mark) for piece in pieces)
        before = model.with_bos(before)
        room = most - count(before) - count(after)
        if room > 0:
            return before + inside[-4 * room :] + after
    return _cut(_encode(model, request, messages), most)


def _cut(ids: bytes, most: int) -> bytes:
    """The first KEEP tokens and the last ones."""
    keep = min(KEEP, most // 2)
    return ids if count(ids) <= most else ids[: 4 * keep] + ids[-4 * (most - keep) :]


def _with_messages(request: GenerateRequest, messages: Sequence[Message]) -> GenerateRequest:
    return structs.replace(request, messages=tuple(messages))
