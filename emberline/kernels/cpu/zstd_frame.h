// Decoding small zstd frames (RFC 8878), without a library: frames of one segment with up to 128 KiB of content, which
// is how `lossless_blocks` codes exponents. Whatever else a frame may be, or damaged, is refused: the caller then asks
// zstd itself. Nothing is read or written outside the given bounds, whatever the frame holds.
//
// Exponents are nearly all literals with 2 to 3 bits each. So a lookup of 11 bits gives up to four of them at once.
#pragma once
#include <stdint.h>
#include <string.h>

#define FRAME_BYTES (1 << 17)  // of content, at most
#define HUFFMAN_BITS 11        // of the longest code of literals
#define FSE_BITS 9             // of the largest table of states

typedef struct {
    uint8_t symbol[1 << FSE_BITS], n_bits[1 << FSE_BITS];
    uint16_t base[1 << FSE_BITS];
    int bits;
} FseTable;

typedef struct {
    uint64_t many[1 << HUFFMAN_BITS];  // up to four symbols, then a byte with their bits and one with their number
    uint8_t symbol[1 << HUFFMAN_BITS], n_bits[1 << HUFFMAN_BITS];
    // Symbols in the order of their codes, the longest code first: where each begins in a table, and its bits.
    uint8_t ordered[256], ordered_bits[256];
    int start[256], n_symbols, fitting[HUFFMAN_BITS + 1];  // the first symbol whose code has up to so many bits
} HuffmanTable;

typedef struct {
    HuffmanTable huffman;
    FseTable weights, lengths, offsets, matches;
    uint8_t literals[FRAME_BYTES];
} FrameScratch;

static inline uint64_t load_64(const uint8_t *from) {
    uint64_t word;
    memcpy(&word, from, 8);
    return word;
}

static inline int highest_bit(uint32_t n) { return 31 - __builtin_clz(n); }

// A stream of bits that is read from its end to its beginning.
typedef struct {
    const uint8_t *from;
    int64_t n_bytes, left;  // left: bits; negative once more was read than there is
} Backward;

// Bits [at, at + n) of a stream of bytes, n <= 32, with zeros beyond both ends.
static inline uint32_t bits_at(const uint8_t *from, int64_t n_bytes, int64_t at, int n) {
    int missing = 0;
    if (at < 0) {
        missing = at < -n ? n : (int)-at;
        at = 0;
    }
    int64_t byte = at >> 3;
    uint64_t word = 0;
    if (byte + 8 <= n_bytes) word = load_64(from + byte);
    else
        for (int i = 0; byte + i < n_bytes && i < 8; i++) word |= (uint64_t)from[byte + i] << (8 * i);
    return (uint32_t)((word >> (at & 7) & ((1ull << (n - missing)) - 1)) << missing);
}

// The last bit that is set marks the end. Returns 0 if there is none.
static int open_backward(Backward *stream, const uint8_t *from, int64_t n_bytes) {
    if (n_bytes < 1 || !from[n_bytes - 1]) return 0;
    *stream = (Backward){from, n_bytes, 8 * (n_bytes - 1) + highest_bit(from[n_bytes - 1])};
    return 1;
}

static inline uint32_t take(Backward *stream, int n) {
    stream->left -= n;
    return bits_at(stream->from, stream->n_bytes, stream->left, n);
}

// --- tables of states ------------------------------------------------------------------------------------------------

static int build_fse(FseTable *table, const int16_t *counts, int n_symbols, int bits) {
    int size = 1 << bits, high = size, at = 0;
    uint16_t next[256];
    for (int s = 0; s < n_symbols; s++)
        if (counts[s] == -1) table->symbol[--high] = s, next[s] = 1;
    for (int s = 0; s < n_symbols; s++) {
        if (counts[s] <= 0) continue;
        next[s] = counts[s];
        for (int i = 0; i < counts[s]; i++) {
            table->symbol[at] = s;
            do at = (at + (size >> 1) + (size >> 3) + 3) & (size - 1);
            while (at >= high);
        }
    }
    if (at) return 0;
    for (int i = 0; i < size; i++) {
        uint16_t state = next[table->symbol[i]]++;
        table->n_bits[i] = bits - highest_bit(state);
        table->base[i] = (state << table->n_bits[i]) - size;
    }
    table->bits = bits;
    return 1;
}

