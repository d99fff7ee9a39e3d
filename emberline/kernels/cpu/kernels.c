// CPU kernels: the operations of a transformer layer, and all layers of a step in one call.
#include "attention.h"
#include "byte_planes.h"
#include "copies.h"
#include "gemm.h"
#include "pool.h"
#include "rows.h"
#include "sampling.h"
#include "suffix_index.h"
#include "unpack.h"
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

#define MIN_PARALLEL_TOKENS 2 // at most so many tokens are prepared by the calling thread alone

typedef struct {
    linear qkv, output;
    const float *norm, *post_norm; // post_norm: or null
    float eps;
    int32_t group; // index of the KV group
    attention attention;
    mlp mlp;
} layer;

enum { INPUT, HIDDEN, OUTPUT, QUANTIZED_INPUT, QUANTIZED_HIDDEN, QKV, ATTENDED, KEYS, VALUES, SLOTS };

// Scratch memory of the calling thread by purpose; grows, never shrinks, is freed when the thread ends.
static _Thread_local struct {
    void *memory[SLOTS];
    size_t size[SLOTS];
} thread_scratch;
static pthread_key_t scratch_key; // its value, the thread's `memory`, makes free_scratch run at the thread's end
static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;

static void free_scratch(void *memory) {
    for (int slot = 0; slot < SLOTS; slot++) free(((void **)memory)[slot]);
}

static void make_scratch_key(void) {
    if (pthread_key_create(&scratch_key, free_scratch)) abort();
}

static void *scratch(int slot, size_t bytes) {
    void **memory = thread_scratch.memory;
    if (bytes > thread_scratch.size[slot]) {
        pthread_once(&scratch_once, make_scratch_key);
        if (pthread_setspecific(scratch_key, memory)) abort();
        free(memory[slot]);
        if (posix_memalign(&memory[slot], 64, bytes)) abort();
        thread_scratch.size[slot] = bytes;
    }
    return memory[slot];
}

static quantized quantized_scratch(int slot, int64_t tokens, int64_t cols) {
    int64_t codes = (tokens * cols + 63) / 64 * 64, groups = tokens * cols / GROUP;
    int8_t *at = scratch(slot, codes + 2 * groups * sizeof(float));
    return (quantized){at, (float *)(at + codes), (float *)(at + codes) + groups, cols};
}

typedef struct { // activations: 8-bit codes for quantized weights, floats for float weights
    quantized codes;
    float *floats;
} operand;

static operand operand_scratch(const linear *w, int codes_slot, int floats_slot, int64_t tokens) {
    if (w->bits == 32) return (operand){.floats = scratch(floats_slot, tokens * w->cols * sizeof(float))};
    return (operand){.codes = quantized_scratch(codes_slot, tokens, w->cols)};
}

typedef struct {
    const linear *w;
    operand in;
    int64_t tokens;
    const float *x, *norm; // for prepare
    float eps;
    float *out; // for multiply
    int add;
    const mlp *gated; // for gate
    int64_t size; // units (tokens, panels) per task
} work;

#define EACH(unit, all) \
    for (int64_t unit = task * job->size, end = unit + job->size < (all) ? unit + job->size : (all); unit < end; unit++)

#include "encoder.h"

static void prepare_task(void *arg, int64_t task) {
    const work *job = arg;
    const int64_t cols = job->w->cols;
    EACH(t, job->tokens) {
        float row[cols] __attribute__((aligned(64)));
        const float *from = job->x + t * cols;
        if (job->norm) {
            memcpy(row, from, cols * sizeof(float));
            rms_norm(row, job->norm, cols, job->eps);
            from = row;
        }
        if (job->w->bits == 32) memcpy(job->in.floats + t * cols, from, cols * sizeof(float));
        else quantize_row(from, job->in.codes, t);
    }
}

