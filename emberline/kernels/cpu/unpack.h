// GGUF's block formats as codes with a scale and an offset for each group of 32 numbers, at load. The reference is
// weights/tensors.py, whose results these are to the bit.
#pragma once
#include "pool.h"
#include "vec.h"
#include <math.h>

enum { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K };

static const struct { int numbers, bytes; } BLOCKS[] = {
    {32, 18}, {32, 20}, {32, 22}, {32, 24}, {32, 34}, {256, 144}, {256, 176}, {256, 210},
};

#define UNPACKED_GROUP 32

INLINE uint16_t exact_half(float x) { // without the limits of float_to_half: an infinity in a file stays one
#if defined(__F16C__)
    return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
    _Float16 f = (_Float16)x;
    uint16_t h;
    memcpy(&h, &f, 2);
    return h;
#endif
}

INLINE float half_at(const uint8_t *p) {
    uint16_t h;
    memcpy(&h, p, 2);
    return half_to_float(h);
}

INLINE void nibbles(const uint8_t *packed, int n_bytes, uint8_t *codes) {
    for (int i = 0; i < n_bytes; i++) {
        codes[i] = packed[i] & 15;
        codes[n_bytes + i] = packed[i] >> 4;
    }
}

INLINE void fifth_bits(const uint8_t *bits, uint8_t *codes) {
    for (int i = 0; i < 32; i++) codes[i] |= (bits[i / 8] >> (i % 8) & 1) << 4;
}

static void k_scales(const uint8_t *block, uint16_t *scale, uint16_t *offset) {
    const float d = half_at(block), minimum = half_at(block + 2);
    const uint8_t *low = block + 4, *high = block + 8, *mixed = block + 12;
    for (int i = 0; i < 4; i++) {
        scale[i] = exact_half(d * (low[i] & 63));
        scale[4 + i] = exact_half(d * ((mixed[i] & 15) | (low[i] >> 6 << 4)));
        offset[i] = exact_half(minimum * -(float)(high[i] & 63));
        offset[4 + i] = exact_half(minimum * -(float)((mixed[i] >> 4) | (high[i] >> 6 << 4)));
    }
}

// 8 bits from a group's minimum to its maximum.
static void requantize(const float *x, uint8_t *codes, uint16_t *scale, uint16_t *offset) {
    float lows[8], highs[8]; // in as many lanes
    for (int i = 0; i < 8; i++) lows[i] = highs[i] = x[i];
    for (int g = 8; g < UNPACKED_GROUP; g += 8)
        for (int i = 0; i < 8; i++) {
            lows[i] = x[g + i] < lows[i] ? x[g + i] : lows[i];
            highs[i] = x[g + i] > highs[i] ? x[g + i] : highs[i];
        }
    float low = lows[0], high = highs[0];
    for (int i = 1; i < 8; i++) {
        low = lows[i] < low ? lows[i] : low;
        high = highs[i] > high ? highs[i] : high;
    }
    const float width = (high - low) / 255.f, step = width == 0.f ? 1.f : width;
    for (int i = 0; i < UNPACKED_GROUP; i++) codes[i] = (uint8_t)(int)rintf((x[i] - low) / step);
    *scale = exact_half(width);
    *offset = exact_half(low);
}

static void unpack_q6_k(const uint8_t *block, uint8_t *codes, uint16_t *scale, uint16_t *offset) {
    const float d = half_at(block + 208);
    uint8_t six[256];
    float x[256], shift[16];
    for (int half = 0; half < 2; half++) {
        nibbles(block + 64 * half, 64, six + 128 * half);
        for (int i = 0; i < 128; i++) six[128 * half + i] |= (block[128 + 32 * half + i % 32] >> (i / 32 * 2) & 3) << 4;
    }
    for (int i = 0; i < 256; i++) x[i] = (float)six[i] * (d * (float)(int8_t)block[192 + i / 16]);
    for (int i = 0; i < 16; i++) shift[i] = d * (float)(int8_t)block[192 + i] * -32.f;
    __asm__ volatile("" ::: "memory"); // products are rounded before the sum, as numpy does: no fused multiply-add
    for (int i = 0; i < 256; i++) x[i] += shift[i / 16];
    for (int g = 0; g < 8; g++) requantize(x + 32 * g, codes + 32 * g, scale + g, offset + g);
}

static void unpack_block(int kind, const uint8_t *block, uint8_t *codes, uint16_t *scale, uint16_t *offset) {
    switch (kind) {
    case Q4_0:
    case Q5_0:
        nibbles(block + (kind == Q4_0 ? 2 : 6), 16, codes);
        if (kind == Q5_0) fifth_bits(block + 2, codes);
        memcpy(scale, block, 2);
        *offset = exact_half(half_at(block) * (kind == Q4_0 ? -8.f : -16.f));
        break;
    case Q4_1:
    case Q5_1:
        nibbles(block + (kind == Q4_1 ? 4 : 8), 16, codes);
        if (kind == Q5_1) fifth_bits(block + 4, codes);
        memcpy(scale, block, 2);
        memcpy(offset, block + 2, 2);
        break;
    case Q8_0:
        for (int i = 0; i < 32; i++) codes[i] = block[2 + i] ^ 128;
        memcpy(scale, block, 2);
        *offset = exact_half(half_at(block) * -128.f);
        break;
    case Q4_K:
    case Q5_K:
        for (int i = 0; i < 4; i++) nibbles(block + (kind == Q4_K ? 16 : 48) + 32 * i, 32, codes + 64 * i);
        for (int i = 0; kind == Q5_K && i < 256; i++) codes[i] |= (block[16 + i % 32] >> (i / 32) & 1) << 4;
        k_scales(block, scale, offset);
        break;
    case Q6_K:
        unpack_q6_k(block, codes, scale, offset);
    }
}

typedef struct {
    int kind;
    const uint8_t *blocks;
    int64_t cols;
    uint8_t *codes;          // [rows, cols]
    uint16_t *scale, *offset; // [rows, cols / 32]
} unpack_job;

static void unpack_row(void *arg, int64_t row) {
    const unpack_job *job = arg;
    const int numbers = BLOCKS[job->kind].numbers, bytes = BLOCKS[job->kind].bytes;
    const int64_t n_blocks = job->cols / numbers, groups = job->cols / UNPACKED_GROUP;
    for (int64_t b = 0; b < n_blocks; b++) {
        const int64_t group = row * groups + b * (numbers / UNPACKED_GROUP);
        unpack_block(job->kind, job->blocks + (row * n_blocks + b) * bytes, job->codes + row * job->cols + b * numbers,
                     job->scale + group, job->offset + group);
    }
}
