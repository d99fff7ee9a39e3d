// Byte planes of numbers. Each number is rotated left by one bit, which gathers a float's exponent in the highest byte.
// One plane holds the highest bytes, another the bytes below, in order. Also the checksum of a block, and blocks whose
// highest bytes are a zstd frame.
#pragma once
#include "zstd_frame.h"
#include <stdint.h>
#include <string.h>

#define N_WORDS 8
typedef uint64_t Words __attribute__((vector_size(8 * N_WORDS)));

// Adds n bytes to Fletcher's checksum over 64-bit words, the last padded with zeros: the sum, and the sum of the running
// sums.
static void fletcher(const uint8_t *bytes, int64_t n, uint64_t sums[2]) {
    uint64_t sum = sums[0], running = sums[1], word;
    Words each_sum = {0}, each_running = {0}, words;  // of every N_WORDS-th word
    int64_t turns = n / (8 * N_WORDS), at = 8 * N_WORDS * turns;
    for (int64_t turn = 0; turn < turns; turn++) {
        memcpy(&words, bytes + 8 * N_WORDS * turn, sizeof words);
        each_sum += words;
        each_running += each_sum;
    }
    running += (uint64_t)(N_WORDS * turns) * sum;
    for (int i = 0; i < N_WORDS; i++) {
        sum += each_sum[i];
        running += N_WORDS * each_running[i] - i * each_sum[i];
    }
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

#define SUMMED_BYTES 4096  // that are split or joined, and then summed up while they are in the L1 cache

// Splits n numbers of 1, 2 or 4 bytes. A number of one byte is its own highest byte.
void em_split_planes(const uint8_t *in, int64_t n, int32_t width, uint8_t *top, uint8_t *rest, uint64_t sums[2]) {
    sums[0] = sums[1] = 0;
    for (int64_t at = 0, some; at < n; at += some) {
        some = n - at < SUMMED_BYTES / width ? n - at : SUMMED_BYTES / width;
        const uint8_t *from = in + at * width;
        if (width == 1) memcpy(top + at, from, some);
        else if (width == 2) split_2((const uint16_t *)from, some, top + at, rest + at);
        else split_4((const uint32_t *)from, some, top + at, rest + 3 * at);
        fletcher(from, some * width, sums);
    }
}

// Joins rows of n numbers, whose first bytes are `stride` bytes apart in `out`. The checksum is that of the rows' bytes
// one after the other: with several rows, n * width is a multiple of 8.
void em_join_planes(
    const uint8_t *top, const uint8_t *rest, int64_t rows, int64_t n, int32_t width, uint8_t *out, int64_t stride,
    uint64_t sums[2]
) {
    sums[0] = sums[1] = 0;
    for (int64_t row = 0; row < rows; row++, top += n, rest += n * (width - 1), out += stride)
        for (int64_t at = 0, some; at < n; at += some) {
            some = n - at < SUMMED_BYTES / width ? n - at : SUMMED_BYTES / width;
            uint8_t *to = out + at * width;
            if (width == 1) memcpy(to, top + at, some);
            else if (width == 2) join_2(top + at, rest + at, some, (uint16_t *)to);
            else join_4(top + at, rest + 3 * at, some, (uint32_t *)to);
            fletcher(to, some * width, sums);
        }
}

// Memory that a thread needs to decode blocks.
typedef struct {
    FrameScratch frame;
    uint8_t top[FRAME_BYTES], numbers[4 * FRAME_BYTES];
} BlockScratch;

int64_t em_block_scratch_bytes(void) { return sizeof(BlockScratch); }

typedef struct {
    int64_t top, bottom, left, right;
} Rectangle;

// Decodes a block into the part of `out` that it covers, which begins at row part.top and column part.left. Returns 0
// where the exponents cannot be decoded here, or the numbers differ from their checksum.
static int decode_block(
    BlockScratch *scratch, const uint8_t *coded, int64_t n_coded, const uint8_t *rest, Rectangle block, Rectangle part,
    int width, const uint64_t checksum[2], uint8_t *out, int64_t stride
) {
    int64_t rows = block.bottom - block.top, columns = block.right - block.left, row_bytes = columns * width;
    uint64_t sums[2];
    if (rows * columns > FRAME_BYTES || !decode_frame(&scratch->frame, coded, n_coded, scratch->top, rows * columns))
        return 0;
    int is_whole = block.top >= part.top && block.bottom <= part.bottom;
    is_whole &= block.left >= part.left && block.right <= part.right;
    if (is_whole && (rows == 1 || row_bytes % 8 == 0)) {
        uint8_t *to = out + (block.top - part.top) * stride + (block.left - part.left) * width;
        em_join_planes(scratch->top, rest, rows, columns, width, to, stride, sums);
        return sums[0] == checksum[0] && sums[1] == checksum[1];
    }
    em_join_planes(scratch->top, rest, 1, rows * columns, width, scratch->numbers, 0, sums);
    int64_t top = block.top > part.top ? block.top : part.top, left = block.left > part.left ? block.left : part.left;
    int64_t bottom = block.bottom < part.bottom ? block.bottom : part.bottom;
    int64_t right = block.right < part.right ? block.right : part.right;
    for (int64_t row = top; row < bottom; row++)
        memcpy(out + (row - part.top) * stride + (left - part.left) * width,
               scratch->numbers + (row - block.top) * row_bytes + (left - block.left) * width, (right - left) * width);
    return sums[0] == checksum[0] && sums[1] == checksum[1];
}

// Decodes some blocks of a matrix, each of which covers some of `part`. grid: rows and columns of the matrix and of a
// block. table: of each block where it ends in `coded`, and its checksum. `coded` and `rest` begin coded_from and
// rest_from bytes after their planes do. Returns how many blocks were decoded: those before the first that was not.
int64_t em_decode_blocks(
    const uint8_t *coded, int64_t coded_from, const uint8_t *rest, int64_t rest_from, const uint64_t *table,
    const int64_t *numbers, int64_t n, const int64_t grid[4], const int64_t part[4], int32_t width, uint8_t *out,
    int64_t stride, void *scratch
) {
    int64_t rows = grid[0], columns = grid[1], across = (columns + grid[3] - 1) / grid[3];
    Rectangle wanted = {part[0], part[1], part[2], part[3]};
    for (int64_t i = 0; i < n; i++) {
        int64_t number = numbers[i], top = number / across * grid[2], left = number % across * grid[3];
        int64_t bottom = rows < top + grid[2] ? rows : top + grid[2];
        int64_t right = columns < left + grid[3] ? columns : left + grid[3];
        int64_t before = top * columns + left * (bottom - top), start = number ? table[3 * number - 3] : 0;
        int done = decode_block(
            scratch, coded + (start - coded_from), table[3 * number] - start, rest + (before * (width - 1) - rest_from),
            (Rectangle){top, bottom, left, right}, wanted, width, table + 3 * number + 1, out, stride
        );
        if (!done) return i;
    }
    return n;
}
