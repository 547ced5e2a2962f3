/* Attention of queries over their paged context. Included by every variant.

   The context is divided into pieces of a fixed number of blocks. Within a piece the state of a query (peak, sum and
   weighted values, for each head of one KV head) is updated block by block, in order. The states of the pieces are then
   merged, in order. One thread may process all pieces, or several threads some of them. The operations on a state depend
   only on the query's own position and keys. They are the same, in the same order, alone, in a batch, in a chunk of a
   prompt and on any number of threads, so the result has the same bits. */
#include <math.h>

#include "vectors.h"

typedef struct {
    const void *keys;   /* [D, key stride]: halves, or floats converted from them */
    const void *values; /* [block size, head stride] */
    int first, last;    /* keys of the block that the query may see */
    ptrdiff_t ahead;    /* bytes from here to the next block, which is prefetched */
} block_view;

enum { ACROSS = LANES <= 8 ? 4 : 32 / LANES }; /* vectors side by side: rows of keys and of scores are padded to 32 */
enum { WIDTH = ACROSS * LANES, MAX_HEADS = 4 }; /* keys (or dimensions) and heads held in registers at a time */
/* Heads of several queries can be held at a time if there are 32 registers of 16 lanes. */
enum { MAX_TOGETHER = LANES > 8 ? 12 : MAX_HEADS };
enum { MIN_EXPANDED = 3 }; /* from this many queries on, a block is converted to fp32 once; the numbers are the same */

static inline __attribute__((always_inline)) vec load_either(const void *base, size_t at, const int is_float) {
    return is_float ? load((const float *)base + at) : load_halves((const uint16_t *)base + at);
}

/* Computes scores [heads, score stride] of a block's keys. Entries after the last key are undefined and not used. */
static inline __attribute__((always_inline)) void score_block(
    const attention_shape *shape, const float *q, const block_view *block, float *scores, const int num_heads,
    const int is_float) {
    const int head_size = shape->head_size;
    for (int first = 0; first < block->last; first += WIDTH) {
        vec sums[MAX_TOGETHER][ACROSS];
        for (int h = 0; h < num_heads; h++)
            for (int j = 0; j < ACROSS; j++) sums[h][j] = fill(0);
        size_t at = (size_t)first;
        for (int d = 0; d < head_size; d++, at += (size_t)shape->key_stride) {
            vec k[ACROSS];
            if (!is_float) __builtin_prefetch((const uint8_t *)block->keys + block->ahead + 2 * at);
            for (int j = 0; j < ACROSS; j++) k[j] = load_either(block->keys, at + (size_t)(j * LANES), is_float);
            for (int h = 0; h < num_heads; h++)
                for (int j = 0; j < ACROSS; j++) sums[h][j] = mul_add_one(k[j], q[h * head_size + d], sums[h][j]);
        }
        for (int h = 0; h < num_heads; h++)
            for (int j = 0; j < ACROSS; j++) store(scores + h * shape->score_stride + first + j * LANES, sums[h][j]);
    }
}

/* mix [heads, head stride] = mix * shrink + weights [heads, score stride] times values */
static inline __attribute__((always_inline)) void mix_block(
    const attention_shape *shape, const float *weights, const float *shrink, const block_view *block, float *mix,
    const int num_heads, const int is_float) {
    const int stride = shape->head_stride;
    for (int first = 0; first < stride; first += WIDTH) {
        vec sums[MAX_TOGETHER][ACROSS];
        for (int h = 0; h < num_heads; h++)
            for (int j = 0; j < ACROSS; j++) sums[h][j] = mul(load(mix + h * stride + first + j * LANES), fill(shrink[h]));
        for (int key = block->first; key < block->last; key++) {
            const size_t at = (size_t)(key * stride + first);
            vec v[ACROSS];
            if (!is_float) __builtin_prefetch((const uint8_t *)block->values + block->ahead + 2 * at);
            for (int j = 0; j < ACROSS; j++) v[j] = load_either(block->values, at + (size_t)(j * LANES), is_float);
            for (int h = 0; h < num_heads; h++)
                for (int j = 0; j < ACROSS; j++)
                    sums[h][j] = mul_add_one(v[j], weights[h * shape->score_stride + key], sums[h][j]);
        }
        for (int h = 0; h < num_heads; h++)
            for (int j = 0; j < ACROSS; j++) store(mix + h * stride + first + j * LANES, sums[h][j]);
    }
}