// Norms (or copies) each token's row and converts it to the matrix's operand format.
static void prepare(const linear *w, const float *x, const float *norm, float eps, int64_t tokens, operand to) {
    work job = {.w = w, .in = to, .tokens = tokens, .x = x, .norm = norm, .eps = eps, .size = tokens};
    if (tokens > MIN_PARALLEL_TOKENS) job.size = task_size(tokens);
    parallel_for(prepare_task, &job, (tokens + job.size - 1) / job.size);
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

static int tile_tokens(int64_t tokens) { // equal tiles rather than full ones and a remainder
    int64_t tiles = (tokens + MAX_TILE - 1) / MAX_TILE;
    return (int)((tokens + tiles - 1) / tiles);
}

static void multiply_task(void *arg, int64_t task) {
    const work *job = arg;
    const linear *w = job->w;
    const int tile = tile_tokens(job->tokens);
    EACH(panel, w->rows / LANES)
    for (int64_t t = 0; t < job->tokens; t += tile) {
        int n = job->tokens - t < tile ? (int)(job->tokens - t) : tile;
        panel_out y[MAX_TILE];
        multiply(w, job->in, panel, t, n, y);
        for (int i = 0; i < n; i++)
            for (int c = 0; c < LANES; c += WIDTH) {
                float *to = job->out + (t + i) * w->rows + panel * LANES + c;
                vec v = load(y[i] + c);
                if (w->bias) v += load(w->bias + panel * LANES + c);
                store(to, job->add ? load(to) + v : v);
            }
    }
}

static void multiply_all(const linear *w, operand in, int64_t tokens, float *out, int add) {
    const int64_t panels = w->rows / LANES, size = task_size(panels);
    work job = {.w = w, .in = in, .tokens = tokens, .out = out, .add = add, .size = size};
    parallel_for(multiply_task, &job, (panels + size - 1) / size);
}

static void gate_task(void *arg, int64_t task) {
    const work *job = arg;
    const mlp *m = job->gated;
    const int tile = tile_tokens(job->tokens);
    EACH(panel, m->down.cols / LANES)
    for (int64_t t = 0; t < job->tokens; t += tile) {
        int n = job->tokens - t < tile ? (int)(job->tokens - t) : tile;
        panel_out gate[MAX_TILE], up[MAX_TILE];
        multiply(&m->gate_up, job->in, 2 * panel, t, n, gate);
        multiply(&m->gate_up, job->in, 2 * panel + 1, t, n, up);
        for (int i = 0; i < n; i++)
            for (int c = 0; c < LANES; c += WIDTH) {
                vec g = load(gate[i] + c);
                g = m->gelu ? gelu_tanh(g) : silu(g);
                store(job->out + (t + i) * m->down.cols + panel * LANES + c, g * load(up[i] + c));
            }
    }
}

static void gate_all(const mlp *m, operand in, int64_t tokens, float *hidden) {
    const int64_t panels = m->down.cols / LANES, size = task_size(panels);
    work job = {.gated = m, .in = in, .tokens = tokens, .out = hidden, .size = size};
    parallel_for(gate_task, &job, (panels + size - 1) / size);
}

static void add_rms_norm(float *x, float *y, const float *norm, float eps, int64_t tokens, int64_t n) {
    for (int64_t t = 0; t < tokens; t++) {
        rms_norm(y + t * n, norm, n, eps);
        for (int64_t i = t * n; i < (t + 1) * n; i += WIDTH) store(x + i, load(x + i) + load(y + i));
    }
}

void em_threads(int n) { set_threads(n); }

// out = norm(x) W' + bias; norm may be null.
void em_linear(const linear *w, const float *norm, float eps, const float *x, int64_t tokens, float *out) {
    if (!tokens) return;
    operand in = operand_scratch(w, QUANTIZED_INPUT, INPUT, tokens);
    prepare(w, x, norm, eps, tokens, in);
    multiply_all(w, in, tokens, out, 0);
}

// residual += x W', or residual += post_norm(x W').
void em_linear_add(const linear *w, const float *post_norm, float eps, const float *x, int64_t tokens, float *residual) {
    if (!tokens) return;
    operand in = operand_scratch(w, QUANTIZED_INPUT, INPUT, tokens);
    float *y = post_norm ? scratch(OUTPUT, tokens * w->rows * sizeof(float)) : residual;
    prepare(w, x, NULL, 0, tokens, in);
    multiply_all(w, in, tokens, y, !post_norm);
    if (post_norm) add_rms_norm(residual, y, post_norm, eps, tokens, w->rows);
}

// residual += down(act(gate(norm(residual))) * up(norm(residual))), with a norm after it where post_norm is set.
void em_mlp(const mlp *m, float *residual, int64_t tokens) {
    if (!tokens) return;
    operand in = operand_scratch(&m->gate_up, QUANTIZED_INPUT, INPUT, tokens);
    float *hidden = scratch(HIDDEN, tokens * m->down.cols * sizeof(float));
    operand inner = {.floats = hidden};
    if (m->down.bits != 32) inner.codes = quantized_scratch(QUANTIZED_HIDDEN, tokens, m->down.cols);
    float *y = m->post_norm ? scratch(OUTPUT, tokens * m->down.rows * sizeof(float)) : residual;
    prepare(&m->gate_up, residual, m->norm, m->eps, tokens, in);
    gate_all(m, in, tokens, hidden);
    if (m->down.bits != 32) prepare(&m->down, hidden, NULL, 0, tokens, inner);
    multiply_all(&m->down, inner, tokens, y, !m->post_norm);
    if (m->post_norm) add_rms_norm(residual, y, m->post_norm, m->eps, tokens, m->down.rows);
}

typedef struct {
    const attention *at;
    const step *st;
    const cache *kv;
    float *qkv, *out;
    const int32_t *row_of; // [tokens]
    const int64_t *tiles;  // [rows + 1], running count of query tiles
    int64_t size;
} attention_job;

static void rope_task(void *arg, int64_t task) {
    const attention_job *job = arg;
    EACH(t, job->st->tokens) prepare_token(job->at, job->st, job->kv, job->qkv, job->row_of[t], t);
}

static void attend_task(void *arg, int64_t task) {
    const attention_job *job = arg;
    const int32_t *starts = job->st->query_starts;
    const int64_t tile = task / job->at->kv_heads;
    int64_t row = 0;
    while (job->tiles[row + 1] <= tile) row++;
    int64_t first = starts[row] + (tile - job->tiles[row]) * QUERY_TILE, last = first + QUERY_TILE;
    if (last > starts[row + 1]) last = starts[row + 1];
    attend_tile(job->at, job->st, job->kv, job->qkv, job->out, row, first, last, (int)(task % job->at->kv_heads));
}

// qkv [tokens, (heads + 2 kv_heads) * head_dim] is overwritten; out [tokens, heads * head_dim].
void em_attention(const attention *at, const step *st, const cache *kv, float *qkv, float *out) {
    if (!st->tokens) return;
    int32_t row_of[st->tokens];
    int64_t tiles[st->rows + 1];
    tiles[0] = 0;
    for (int64_t r = 0; r < st->rows; r++) {
        const int32_t first = st->query_starts[r], last = st->query_starts[r + 1];
        tiles[r + 1] = tiles[r] + (last - first + QUERY_TILE - 1) / QUERY_TILE;
        for (int32_t t = first; t < last; t++) row_of[t] = (int32_t)r;
    }
    attention_job job = {at, st, kv, qkv, out, row_of, tiles,
                         st->tokens > MIN_PARALLEL_TOKENS ? task_size(st->tokens) : st->tokens};
    parallel_for(rope_task, &job, (st->tokens + job.size - 1) / job.size);
    parallel_for(attend_task, &job, tiles[st->rows] * at->kv_heads);
}

// Applies all layers of a model to x [tokens, hidden].
void em_layers(const layer *const *layers, int64_t n, const step *st, const cache *caches, float *x) {
    for (int64_t i = 0; i < n; i++) {
        const layer *l = layers[i];
        float *qkv = scratch(QKV, st->tokens * l->qkv.rows * sizeof(float));
        float *attended = scratch(ATTENDED, st->tokens * l->output.cols * sizeof(float));
        em_linear(&l->qkv, l->norm, l->eps, x, st->tokens, qkv);
        em_attention(&l->attention, st, caches + l->group, qkv, attended);
        em_linear_add(&l->output, l->post_norm, l->eps, attended, st->tokens, x);
        em_mlp(&l->mlp, x, st->tokens);
    }
}

// All layers of an encoder, over x [tokens, hidden]: embeddings before their norm in, hidden states out.
void em_encode(const encoder_layer *const *layers, int64_t n, const float *const *norm, float eps, int64_t texts,
               const int32_t *starts, float *x) {
    const int64_t tokens = starts[texts], hidden = layers[0]->output.rows;
    operand_t *in = scratch(INPUT, tokens * hidden * sizeof(operand_t));
    norm_texts(x, in, norm, eps, tokens, hidden);
    for (int64_t i = 0; i < n; i++) {
        const encoder_layer *l = layers[i];
        float *qkv = scratch(QKV, tokens * l->qkv.rows * sizeof(float));
        operand_t *attended = scratch(ATTENDED, tokens * hidden * sizeof(operand_t));
        operand_t *inner = scratch(HIDDEN, tokens * l->up.rows * sizeof(operand_t));
        multiply_texts((product){.w = &l->qkv, .in = in, .tokens = tokens, .kind = TO_FLOATS, .floats = qkv});
        text_attention job = {l, qkv, attended, starts};
        for (int64_t done = 0; done < texts; done += MAX_TASKS / l->heads) { // so many texts at a time
            const int64_t left = texts - done, most = MAX_TASKS / l->heads;
            job.starts = starts + done;
            parallel_for(text_attention_task, &job, (left < most ? left : most) * l->heads);
        }
        multiply_texts((product){.w = &l->output, .in = attended, .tokens = tokens, .kind = ADD_TO, .floats = x});
        norm_texts(x, in, l->attention_norm, l->eps, tokens, hidden);
        multiply_texts((product){.w = &l->up, .in = in, .tokens = tokens, .kind = TO_ACTIVATED,
                                 .activation = l->activation, .halves = inner});
        multiply_texts((product){.w = &l->down, .in = inner, .tokens = tokens, .kind = ADD_TO, .floats = x});
        norm_texts(x, in, l->norm, l->eps, tokens, hidden);
    }
}

int64_t em_encoder_operand_bytes(void) { return sizeof(operand_t); }

void em_pack_encoder(const float *w, int64_t rows, int64_t cols, operand_t *panels) {
    for (int64_t p = 0; p < rows / LANES; p++)
        for (int64_t k = 0; k < cols; k++)
            for (int r = 0; r < LANES; r++)
                panels[(p * cols + k) * LANES + r] = (operand_t)w[(p * LANES + r) * cols + k];
}

typedef struct {
    float *logits;
    const choice *choices;
    int64_t vocab, *ids;
} choose_job;

static void choose_task(void *arg, int64_t r) {
    const choose_job *job = arg;
    job->ids[r] = choose(job->logits + r * job->vocab, job->vocab, job->choices + r);
}

void em_choose(float *logits, int64_t vocab, int64_t rows, const choice *choices, int64_t *ids) {
    choose_job job = {logits, choices, vocab, ids};
    parallel_for(choose_task, &job, rows);
}

// --- packing: once, at load ------------------------------------------------------------------------------------------

// Subtracted from a group's 8-bit codes where the dot product instruction needs signed bytes; the offset compensates.
static int code_shift(const uint8_t *codes) {
    for (int k = 0; SIGNED_CODES && k < GROUP; k++)
        if (codes[k] > 127) return 128;
    return 0;
}

typedef struct {
    const uint8_t *codes;
    const uint16_t *scale, *offset;
    int64_t cols;
    int bits;
    uint8_t *panels;
} pack_job;

static void pack_panel(void *arg, int64_t p) {
    const pack_job *job = arg;
    const int64_t cols = job->cols, groups = cols / GROUP;
    const int bits = job->bits;
    for (int64_t g = 0; g < groups; g++) {
        uint8_t *to = job->panels + (p * groups + g) * GROUP_BYTES(bits);
        uint16_t *tail = (uint16_t *)(to + (bits == 4 ? CODES4 : CODES8));
        for (int r = 0; r < LANES; r++) {
            const uint8_t *from = job->codes + (p * LANES + r) * cols + g * GROUP;
            const int64_t at = (p * LANES + r) * groups + g;
            const uint16_t scale = job->scale[at], offset = job->offset[at];
            const int shift = code_shift(from);
            uint32_t words[GROUP / 4]; // four codes each
            memcpy(words, from, GROUP);
            if (bits == 8)
                for (int w = 0; w < GROUP / 4; w++) {
                    const uint32_t word = shift ? words[w] ^ 0x80808080u : words[w]; // 128 less, byte by byte
                    memcpy(to + 64 * w + 4 * r, &word, 4);
                }
            else
                for (int w = 0; w < GROUP / 4; w += 2) {
                    const uint32_t word = words[w] | words[w + 1] << 4;
                    memcpy(to + 32 * w + 4 * r, &word, 4);
                }
            tail[r] = scale;
            tail[LANES + r] = offset;
            if (shift) tail[LANES + r] = float_to_half(half_to_float(offset) + shift * half_to_float(scale));
        }
    }
}

void em_pack(const uint8_t *codes, const uint16_t *scale, const uint16_t *offset, int64_t rows, int64_t cols, int bits,
             uint8_t *panels) {
    pack_job job = {codes, scale, offset, cols, bits, panels};
    parallel_for(pack_panel, &job, rows / LANES);
}

void em_unpack(int kind, const uint8_t *blocks, int64_t rows, int64_t cols, uint8_t *codes, uint16_t *scale,
               uint16_t *offset) {
    unpack_job job = {kind, blocks, cols, codes, scale, offset};
    parallel_for(unpack_row, &job, rows);
}

void em_pack_f32(const float *w, int64_t rows, int64_t cols, float *panels) {
    for (int64_t p = 0; p < rows / LANES; p++)
        for (int64_t k = 0; k < cols; k++)
            for (int r = 0; r < LANES; r++) panels[(p * cols + k) * LANES + r] = w[(p * LANES + r) * cols + k];
}

// Rows of a packed matrix as floats: the embedding lookup.
void em_embedding(const linear *w, const int32_t *ids, int64_t n, float factor, float *out) {
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
                if (w->bits == 8) code = code8(at[64 * (k / 4) + 4 * r + k % 4]);
                else code = at[64 * (k / 8) + 4 * r + k % 4] >> (k / 4 % 2 * 4) & 15;
                to[g * GROUP + k] = (scale * (float)code + offset) * factor;
            }
        }
    }
}
