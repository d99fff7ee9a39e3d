"""What a sampled token does to its sequence: grammars, the thinking limit, and whether the output ends with it."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from emberline.engine.core.plan import Guide, Sampled
from emberline.engine.core.sequence import Sequence
from emberline.protocol.errors import BadInput
from emberline.protocol.events import FinishReason, TokenLogprobs
from emberline.protocol.token_ids import unpack

Taken = tuple[list[Sampled], FinishReason | None]  # the tokens that the output gains; why it ends, if it does


def take(seq: Sequence, entry: Sampled, eos_ids: tuple[int, ...], n_new: int = 0) -> Taken:
    """Take in a sampled token, or what replaces it, and tokens that must follow it. Raises what a guide raises.

    n_new: tokens taken in before it that the sequence does not have yet.
    """
    if seq.guide is not None:
        return _take_guided(seq, seq.guide, entry, eos_ids, n_new)
    if entry.token_id in seq.stop_ids:
        return [entry], "stop"
    entries = [entry, *_end_of_thinking(seq, entry.token_id, n_new)] if seq.limits_thinking else [entry]
    return entries, "length" if len(entries) >= seq.n_output_left - n_new else None


def take_run(seq: Sequence, run: list[Sampled], eos_ids: tuple[int, ...]) -> Taken:
    """Take in accepted drafts and the token after them, as far as each still follows from those before it: the output
    may end within the run, or gain tokens that were not sampled. The other drafts are no longer accepted."""
    taken: list[Sampled] = []
    finish: FinishReason | None = None
    if seq.guide is None and not seq.limits_thinking:  # the common case, and quicker
        n_left, stop_ids = seq.n_output_left, seq.stop_ids
        for n, entry in enumerate(run, 1):
            if entry.token_id in stop_ids or n >= n_left:
                seq.n_accepted = min(seq.n_accepted, n)
                return run[:n], "stop" if entry.token_id in stop_ids else "length"
        return run, None
    for n, entry in enumerate(run):
        entries, finish = take(seq, entry, eos_ids, n)
        taken += entries
        if finish is not None or len(entries) > 1:
            seq.n_accepted = min(seq.n_accepted, n + (entries[:1] == [entry]))
            break
    return taken, finish


def _take_guided(seq: Sequence, guide: Guide, entry: Sampled, eos_ids: tuple[int, ...], n_new: int) -> Taken:
    token_id, n_left = entry.token_id, seq.n_output_left - n_new
    ends = token_id in seq.stop_ids or (guide.finished and token_id in eos_ids)
    if ends and guide.complete:
        return [entry], "stop"
    if not guide.accept(token_id):
        raise ValueError(f"the grammar allowed token {token_id} and does not accept it")
    if seq.can_close and not guide.fits(n_left - 1):
        guide.rollback(1)
        path = guide.closing()
        return _forced(path), "stop" if path or guide.finished else "length"
    entries = [entry, *_end_of_thinking(seq, token_id, n_new)]
    if guide.finished:
        return entries, "stop"
    return entries, "length" if len(entries) >= n_left else None


def _end_of_thinking(seq: Sequence, token_id: int, n_new: int) -> list[Sampled]:
    """The tokens that end the thinking when its limit is reached with this token; mostly none."""
    limit = seq.request.thinking_limit
    if not seq.limits_thinking or limit is None:
        return []
    n_output = seq.n_output + n_new + 1
    if token_id in limit.end_ids:
        seq.limits_thinking = False
    if not seq.limits_thinking or n_output < limit.most:
        return []
    ids = unpack(limit.ids)
    n_left = seq.max_tokens - n_output - len(ids)
    if n_left < 0:
        seq.limits_thinking = False
        return []
    if seq.guide is not None and not _accept_all(seq.guide, ids, n_left if seq.can_close else None):
        return []  # inside a multi-byte character, for instance: tried again after the next token
    seq.limits_thinking = False
    return _forced(ids)


def banned(seq: Sequence) -> tuple[int, ...]:
    """Stop tokens, until the output has its minimum length, and tokens that complete a bad word. The mask of a guide
    says both by itself."""
    sampling = seq.request.sampling
    if seq.guide is not None:
        return ()
    stops = seq.stop_ids if seq.n_output + seq.n_sampling < sampling.min_tokens else ()
    return (*stops, *_ends_of_bad_words(seq))


def evenly_banned(seq: Sequence, draft_ids: bytes) -> bytes:
    """The leading drafts after which the same tokens are banned as before the first: a row has one set of bans."""
    sampling = seq.request.sampling
    n_output = seq.n_output + seq.n_sampling
    if n_output < sampling.min_tokens:
        draft_ids = draft_ids[: 4 * (sampling.min_tokens - 1 - n_output)]
    if seq.awaits_last:
        bans = _ends_of_bad_words(seq)
        for n_bytes in range(4, len(draft_ids) + 1, 4):
            if _ends_of_bad_words(seq, draft_ids[:n_bytes]) != bans:
                return draft_ids[: n_bytes - 4]
    return draft_ids


def _ends_of_bad_words(seq: Sequence, new: bytes = b"") -> list[int]:
    """The last token of every bad word whose other tokens are the end of the output, `new` tokens included."""
    n_bytes = 4 * seq.n_output + len(new)
    return [
        int.from_bytes(word[-4:], "little")
        for word in seq.request.sampling.bad_ids
        if len(word) == 4 or (len(word) - 4 <= n_bytes and (seq.ids[-len(word) :] + new).endswith(word[:-4]))
    ]


def allow(bits: NDArray[np.uint32], seq: Sequence, new: bytes, eos_ids: tuple[int, ...]) -> None:
    """Set the bits of the tokens that the grammar allows next, end tokens included.

    `new` (u32 LE) are the last tokens that the guide has accepted: the sequence does not have them yet.
    """
    guide = seq.guide
    assert guide is not None
    guide.fill(bits[: guide.n_words])
    ends: Iterable[int] = ()
    if guide.finished:
        ends = seq.stop_ids or eos_ids
    elif guide.complete and seq.n_output + len(new) // 4 >= seq.request.sampling.min_tokens:
        ends = seq.stop_ids
    for token_id in ends:
        bits[token_id >> 5] |= np.uint32(1 << (token_id & 31))
    if seq.request.sampling.bad_ids:
        _forbid(bits, _ends_of_bad_words(seq, new))


def _forbid(bits: NDArray[np.uint32], token_ids: list[int]) -> None:
    """Clear the bits of these tokens, unless the grammar allows no others."""
    left = bits.copy()
    for token_id in token_ids:
        left[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))
    if left.any():
        bits[:] = left


def bind(seq: Sequence, guide: Guide) -> None:
    """From here on the grammar restricts the sequence; output that it resumes must match."""
    can_close = guide.fits(seq.max_tokens)
    for token_id in unpack(seq.request.output_ids):
        if not guide.accept(token_id):
            raise BadInput(f"the output to resume does not match its grammar at token {token_id}", param="output_ids")
    seq.guide, seq.can_close = guide, can_close


def limits_thinking(seq: Sequence) -> bool:
    """Whether a thinking limit may still apply, given the output that the sequence resumes."""
    limit = seq.request.thinking_limit
    if limit is None:
        return False
    output = unpack(seq.request.output_ids)
    if not set(limit.end_ids).isdisjoint(output):
        return False
    if len(output) < max(1, limit.most):
        return True
    if not seq.request.grammar:
        return False  # the limit was reached, and applied at once if there was room
    ids = unpack(limit.ids)  # a grammar may have postponed it
    return not any(output[at : at + len(ids)] == ids for at in range(max(1, limit.most), len(output)))


def _forced(ids: list[int]) -> list[Sampled]:
    """Tokens that were not sampled: their probability is 1."""
    return [TokenLogprobs(token_id, 0.0) for token_id in ids]


def _accept_all(guide: Guide, ids: list[int], n_left: int | None) -> bool:
    """Let a guide accept tokens that were not sampled, and leave it able to close; or change nothing."""
    n = 0
    while n < len(ids) and guide.accept(ids[n]):
        n += 1
    if n == len(ids) and (n_left is None or guide.fits(n_left)):
        return True
    guide.rollback(n)
    return False