/* Turns scores into weights in place and updates a head's peak and sum. Returns the factor for the older weights. */
static inline float soften(
    const attention_shape *shape, float *scores, const block_view *block, float *peak_so_far, float *sum) {
    const int stride = shape->score_stride;
    if (shape->cap != 0)
        for (int i = block->first; i < block->last; i++) scores[i] = shape->cap * tanhf(scores[i] / shape->cap);
    for (int i = 0; i < block->first; i++) scores[i] = -INFINITY;
    for (int i = block->last; i < stride; i++) scores[i] = -INFINITY;
    vec highs = fill(*peak_so_far), sums = fill(0);
    for (int i = 0; i < stride; i += LANES) highs = highest(highs, load(scores + i));
    const float high = peak(highs);
    const vec top = fill(high);
    for (int i = 0; i < stride; i += LANES) { /* e^-87 for masked keys: negligible beside 1 in fp32 */
        const vec weights = exponential(sub(load(scores + i), top));
        store(scores + i, weights);
        sums = add(sums, weights);
    }
    float shrink[LANES] = {1};
    if (high != *peak_so_far) store(shrink, exponential(fill(*peak_so_far - high)));
    *sum = *sum * shrink[0] + total(sums);
    *peak_so_far = high;
    return shrink[0];
}

typedef struct { /* state of some heads of a query */
    float peaks[MAX_HEADS], sums[MAX_HEADS];
} head_state;

static inline __attribute__((always_inline)) void take_floats(
    const attention_shape *shape, const float *q, const block_view *block, float *scores, head_state *state, float *mix,
    const int num_heads, const int is_float) {
    float shrink[MAX_HEADS];
    score_block(shape, q, block, scores, num_heads, is_float);
    for (int h = 0; h < num_heads; h++)
        shrink[h] = soften(shape, scores + h * shape->score_stride, block, &state->peaks[h], &state->sums[h]);
    mix_block(shape, scores, shrink, block, mix, num_heads, is_float);
}

/* The same for some queries that see the whole block. Their heads lie one after the other, as those of one query do. */
static inline __attribute__((always_inline)) void take_together(
    const attention_shape *shape, const float *q, const block_view *block, float *scores, head_state *states, float *mix,
    const int num_heads, const int num_queries) {
    float shrink[MAX_TOGETHER];
    score_block(shape, q, block, scores, num_heads * num_queries, 1);
    for (int i = 0; i < num_queries; i++)
        for (int h = 0; h < num_heads; h++)
            shrink[i * num_heads + h] = soften(shape, scores + (i * num_heads + h) * shape->score_stride, block,
                                               &states[i].peaks[h], &states[i].sums[h]);
    mix_block(shape, scores, shrink, block, mix, num_heads * num_queries, 1);
}

#if HAS_HALF_ARITHMETIC
#include "attention_half.h"
#endif

enum { AS_HALVES, AS_FLOATS, IN_HALVES }; /* halves converted at every use; floats; arithmetic in halves */

static inline __attribute__((always_inline)) void take_block(
    const attention_shape *shape, const float *q, const block_view *block, float *scores, head_state *state, float *mix,
    const int num_heads, const int how) {
#if HAS_HALF_ARITHMETIC
    if (how == IN_HALVES) {
        take_halves(shape, (const float16_t *)q, block, scores, state, mix, num_heads);
        return;
    }
#endif
    take_floats(shape, q, block, scores, state, mix, num_heads, how == AS_FLOATS);
}

static void scale_query(const float *q, int count, float scale, float *out, int is_half) {
#if HAS_HALF_ARITHMETIC
    if (is_half) {
        for (int i = 0; i < count; i++) ((float16_t *)out)[i] = (float16_t)(q[i] * (scale * LOG2_E));
        return;
    }
#endif
    (void)is_half;
    for (int i = 0; i < count; i++) out[i] = q[i] * scale;
}

static void expand_block(const attention_shape *shape, block_view *block, float *scratch) {
    const size_t num_keys = shape->values_at, num_values = (size_t)(shape->block_size * shape->head_stride);
    for (size_t i = 0; i < num_keys; i += LANES) store(scratch + i, load_halves((const uint16_t *)block->keys + i));
    for (size_t i = 0; i < num_values; i += LANES)
        store(scratch + num_keys + i, load_halves((const uint16_t *)block->values + i));
    block->keys = scratch;
    block->values = scratch + num_keys;
}

/* Returns whether `count` queries from `position` on see all keys of a block. */
static inline int is_whole(const attention_shape *shape, int position, int count, int number) {
    const int first = number * shape->block_size, last = first + shape->block_size - 1;
    return last <= position && (!shape->window || position + count - 1 - shape->window < first);
}

