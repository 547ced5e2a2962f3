/* Causal convolutions, and the recurrence of gated delta nets. Included by every variant.

   A row is computed from the state before it with the same operations wherever a step or a segment begins, and every
   channel and every column of a state by itself. So the results have the same bits in any chunks and on any number of
   threads. */
#include <math.h>

#include "vectors.h"

enum { MAX_TAPS = 8 };

static inline vec load_some(const float *at, int count) {
    if (count >= LANES) return load(at);
    float padded[LANES] = {0};
    memcpy(padded, at, (size_t)count * sizeof *at);
    return load(padded);
}

static inline void store_some(float *at, vec x, int count) {
    if (count >= LANES) {
        store(at, x);
        return;
    }
    float padded[LANES];
    store(padded, x);
    memcpy(at, padded, (size_t)count * sizeof *at);
}

/* Convolves up to LANES channels of some rows, in place. */
static inline __attribute__((always_inline)) void convolve_lanes(
    const conv_shape *shape, const conv_rows *rows, int channel, int count, const int num_taps) {
    vec taps[MAX_TAPS], window[MAX_TAPS];
    for (int t = 0; t < num_taps; t++) taps[t] = load_some(shape->weight + (size_t)t * shape->channels + channel, count);
    for (int t = 0; t + 1 < num_taps; t++)
        window[t] = load_some(rows->old + (size_t)t * shape->channels + channel, count);
    const vec bias = shape->bias ? load_some(shape->bias + channel, count) : fill(0);
    float *x = rows->x + channel;
    for (int row = 0; row < rows->count; row++, x += rows->stride) {
        vec input = load_some(x, count), sum = bias;
        if (shape->before) input = mul(input, load_some(x + shape->before, count));
        window[num_taps - 1] = input;
        for (int t = 0; t < num_taps; t++) sum = mul_add(window[t], taps[t], sum);
        for (int t = 0; t + 1 < num_taps; t++) window[t] = window[t + 1];
        if (shape->has_silu) sum = activate(sum, QUIRE_SILU);
        if (shape->after) sum = mul(sum, load_some(x + shape->after, count));
        store_some(x, sum, count);
    }
    for (int t = 0; t + 1 < num_taps; t++)
        store_some(rows->new + (size_t)t * shape->channels + channel, window[t], count);
}

/* Convolves channels [first, last) of consecutive rows, in place. `old` and `new` are the inputs before them and after
   them, and may be the same. */
static void convolve(const conv_shape *shape, const conv_rows *rows, int first, int last) {
    for (int channel = first; channel < last; channel += LANES) {
        const int count = last - channel < LANES ? last - channel : LANES;
        if (shape->num_taps == 4) convolve_lanes(shape, rows, channel, count, 4);
        else if (shape->num_taps == 3) convolve_lanes(shape, rows, channel, count, 3);
        else convolve_lanes(shape, rows, channel, count, shape->num_taps);
    }
}

/* Divides a head by its length, and multiplies it by `scale`. */
static void unit_row(float *x, int count, float eps, float scale) {
    vec squares[2] = {fill(0), fill(0)};
    int i = 0, turn = 0;
    for (; i + LANES <= count; i += LANES, turn ^= 1) squares[turn] = mul_add(load(x + i), load(x + i), squares[turn]);
    float sum = total(add(squares[0], squares[1]));
    for (; i < count; i++) sum += x[i] * x[i];
    const float factor = scale / sqrtf(sum + eps);
    for (i = 0; i < count; i++) x[i] *= factor;
}

enum { DELTA_ACROSS = LANES == 4 ? 8 : 4 }; /* vectors of columns whose sums are held in registers */
enum { DELTA_WIDTH = DELTA_ACROSS * LANES };
enum { MIN_COPIED = 4, KEYS_AHEAD = 16 }; /* rows for which columns are copied; rows of a state that are read ahead */

