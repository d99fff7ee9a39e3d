// Paged attention over blocks of 16 tokens, preceded by QK norm, RoPE and the KV cache write.
//
// A block holds, per layer, K as [kv_heads, head_dim, 16] and V as [kv_heads, 16, head_dim] in half precision: with K
// transposed inside the block, sixteen scores are one vector and nothing is shuffled. A query visits its blocks in order
// from the first visible one, so its result does not depend on the prompt's chunk boundaries.
#pragma once
#include "vec.h"

#define BLOCK 16
#define QUERY_TILE 16 // tokens of a sequence that share one conversion of a block to floats
#define MAX_HEAD_DIM 256
#define MAX_GROUP 16 // query heads per kv head
#define QUERIES (QUERY_TILE * MAX_GROUP)
#define SPAN 4 // blocks per update of the online softmax
#define TILE_ROWS 4 // queries computed together, in registers
#if defined(__AVX512F__)
#define CHAINS 4 // partial sums of a score: enough independent additions to hide their latency
#define COLUMNS 4 // registers of output columns held for each query
#elif defined(__AVX2__)
#define CHAINS 1
#define COLUMNS 2
#else
#define CHAINS 1
#define COLUMNS 4
#endif

typedef struct {
    int64_t tokens, rows;
    const int32_t *positions;    // [tokens]
    const int32_t *query_starts; // [rows + 1]
    const int32_t *context_lens; // [rows], including the new tokens
    const int32_t *last_visible; // [tokens], up to where each sees, at least itself, ascending in a row; null: itself
} step;

typedef struct {
    uint16_t *pool;             // the KV group's blocks
    int64_t block_stride;       // halves from block to block
    const int32_t *block_table; // [rows, table_stride]
    int64_t table_stride;
    const float *cosine, *sine; // [tokens, head_dim / 2]
} cache;

typedef struct {
    int32_t heads, kv_heads, head_dim;
    int32_t window; // 0: none
    int64_t layer_offset; // halves from a block's start to this layer
    float scale, eps;
    const float *q_norm, *k_norm; // or null
} attention;

typedef float span_row[SPAN * BLOCK]; // a query's scores, then softmax weights

INLINE void rotate(float *x, const float *cosine, const float *sine, int64_t half) {
    int64_t i = 0;
    for (; i + WIDTH <= half; i += WIDTH) {
        vec a = load(x + i), b = load(x + half + i), c = load(cosine + i), s = load(sine + i);
        store(x + i, a * c - b * s);
        store(x + half + i, b * c + a * s);
    }
    for (; i < half; i++) {
        float a = x[i], b = x[half + i];
        x[i] = a * cosine[i] - b * sine[i];
        x[half + i] = b * cosine[i] + a * sine[i];
    }
}

static void prepare_token(const attention *at, const step *st, const cache *kv, float *qkv, int64_t row, int64_t t) {
    const int64_t dim = at->head_dim, half = dim / 2;
    const float *cosine = kv->cosine + t * half, *sine = kv->sine + t * half;
    float *q = qkv + t * (at->heads + 2 * at->kv_heads) * dim;
    float *k = q + at->heads * dim, *v = k + at->kv_heads * dim;
    for (int h = 0; h < at->heads; h++, q += dim) {
        if (at->q_norm) rms_norm(q, at->q_norm, dim, at->eps);
        rotate(q, cosine, sine, half);
        for (int64_t i = 0; i < dim; i += WIDTH) store(q + i, load(q + i) * at->scale);
    }
    const int64_t slot = st->positions[t] % BLOCK;
    const int64_t block = kv->block_table[row * kv->table_stride + st->positions[t] / BLOCK];
    uint16_t *to = kv->pool + block * kv->block_stride + at->layer_offset;
    for (int h = 0; h < at->kv_heads; h++, k += dim, to += dim * BLOCK) {
        if (at->k_norm) rms_norm(k, at->k_norm, dim, at->eps);
        rotate(k, cosine, sine, half);
        for (int64_t i = 0; i < dim; i++) to[i * BLOCK + slot] = float_to_half(k[i]);
    }
    for (int h = 0; h < at->kv_heads; h++, v += dim, to += dim * BLOCK)
        for (int64_t i = 0; i < dim; i++) to[slot * dim + i] = float_to_half(v[i]);
}

