# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator,attr-defined"
"""Tokens from logits in three launches: penalties, bias, bans and masks, then Gumbel-max under temperature and filters.

`_scan` looks at every logit once, in chunks, and finds each chunk's best with and without noise: all that rows without
a filter need. The tokens that filters keep are always the first ones in the order of likelihood (then of ids). So the
row's draw from all tokens is right if its place in that order is among the kept, and else only what stands before it
can be: `_narrow` finds, again in chunks, how many stand before it, what they weigh, and lists them. Under a top_k the
list is of the tokens that can be among the k best. `_finish` decides; if there are too many for the list (a flat
distribution, and a draw that was not kept), it goes on drawing from what stands before the last draw, pass by pass.
The noise is the plain sampler's: the same logits give the same tokens.
"""

import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.gpu.launch import cdiv, launch_options, next_power_of_two
from emberline.kernels.gpu.sampler_table import (
    CANDIDATES,
    CHUNK,
    FOUND,
    MAX_EDITS,
    MAX_LISTED_K,
    MAX_TOP,
    RANKED,
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
    return -tl.log(-tl.log(tl.minimum(uniform, 0.99999994)))  # 1 - 2 ** -24; not 1, which would win against any logit


@triton.jit
def _adjusted(source, raw, ids, ok, state, slot, MAX_EDITS: tl.constexpr):
    """Penalties, bias and bans, then the mask: what may not be drawn is -inf."""
    _, edit_ids, edit_values, masks, counts, words, vocab = source
    x = raw
    if tl.load(state + 8) != 0:
        count = tl.load(counts + slot.to(tl.int64) * vocab + ids, mask=ok, other=0).to(tl.int32)
        repetition = _float(state, 3)
        x = tl.where(count > 0, tl.where(x > 0, tl.math.div_rn(x, repetition), x * repetition), x)
        drawn = count & 16383
        x = tl.where(drawn > 0, x - (_float(state, 4) * drawn.to(tl.float32) + _float(state, 5)), x)
    for e in range(tl.load(state + 9)):
        edit = slot * MAX_EDITS + e
        x = tl.where(ids == tl.load(edit_ids + edit), x + tl.load(edit_values + edit), x)
    mask = tl.load(state + 10)
    if mask > 0:
        word = tl.load(masks + (mask - 1).to(tl.int64) * words + ids // 32, mask=ok, other=0)
        x = tl.where(((word >> (ids % 32)) & 1) != 0, x, float("-inf"))
    return tl.where(ok, x, float("-inf"))


@triton.jit
def _chunk(source, row, slot, state, start, CHUNK: tl.constexpr, MAX_EDITS: tl.constexpr):
    """Ids, raw and adjusted logits of a chunk of a row."""
    ids = start + tl.arange(0, CHUNK)
    vocab = source[6]
    ok = ids < vocab
    raw = tl.load(source[0] + row.to(tl.int64) * vocab + ids, mask=ok, other=float("-inf")).to(tl.float32)
    return ids, raw, _adjusted(source, raw, ids, ok, state, slot, MAX_EDITS)


@triton.jit
def _best(x, ids):
    """The greatest and, of equals, its lowest id."""
    top = tl.max(x, 0)
    return top, tl.min(tl.where(x == top, ids, 2147483647), 0)


@triton.jit
def _value_of(x, ids, wanted):
    return tl.max(tl.where(ids == wanted, x, float("-inf")), 0)


@triton.jit
def _has_filter(state):
    return (tl.load(state + 6) > 1) | (_float(state, 1) < 1) | (_float(state, 2) > 0)


@triton.jit
def _is_listed(state, MAX_LISTED_K: tl.constexpr):
    """Whether the row's candidates are those that can be among its k best."""
    top_k = tl.load(state + 6)
    return (top_k > 1) & (top_k <= MAX_LISTED_K)


@triton.jit
def _ahead(x, ids, pivot, pivot_id):
    """What stands before the pivot in the order of likelihood."""
    return (x > pivot) | ((x == pivot) & (ids < pivot_id))


@triton.jit
def _scan(
    logits, slots, positions, states, edit_ids, edit_values, masks, counts, found, tops, spans, listed,
    vocab, words, FIELDS: tl.constexpr, FOUND: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr,
    MAX_EDITS: tl.constexpr, MAX_TOP: tl.constexpr, MAX_LISTED_K: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot >= 0:
        state = states + slot * FIELDS
        source = (logits, edit_ids, edit_values, masks, counts, words, vocab)
        ids, raw, x = _chunk(source, row, slot, state, chunk * CHUNK, CHUNK, MAX_EDITS)
        bad = tl.sum((x != x).to(tl.int32), 0)
        top, top_id = _best(x, ids)
        to = found + (row * tl.num_programs(1) + chunk) * FOUND
        tl.store(to, tl.where(bad > 0, float("nan"), top))
        tl.store(to + 1, top_id.to(tl.float32, bitcast=True))
        temperature = _float(state, 0)
        if (temperature > 0) & (tl.load(state + 6) != 1):
            inverse = tl.math.div_rn(1.0, temperature)
            scaled = x * inverse
            if _has_filter(state):
                peak = tl.where(top == float("-inf"), 0.0, top * inverse)
                tl.store(to + 7, tl.sum(tl.exp(scaled - peak), 0))
                if chunk == 0:
                    tl.store(listed + row, 0)
            if _is_listed(state, MAX_LISTED_K):
                highest = tl.max(tl.reshape(scaled, [CHUNK // SPAN, SPAN]), 1)
                place = (row * tl.num_programs(1) + chunk) * (CHUNK // SPAN) + tl.arange(0, CHUNK // SPAN)
                tl.store(spans + place, highest)
            else:
                drawn, drawn_id = _best(scaled + _noise(state, tl.load(positions + row), ids), ids)
                tl.store(to + 2, drawn)
                tl.store(to + 3, drawn_id.to(tl.float32, bitcast=True))
                tl.store(to + 6, _value_of(scaled, ids, drawn_id))
        n_top = tl.load(state + 7)
        if n_top >= 0:
            highest = tl.max(raw, 0)
            safe = tl.where(highest == float("-inf"), 0.0, highest)
            tl.store(to + 4, highest)
            tl.store(to + 5, tl.sum(tl.exp(raw - safe), 0))
            rest = raw
            for place in range(n_top):
                value, value_id = _best(rest, ids)
                at = tops + ((row * tl.num_programs(1) + chunk) * MAX_TOP + place) * 2
                tl.store(at, value)
                tl.store(at + 1, value_id.to(tl.float32, bitcast=True))
                rest = tl.where(ids == value_id, float("-inf"), rest)


@triton.jit
def _drawn(at, real):
    """A row's draw from all tokens: its id and its scaled logit. at: what the chunks found, [CHUNKS] pointers."""
    values = tl.load(at + 2, mask=real, other=float("-inf"))
    ids = tl.load(at + 3, mask=real, other=0.0).to(tl.int32, bitcast=True)
    chosen = tl.min(tl.where(values == tl.max(values, 0), ids, 2147483647), 0)
    return chosen, _value_of(tl.load(at + 6, mask=real, other=float("-inf")), ids, chosen)


@triton.jit
def _bound(spans, row, chunks, best, top_k, CHUNKS: tl.constexpr, SPANS: tl.constexpr):
    """A value that at least top_k tokens reach, and few more: so many stretches of the row have one that does."""
    s = tl.arange(0, CHUNKS * SPANS)
    highest = tl.load(spans + row * chunks * SPANS + s, mask=s < chunks * SPANS, other=float("-inf"))
    low = best - 30.0  # NEGLIGIBLE
    step = 30.0 / 16
    for _ in tl.static_range(2):
        pivots = low + step * tl.arange(0, 16).to(tl.float32)
        enough = tl.sum((highest[None, :] >= pivots[:, None]).to(tl.int32), 1) >= top_k
        low = tl.maximum(low, tl.max(tl.where(enough, pivots, float("-inf")), 0))
        step = step / 16
    return low


@triton.jit
def _narrow(
    logits, slots, states, edit_ids, edit_values, masks, counts, found, spans, listed, candidates, candidate_ids,
    vocab, words, chunks, FIELDS: tl.constexpr, FOUND: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    EACH: tl.constexpr, SPAN: tl.constexpr, CANDIDATES: tl.constexpr, MAX_EDITS: tl.constexpr,
    MAX_LISTED_K: tl.constexpr,
):  # fmt: skip
    row, first = tl.program_id(0), tl.program_id(1) * EACH
    slot = tl.load(slots + row)
    if slot >= 0:
        state = states + slot * FIELDS
        temperature = _float(state, 0)
        if (temperature > 0) & _has_filter(state) & (tl.load(state + 6) != 1):
            scale = tl.math.div_rn(1.0, temperature)
            c = tl.arange(0, CHUNKS)
            at = found + (row * chunks + c) * FOUND
            best = tl.max(tl.load(at, mask=c < chunks, other=float("-inf")), 0) * scale
            pivot, pivot_id = best, 2147483647
            if _is_listed(state, MAX_LISTED_K):
                pivot = _bound(spans, row, chunks, best, tl.load(state + 6), CHUNKS, CHUNK // SPAN)
            else:
                pivot_id, pivot = _drawn(at, c < chunks)
                min_p = _float(state, 2)
                lowest = tl.where(min_p > 0, best + tl.log(min_p) - 0.001, pivot)
                pivot = tl.maximum(pivot, lowest)
            source = (logits, edit_ids, edit_values, masks, counts, words, vocab)
            for chunk in range(first, tl.minimum(first + EACH, chunks)):
                mine = found + (row * chunks + chunk) * FOUND
                n, weight = tl.zeros([], tl.int32), tl.zeros([], tl.float32)
                if tl.load(mine) * scale >= pivot:
                    ids, _, x = _chunk(source, row, slot, state, chunk * CHUNK, CHUNK, MAX_EDITS)
                    x = x * scale
                    ahead = _ahead(x, ids, pivot, pivot_id)
                    n = tl.sum(ahead.to(tl.int32), 0)
                    if n > 0:
                        weight = tl.sum(tl.where(ahead, tl.exp(x - best), 0.0), 0)
                        start = tl.atomic_add(listed + row, n)
                        if start + n <= CANDIDATES:
                            place = start + tl.cumsum(ahead.to(tl.int32), 0) - 1
                            tl.store(candidates + row * CANDIDATES + place, x, mask=ahead)
                            tl.store(candidate_ids + row * CANDIDATES + place, ids, mask=ahead)
                tl.store(mine + 8, n.to(tl.float32, bitcast=True))
                tl.store(mine + 9, weight)


@triton.jit
def _from_ranked(
    values_at, ids_at, n, best, top_k, top_p, min_p, state, position, RANKED: tl.constexpr
):  # fmt: skip
    """The draw from n candidates in any order, the k best among them: each one's place is found by comparison with all.

    top_p is a share of what the k best weigh.
    """
    c = tl.arange(0, RANKED)
    real = c < n
    values = tl.load(values_at + c, mask=real, other=float("-inf"))
    ids = tl.load(ids_at + c, mask=real, other=2147483647)
    rank = tl.zeros([RANKED], tl.int32)
    before = tl.zeros([RANKED], tl.float64)
    for start in range(0, n, 32):
        j = start + tl.arange(0, 32)
        theirs = tl.load(values_at + j, mask=j < n, other=float("-inf"))
        their_ids = tl.load(ids_at + j, mask=j < n, other=2147483647)
        weights = tl.where((j < n) & (theirs >= best - 30.0), tl.exp(theirs - best), 0.0)
        ahead = _ahead(theirs[:, None], their_ids[:, None], values[None, :], ids[None, :])
        rank += tl.sum(ahead.to(tl.int32), 0)
        before += tl.sum(tl.where(ahead, weights[:, None], 0.0), 0).to(tl.float64)
    likelihood = tl.exp(values - best)
    keep = real & (values >= best - 30.0) & (rank < top_k)
    goal = tl.sum(tl.where(keep, likelihood, 0.0).to(tl.float64), 0) * top_p.to(tl.float64)
    goal = tl.where(top_p < 1, goal, float("inf"))
    keep = (keep & (before < goal) & (likelihood >= min_p)) | (real & (rank == 0))
    _, chosen = _best(tl.where(keep, values + _noise(state, position, ids), float("-inf")), ids)
    return chosen


@triton.jit
def _from_list(
    values_at, ids_at, n, best, goal, top_k, top_p, min_p, state, position, CANDIDATES: tl.constexpr
):  # fmt: skip
    """The draw from n candidates in any order, all that stand before some token: draws until one is kept."""
    c = tl.arange(0, CANDIDATES)
    values = tl.load(values_at + c, mask=c < n, other=float("-inf"))
    ids = tl.load(ids_at + c, mask=c < n, other=2147483647)
    likelihood = tl.exp(values - best)
    able = (values >= best - 30.0) & (likelihood >= min_p)
    noisy = tl.where(able, values + _noise(state, position, ids), float("-inf"))
    _, chosen = _best(noisy, ids)
    kept = chosen < 0  # not yet
    while ~kept:
        value = _value_of(values, ids, chosen)
        ahead = _ahead(values, ids, value, chosen)
        before = tl.sum(ahead.to(tl.int32), 0)
        weight = tl.sum(tl.where(ahead, likelihood, 0.0).to(tl.float64), 0)
        kept = (((top_k == 0) | (before < top_k)) & ((top_p >= 1) | (weight < goal))) | (before == 0)
        _, following = _best(tl.where(ahead, noisy, float("-inf")), ids)
        chosen = tl.where(kept, chosen, following)
    return chosen


@triton.jit
def _pass(
    source, row, slot, state, at, best, scale, pivot, pivot_id, min_p, position, DRAW: tl.constexpr,
    LISTED: tl.constexpr, FOUND: tl.constexpr, CHUNK: tl.constexpr, MAX_EDITS: tl.constexpr,
):  # fmt: skip
    """Over a whole row, what stands before the pivot: how many, what they weigh, and the draw from them.

    at: what the first chunk found. A chunk's own draw, if it stands before the pivot, is also the draw from those.
    """
    n = tl.zeros([CHUNK], tl.int32)
    weight = tl.zeros([CHUNK], tl.float32)
    drawn, drawn_at = tl.full([], float("-inf"), tl.float32), tl.full([], float("-inf"), tl.float32)
    drawn_id = tl.full([], 2147483647, tl.int32)
    for start in range(0, source[6], CHUNK):
        ids, _, x = _chunk(source, row, slot, state, start, CHUNK, MAX_EDITS)
        x = x * scale
        ahead = _ahead(x, ids, pivot, pivot_id) & (x >= best - 30.0)
        likelihood = tl.exp(x - best)
        n += ahead.to(tl.int32)
        weight += tl.where(ahead, likelihood, 0.0)
        if DRAW:
            mine = at + start // CHUNK * FOUND
            value, value_at = tl.load(mine + 2), tl.load(mine + 6)
            value_id = tl.load(mine + 3).to(tl.int32, bitcast=True)
            good = _ahead(value_at, value_id, pivot, pivot_id) & (value_at >= best - 30.0)
            if _is_listed(state, LISTED) | ~(good & (tl.exp(value_at - best) >= min_p)):
                able = ahead & (likelihood >= min_p)
                value, value_id = _best(tl.where(able, x + _noise(state, position, ids), float("-inf")), ids)
                value_at = _value_of(x, ids, value_id)
            if value > drawn:
                drawn, drawn_id, drawn_at = value, value_id, value_at
    return tl.sum(n, 0), tl.sum(weight.to(tl.float64), 0), drawn_id, drawn_at


@triton.jit
def _order(x):
    """A float32's place among all floats, as an integer, and back."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _unorder(place):
    return (place ^ ((place >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _mass_of_top(source, row, slot, state, at, best, scale, top_k, CHUNK: tl.constexpr, MAX_EDITS: tl.constexpr):
    """What the k best weigh, by bisection: some thirty passes, for a large k or a crowd of equals."""
    below, above = _order(best - 30.0) - 1, _order(best)  # more than `above` are fewer than top_k
    n_above = tl.zeros([], tl.int32)
    mass = tl.zeros([], tl.float64)
    while above.to(tl.int64) - below.to(tl.int64) > 1:
        middle = ((above.to(tl.int64) + below.to(tl.int64)) >> 1).to(tl.int32)
        n, weight, _i, _x = _pass(
            source, row, slot, state, at, best, scale, _unorder(middle), -1, 0.0, 0, False, 0, 0, CHUNK, MAX_EDITS
        )  # fmt: skip
        if n < top_k:
            above, n_above, mass = middle, n, weight
        else:
            below = middle
    return mass + (top_k - n_above).to(tl.float64) * tl.exp(_unorder(above) - best).to(tl.float64)


@triton.jit
def _filtered(
    source, row, slot, state, first, at, real, n_listed, best, scale, position, values_at, ids_at,
    FOUND: tl.constexpr, CHUNK: tl.constexpr, CANDIDATES: tl.constexpr, RANKED: tl.constexpr, MAX_EDITS: tl.constexpr,
    MAX_LISTED_K: tl.constexpr,
):  # fmt: skip
    """The draw of a row with a filter. first, at: what its first and all its chunks found; n_listed: to be listed."""
    top_k, top_p, min_p = tl.load(state + 6), _float(state, 1), _float(state, 2)
    peaks = tl.load(at, mask=real, other=float("-inf")) * scale
    sums = tl.load(at + 7, mask=real, other=0.0)
    mass = tl.sum(tl.where(peaks > float("-inf"), sums * tl.exp(peaks - best), 0.0).to(tl.float64), 0)
    listed = _is_listed(state, MAX_LISTED_K)
    n, weight = tl.zeros([], tl.int32), tl.zeros([], tl.float64)
    chosen = tl.full([], 2147483647, tl.int32)
    value = tl.full([], float("-inf"), tl.float32)
    if ~listed:
        chosen, value = _drawn(at, real)
        n = tl.sum(tl.load(at + 8, mask=real, other=0.0).to(tl.int32, bitcast=True), 0)
        weight = tl.sum(tl.load(at + 9, mask=real, other=0.0).to(tl.float64), 0)
    whole = (top_k > 0) & (top_p < 1)  # top_p is then a share of what top_k keeps
    own = tl.exp(value - best)
    goal = top_p.to(tl.float64) * tl.where(whole, weight + own.to(tl.float64), mass)  # at least, if not known
    kept = ((top_k == 0) | (n < top_k)) & ((top_p >= 1) | (weight < goal)) & (own >= min_p)
    kept = ((kept & (value >= best - 30.0)) | (n == 0)) & ~listed
    if ~kept:
        if listed & (n_listed <= RANKED):
            chosen = _from_ranked(
                values_at, ids_at, n_listed, best, top_k, top_p, min_p, state, position, RANKED
            )  # fmt: skip
        elif (n_listed <= CANDIDATES) & ~listed & ~whole:
            chosen = _from_list(
                values_at, ids_at, n_listed, best, goal, top_k, top_p, min_p, state, position, CANDIDATES
            )  # fmt: skip
        else:
            if whole:
                mass = _mass_of_top(source, row, slot, state, first, best, scale, top_k, CHUNK, MAX_EDITS)
            goal = top_p.to(tl.float64) * mass
            while ~kept:
                n, weight, next_id, next_value = _pass(
                    source, row, slot, state, first, best, scale, value, chosen, min_p, position, True,
                    MAX_LISTED_K, FOUND, CHUNK, MAX_EDITS,
                )  # fmt: skip
                kept = ((top_k == 0) | (n < top_k)) & ((top_p >= 1) | (weight < goal))
                kept = (kept & (tl.exp(value - best) >= min_p) & (value >= best - 30.0)) | (n == 0)
                chosen = tl.where(kept, chosen, next_id)
                value = tl.where(kept, value, next_value)
    return chosen


@triton.jit
def _finish(
    logits, slots, positions, states, edit_ids, edit_values, masks, counts, found, tops, listed, candidates,
    candidate_ids, token_ids, logprob, top_ids, top_logprobs, vocab, words, chunks,
    FIELDS: tl.constexpr, FOUND: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CANDIDATES: tl.constexpr,
    RANKED: tl.constexpr, MAX_EDITS: tl.constexpr, MAX_TOP: tl.constexpr, TOPS: tl.constexpr,
    MAX_LISTED_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot >= 0:
        state = states + slot * FIELDS
        c = tl.arange(0, CHUNKS)
        at = found + (row * chunks + c) * FOUND
        tops_of = tl.load(at, mask=c < chunks, other=float("-inf"))
        best, _ = _best(tops_of, c)
        bad = tl.sum((tops_of != tops_of).to(tl.int32), 0) > 0
        ids = tl.load(at + 1, mask=c < chunks, other=0.0).to(tl.int32, bitcast=True)
        temperature = _float(state, 0)
        chosen = tl.min(tl.where(tops_of == best, ids, 2147483647), 0)
        if bad | (best == float("inf")) | (best == float("-inf")):
            chosen = -1
        elif (temperature > 0) & (tl.load(state + 6) != 1):
            if _has_filter(state):
                scale = tl.math.div_rn(1.0, temperature)
                source = (logits, edit_ids, edit_values, masks, counts, words, vocab)
                chosen = _filtered(
                    source, row, slot, state, found + row * chunks * FOUND, at, c < chunks, tl.load(listed + row),
                    best * scale, scale, tl.load(positions + row), candidates + row * CANDIDATES,
                    candidate_ids + row * CANDIDATES, FOUND, CHUNK, CANDIDATES, RANKED, MAX_EDITS, MAX_LISTED_K,
                )  # fmt: skip
            else:
                chosen, _value = _drawn(at, c < chunks)
        tl.store(token_ids + row, chosen)
        if (tl.load(state + 8) != 0) & (chosen >= 0):
            count = counts + slot.to(tl.int64) * vocab + tl.maximum(chosen, 0)
            now = tl.load(count)
            tl.store(count, tl.where((now & 16383) == 16383, now, now + 1))
        n_top = tl.load(state + 7)
        if (n_top >= 0) & (chosen >= 0):
            peaks = tl.load(at + 4, mask=c < chunks, other=float("-inf"))
            sums = tl.load(at + 5, mask=c < chunks, other=0.0)
            peak = tl.max(peaks, 0)
            total = peak + tl.log(tl.sum(tl.where(sums > 0, sums * tl.exp(peaks - peak), 0.0), 0))
            raw = tl.load(logits + row.to(tl.int64) * vocab + tl.maximum(chosen, 0)).to(tl.float32)
            tl.store(logprob + row, raw - total)
            t = tl.arange(0, TOPS)
            mine = (t < chunks * MAX_TOP) & (t % MAX_TOP < n_top)
            source = tops + (row * chunks * MAX_TOP + t) * 2
            values = tl.load(source, mask=mine, other=float("-inf"))
            value_ids = tl.load(source + 1, mask=mine, other=0.0).to(tl.int32, bitcast=True)
            value_ids = tl.where(mine, value_ids, 2147483647)
            for place in range(n_top):
                value, value_id = _best(values, value_ids)
                tl.store(top_ids + row * MAX_TOP + place, value_id)
                tl.store(top_logprobs + row * MAX_TOP + place, value - total)
                values = tl.where(value_ids == value_id, float("-inf"), values)


def sample_batch(logits: Tensor, table: SamplerTable, slots: Tensor, positions: Tensor, out: SampledBatch) -> None:
    """One token per row. logits: [rows, vocab], any float type, left as they are; row r is drawn as slot slots[r] says.

    slots: int32 [rows], -1 for padding; positions: [rows], the index of the token being chosen in its sequence.
    """
    rows, vocab = logits.shape
    assert vocab == table.vocab
    assert rows <= table.max_rows
    if not rows:
        return
    words, chunks = table.masks.shape[1], table.chunks
    wide = next_power_of_two(chunks)
    state = (table.state, table.edit_ids, table.edit_values, table.masks, table.counts)
    lists = (table.listed, table.candidates, table.candidate_ids)
    fixed = dict(FIELDS=table.state.shape[1], FOUND=FOUND, CHUNK=CHUNK, MAX_EDITS=MAX_EDITS, MAX_LISTED_K=MAX_LISTED_K)
    _scan[(rows, chunks)](
        logits, slots, positions, *state, table.found, table.tops, table.spans, table.listed, vocab, words,
        SPAN=SPAN, MAX_TOP=MAX_TOP, **fixed, **launch_options(False, num_warps=16, maxnreg=64),
    )  # fmt: skip
    each = 1 if rows <= 8 else 4  # chunks: with many rows, fewer programs that look at a row as a whole first
    _narrow[(rows, cdiv(chunks, each))](
        logits, slots, *state, table.found, table.spans, *lists, vocab, words, chunks,
        CHUNKS=wide, EACH=each, SPAN=SPAN, CANDIDATES=CANDIDATES, **fixed,
        **launch_options(False, num_warps=16, maxnreg=64),
    )  # fmt: skip
    _finish[(rows,)](
        logits, slots, positions, *state, table.found, table.tops, *lists,
        out.token_ids, out.logprob, out.top_ids, out.top_logprobs, vocab, words, chunks,
        CHUNKS=wide, CANDIDATES=CANDIDATES, RANKED=RANKED, MAX_TOP=MAX_TOP, TOPS=next_power_of_two(chunks * MAX_TOP),
        **fixed, **launch_options(False, num_warps=16),
    )  # fmt: skip
