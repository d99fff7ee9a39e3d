// Emberline on a CPU: the operations of a transformer layer, each one call, each one parallel region.
#include "attention.h"
#include "gemm.h"
#include "sampling.h"
#include <omp.h>
#include <stdlib.h>

typedef struct {
    const void *panels;
    const float *bias; // [rows] or null
    int64_t rows, cols; // rows: a multiple of 16
    int32_t bits;       // 4, 8, or 32 for floats
} linear;

typedef struct {
    linear gate_up; // panels alternate: 16 rows of gate, 16 rows of up
    linear down;
    const float *norm, *post_norm; // post_norm: or null
    float eps;
    int32_t gelu; // 0: SiLU
} mlp;

enum { INPUT, HIDDEN, OUTPUT, QUANTISED_INPUT, QUANTISED_HIDDEN, SLOTS };

// Scratch memory by purpose; grows, never shrinks. The engine calls from one thread at a time.
static void *scratch(int slot, size_t bytes) {
    static void *memory[SLOTS];
    static size_t size[SLOTS];
    if (bytes > size[slot]) {
        free(memory[slot]);
        if (posix_memalign(&memory[slot], 64, bytes)) abort();
        size[slot] = bytes;
    }
    return memory[slot];
}

static quantised quantised_scratch(int slot, int64_t tokens, int64_t cols) {
    int64_t codes = (tokens * cols + 63) / 64 * 64, groups = tokens * cols / GROUP;
    int8_t *at = scratch(slot, codes + 2 * groups * sizeof(float));
    return (quantised){at, (float *)(at + codes), (float *)(at + codes) + groups, cols};
}

typedef struct { // what a matrix is multiplied with: bytes for quantised weights, floats for float weights
    quantised codes;
    float *floats;
} operand;

static operand operand_scratch(const linear *w, int codes_slot, int floats_slot, int64_t tokens) {
    if (w->bits == 32) return (operand){.floats = scratch(floats_slot, tokens * w->cols * sizeof(float))};
    return (operand){.codes = quantised_scratch(codes_slot, tokens, w->cols)};
}

// Inside a parallel region: norm (or copy) each token's row and put it into the operand's form.
static void prepare(const linear *w, const float *x, const float *norm, float eps, int64_t tokens, operand to) {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tokens; t++) {
        float row[w->cols] __attribute__((aligned(64)));
        const float *from = x + t * w->cols;
        if (norm) {
            memcpy(row, from, w->cols * sizeof(float));
            normalise(row, norm, w->cols, eps);
            from = row;
        }
        if (w->bits == 32) memcpy(to.floats + t * w->cols, from, w->cols * sizeof(float));
        else quantise_row(from, to.codes, t);
    }
}

INLINE void multiply(const linear *w, operand in, int64_t panel, int64_t token, int n, panel_out *out) {
    if (w->bits == 32) {
        const float *at = (const float *)w->panels + panel * LANES * w->cols;
        tile_float(n, at, in.floats + token * w->cols, w->cols, out);
        return;
    }
    const uint8_t *at = (const uint8_t *)w->panels + panel * (w->cols / GROUP) * GROUP_BYTES(w->bits);
    (w->bits == 4 ? tile_4bit : tile_8bit)(n, at, in.codes, token, out);
}

static int tile_tokens(int64_t tokens) { // equal tiles rather than full ones and a rest
    int64_t tiles = (tokens + MAX_TILE - 1) / MAX_TILE;
    return (int)((tokens + tiles - 1) / tiles);
}

static int64_t chunk(int64_t panels) { // few enough grabs to be cheap, enough to even out a stolen core
    int64_t c = panels / (8 * omp_get_num_threads());
    return c > 0 ? c : 1;
}

static void multiply_all(const linear *w, operand in, int64_t tokens, float *out, int add) {
    const int tile = tile_tokens(tokens);
    const int64_t panels = w->rows / LANES, step = chunk(panels);
#pragma omp for schedule(dynamic, step)
    for (int64_t p = 0; p < panels; p++)
        for (int64_t t = 0; t < tokens; t += tile) {
            int n = tokens - t < tile ? (int)(tokens - t) : tile;
            panel_out y[MAX_TILE];
            multiply(w, in, p, t, n, y);
            for (int i = 0; i < n; i++)
                for (int c = 0; c < LANES; c += WIDTH) {
                    float *to = out + (t + i) * w->rows + p * LANES + c;
                    vec v = load(y[i] + c);
                    if (w->bias) v += load(w->bias + p * LANES + c);
                    store(to, add ? load(to) + v : v);
                }
        }
}

