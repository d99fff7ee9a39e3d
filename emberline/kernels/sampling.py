"""Sampling on the CPU: penalties and bias, then Gumbel-max under temperature, top-k, top-p and min-p.

The noise is a hash of (seed, position, token id): a request samples the same tokens alone and in any batch, and a
drafter with the same seed sees the same noise. `choose_reference` is the reference of the C implementation.
"""

import ctypes
import logging
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emberline.kernels.native_library import BuildError, load_library

NEGLIGIBLE = 30.0  # with a filter on, tokens at most e^-30 times as likely as the best are dropped
MIN_TEMPERATURE = 1e-5  # below, the most likely token is taken: logits divided by less leave float32's range
INVALID = -1  # the token id of a row whose logits are NaN or infinite

_log = logging.getLogger("emberline.kernels")


@dataclass(slots=True)
class SamplerRow:
    """The sampling parameters of one row."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int = 0  # u64
    position: int = 0  # index in its sequence of the token to sample
    prompt_ids: NDArray[np.uint32] | None = None  # required where a penalty is set
    output_ids: NDArray[np.uint32] | None = None
    banned: tuple[int, ...] = ()
    allowed: NDArray[np.uint32] | None = None  # grammar mask: bit i % 32 of word i // 32 allows token i; None: all
    logprobs: int | None = None
    guided: bool = False  # a grammar restricts it: there will be a mask for every token

    def __post_init__(self) -> None:
        if self.temperature < MIN_TEMPERATURE:
            self.temperature = 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


@dataclass(slots=True)
class Sampled:
    token_id: int
    logprob: float | None = None
    top: list[tuple[int, float]] = field(default_factory=list)


def host_floats(values: Any) -> NDArray[np.float32]:
    """An array, or a tensor of torch on any device, as a float32 array on the host; without a copy where it is one."""
    if not isinstance(values, np.ndarray):
        values = values.detach().cpu().float().contiguous().numpy()
    return np.ascontiguousarray(values, np.float32)


def sample(logits: Any, rows: list[SamplerRow]) -> list[Sampled]:
    """Sample one token per row. `logits`: float32 [rows, vocab], an array, or a tensor of torch; penalties and bias
    may modify it in place."""
    if not rows:
        return []
    values = host_floats(logits)
    logprobs = {r: log_softmax(values[r]) for r, row in enumerate(rows) if row.logprobs is not None}
    for row, row_logits in zip(rows, values, strict=True):
        apply_penalties(row_logits, row)
    sampled = [Sampled(int(token_id)) for token_id in _choose(values, rows)]
    for r, distribution in logprobs.items():
        _attach_logprobs(sampled[r], distribution, rows[r].logprobs or 0)
    return sampled


def apply_penalties(logits: NDArray[np.float32], row: SamplerRow) -> None:
    """Penalties, bias and bans, in place. Repetition counts prompt and output; the others only the output."""
    if row.has_penalties:
        empty = np.empty(0, np.uint32)
        prompt, output = (empty if ids is None else ids for ids in (row.prompt_ids, row.output_ids))
        if row.repetition_penalty != 1.0:
            seen = np.unique(np.concatenate([prompt, output]))
            old = logits[seen]
            logits[seen] = np.where(old > 0, old / row.repetition_penalty, old * row.repetition_penalty)
        ids, counts = np.unique(output, return_counts=True)
        logits[ids] -= row.frequency_penalty * counts.astype(np.float32) + row.presence_penalty
    for token_id, bias in row.logit_bias.items():
        logits[token_id] += bias
    if row.banned:
        logits[list(row.banned)] = -np.inf


def apply_mask(logits: NDArray[np.float32], allowed: NDArray[np.uint32]) -> None:
    """Set every token whose bit is not set, or which is beyond the mask, to -inf."""
    bits = np.unpackbits(allowed.view(np.uint8), bitorder="little")[: len(logits)].view(bool)
    logits[: len(bits)][~bits] = -np.inf
    logits[len(bits) :] = -np.inf


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Log-probabilities of all tokens of each row. NaN where a logit is NaN or infinite."""
    with np.errstate(invalid="ignore"):
        shifted = logits - logits.max(axis=-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))  # type: ignore[no-any-return]


def most_likely(logits: NDArray[np.float32], n: int) -> NDArray[np.intp]:
    """Ids of the n largest logits of each row, the largest first, and of equal ones the lowest id: [..., n]."""
    ids = np.sort(np.argpartition(logits, -n, axis=-1)[..., -n:], axis=-1)
    order = np.argsort(-np.take_along_axis(logits, ids, axis=-1), axis=-1, kind="stable")
    return np.take_along_axis(ids, order, axis=-1)


