// The layers of an encoder: bidirectional attention over packed texts, LayerNorm behind each block.
//
// Matrix products take their operands in half precision where the processor multiplies halves (ARM with FP16): twice the
// products per instruction. Sums of 32 products are halves, everything else is float. Elsewhere operands are floats.
// Every (token, row) pair gets the same sequence of operations whatever the batch.
#pragma once
#include "attention.h"
#include "gemm.h"
#include "pool.h"
#include <stdlib.h>

#if defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
typedef __fp16 operand_t;
#define ENCODER_TILE 8 // tokens per pass over a panel
#define SUM_LENGTH 32  // products that are added as halves
#else
typedef float operand_t;
#define ENCODER_TILE MAX_TILE
#endif
#define TOKEN_BLOCK 64 // tokens of a task: their operands stay in the cache while the panels pass

typedef struct {
    const operand_t *panels; // [rows / 16, cols, 16]
    const float *bias;       // [rows]
    int64_t rows, cols;      // multiples of 16
} encoder_linear;

typedef struct {
    encoder_linear qkv, output, up, down;
    const float *attention_norm[2], *norm[2]; // weight, bias
    float eps;
    int32_t heads, head_dim;
    int32_t activation; // 0: GELU, 1: GELU by tanh, 2: ReLU
} encoder_layer;

#if defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
// Eight tokens (v0 .. v7: eight columns of each) by sixteen rows (v8 .. v11), summed in v16 .. v31. In assembly, because
// GCC spills the sums.
#define FMLA(low, high, a, lane, w0, w1)                                                                               \
    "fmla v" #low ".8h, v" #w0 ".8h, v" #a ".h[" #lane "]\n fmla v" #high ".8h, v" #w1 ".8h, v" #a ".h[" #lane "]\n"
#define COLUMN(lane, w0, w1)                                                                                           \
    "ldp q" #w0 ", q" #w1 ", [%[panel]], #32\n"                                                                        \
    FMLA(16, 17, 0, lane, w0, w1) FMLA(18, 19, 1, lane, w0, w1) FMLA(20, 21, 2, lane, w0, w1)                          \
    FMLA(22, 23, 3, lane, w0, w1) FMLA(24, 25, 4, lane, w0, w1) FMLA(26, 27, 5, lane, w0, w1)                          \
    FMLA(28, 29, 6, lane, w0, w1) FMLA(30, 31, 7, lane, w0, w1)
#define CLEAR(n) "movi v" #n ".16b, #0\n"
#define SAVE(even, odd, at) "stp q" #even ", q" #odd ", [%[sums], #" #at "]\n"

static const operand_t *sum_columns(const operand_t *panel, const operand_t **x, int64_t n, operand_t *sums) {
    __asm__ volatile(
        CLEAR(16) CLEAR(17) CLEAR(18) CLEAR(19) CLEAR(20) CLEAR(21) CLEAR(22) CLEAR(23)
        CLEAR(24) CLEAR(25) CLEAR(26) CLEAR(27) CLEAR(28) CLEAR(29) CLEAR(30) CLEAR(31)
        "1: ldr q0, [%[x0]], #16\n ldr q1, [%[x1]], #16\n ldr q2, [%[x2]], #16\n ldr q3, [%[x3]], #16\n"
        "ldr q4, [%[x4]], #16\n ldr q5, [%[x5]], #16\n ldr q6, [%[x6]], #16\n ldr q7, [%[x7]], #16\n"
        COLUMN(0, 8, 9) COLUMN(1, 10, 11) COLUMN(2, 8, 9) COLUMN(3, 10, 11)
        COLUMN(4, 8, 9) COLUMN(5, 10, 11) COLUMN(6, 8, 9) COLUMN(7, 10, 11)
        "subs %[n], %[n], #8\n b.gt 1b\n"
        SAVE(16, 17, 0) SAVE(18, 19, 32) SAVE(20, 21, 64) SAVE(22, 23, 96)
        SAVE(24, 25, 128) SAVE(26, 27, 160) SAVE(28, 29, 192) SAVE(30, 31, 224)
        : [panel] "+r"(panel), [n] "+r"(n), [x0] "+r"(x[0]), [x1] "+r"(x[1]), [x2] "+r"(x[2]), [x3] "+r"(x[3]),
          [x4] "+r"(x[4]), [x5] "+r"(x[5]), [x6] "+r"(x[6]), [x7] "+r"(x[7])
        : [sums] "r"(sums)
        : "cc", "memory", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v16", "v17", "v18",
          "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31");
    return panel;
}
#undef FMLA
#undef COLUMN
#undef CLEAR
#undef SAVE