static void gate_all(const mlp *m, operand in, int64_t tokens, float *hidden) {
    const int tile = tile_tokens(tokens);
    const int64_t panels = m->gate_up.rows / LANES / 2, step = chunk(panels);
#pragma omp for schedule(dynamic, step)
    for (int64_t p = 0; p < panels; p++)
        for (int64_t t = 0; t < tokens; t += tile) {
            int n = tokens - t < tile ? (int)(tokens - t) : tile;
            panel_out gate[MAX_TILE], up[MAX_TILE];
            multiply(&m->gate_up, in, 2 * p, t, n, gate);
            multiply(&m->gate_up, in, 2 * p + 1, t, n, up);
            for (int i = 0; i < n; i++)
                for (int c = 0; c < LANES; c += WIDTH) {
                    vec g = load(gate[i] + c);
                    g = m->gelu ? gelu_tanh(g) : silu(g);
                    store(hidden + (t + i) * m->down.cols + p * LANES + c, g * load(up[i] + c));
                }
        }
}

static void add_normalised(float *x, float *y, const float *norm, float eps, int64_t tokens, int64_t n) {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tokens; t++) {
        normalise(y + t * n, norm, n, eps);
        for (int64_t i = t * n; i < (t + 1) * n; i += WIDTH) store(x + i, load(x + i) + load(y + i));
    }
}

void em_threads(int n) { omp_set_num_threads(n); }

// out = norm(x) W' + bias; norm may be null.
void em_linear(const linear *w, const float *norm, float eps, const float *x, int64_t tokens, float *out) {
    operand in = operand_scratch(w, QUANTISED_INPUT, INPUT, tokens);
#pragma omp parallel
    {
        prepare(w, x, norm, eps, tokens, in);
        multiply_all(w, in, tokens, out, 0);
    }
}

// residual += x W', or residual += post_norm(x W').
void em_linear_add(const linear *w, const float *post_norm, float eps, const float *x, int64_t tokens, float *residual) {
    operand in = operand_scratch(w, QUANTISED_INPUT, INPUT, tokens);
    float *y = post_norm ? scratch(OUTPUT, tokens * w->rows * sizeof(float)) : residual;
#pragma omp parallel
    {
        prepare(w, x, NULL, 0, tokens, in);
        multiply_all(w, in, tokens, y, !post_norm);
        if (post_norm) add_normalised(residual, y, post_norm, eps, tokens, w->rows);
    }
}

// residual += down(act(gate(norm(residual))) * up(norm(residual))), with a norm after it where post_norm is set.
void em_mlp(const mlp *m, float *residual, int64_t tokens) {
    operand in = operand_scratch(&m->gate_up, QUANTISED_INPUT, INPUT, tokens);
    float *hidden = scratch(HIDDEN, tokens * m->down.cols * sizeof(float));
    operand inner = {.floats = hidden};
    if (m->down.bits != 32) inner.codes = quantised_scratch(QUANTISED_HIDDEN, tokens, m->down.cols);
    float *y = m->post_norm ? scratch(OUTPUT, tokens * m->down.rows * sizeof(float)) : residual;
#pragma omp parallel
    {
        prepare(&m->gate_up, residual, m->norm, m->eps, tokens, in);
        gate_all(m, in, tokens, hidden);
        if (m->down.bits != 32) prepare(&m->down, hidden, NULL, 0, tokens, inner);
        multiply_all(&m->down, inner, tokens, y, !m->post_norm);
        if (m->post_norm) add_normalised(residual, y, m->post_norm, m->eps, tokens, m->down.rows);
    }
}