// Reads a table's description. Returns its bytes, 0 if it is not valid.
static int64_t read_fse(FseTable *table, const uint8_t *from, int64_t n_bytes, int max_symbols, int max_bits) {
    int16_t counts[256];
    int bits = 5 + bits_at(from, n_bytes, 0, 4), left = 1 << bits, n = 0;
    int64_t at = 4;
    if (bits > max_bits) return 0;
    while (left > 0) {
        if (n >= max_symbols || at > 8 * n_bytes) return 0;
        int width = highest_bit(left + 1) + 1, low = (1 << (width - 1)) - 1, spare = (1 << width) - 2 - left;
        int value = bits_at(from, n_bytes, at, width);
        at += width;
        if ((value & low) < spare) value &= low, at--;
        else if (value > low) value -= spare;
        int count = value - 1;
        left -= count < 0 ? 1 : count;
        counts[n++] = count;
        for (int zeros = 3; !count && zeros == 3;) {
            zeros = bits_at(from, n_bytes, at, 2);
            at += 2;
            if (n + zeros > max_symbols) return 0;
            for (int i = 0; i < zeros; i++) counts[n++] = 0;
        }
    }
    int64_t used = (at + 7) / 8;
    return left == 0 && used <= n_bytes && build_fse(table, counts, n, bits) ? used : 0;
}

static inline void step_fse(const FseTable *table, uint32_t *state, Backward *stream) {
    *state = table->base[*state] + take(stream, table->n_bits[*state]);
}

// --- literals --------------------------------------------------------------------------------------------------------

// Fills the entries whose first bits stand for the symbols in `entry`, with `free_bits` bits behind them.
static void fill_many(const HuffmanTable *table, uint64_t *entries, int free_bits, uint64_t entry, int count) {
    int shift = HUFFMAN_BITS - free_bits, first = table->fitting[free_bits];
    int unfit = first < table->n_symbols ? table->start[first] >> shift : 1 << free_bits;
    for (int i = 0; i < unfit; i++) entries[i] = entry;
    for (int k = first; k < table->n_symbols; k++) {
        int bits = table->ordered_bits[k], left = free_bits - bits;
        uint64_t next = entry + ((uint64_t)table->ordered[k] << 8 * count) + ((uint64_t)bits << 32) + (1ull << 40);
        uint64_t *part = entries + (table->start[k] >> shift);
        if (count < 3 && table->fitting[left] < table->n_symbols) fill_many(table, part, left, next, count + 1);
        else
            for (int i = 0; i < 1 << left; i++) part[i] = next;
    }
}

// Builds the tables of codes of these weights, to which the last is added. Returns 0 if there are none.
static int build_huffman(HuffmanTable *table, uint8_t *weights, int n) {
    uint32_t sum = 0;
    for (int s = 0; s < n; s++) {
        if (weights[s] > HUFFMAN_BITS) return 0;
        sum += weights[s] ? 1u << (weights[s] - 1) : 0;
    }
    if (!sum) return 0;
    int bits = highest_bit(sum) + 1, at = 0;
    uint32_t left = (1u << bits) - sum;
    if (bits > HUFFMAN_BITS || (left & (left - 1))) return 0;
    weights[n++] = highest_bit(left) + 1;
    table->n_symbols = 0;
    for (int weight = 1; weight <= bits; weight++)
        for (int s = 0; s < n; s++) {
            if (weights[s] != weight) continue;
            int k = table->n_symbols++, size = 1 << (weight - 1 + HUFFMAN_BITS - bits);
            table->ordered[k] = s, table->ordered_bits[k] = bits + 1 - weight, table->start[k] = at;
            memset(table->symbol + at, s, size);
            memset(table->n_bits + at, bits + 1 - weight, size);
            at += size;
        }
    for (int fit = 0; fit <= HUFFMAN_BITS; fit++) {
        int k = 0;
        while (k < table->n_symbols && table->ordered_bits[k] > fit) k++;
        table->fitting[fit] = k;
    }
    return at == 1 << HUFFMAN_BITS;
}

