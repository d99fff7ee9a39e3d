// Sampling: Gumbel-max with noise keyed by (seed, position, token id), so that a sample never depends on the batch.
#pragma once
#include "vec.h"
#include <stdlib.h>

#define MAX_NOISE 17.4f // upper bound of the Gumbel noise
#define NEGLIGIBLE 30.f // with a filter on, tokens at most e^-30 times as likely as the best are dropped

typedef struct {
    float temperature, top_p, min_p;
    int32_t top_k;
    uint64_t seed, position;
    const uint32_t *allowed; // grammar mask: bit i % 32 of word i / 32 allows token i; NULL: all
    int64_t words;
} choice;

typedef struct {
    float logit;
    int32_t id;
} candidate;

INLINE uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

INLINE float noise(uint64_t stream, int64_t id) {
    uint64_t bits = mix(stream ^ (uint64_t)id * 0xD1B54A32D192ED03u);
    float uniform = ((float)(bits >> 40) + 0.5f) * 0x1p-24f;
    return -logf(-logf(fminf(uniform, 0x1.fffffep-1f))); // the largest would round to 1: infinite noise
}

static int descending(const void *a, const void *b) {
    const candidate *x = a, *y = b;
    if (x->logit != y->logit) return x->logit < y->logit ? 1 : -1;
    return x->id < y->id ? -1 : 1;
}

typedef struct {
    double mass; // sum of e^(logit - best)
    int64_t count;
} mass_count;

static mass_count above(const float *logits, int64_t vocab, float inverse, float top, float depth) {
    mass_count found = {0, 0};
    int64_t i = 0;
    for (; i + WIDTH <= vocab; i += WIDTH) {
        vec below = load(logits + i) * inverse - top;
        veci kept = below >= splat(-depth);
        found.mass += sum(vec_select(kept, vec_exp(below), (vec){0}));
        found.count += (int64_t)sum(vec_select(kept, splat(1.f), (vec){0}));
    }
    for (; i < vocab; i++)
        if (logits[i] * inverse - top >= -depth) found.mass += expf(logits[i] * inverse - top), found.count++;
    return found;
}

// How far below the best logit tokens must be considered: as little as the filters allow, since these get sorted.
static float needed_depth(const float *logits, int64_t vocab, float inverse, float top, const choice *c, double *all) {
    *all = c->top_k ? 0 : above(logits, vocab, inverse, top, NEGLIGIBLE).mass;
    float limit = NEGLIGIBLE;
    if (c->min_p > 0.f && c->top_p >= 1.f) limit = fminf(-logf(c->min_p) + 1e-3f, NEGLIGIBLE);
    for (float depth = 2.f; depth < limit; depth *= 2.f) {
        mass_count found = above(logits, vocab, inverse, top, depth);
        if (c->top_k ? found.count >= c->top_k : found.mass >= c->top_p * *all) return depth;
    }
    return limit;
}

// Length of the prefix of `list` (sorted) that top-k, top-p and min-p keep; `all` is the mass that top-p applies to.
static int64_t filter(const candidate *list, int64_t n, const choice *c, double all) {
    if (c->top_k > 0) {
        if (n > c->top_k) n = c->top_k;
        for (int64_t i = 0; i < n; i++) all += exp((double)list[i].logit - list[0].logit);
    }
    double kept = 0;
    for (int64_t i = 0; i < n; i++) {
        double p = exp((double)list[i].logit - list[0].logit);
        if (i && (kept >= c->top_p * all || p < c->min_p)) return i;
        kept += p;
    }
    return n;
}

// The index of the largest logit (the first of equals), or -1 if a logit is NaN or the largest infinite.
static int64_t largest(const float *logits, int64_t vocab) {
    vec best = splat(-INFINITY);
    veci has_nan = {0};
    int64_t i = 0;
    for (; i + WIDTH <= vocab; i += WIDTH) {
        vec x = load(logits + i);
        has_nan |= x != x;
        best = vec_max(best, x);
    }
    float top = reduce_max(best);
    for (int j = 0; j < WIDTH; j++)
        if (has_nan[j]) return -1;
    for (; i < vocab; i++) {
        if (logits[i] != logits[i]) return -1;
        if (logits[i] > top) top = logits[i];
    }
    if (!isfinite(top)) return -1;
    for (i = 0; logits[i] != top; i++) continue;
    return i;
}

// Sets every token whose bit is not set, or which is beyond the mask, to -inf.
static void apply_mask(float *logits, int64_t vocab, const uint32_t *allowed, int64_t words) {
    for (int64_t w = 0; w * 32 < vocab; w++) {
        uint32_t bits = w < words ? allowed[w] : 0;
        if (bits == ~(uint32_t)0) continue;
        int64_t end = vocab - w * 32 < 32 ? vocab - w * 32 : 32;
        for (int64_t i = 0; i < end; i++)
            if (!(bits >> i & 1)) logits[w * 32 + i] = -INFINITY;
    }
}

// The sampled id, or -1 if the logits are invalid.
static int64_t choose(float *logits, int64_t vocab, const choice *c) {
    if (c->allowed) apply_mask(logits, vocab, c->allowed, c->words);
    int64_t chosen = largest(logits, vocab);
    if (chosen < 0 || c->temperature == 0.f) return chosen;
    const float inverse = 1.f / c->temperature, top = logits[chosen] * inverse;
    const uint64_t stream = mix(c->seed + 0x9E3779B97F4A7C15u * (c->position + 1));
    float winner = top + noise(stream, chosen);
    if (c->top_k == 0 && c->top_p >= 1.f && c->min_p == 0.f) {
        for (int64_t i = 0; i < vocab; i++) {
            float scaled = logits[i] * inverse;
            if (scaled + MAX_NOISE <= winner) continue;
            scaled += noise(stream, i);
            if (scaled > winner) winner = scaled, chosen = i;
        }
        return chosen;
    }
    double all;
    const float depth = needed_depth(logits, vocab, inverse, top, c, &all);
    candidate *list = malloc(vocab * sizeof *list);
    if (!list) return -1;
    int64_t n = 0;
    for (int64_t i = 0; i < vocab; i++)
        if (logits[i] * inverse - top >= -depth) list[n++] = (candidate){logits[i] * inverse, (int32_t)i};
    qsort(list, n, sizeof *list, descending);
    n = filter(list, n, c, all);
    for (int64_t i = 0; i < n; i++) {
        float scaled = list[i].logit + noise(stream, list[i].id);
        if (scaled > winner) winner = scaled, chosen = list[i].id;
    }
    free(list);
    return chosen;
}
