"""Rules for sampled tokens: the thinking limit, bad words, and whether the output ends with a token."""

from typing import NamedTuple

from emberline.engine.core.plan import Sampled
from emberline.engine.core.sequence import Flag, Sequence
from emberline.protocol.events import FinishReason, TokenLogprobs
from emberline.protocol.token_ids import unpack


class Taken(NamedTuple):
    """The tokens that the output gains, why it ends, if it does, and how many drafts among them count."""

    entries: list[Sampled]
    finish: FinishReason | None
    n_accepted: int


def take_run(seq: Sequence, run: list[Sampled]) -> Taken:
    """Take in accepted drafts and the token after them, as far as each still follows from those before it.

    The output may end within the run, or gain tokens that were not sampled: the drafts after that are not accepted.
    """
    n_accepted = len(run) - 1
    if not seq.limits_thinking:  # the common case, and quicker
        n_left, stop_ids = seq.n_output_left, seq.stop_ids
        for n, entry in enumerate(run, 1):
            if entry.token_id in stop_ids or n >= n_left:
                return Taken(run[:n], "stop" if entry.token_id in stop_ids else "length", min(n_accepted, n))
        return Taken(run, None, n_accepted)
    taken: list[Sampled] = []
    finish: FinishReason | None = None
    for n, entry in enumerate(run):
        entries, finish = _take(seq, entry, n)
        taken += entries
        if finish is not None or len(entries) > 1:
            n_accepted = min(n_accepted, n + 1)
            break
    return Taken(taken, finish, n_accepted)


def _take(seq: Sequence, entry: Sampled, n_new: int) -> tuple[list[Sampled], FinishReason | None]:
    """Take in a sampled token and those that end the thinking. n_new: tokens before it that `seq.ids` lacks."""
    if entry.token_id in seq.stop_ids:
        return [entry], "stop"
    entries = [entry]
    if seq.limits_thinking:
        ids, may_apply = end_of_thinking(seq, entry.token_id, seq.n_output + n_new + 1)
        entries += forced(ids)
        seq.set_flag(Flag.THINKING, may_apply and not ids)
    return entries, "length" if len(entries) >= seq.n_output_left - n_new else None


def end_of_thinking(seq: Sequence, token_id: int, n_output: int) -> tuple[list[int], bool]:
    """Tokens that end the thinking if this token, the n_output-th of the output, reaches the limit; mostly none.

    The second value is True if the limit may still apply after tokens that are not appended to the output.
    """
    limit = seq.request.thinking_limit
    if limit is None or token_id in limit.end_ids:
        return [], False
    if n_output < limit.most:
        return [], True
    ids = unpack(limit.ids)
    return (ids, True) if n_output + len(ids) <= seq.max_tokens else ([], False)


def limits_thinking(seq: Sequence) -> bool:
    """True if a thinking limit may still apply, given the output that the sequence resumes."""
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


def banned(seq: Sequence) -> tuple[int, ...]:
    """Stop tokens, until the output has its minimum length, and tokens that complete a bad word.

    Empty for a guided sequence, whose masks exclude both.
    """
    if seq.guided:
        return ()
    stops = seq.stop_ids if seq.n_output + seq.n_sampling < seq.request.sampling.min_tokens else ()
    return (*stops, *ends_of_bad_words(seq))


def evenly_banned(seq: Sequence, draft_ids: bytes) -> bytes:
    """The leading drafts after which the same tokens are banned as before the first: a row has one set of bans."""
    sampling = seq.request.sampling
    n_output = seq.n_output + seq.n_sampling
    if n_output < sampling.min_tokens:
        draft_ids = draft_ids[: 4 * (sampling.min_tokens - 1 - n_output)]
    if seq.flags & Flag.AWAITS_LAST:
        bans = ends_of_bad_words(seq)
        for n_bytes in range(4, len(draft_ids) + 1, 4):
            if ends_of_bad_words(seq, draft_ids[:n_bytes]) != bans:
                return draft_ids[: n_bytes - 4]
    return draft_ids


def ends_of_bad_words(seq: Sequence, new: bytes = b"") -> list[int]:
    """The last token of every bad word whose other tokens are the end of the output, `new` tokens included."""
    n_bytes = 4 * seq.n_output + len(new)
    return [
        int.from_bytes(word[-4:], "little")
        for word in seq.request.sampling.bad_ids
        if len(word) == 4 or (len(word) - 4 <= n_bytes and (seq.ids[-len(word) :] + new).endswith(word[:-4]))
    ]


def forced(ids: list[int]) -> list[Sampled]:
    """Tokens that were not sampled: their probability is 1."""
    return [TokenLogprobs(token_id, 0.0) for token_id in ids]
