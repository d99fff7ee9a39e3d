// Sixteen floats at a time, in the compiler's generic vectors: one zmm, two ymm or four NEON registers.
// Only what generic vectors cannot say (half floats, dot products of bytes) is written per instruction set.
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

#define LANES 16
#define GROUP 32 // weights that share a scale and an offset
#define INLINE static inline __attribute__((always_inline))

typedef float v16 __attribute__((vector_size(64)));
typedef int32_t v16i __attribute__((vector_size(64)));
typedef float v16u __attribute__((vector_size(64), aligned(4))); // for unaligned loads and stores

INLINE v16 load16(const float *p) { return *(const v16u *)p; }
INLINE void store16(float *p, v16 v) { *(v16u *)p = v; }
INLINE v16 splat(float x) { return (v16){0} + x; }

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
    x = fminf(fmaxf(x, -65504.f), 65504.f); // an infinity in the cache would poison every later read
#if defined(__F16C__)
    return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
    _Float16 f = (_Float16)x;
    uint16_t h;
    memcpy(&h, &f, 2);
    return h;
#endif
}

INLINE v16 load_half16(const uint16_t *p) {
#if defined(__AVX512F__)
    return (v16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__)
    union { __m256 part[2]; v16 all; } u;
    u.part[0] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
    u.part[1] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)));
    return u.all;
#elif defined(__ARM_NEON)
    union { float32x4_t part[4]; v16 all; } u;
    for (int i = 0; i < 4; i++) u.part[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)));
    return u.all;
#else
    v16 v;
    for (int i = 0; i < LANES; i++) v[i] = half_to_float(p[i]);
    return v;
#endif
}

INLINE float sum16(v16 v) { // a fixed tree, so that results never depend on the caller
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float s[LANES];
    memcpy(s, &v, sizeof s);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) s[i] += s[i + width];
    return s[0];
#endif
}

INLINE v16 select16(v16i mask, v16 a, v16 b) { return (v16)((mask & (v16i)a) | (~mask & (v16i)b)); }

INLINE v16 max16(v16 a, v16 b) {
#if defined(__AVX512F__)
    return (v16)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return select16(a > b, a, b);
#endif
}

INLINE v16 abs16(v16 a) { return (v16)((v16i)a & 0x7fffffff); }

INLINE float hmax16(v16 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#elif defined(__ARM_NEON)
    union { float32x4_t part[4]; v16 all; } u = {.all = v};
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(u.part[0], u.part[1]), vmaxq_f32(u.part[2], u.part[3])));
#else
    float best = v[0];
    for (int i = 1; i < LANES; i++) best = v[i] > best ? v[i] : best;
    return best;
#endif
}

INLINE v16 exp16(v16 x) { // relative error below 2e-7 on [-87, 88]; zero below
    v16i tiny = x < splat(-87.f);
    x = select16(x > splat(88.f), splat(88.f), x);
    x = select16(tiny, splat(-87.f), x);
    v16 magic = splat(12582912.f);
    v16 n = (x * 1.44269504f + magic) - magic;
    v16 r = x - n * 0.693359375f - n * -2.12194440e-4f;
    v16 p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.f;
    v16i exponent = (__builtin_convertvector(n, v16i) + 127) << 23;
    v16 result = p * (v16)exponent;
    return select16(tiny, (v16){0}, result);
}

INLINE v16 silu16(v16 x) { return x / (1.f + exp16(-x)); }

INLINE v16 gelu_tanh16(v16 x) {
    v16 inner = 0.7978845608f * (x + 0.044715f * x * x * x);
    return x / (1.f + exp16(-2.f * inner));
}