static void multiply_tile(int n, const operand_t *panel, const operand_t *x, int64_t cols, panel_out *out) {
    const operand_t *rows[ENCODER_TILE];
    operand_t sums[ENCODER_TILE * LANES] __attribute__((aligned(16)));
    for (int t = 0; t < ENCODER_TILE; t++) rows[t] = x + (t < n ? t : 0) * cols; // a token too few: its sums are unused
    for (int t = 0; t < n; t++) memset(out[t], 0, sizeof out[t]);
    for (int64_t k = 0; k < cols; k += SUM_LENGTH) {
        panel = sum_columns(panel, rows, cols - k < SUM_LENGTH ? cols - k : SUM_LENGTH, sums);
        for (int t = 0; t < n; t++)
            for (int r = 0; r < LANES; r += WIDTH)
                store(out[t] + r, load(out[t] + r) + load_half((const uint16_t *)sums + t * LANES + r));
    }
}
#else
static void multiply_tile(int n, const operand_t *panel, const operand_t *x, int64_t cols, panel_out *out) {
    tile_float(n, panel, x, cols, out);
}
#endif

INLINE vec gelu(vec x) { // by erf, with an absolute error below 2e-7
    vec z = vec_abs(x) * 0.70710678f, t = 1.f / (1.f + 0.3275911f * z);
    vec p = splat(1.061405429f);
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    vec tail = 0.5f * p * t * vec_exp(-z * z); // half of erfc(z)
    return vec_select(x < (vec){0}, x * tail, x * (1.f - tail));
}

INLINE vec activate(int32_t kind, vec x) {
    if (kind == 2) return vec_max(x, (vec){0});
    return kind == 1 ? gelu_tanh(x) : gelu(x);
}

INLINE void store_operands(operand_t *to, vec v) {
#if defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
    vst1_f16(to, vcvt_f16_f32((float32x4_t)v));
#else
    store(to, v);
#endif
}

enum { TO_FLOATS, TO_ACTIVATED, ADD_TO };

typedef struct {
    const encoder_linear *w;
    const operand_t *in;
    int64_t tokens, panels; // panels: of a task
    int32_t kind, activation;
    float *floats;     // TO_FLOATS, ADD_TO: [tokens, rows]
    operand_t *halves; // TO_ACTIVATED: [tokens, rows]
} product;

static void product_task(void *arg, int64_t task) {
    const product *job = arg;
    const encoder_linear *w = job->w;
    const int64_t all = w->rows / LANES, parts = (all + job->panels - 1) / job->panels;
    const int64_t first = task / parts * TOKEN_BLOCK, from = task % parts * job->panels;
    const int64_t last = first + TOKEN_BLOCK < job->tokens ? first + TOKEN_BLOCK : job->tokens;
    const int64_t to = from + job->panels < all ? from + job->panels : all;
    for (int64_t panel = from; panel < to; panel++)
        for (int64_t t = first; t < last; t += ENCODER_TILE) {
            const int n = last - t < ENCODER_TILE ? (int)(last - t) : ENCODER_TILE;
            panel_out y[ENCODER_TILE];
            multiply_tile(n, w->panels + panel * LANES * w->cols, job->in + t * w->cols, w->cols, y);
            for (int i = 0; i < n; i++)
                for (int c = 0; c < LANES; c += WIDTH) {
                    const int64_t at = (t + i) * w->rows + panel * LANES + c;
                    vec v = load(y[i] + c) + load(w->bias + panel * LANES + c);
                    if (job->kind == TO_FLOATS) store(job->floats + at, v);
                    else if (job->kind == ADD_TO) store(job->floats + at, load(job->floats + at) + v);
                    else store_operands(job->halves + at, activate(job->activation, v));
                }
        }
}

static void multiply_texts(product job) {
    const int64_t blocks = (job.tokens + TOKEN_BLOCK - 1) / TOKEN_BLOCK, panels = job.w->rows / LANES;
    job.panels = task_size(blocks * panels);
    if (job.panels > panels) job.panels = panels;
    const int64_t parts = (panels + job.panels - 1) / job.panels;
    parallel_for(product_task, &job, blocks * parts);
}

typedef struct {
    const encoder_layer *l;
    const float *qkv;
    operand_t *out;
    const int32_t *starts; // [texts + 1]
} text_attention;

