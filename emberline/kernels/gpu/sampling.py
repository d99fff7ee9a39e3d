# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator,attr-defined"
"""Tokens from logits in two launches: penalties, bias, bans and masks, then Gumbel-max under temperature and filters.

`_scan` looks at every logit once, in chunks, and finds each chunk's best with and without noise. `_finish` picks from
those; a row with a filter first narrows its candidates by a distance from the best, gathers them, and finds the
filter's cut among them by bisection. The noise is the plain sampler's: the same logits give the same tokens.
"""

import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.gpu.launch import options, power_of_two
from emberline.kernels.gpu.sampler_table import CANDIDATES, CHUNK, MAX_EDITS, MAX_TOP, Drawn, SamplerTable

__all__ = ["Drawn", "SamplerTable", "draw"]


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
    return -tl.log(-tl.log(uniform))


@triton.jit
def _adjusted(raw, ids, ok, state, slot, edit_ids, edit_values, masks, counts, words, vocab, MAX_EDITS: tl.constexpr):
    """Penalties, bias and bans, then the mask: what may not be drawn is -inf."""
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
def _best(x, ids):
    """The greatest and, of equals, its lowest id."""
    top = tl.max(x, 0)
    return top, tl.min(tl.where(x == top, ids, 2147483647), 0)


@triton.jit
def _has_filter(state):
    return (tl.load(state + 6) > 0) | (_float(state, 1) < 1) | (_float(state, 2) > 0)


@triton.jit
def _reach(state):
    """How far below the best a token can be that the filters keep: no further than min_p, or NEGLIGIBLE, allows."""
    min_p = _float(state, 2)
    return tl.where(min_p > 0, tl.minimum(-tl.log(min_p) + 0.01, 30.0), 30.0)


@triton.jit
def _first_distance(state):
    return tl.minimum(_reach(state), 6.0)


@triton.jit
def _equals_before(equal):
    """For each place, how many equals stand before it."""
    return tl.cumsum(equal.to(tl.int32), 0) - equal.to(tl.int32)


