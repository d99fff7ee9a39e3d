"""The grammars of sequences, applied in threads: what each sampled token means, and the mask of the next one."""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emberline.engine import token_rules
from emberline.engine.grammar.guide_jobs import BASE_CPU_S, SLOW_CPU_S, TOKEN_CPU_S, GuideThreads
from emberline.engine.scheduler.plan import Guide, Masks, StepPlan
from emberline.engine.scheduler.sequence import Sequence
from emberline.protocol.errors import BadInput, EmberlineError, Internal
from emberline.protocol.events import TokenLogprobs
from emberline.protocol.token_ids import pack

GRAMMAR_FAILED = "the engine could not apply this request's grammar"
TOO_SLOW = "the grammar takes too long to apply: use a simpler one, without ambiguous recursion or large counts"

_log = logging.getLogger(__name__)


class GuideJobs:
    """Starts and takes in the jobs of sequences with a grammar. While `seq.job` is set, its thread owns the guide.

    The sequence is then not planned. What was launched for it meanwhile had no mask and is to be ignored.
    """

    def __init__(self, eos_ids: tuple[int, ...]) -> None:
        self._eos_ids = eos_ids
        self._threads = GuideThreads()
        self._open: dict[int, Sequence] = {}  # with a job, by number

    def bind(self, seq: Sequence) -> None:
        """The sequence's grammar is compiled: from the end of the job on it has a guide and a mask."""
        pending = seq.pending_guide
        assert pending is not None
        slow = bool(seq.request.output_ids)  # to be accepted first
        self._start(seq, lambda: _bind(seq, pending.guide(), self._eos_ids), slow)

    def take(self, seq: Sequence, entry: TokenLogprobs) -> None:
        """A token was sampled under the last mask."""
        self._start(seq, lambda: _take(seq, entry, self._eos_ids), seq.slow_guide)

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
        seq.guide_cpu_s += job.cpu_s
        seq.slow_guide = job.cpu_s > SLOW_CPU_S
        if job.error is not None:
            raise guide_failed(seq, job.error)
        value, seq.mask = job.result
        if seq.guide_cpu_s > BASE_CPU_S + TOKEN_CPU_S * seq.n_output:
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
    """The masks of the rows that sample; None if none of them has a grammar."""
    places: list[int] = []
    bits: list[NDArray[np.uint32]] = []
    sampling = (row for row in plan.rows if row.samples)
    for place, row in enumerate(sampling):
        seq = by_number.get(row.number)
        if seq is not None and seq.mask is not None and seq.admission == row.admission:
            places.append(place)
            bits.append(seq.mask)
    return Masks(places, np.stack(bits)) if places else None


def _bind(seq: Sequence, guide: Guide, eos_ids: tuple[int, ...]) -> tuple[None, NDArray[np.uint32]]:
    token_rules.bind(seq, guide)
    return None, _mask(seq, b"", eos_ids)


def _take(
    seq: Sequence, entry: TokenLogprobs, eos_ids: tuple[int, ...]
) -> tuple[token_rules.Taken, NDArray[np.uint32] | None]:
    entries, finish = token_rules.take(seq, entry, eos_ids)
    if finish is not None:
        return (entries, finish), None
    return (entries, finish), _mask(seq, pack([entry.token_id for entry in entries]), eos_ids)


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