// One head of one text: its keys as blocks [head_dim, 16], its values as rows, padded with zeros to whole blocks.
static void text_attention_task(void *arg, int64_t task) {
    const text_attention *job = arg;
    const encoder_layer *l = job->l;
    const int64_t dim = l->head_dim, width = l->heads * dim, stride = 3 * width;
    const int64_t first = job->starts[task / l->heads], length = job->starts[task / l->heads + 1] - first;
    const int64_t head = task % l->heads * dim, blocks = (length + BLOCK - 1) / BLOCK;
    const size_t bytes = blocks * BLOCK * dim * sizeof(float);
    float *keys = scratch(KEYS, bytes), *values = scratch(VALUES, bytes);
    for (int64_t t = 0; t < blocks * BLOCK; t++) {
        const float *k = job->qkv + (first + t) * stride + width + head;
        float *to = keys + t / BLOCK * dim * BLOCK + t % BLOCK;
        if (t < length) {
            for (int64_t d = 0; d < dim; d++) to[d * BLOCK] = k[d];
            memcpy(values + t * dim, k + width, dim * sizeof(float));
        } else {
            for (int64_t d = 0; d < dim; d++) to[d * BLOCK] = 0.f;
            memset(values + t * dim, 0, dim * sizeof(float));
        }
    }
    const float scale = 1.f / sqrtf((float)dim);
    for (int64_t at = 0; at < length; at += TILE_ROWS) {
        const int n = length - at < TILE_ROWS ? (int)(length - at) : TILE_ROWS;
        float scaled[TILE_ROWS][MAX_HEAD_DIM], sums[TILE_ROWS][MAX_HEAD_DIM], best[TILE_ROWS], total[TILE_ROWS];
        float rescale[TILE_ROWS];
        const float *q[TILE_ROWS];
        span_row p[TILE_ROWS];
        for (int i = 0; i < n; i++) {
            const float *from = job->qkv + (first + at + i) * stride + head;
            for (int64_t d = 0; d < dim; d += WIDTH) {
                store(scaled[i] + d, load(from + d) * scale);
                store(sums[i] + d, (vec){0});
            }
            q[i] = scaled[i];
            best[i] = -1e30f;
            total[i] = 0.f;
        }
        for (int64_t j = 0; j < blocks; j += SPAN) {
            const int64_t end = j + SPAN < blocks ? j + SPAN : blocks, seen = (end - j) * BLOCK;
            for (int64_t b = j; b < end; b++) {
#define TEXT_SCORES(N) scores(N, q, keys + b * dim * BLOCK, dim, p, (b - j) * BLOCK)
                DISPATCH_ROWS(n, TEXT_SCORES)
#undef TEXT_SCORES
            }
            for (int i = 0; i < n; i++)
                rescale[i] = softmax_span(p[i], j * BLOCK, seen, 0, (int32_t)length - 1, &best[i], &total[i]);
#define ADD_VALUES(N) accumulate(N, p, rescale, values + j * BLOCK * dim, seen, dim, sums)
            DISPATCH_ROWS(n, ADD_VALUES)
#undef ADD_VALUES
        }
        for (int i = 0; i < n; i++)
            for (int64_t d = 0; d < dim; d += WIDTH)
                store_operands(job->out + (first + at + i) * width + head + d, load(sums[i] + d) / total[i]);
    }
}

typedef struct {
    float *x;
    operand_t *out; // the same, as the next product's operand
    const float *weight, *bias;
    float eps;
    int64_t tokens, cols, size;
} layer_norm;

static void layer_norm_task(void *arg, int64_t task) {
    const layer_norm *job = arg;
    const int64_t n = job->cols;
    EACH(t, job->tokens) {
        float *x = job->x + t * n;
        vec added = {0}, squares = {0};
        for (int64_t i = 0; i < n; i += WIDTH) added += load(x + i);
        const float mean = sum(added) / (float)n;
        for (int64_t i = 0; i < n; i += WIDTH) {
            vec d = load(x + i) - mean;
            squares += d * d;
        }
        const float inverse = 1.f / sqrtf(sum(squares) / (float)n + job->eps);
        for (int64_t i = 0; i < n; i += WIDTH) {
            vec v = (load(x + i) - mean) * inverse * load(job->weight + i) + load(job->bias + i);
            store(x + i, v);
            store_operands(job->out + t * n + i, v);
        }
    }
}

static void norm_texts(float *x, operand_t *out, const float *const *norm, float eps, int64_t tokens, int64_t cols) {
    layer_norm job = {x, out, norm[0], norm[1], eps, tokens, cols, task_size(tokens)};
    parallel_for(layer_norm_task, &job, (tokens + job.size - 1) / job.size);
}
