/* Operations on rows between the matrix products. Included by every variant. */
#include <math.h>

#include "vectors.h"

/* Adds y to x (y may be NULL) and writes the RMS norm of x times weight to out. `count` is arbitrary: the caller pads
   rows with zeros to whole vectors. */
static void norm_row(float *x, const float *y, const float *weight, int count, float eps, float *out) {
    vec squares[2] = {fill(0), fill(0)};
    int i = 0, turn = 0;
    for (; i + LANES <= count; i += LANES, turn ^= 1) {
        vec one = load(x + i);
        if (y) {
            one = add(one, load(y + i));
            store(x + i, one);
        }
        squares[turn] = mul_add(one, one, squares[turn]);
    }
    float sum = total(add(squares[0], squares[1]));
    for (; i < count; i++) {
        if (y) x[i] += y[i];
        sum += x[i] * x[i];
    }
    const float factor = 1.0f / sqrtf(sum / (float)count + eps);
    for (i = 0; i + LANES <= count; i += LANES) store(out + i, mul(mul(load(x + i), fill(factor)), load(weight + i)));
    for (; i < count; i++) out[i] = x[i] * factor * weight[i];
}

static inline vec sigmoid(vec x) {
    return reciprocal(add(fill(1.0f), exponential(sub(fill(0.0f), x))));
}

static inline vec activate(vec x, int activation) {
    if (activation == QUIRE_SILU) return mul(x, sigmoid(x));
    if (activation == QUIRE_SIGMOID) return sigmoid(x);
    /* gelu with tanh: x / 2 * (1 + tanh(z)) equals x * sigmoid(2 z) */
    vec cube = mul(mul(x, x), x);
    return mul(x, sigmoid(mul(fill(1.5957691216f), mul_add(cube, fill(0.044715f), x))));
}

#define SWIGLU_LIMIT 7.0f
#define SWIGLU_ALPHA 1.702f
/* Returns activation(gate) * up. The limits come first, so that NaN is kept. */
static inline vec gated(vec gate, vec up, int activation) {
    if (activation != QUIRE_CLAMPED_SWIGLU) return mul(activate(gate, activation), up);
    gate = lowest(fill(SWIGLU_LIMIT), gate);
    up = lowest(fill(SWIGLU_LIMIT), highest(fill(-SWIGLU_LIMIT), up));
    return mul(mul(gate, sigmoid(mul(fill(SWIGLU_ALPHA), gate))), add(up, fill(1.0f)));
}

/* Computes activation(gate) * up in place of the gate. */
static void gate_row(float *gate, const float *up, int count, int activation) {
    int i = 0;
    for (; i + LANES <= count; i += LANES) store(gate + i, gated(load(gate + i), load(up + i), activation));
    if (i == count) return;
    float x[LANES] = {0}, y[LANES] = {0};
    memcpy(x, gate + i, (size_t)(count - i) * sizeof *x);
    memcpy(y, up + i, (size_t)(count - i) * sizeof *y);
    store(x, gated(load(x), load(y), activation));
    memcpy(gate + i, x, (size_t)(count - i) * sizeof *x);
}

/* Rotates the two halves of a head against each other. */
static void rotate_head(float *x, const float *cosines, const float *sines, int half) {
    int i = 0;
    for (; i + LANES <= half; i += LANES) {
        vec a = load(x + i), b = load(x + half + i), c = load(cosines + i), s = load(sines + i);
        store(x + i, sub(mul(a, c), mul(b, s)));
        store(x + half + i, mul_add(b, c, mul(a, s)));
    }
    for (; i < half; i++) {
        float a = x[i], b = x[half + i];
        x[i] = a * cosines[i] - b * sines[i];
        x[half + i] = b * cosines[i] + a * sines[i];
    }
}

/* Rounds a row to fp16. */
static void halve_row(const float *x, int count, uint16_t *out) {
    int i = 0;
    for (; i + LANES <= count; i += LANES) store_halves(out + i, load(x + i));
    for (; i < count; i++) out[i] = float_to_half(x[i]);
}

static void add_row(float *x, const float *y, int count) {
    for (int i = 0; i < count; i++) x[i] += y[i];
}

