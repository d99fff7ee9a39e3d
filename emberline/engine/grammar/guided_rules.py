"""Rules of a grammar for drawn tokens: which join the output, which must follow, and which may be drawn next.

These functions run in the threads of `guide_jobs`. They read the sequence, which nothing changes meanwhile, change the
guide alone, and return plain records: `guided_decoding` takes these in.
"""

import logging
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from emberline.engine.core.plan import Sampled
from emberline.engine.core.sequence import Sequence
from emberline.engine.core.token_rules import end_of_thinking, ends_of_bad_words, forced
from emberline.protocol.errors import BadInput, EmberlineError
from emberline.protocol.events import FinishReason, TokenLogprobs
from emberline.protocol.frames import Vocabulary
from emberline.protocol.token_ids import pack, unpack

Bits = NDArray[np.uint32]  # [words]; bit i % 32 of word i // 32: token i is allowed

_log = logging.getLogger(__name__)


class Guide(Protocol):
    """The grammar state of one sequence. It has accepted exactly the tokens of its output."""

    @property
    def n_words(self) -> int:
        """Number of u32 words of a mask."""

    @property
    def complete(self) -> bool:
        """True if the output may end here."""

    @property
    def finished(self) -> bool:
        """True if the output can only end here."""

    def fill(self, bits: Bits) -> None:
        """Set the bits of the tokens that may follow, end tokens excluded."""

    def accept(self, token_id: int) -> bool:
        """Take in a token. Returns False, without effect, if the grammar forbids it."""

    def rollback(self, n: int) -> None:
        """Undo the last n accepted tokens."""

    def forced(self) -> list[int]:
        """The tokens that must follow, or the usual ones of the text that must; empty where several texts may."""

    def fits(self, room: int) -> bool:
        """True if the output can be completed with `room` tokens more."""

    def closing(self) -> list[int]:
        """The tokens that complete it, after `fits` returned True."""


class PendingGuide(Protocol):
    """A grammar that is being compiled."""

    @property
    def digest(self) -> str:
        """Name of the grammar in the log."""

    @property
    def ready(self) -> bool:
        """True once it is compiled, or could not be."""

    def guide(self) -> Guide:
        """Once ready; raises an EmberlineError if the grammar could not be compiled."""


class Guides(Protocol):
    """Compiles grammars."""

    def request(self, encoded: bytes) -> PendingGuide: ...

    def learn(self, vocabulary: Vocabulary) -> None: ...

    def close(self) -> None:
        """End threads and processes."""


@dataclass(slots=True, frozen=True)
class Bound:
    """A guide that has accepted the output which its sequence resumes."""

    guide: Guide
    can_close: bool  # the output can be completed within max_tokens, and will be
    mask: Bits  # of the first token
    forced_ids: bytes  # u32 LE


@dataclass(slots=True, frozen=True)
class DraftMasks:
    """Tokens that a grammar allows after each of some drafts, as far as it allows these."""

    mask: Bits  # before the first draft
    after: list[Bits]


@dataclass(slots=True, frozen=True)
class GuidedTokens:
    """The tokens that a run of draws gives."""

    entries: list[Sampled]  # join the output
    finish: FinishReason | None  # why the output ends
    n_accepted: int  # drafts of the run that count
    n_appended: int  # tokens at the end of `entries` that were not drawn: the grammar leaves one each
    limits_thinking: bool  # the thinking limit may still apply
    mask: Bits | None  # of the next token; None if the output ends
    forced_ids: bytes  # u32 LE; the usual tokens of the text that must follow, for a drafter


def bind(seq: Sequence, guide: Guide, eos_ids: tuple[int, ...], wants_forced: bool) -> Bound:
    """Let a new guide accept the output that the sequence resumes. Raises BadInput if it does not match."""
    can_close = guide.fits(seq.max_tokens)
    for token_id in unpack(seq.request.output_ids):
        if not guide.accept(token_id):
            raise BadInput(f"the output to resume does not match its grammar at token {token_id}", param="output_ids")
    forced_ids = pack(guide.forced()) if wants_forced else b""
    return Bound(guide, can_close, mask_after(seq, guide, b"", eos_ids), forced_ids)


def follow(seq: Sequence, guide: Guide, mask: Bits, draft_ids: bytes, eos_ids: tuple[int, ...]) -> DraftMasks:
    """Masks after the leading drafts that the grammar allows; `mask` is that of the first draft.

    Leaves the guide as it was.
    """
    found: list[Bits] = []
    n_accepted = 0
    try:
        for token_id in unpack(draft_ids):
            last = mask if not found else found[-1]
            if token_id >> 5 >= len(last) or not last[token_id >> 5] >> (token_id & 31) & 1:
                break
            if not guide.accept(token_id):  # an end token
                break
            n_accepted += 1
            if guide.finished:  # the output ends with it
                break
            found.append(mask_after(seq, guide, draft_ids[: 4 * n_accepted], eos_ids))
    except (EmberlineError, ValueError) as error:  # it may never come to these tokens
        _log.info("a grammar does not follow drafts: %s", error, extra={"request_id": seq.id})
    guide.rollback(n_accepted)
    return DraftMasks(mask, found)


