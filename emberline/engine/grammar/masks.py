"""Token masks of a step, and the failure of a sequence whose grammar cannot be followed."""

import logging
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from emberline.engine import token_rules as drawing
from emberline.engine.scheduler.plan import Masks, StepPlan
from emberline.engine.scheduler.sequence import Sequence
from emberline.protocol.errors import EmberlineError, Internal

GRAMMAR_FAILED = "the engine could not apply this request's grammar"

_log = logging.getLogger(__name__)


def masks(plan: StepPlan, by_number: Mapping[int, Sequence], eos_ids: tuple[int, ...]) -> Masks | None:
    """The masks of the rows that sample; None if none of them has a grammar."""
    places: list[int] = []
    guided: list[Sequence] = []
    sampling = (row for row in plan.rows if row.samples)
    for place, row in enumerate(sampling):
        seq = by_number.get(row.number)
        if seq is not None and seq.guide is not None:
            places.append(place)
            guided.append(seq)
    if not guided:
        return None
    bits = np.zeros((len(guided), max(seq.guide.n_words for seq in guided if seq.guide is not None)), np.uint32)
    for row_bits, seq in zip(bits, guided):
        _fill(row_bits, seq, eos_ids)
    return Masks(places, bits)


def _fill(bits: NDArray[np.uint32], seq: Sequence, eos_ids: tuple[int, ...]) -> None:
    try:
        drawing.allow(bits, seq, eos_ids)
    except Exception as error:
        guide_failed(seq, error)
        bits[:] = ~np.uint32(0)  # a token is sampled and ignored
        return
    if not bits.any():
        guide_failed(seq, None)
        bits[:] = ~np.uint32(0)


def guide_failed(seq: Sequence, error: Exception | None) -> EmberlineError:
    """Marks the sequence as failed; it ends with the next step."""
    digest = seq.guide.digest if seq.guide is not None else ""
    what = "grammar allows no token" if error is None else "grammar failed"
    extra = {"request_id": seq.id, "grammar": digest}
    if isinstance(error, EmberlineError):  # the client's error: it is reported as it is
        _log.warning(what, extra=extra)
        seq.failure = error
    else:
        _log.error(what, exc_info=error, extra=extra)
        seq.failure = Internal(GRAMMAR_FAILED)
    return seq.failure