/* Returns the weight that remains of a state whose peak is lower by `distance`, which is not positive. */
static float remainder_of(float distance, int is_half) {
    float weights[LANES];
    if (distance == 0) return 1;
    store(weights, is_half ? power_of_two(highest(fill(-126.0f), fill(distance))) : exponential(fill(distance)));
    return weights[0];
}

/* Merges the state of one head in one piece into a record: weighted values [head stride], peak, sum. The sum of an empty
   record is 0. */
static void merge_state(
    const attention_shape *shape, float peak, float sum, const float *mix, float *record, int is_half) {
    const int size = shape->head_stride;
    if (sum == 0) return; /* the query sees no key of the piece */
    if (record[size + 1] == 0) {
        memcpy(record, mix, (size_t)size * sizeof *record);
        record[size] = peak, record[size + 1] = sum;
        return;
    }
    const float high = peak > record[size] ? peak : record[size];
    const float kept = remainder_of(record[size] - high, is_half), added = remainder_of(peak - high, is_half);
    for (int i = 0; i < size; i += LANES)
        store(record + i, mul_add_one(load(mix + i), added, mul(load(record + i), fill(kept))));
    record[size] = high, record[size + 1] = record[size + 1] * kept + sum * added;
}

static void write_head(const attention_shape *shape, const float *record, int head, float *out) {
    float sum = record[shape->head_stride + 1];
    if (shape->sinks) {
        const float peak = record[shape->head_stride];
#if HAS_HALF_ARITHMETIC
        if (shape->is_half) sum += exp2f(shape->sinks[head] * LOG2_E - peak - HEADROOM);
        else sum += expf(shape->sinks[head] - peak);
#else
        sum += expf(shape->sinks[head] - peak);
#endif
    }
    for (int d = 0; d < shape->head_size; d++) out[d] = record[d] / sum;
}

typedef struct { /* records of some heads of all queries */
    float *at;
    size_t row_stride;
} head_records;

static inline float *record_of(const attention_shape *shape, head_records records, int row, int head) {
    return records.at + (size_t)row * records.row_stride + (size_t)head * record_floats(shape);
}

typedef struct { /* working memory for some heads of all queries */
    head_state states[MAX_QUERIES];
    float *scores, *mix, *scaled, *expanded;
} attention_work;

/* Updates the states of all queries, in order, with the blocks of one piece. */
static inline __attribute__((always_inline)) void take_piece(
    const attention_shape *shape, const attention_rows *rows, int piece, attention_work *work, const int num_heads,
    const int is_half) {
    const int size = shape->block_size, count = rows->count, num_keys = rows->position + count;
    const int mix_size = num_heads * shape->head_stride, q_size = num_heads * shape->head_size;
    const int first_seen = first_key(shape, rows->position) / size, first = piece * shape->piece_blocks;
    for (int i = 0; i < count; i++)
        for (int h = 0; h < num_heads; h++) work->states[i].peaks[h] = -1e30f, work->states[i].sums[h] = 0;
    memset(work->mix, 0, (size_t)(count * mix_size) * sizeof *work->mix);
    for (int number = first > first_seen ? first : first_seen;
         number < first + shape->piece_blocks && number * size < num_keys; number++) {
        const uint16_t *at = shape->layer + (size_t)rows->table[number] * shape->block_halves;
        block_view block = {at, at + shape->values_at, 0, 0, 0};
        const int is_float = !is_half && count >= MIN_EXPANDED;
        if ((number + 1) * size < num_keys)
            block.ahead = 2 * (rows->table[number + 1] - rows->table[number]) * (ptrdiff_t)shape->block_halves;
        if (is_float) expand_block(shape, &block, work->expanded);
        const int together = MAX_TOGETHER / num_heads; /* used only with wide vectors */
        for (int i = 0; i < count; i++) {
            if (LANES > 8 && is_float && i + together <= count && is_whole(shape, rows->position + i, together, number)) {
                block.first = 0, block.last = size;
                take_together(shape, work->scaled + i * q_size, &block, work->scores, work->states + i,
                              work->mix + i * mix_size, num_heads, MAX_TOGETHER / num_heads);
                i += together - 1;
                continue;
            }
            const int last = rows->position + i + 1 - number * size;
            const int from = first_key(shape, rows->position + i) - number * size;
            if (last <= 0 || from >= size) continue;
            block.first = from > 0 ? from : 0;
            block.last = last < size ? last : size;
            float *q = work->scaled + i * q_size, *to = work->mix + i * mix_size;
            if (is_half) take_block(shape, q, &block, work->scores, &work->states[i], to, num_heads, IN_HALVES);
            else if (is_float) take_block(shape, q, &block, work->scores, &work->states[i], to, num_heads, AS_FLOATS);
            else take_block(shape, q, &block, work->scores, &work->states[i], to, num_heads, AS_HALVES);
            block.ahead = 0;
        }
    }
}

