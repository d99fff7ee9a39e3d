// Matrix products of quantized weights with activations quantized on the fly to 8 bits.
//
// Weights are affine in groups of 32 columns: w = scale * code + offset. Sixteen rows form a panel; a panel is a
// sequence of groups, each [codes | 16 half scales | 16 half offsets]:
//
//   8-bit codes: 8 vectors of 64 bytes; vector s holds columns 4s .. 4s + 3 of each of the 16 rows
//   4-bit codes: 4 vectors of 64 bytes; the low nibbles of vector j are step 2j, the high nibbles step 2j + 1
//
// so one sequential stream of memory feeds the dot product instructions in order. Every (token, row) pair gets the same
// sequence of operations whatever the batch: integer sums are exact and groups are added in order.
#pragma once
#include "vec.h"

#define GROUP 32 // weights that share a scale and an offset

#define CODES4 (GROUP * LANES / 2)
#define CODES8 (GROUP * LANES)
#define SCALES (4 * LANES) // bytes of scales and offsets
#define GROUP_BYTES(bits) (((bits) == 4 ? CODES4 : CODES8) + SCALES)

#if defined(__AVX512VNNI__)
#define MAX_TILE 8 // tokens per pass over a panel, limited by the registers
#else
#define MAX_TILE 4
#endif

// Whether the dot product instruction takes the codes as signed bytes; see `code_shift`.
#if defined(__ARM_NEON)
#define SIGNED_CODES 1
#else
#define SIGNED_CODES 0
#endif

INLINE int32_t code8(uint8_t byte) { return SIGNED_CODES ? (int8_t)byte : byte; }

typedef struct { // activations of several tokens, quantized per group of 32
    int8_t *codes;  // [tokens, cols]
    float *scale;   // [tokens, cols / 32]
    float *sum;     // [tokens, cols / 32]: scale * sum of the group's codes
    int64_t cols;
} quantized;

INLINE void quantize_row(const float *x, quantized q, int64_t token) {
    int64_t groups = q.cols / GROUP;
    int8_t *codes = q.codes + token * q.cols;
    for (int64_t g = 0; g < groups; g++, x += GROUP, codes += GROUP) {
        vec magnitude = vec_abs(load(x));
        for (int i = WIDTH; i < GROUP; i += WIDTH) magnitude = vec_max(magnitude, vec_abs(load(x + i)));
        float scale = reduce_max(magnitude) / 127.f;
        float inverse = scale > 0.f ? 1.f / scale : 0.f;
        int32_t rounded[GROUP], total = 0;
        for (int i = 0; i < GROUP; i += WIDTH) {
            veci n = __builtin_convertvector(round_nearest(load(x + i) * inverse), veci);
            memcpy(rounded + i, &n, sizeof n);
        }
        for (int i = 0; i < GROUP; i++) {
            codes[i] = (int8_t)rounded[i];
            total += rounded[i];
        }
        q.scale[token * groups + g] = scale;
        q.sum[token * groups + g] = scale * (float)total;
    }
}

typedef float panel_out[LANES]; // the 16 rows of a panel, for one token

// out[t] = the 16 rows of one panel times token t, for `n` tokens of `act` beginning at `token`.
// BITS and n are constants at every call, so that the loops over them unroll into registers.
#if defined(__AVX512VNNI__)
INLINE void tile(const int BITS, const int n, const uint8_t *panel, quantized act, int64_t token, panel_out *out) {
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
        __m512 row_scale = (__m512)load_half(tail), row_offset = (__m512)load_half(tail + LANES);
        for (int t = 0; t < n; t++) {
            __m512 s = _mm512_mul_ps(row_scale, _mm512_set1_ps(scale[t * groups + g]));
            total[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[t]), s, total[t]);
            total[t] = _mm512_fmadd_ps(row_offset, _mm512_set1_ps(sum[t * groups + g]), total[t]);
        }
    }
    for (int t = 0; t < n; t++) store(out[t], (vec)total[t]);
}

#elif defined(__ARM_FEATURE_DOTPROD)
INLINE void half_tile(const int BITS, const int n, const uint8_t *panel, quantized act, int64_t token, int half,
                      panel_out *out) { // rows 8 * half .. 8 * half + 7
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
    for (int t = 0; t < n; t++) memcpy(out[t] + 8 * half, total[t], 32);
}

INLINE void tile(const int BITS, const int n, const uint8_t *panel, quantized act, int64_t token, panel_out *out) {
    half_tile(BITS, n, panel, act, token, 0, out);
    half_tile(BITS, n, panel, act, token, 1, out);
}

#else
#if defined(__AVX512BW__) || (defined(__AVX2__) && WIDTH == 8)
#define BYTE_DOTS
typedef uint8_t bytes __attribute__((vector_size(4 * WIDTH)));

