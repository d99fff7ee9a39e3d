// Matrix products of quantised weights with activations quantised on the fly to 8 bits.
//
// Weights are affine in groups of 32 columns: w = scale * code + offset. Sixteen rows make a panel; a panel is a run of
// groups, each [codes | 16 half scales | 16 half offsets]:
//
//   8-bit codes: 8 vectors of 64 bytes; vector s holds columns 4s .. 4s + 3 of each of the 16 rows
//   4-bit codes: 4 vectors of 64 bytes; the low nibbles of vector j are step 2j, the high nibbles step 2j + 1
//
// so one stream of memory feeds the dot product instructions as they want it. Every (token, row) sees the same sequence
// of operations whatever else is in the batch: integer sums are exact and groups are added in order.
#pragma once
#include "vec.h"

#define CODES4 (GROUP * LANES / 2)
#define CODES8 (GROUP * LANES)
#define SCALES (4 * LANES) // bytes of scales and offsets
#define GROUP_BYTES(bits) (((bits) == 4 ? CODES4 : CODES8) + SCALES)

#if defined(__AVX512VNNI__)
#define MAX_TILE 8
#elif defined(__ARM_FEATURE_DOTPROD)
#define MAX_TILE 4
#else
#define MAX_TILE 4
#endif

// Signed products want signed codes: there, 8-bit codes are stored less 128 and offsets grow by 128 scales.
#if defined(__ARM_NEON)
#define CODE8_SHIFT 128
#else
#define CODE8_SHIFT 0
#endif

typedef struct { // activations of `tokens` rows, quantised per group of 32
    int8_t *codes;  // [tokens, cols]
    float *scale;   // [tokens, cols / 32]
    float *sum;     // [tokens, cols / 32]: scale * sum of the group's codes
    int64_t cols;
} quantised;

INLINE void quantise_row(const float *x, quantised q, int64_t token) {
    int64_t groups = q.cols / GROUP;
    int8_t *codes = q.codes + token * q.cols;
    for (int64_t g = 0; g < groups; g++, x += GROUP, codes += GROUP) {
        v16 a = load16(x), b = load16(x + 16);
        v16 magnitude = max16(abs16(a), abs16(b));
        float scale = hmax16(magnitude) / 127.f;
        float inverse = scale > 0.f ? 1.f / scale : 0.f;
        v16 magic = splat(12582912.f);
        v16i qa = __builtin_convertvector((a * inverse + magic) - magic, v16i);
        v16i qb = __builtin_convertvector((b * inverse + magic) - magic, v16i);
        v16i total = qa + qb;
        int32_t sum = 0;
        for (int i = 0; i < LANES; i++) {
            codes[i] = (int8_t)qa[i];
            codes[16 + i] = (int8_t)qb[i];
            sum += total[i];
        }
        q.scale[token * groups + g] = scale;
        q.sum[token * groups + g] = scale * (float)sum;
    }
}

// out[t] = the 16 rows of one panel times token t, for `n` tokens of `act` beginning at `token`.
// BITS and n are constants at every call: the loops over them unroll into registers.
#if defined(__AVX512VNNI__)
INLINE void tile(const int BITS, const int n, const uint8_t *panel, quantised act, int64_t token, v16 *out) {
    int64_t groups = act.cols / GROUP;
    const int8_t *codes = act.codes + token * act.cols;
    const float *scale = act.scale + token * groups, *sum = act.sum + token * groups;
    const __m512i nibble = _mm512_set1_epi8(15);
    __m512 total[MAX_TILE];
    for (int t = 0; t < n; t++) total[t] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; g++, panel += GROUP_BYTES(BITS)) {
        __m512i dot[MAX_TILE];
        for (int t = 0; t < n; t++) dot[t] = _mm512_setzero_si512();
#define STEP(weights, s)                                                                                               \
    for (int t = 0; t < n; t++) {                                                                                      \
        int32_t four;                                                                                                  \
        memcpy(&four, codes + t * act.cols + g * GROUP + 4 * (s), 4);                                                  \
        dot[t] = _mm512_dpbusd_epi32(dot[t], weights, _mm512_set1_epi32(four));                                        \
    }
        if (BITS == 4) {
            for (int j = 0; j < 4; j++) {
                __m512i packed = _mm512_loadu_si512(panel + 64 * j);
                __m512i low = _mm512_and_si512(packed, nibble);
                __m512i high = _mm512_and_si512(_mm512_srli_epi16(packed, 4), nibble);
                STEP(low, 2 * j)
                STEP(high, 2 * j + 1)
            }
        } else {
            for (int s = 0; s < 8; s++) {
                __m512i weights = _mm512_loadu_si512(panel + 64 * s);
                STEP(weights, s)
            }
        }
#undef STEP
        const uint16_t *tail = (const uint16_t *)(panel + (BITS == 4 ? CODES4 : CODES8));
        __m512 row_scale = (__m512)load_half16(tail), row_offset = (__m512)load_half16(tail + LANES);
        for (int t = 0; t < n; t++) {
            __m512 s = _mm512_mul_ps(row_scale, _mm512_set1_ps(scale[t * groups + g]));
            total[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[t]), s, total[t]);
            total[t] = _mm512_fmadd_ps(row_offset, _mm512_set1_ps(sum[t * groups + g]), total[t]);
        }
    }
    for (int t = 0; t < n; t++) out[t] = (v16)total[t];
}

