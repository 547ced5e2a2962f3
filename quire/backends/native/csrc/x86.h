/* Products on x86, for variants that differ in the width of a vector and in how bytes are multiplied. A vector has one
   lane for each row of a matrix, so 512 bits take two panels at a time. Before including it, a variant includes
   vectors.h and defines TILE and

     ints                                  a vector of LANES 32-bit integers
     start_products(group, kind)           initial sums of a group
     dot_step(kind, sums, codes, inputs)   4 products for each lane: the bytes of a step, and 4 inputs in memory
     scale_products(kind, sums, group)     the sums of a group times its scales
     expand_bytes(w, size, kind, group)    the codes of a group of LANES / PANEL panels, `size` bytes apart
     prepare_inputs(kind, q, count, out)   the inputs in the form for dot_step: q itself, or a changed copy in `out`

   A panel's bytes are expanded once and then multiplied with all rows of the input. The integer sums are exact. The
   float operations on a row are the same for any number of rows in a tile, so the bits of its result do not depend on
   the other rows. */
#include <cpuid.h>

#include "rows.h"
#include "attention.h"

enum { AT_ONCE = LANES / PANEL }; /* panels in a vector */

typedef struct {
    const expanded *w;
    const quire_input *x;
    int8_t *copy; /* memory for prepare_inputs */
    float *y;
    size_t stride;
    int count;
} panel_job;

static inline ints load_codes(const expanded *group, int step) {
    return load_ints(group->codes + 4 * LANES * step);
}

static inline vec eight_or_more_halves(const uint8_t *at, size_t size) {
    uint16_t halves[LANES];
    for (int i = 0; i < AT_ONCE; i++) memcpy(halves + PANEL * i, at + (size_t)i * size, PANEL * sizeof *halves);
    return load_halves(halves);
}

/* Expands AT_ONCE panels that are `size` bytes apart; with size 0, one panel is repeated. The panels that follow them
   are prefetched: they are needed after the products of these. */
static inline __attribute__((always_inline)) void expand_panels(
    const uint8_t *w, size_t size, const int kind, int num_groups, expanded *out) {
    const int bytes = panel_bytes(kind), tail = kind == QUIRE_Q8 ? 256 : 128;
    for (int g = 0; g < num_groups; g++, w += bytes, out++) {
        for (int i = 0; i < AT_ONCE; i++)
            for (int line = 0; line < bytes; line += 64)
                __builtin_prefetch(w + (size_t)(AT_ONCE + i) * size + line);
        expand_bytes(w, size, kind, out);
        const vec scales = eight_or_more_halves(w + tail, size);
        store(out->scales, scales);
        store(out->offsets, mul(scales, fill(-MAGIC)));
        if (kind == QUIRE_Q4) store(out->minima, eight_or_more_halves(w + tail + 16, size));
    }
}

/* Computes 32 products for each lane and `num` input rows, whose bytes are `stride` apart. */
static inline __attribute__((always_inline)) void dot_group(
    const expanded *group, const int kind, const int8_t *inputs, size_t stride, ints products[], const int num) {
    const ints start = start_products(group, kind);
#pragma GCC unroll 16
    for (int m = 0; m < num; m++) products[m] = start;
#pragma GCC unroll 8
    for (int step = 0; step < 8; step++) {
        const ints codes = load_codes(group, step);
#pragma GCC unroll 16
        for (int m = 0; m < num; m++)
            products[m] = dot_step(kind, products[m], codes, inputs + (size_t)m * stride + 4 * step);
    }
}

static inline void write_outputs(vec out, float *y, int count) {
    if (count == LANES) {
        store(y, out);
        return;
    }
    float lanes[LANES];
    store(lanes, out);
    memcpy(y, lanes, (size_t)count * sizeof *y);
}

/* Adds the refined groups of one input row, after all others. */
static inline __attribute__((always_inline)) vec refine_row(const panel_job *job, const int kind, int row, vec out) {
    const quire_input *x = job->x;
    const int count = x->num_refined;
    const size_t first = (size_t)row * (size_t)count;
    const int32_t *refined = x->refined + first;
    const float *scales = x->rest_scales + first;
    const int8_t *rest = prepare_inputs(kind, x->rest + first * GROUP, (size_t)count * GROUP, job->copy);
    for (int r = 0; r < count; r++) {
        const expanded *group = job->w + refined[r];
        ints products[1];
        dot_group(group, kind, rest + r * GROUP, 0, products, 1);
        out = mul_add(scale_products(kind, products[0], group), fill(scales[r]), out);
    }
    return out;
}

