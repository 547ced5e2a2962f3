/* Between the files of the library. */
#ifndef QUIRE_INNER_H
#define QUIRE_INNER_H

#include "quire.h"

enum { MAX_THREADS = 256 };

typedef void (*quire_task)(void *context, int unit, int thread);

/* Runs task(context, unit, thread) for unit in [0, num_units), on all threads; returns when all are done. */
void quire_run(quire_engine *engine, quire_task task, void *context, int num_units);
/* Working memory: one for the step, one for each thread. At least so many bytes, 64-byte aligned; NULL: no memory.
   What was in it before is lost when it grows. */
void *quire_shared_memory(quire_engine *engine, size_t num_bytes);
void *quire_own_memory(quire_engine *engine, int thread);
int quire_reserve_own(quire_engine *engine, size_t num_bytes);

/* Activations of M rows, cut into groups of 32 and rounded to 8 bits. Groups padded with zeros. */
typedef struct {
    int32_t num_rows, num_groups, num_refined;
    int8_t *q;         /* [M, G, 32] */
    float *scales;     /* [M, G] */
    float *sums;       /* [M, G]: of the numbers as rounded, so that what rounding does to a weight's minimum and to its
                          code cancels */
    int8_t *rest;      /* [M, R, 32]: of the refined groups, what rounding left */
    float *rest_scales; /* [M, R] */
    int32_t *refined;  /* [M, R]: which groups, ascending */
    int32_t *keys, *ranks; /* [M, G]: how they were chosen */
} quire_input;

typedef struct { /* of one KV head of a layer */
    int num_heads; /* query heads that share it */
    int head_size, block_size;
    int key_stride;   /* keys of a block in memory: whole vectors */
    int score_stride; /* the same for scores, which are made WIDTH at a time */
    int head_stride;  /* values in memory, and mixes: likewise */
    float scale, cap;
    int window;
    int is_half; /* arithmetic may be fp16, where that is faster */
    const uint16_t *layer; /* its blocks, from this head's keys on */
    size_t block_halves, values_at;
} attention_shape;

enum { MAX_QUERIES = 16 };

typedef struct { /* some rows of one sequence, one after the other */
    int count, position; /* of the first */
    const int32_t *table;
    size_t q_stride, out_stride;
} attention_rows;

enum { MAX_STREAMED = 2 }; /* rows */

/* One variant of the hot loops, compiled for some instruction set. */
typedef struct {
    const char *name;
    int (*is_supported)(void);
    /* 8 rows of a matrix times all rows of the input; y [M, stride], `count` of the 8 columns are written. */
    void (*panel)(const uint8_t *w, int kind, const quire_input *x, float *scratch, float *y, size_t stride, int count);
    /* The same for one or two rows and as many columns as there are, from panels that lie one after the other. NULL: as
       any other product. */
    void (*stream)(const uint8_t *w, int kind, const quire_input *x, float *y, size_t stride, int count);
    void (*quantize)(const float *x, int count, quire_input *out, int row);
    void (*norm)(float *x, const float *y, const float *weight, int count, float eps, float *out);
    void (*gate)(float *gate, const float *up, int count, int activation);
    void (*rotate)(float *x, const float *cosines, const float *sines, int half);
    void (*add)(float *x, const float *y, int count);
    size_t (*attend_scratch)(const attention_shape *shape);
    void (*attend)(const attention_shape *shape, const attention_rows *rows, const float *q, float *scratch, float *out);
} quire_variant;

/* What every variant file ends with: its own products, and the rest as rows.h and attention.h compile there. */
#define VARIANT(name, is_supported, panel, stream) \
    {name, is_supported, panel, stream, quantize_row, norm_row, gate_row, rotate_head, add_row, attend_scratch, attend}

/* floats of scratch that a panel may use for each group: bytes, scales, minima and what goes with them, expanded */
enum { SCRATCH_FLOATS = 64 + 24 };
static inline size_t panel_scratch(int num_groups) { return (size_t)num_groups * SCRATCH_FLOATS; }

const quire_variant *quire_variant_now(void);
int quire_check_variant(const quire_variant *variant); /* 1: it computes what it should */

static inline int ceil_div(int a, int b) { return (a + b - 1) / b; }
static inline int panel_bytes(int kind) { return kind == QUIRE_Q4 ? 160 : 272; } /* of a group */
static inline int num_refined(int num_groups, int refine) { return (num_groups * refine + 255) / 256; }

#endif
