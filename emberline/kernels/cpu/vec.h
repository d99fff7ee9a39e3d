// SIMD vectors of floats, one register wide, with the compiler's generic vector types. Only what those cannot express
// (half floats, byte dot products, reductions) is written per instruction set.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX2__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
#define LANES 16              // rows of a weight panel, tokens of a KV block
#define PARTS (LANES / WIDTH) // vectors that hold LANES values
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * WIDTH)));
typedef int32_t veci __attribute__((vector_size(4 * WIDTH)));
typedef float vec_anywhere __attribute__((vector_size(4 * WIDTH), aligned(4)));

INLINE vec load(const float *p) { return *(const vec_anywhere *)p; }
INLINE void store(float *p, vec v) { *(vec_anywhere *)p = v; }
INLINE vec splat(float x) { return (vec){0} + x; }
INLINE vec vec_select(veci mask, vec a, vec b) { return (vec)((mask & (veci)a) | (~mask & (veci)b)); }
INLINE vec vec_abs(vec a) { return (vec)((veci)a & 0x7fffffff); }
INLINE vec round_nearest(vec x) { return (x + 12582912.f) - 12582912.f; } // to an integer, for |x| < 2^22

INLINE float half_to_float(uint16_t h) {
#if defined(__F16C__)
    return _cvtsh_ss(h);
#else
    _Float16 f;
    memcpy(&f, &h, 2);
    return (float)f;
#endif
}

INLINE uint16_t float_to_half(float x) {
    x = fminf(fmaxf(x, -65504.f), 65504.f); // an infinity in the KV cache would corrupt every later read
#if defined(__F16C__)
    return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
    _Float16 f = (_Float16)x;
    uint16_t h;
    memcpy(&h, &f, 2);
    return h;
#endif
}

INLINE vec load_half(const uint16_t *p) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__AVX2__) && defined(__F16C__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(__ARM_NEON)
    return (vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
    vec v;
    for (int i = 0; i < WIDTH; i++) v[i] = half_to_float(p[i]);
    return v;
#endif
}

INLINE vec vec_max(vec a, vec b) {
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__ARM_NEON)
    return (vec)vmaxq_f32((float32x4_t)a, (float32x4_t)b);
#else
    return vec_select(a > b, a, b);
#endif
}

INLINE float sum(vec v) { // a fixed reduction tree, so that results never depend on the caller
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#elif defined(__ARM_NEON)
    return vaddvq_f32((float32x4_t)v);
#else
    for (int width = WIDTH / 2; width; width /= 2)
        for (int i = 0; i < width; i++) v[i] += v[i + width];
    return v[0];
#endif
}

INLINE float reduce_max(vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#elif defined(__ARM_NEON)
    return vmaxvq_f32((float32x4_t)v);
#else
    float best = v[0];
    for (int i = 1; i < WIDTH; i++) best = v[i] > best ? v[i] : best;
    return best;
#endif
}

INLINE vec vec_exp(vec x) { // relative error below 2e-7 on [-87, 88]; zero below
    veci tiny = x < splat(-87.f);
    x = vec_select(x > splat(88.f), splat(88.f), x);
    x = vec_select(tiny, splat(-87.f), x);
    vec n = round_nearest(x * 1.44269504f);
    vec r = x - n * 0.693359375f - n * -2.12194440e-4f;
    vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.f;
    veci power = (__builtin_convertvector(n, veci) + 127) << 23;
    return vec_select(tiny, (vec){0}, p * (vec)power);
}

INLINE vec silu(vec x) { return x / (1.f + vec_exp(-x)); }

INLINE vec gelu_tanh(vec x) {
    vec inner = 0.7978845608f * (x + 0.044715f * x * x * x);
    return x / (1.f + vec_exp(-2.f * inner));
}

INLINE void rms_norm(float *x, const float *weight, int64_t n, float eps) { // n: a multiple of LANES
    vec squares[PARTS];
    for (int p = 0; p < PARTS; p++) squares[p] = (vec){0};
    for (int64_t i = 0; i < n; i += LANES)
        for (int p = 0; p < PARTS; p++) squares[p] += load(x + i + p * WIDTH) * load(x + i + p * WIDTH);
    for (int p = 1; p < PARTS; p++) squares[0] += squares[p];
    float inverse = 1.f / sqrtf(sum(squares[0]) / (float)n + eps);
    for (int64_t i = 0; i < n; i += WIDTH) store(x + i, load(x + i) * inverse * load(weight + i));
}