@triton.jit
def _scan(
    logits, slots, positions, states, edit_ids, edit_values, masks, counts, found, tops, candidates, candidate_ids,
    vocab, words, FIELDS: tl.constexpr, CHUNK: tl.constexpr, CANDIDATES: tl.constexpr, ROOM: tl.constexpr,
    MAX_EDITS: tl.constexpr, MAX_TOP: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot >= 0:
        state = states + slot * FIELDS
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        ok = ids < vocab
        raw = tl.load(logits + row.to(tl.int64) * vocab + ids, mask=ok, other=float("-inf")).to(tl.float32)
        x = _adjusted(raw, ids, ok, state, slot, edit_ids, edit_values, masks, counts, words, vocab, MAX_EDITS)
        bad = tl.sum((x != x).to(tl.int32), 0)
        top, top_id = _best(x, ids)
        to = found + (row * tl.num_programs(1) + chunk) * 8
        tl.store(to, tl.where(bad > 0, float("nan"), top))
        tl.store(to + 1, top_id.to(tl.float32, bitcast=True))
        temperature = _float(state, 0)
        if temperature > 0:
            scaled = x * tl.math.div_rn(1.0, temperature)
            drawn, drawn_id = _best(scaled + _noise(state, tl.load(positions + row), ids), ids)
            tl.store(to + 2, drawn)
            tl.store(to + 3, drawn_id.to(tl.float32, bitcast=True))
            if _has_filter(state) & (top > float("-inf")):
                peak = top * tl.math.div_rn(1.0, temperature)
                near = scaled >= peak - _first_distance(state)
                place = _equals_before(near)
                fits = near & (place < ROOM)
                tl.store(candidates + row * CANDIDATES + chunk * ROOM + place, scaled, mask=fits)
                tl.store(candidate_ids + row * CANDIDATES + chunk * ROOM + place, ids, mask=fits)
                tl.store(to + 6, tl.sum(near.to(tl.int32), 0).to(tl.float32, bitcast=True))
                tl.store(to + 7, tl.sum(tl.exp(scaled - peak), 0))
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
def _order(x):
    """A float32's place among all floats, as an integer."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _cut(values, real, best, mass, top_k, top_p, min_p):
    """Which candidates the filters keep. They stand in the order of their ids; equals are kept in that order.

    mass: what all tokens weigh, candidates or not; top_p is a share of it, or of what top_k keeps.
    """
    keys = tl.where(real, _order(values), -(1 << 40))
    keep = real
    low, high = tl.min(tl.where(real, keys, 1 << 40), 0), tl.max(keys, 0)
    if (top_k > 0) & (tl.sum(real.to(tl.int32), 0) > top_k):
        below, above = low, high + 1  # so many as top_k are >= below, fewer >= above
        while above - below > 1:
            middle = below + (above - below) // 2
            enough = tl.sum((keys >= middle).to(tl.int32), 0) >= top_k
            below = tl.where(enough, middle, below)
            above = tl.where(enough, above, middle)
        room = top_k - tl.sum((keys > below).to(tl.int32), 0)
        equal = keys == below
        keep = (keys > below) | (equal & (_equals_before(equal) < room))
    likelihood = tl.where(keep, tl.exp(values.to(tl.float64) - best.to(tl.float64)), 0.0)
    if top_p < 1:
        goal = top_p.to(tl.float64) * tl.where(top_k > 0, tl.sum(likelihood, 0), mass)
        under, over = low - 1, high  # what is > over weighs less than the goal, what is > under does not
        while over - under > 1:
            middle = under + (over - under) // 2
            less = tl.sum(tl.where(keys > middle, likelihood, 0.0), 0) < goal
            over = tl.where(less, middle, over)
            under = tl.where(less, under, middle)
        heavier = tl.sum(tl.where(keys > over, likelihood, 0.0), 0)
        equal = keep & (keys == over)
        before = heavier + _equals_before(equal).to(tl.float64) * likelihood
        keep = keep & ((keys > over) | (equal & (before < goal)))
    keep = keep & ((likelihood >= min_p.to(tl.float64)) | (keys == high) & (_equals_before(keys == high) == 0))
    return keep


@triton.jit
def _gather(
    logits, row, state, slot, edit_ids, edit_values, masks, counts, words, vocab, best, scale, distance,
    values_out, ids_out, CHUNK: tl.constexpr, CANDIDATES: tl.constexpr, MAX_EDITS: tl.constexpr,
):  # fmt: skip
    """Tokens within `distance` of the best, in the order of their ids: how many, what they weigh, and what all do."""
    n = 0
    weight = tl.zeros([], tl.float64)
    total = tl.zeros([], tl.float64)
    for start in range(0, vocab, CHUNK):
        ids = start + tl.arange(0, CHUNK)
        ok = ids < vocab
        raw = tl.load(logits + row.to(tl.int64) * vocab + ids, mask=ok, other=float("-inf")).to(tl.float32)
        x = _adjusted(raw, ids, ok, state, slot, edit_ids, edit_values, masks, counts, words, vocab, MAX_EDITS) * scale
        counted = x >= best - 30.0  # NEGLIGIBLE
        likelihood = tl.where(counted, tl.exp(x - best), 0.0)
        total += tl.sum(likelihood, 0).to(tl.float64)
        near = counted & (x >= best - distance)
        inside = tl.sum(near.to(tl.int32), 0)
        if inside > 0:
            place = n + _equals_before(near)
            fits = near & (place < CANDIDATES)
            tl.store(values_out + place, x, mask=fits)
            tl.store(ids_out + place, ids, mask=fits)
            weight += tl.sum(tl.where(near, likelihood, 0.0), 0).to(tl.float64)
            n += inside
    return n, weight, total


@triton.jit
def _weigh(
    logits, row, state, slot, edit_ids, edit_values, masks, counts, words, vocab, best, scale, above, equal_to,
    CHUNK: tl.constexpr, MAX_EDITS: tl.constexpr,
):  # fmt: skip
    """Over the whole row: how many tokens are > above, what they weigh, and how many equal `equal_to`."""
    n = 0
    same = 0
    weight = tl.zeros([], tl.float64)
    for start in range(0, vocab, CHUNK):
        ids = start + tl.arange(0, CHUNK)
        ok = ids < vocab
        raw = tl.load(logits + row.to(tl.int64) * vocab + ids, mask=ok, other=float("-inf")).to(tl.float32)
        x = _adjusted(raw, ids, ok, state, slot, edit_ids, edit_values, masks, counts, words, vocab, MAX_EDITS) * scale
        counted = x >= best - 30.0
        keys = _order(x)
        more = counted & (keys > above)
        n += tl.sum(more.to(tl.int32), 0)
        same += tl.sum((counted & (keys == equal_to)).to(tl.int32), 0)
        weight += tl.sum(tl.where(more, tl.exp(x - best), 0.0), 0).to(tl.float64)
    return n, weight, same


@triton.jit
def _slow(
    logits, row, state, slot, edit_ids, edit_values, masks, counts, words, vocab, best, scale, position,
    top_k, top_p, min_p, CHUNK: tl.constexpr, MAX_EDITS: tl.constexpr,
):  # fmt: skip
    """Filters that keep more candidates than fit: the same cuts by passes over the whole row."""
    low, high = _order(best - 30.0) - 1, _order(best)
    cut = low  # keep what is > cut, and the first `room` that equal it
    room = 0
    if top_k > 0:
        below, above = low, high
        while above - below > 1:
            middle = below + (above - below) // 2
            n, _w, _s = _weigh(logits, row, state, slot, edit_ids, edit_values, masks, counts, words, vocab, best, scale, middle, middle, CHUNK, MAX_EDITS)  # noqa: E501  # fmt: skip
            fewer = n < top_k
            above = tl.where(fewer, middle, above)
            below = tl.where(fewer, below, middle)
        n, _w, _s = _weigh(logits, row, state, slot, edit_ids, edit_values, masks, counts, words, vocab, best, scale, above, above, CHUNK, MAX_EDITS)  # noqa: E501  # fmt: skip
        cut, room = above, tl.minimum(top_k - n, _s)
    if top_p < 1:
        n, weight, same = _weigh(logits, row, state, slot, edit_ids, edit_values, masks, counts, words, vocab, best, scale, cut, cut, CHUNK, MAX_EDITS)  # noqa: E501  # fmt: skip
        bits = tl.where(cut < 0, cut ^ 0x7FFFFFFF, cut).to(tl.int32)
        each = tl.exp((bits.to(tl.float32, bitcast=True) - best).to(tl.float64))
        goal = top_p.to(tl.float64) * (weight + room.to(tl.float64) * each)
        under, over = cut - 1, high
        while over - under > 1:
            middle = under + (over - under) // 2
            n, weight, same = _weigh(logits, row, state, slot, edit_ids, edit_values, masks, counts, words, vocab, best, scale, middle, middle, CHUNK, MAX_EDITS)  # noqa: E501  # fmt: skip
            less = weight < goal
            over = tl.where(less, middle, over)
            under = tl.where(less, under, middle)
        n, weight, same = _weigh(logits, row, state, slot, edit_ids, edit_values, masks, counts, words, vocab, best, scale, over, over, CHUNK, MAX_EDITS)  # noqa: E501  # fmt: skip
        bits = tl.where(over < 0, over ^ 0x7FFFFFFF, over).to(tl.int32)
        each = tl.exp((bits.to(tl.float32, bitcast=True) - best).to(tl.float64))
        fits = tl.maximum(tl.ceil((goal - weight) / each), 1.0).to(tl.int32)  # the first to reach the goal is kept
        room = tl.minimum(fits, tl.where(over == cut, room, same))
        cut = over
    drawn = float("-inf")
    drawn_id = 2147483647
    seen = 0
    for start in range(0, vocab, CHUNK):
        ids = start + tl.arange(0, CHUNK)
        ok = ids < vocab
        raw = tl.load(logits + row.to(tl.int64) * vocab + ids, mask=ok, other=float("-inf")).to(tl.float32)
        x = _adjusted(raw, ids, ok, state, slot, edit_ids, edit_values, masks, counts, words, vocab, MAX_EDITS) * scale
        keys = _order(x)
        equal = (keys == cut) & ok
        keep = (keys > cut) | (equal & (seen + _equals_before(equal) < room))
        keep = keep & ((tl.exp((x - best).to(tl.float64)) >= min_p.to(tl.float64)) | (x == best)) & ok
        seen += tl.sum(equal.to(tl.int32), 0)
        value, value_id = _best(tl.where(keep, x + _noise(state, position, ids), float("-inf")), ids)
        better = value > drawn
        drawn_id = tl.where(better, value_id, drawn_id)
        drawn = tl.where(better, value, drawn)
    return drawn_id


@triton.jit
def _filtered(
    logits, row, state, slot, edit_ids, edit_values, masks, counts, found, words, vocab, chunks, best, scale, position,
    candidates, candidate_ids, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CANDIDATES: tl.constexpr,
    ROOM: tl.constexpr, MAX_EDITS: tl.constexpr,
):  # fmt: skip
    top_k, top_p, min_p = tl.load(state + 6), _float(state, 1), _float(state, 2)
    values_at, ids_at = candidates + row * CANDIDATES, candidate_ids + row * CANDIDATES
    reach, distance = _reach(state), _first_distance(state)
    # First what the chunks found, each within a distance of its own best: that holds all within it of the row's best.
    chunk = tl.arange(0, CHUNKS)
    at = found + (row * chunks + chunk) * 8
    peaks = tl.load(at, mask=chunk < chunks, other=float("-inf")) * scale
    near = peaks >= best - distance
    n_near = tl.load(at + 6, mask=near, other=0.0).to(tl.int32, bitcast=True)
    alive = peaks > float("-inf")
    sums = tl.where(alive, tl.load(at + 7, mask=alive, other=0.0) * tl.exp(peaks - best), 0.0)
    total = tl.sum(sums, 0)
    c = tl.arange(0, CANDIDATES)
    mine = found + (row * chunks + c // ROOM) * 8
    here = (c // ROOM < chunks) & (c < CHUNKS * ROOM)
    n_mine = tl.load(mine + 6, mask=here, other=0.0).to(tl.int32, bitcast=True)
    real = here & (c % ROOM < n_mine) & (tl.load(mine, mask=here, other=float("-inf")) * scale >= best - distance)
    values = tl.load(values_at + c, mask=real, other=float("-inf"))
    real = real & (values >= best - distance)
    n = tl.sum(real.to(tl.int32), 0)
    weight = tl.sum(tl.where(real, tl.exp(values - best), 0.0), 0)
    fits = tl.max(n_near, 0) <= ROOM
    enough = (distance >= reach) | ((top_k > 0) & (n >= top_k)) | ((top_k == 0) & (weight > top_p * total * 1.0001))
    found_all = fits & enough
    low, high, tries = 0.0, reach, 0
    low = tl.where(fits & ~enough, distance, low)
    listed = 0
    mass = total.to(tl.float64)
    # Else passes over the row, until a distance holds enough and not too many.
    while (tries < 8) & (~found_all) & (listed == 0):
        distance = tl.where((low > 0) | (high < reach), 0.5 * (low + high), tl.minimum(4.0, reach))
        distance = tl.where((low > 0) & (high >= reach), tl.minimum(2 * low, reach), distance)
        n, weighed, whole = _gather(
            logits, row, state, slot, edit_ids, edit_values, masks, counts, words, vocab, best, scale, distance,
            values_at, ids_at, CHUNK, CANDIDATES, MAX_EDITS,
        )  # fmt: skip
        good = (distance >= reach) | ((top_k > 0) & (n >= top_k))
        good = good | ((top_k == 0) & (weighed > top_p * whole * 1.0001))
        mass = whole
        low = tl.where(good, low, distance)
        high = tl.where(n > CANDIDATES, distance, high)
        listed = tl.where(good & (n <= CANDIDATES), 1, 0)
        tries = tl.where(good | (n <= CANDIDATES), tries + 1, 8)  # too few even of too many: no list will do
    chosen = 0
    if found_all | (listed == 1):
        tl.debug_barrier()  # a list is read by other threads than wrote it
        if listed == 1:
            real = c < n
            values = tl.load(values_at + c, mask=real, other=float("-inf"))
        ids = tl.load(ids_at + c, mask=real, other=0)
        keep = _cut(values, real, best, mass, top_k, top_p, min_p)
        _, chosen = _best(tl.where(keep, values + _noise(state, position, ids), float("-inf")), ids)
    else:
        chosen = _slow(
            logits, row, state, slot, edit_ids, edit_values, masks, counts, words, vocab, best, scale, position,
            top_k, top_p, min_p, CHUNK, MAX_EDITS,
        )  # fmt: skip
    return chosen


@triton.jit
def _finish(
    logits, slots, positions, states, edit_ids, edit_values, masks, counts, found, tops, candidates, candidate_ids,
    token_ids, logprob, top_ids, top_logprobs, vocab, words, chunks,
    FIELDS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CANDIDATES: tl.constexpr,
    ROOM: tl.constexpr, MAX_EDITS: tl.constexpr, MAX_TOP: tl.constexpr, TOPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot >= 0:
        state = states + slot * FIELDS
        c = tl.arange(0, CHUNKS)
        at = found + (row * chunks + c) * 8
        tops_of = tl.load(at, mask=c < chunks, other=float("-inf"))
        best, _ = _best(tops_of, c)
        bad = tl.sum((tops_of != tops_of).to(tl.int32), 0) > 0
        ids = tl.load(at + 1, mask=c < chunks, other=0.0).to(tl.int32, bitcast=True)
        temperature = _float(state, 0)
        chosen = tl.min(tl.where(tops_of == best, ids, 2147483647), 0)
        if bad | (best == float("inf")) | (best == float("-inf")):
            chosen = -1
        elif temperature > 0:
            if _has_filter(state):
                scale = tl.math.div_rn(1.0, temperature)
                chosen = _filtered(
                    logits, row, state, slot, edit_ids, edit_values, masks, counts, found, words, vocab, chunks,
                    best * scale, scale, tl.load(positions + row), candidates, candidate_ids,
                    CHUNK, CHUNKS, CANDIDATES, ROOM, MAX_EDITS,
                )  # fmt: skip
            else:
                drawn = tl.load(at + 2, mask=c < chunks, other=float("-inf"))
                drawn_ids = tl.load(at + 3, mask=c < chunks, other=0.0).to(tl.int32, bitcast=True)
                most, _ = _best(drawn, c)
                chosen = tl.min(tl.where(drawn == most, drawn_ids, 2147483647), 0)
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


def draw(logits: Tensor, table: SamplerTable, slots: Tensor, positions: Tensor, out: Drawn) -> None:
    """One token per row. logits: [rows, vocab], any float type, left as they are; row r is drawn as slot slots[r] says.

    slots: int32 [rows], -1 for padding; positions: [rows], the index of the token being chosen in its sequence.
    """
    rows, vocab = logits.shape
    assert vocab == table.vocab
    assert rows <= table.max_rows
    if not rows:
        return
    shared = (logits, slots, positions, table.state, table.edit_ids, table.edit_values, table.masks, table.counts)
    scratch = (table.found, table.tops, table.candidates, table.candidate_ids)
    words, chunks = table.masks.shape[1], table.chunks
    wide = power_of_two(chunks)
    fixed = dict(
        FIELDS=table.state.shape[1], CHUNK=CHUNK, CANDIDATES=CANDIDATES, ROOM=CANDIDATES // wide, MAX_EDITS=MAX_EDITS,
        MAX_TOP=MAX_TOP,
    )  # fmt: skip
    _scan[(rows, chunks)](*shared, *scratch, vocab, words, **fixed, **options(False, num_warps=16, maxnreg=64))
    outputs = (out.token_ids, out.logprob, out.top_ids, out.top_logprobs)
    _finish[(rows,)](
        *shared, *scratch, *outputs, vocab, words, chunks, CHUNKS=wide, TOPS=power_of_two(chunks * MAX_TOP),
        **fixed, **options(False, num_warps=8),
    )  # fmt: skip