class GuidedRun:
    """Draws that a guide takes in one after the other, and the tokens that must follow them."""

    def __init__(self, seq: Sequence, guide: Guide, can_close: bool, eos_ids: tuple[int, ...]) -> None:
        self._seq, self._guide, self._can_close, self._eos_ids = seq, guide, can_close, eos_ids
        self._entries: list[Sampled] = []
        self._finish: FinishReason | None = None
        self._limits_thinking = seq.limits_thinking

    def take(self, run: list[Sampled], most_appended: int, wants_forced: bool) -> GuidedTokens:
        """Take in accepted drafts and the token after them, as far as each still follows from those before it.

        Where the mask then leaves one token only, up to `most_appended` tokens are appended without a draw. Raises what
        the guide raises, and ValueError if the grammar contradicts itself.
        """
        n_accepted = len(run) - 1
        for n, entry in enumerate(run):
            entries = self._take(entry)
            if self._finish is not None or len(entries) > 1:
                n_accepted = min(n_accepted, n + (entries[:1] == [entry]))
                break
        n_drawn, mask = len(self._entries), None
        while self._finish is None:
            new = pack([entry.token_id for entry in self._entries])
            mask = mask_after(self._seq, self._guide, new, self._eos_ids)
            only = only_token(mask) if len(self._entries) - n_drawn < most_appended else None
            if only is None:
                break
            self._take(TokenLogprobs(only, 0.0))
        ends = self._finish is not None
        return GuidedTokens(
            entries=self._entries,
            finish=self._finish,
            n_accepted=n_accepted,
            n_appended=len(self._entries) - n_drawn,
            limits_thinking=self._limits_thinking,
            mask=None if ends else mask,
            forced_ids=pack(self._guide.forced()) if wants_forced and not ends else b"",
        )

    def _take(self, entry: Sampled) -> list[Sampled]:
        """Take in a token, or what replaces it, and the tokens that end the thinking."""
        seq, guide, token_id = self._seq, self._guide, entry.token_id
        n_left = seq.n_output_left - len(self._entries)
        ends = token_id in seq.stop_ids or (guide.finished and token_id in self._eos_ids)
        if ends and guide.complete:
            return self._add([entry], "stop")
        if not guide.accept(token_id):
            raise ValueError(f"the grammar allowed token {token_id} and does not accept it")
        if self._can_close and not guide.fits(n_left - 1):
            guide.rollback(1)
            path = guide.closing()
            return self._add(forced(path), "stop" if path or guide.finished else "length")
        entries = [entry, *self._end_of_thinking(token_id)]
        if guide.finished:
            return self._add(entries, "stop")
        return self._add(entries, "length" if len(entries) >= n_left else None)

    def _add(self, entries: list[Sampled], finish: FinishReason | None) -> list[Sampled]:
        self._entries += entries
        self._finish = finish
        return entries

    def _end_of_thinking(self, token_id: int) -> list[Sampled]:
        """The tokens that end the thinking when its limit is reached with this token; mostly none."""
        if not self._limits_thinking:
            return []
        n_output = self._seq.n_output + len(self._entries) + 1
        ids, self._limits_thinking = end_of_thinking(self._seq, token_id, n_output)
        n_left = self._seq.max_tokens - n_output - len(ids)
        if not ids or not _accept_all(self._guide, ids, n_left if self._can_close else None):
            return []  # inside a multi-byte character, for instance: tried again after the next token
        self._limits_thinking = False
        return forced(ids)


def mask_after(seq: Sequence, guide: Guide, new: bytes, eos_ids: tuple[int, ...]) -> Bits:
    """The tokens that may be drawn next, end tokens included. Raises ValueError if there are none.

    `new` (u32 LE) are the last tokens that the guide has accepted: the sequence does not have them yet.
    """
    bits = np.zeros(guide.n_words, np.uint32)
    guide.fill(bits)
    ends: frozenset[int] | tuple[int, ...] = ()
    if guide.finished:
        ends = seq.stop_ids or eos_ids
    elif guide.complete and seq.n_output + len(new) // 4 >= seq.request.sampling.min_tokens:
        ends = seq.stop_ids
    for token_id in ends:
        bits[token_id >> 5] |= np.uint32(1 << (token_id & 31))
    if seq.request.sampling.bad_ids:
        _forbid(bits, ends_of_bad_words(seq, new))
    if not bits.any():
        raise ValueError("the grammar allows no token")
    return bits


def only_token(mask: Bits) -> int | None:
    """The token that a mask allows. Returns None if it allows several."""
    words = np.flatnonzero(mask)
    if len(words) != 1:
        return None
    bits = int(mask[words[0]])
    return 32 * int(words[0]) + bits.bit_length() - 1 if bits & (bits - 1) == 0 else None


def _forbid(bits: Bits, token_ids: list[int]) -> None:
    """Clear the bits of these tokens, unless the grammar allows no others."""
    left = bits.copy()
    for token_id in token_ids:
        left[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))
    if left.any():
        bits[:] = left


def _accept_all(guide: Guide, ids: list[int], n_left: int | None) -> bool:
    """Let a guide accept tokens that were not sampled, and leave it able to close; or change nothing."""
    n = 0
    while n < len(ids) and guide.accept(ids[n]):
        n += 1
    if n == len(ids) and (n_left is None or guide.fits(n_left)):
        return True
    guide.rollback(n)
    return False
