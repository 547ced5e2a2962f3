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

/* Returns the largest threshold that at least `wanted` keys reach. */
static int32_t find_threshold(const int32_t *keys, int count, int wanted) {
    int32_t low = 0, high = 0; /* enough keys reach `low`; too few reach `high` */
    for (int i = 0; i < count; i++) high = keys[i] > high ? keys[i] : high;
    high += high < INT32_MAX;
    while (high - low > 1) {
        const int32_t middle = low + (high - low) / 2;
        int num_reached = 0;
        for (int i = 0; i < count; i++) num_reached += keys[i] >= middle;
        if (num_reached < wanted) high = middle;
        else low = middle;
        if (num_reached == wanted) break;
    }
    return low;
}

/* Returns the bits of the largest size. Without the sign, bits are in the order of the floats. */
static inline int32_t peak_bits(const float *x, int count) {
    int32_t most = 0;
    for (int i = 0; i < count; i++) {
        int32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        bits &= INT32_MAX;
        most = bits > most ? bits : most;
    }
    return most;
}

/* Chooses the steps with the largest peaks, as many as are refined, in ascending order; of equal ones those with lower
   indices. NaN is larger than all numbers. `keys` has room for all steps. */
static void choose_refined(
    const float *x, int count, int num_steps, int num_chosen, int32_t *keys, quire_refined *chosen) {
    const int num_whole = count / STEP;
    for (int i = 0; i < num_whole; i++) keys[i] = peak_bits(x + STEP * i, STEP);
    for (int i = num_whole; i < num_steps; i++) keys[i] = i * STEP < count ? peak_bits(x + STEP * i, count % STEP) : 0;
    const int32_t threshold = find_threshold(keys, num_steps, num_chosen);
    int num_equal = num_chosen; /* steps at the threshold that are chosen too */
    for (int i = 0; i < num_steps; i++) num_equal -= keys[i] > threshold;
    for (int i = 0, place = 0; i < num_steps && place < num_chosen; i++)
        if (keys[i] > threshold || (keys[i] == threshold && num_equal-- > 0))
            chosen[place++] = (quire_refined){.group = i / STEPS, .step = i % STEPS};
}

/* Returns the scale for numbers with this peak; 0 if all are tiny, NaN if their sum is not finite. */
static inline float scale_of(float largest, float sum) {
    const float check = sum - sum;
    return check != 0 ? check : largest > 1e-30f ? largest / 127.0f : 0.0f;
}

/* Rounds 32 numbers to 8 bits and returns the scale, which is NaN if one of them is not finite. `scaled_sum` is the sum
   of the rounded numbers times the scale. */
static inline float quantize_group(const float *x, int8_t *q, float *scaled_sum) {
    vec peaks = fill(0), sums = fill(0);
    for (int i = 0; i < GROUP; i += LANES) {
        peaks = highest(peaks, size(load(x + i)));
        sums = add(sums, load(x + i));
    }
    const float largest = peak(peaks), scale = scale_of(largest, total(sums));
    if (!(scale > 0)) {
        memset(q, 0, GROUP);
        return *scaled_sum = scale;
    }
    *scaled_sum = scale * (float)round_bytes(q, x, 127.0f / largest);
    return scale;
}

/* Rounds a step in the same way, replaces its numbers by the rounding errors, and returns the scaled sum. */
static inline float quantize_step(float *x, quire_refined *out) {
    const float largest = bits_to_float((uint32_t)peak_bits(x, STEP));
    const float scale = scale_of(largest, largest), factor = scale > 0 ? 127.0f / largest : 0.0f;
    int total = 0;
    for (int i = 0; i < STEP; i++) {
        const float code = scale > 0 ? rintf(x[i] * factor) : 0.0f;
        out->q[i] = (int8_t)code;
        total += out->q[i];
        x[i] -= code * scale;
    }
    out->scale = scale;
    return scale * (float)total;
}

/* Rounds a row and its rounding errors to 8 bits in groups. */
static void quantize_pair(const float *x, int count, quire_input *out, int row) {
    const int num_groups = out->num_groups;
    const size_t first = 2 * (size_t)row * (size_t)num_groups;
    for (int g = 0; g < num_groups; g++) {
        const int left = count - g * GROUP;
        const size_t cell = first + (size_t)g, second = cell + (size_t)num_groups;
        float rest[GROUP] = {0};
        memcpy(rest, x + g * GROUP, (size_t)(left < GROUP ? left : GROUP) * sizeof *x);
        out->scales[cell] = quantize_group(rest, out->q + cell * GROUP, out->sums + cell);
        for (int i = 0; i < GROUP; i++) rest[i] -= (float)out->q[cell * GROUP + (size_t)i] * out->scales[cell];
        out->scales[second] = quantize_group(rest, out->q + second * GROUP, out->sums + second);
    }
}

/* Rounds a row to 8 bits in groups. Of a refined step, the group holds the error of a first rounding. So a group without
   its largest numbers has a smaller scale, and the refined steps have 16 bits. */
static void quantize_row(const float *x, int count, quire_input *out, int row) {
    if (out->num_copies == 2) {
        quantize_pair(x, count, out, row);
        return;
    }
    const int num_groups = out->num_groups, num_steps = num_groups * STEPS, num_refined = out->num_refined;
    const size_t first = (size_t)row * (size_t)num_groups, first_refined = (size_t)row * (size_t)num_refined;
    quire_refined *next = out->refined + first_refined, *end = next + num_refined;
    if (num_refined) choose_refined(x, count, num_steps, num_refined, out->keys + first * STEPS, next);
    for (int g = 0; g < num_groups; g++) {
        const float *at = x + g * GROUP;
        float copy[GROUP], sum = 0;
        if ((g + 1) * GROUP > count || (next < end && next->group == g)) {
            const int left = count - g * GROUP;
            memset(copy, 0, sizeof copy);
            memcpy(copy, at, (size_t)(left < GROUP ? left : GROUP) * sizeof *at);
            at = copy;
        }
        for (; next < end && next->group == g; next++) sum += quantize_step(copy + next->step * STEP, next);
        const size_t cell = first + (size_t)g;
        out->scales[cell] = quantize_group(at, out->q + cell * GROUP, out->sums + cell);
        out->sums[cell] += sum;
    }
}
