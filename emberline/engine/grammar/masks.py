"""The grammars of sequences, applied in threads: what each sampled token means, and the mask of the next one."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emberline.engine.core import token_rules
from emberline.engine.core.plan import Guide, Masks, Sampled, StepPlan
from emberline.engine.core.sequence import Sequence
from emberline.engine.grammar.guide_jobs import GuideThreads, GuideTimings
from emberline.protocol.errors import BadInput, EmberlineError, Internal
from emberline.protocol.events import TokenLogprobs
from emberline.protocol.token_ids import pack, unpack

GRAMMAR_FAILED = "the engine could not apply this request's grammar"
MAX_APPENDED = 15  # tokens, of which a grammar leaves one each, that are appended to those of a step
TOO_SLOW = "the grammar takes too long to apply: use a simpler one, without ambiguous recursion or large counts"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DraftMasks:
    """Which tokens a grammar allows after each of some drafts, as far as it allows these."""

    bits: list[NDArray[np.uint32]]


class GuideJobs:
    """Starts and takes in the jobs of sequences with a grammar. While `seq.job` is set, its thread owns the guide.

    The sequence is then not planned. What was launched for it meanwhile had no mask and is to be ignored.
    """

    def __init__(
        self, eos_ids: tuple[int, ...], drafts: bool = False, appends: bool = False, timings: GuideTimings | None = None
    ) -> None:
        self._timings = timings = timings or GuideTimings()
        self._eos_ids = eos_ids
        self._drafts = drafts  # forced tokens are wanted as drafts
        self._appends = appends  # where a mask leaves one token, it is appended without a draw
        self._threads = GuideThreads(timings)
        self._open: dict[int, Sequence] = {}  # with a job, by number

    def bind(self, seq: Sequence) -> None:
        """The sequence's grammar is compiled: from the end of the job on it has a guide and a mask."""
        pending = seq.pending_guide
        assert pending is not None
        slow = bool(seq.request.output_ids)  # to be accepted first
        self._start(seq, lambda: _bind(seq, pending.guide(), self._eos_ids, self._drafts), slow)

    def take(self, seq: Sequence, run: list[Sampled]) -> None:
        """Tokens were sampled under the last masks."""
        # A row in flight samples the next token already; a draw also tells the probability that a client asked for.
        most = MAX_APPENDED if self._appends and not seq.n_sampling and seq.may_append else 0
        self._start(seq, lambda: _take(seq, run, self._eos_ids, self._drafts, most), seq.slow_guide)

    def follow(self, seq: Sequence, draft_ids: bytes) -> None:
        """From the end of the job on the sequence has a mask for each draw after these drafts, too."""
        mask = seq.mask
        assert mask is not None
        self._start(seq, lambda: _follow(seq, mask, draft_ids, self._eos_ids), seq.slow_guide)

    def wait(self, seqs: list[Sequence]) -> None:
        """For the jobs of these, as long as a step may wait."""
        n_quick = sum(not seq.slow_guide for seq in seqs)
        if n_quick:
            self._threads.wait(n_quick)

    def ended(self) -> list[Sequence]:
        """Those whose job can be taken in, or is stuck."""
        if not self._open:
            return []
        self._threads.replace_stuck()
        return [s for s in self._open.values() if s.job is not None and (s.job.done or s.job.stuck)]

    def result(self, seq: Sequence) -> Any:
        """Of an ended job; raises the error of the request if there is one."""
        job = seq.job
        assert job is not None
        self.drop(seq)
        if not job.done:
            raise BadInput(TOO_SLOW, param="grammar")
        seq.slow_guide = job.cpu_s > self._timings.slow_cpu_s
        if job.error is not None:
            raise guide_failed(seq, job.error)
        value, seq.mask = job.result
        if isinstance(value, DraftMasks):  # drafts are the engine's idea: their time is not the request's
            return value
        seq.guide_cpu_s += job.cpu_s
        if seq.guide_cpu_s > self._timings.cpu_limit_s(seq.n_output):
            extra = {"request_id": seq.id, "grammar": _digest(seq), "cpu_s": round(seq.guide_cpu_s, 2)}
            _log.warning("a grammar is too slow", extra=extra)
            raise BadInput(TOO_SLOW, param="grammar")
        return value

    def drop(self, seq: Sequence) -> None:
        """The sequence has no job any more; a thread may still be at it."""
        if seq.job is not None:
            seq.job = None
            del self._open[seq.number]

    def _start(self, seq: Sequence, work: Any, slow: bool) -> None:
        seq.job = self._threads.start(work, slow)
        seq.mask = None
        self._open[seq.number] = seq