/* Updates `across` vectors of columns of a head's state, row by row. The output replaces the values. */
static inline __attribute__((always_inline)) void delta_columns(
    const delta_shape *shape, const delta_rows *rows, float *state, size_t stride, int column, const int across,
    const int is_cold) {
    const int key_size = shape->key_size;
    for (int row = 0; row < rows->count; row++) {
        const size_t at = (size_t)row * rows->stride;
        const float *q = rows->q + at, *k = rows->k + at;
        float *v = rows->v + at + column;
        const float decay = rows->decay[at], beta = rows->beta[at];
        vec sums[DELTA_ACROSS], change[DELTA_ACROSS];
        for (int j = 0; j < across; j++) sums[j] = fill(0);
        for (int i = 0; i < key_size; i++) {
            const float *s = state + (size_t)i * stride;
            const vec key = fill(k[i]);
            for (int j = 0; j < across * LANES && is_cold; j += 16) __builtin_prefetch(s + KEYS_AHEAD * stride + j);
            for (int j = 0; j < across; j++) sums[j] = mul_add(load(s + j * LANES), key, sums[j]);
        }
        for (int j = 0; j < across; j++) {
            change[j] = mul(sub(load(v + j * LANES), mul(sums[j], fill(decay))), fill(beta));
            sums[j] = fill(0);
        }
        const vec kept = fill(decay);
        for (int i = 0; i < key_size; i++) {
            float *s = state + (size_t)i * stride;
            const vec key = fill(k[i]), query = fill(q[i]);
            vec next[DELTA_ACROSS]; /* all are loaded before one is stored, which lets the compiler reorder the loads */
            for (int j = 0; j < across; j++) next[j] = mul_add(change[j], key, mul(load(s + j * LANES), kept));
            for (int j = 0; j < across; j++) {
                sums[j] = mul_add(next[j], query, sums[j]);
                store(s + j * LANES, next[j]);
            }
        }
        for (int j = 0; j < across; j++) store(v + j * LANES, sums[j]);
    }
}

static void delta_column(const delta_shape *shape, const delta_rows *rows, int column) { /* the same for one column */
    float *state = rows->state + column;
    for (int row = 0; row < rows->count; row++) {
        const size_t at = (size_t)row * rows->stride, stride = (size_t)shape->value_size;
        const float *q = rows->q + at, *k = rows->k + at;
        float *v = rows->v + at + column;
        float sum = 0, out = 0;
        for (int i = 0; i < shape->key_size; i++) sum += state[(size_t)i * stride] * k[i];
        const float change = (*v - sum * rows->decay[at]) * rows->beta[at];
        for (int i = 0; i < shape->key_size; i++) {
            float *s = state + (size_t)i * stride;
            *s = *s * rows->decay[at] + change * k[i];
            out += *s * q[i];
        }
        *v = out;
    }
}

static void copy_columns(const float *from, size_t from_stride, float *to, size_t to_stride, int key_size) {
    for (int i = 0; i < key_size; i++, from += from_stride, to += to_stride) memcpy(to, from, DELTA_WIDTH * sizeof *to);
}

/* Updates columns [first, last) of a head's state. For many rows, the columns are copied to a place of their own: rows of
   a state are a power of two apart, and would take the same few places of the cache. */
static void delta(const delta_shape *shape, const delta_rows *rows, int first, int last, float *scratch) {
    const size_t stride = (size_t)shape->value_size;
    int column = first;
    for (; column + DELTA_WIDTH <= last; column += DELTA_WIDTH) {
        float *state = rows->state + column;
        if (rows->count < MIN_COPIED) {
            delta_columns(shape, rows, state, stride, column, DELTA_ACROSS, 1);
            continue;
        }
        copy_columns(state, stride, scratch, DELTA_WIDTH, shape->key_size);
        delta_columns(shape, rows, scratch, DELTA_WIDTH, column, DELTA_ACROSS, 0);
        copy_columns(scratch, DELTA_WIDTH, state, stride, shape->key_size);
    }
    for (; column + LANES <= last; column += LANES)
        delta_columns(shape, rows, rows->state + column, stride, column, 1, 1);
    for (; column < last; column++) delta_column(shape, rows, column);
}
