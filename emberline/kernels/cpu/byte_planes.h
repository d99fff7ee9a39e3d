// Byte planes of numbers. Each number is rotated left by one bit, which gathers a float's exponent in the highest byte.
// One plane holds the highest bytes, another the bytes below, in order. Also the checksum of a block's bytes.
#pragma once
#include <stdint.h>
#include <string.h>

// Adds n bytes to Fletcher's checksum over 64-bit words, the last padded with zeros: the sum, and the sum of the running
// sums.
static void fletcher(const uint8_t *bytes, int64_t n, uint64_t sums[2]) {
    uint64_t sum = sums[0], running = sums[1], word;
    int64_t at = 0;
    for (; at + 8 <= n; at += 8) {
        memcpy(&word, bytes + at, 8);
        sum += word;
        running += sum;
    }
    if (at < n) {
        word = 0;
        memcpy(&word, bytes + at, n - at);
        sum += word;
        running += sum;
    }
    sums[0] = sum;
    sums[1] = running;
}

static void split_2(const uint16_t *in, int64_t n, uint8_t *top, uint8_t *rest) {
    for (int64_t i = 0; i < n; i++) {
        uint16_t rotated = (uint16_t)(in[i] << 1 | in[i] >> 15);
        top[i] = rotated >> 8;
        rest[i] = rotated & 255;
    }
}

static void join_2(const uint8_t *top, const uint8_t *rest, int64_t n, uint16_t *out) {
    for (int64_t i = 0; i < n; i++) {
        uint16_t rotated = (uint16_t)(top[i] << 8 | rest[i]);
        out[i] = (uint16_t)(rotated >> 1 | rotated << 15);
    }
}

static void split_4(const uint32_t *in, int64_t n, uint8_t *top, uint8_t *rest) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t rotated = in[i] << 1 | in[i] >> 31;
        top[i] = rotated >> 24;
        rest[3 * i] = rotated;
        rest[3 * i + 1] = rotated >> 8;
        rest[3 * i + 2] = rotated >> 16;
    }
}

static void join_4(const uint8_t *top, const uint8_t *rest, int64_t n, uint32_t *out) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t rotated =
            (uint32_t)top[i] << 24 | (uint32_t)rest[3 * i + 2] << 16 | (uint32_t)rest[3 * i + 1] << 8 | rest[3 * i];
        out[i] = rotated >> 1 | rotated << 31;
    }
}

// Splits n numbers of 1, 2 or 4 bytes. A number of one byte is its own highest byte.
void em_split_planes(const uint8_t *in, int64_t n, int32_t width, uint8_t *top, uint8_t *rest, uint64_t sums[2]) {
    if (width == 1) memcpy(top, in, n);
    else if (width == 2) split_2((const uint16_t *)in, n, top, rest);
    else split_4((const uint32_t *)in, n, top, rest);
    sums[0] = sums[1] = 0;
    fletcher(in, n * width, sums);
}

// Joins rows of n numbers, whose first bytes are `stride` bytes apart in `out`. The checksum is that of the rows' bytes
// one after the other: with several rows, n * width is a multiple of 8.
void em_join_planes(
    const uint8_t *top, const uint8_t *rest, int64_t rows, int64_t n, int32_t width, uint8_t *out, int64_t stride,
    uint64_t sums[2]
) {
    sums[0] = sums[1] = 0;
    for (int64_t row = 0; row < rows; row++, top += n, rest += n * (width - 1), out += stride) {
        if (width == 1) memcpy(out, top, n);
        else if (width == 2) join_2(top, rest, n, (uint16_t *)out);
        else join_4(top, rest, n, (uint32_t *)out);
        fletcher(out, n * width, sums);
    }
}
