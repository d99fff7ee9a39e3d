// Content keys of KV blocks, as `protocol/block_hash.py` defines them: BLAKE2b (RFC 7693) of 16 bytes, keyed by the key of
// the block before. Words are little-endian.
#pragma once
#include <stdint.h>
#include <string.h>

#define KEY_BYTES 16
#define KEYED_BYTES 64 // token ids of a block

static const uint64_t blake2b_iv[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};
static const uint8_t blake2b_sigma[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

static inline uint64_t blake2b_turn(uint64_t word, int bits) { return word >> bits | word << (64 - bits); }

static inline void blake2b_mix(uint64_t v[16], int a, int b, int c, int d, uint64_t x, uint64_t y) {
    v[a] += v[b] + x, v[d] = blake2b_turn(v[d] ^ v[a], 32);
    v[c] += v[d], v[b] = blake2b_turn(v[b] ^ v[c], 24);
    v[a] += v[b] + y, v[d] = blake2b_turn(v[d] ^ v[a], 16);
    v[c] += v[d], v[b] = blake2b_turn(v[b] ^ v[c], 63);
}

// n_bytes: of the message up to the end of this block of 128.
static void blake2b_compress(uint64_t state[8], const uint64_t m[16], uint64_t n_bytes, int is_last) {
    uint64_t v[16];
    memcpy(v, state, 64), memcpy(v + 8, blake2b_iv, 64);
    v[12] ^= n_bytes;
    if (is_last) v[14] = ~v[14];
#pragma GCC unroll 12
    for (int round = 0; round < 12; round++) {
        const uint8_t *at = blake2b_sigma[round % 10];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) blake2b_mix(v, i, i + 4, i + 8, i + 12, m[at[2 * i]], m[at[2 * i + 1]]);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            blake2b_mix(v, i, (i + 1) % 4 + 4, (i + 2) % 4 + 8, (i + 3) % 4 + 12, m[at[8 + 2 * i]], m[at[9 + 2 * i]]);
    }
    for (int i = 0; i < 8; i++) state[i] ^= v[i] ^ v[i + 8];
}

// Keys of n blocks of different chains. parents: the keys before them; tokens: their ids, u32 LE.
void em_block_keys(const uint8_t *parents, const uint8_t *tokens, int64_t n, uint8_t *keys) {
    for (; n > 0; n--, parents += KEY_BYTES, tokens += KEYED_BYTES, keys += KEY_BYTES) {
        uint64_t state[8], key[16] = {0}, message[16] = {0};
        memcpy(state, blake2b_iv, 64), memcpy(key, parents, KEY_BYTES), memcpy(message, tokens, KEYED_BYTES);
        state[0] ^= 0x01010000 ^ KEY_BYTES << 8 ^ KEY_BYTES; // lengths of the key and of the digest
        blake2b_compress(state, key, 128, 0);
        blake2b_compress(state, message, 128 + KEYED_BYTES, 1);
        memcpy(keys, state, KEY_BYTES);
    }
}