#elif defined(__ARM_FEATURE_DOTPROD)
INLINE void half_tile(const int BITS, const int n, const uint8_t *panel, quantised act, int64_t token, int half,
                      v16 *out) { // rows 8 * half .. 8 * half + 7
    int64_t groups = act.cols / GROUP;
    const int8_t *codes = act.codes + token * act.cols;
    const float *scale = act.scale + token * groups, *sum = act.sum + token * groups;
    float32x4_t total[MAX_TILE][2];
    for (int t = 0; t < n; t++) total[t][0] = total[t][1] = vdupq_n_f32(0);
    for (int64_t g = 0; g < groups; g++, panel += GROUP_BYTES(BITS)) {
        int32x4_t dot[MAX_TILE][2];
        for (int t = 0; t < n; t++) dot[t][0] = dot[t][1] = vdupq_n_s32(0);
        for (int part = 0; part < 2; part++) { // 16 columns: four steps
            int8x16_t a[MAX_TILE];
            for (int t = 0; t < n; t++) a[t] = vld1q_s8(codes + t * act.cols + g * GROUP + 16 * part);
#define STEP(w0, w1, lane)                                                                                             \
    for (int t = 0; t < n; t++) {                                                                                      \
        dot[t][0] = vdotq_laneq_s32(dot[t][0], w0, a[t], lane);                                                        \
        dot[t][1] = vdotq_laneq_s32(dot[t][1], w1, a[t], lane);                                                        \
    }
            if (BITS == 4) {
                const uint8_t *p = panel + 128 * part + 32 * half;
                uint8x16_t b0 = vld1q_u8(p), b1 = vld1q_u8(p + 16);
                uint8x16_t c0 = vld1q_u8(p + 64), c1 = vld1q_u8(p + 80);
                uint8x16_t nibble = vdupq_n_u8(15);
                STEP(vreinterpretq_s8_u8(vandq_u8(b0, nibble)), vreinterpretq_s8_u8(vandq_u8(b1, nibble)), 0)
                STEP(vreinterpretq_s8_u8(vshrq_n_u8(b0, 4)), vreinterpretq_s8_u8(vshrq_n_u8(b1, 4)), 1)
                STEP(vreinterpretq_s8_u8(vandq_u8(c0, nibble)), vreinterpretq_s8_u8(vandq_u8(c1, nibble)), 2)
                STEP(vreinterpretq_s8_u8(vshrq_n_u8(c0, 4)), vreinterpretq_s8_u8(vshrq_n_u8(c1, 4)), 3)
            } else {
                const int8_t *p = (const int8_t *)panel + 256 * part + 32 * half;
                STEP(vld1q_s8(p), vld1q_s8(p + 16), 0)
                STEP(vld1q_s8(p + 64), vld1q_s8(p + 80), 1)
                STEP(vld1q_s8(p + 128), vld1q_s8(p + 144), 2)
                STEP(vld1q_s8(p + 192), vld1q_s8(p + 208), 3)
            }
#undef STEP
        }
        const uint16_t *tail = (const uint16_t *)(panel + (BITS == 4 ? CODES4 : CODES8)) + 8 * half;
        for (int i = 0; i < 2; i++) {
            float32x4_t row_scale = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(tail + 4 * i)));
            float32x4_t row_offset = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(tail + LANES + 4 * i)));
            for (int t = 0; t < n; t++) {
                float32x4_t s = vmulq_n_f32(row_scale, scale[t * groups + g]);
                total[t][i] = vfmaq_f32(total[t][i], vcvtq_f32_s32(dot[t][i]), s);
                total[t][i] = vfmaq_n_f32(total[t][i], row_offset, sum[t * groups + g]);
            }
        }
    }
    for (int t = 0; t < n; t++) memcpy((float *)&out[t] + 8 * half, total[t], 32);
}

INLINE void tile(const int BITS, const int n, const uint8_t *panel, quantised act, int64_t token, v16 *out) {
    half_tile(BITS, n, panel, act, token, 0, out);
    half_tile(BITS, n, panel, act, token, 1, out);
}