def _attach_logprobs(sampled: Sampled, distribution: NDArray[np.float32], k: int) -> None:
    if sampled.token_id == INVALID:
        return
    sampled.logprob = float(distribution[sampled.token_id])
    if k:
        ids = most_likely(distribution, k)
        sampled.top = list(zip(ids.tolist(), distribution[ids].tolist(), strict=True))


# --- choosing a token: in C, or in NumPy where there is no compiler ---------------------------------------------------


class _Choice(ctypes.Structure):
    """`choice` in sampling.h."""

    _fields_ = [
        *((name, ctypes.c_float) for name in ("temperature", "top_p", "min_p")),
        ("top_k", ctypes.c_int32),
        *((name, ctypes.c_uint64) for name in ("seed", "position")),
        ("allowed", ctypes.c_void_p),
        ("words", ctypes.c_int64),
    ]


@cache
def _native() -> Any:
    try:
        lib = load_library()
    except (BuildError, OSError) as error:
        _log.warning("%s; sampling in NumPy", error)
        return None
    tensor = ctypes.c_void_p
    lib.em_choose.argtypes = [tensor, ctypes.c_int64, ctypes.c_int64, ctypes.POINTER(_Choice), tensor]
    lib.em_choose.restype = None
    return lib


def _choose(logits: NDArray[np.float32], rows: list[SamplerRow]) -> NDArray[np.int64]:
    lib = _native()
    if lib is None:
        for row_logits, row in zip(logits, rows, strict=True):
            if row.allowed is not None:
                apply_mask(row_logits, row.allowed)
        return np.array([choose_reference(row_logits, row) for row_logits, row in zip(logits, rows, strict=True)])
    ids = np.empty(len(rows), np.int64)
    choices = (_Choice * len(rows))(*map(_choice, rows))
    lib.em_choose(logits.ctypes.data, logits.shape[1], len(rows), choices, ids.ctypes.data)
    return ids


def _choice(row: SamplerRow) -> _Choice:
    mask, address, words = row.allowed, None, 0
    if mask is not None:
        assert mask.dtype == np.uint32 and mask.flags.c_contiguous, "C reads the mask's memory"  # noqa: PT018
        address, words = mask.ctypes.data, len(mask)
    return _Choice(row.temperature, row.top_p, row.min_p, row.top_k, row.seed, row.position, address, words)


def choose_reference(logits: NDArray[np.float32], row: SamplerRow) -> int:
    """One token from logits that penalties and mask were applied to."""
    best = float(logits.max())
    if not np.isfinite(best):  # NaN, an infinity, or every token banned
        return INVALID
    if row.temperature == 0.0:
        return int(logits.argmax())
    scaled = logits * np.float32(1 / np.float32(row.temperature))
    ids = np.arange(len(logits))
    if row.top_k or row.top_p < 1.0 or row.min_p > 0.0:
        ids = ids[scaled >= scaled.max() - np.float32(NEGLIGIBLE)]
        ids = ids[np.lexsort((ids, -scaled[ids]))]
        ids = _filter(scaled[ids], ids, row)
    return int(ids[(scaled[ids] + _noise(row.seed, row.position, ids)).argmax()])


def _filter(sorted_logits: NDArray[np.float32], ids: NDArray[Any], row: SamplerRow) -> NDArray[Any]:
    if row.top_k:
        sorted_logits, ids = sorted_logits[: row.top_k], ids[: row.top_k]
    likelihood = np.exp(sorted_logits.astype(np.float64) - float(sorted_logits[0]))
    before = np.concatenate([[0.0], likelihood.cumsum()[:-1]])
    keep = (before < row.top_p * likelihood.sum()) & (likelihood >= row.min_p)
    keep[0] = True
    return ids[: len(keep) if keep.all() else int(keep.argmin())]


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _noise(seed: int, position: int, ids: NDArray[Any]) -> NDArray[np.float32]:
    start = np.array([(seed + 0x9E3779B97F4A7C15 * (position + 1)) & (2**64 - 1)], np.uint64)
    bits = _mix(_mix(start) ^ (ids.astype(np.uint64) * np.uint64(0xD1B54A32D192ED03)))
    uniform = ((bits >> np.uint64(40)).astype(np.float32) + np.float32(0.5)) * np.float32(2**-24)
    uniform = np.minimum(uniform, np.float32(1 - 2**-24))  # the largest would round to 1: infinite noise
    noise: NDArray[np.float32] = -np.log(-np.log(uniform))
    return noise
