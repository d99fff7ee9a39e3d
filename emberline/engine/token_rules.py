"""What a drawn token does to its reply: grammars, the limit of thinking, and whether it is the last."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from emberline.engine.scheduler.plan import Guide
from emberline.engine.scheduler.sequence import Sequence
from emberline.protocol.errors import BadInput
from emberline.protocol.events import FinishReason, TokenLogprobs
from emberline.protocol.token_ids import unpack

Drawn = tuple[list[TokenLogprobs], FinishReason | None]  # what the reply gains at once; why it ends, if it does


def draw(seq: Sequence, entry: TokenLogprobs, eos_ids: tuple[int, ...]) -> Drawn:
    """Take in the token that was drawn, or what takes its place, and what must follow it. Raises what a guide does."""
    if seq.guide is not None:
        return _draw_guided(seq, seq.guide, entry, eos_ids)
    if entry.token_id in seq.stop_ids:
        return [entry], "stop"
    entries = [entry, *_thought(seq, entry.token_id)] if seq.thinks else [entry]
    return entries, "length" if len(entries) >= seq.room else None


def _draw_guided(seq: Sequence, guide: Guide, entry: TokenLogprobs, eos_ids: tuple[int, ...]) -> Drawn:
    token_id, room = entry.token_id, seq.room
    ends = token_id in seq.stop_ids or (guide.finished and token_id in eos_ids)
    if ends and guide.complete:
        return [entry], "stop"
    if not guide.accept(token_id):
        raise ValueError(f"token {token_id} was allowed, and is not accepted")
    if seq.closes and not guide.fits(room - 1):
        guide.rollback(1)
        path = guide.closing()
        return _forced(path), "stop" if path or guide.finished else "length"
    entries = [entry, *_thought(seq, token_id)]
    if guide.finished:
        return entries, "stop"
    return entries, "length" if len(entries) >= room else None


def _thought(seq: Sequence, token_id: int) -> list[TokenLogprobs]:
    """What ends the thinking when its limit is reached with this token; mostly nothing."""
    limit = seq.request.thinking_limit
    if not seq.thinks or limit is None:
        return []
    n_output = seq.n_output + 1
    if token_id in limit.end_ids:
        seq.thinks = False
    if not seq.thinks or n_output < limit.most:
        return []
    ids = unpack(limit.ids)
    room = seq.max_tokens - n_output - len(ids)
    if room < 0:
        seq.thinks = False
        return []
    if seq.guide is not None and not _accepts(seq.guide, ids, room if seq.closes else None):
        return []  # within a character, say: it is tried again behind the next token
    seq.thinks = False
    return _forced(ids)


def allow(bits: NDArray[np.uint32], seq: Sequence, eos_ids: tuple[int, ...]) -> None:
    """Set the bits of what the sequence's grammar allows next, its ends included. Raises what the guide does."""
    guide = seq.guide
    assert guide is not None
    guide.fill(bits[: guide.n_words])
    ends: Iterable[int] = ()
    if guide.finished:
        ends = seq.stop_ids or eos_ids
    elif guide.complete and seq.n_output >= seq.request.sampling.min_tokens:
        ends = seq.stop_ids
    for token_id in ends:
        bits[token_id >> 5] |= np.uint32(1 << (token_id & 31))


def bind(seq: Sequence, guide: Guide) -> None:
    """From here on the grammar has its say; what the reply already holds was drawn under it, elsewhere."""
    closes = guide.fits(seq.max_tokens)
    for token_id in unpack(seq.request.output_ids):
        if not guide.accept(token_id):
            raise BadInput(f"the reply so far does not match its grammar, from token {token_id} on", param="output_ids")
    seq.guide, seq.closes = guide, closes


def still_thinks(seq: Sequence) -> bool:
    """Whether a limit of thinking is still to come for a reply that has begun elsewhere."""
    limit = seq.request.thinking_limit
    if limit is None:
        return False
    output = unpack(seq.request.output_ids)
    if not set(limit.end_ids).isdisjoint(output):
        return False
    if len(output) < max(1, limit.most):
        return True
    if not seq.request.grammar:
        return False  # the limit was reached, and acted upon at once if there was room
    ids = unpack(limit.ids)  # a grammar may have put it off: is it there?
    return not any(output[at : at + len(ids)] == ids for at in range(max(1, limit.most), len(output)))


def _forced(ids: list[int]) -> list[TokenLogprobs]:
    """Tokens that were not drawn: nothing else could have come."""
    return [TokenLogprobs(token_id, 0.0) for token_id in ids]


def _accepts(guide: Guide, ids: list[int], room: int | None) -> bool:
    """Let a guide accept tokens that were not drawn, and leave it able to close; or change nothing."""
    n = 0
    while n < len(ids) and guide.accept(ids[n]):
        n += 1
    if n == len(ids) and (room is None or guide.fits(room)):
        return True
    guide.rollback(n)
    return False