// Reads a tree's description. Returns its bytes, 0 if it is not valid.
static int64_t read_huffman(FrameScratch *scratch, const uint8_t *from, int64_t n_bytes) {
    uint8_t weights[256];
    if (n_bytes < 1) return 0;
    int n = 0, head = from[0];
    if (head >= 128) {
        n = head - 127;
        if (1 + (n + 1) / 2 > n_bytes) return 0;
        for (int s = 0; s < n; s++) weights[s] = s & 1 ? from[1 + s / 2] & 15 : from[1 + s / 2] >> 4;
        return build_huffman(&scratch->huffman, weights, n) ? 1 + (n + 1) / 2 : 0;
    }
    FseTable *table = &scratch->weights;
    if (1 + head > n_bytes) return 0;
    int64_t used = read_fse(table, from + 1, head, HUFFMAN_BITS + 2, 6);
    Backward stream;
    if (!used || !open_backward(&stream, from + 1 + used, head - used)) return 0;
    uint32_t states[2] = {take(&stream, table->bits), 0};
    states[1] = take(&stream, table->bits);
    for (int turn = 0; stream.left >= 0; turn ^= 1) {
        if (n > 253) return 0;
        weights[n++] = table->symbol[states[turn]];
        step_fse(table, &states[turn], &stream);
        if (stream.left < 0) weights[n++] = table->symbol[states[!turn]];
    }
    return n && build_huffman(&scratch->huffman, weights, n) ? 1 + head : 0;
}

// Bits of a stream are taken from the top of a word, whose lowest set bit tells how many have been. Five lookups take
// up to 7 bytes and give up to 20 symbols.
#define LOOK_UP(word, out)                                    \
    {                                                         \
        uint64_t entry = many[word >> (64 - HUFFMAN_BITS)];   \
        uint32_t symbols = (uint32_t)entry;                   \
        memcpy(out, &symbols, 4);                             \
        entry >>= 32;                                         \
        word <<= entry & 63;                                  \
        out += entry >> 8;                                    \
    }
#define REFILL(word, at)                                      \
    {                                                         \
        int used = __builtin_ctzll(word);                     \
        at -= used >> 3;                                      \
        word = (load_64(at) | 1) << (used & 7);               \
    }

typedef struct {
    Backward from;
    uint8_t *out, *end;  // of its symbols
} Literals;

static inline int64_t turns_left(const Literals *literals, const uint8_t *at, const uint8_t *out) {
    int64_t of_bits = (at - literals->from.from) / 7, of_symbols = (literals->end - out) / 20;
    return of_bits < of_symbols ? of_bits : of_symbols;
}

static inline uint64_t first_word(const Literals *literals, const uint8_t **at) {
    *at = literals->from.from + literals->from.n_bytes - 8;
    return (load_64(*at) | 1) << (8 * literals->from.n_bytes - literals->from.left);
}

static inline void stop_at(Literals *literals, uint64_t word, const uint8_t *at, uint8_t *out) {
    literals->out = out;
    literals->from.left = 8 * (at - literals->from.from) + 64 - __builtin_ctzll(word);
}

