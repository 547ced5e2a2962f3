/* Declarations shared by the files of the library. */
#ifndef QUIRE_INNER_H
#define QUIRE_INNER_H

#include "quire.h"

enum { MAX_THREADS = 256 };

typedef void (*quire_task)(void *context, int unit, int thread);

/* Runs task(context, unit, thread) for unit in [0, num_units) on all threads, and returns when all are done. */
void quire_run(quire_engine *engine, quire_task task, void *context, int num_units);
/* Working memory: one area for the step, one for each thread. At least `num_bytes`, 64-byte aligned. NULL: out of
   memory. The content is lost when it grows. */
void *quire_shared_memory(quire_engine *engine, size_t num_bytes);
void *quire_own_memory(quire_engine *engine, int thread);
int quire_reserve_own(quire_engine *engine, size_t num_bytes);

typedef struct { /* 4 inputs, rounded on their own; their group holds the rounding errors */
    int8_t q[STEP];
    float scale;
    int32_t group, step; /* and the step within the group */
} quire_refined;

/* Activations of M rows, in groups of 32 rounded to 8 bits. The last group is padded with zeros. */
typedef struct {
    int32_t num_rows, num_groups, num_refined;
    int32_t num_copies; /* C: 1, or 2 if each row is followed by its rounding errors, as a row of its own */
    int8_t *q;         /* [M, C, G, 32] */
    float *scales;     /* [M, C, G] */
    float *sums;       /* [M, C, G]: sums of the rounded numbers, so that the rounding errors of a weight's minimum and
                          code cancel */
    quire_refined *refined; /* [M, R], in ascending order */
    int32_t *keys;     /* [M, steps]: working memory for choosing the refined steps */
} quire_input;

typedef struct { /* one KV head of a layer */
    int num_heads; /* query heads that share it */
    int head_size, block_size;
    int key_stride;   /* keys of a block in memory: whole vectors */
    int score_stride; /* the same for scores, which are computed WIDTH at a time */
    int head_stride;  /* the same for values in memory and for their weighted sums */
    float scale, cap;
    int window;
    int piece_blocks; /* blocks of a piece of the context */
    int is_half; /* arithmetic may be fp16 if that is faster */
    const float *sinks; /* [heads], or NULL: logits of keys without a value */
    const uint16_t *layer; /* the layer's blocks, starting at this head's keys */
    size_t block_halves, values_at;
} attention_shape;

enum { MAX_QUERIES = 16 };

typedef struct { /* consecutive rows of one sequence */
    int count, position; /* position of the first row */
    const int32_t *table;
    size_t q_stride, out_stride;
    int first_piece, last_piece; /* pieces to process; the last one is excluded */
    float *records; /* [pieces, rows, heads, record]: states for `merge`, written instead of the result; or NULL */
} attention_rows;

/* Floats of a record, the state of one head of a query: weighted values [head stride], peak, sum, and padding. */
static inline size_t record_floats(const attention_shape *shape) { return (size_t)shape->head_stride + 8; }

/* Returns the first key that a query sees. */
static inline int first_key(const attention_shape *shape, int position) {
    return shape->window && position >= shape->window ? position - shape->window + 1 : 0;
}

typedef struct { /* of a convolution over C channels */
    const float *weight, *bias; /* [taps, C]; [C] or NULL */
    size_t channels;
    int num_taps, has_silu;
    int before, after; /* from a number to the factors of its input and of its output; 0: none */
} conv_shape;

typedef struct { /* consecutive rows, and the inputs before and after them: [taps - 1, C] */
    float *x;
    size_t stride;
    int count;
    const float *old;
    float *new;
} conv_rows;

typedef struct {
    int key_size, value_size;
} delta_shape;

typedef struct { /* consecutive rows of one head; all pointers are to the first row */
    int count;
    size_t stride;
    const float *q, *k, *decay, *beta;
    float *v;     /* replaced by the output */
    float *state; /* [key size, value size] */
} delta_rows;