/* `num` input rows from `row` on share the bytes of a group. */
static inline __attribute__((always_inline)) void multiply_tile(
    const panel_job *job, const int kind, int row, const int num) {
    const quire_input *x = job->x;
    const int groups = x->num_groups;
    const size_t row_bytes = (size_t)groups * GROUP, first = (size_t)row * (size_t)groups;
    const int8_t *inputs = prepare_inputs(kind, x->q + first * GROUP, (size_t)num * row_bytes, job->copy);
    const float *scales = x->scales + first, *sums = x->sums + first;
    vec out[TILE];
#pragma GCC unroll 16
    for (int m = 0; m < num; m++) out[m] = fill(0);
    for (int g = 0; g < groups; g++) {
        const expanded *group = job->w + g;
        ints products[TILE];
        dot_group(group, kind, inputs + g * GROUP, row_bytes, products, num);
#pragma GCC unroll 16
        for (int m = 0; m < num; m++)
            out[m] = mul_add(scale_products(kind, products[m], group), fill(scales[m * groups + g]), out[m]);
        if (kind != QUIRE_Q4) continue;
        const vec minima = load(group->minima);
#pragma GCC unroll 16
        for (int m = 0; m < num; m++) out[m] = mul_add(minima, fill(sums[m * groups + g]), out[m]);
    }
    float kept[TILE * LANES]; /* a second loop over `out` would make the compiler keep `out` in memory */
#pragma GCC unroll 16
    for (int m = 0; m < num; m++) store(kept + LANES * m, out[m]);
    for (int m = 0; m < num; m++) {
        vec one = load(kept + LANES * m);
        if (x->num_refined) one = refine_row(job, kind, row + m, one);
        write_outputs(one, job->y + (size_t)(row + m) * job->stride, job->count);
    }
}

/* Multiplies all rows, in tiles of about equal size. */
static inline __attribute__((always_inline)) void multiply(const panel_job *job, const int kind) {
    const int num_rows = job->x->num_rows;
    for (int row = 0, tiles = ceil_div(num_rows, TILE), num; tiles > 0; row += num, tiles--) {
        num = ceil_div(num_rows - row, tiles);
        switch (num) {
        case 1: multiply_tile(job, kind, row, 1); break;
        case 2: multiply_tile(job, kind, row, 2); break;
        case 3: multiply_tile(job, kind, row, 3); break;
        case 4: multiply_tile(job, kind, row, 4); break;
        case 5: multiply_tile(job, kind, row, 5); break;
#if TILE > 6
        case 6: multiply_tile(job, kind, row, 6); break;
        case 7: multiply_tile(job, kind, row, 7); break;
#endif
#if TILE > 8
        case 8: multiply_tile(job, kind, row, 8); break;
        case 9: multiply_tile(job, kind, row, 9); break;
#endif
#if TILE > 10
        case 10: multiply_tile(job, kind, row, 10); break;
        case 11: multiply_tile(job, kind, row, 11); break;
#endif
        default: multiply_tile(job, kind, row, TILE);
        }
    }
}

static inline __attribute__((always_inline)) void multiply_all(
    const uint8_t *w, const int kind, const quire_input *x, float *scratch, float *y, size_t stride, int count) {
    const size_t size = (size_t)panel_bytes(kind) * (size_t)x->num_groups;
    expanded *panels = (expanded *)scratch;
    for (int column = 0; column < count; column += LANES, w += AT_ONCE * size) {
        const int left = count - column < LANES ? count - column : LANES;
        const panel_job job = {panels, x, (int8_t *)(panels + x->num_groups), y + column, stride, left};
        expand_panels(w, left > PANEL ? size : 0, kind, x->num_groups, panels); /* the second panel may not exist */
        multiply(&job, kind);
    }
}

static void multiply_panels(
    const uint8_t *w, int kind, const quire_input *x, float *scratch, float *y, size_t stride, int count) {
    if (kind == QUIRE_Q4) multiply_all(w, QUIRE_Q4, x, scratch, y, stride, count);
    else multiply_all(w, QUIRE_Q8, x, scratch, y, stride, count);
}

_Static_assert(sizeof(expanded) + TILE * GROUP <= 4 * SCRATCH_FLOATS, "a group and the copy of its inputs");

enum { SAVES_AVX = 0x06, SAVES_AVX512 = 0xe6 }; /* registers that the operating system saves for a program */

/* Returns whether this machine has all of these cpuid bits, and the operating system saves these registers. */
static int has_features(unsigned basic_c, unsigned extended_b, unsigned extended_c, unsigned saved) {
    unsigned a, b, c, d, low, high;
    basic_c |= bit_OSXSAVE;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & basic_c) != basic_c) return 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & saved) != saved || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    return (b & extended_b) == extended_b && (c & extended_c) == extended_c;
}
