/* The state of one forward pass, shared by forward.c and experts.c. */
#ifndef QUIRE_PASS_H
#define QUIRE_PASS_H

#include "inner.h"

enum { UNITS_PER_THREAD = 4 }; /* units of a product per thread, so that one delayed thread does not delay the others */
enum { ROWS_PER_UNIT = 4 };

typedef struct { /* a range of pieces of a tile, for all KV heads */
    int32_t tile, first_piece, last_piece, is_divided; /* whether other parts have the tile's other pieces */
    size_t records; /* position of its records, if so */
} attention_part;

typedef struct { /* some panels of an expert's matrix */
    int32_t expert, first, last;
} expert_unit;

/* Routing of R rows to C of N experts each. A choice is one row for one expert. Choices are sorted by expert. */
typedef struct {
    int first_row, num_rows; /* R rows of the batch */
    float *scores, *keys;    /* [R, N]: weights before they are divided, and the numbers that experts are chosen by */
    int32_t *chosen;         /* [R, C]: experts, in the order of their scores */
    float *weights;          /* [R, C] */
    int32_t *places;         /* [R, C]: position of the choice after sorting */
    int32_t *rows;           /* [R * C]: row of each sorted choice */
    int32_t *first_choices;  /* [N + 1]: first sorted choice of each expert */
    expert_unit *units;      /* [num_units] */
    int num_units;
    quire_input input; /* [R * C rows] */
    float *inner;      /* [R * C, 2, F] */
    float *outputs;    /* [R * C, E] */
} routing;

typedef struct {
    quire_engine *engine;
    const quire_variant *run;
    const quire_model *model;
    const quire_batch *batch;
    float *x;      /* [T, E]: the residual stream */
    float *inner;  /* [T, largest output of a product] */
    float *mixed;  /* [T, max(H * D, E)]: output of attention, and of products */
    float *normed; /* [T, E]: input of the next product */
    quire_input input; /* the same, rounded */
    int32_t *sequences; /* [T]: the sequence of each row */
    int32_t *tiles;     /* [tiles]: first row of each */
    int num_tiles;
    attention_part *parts; /* [parts] */
    int32_t *merges;       /* [merges]: first part of each divided tile */
    float *records;        /* [max_records]: states of the pieces of divided tiles */
    size_t max_records;
    int num_parts, num_merges;
    const quire_layer *divided; /* a layer that the parts are for, or NULL */
    routing routed;
    float *dense, *scored; /* [T, E]: output of the MLP beside experts, and input of their router */
    float *embeddings;     /* [T, layers, P]: embeddings of each layer */
} pass;

static inline int largest(int a, int b) { return a > b ? a : b; }
static inline int smallest(int a, int b) { return a < b ? a : b; }

static inline void set_input(quire_input *input, int num_rows, int cols, int refine) {
    input->num_rows = num_rows;
    input->num_groups = ceil_div(cols, GROUP);
    input->num_refined = num_refined(input->num_groups, refine);
    input->num_copies = num_copies(refine);
}

/* Returns some rows of an input. */
static inline quire_input view_rows(const quire_input *input, int first, int count) {
    const size_t cells = (size_t)first * (size_t)(input->num_groups * input->num_copies);
    quire_input rows = *input;
    rows.num_rows = count;
    rows.q += cells * GROUP;
    rows.scales += cells;
    rows.sums += cells;
    rows.refined += (size_t)first * (size_t)input->num_refined;
    return rows;
}

/* Returns the largest share of refined steps. */
static inline int most_refined(const quire_model *model) {
    const int mixer = largest(model->refine.qkv, model->refine.o), mlp = largest(model->refine.gate_up, model->refine.down);
    return largest(largest(mixer, mlp), model->refine.head);
}

/* Working memory is laid out twice: without a base, only to return its size. */
size_t carve(void *base, size_t *used, size_t num_bytes, void **out);
size_t lay_input(quire_input *input, void *base);

/* Multiplies panels [first, last) of the parts, as if they were one matrix, with all rows of the input. */
void multiply_range(
    const quire_variant *run, const quire_linear *linear, const quire_input *input, int first, int last, float *scratch,
    float *y, int stride);

static inline int num_outputs(const quire_linear *linear) {
    int rows = 0;
    for (int i = 0; i < linear->num_parts; i++) rows += linear->parts[i].rows;
    return rows;
}

void project(
    quire_engine *engine, const quire_variant *run, const quire_linear *linear, const quire_input *input, float *y);
/* Makes an input of rows [count]. */
void quantize_rows(pass *step, const float *source, int num_rows, int count, size_t stride, int refine);
/* Makes an input of activation(gate) * up, from rows [2, count]. */
void gate_rows(pass *step, int activation, float *source, int count, int refine);

/* Runs the mixer of a layer with a state: from step->inner to step->input. */
void run_recurrence(pass *step, const quire_layer *layer);

/* Embeddings of the layers: all of them from the embeddings of the tokens, and the part of layer `index` that uses them,
   from step->input to step->mixed. */
void make_layer_embeddings(pass *step);
void run_layer_embedding(pass *step, int index);

/* Runs the experts beside the MLP, whose output is in step->mixed: the sum of both replaces it. */
void run_parallel_experts(pass *step, const quire_layer *layer);
/* Replaces the MLP of a layer with experts: from step->normed and step->input to step->mixed. */
void run_experts(pass *step, const quire_layer *layer);
size_t lay_experts(pass *step, void *base);
static inline int expert_size(const quire_layer *layer) { return layer->experts[0].down.parts[0].cols; }

#endif