/* Floats of scratch memory for `delta`: some columns of a state. */
static inline size_t delta_scratch(int key_size) { return 64 * (size_t)key_size; }

/* One variant of the hot loops, compiled for one instruction set. */
typedef struct {
    const char *name;
    int (*is_supported)(void);
    /* `count` rows of a matrix, from consecutive panels, times all rows of the input; writes `count` columns to y
       [M, stride]. */
    void (*panels)(
        const uint8_t *w, int kind, const quire_input *x, float *scratch, float *y, size_t stride, int count);
    int at_once; /* panels that a vector holds: units of work are multiples of it */
    void (*quantize)(const float *x, int count, quire_input *out, int row);
    void (*norm)(float *x, const float *y, const float *weight, int count, float eps, float *out);
    void (*gate)(float *gate, const float *up, int count, int activation);
    void (*rotate)(float *x, const float *cosines, const float *sines, int half);
    void (*add)(float *x, const float *y, int count);
    /* Dot products of `weight` with each of `num_rows` rows of x, written `out_stride` apart. */
    void (*dot)(const float *weight, const float *x, size_t stride, int num_rows, int count, float *out,
                size_t out_stride);
    void (*halve)(const float *x, int count, uint16_t *out);
    size_t (*attend_scratch)(const attention_shape *shape);
    void (*attend)(const attention_shape *shape, const attention_rows *rows, const float *q, float *scratch, float *out);
    void (*merge)(const attention_shape *shape, const attention_rows *rows, float *out);
    void (*convolve)(const conv_shape *shape, const conv_rows *rows, int first, int last);
    void (*unit)(float *x, int count, float eps, float scale);
    void (*delta)(const delta_shape *shape, const delta_rows *rows, int first, int last, float *scratch);
} quire_variant;

/* Fills a variant: the file's own products, and the functions of rows.h, attention.h and recurrence.h as compiled there. */
#define VARIANT(name, is_supported, panels) \
    { \
        name, is_supported, panels, (int)LANES > (int)PANEL ? (int)LANES / (int)PANEL : 1, quantize_row, norm_row, \
            gate_row, rotate_head, add_row, dot_rows, halve_row, attend_scratch, attend, merge_pieces, \
            convolve, unit_row, delta \
    }

/* Floats of scratch memory per group that `panels` may use: for the expanded bytes, scales and minima of two panels, and
   for a changed copy of some inputs. */
enum { SCRATCH_FLOATS = 2 * (64 + 32) + 128 };
enum { LOOKED_UP_FLOATS = 2 * 68 }; /* more for two panels of nibbles as signed bytes */
static inline size_t panel_scratch(int num_groups) { return (size_t)num_groups * (SCRATCH_FLOATS + LOOKED_UP_FLOATS); }

const quire_variant *quire_variant_now(void);
int quire_check_variant(const quire_variant *variant); /* 1: its results are correct */

static inline int ceil_div(int a, int b) { return (a + b - 1) / b; }
static inline int panel_bytes(int kind) { /* bytes of one group */
    return kind == QUIRE_Q4 ? 160 : kind == QUIRE_Q8 ? 272 : 144;
}
/* Values of the nibbles of F4 and S4. 4-bit floats (E2M1) have a sign, two bits of exponent and one of mantissa, and are
   doubled. */
static const int8_t QUIRE_FLOAT4_VALUES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
static const int8_t QUIRE_SIGNED4_VALUES[16] = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
static inline const int8_t *nibble_values(int kind) {
    return kind == QUIRE_F4 ? QUIRE_FLOAT4_VALUES : QUIRE_SIGNED4_VALUES;
}
/* If all steps are refined, each row is two rows instead, which can share the bytes of a matrix. */
static inline int num_copies(int refine) { return refine < 256 ? 1 : 2; }
static inline int num_refined(int num_groups, int refine) {
    return refine < 256 ? (num_groups * STEPS * refine + 255) / 256 : 0;
}

#endif
