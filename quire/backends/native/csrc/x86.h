/* Products of a panel on x86, for variants that differ in how bytes are multiplied. Before including it, a variant
   defines TILE (6 or 8) and

     start_products(at, kind)              initial sums of a group, 8 lanes of 32 bits
     dot_step(kind, sums, codes, inputs)   4 products for each of 8 rows: the bytes of a step, and 4 inputs, repeated
     finish_products(kind, sums)           the sums as 32-bit integers
     prepare_inputs(kind, q, count, out)   the inputs in the form for dot_step: q itself, or a changed copy in `out`

   The sums are exact integers. The float operations on a row are the same for any number of rows in a tile, so the bits
   of its result do not depend on the other rows. */
#include <cpuid.h>
#include <immintrin.h>

#include "rows.h"
#include "attention.h"

typedef struct {
    const uint8_t *w;
    const quire_input *x;
    int8_t *scratch;
    float *y;
    size_t stride;
    int count;
} panel_job;

static inline __m256i load_bytes(const void *at) { return _mm256_loadu_si256((const __m256i *)at); }
static inline vec eight_halves(const uint8_t *at) { return load_halves((const uint16_t *)(const void *)at); }

static inline __m256i four_inputs(const int8_t *at) {
    int32_t four;
    memcpy(&four, at, 4);
    return _mm256_set1_epi32(four);
}

/* Loads the bytes of step `step` of the first half of a group, and of the same step of its second half. */
static inline __attribute__((always_inline)) void load_steps(
    const uint8_t *at, const int kind, int step, __m256i *low, __m256i *high) {
    const __m256i nibble = _mm256_set1_epi8(15);
    *low = load_bytes(at + 32 * step);
    if (kind == QUIRE_Q8) {
        *high = load_bytes(at + 128 + 32 * step);
    } else {
        *high = _mm256_and_si256(_mm256_srli_epi16(*low, 4), nibble);
        *low = _mm256_and_si256(*low, nibble);
    }
}

/* Computes 32 products for each of 8 rows of a matrix and `num` input rows, whose bytes are `stride` apart. */
static inline __attribute__((always_inline)) void dot_group(
    const uint8_t *at, const int kind, const int8_t *inputs, size_t stride, __m256i products[], const int num) {
    const __m256i start = start_products(at, kind);
    for (int m = 0; m < num; m++) products[m] = start;
#pragma GCC unroll 4
    for (int step = 0; step < 4; step++) {
        __m256i low, high;
        load_steps(at, kind, step, &low, &high);
        const int8_t *four = inputs + 4 * step;
        for (int m = 0; m < num; m++)
            products[m] = dot_step(kind, products[m], low, four_inputs(four + (size_t)m * stride));
        for (int m = 0; m < num; m++)
            products[m] = dot_step(kind, products[m], high, four_inputs(four + (size_t)m * stride + 16));
    }
    for (int m = 0; m < num; m++) products[m] = finish_products(kind, products[m]);
}

static inline __attribute__((always_inline)) vec add_scaled(vec sum, __m256i products, vec scales, float scale) {
    return mul_add(_mm256_cvtepi32_ps(products), mul(scales, fill(scale)), sum);
}

static inline void write_outputs(vec out, float *y, int count) {
    if (count == PANEL) {
        store(y, out);
        return;
    }
    float lanes[PANEL];
    store(lanes, out);
    memcpy(y, lanes, (size_t)count * sizeof *y);
}

/* Adds the refined groups of one input row, after all others. */
static inline __attribute__((always_inline)) vec refine(const panel_job *job, const int kind, int row, vec out) {
    const quire_input *x = job->x;
    const int size = panel_bytes(kind), tail = kind == QUIRE_Q8 ? 256 : 128, count = x->num_refined;
    const size_t first = (size_t)row * (size_t)count;
    const int8_t *rest = prepare_inputs(kind, x->rest + first * GROUP, (size_t)count * GROUP, job->scratch);
    for (int r = 0; r < count; r++) {
        const uint8_t *at = job->w + (size_t)x->refined[first + (size_t)r] * (size_t)size;
        __m256i products[1];
        dot_group(at, kind, rest + r * GROUP, 0, products, 1);
        out = add_scaled(out, products[0], eight_halves(at + tail), x->rest_scales[first + (size_t)r]);
    }
    return out;
}

static __attribute__((noinline)) vec refine_row(const panel_job *job, int kind, int row, vec out) {
    return kind == QUIRE_Q4 ? refine(job, QUIRE_Q4, row, out) : refine(job, QUIRE_Q8, row, out);
}

/* `num` input rows from `row` on share a panel's bytes, read in packed form. */
static inline __attribute__((always_inline)) void multiply_tile(
    const panel_job *job, const int kind, int row, const int num) {
    const quire_input *x = job->x;
    const int groups = x->num_groups, size = panel_bytes(kind), tail = kind == QUIRE_Q8 ? 256 : 128;
    const size_t row_bytes = (size_t)groups * GROUP, first = (size_t)row * (size_t)groups;
    const int8_t *inputs = prepare_inputs(kind, x->q + first * GROUP, (size_t)num * row_bytes, job->scratch);
    const float *scales = x->scales + first, *sums = x->sums + first;
    vec out[TILE];
    for (int m = 0; m < num; m++) out[m] = fill(0);
    for (int g = 0; g < groups; g++) {
        const uint8_t *at = job->w + (size_t)g * (size_t)size;
        __m256i products[TILE];
        if (num == 1) __builtin_prefetch(at + 1024); /* the hardware prefetcher stops at page boundaries */
        dot_group(at, kind, inputs + g * GROUP, row_bytes, products, num);
        const vec scale = eight_halves(at + tail);
        for (int m = 0; m < num; m++) out[m] = add_scaled(out[m], products[m], scale, scales[m * groups + g]);
        if (kind == QUIRE_Q4) {
            const vec minimum = eight_halves(at + tail + 16);
            for (int m = 0; m < num; m++) out[m] = mul_add(minimum, fill(sums[m * groups + g]), out[m]);
        }
    }
    for (int m = 0; m < num; m++) {
        if (x->num_refined) out[m] = refine_row(job, kind, row + m, out[m]);
        write_outputs(out[m], job->y + (size_t)(row + m) * job->stride, job->count);
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
        default: multiply_tile(job, kind, row, TILE);
        }
    }
}

static void multiply_panel(
    const uint8_t *w, int kind, const quire_input *x, float *scratch, float *y, size_t stride, int count) {
    const panel_job job = {w, x, (int8_t *)scratch, y, stride, count};
    if (kind == QUIRE_Q4) multiply(&job, QUIRE_Q4);
    else multiply(&job, QUIRE_Q8);
}

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