// Decodes four streams at once until one of them is nearly at its end.
static void decode_four(const uint64_t *many, Literals s[4]) {
    for (int i = 0; i < 4; i++)
        if (s[i].from.n_bytes < 8) return;
    const uint8_t *at0, *at1, *at2, *at3;
    uint64_t word0 = first_word(s, &at0), word1 = first_word(s + 1, &at1);
    uint64_t word2 = first_word(s + 2, &at2), word3 = first_word(s + 3, &at3);
    uint8_t *out0 = s[0].out, *out1 = s[1].out, *out2 = s[2].out, *out3 = s[3].out;
    for (;;) {
        int64_t turns = turns_left(s, at0, out0), others[3] = {
            turns_left(s + 1, at1, out1), turns_left(s + 2, at2, out2), turns_left(s + 3, at3, out3)
        };
        for (int i = 0; i < 3; i++) turns = others[i] < turns ? others[i] : turns;
        if (turns <= 0) break;
#define LOOK_UP_4 LOOK_UP(word0, out0) LOOK_UP(word1, out1) LOOK_UP(word2, out2) LOOK_UP(word3, out3)
        for (; turns; turns--) {
            LOOK_UP_4 LOOK_UP_4 LOOK_UP_4 LOOK_UP_4 LOOK_UP_4
            REFILL(word0, at0) REFILL(word1, at1) REFILL(word2, at2) REFILL(word3, at3)
        }
#undef LOOK_UP_4
    }
    stop_at(s, word0, at0, out0);
    stop_at(s + 1, word1, at1, out1);
    stop_at(s + 2, word2, at2, out2);
    stop_at(s + 3, word3, at3, out3);
}

// Decodes one stream nearly to its end.
static void decode_one(const uint64_t *many, Literals *s) {
    const uint8_t *at = s->from.from + (s->from.left + 7) / 8 - 8;
    if (s->from.left < 64) return;
    uint8_t *out = s->out;
    uint64_t word = (load_64(at) | 1) << (-s->from.left & 7);
    for (int64_t turns; (turns = turns_left(s, at, out)) > 0;)
        for (; turns; turns--) {
            LOOK_UP(word, out) LOOK_UP(word, out) LOOK_UP(word, out) LOOK_UP(word, out) LOOK_UP(word, out)
            REFILL(word, at)
        }
    stop_at(s, word, at, out);
}

// Decodes the rest of a stream symbol by symbol. Returns 0 unless it ends where its symbols do.
static int finish_literals(const HuffmanTable *table, Literals *s) {
    Backward stream = s->from;
    for (uint8_t *out = s->out; out < s->end; out++) {
        uint32_t index = bits_at(stream.from, stream.n_bytes, stream.left - HUFFMAN_BITS, HUFFMAN_BITS);
        *out = table->symbol[index];
        stream.left -= table->n_bits[index];
        if (stream.left < 0) return 0;
    }
    return stream.left == 0;
}

static int decode_literals(
    FrameScratch *scratch, const uint8_t *from, int64_t n_bytes, int n_streams, uint8_t *out, int64_t n
) {
    int64_t tree = read_huffman(scratch, from, n_bytes);
    if (!tree) return 0;
    HuffmanTable *table = &scratch->huffman;
    Literals streams[4] = {{.out = out, .end = out + n}};
    from += tree, n_bytes -= tree;
    if (n_streams == 1 && !open_backward(&streams[0].from, from, n_bytes)) return 0;
    if (n_streams == 4) {
        int64_t part = (n + 3) / 4, at = 6;
        if (n_bytes < 6 || 3 * part > n) return 0;
        for (int s = 0; s < 4; s++) {
            int64_t size = s < 3 ? from[2 * s] | from[2 * s + 1] << 8 : n_bytes - at;
            if (size > n_bytes - at || !open_backward(&streams[s].from, from + at, size)) return 0;
            at += size;
            streams[s].out = out + s * part;
            streams[s].end = s < 3 ? out + (s + 1) * part : out + n;
        }
    }
    if (n >= 4096) {  // or the table takes longer than it saves
        fill_many(table, table->many, HUFFMAN_BITS, 0, 0);
        if (n_streams == 4) decode_four(table->many, streams);
        for (int s = 0; s < n_streams; s++) decode_one(table->many, streams + s);
    }
    for (int s = 0; s < n_streams; s++)
        if (!finish_literals(table, streams + s)) return 0;
    return 1;
}