INLINE void scores(const int n, const float *const *q, const float *keys, int64_t dim, span_row *out, int64_t at) {
    vec total[TILE_ROWS][CHAINS][PARTS];
    for (int i = 0; i < n; i++)
        for (int c = 0; c < CHAINS; c++)
            for (int p = 0; p < PARTS; p++) total[i][c][p] = (vec){0};
    for (int64_t d = 0; d < dim; d += CHAINS)
        for (int c = 0; c < CHAINS; c++)
            for (int p = 0; p < PARTS; p++) {
                vec k = load(keys + (d + c) * BLOCK + p * WIDTH);
                for (int i = 0; i < n; i++) total[i][c][p] += k * q[i][d + c];
            }
    for (int i = 0; i < n; i++)
        for (int p = 0; p < PARTS; p++) {
            for (int c = 1; c < CHAINS; c++) total[i][0][p] += total[i][c][p];
            store(out[i] + at + p * WIDTH, total[i][0][p]);
        }
}

INLINE void accumulate_columns(const int n, const int columns, span_row *p, const float *rescale, const float *values,
                          int64_t length, int64_t dim, float (*out)[MAX_HEAD_DIM], int64_t from) {
    vec total[TILE_ROWS][COLUMNS];
    for (int i = 0; i < n; i++)
        for (int c = 0; c < columns; c++) total[i][c] = load(out[i] + from + c * WIDTH) * rescale[i];
#pragma GCC unroll 1 // fully unrolled, the compiler hoists loads until it spills
    for (int64_t t = 0; t < length; t++)
        for (int c = 0; c < columns; c++) {
            vec v = load(values + t * dim + from + c * WIDTH);
            for (int i = 0; i < n; i++) total[i][c] += v * p[i][t];
        }
    for (int i = 0; i < n; i++)
        for (int c = 0; c < columns; c++) store(out[i] + from + c * WIDTH, total[i][c]);
}

// out = rescale * out + p V for n queries and `length` tokens.
INLINE void accumulate(const int n, span_row *p, const float *rescale, const float *values, int64_t length, int64_t dim,
                  float (*out)[MAX_HEAD_DIM]) {
    int64_t at = 0;
    for (; at + COLUMNS * WIDTH <= dim; at += COLUMNS * WIDTH)
        accumulate_columns(n, COLUMNS, p, rescale, values, length, dim, out, at);
    for (; at < dim; at += WIDTH) accumulate_columns(n, 1, p, rescale, values, length, dim, out, at);
}

// Online softmax over one span: scores in, weights out; returns the factor by which to rescale earlier sums.
INLINE float softmax_span(float *p, int64_t position, int64_t length, int32_t from, int32_t to, float *best,
                          float *total) {
    veci lane;
    for (int i = 0; i < WIDTH; i++) lane[i] = i;
    vec top = splat(-INFINITY), added = {0};
    for (int64_t i = 0; i < length; i += WIDTH) {
        vec s = load(p + i);
        if (position < from || position + length > to + 1) { // only the first and the last span of a query
            veci where = lane + (int32_t)(position + i);
            s = vec_select((where <= to) & (where >= from), s, splat(-INFINITY));
            store(p + i, s);
        }
        top = vec_max(top, s);
    }
    float peak = reduce_max(top);
    peak = peak > *best ? peak : *best;
    float rescale = peak == *best ? 1.f : expf(*best - peak);
    for (int64_t i = 0; i < length; i += WIDTH) {
        vec s = vec_exp(load(p + i) - peak);
        added += s;
        store(p + i, s);
    }
    *best = peak;
    *total = *total * rescale + sum(added);
    return rescale;
}

// Converts one KV block to floats, and prefetches the same block of the next span.
static void load_block(const attention *at, const cache *kv, const int32_t *table, int64_t j, int64_t last, int kv_head,
                       float *keys, float *values) {
    const int64_t size = at->head_dim * BLOCK, head = at->layer_offset + kv_head * size;
    const uint16_t *k = kv->pool + table[j] * kv->block_stride + head;
    const uint16_t *soon = kv->pool + table[j + SPAN <= last ? j + SPAN : j] * kv->block_stride + head;
    const int64_t v = at->kv_heads * size; // from K to V
    for (int64_t i = 0; i < size; i += 2 * LANES) { // a cache line of each
        __builtin_prefetch(soon + i);
        __builtin_prefetch(soon + v + i);
        for (int64_t c = i; c < i + 2 * LANES; c += WIDTH) {
            store(keys + c, load_half(k + c));
            store(values + c, load_half(k + v + c));
        }
    }
}