static inline __attribute__((always_inline)) void dot_some(
    const float *weight, const float *x, size_t stride, int count, float *out, size_t out_stride, const int num_rows) {
    vec sums[4][2];
    for (int m = 0; m < num_rows; m++) sums[m][0] = sums[m][1] = fill(0);
    int i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES) {
        const vec low = load(weight + i), high = load(weight + i + LANES);
        for (int m = 0; m < num_rows; m++) {
            const float *row = x + (size_t)m * stride + i;
            sums[m][0] = mul_add(load(row), low, sums[m][0]);
            sums[m][1] = mul_add(load(row + LANES), high, sums[m][1]);
        }
    }
    for (int m = 0; m < num_rows; m++) {
        float sum = total(add(sums[m][0], sums[m][1]));
        for (int j = i; j < count; j++) sum += weight[j] * x[(size_t)m * stride + (size_t)j];
        out[(size_t)m * out_stride] = sum;
    }
}

static void dot_rows(
    const float *weight, const float *x, size_t stride, int num_rows, int count, float *out, size_t out_stride) {
    for (; num_rows >= 4; num_rows -= 4, x += 4 * stride, out += 4 * out_stride)
        dot_some(weight, x, stride, count, out, out_stride, 4);
    for (; num_rows > 0; num_rows--, x += stride, out += out_stride)
        dot_some(weight, x, stride, count, out, out_stride, 1);
}

enum { PLACES = 2048 };

/* Chooses the groups with the largest scales, as many as are refined, in ascending order. If scales differ only in
   their last bits, the group with the lower index is preferred. `keys` and `ranks` are [groups]. */
static void choose_refined(
    const float *scales, int num_groups, int num_chosen, int32_t *restrict keys, int32_t *restrict ranks,
    int32_t *chosen) {
    for (int i = 0; i < num_groups; i++) {
        int32_t bits;
        memcpy(&bits, scales + i, sizeof bits); /* the bits of positive floats are in the order of the floats */
        keys[i] = (bits & ~(PLACES - 1)) | (PLACES - 1 - i % PLACES);
    }
    count_larger(keys, num_groups, ranks);
    int count = 0;
    for (int i = 0; i < num_groups && count < num_chosen; i++)
        if (ranks[i] < num_chosen) chosen[count++] = i;
    for (int i = 0; count < num_chosen; i++) chosen[count++] = i; /* the scales are NaN: any choice will do */
}

/* Rounds 32 numbers to 8 bits and returns the scale, which is NaN if one of them is not finite. `scaled_sum` is the sum
   of the rounded numbers times the scale. */
static inline float quantize_group(const float *x, int8_t *q, float *scaled_sum) {
    vec peaks = fill(0), sums = fill(0);
    for (int i = 0; i < GROUP; i += LANES) {
        peaks = highest(peaks, size(load(x + i)));
        sums = add(sums, load(x + i));
    }
    const float largest = peak(peaks), sum = total(sums), check = sum - sum; /* not 0 if one is not finite */
    if (!(largest > 1e-30f) || check != 0) {
        memset(q, 0, GROUP);
        return *scaled_sum = check == 0 ? 0 : check;
    }
    const float scale = largest / 127.0f;
    *scaled_sum = scale * (float)round_bytes(q, x, 127.0f / largest);
    return scale;
}

static void quantize_row(const float *x, int count, quire_input *out, int row) {
    const int num_groups = out->num_groups, refined = out->num_refined;
    const size_t first = (size_t)row * (size_t)num_groups, first_rest = (size_t)row * (size_t)refined;
    int8_t *q = out->q + first * GROUP;
    float *scales = out->scales + first;
    float padded[GROUP];
    for (int g = 0; g < num_groups; g++) {
        const float *at = x + g * GROUP;
        if ((g + 1) * GROUP > count) {
            memset(padded, 0, sizeof padded);
            memcpy(padded, at, (size_t)(count - g * GROUP) * sizeof *at);
            at = padded;
        }
        scales[g] = quantize_group(at, q + g * GROUP, out->sums + first + g);
    }
    if (!refined) return;
    int32_t *chosen = out->refined + first_rest;
    choose_refined(scales, num_groups, refined, out->keys + first, out->ranks + first, chosen);
    for (int r = 0; r < refined; r++) {
        const int g = chosen[r];
        const float *at = x + g * GROUP;
        float rest[GROUP];
        if ((g + 1) * GROUP > count) at = padded; /* the last group, padded above */
        for (int i = 0; i < GROUP; i++) rest[i] = at[i] - (float)q[g * GROUP + i] * scales[g];
        int8_t *codes = out->rest + (first_rest + (size_t)r) * GROUP;
        float sum;
        out->rest_scales[first_rest + (size_t)r] = quantize_group(rest, codes, &sum);
        out->sums[first + (size_t)g] += sum;
    }
}