// qkv [tokens, (heads + 2 kv_heads) * head_dim] is used up; out [tokens, heads * head_dim].
void em_attention(const attention *at, const step *st, const cache *kv, float *qkv, float *out) {
    int32_t row_of[st->tokens];
    int64_t tiles[st->rows + 1]; // running count of query tiles
    tiles[0] = 0;
    for (int64_t r = 0; r < st->rows; r++) {
        const int32_t first = st->query_starts[r], last = st->query_starts[r + 1];
        tiles[r + 1] = tiles[r] + (last - first + QUERY_TILE - 1) / QUERY_TILE;
        for (int32_t t = first; t < last; t++) row_of[t] = (int32_t)r;
    }
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < st->tokens; t++) prepare_token(at, st, kv, qkv, row_of[t], t);
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < tiles[st->rows] * at->kv_heads; task++) {
            int64_t tile = task / at->kv_heads, r = 0;
            while (tiles[r + 1] <= tile) r++;
            int64_t first = st->query_starts[r] + (tile - tiles[r]) * QUERY_TILE, last = first + QUERY_TILE;
            if (last > st->query_starts[r + 1]) last = st->query_starts[r + 1];
            attend_tile(at, st, kv, qkv, out, r, first, last, (int)(task % at->kv_heads));
        }
    }
}

void em_choose(const float *logits, int64_t vocab, int64_t rows, const choice *choices, int64_t *ids) {
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t r = 0; r < rows; r++) ids[r] = choose(logits + r * vocab, vocab, choices + r);
}

// --- packing: once, at load ------------------------------------------------------------------------------------------

void em_pack(const uint8_t *codes, const uint16_t *scale, const uint16_t *offset, int64_t rows, int64_t cols, int bits,
             uint8_t *panels) {
    const int64_t groups = cols / GROUP;
#pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < rows / LANES; p++)
        for (int64_t g = 0; g < groups; g++) {
            uint8_t *to = panels + (p * groups + g) * GROUP_BYTES(bits);
            uint16_t *tail = (uint16_t *)(to + (bits == 4 ? CODES4 : CODES8));
            for (int r = 0; r < LANES; r++) {
                const uint8_t *from = codes + (p * LANES + r) * cols + g * GROUP;
                uint16_t s = scale[(p * LANES + r) * groups + g], o = offset[(p * LANES + r) * groups + g];
                for (int k = 0; k < GROUP; k++) {
                    int vector = k / 4;
                    if (bits == 8) to[64 * vector + 4 * r + k % 4] = from[k] - CODE8_SHIFT;
                    else if (vector % 2 == 0) to[64 * (vector / 2) + 4 * r + k % 4] = from[k] | from[k + 4] << 4;
                }
                tail[r] = s;
                if (bits == 8 && CODE8_SHIFT) o = float_to_half(half_to_float(o) + CODE8_SHIFT * half_to_float(s));
                tail[LANES + r] = o;
            }
        }
}

void em_pack_f32(const float *w, int64_t rows, int64_t cols, float *panels) {
#pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < rows / LANES; p++)
        for (int64_t k = 0; k < cols; k++)
            for (int r = 0; r < LANES; r++) panels[(p * cols + k) * LANES + r] = w[(p * LANES + r) * cols + k];
}

// Rows of a packed matrix back as floats: the embedding look-up of tied weights.
void em_rows(const linear *w, const int32_t *ids, int64_t n, float factor, float *out) {
    const int64_t groups = w->cols / GROUP;
    for (int64_t i = 0; i < n; i++) {
        const int64_t p = ids[i] / LANES, r = ids[i] % LANES;
        float *to = out + i * w->cols;
        if (w->bits == 32) {
            const float *from = (const float *)w->panels + p * w->cols * LANES + r;
            for (int64_t k = 0; k < w->cols; k++) to[k] = from[k * LANES] * factor;
            continue;
        }
        for (int64_t g = 0; g < groups; g++) {
            const uint8_t *at = (const uint8_t *)w->panels + (p * groups + g) * GROUP_BYTES(w->bits);
            const uint16_t *tail = (const uint16_t *)(at + (w->bits == 4 ? CODES4 : CODES8));
            float scale = half_to_float(tail[r]), offset = half_to_float(tail[LANES + r]);
            for (int k = 0; k < GROUP; k++) {
                int code;
                if (w->bits == 8) code = CODE8_SHIFT ? (int8_t)at[64 * (k / 4) + 4 * r + k % 4] : at[64 * (k / 4) + 4 * r + k % 4];
                else code = at[64 * (k / 8) + 4 * r + k % 4] >> (k / 4 % 2 * 4) & 15;
                to[g * GROUP + k] = (scale * (float)code + offset) * factor;
            }
        }
    }
}