#define DISPATCH_ROWS(n, CALL)                                                                                               \
    switch (n) {                                                                                                       \
    case 1: CALL(1); break;                                                                                            \
    case 2: CALL(2); break;                                                                                            \
    case 3: CALL(3); break;                                                                                            \
    default: CALL(4);                                                                                                  \
    }

// Attention of one KV head and all its query heads, for up to QUERY_TILE consecutive tokens of one sequence.
static void attend_tile(const attention *at, const step *st, const cache *kv, const float *qkv, float *out,
                        int64_t row, int64_t first, int64_t last, int kv_head) {
    const int64_t dim = at->head_dim, stride = (at->heads + 2 * at->kv_heads) * dim;
    const int group = at->heads / at->kv_heads, n = (int)(last - first) * group;
    if (n <= 0) return;
    const float *q[QUERIES];
    int32_t first_visible[QUERIES], last_visible[QUERIES]; // first and last visible position
    float best[QUERIES], total[QUERIES], rescale[QUERIES];
    static _Thread_local float sums[QUERIES][MAX_HEAD_DIM] __attribute__((aligned(64)));
    static _Thread_local float keys[SPAN * BLOCK * MAX_HEAD_DIM] __attribute__((aligned(64)));
    static _Thread_local float values[SPAN * BLOCK * MAX_HEAD_DIM] __attribute__((aligned(64)));
    static _Thread_local span_row p[QUERIES] __attribute__((aligned(64)));
    for (int i = 0; i < n; i++) {
        int64_t token = first + i / group, position = st->positions[token];
        q[i] = qkv + token * stride + (kv_head * group + i % group) * dim;
        last_visible[i] = st->last_visible ? st->last_visible[token] : (int32_t)position;
        first_visible[i] = at->window && position >= at->window ? (int32_t)position - at->window + 1 : 0;
        best[i] = -1e30f;
        total[i] = 0.f;
        memset(sums[i], 0, dim * sizeof(float));
    }
    const int32_t *table = kv->block_table + row * kv->table_stride;
    const int64_t last_block = last_visible[n - 1] / BLOCK;
    for (int64_t j = first_visible[0] / BLOCK, end; j <= last_block; j = end) {
        end = (j / SPAN + 1) * SPAN; // spans begin at fixed positions, independent of the query
        if (end > last_block + 1) end = last_block + 1;
        const int64_t length = (end - j) * BLOCK;
        for (int64_t b = 0; b < end - j; b++) {
            float *k = keys + b * dim * BLOCK;
            load_block(at, kv, table, j + b, last_block, kv_head, k, values + b * dim * BLOCK);
#define SCORES(N) scores(N, q + i, k, dim, p + i, b * BLOCK)
            for (int i = 0; i < n; i += TILE_ROWS) DISPATCH_ROWS(n - i, SCORES)
        }
        // Past the last token the block may hold another sequence's data: a weight of zero does not cancel a NaN.
        const int64_t seen = last_visible[n - 1] + 1 - j * BLOCK;
        if (seen < length) memset(values + seen * dim, 0, (length - seen) * dim * sizeof(float));
        for (int i = 0; i < n; i++)
            rescale[i] = softmax_span(p[i], j * BLOCK, length, first_visible[i], last_visible[i], &best[i], &total[i]);
#define ACCUMULATE(N) accumulate(N, p + i, rescale + i, values, length, dim, sums + i)
        for (int i = 0; i < n; i += TILE_ROWS) DISPATCH_ROWS(n - i, ACCUMULATE)
    }
    for (int i = 0; i < n; i++) {
        float *to = out + (first + i / group) * at->heads * dim + (kv_head * group + i % group) * dim;
        for (int64_t d = 0; d < dim; d += WIDTH) store(to + d, load(sums[i] + d) / total[i]);
    }
}
