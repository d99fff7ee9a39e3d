# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator,attr-defined"
"""Sampling in three launches: penalties, bias, bans and masks, then Gumbel-max under temperature and filters.

`_scan` reads every logit once, in chunks, and finds each chunk's maximum with and without noise, which is all that rows
without filters need. Filters always keep a prefix of the tokens ordered by likelihood (then by id). So the unfiltered
sample is the result if it lies within that prefix; otherwise the result ranks before it. `_list_candidates` counts the
tokens that rank before it, again in chunks, sums their mass and lists them; with a small top_k it lists those that can
be among the k best. `_finish` decides. If the list overflows (a flat distribution under a narrow filter) it makes full
passes over the row, each sampling from the tokens that rank before the last sample. The noise is that of
`kernels.sampling`: equal logits give equal tokens.
"""

import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.gpu.launch import cdiv, launch_options, next_power_of_two
from emberline.kernels.gpu.sampler_table import (
    CANDIDATES,
    CHUNK,
    CHUNK_STATS,
    MAX_EDITS,
    MAX_LISTED_K,
    MAX_RANKED,
    MAX_TOP,
    SPAN,
    SampledBatch,
    SamplerTable,
)


@triton.jit
def _float(state, field: tl.constexpr):
    return tl.load(state + field).to(tl.float32, bitcast=True)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _noise(state, position, ids):
    """Gumbel noise of (seed, position, token id), as in `emberline.kernels.sampling`."""
    low = tl.load(state + 11).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(state + 12).to(tl.uint32, bitcast=True).to(tl.uint64)
    seed = (high << 32) | low
    start = _mix(seed + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    bits = _mix(start ^ (ids.to(tl.uint64) * 0xD1B54A32D192ED03))
    uniform = ((bits >> 40).to(tl.float32) + 0.5) * 5.9604644775390625e-08  # 2 ** -24
    return -tl.log(-tl.log(tl.minimum(uniform, 0.99999994)))  # 1 - 2 ** -24; 1 would give infinite noise


@triton.jit
def _adjust_logits(source, raw, ids, mask, row, state, slot, MAX_EDITS: tl.constexpr, DRAFTS: tl.constexpr):
    """Apply penalties, bias and bans, then the grammar mask; disallowed tokens become -inf.

    DRAFTS: rows are draws, several of each slot; a draw counts the drafts before it and has a mask of its own.
    """
    _, edit_ids, edit_values, masks, counts, words, vocab, token_ids, offsets = source
    x = raw
    draw = 0
    if DRAFTS:
        draw = tl.load(offsets + row)
    if tl.load(state + 8) != 0:
        count = tl.load(counts + slot.to(tl.int64) * vocab + ids, mask=mask, other=0).to(tl.int32)
        if DRAFTS:
            for n in range(draw):
                count += (ids == tl.load(token_ids + row - n)).to(tl.int32)
        repetition = _float(state, 3)
        x = tl.where(count > 0, tl.where(x > 0, tl.math.div_rn(x, repetition), x * repetition), x)
        n_sampled = count & 16383
        x = tl.where(n_sampled > 0, x - (_float(state, 4) * n_sampled.to(tl.float32) + _float(state, 5)), x)
    for e in range(tl.load(state + 9)):
        edit = slot * MAX_EDITS + e
        x = tl.where(ids == tl.load(edit_ids + edit), x + tl.load(edit_values + edit), x)
    grammar_mask = tl.load(state + 10)
    if grammar_mask > 0:
        word = tl.load(masks + (grammar_mask - 1 + draw).to(tl.int64) * words + ids // 32, mask=mask, other=0)
        x = tl.where(((word >> (ids % 32)) & 1) != 0, x, float("-inf"))
    return tl.where(mask, x, float("-inf"))


@triton.jit
def _load_chunk(source, row, slot, state, start, CHUNK: tl.constexpr, MAX_EDITS: tl.constexpr, DRAFTS: tl.constexpr):
    """Ids, raw logits and adjusted logits of one chunk of a row."""
    ids = start + tl.arange(0, CHUNK)
    vocab = source[6]
    mask = ids < vocab
    raw = tl.load(source[0] + row.to(tl.int64) * vocab + ids, mask=mask, other=float("-inf")).to(tl.float32)
    return ids, raw, _adjust_logits(source, raw, ids, mask, row, state, slot, MAX_EDITS, DRAFTS)


@triton.jit
def _best(x, ids):
    """The maximum and, among equals, its lowest id."""
    best = tl.max(x, 0)
    return best, tl.min(tl.where(x == best, ids, 2147483647), 0)


@triton.jit
def _value_at(x, ids, wanted):
    return tl.max(tl.where(ids == wanted, x, float("-inf")), 0)


@triton.jit
def _has_filter(state):
    return (tl.load(state + 6) > 1) | (_float(state, 1) < 1) | (_float(state, 2) > 0)


@triton.jit
def _has_listed_top_k(state, MAX_LISTED_K: tl.constexpr):
    """True if top_k is small enough for the candidate list to hold every token that can be among the k best."""
    top_k = tl.load(state + 6)
    return (top_k > 1) & (top_k <= MAX_LISTED_K)


@triton.jit
def _ranks_before(x, ids, pivot, pivot_id):
    """True if a token ranks before the pivot: more likely, or equally likely with a lower id."""
    return (x > pivot) | ((x == pivot) & (ids < pivot_id))


@triton.jit
def _scan(
    logits, slots, positions, token_ids, offsets, states, edit_ids, edit_values, masks, counts, chunk_stats, chunk_tops,
    span_max, n_listed, vocab, words, FIELDS: tl.constexpr, CHUNK_STATS: tl.constexpr, CHUNK: tl.constexpr,
    SPAN: tl.constexpr, MAX_EDITS: tl.constexpr, MAX_TOP: tl.constexpr, MAX_LISTED_K: tl.constexpr,
    GUIDED: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    state = states + tl.maximum(slot, 0) * FIELDS
    if (slot >= 0) & ((tl.load(state + 13) != 0) == GUIDED):
        source = (logits, edit_ids, edit_values, masks, counts, words, vocab, token_ids, offsets)
        ids, raw, x = _load_chunk(source, row, slot, state, chunk * CHUNK, CHUNK, MAX_EDITS, DRAFTS)
        n_nan = tl.sum((x != x).to(tl.int32), 0)
        best, best_id = _best(x, ids)
        stats = chunk_stats + (row * tl.num_programs(1) + chunk) * CHUNK_STATS
        tl.store(stats, tl.where(n_nan > 0, float("nan"), best))
        tl.store(stats + 1, best_id.to(tl.float32, bitcast=True))
        temperature = _float(state, 0)
        if (temperature > 0) & (tl.load(state + 6) != 1):
            inverse = tl.math.div_rn(1.0, temperature)
            scaled = x * inverse
            if _has_filter(state):
                peak = tl.where(best == float("-inf"), 0.0, best * inverse)
                tl.store(stats + 7, tl.sum(tl.exp(scaled - peak), 0))
                if chunk == 0:
                    tl.store(n_listed + row, 0)
            if _has_listed_top_k(state, MAX_LISTED_K):
                highest = tl.max(tl.reshape(scaled, [CHUNK // SPAN, SPAN]), 1)
                index = (row * tl.num_programs(1) + chunk) * (CHUNK // SPAN) + tl.arange(0, CHUNK // SPAN)
                tl.store(span_max + index, highest)
            else:
                noisy_best, noisy_id = _best(scaled + _noise(state, tl.load(positions + row), ids), ids)
                tl.store(stats + 2, noisy_best)
                tl.store(stats + 3, noisy_id.to(tl.float32, bitcast=True))
                tl.store(stats + 6, _value_at(scaled, ids, noisy_id))
        n_top = tl.load(state + 7)
        if n_top >= 0:
            highest = tl.max(raw, 0)
            safe = tl.where(highest == float("-inf"), 0.0, highest)
            tl.store(stats + 4, highest)
            tl.store(stats + 5, tl.sum(tl.exp(raw - safe), 0))
            remaining = raw
            for index in range(n_top):
                value, value_id = _best(remaining, ids)
                top_ptrs = chunk_tops + ((row * tl.num_programs(1) + chunk) * MAX_TOP + index) * 2
                tl.store(top_ptrs, value)
                tl.store(top_ptrs + 1, value_id.to(tl.float32, bitcast=True))
                remaining = tl.where(ids == value_id, float("-inf"), remaining)


@triton.jit
def _unfiltered_sample(stat_ptrs, chunk_mask):
    """A row's unfiltered sample: its id and its scaled logit. stat_ptrs: to the chunks' stats, [CHUNKS]."""
    noisy = tl.load(stat_ptrs + 2, mask=chunk_mask, other=float("-inf"))
    ids = tl.load(stat_ptrs + 3, mask=chunk_mask, other=0.0).to(tl.int32, bitcast=True)
    sampled_id = tl.min(tl.where(noisy == tl.max(noisy, 0), ids, 2147483647), 0)
    return sampled_id, _value_at(tl.load(stat_ptrs + 6, mask=chunk_mask, other=float("-inf")), ids, sampled_id)


@triton.jit
def _top_k_bound(span_max, row, chunks, best, top_k, CHUNKS: tl.constexpr, SPANS: tl.constexpr):
    """A lower bound of the k-th largest value, close to it: at least k spans of the row have a maximum above it."""
    s = tl.arange(0, CHUNKS * SPANS)
    highest = tl.load(span_max + row * chunks * SPANS + s, mask=s < chunks * SPANS, other=float("-inf"))
    low = best - 30.0  # NEGLIGIBLE
    step = 30.0 / 16
    for _ in tl.static_range(2):
        pivots = low + step * tl.arange(0, 16).to(tl.float32)
        enough = tl.sum((highest[None, :] >= pivots[:, None]).to(tl.int32), 1) >= top_k
        low = tl.maximum(low, tl.max(tl.where(enough, pivots, float("-inf")), 0))
        step = step / 16
    return low


@triton.jit
def _list_candidates(
    logits, slots, token_ids, offsets, states, edit_ids, edit_values, masks, counts, chunk_stats, span_max, n_listed,
    candidates, candidate_ids, vocab, words, chunks, FIELDS: tl.constexpr, CHUNK_STATS: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PER_PROGRAM: tl.constexpr, SPAN: tl.constexpr,
    CANDIDATES: tl.constexpr,
    MAX_EDITS: tl.constexpr, MAX_LISTED_K: tl.constexpr, GUIDED: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    row, first = tl.program_id(0), tl.program_id(1) * CHUNKS_PER_PROGRAM
    slot = tl.load(slots + row)
    state = states + tl.maximum(slot, 0) * FIELDS
    if (slot >= 0) & ((tl.load(state + 13) != 0) == GUIDED):
        temperature = _float(state, 0)
        if (temperature > 0) & _has_filter(state) & (tl.load(state + 6) != 1):
            scale = tl.math.div_rn(1.0, temperature)
            c = tl.arange(0, CHUNKS)
            stat_ptrs = chunk_stats + (row * chunks + c) * CHUNK_STATS
            best = tl.max(tl.load(stat_ptrs, mask=c < chunks, other=float("-inf")), 0) * scale
            pivot, pivot_id = best, 2147483647
            if _has_listed_top_k(state, MAX_LISTED_K):
                pivot = _top_k_bound(span_max, row, chunks, best, tl.load(state + 6), CHUNKS, CHUNK // SPAN)
            else:
                pivot_id, pivot = _unfiltered_sample(stat_ptrs, c < chunks)
                min_p = _float(state, 2)
                lowest = tl.where(min_p > 0, best + tl.log(min_p) - 0.001, pivot)
                pivot = tl.maximum(pivot, lowest)
            source = (logits, edit_ids, edit_values, masks, counts, words, vocab, token_ids, offsets)
            for chunk in range(first, tl.minimum(first + CHUNKS_PER_PROGRAM, chunks)):
                stats = chunk_stats + (row * chunks + chunk) * CHUNK_STATS
                n, weight = tl.zeros([], tl.int32), tl.zeros([], tl.float32)
                if tl.load(stats) * scale >= pivot:
                    ids, _, x = _load_chunk(source, row, slot, state, chunk * CHUNK, CHUNK, MAX_EDITS, DRAFTS)
                    x = x * scale
                    ahead = _ranks_before(x, ids, pivot, pivot_id)
                    n = tl.sum(ahead.to(tl.int32), 0)
                    if n > 0:
                        weight = tl.sum(tl.where(ahead, tl.exp(x - best), 0.0), 0)
                        start = tl.atomic_add(n_listed + row, n)
                        if start + n <= CANDIDATES:
                            index = start + tl.cumsum(ahead.to(tl.int32), 0) - 1
                            tl.store(candidates + row * CANDIDATES + index, x, mask=ahead)
                            tl.store(candidate_ids + row * CANDIDATES + index, ids, mask=ahead)
                tl.store(stats + 8, n.to(tl.float32, bitcast=True))
                tl.store(stats + 9, weight)


@triton.jit
def _sample_ranked(
    values_at, ids_at, n, best, top_k, top_p, min_p, state, position, MAX_RANKED: tl.constexpr
):  # fmt: skip
    """Sample from n unordered candidates that include the k best; each is ranked by comparison with all others.

    The list is then sorted in place: its order is that of the programs that filled it, and a sum must not depend on
    it. top_p applies to the mass of the k best.
    """
    c = tl.arange(0, MAX_RANKED)
    mask = c < n
    values = tl.load(values_at + c, mask=mask, other=float("-inf"))
    ids = tl.load(ids_at + c, mask=mask, other=2147483647)
    rank = tl.zeros([MAX_RANKED], tl.int32)
    for start in range(0, n, 32):
        j = start + tl.arange(0, 32)
        other_values = tl.load(values_at + j, mask=j < n, other=float("-inf"))
        other_ids = tl.load(ids_at + j, mask=j < n, other=2147483647)
        ahead = _ranks_before(other_values[:, None], other_ids[:, None], values[None, :], ids[None, :])
        rank += tl.sum(ahead.to(tl.int32), 0)
    tl.debug_barrier()  # all threads have read the list
    tl.store(values_at + rank, values, mask=mask)
    tl.store(ids_at + rank, ids, mask=mask)
    tl.debug_barrier()
    values = tl.load(values_at + c, mask=mask, other=float("-inf"))
    ids = tl.load(ids_at + c, mask=mask, other=2147483647)
    eligible = mask & (values >= best - 30.0)
    likelihood = tl.where(eligible, tl.exp(values - best), 0.0)
    mass = likelihood.to(tl.float64)
    mass_before = tl.cumsum(mass, 0) - mass
    keep = eligible & (c < top_k)
    mass_limit = tl.sum(tl.where(keep, mass, 0.0), 0) * top_p.to(tl.float64)
    mass_limit = tl.where(top_p < 1, mass_limit, float("inf"))
    keep = (keep & (mass_before < mass_limit) & (likelihood >= min_p)) | (mask & (c == 0))
    _, chosen = _best(tl.where(keep, values + _noise(state, position, ids), float("-inf")), ids)
    return chosen


@triton.jit
def _sample_listed(
    values_at, ids_at, n, best, mass_limit, top_k, top_p, min_p, state, position, CANDIDATES: tl.constexpr
):  # fmt: skip
    """Sample from n unordered candidates, all that rank before some token, until the filters keep the sample.

    Mass is summed in fixed point, which is exact: the result must not depend on the order of the list.
    """
    c = tl.arange(0, CANDIDATES)
    values = tl.load(values_at + c, mask=c < n, other=float("-inf"))
    ids = tl.load(ids_at + c, mask=c < n, other=2147483647)
    likelihood = tl.exp(values - best)
    fixed_mass = (likelihood.to(tl.float64) * 281474976710656.0).to(tl.int64)  # 2 ** 48; 8,192 of them fit
    eligible = (values >= best - 30.0) & (likelihood >= min_p)
    noisy = tl.where(eligible, values + _noise(state, position, ids), float("-inf"))
    _, chosen = _best(noisy, ids)
    kept = chosen < 0  # False
    while ~kept:
        value = _value_at(values, ids, chosen)
        ahead = _ranks_before(values, ids, value, chosen)
        n_before = tl.sum(ahead.to(tl.int32), 0)
        mass_before = tl.sum(tl.where(ahead, fixed_mass, 0), 0).to(tl.float64) / 281474976710656.0
        kept = (((top_k == 0) | (n_before < top_k)) & ((top_p >= 1) | (mass_before < mass_limit))) | (n_before == 0)
        _, following = _best(tl.where(ahead, noisy, float("-inf")), ids)
        chosen = tl.where(kept, chosen, following)
    return chosen


@triton.jit
def _full_pass(
    source, row, slot, state, first_stats, best, scale, pivot, pivot_id, min_p, position, DRAW: tl.constexpr,
    LISTED: tl.constexpr, CHUNK_STATS: tl.constexpr, CHUNK: tl.constexpr, MAX_EDITS: tl.constexpr,
    DRAFTS: tl.constexpr,
):  # fmt: skip
    """Over a whole row: count and mass of the tokens that rank before the pivot, and the sample from them.

    first_stats: of the first chunk. A chunk's own sample, if it ranks before the pivot, is also the sample from those.
    """
    count = tl.zeros([CHUNK], tl.int32)
    mass = tl.zeros([CHUNK], tl.float32)
    best_noisy, best_value = tl.full([], float("-inf"), tl.float32), tl.full([], float("-inf"), tl.float32)
    best_id = tl.full([], 2147483647, tl.int32)
    for start in range(0, source[6], CHUNK):
        ids, _, x = _load_chunk(source, row, slot, state, start, CHUNK, MAX_EDITS, DRAFTS)
        x = x * scale
        ahead = _ranks_before(x, ids, pivot, pivot_id) & (x >= best - 30.0)
        likelihood = tl.exp(x - best)
        count += ahead.to(tl.int32)
        mass += tl.where(ahead, likelihood, 0.0)
        if DRAW:
            stats = first_stats + start // CHUNK * CHUNK_STATS
            noisy, candidate = tl.load(stats + 2), tl.load(stats + 6)
            candidate_id = tl.load(stats + 3).to(tl.int32, bitcast=True)
            usable = _ranks_before(candidate, candidate_id, pivot, pivot_id) & (candidate >= best - 30.0)
            if _has_listed_top_k(state, LISTED) | ~(usable & (tl.exp(candidate - best) >= min_p)):
                eligible = ahead & (likelihood >= min_p)
                noisy, candidate_id = _best(tl.where(eligible, x + _noise(state, position, ids), float("-inf")), ids)
                candidate = _value_at(x, ids, candidate_id)
            if noisy > best_noisy:
                best_noisy, best_id, best_value = noisy, candidate_id, candidate
    return tl.sum(count, 0), tl.sum(mass.to(tl.float64), 0), best_id, best_value


@triton.jit
def _float_order(x):
    """An integer that orders as the float32 does; `_from_float_order` is the inverse."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _from_float_order(order):
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _top_k_mass(
    source, row, slot, state, first_stats, best, scale, top_k,
    CHUNK: tl.constexpr, MAX_EDITS: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    """Mass of the k best, by bisection in some thirty passes: for a large k, or many equal logits."""
    below, above = _float_order(best - 30.0) - 1, _float_order(best)  # fewer than top_k exceed `above`
    n_above = tl.zeros([], tl.int32)
    mass = tl.zeros([], tl.float64)
    while above.to(tl.int64) - below.to(tl.int64) > 1:
        middle = ((above.to(tl.int64) + below.to(tl.int64)) >> 1).to(tl.int32)
        count, mass_above, _i, _x = _full_pass(
            source, row, slot, state, first_stats, best, scale, _from_float_order(middle), -1, 0.0, 0, False, 0, 0,
            CHUNK, MAX_EDITS, DRAFTS,
        )  # fmt: skip
        if count < top_k:
            above, n_above, mass = middle, count, mass_above
        else:
            below = middle
    return mass + (top_k - n_above).to(tl.float64) * tl.exp(_from_float_order(above) - best).to(tl.float64)


@triton.jit
def _sample_filtered(
    source, row, slot, state, first_stats, stat_ptrs, chunk_mask, n_listed, best, scale, position, values_at, ids_at,
    CHUNK_STATS: tl.constexpr, CHUNK: tl.constexpr, CANDIDATES: tl.constexpr, MAX_RANKED: tl.constexpr,
    MAX_EDITS: tl.constexpr, MAX_LISTED_K: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    """The sample of a row with filters. first_stats, stat_ptrs: of its first and of all its chunks."""
    top_k, top_p, min_p = tl.load(state + 6), _float(state, 1), _float(state, 2)
    peaks = tl.load(stat_ptrs, mask=chunk_mask, other=float("-inf")) * scale
    sums = tl.load(stat_ptrs + 7, mask=chunk_mask, other=0.0)
    mass = tl.sum(tl.where(peaks > float("-inf"), sums * tl.exp(peaks - best), 0.0).to(tl.float64), 0)
    listed = _has_listed_top_k(state, MAX_LISTED_K)
    n_before, mass_before = tl.zeros([], tl.int32), tl.zeros([], tl.float64)
    sampled_id = tl.full([], 2147483647, tl.int32)
    value = tl.full([], float("-inf"), tl.float32)
    if ~listed:
        sampled_id, value = _unfiltered_sample(stat_ptrs, chunk_mask)
        n_before = tl.sum(tl.load(stat_ptrs + 8, mask=chunk_mask, other=0.0).to(tl.int32, bitcast=True), 0)
        mass_before = tl.sum(tl.load(stat_ptrs + 9, mask=chunk_mask, other=0.0).to(tl.float64), 0)
    nested = (top_k > 0) & (top_p < 1)  # top_p then applies to the mass that top_k keeps
    likelihood = tl.exp(value - best)
    mass_limit = top_p.to(tl.float64) * tl.where(
        nested, mass_before + likelihood.to(tl.float64), mass
    )  # with `nested` a lower bound
    kept = ((top_k == 0) | (n_before < top_k)) & ((top_p >= 1) | (mass_before < mass_limit)) & (likelihood >= min_p)
    kept = ((kept & (value >= best - 30.0)) | (n_before == 0)) & ~listed
    if ~kept:
        if listed & (n_listed <= MAX_RANKED):
            sampled_id = _sample_ranked(
                values_at, ids_at, n_listed, best, top_k, top_p, min_p, state, position, MAX_RANKED
            )  # fmt: skip
        elif (n_listed <= CANDIDATES) & ~listed & ~nested:
            sampled_id = _sample_listed(
                values_at, ids_at, n_listed, best, mass_limit, top_k, top_p, min_p, state, position, CANDIDATES
            )  # fmt: skip
        else:
            if nested:
                mass = _top_k_mass(source, row, slot, state, first_stats, best, scale, top_k, CHUNK, MAX_EDITS, DRAFTS)
            mass_limit = top_p.to(tl.float64) * mass
            while ~kept:
                n_before, mass_before, next_id, next_value = _full_pass(
                    source, row, slot, state, first_stats, best, scale, value, sampled_id, min_p, position, True,
                    MAX_LISTED_K, CHUNK_STATS, CHUNK, MAX_EDITS, DRAFTS,
                )  # fmt: skip
                kept = ((top_k == 0) | (n_before < top_k)) & ((top_p >= 1) | (mass_before < mass_limit))
                kept = (kept & (tl.exp(value - best) >= min_p) & (value >= best - 30.0)) | (n_before == 0)
                sampled_id = tl.where(kept, sampled_id, next_id)
                value = tl.where(kept, value, next_value)
    return sampled_id


@triton.jit
def _finish(
    logits, slots, positions, token_ids_in, offsets, states, edit_ids, edit_values, masks, counts, chunk_stats,
    chunk_tops, n_listed, candidates, candidate_ids, token_ids, logprob, top_ids, top_logprobs, vocab, words, chunks,
    FIELDS: tl.constexpr, CHUNK_STATS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    CANDIDATES: tl.constexpr, MAX_RANKED: tl.constexpr, MAX_EDITS: tl.constexpr, MAX_TOP: tl.constexpr,
    TOPS: tl.constexpr, MAX_LISTED_K: tl.constexpr, GUIDED: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    state = states + tl.maximum(slot, 0) * FIELDS
    if (slot >= 0) & ((tl.load(state + 13) != 0) == GUIDED):
        c = tl.arange(0, CHUNKS)
        stat_ptrs = chunk_stats + (row * chunks + c) * CHUNK_STATS
        chunk_best = tl.load(stat_ptrs, mask=c < chunks, other=float("-inf"))
        best, _ = _best(chunk_best, c)
        has_nan = tl.sum((chunk_best != chunk_best).to(tl.int32), 0) > 0
        ids = tl.load(stat_ptrs + 1, mask=c < chunks, other=0.0).to(tl.int32, bitcast=True)
        temperature = _float(state, 0)
        sampled_id = tl.min(tl.where(chunk_best == best, ids, 2147483647), 0)
        if has_nan | (best == float("inf")) | (best == float("-inf")):
            sampled_id = -1
        elif (temperature > 0) & (tl.load(state + 6) != 1):
            if _has_filter(state):
                scale = tl.math.div_rn(1.0, temperature)
                source = (logits, edit_ids, edit_values, masks, counts, words, vocab, token_ids_in, offsets)
                sampled_id = _sample_filtered(
                    source, row, slot, state, chunk_stats + row * chunks * CHUNK_STATS, stat_ptrs, c < chunks,
                    tl.load(n_listed + row), best * scale, scale, tl.load(positions + row),
                    candidates + row * CANDIDATES, candidate_ids + row * CANDIDATES, CHUNK_STATS, CHUNK, CANDIDATES,
                    MAX_RANKED, MAX_EDITS, MAX_LISTED_K, DRAFTS,
                )  # fmt: skip
            else:
                sampled_id, _value = _unfiltered_sample(stat_ptrs, c < chunks)
        tl.store(token_ids + row, sampled_id)
        if not DRAFTS:  # else `accept` counts  # noqa: SIM102
            if (tl.load(state + 8) != 0) & (sampled_id >= 0):
                count = counts + slot.to(tl.int64) * vocab + tl.maximum(sampled_id, 0)
                old_count = tl.load(count)
                tl.store(count, tl.where((old_count & 16383) == 16383, old_count, old_count + 1))
        n_top = tl.load(state + 7)
        if (n_top >= 0) & (sampled_id >= 0):
            peaks = tl.load(stat_ptrs + 4, mask=c < chunks, other=float("-inf"))
            sums = tl.load(stat_ptrs + 5, mask=c < chunks, other=0.0)
            peak = tl.max(peaks, 0)
            log_sum = peak + tl.log(tl.sum(tl.where(sums > 0, sums * tl.exp(peaks - peak), 0.0), 0))
            raw = tl.load(logits + row.to(tl.int64) * vocab + tl.maximum(sampled_id, 0)).to(tl.float32)
            tl.store(logprob + row, raw - log_sum)
            t = tl.arange(0, TOPS)
            mask = (t < chunks * MAX_TOP) & (t % MAX_TOP < n_top)
            source = chunk_tops + (row * chunks * MAX_TOP + t) * 2
            values = tl.load(source, mask=mask, other=float("-inf"))
            value_ids = tl.load(source + 1, mask=mask, other=0.0).to(tl.int32, bitcast=True)
            value_ids = tl.where(mask, value_ids, 2147483647)
            for index in range(n_top):
                value, value_id = _best(values, value_ids)
                tl.store(top_ids + row * MAX_TOP + index, value_id)
                tl.store(top_logprobs + row * MAX_TOP + index, value - log_sum)
                values = tl.where(value_ids == value_id, float("-inf"), values)


def sample_batch(
    logits: Tensor, table: SamplerTable, slots: Tensor, positions: Tensor, out: SampledBatch, guided: bool = False,
    token_ids: Tensor | None = None, offsets: Tensor | None = None,
) -> None:  # fmt: skip
    """Sample one token per row with the parameters of its slot. logits: [rows, vocab], any float dtype, not modified.

    slots: int32 [rows], -1 for padding; positions: [rows], index of the sampled token in its sequence. guided: for the
    slots that have a grammar, whose masks come later than the logits, instead of the slots that have none. offsets:
    where slots have several rows, one after the other, the number of each among those of its slot; `token_ids` are then
    the tokens after which they are drawn, drafts but for the first of each slot, and what is drawn is not counted for
    penalties.
    """
    rows, vocab = logits.shape
    assert vocab == table.vocab
    assert rows <= table.max_rows
    if not rows:
        return
    words, chunks = table.masks.shape[1], table.chunks
    wide = next_power_of_two(chunks)
    state = (table.state, table.edit_ids, table.edit_values, table.masks, table.counts)
    draws = tuple(slots if each is None else each for each in (token_ids, offsets))
    lists = (table.n_listed, table.candidates, table.candidate_ids)
    fixed = dict(
        FIELDS=table.state.shape[1], CHUNK_STATS=CHUNK_STATS, CHUNK=CHUNK, MAX_EDITS=MAX_EDITS,
        MAX_LISTED_K=MAX_LISTED_K, GUIDED=guided, DRAFTS=offsets is not None,
    )  # fmt: skip
    _scan[(rows, chunks)](
        logits, slots, positions, *draws, *state, table.chunk_stats, table.chunk_tops, table.span_max, table.n_listed,
        vocab, words, SPAN=SPAN, MAX_TOP=MAX_TOP, **fixed, **launch_options(False, num_warps=16, maxnreg=64),
    )  # fmt: skip
    per_program = 1 if rows <= 8 else 4  # chunks; each program first reads the stats of its whole row
    _list_candidates[(rows, cdiv(chunks, per_program))](
        logits, slots, *draws, *state, table.chunk_stats, table.span_max, *lists, vocab, words, chunks,
        CHUNKS=wide, CHUNKS_PER_PROGRAM=per_program, SPAN=SPAN, CANDIDATES=CANDIDATES, **fixed,
        **launch_options(False, num_warps=16, maxnreg=64),
    )  # fmt: skip
    _finish[(rows,)](
        logits, slots, positions, *draws, *state, table.chunk_stats, table.chunk_tops, *lists,
        out.token_ids, out.logprob, out.top_ids, out.top_logprobs, vocab, words, chunks,
        CHUNKS=wide, CANDIDATES=CANDIDATES, MAX_RANKED=MAX_RANKED, MAX_TOP=MAX_TOP,
        TOPS=next_power_of_two(chunks * MAX_TOP), **fixed, **launch_options(False, num_warps=16),
    )  # fmt: skip