/* Processes several queries of one sequence through the same pieces, for `num_heads` heads of each. */
static inline __attribute__((always_inline)) void attend_heads(
    const attention_shape *shape, const attention_rows *rows, const float *q, float *scratch, head_records records,
    const int num_heads, const int is_half) {
    const int stride = shape->head_stride, q_size = num_heads * shape->head_size, count = rows->count;
    attention_work work = {.scores = scratch, .mix = scratch + 2 * MAX_TOGETHER * shape->score_stride};
    work.scaled = work.mix + count * num_heads * stride;
    work.expanded = work.scaled + count * q_size;
    for (int i = 0; i < count; i++) {
        scale_query(q + (size_t)i * rows->q_stride, q_size, shape->scale, work.scaled + i * q_size, is_half);
        for (int h = 0; h < num_heads; h++) record_of(shape, records, i, h)[stride + 1] = 0;
    }
    for (int piece = rows->first_piece; piece < rows->last_piece; piece++) {
        take_piece(shape, rows, piece, &work, num_heads, is_half);
        for (int i = 0; i < count; i++)
            for (int h = 0; h < num_heads; h++)
                merge_state(shape, work.states[i].peaks[h], work.states[i].sums[h],
                            work.mix + (i * num_heads + h) * stride, record_of(shape, records, i, h), is_half);
    }
}

/* Returns the number of floats of scratch memory for `attend`. */
static size_t attend_scratch(const attention_shape *shape) {
    const size_t heads = MAX_HEADS * ((size_t)(shape->head_stride + shape->head_size) + record_floats(shape));
    return (size_t)(2 * MAX_TOGETHER * shape->score_stride) + MAX_QUERIES * heads + shape->values_at +
           (size_t)(shape->block_size * shape->head_stride) + 64;
}

static inline __attribute__((always_inline)) void attend_some(
    const attention_shape *shape, const attention_rows *rows, const float *q, float *scratch, head_records records,
    int num_heads, const int is_half) {
    if (num_heads == 4) attend_heads(shape, rows, q, scratch, records, 4, is_half);
    else if (num_heads == 3) attend_heads(shape, rows, q, scratch, records, 3, is_half);
    else if (num_heads == 2) attend_heads(shape, rows, q, scratch, records, 2, is_half);
    else attend_heads(shape, rows, q, scratch, records, 1, is_half);
}

/* Computes all query heads that share this KV head, for up to MAX_QUERIES rows: q and out [rows, heads, D], strided. */
static void attend(const attention_shape *shape, const attention_rows *rows, const float *q, float *scratch, float *out) {
    const size_t size = record_floats(shape);
    for (int head = 0; head < shape->num_heads; head += MAX_HEADS) {
        const int left = shape->num_heads - head < MAX_HEADS ? shape->num_heads - head : MAX_HEADS;
        const float *from = q + head * shape->head_size;
        head_records records = {scratch, (size_t)left * size};
        if (rows->records)
            records = (head_records){rows->records + (size_t)head * size, (size_t)shape->num_heads * size};
        float *rest = scratch + MAX_QUERIES * MAX_HEADS * size;
        if (HAS_HALF_ARITHMETIC && shape->is_half)
            attend_some(shape, rows, from, rest, records, left, HAS_HALF_ARITHMETIC);
        else attend_some(shape, rows, from, rest, records, left, 0);
        for (int i = 0; i < rows->count && !rows->records; i++)
            for (int h = 0; h < left; h++)
                write_head(shape, record_of(shape, records, i, h), head + h,
                           out + (size_t)i * rows->out_stride + (size_t)((head + h) * shape->head_size));
    }
}

/* Merges the records of the pieces, which are in order at rows->records, and writes the result. */
static void merge_pieces(const attention_shape *shape, const attention_rows *rows, float *out) {
    const int stride = shape->head_stride, is_half = HAS_HALF_ARITHMETIC && shape->is_half;
    const size_t row_stride = (size_t)shape->num_heads * record_floats(shape);
    const head_records records = {rows->records, row_stride};
    for (int i = 0; i < rows->count; i++)
        for (int h = 0; h < shape->num_heads; h++) {
            float *first = record_of(shape, records, i, h), *next = first;
            for (int piece = rows->first_piece + 1; piece < rows->last_piece; piece++) {
                next += (size_t)rows->count * row_stride;
                merge_state(shape, next[stride], next[stride + 1], next, first, is_half);
            }
            write_head(shape, first, h, out + (size_t)i * rows->out_stride + (size_t)(h * shape->head_size));
        }
}