#else
#if defined(__AVX2__)
typedef union { __m256i part[2]; v16i all; } v16i_parts;

INLINE __m256i dot_bytes(__m256i total, __m256i weights, __m256i act) { // unsigned weights below 16: no saturation
    __m256i pairs = _mm256_maddubs_epi16(weights, act);
    return _mm256_add_epi32(total, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#endif

INLINE v16i step_dot(const int BITS, v16i total, const uint8_t *weights, int high, const int8_t *act) {
#if defined(__AVX2__)
    int32_t four;
    memcpy(&four, act, 4);
    __m256i a = _mm256_set1_epi32(four), nibble = _mm256_set1_epi8(15);
    v16i_parts sum = {.all = total};
    for (int i = 0; i < 2; i++) {
        __m256i w = _mm256_loadu_si256((const __m256i *)(weights + 32 * i));
        __m256i upper = _mm256_and_si256(_mm256_srli_epi16(w, 4), nibble);
        if (BITS == 4) {
            sum.part[i] = dot_bytes(sum.part[i], high ? upper : _mm256_and_si256(w, nibble), a);
        } else { // halves of a byte, so that the 16-bit pairs cannot saturate
            __m256i hi = dot_bytes(_mm256_setzero_si256(), upper, a);
            sum.part[i] = dot_bytes(sum.part[i], _mm256_and_si256(w, nibble), a);
            sum.part[i] = _mm256_add_epi32(sum.part[i], _mm256_slli_epi32(hi, 4));
        }
    }
    return sum.all;
#else
    for (int r = 0; r < LANES; r++)
        for (int k = 0; k < 4; k++) {
            uint8_t byte = weights[4 * r + k];
            int32_t w = BITS == 4 ? (high ? byte >> 4 : byte & 15) : CODE8_SHIFT ? (int8_t)byte : byte;
            total[r] += w * act[k];
        }
    return total;
#endif
}

INLINE void tile(const int BITS, const int n, const uint8_t *panel, quantised act, int64_t token, v16 *out) {
    int64_t groups = act.cols / GROUP;
    for (int t = 0; t < n; t++) out[t] = (v16){0};
    for (int64_t g = 0; g < groups; g++, panel += GROUP_BYTES(BITS)) {
        const uint16_t *tail = (const uint16_t *)(panel + (BITS == 4 ? CODES4 : CODES8));
        v16 row_scale = load_half16(tail), row_offset = load_half16(tail + LANES);
        for (int t = 0; t < n; t++) {
            const int8_t *codes = act.codes + (token + t) * act.cols + g * GROUP;
            v16i dot = {0};
            for (int s = 0; s < 8; s++)
                dot = step_dot(BITS, dot, panel + 64 * (BITS == 4 ? s / 2 : s), s & 1, codes + 4 * s);
            int64_t at = (token + t) * groups + g;
            out[t] += __builtin_convertvector(dot, v16) * (row_scale * act.scale[at]);
            out[t] += row_offset * act.sum[at];
        }
    }
}
#endif

// The same for float weights: a panel is [cols][16 rows].
INLINE void tile_f32(const int n, const float *panel, const float *x, int64_t cols, v16 *out) {
    v16 total[MAX_TILE];
    for (int t = 0; t < n; t++) total[t] = (v16){0};
    for (int64_t k = 0; k < cols; k++) {
        v16 w = load16(panel + k * LANES);
        for (int t = 0; t < n; t++) total[t] += w * x[t * cols + k];
    }
    for (int t = 0; t < n; t++) out[t] = total[t];
}

#if MAX_TILE == 8
#define TILES(CALL) case 1: CALL(1); case 2: CALL(2); case 3: CALL(3); case 4: CALL(4); case 5: CALL(5); case 6: CALL(6); \
    case 7: CALL(7); case 8: CALL(8);
#else
#define TILES(CALL) case 1: CALL(1); case 2: CALL(2); case 3: CALL(3); case 4: CALL(4);
#endif

static __attribute__((noinline)) void tile_4bit(int n, const uint8_t *panel, quantised act, int64_t token, v16 *out) {
    switch (n) {
#define CALL(N) tile(4, N, panel, act, token, out); break
        TILES(CALL)
#undef CALL
    }
}

static __attribute__((noinline)) void tile_8bit(int n, const uint8_t *panel, quantised act, int64_t token, v16 *out) {
    switch (n) {
#define CALL(N) tile(8, N, panel, act, token, out); break
        TILES(CALL)
#undef CALL
    }
}

static __attribute__((noinline)) void tile_float(int n, const float *panel, const float *x, int64_t cols, v16 *out) {
    switch (n) {
#define CALL(N) tile_f32(N, panel, x, cols, out); break
        TILES(CALL)
#undef CALL
    }
}