INLINE veci dot_bytes(veci total, bytes weights, veci act) { // unsigned weights below 16: no saturation
#if WIDTH == 16
    __m512i pairs = _mm512_maddubs_epi16((__m512i)weights, (__m512i)act);
    return total + (veci)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#else
    __m256i pairs = _mm256_maddubs_epi16((__m256i)weights, (__m256i)act);
    return total + (veci)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
}
#endif

INLINE veci step_dot(const int BITS, veci total, const uint8_t *weights, int high, const int8_t *act) {
#if defined(BYTE_DOTS)
    int32_t four;
    bytes w;
    memcpy(&four, act, 4);
    memcpy(&w, weights, sizeof w);
    veci a = (veci){0} + four;
    bytes upper = w >> 4, lower = w & 15;
    if (BITS == 4) return dot_bytes(total, high ? upper : lower, a);
    // by nibbles, so that the 16-bit pairs cannot saturate
    return dot_bytes(total, lower, a) + (dot_bytes((veci){0}, upper, a) << 4);
#else
    for (int r = 0; r < WIDTH; r++)
        for (int k = 0; k < 4; k++) {
            uint8_t byte = weights[4 * r + k];
            int32_t w = BITS == 4 ? (high ? byte >> 4 : byte & 15) : code8(byte);
            total[r] += w * act[k];
        }
    return total;
#endif
}

INLINE void tile(const int BITS, const int n, const uint8_t *panel, quantized act, int64_t token, panel_out *out) {
    int64_t groups = act.cols / GROUP;
    vec total[MAX_TILE][PARTS];
    for (int t = 0; t < n; t++)
        for (int p = 0; p < PARTS; p++) total[t][p] = (vec){0};
    for (int64_t g = 0; g < groups; g++, panel += GROUP_BYTES(BITS)) {
        const uint16_t *tail = (const uint16_t *)(panel + (BITS == 4 ? CODES4 : CODES8));
        for (int t = 0; t < n; t++) {
            const int8_t *codes = act.codes + (token + t) * act.cols + g * GROUP;
            const int64_t at = (token + t) * groups + g;
            for (int p = 0; p < PARTS; p++) {
                veci dot = {0};
                for (int s = 0; s < 8; s++) {
                    const uint8_t *weights = panel + 64 * (BITS == 4 ? s / 2 : s) + 4 * WIDTH * p;
                    dot = step_dot(BITS, dot, weights, s & 1, codes + 4 * s);
                }
                vec scale = load_half(tail + p * WIDTH) * act.scale[at];
                total[t][p] += __builtin_convertvector(dot, vec) * scale;
                total[t][p] += load_half(tail + LANES + p * WIDTH) * act.sum[at];
            }
        }
    }
    for (int t = 0; t < n; t++) memcpy(out[t], total[t], sizeof out[t]);
}
#endif

// The same for float weights: a panel is [cols][16 rows].
INLINE void tile_f32(const int n, const float *panel, const float *x, int64_t cols, panel_out *out) {
    vec total[MAX_TILE][PARTS];
    for (int t = 0; t < n; t++)
        for (int p = 0; p < PARTS; p++) total[t][p] = (vec){0};
    for (int64_t k = 0; k < cols; k++)
        for (int p = 0; p < PARTS; p++) {
            vec w = load(panel + k * LANES + p * WIDTH);
            for (int t = 0; t < n; t++) total[t][p] += w * x[t * cols + k];
        }
    for (int t = 0; t < n; t++) memcpy(out[t], total[t], sizeof out[t]);
}

#if MAX_TILE == 8
#define TILES(CALL) case 1: CALL(1); case 2: CALL(2); case 3: CALL(3); case 4: CALL(4); case 5: CALL(5); case 6: CALL(6); \
    case 7: CALL(7); case 8: CALL(8);
#else
#define TILES(CALL) case 1: CALL(1); case 2: CALL(2); case 3: CALL(3); case 4: CALL(4);
#endif

static __attribute__((noinline)) void tile_4bit(int n, const uint8_t *panel, quantized act, int64_t token, panel_out *out) {
    switch (n) {
#define CALL(N) tile(4, N, panel, act, token, out); break
        TILES(CALL)
#undef CALL
    }
}

static __attribute__((noinline)) void tile_8bit(int n, const uint8_t *panel, quantized act, int64_t token, panel_out *out) {
    switch (n) {
#define CALL(N) tile(8, N, panel, act, token, out); break
        TILES(CALL)
#undef CALL
    }
}

static __attribute__((noinline)) void tile_float(int n, const float *panel, const float *x, int64_t cols, panel_out *out) {
    switch (n) {
#define CALL(N) tile_f32(N, panel, x, cols, out); break
        TILES(CALL)
#undef CALL
    }
}