// Reads the literals of a block. Returns the bytes of their section, 0 if it is not valid.
static int64_t read_literals(FrameScratch *scratch, const uint8_t *from, int64_t n_bytes, int64_t *n) {
    if (n_bytes < 1) return 0;
    int kind = from[0] & 3, format = from[0] >> 2 & 3;
    if (kind < 2) {  // as they are, or one byte repeated
        int head = format == 1 ? 2 : format == 3 ? 3 : 1;
        *n = bits_at(from, n_bytes, head == 1 ? 3 : 4, head == 1 ? 5 : 8 * head - 4);
        int64_t size = kind ? 1 : *n;
        if (*n > FRAME_BYTES || head + size > n_bytes) return 0;
        if (kind) memset(scratch->literals, from[head], *n);
        else memcpy(scratch->literals, from + head, *n);
        return head + size;
    }
    int head = format == 3 ? 5 : format == 2 ? 4 : 3, bits = format == 3 ? 18 : format == 2 ? 14 : 10;
    *n = bits_at(from, n_bytes, 4, bits);
    int64_t size = bits_at(from, n_bytes, 4 + bits, bits);
    if (kind == 3 || *n > FRAME_BYTES || head + size > n_bytes) return 0;
    int done = decode_literals(scratch, from + head, size, format ? 4 : 1, scratch->literals, *n);
    return done ? head + size : 0;
}

// --- sequences -------------------------------------------------------------------------------------------------------

// The tables of the format for the lengths of literals, the offsets of matches and their lengths.
static const int16_t LENGTH_COUNTS[36] = {
    4, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 3, 2, 1, 1, 1, 1, 1, -1, -1, -1, -1
};
static const int16_t OFFSET_COUNTS[29] = {
    1, 1, 1, 1, 1, 1, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1
};
static const int16_t MATCH_COUNTS[53] = {
    1, 4, 3, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
    1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1
};
static const uint32_t LENGTH_BASE[36] = {
    0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20, 22, 24, 28, 32, 40, 48,
    64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536
};
static const uint8_t LENGTH_BITS[36] = {
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16
};
// From code 32 on. Below, a match is 3 longer than its code.
static const uint32_t MATCH_BASE[21] = {
    35, 37, 39, 41, 43, 47, 51, 59, 67, 83, 99, 131, 259, 515, 1027, 2051, 4099, 8195, 16387, 32771, 65539
};
static const uint8_t MATCH_BITS[21] = {
    1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16
};

// Reads one of the tables of sequences by its mode. Returns the bytes read, -1 if they are not valid.
static int64_t read_table(
    FseTable *table, int mode, const uint8_t *from, int64_t n_bytes, const int16_t *counts, int n_counts, int bits,
    int max_symbols, int max_bits
) {
    if (mode == 0) return build_fse(table, counts, n_counts, bits) ? 0 : -1;
    if (mode == 3 || n_bytes < 1) return -1;  // 3: the table of the block before
    if (mode == 1) {
        if (from[0] >= max_symbols) return -1;
        table->symbol[0] = from[0], table->n_bits[0] = 0, table->base[0] = 0, table->bits = 0;
        return 1;
    }
    int64_t used = read_fse(table, from, n_bytes, max_symbols, max_bits);
    return used ? used : -1;
}