def masks(plan: StepPlan, by_number: Mapping[int, Sequence]) -> Masks | None:
    """The masks of the draws; None if no row has a grammar. Draws behind a draft that it does not allow have none."""
    places: list[int] = []
    bits: list[NDArray[np.uint32]] = []
    place = 0
    for row in plan.rows:
        if not row.samples:
            continue
        seq = by_number.get(row.number)
        if seq is not None and seq.mask is not None and seq.admission == row.admission:
            places.append(place)
            bits.append(seq.mask)
            if row.draft_ids:
                places += range(place + 1, place + 1 + row.n_drafts)
                bits += seq.draft_masks
                bits += [np.zeros_like(seq.mask)] * (row.n_drafts - len(seq.draft_masks))
                seq.draft_masks = []
        place += 1 + row.n_drafts
    return Masks(places, np.stack(bits)) if places else None


def _bind(seq: Sequence, guide: Guide, eos_ids: tuple[int, ...], drafts: bool) -> tuple[None, NDArray[np.uint32]]:
    token_rules.bind(seq, guide)
    seq.forced_ids = pack(guide.forced()) if drafts else b""
    return None, _mask(seq, b"", eos_ids)


def _follow(
    seq: Sequence, mask: NDArray[np.uint32], draft_ids: bytes, eos_ids: tuple[int, ...]
) -> tuple[DraftMasks, NDArray[np.uint32]]:
    """Masks after the leading drafts that the grammar allows. The guide is left as it was."""
    guide = seq.guide
    assert guide is not None
    found: list[NDArray[np.uint32]] = []
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
            found.append(_mask(seq, draft_ids[: 4 * n_accepted], eos_ids))
    except (EmberlineError, ValueError) as error:  # it may never come to these tokens
        _log.info("a grammar does not follow drafts: %s", error, extra={"request_id": seq.id, "grammar": guide.digest})
    guide.rollback(n_accepted)
    return DraftMasks(found), mask


def _take(
    seq: Sequence, run: list[Sampled], eos_ids: tuple[int, ...], drafts: bool, most: int
) -> tuple[token_rules.Taken, NDArray[np.uint32] | None]:
    entries, finish = token_rules.take_run(seq, run, eos_ids)
    n_sampled, mask = len(entries), None
    while finish is None:
        mask = _mask(seq, pack([entry.token_id for entry in entries]), eos_ids)
        only = only_token(mask) if len(entries) - n_sampled < most else None
        if only is None:
            break
        more, finish = token_rules.take(seq, TokenLogprobs(only, 0.0), eos_ids, len(entries))
        entries += more
    seq.n_appended = len(entries) - n_sampled
    if finish is not None:
        return (entries, finish), None
    if drafts and seq.guide is not None:
        seq.forced_ids = pack(seq.guide.forced())
    return (entries, finish), mask


def only_token(mask: NDArray[np.uint32]) -> int | None:
    """The token that a mask allows, if it is one alone."""
    words = np.flatnonzero(mask)
    if len(words) != 1:
        return None
    bits = int(mask[words[0]])
    return 32 * int(words[0]) + bits.bit_length() - 1 if bits & (bits - 1) == 0 else None


def _mask(seq: Sequence, new: bytes, eos_ids: tuple[int, ...]) -> NDArray[np.uint32]:
    assert seq.guide is not None
    bits = np.zeros(seq.guide.n_words, np.uint32)
    token_rules.allow(bits, seq, new, eos_ids)
    if not bits.any():
        raise ValueError("the grammar allows no token")
    return bits


def guide_failed(seq: Sequence, error: Exception) -> EmberlineError:
    """What the client is told: its own error as it is, any other only as ours."""
    extra = {"request_id": seq.id, "grammar": _digest(seq)}
    if isinstance(error, EmberlineError):
        _log.warning("grammar failed: %s", error.message, extra=extra)
        return error
    _log.error("grammar failed", exc_info=error, extra=extra)
    return Internal(GRAMMAR_FAILED)


def _digest(seq: Sequence) -> str:
    return seq.guide.digest if seq.guide is not None else ""