// Decodes a block whose literals were read, into `out` from `done` on. Returns the new length, -1 if it is damaged.
static int64_t run_sequences(
    FrameScratch *scratch, const uint8_t *from, int64_t n_bytes, int64_t n_literals, uint32_t recent[3], uint8_t *out,
    int64_t done, int64_t size
) {
    const uint8_t *literals = scratch->literals;
    if (n_bytes < 1) return -1;
    int64_t n = from[0], at = 1;
    if (n >= 128) {
        at = n == 255 ? 3 : 2;
        if (n_bytes < at) return -1;
        n = n == 255 ? from[1] + (from[2] << 8) + 0x7F00 : ((n - 128) << 8) + from[1];
    }
    if (n) {
        FseTable *lengths = &scratch->lengths, *offsets = &scratch->offsets, *matches = &scratch->matches;
        if (at >= n_bytes || from[at] & 3) return -1;
        int modes = from[at++];
        int64_t used = read_table(lengths, modes >> 6, from + at, n_bytes - at, LENGTH_COUNTS, 36, 6, 36, 9);
        if (used < 0) return -1;
        at += used;
        used = read_table(offsets, modes >> 4 & 3, from + at, n_bytes - at, OFFSET_COUNTS, 29, 5, 32, 8);
        if (used < 0) return -1;
        at += used;
        used = read_table(matches, modes >> 2 & 3, from + at, n_bytes - at, MATCH_COUNTS, 53, 6, 53, 9);
        Backward stream;
        if (used < 0 || !open_backward(&stream, from + at + used, n_bytes - at - used)) return -1;
        uint32_t length_state = take(&stream, lengths->bits), offset_state = take(&stream, offsets->bits);
        uint32_t match_state = take(&stream, matches->bits);
        for (int64_t i = 0; i < n; i++) {
            int offset_code = offsets->symbol[offset_state], match_code = matches->symbol[match_state];
            int length_code = lengths->symbol[length_state];
            uint32_t value = (uint32_t)((1ull << offset_code) + take(&stream, offset_code));
            int64_t match = match_code + 3;
            if (match_code >= 32) match = MATCH_BASE[match_code - 32] + take(&stream, MATCH_BITS[match_code - 32]);
            int64_t length = LENGTH_BASE[length_code] + take(&stream, LENGTH_BITS[length_code]);
            if (i + 1 < n) {
                step_fse(lengths, &length_state, &stream);
                step_fse(matches, &match_state, &stream);
                step_fse(offsets, &offset_state, &stream);
            }
            if (stream.left < 0) return -1;
            uint32_t offset = value - 3;
            int place = 2;  // of the offset among the recent ones, or after them
            if (value <= 3) {
                place = (int)value - (length > 0);
                offset = place < 3 ? recent[place] : recent[0] - 1;
            }
            if (place > 1) recent[2] = recent[1];
            if (place > 0) recent[1] = recent[0];
            recent[0] = offset;
            if (length > n_literals || length + match > size - done) return -1;
            memcpy(out + done, literals, length);
            done += length, literals += length, n_literals -= length;
            if (!offset || offset > done) return -1;
            if (offset >= match) memcpy(out + done, out + done - offset, match);
            else
                for (int64_t k = 0; k < match; k++) out[done + k] = out[done + k - offset];
            done += match;
        }
        if (stream.left) return -1;
    } else if (at != n_bytes) {
        return -1;
    }
    if (n_literals > size - done) return -1;
    memcpy(out + done, literals, n_literals);
    return done + n_literals;
}

// Decodes one frame into `n` bytes, n <= FRAME_BYTES. Returns 0 if it is damaged, or of a kind that is not read here.
static int decode_frame(FrameScratch *scratch, const uint8_t *from, int64_t n_bytes, uint8_t *out, int64_t n) {
    static const uint8_t magic[4] = {0x28, 0xB5, 0x2F, 0xFD};
    if (n_bytes < 6 || memcmp(from, magic, 4) || (from[4] & 0x3F) != 0x20) return 0;  // 0x20: one segment, and no more
    int flag = from[4] >> 6, at = 5 + (1 << flag);
    uint32_t recent[3] = {1, 4, 8};
    if (flag == 3 || n_bytes < at) return 0;
    if (bits_at(from, n_bytes, 40, 8 << flag) + (flag == 1 ? 256 : 0) != n) return 0;
    from += at, n_bytes -= at;
    for (int64_t done = 0, last = 0; ; ) {
        if (last) return n_bytes == 0 && done == n;
        if (n_bytes < 3) return 0;
        uint32_t head = from[0] | from[1] << 8 | from[2] << 16;
        int kind = head >> 1 & 3;
        int64_t size = head >> 3, stored = kind == 1 ? 1 : size, n_literals;
        last = head & 1;
        from += 3, n_bytes -= 3;
        if (kind == 3 || stored > n_bytes || (kind < 2 && size > n - done)) return 0;
        if (kind == 0) memcpy(out + done, from, size), done += size;
        if (kind == 1) memset(out + done, from[0], size), done += size;
        if (kind == 2) {
            int64_t used = read_literals(scratch, from, size, &n_literals);
            if (!used) return 0;
            done = run_sequences(scratch, from + used, size - used, n_literals, recent, out, done, n);
            if (done < 0) return 0;
        }
        from += stored, n_bytes -= stored;
    }
}
