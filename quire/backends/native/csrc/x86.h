/* Products on x86, for variants that differ in the width of a vector and in how bytes are multiplied. A vector has one
   lane for each row of a matrix, so 512 bits take two panels at a time. Before including it, a variant includes
   vectors.h and defines TILE and

     ints, expanded                        a vector of LANES 32-bit integers; a group of LANES / PANEL panels, expanded
     start_products(group, kind)           initial sums of a group
     dot_step(kind, sums, codes, inputs)   4 products for each lane: the bytes of a step, and 4 inputs in memory
     dot_refined(kind, codes, inputs)      the sums of a step alone
     scale_products(kind, sums, group)     the sums of a group times its scales
     expand_starts(codes, place, group)    what start_products needs for the signed bytes of one panel
     prepare_inputs(kind, q, count, out)   the inputs in the form for dot_step: q itself, or a changed copy in `out`

   and for few rows, which are multiplied by one panel at a time without expanding it:

     unpacked, unpack(w, kind)             the codes of a group of one panel, in registers
     SPREAD, spread(q, out)                32 inputs in the form for dot_unpacked, and the number of its bytes
     dot_unpacked(kind, codes, q, spread)  32 products for each of 8 rows of the matrix, as `eight_scaled` needs them
     dot_eight(kind, codes, inputs)        the same for a step
     eight_scaled(kind, products, scales)  the products times the scales of the 8 rows

   The integer sums are exact. The float operations on a row are the same for any number of rows in a tile and in both
   forms, so the bits of its result do not depend on the other rows. */
#include <cpuid.h>

#include "rows.h"
#include "attention.h"
#include "recurrence.h"

enum { AT_ONCE = LANES / PANEL }; /* panels in a vector */
enum { REFINED_TOGETHER = 4 }; /* input rows whose refined steps are computed side by side */
enum { MAX_STREAMED = 2 }; /* with more rows, expanding a panel pays */
#if !defined(AHEAD)
#define AHEAD 2048 /* prefetch distance in bytes of a panel that is not expanded */
#endif

typedef struct {
    const expanded *w;
    const uint8_t *next; /* the panels that follow: they are prefetched during the products of these */
    const quire_input *x;
    int8_t *copy; /* memory for prepare_inputs */
    float *y;
    size_t stride;
    int count;
} panel_job;

static inline ints load_codes(const expanded *group, int step) {
    return load_ints(group->codes + 4 * LANES * step);
}

static inline __m256 eight_halves(const uint8_t *at) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)at));
}

static inline __m256i load_bytes(const uint8_t *at) { return _mm256_loadu_si256((const __m256i *)(const void *)at); }
static inline void store_bytes(uint8_t *at, __m256i x) { _mm256_storeu_si256((__m256i *)(void *)at, x); }

/* Expands one panel. `place` is its place in the vectors: 0 or 1. */
static inline __attribute__((always_inline)) void expand_panel(
    const uint8_t *w, const int kind, int num_groups, const int place, expanded *out) {
    const int tail = kind == QUIRE_Q8 ? 256 : 128, first = PANEL * place;
    const __m256i nibble = _mm256_set1_epi8(15);
    for (int g = 0; g < num_groups; g++, w += panel_bytes(kind), out++) {
        uint8_t *codes = out->codes + 4 * first;
        for (int step = 0; step < 8; step++) {
            if (kind == QUIRE_Q8) {
                store_bytes(codes + 4 * LANES * step, load_bytes(w + 32 * step));
            } else if (step < 4) {
                const __m256i two = load_bytes(w + 32 * step);
                store_bytes(codes + 4 * LANES * step, _mm256_and_si256(two, nibble));
                store_bytes(codes + 4 * LANES * (step + 4), _mm256_and_si256(_mm256_srli_epi16(two, 4), nibble));
            }
        }
        const __m256 scales = eight_halves(w + tail);
        _mm256_storeu_ps(out->scales + first, scales);
        _mm256_storeu_ps(out->offsets + first, _mm256_mul_ps(scales, _mm256_set1_ps(-MAGIC)));
        if (kind == QUIRE_Q4) _mm256_storeu_ps(out->minima + first, eight_halves(w + tail + 16));
        else expand_starts(w, place, out);
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

/* Sums the refined steps of `num` input rows separately from the others, and adds them to `sums` [rows, LANES]. The
   rows are computed side by side, because the sums of a row depend on each other. */
static inline __attribute__((always_inline)) void refine_rows(
    const panel_job *job, const int kind, int row, float *sums, const int num) {
    const int count = job->x->num_refined;
    const quire_refined *first = job->x->refined + (size_t)row * (size_t)count;
    vec apart[REFINED_TOGETHER];
    for (int m = 0; m < num; m++) apart[m] = fill(0);
    for (int r = 0; r < count; r++)
        for (int m = 0; m < num; m++) {
            const quire_refined *one = first + m * count + r;
            const expanded *group = job->w + one->group;
            const ints products = dot_refined(kind, load_codes(group, one->step), one->q);
            apart[m] = mul_add(scale_products(kind, products, group), fill(one->scale), apart[m]);
        }
    for (int m = 0; m < num; m++) store(sums + LANES * m, add(load(sums + LANES * m), apart[m]));
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
        if (row == 0)
            for (int line = 0; line < AT_ONCE * panel_bytes(kind); line += 64)
                __builtin_prefetch(job->next + g * AT_ONCE * panel_bytes(kind) + line);
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
    int m = 0;
    for (; m + REFINED_TOGETHER <= num; m += REFINED_TOGETHER)
        refine_rows(job, kind, row + m, kept + LANES * m, REFINED_TOGETHER);
    for (; m < num; m++) refine_rows(job, kind, row + m, kept + LANES * m, 1);
    for (m = 0; m < num; m++)
        write_outputs(load(kept + LANES * m), job->y + (size_t)(row + m) * job->stride, job->count);
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
        expand_panel(w, kind, x->num_groups, 0, panels);
        if (AT_ONCE > 1) expand_panel(left > PANEL ? w + size : w, kind, x->num_groups, AT_ONCE - 1, panels);
        const panel_job job = {panels, w + AT_ONCE * size, x,   (int8_t *)(panels + x->num_groups),
                               y + column, stride,       left};
        multiply(&job, kind);
    }
}

/* Few rows, from the packed bytes */

typedef struct {
    const int8_t *q; /* [G, 32] */
    const uint8_t *spread; /* [G, SPREAD] */
    const float *scales, *sums;
    const quire_refined *refined;
    int num_groups, num_refined;
} streamed_row;

/* Sums the refined steps of one input row, from the packed bytes. */
static inline __attribute__((always_inline)) __m256 refine_packed(
    const uint8_t *w, const int kind, const streamed_row *row) {
    const int size = panel_bytes(kind), tail = kind == QUIRE_Q8 ? 256 : 128;
    __m256 out = _mm256_setzero_ps();
    for (const quire_refined *one = row->refined; one < row->refined + row->num_refined; one++) {
        const uint8_t *group = w + one->group * size;
        const int is_high = kind == QUIRE_Q4 && one->step >= STEPS / 2;
        __m256i codes = load_bytes(group + PANEL * STEP * (is_high ? one->step - STEPS / 2 : one->step));
        if (kind == QUIRE_Q4)
            codes = _mm256_and_si256(_mm256_srl_epi16(codes, _mm_cvtsi32_si128(4 * is_high)), _mm256_set1_epi8(15));
        const __m256i products = dot_eight(kind, codes, one->q);
        out = _mm256_fmadd_ps(eight_scaled(kind, products, eight_halves(group + tail)), _mm256_set1_ps(one->scale), out);
    }
    return out;
}

static inline __attribute__((always_inline)) void stream_one(
    const uint8_t *w, const int kind, const streamed_row *row, float *y, int count) {
    const int size = panel_bytes(kind), tail = kind == QUIRE_Q8 ? 256 : 128;
    const uint8_t *first = w;
    __m256 out = _mm256_setzero_ps();
    for (int g = 0; g < row->num_groups; g++, w += size) {
        if (AHEAD)
            for (int line = 0; line < size; line += 64) __builtin_prefetch(w + AHEAD + line);
        const unpacked codes = unpack(w, kind);
        const __m256 scales = eight_halves(w + tail);
        const __m256i products = dot_unpacked(kind, &codes, row->q + GROUP * g, row->spread + SPREAD * g);
        out = _mm256_fmadd_ps(eight_scaled(kind, products, scales), _mm256_set1_ps(row->scales[g]), out);
        if (kind == QUIRE_Q4) out = _mm256_fmadd_ps(eight_halves(w + tail + 16), _mm256_set1_ps(row->sums[g]), out);
    }
    float lanes[PANEL];
    _mm256_storeu_ps(lanes, _mm256_add_ps(out, refine_packed(first, kind, row)));
    memcpy(y, lanes, (size_t)count * sizeof *y);
}

static inline __attribute__((always_inline)) void stream_all(
    const uint8_t *w, const int kind, const quire_input *x, float *scratch, float *y, size_t stride, int count) {
    const size_t panel = (size_t)panel_bytes(kind) * (size_t)x->num_groups;
    uint8_t *at = (uint8_t *)scratch;
    streamed_row rows[MAX_STREAMED];
    for (int m = 0; m < x->num_rows; m++) {
        const size_t first = (size_t)m * (size_t)x->num_groups, first_refined = (size_t)m * (size_t)x->num_refined;
        rows[m] = (streamed_row){
            x->q + first * GROUP, at, x->scales + first, x->sums + first, x->refined + first_refined,
            x->num_groups, x->num_refined};
        for (int g = 0; g < x->num_groups; g++, at += SPREAD) spread(rows[m].q + GROUP * g, at);
    }
    for (int column = 0; column < count; column += PANEL, w += panel)
        for (int m = 0; m < x->num_rows; m++)
            stream_one(w, kind, &rows[m], y + (size_t)m * stride + column, count - column < PANEL ? count - column : PANEL);
}

static void multiply_panels(
    const uint8_t *w, int kind, const quire_input *x, float *scratch, float *y, size_t stride, int count) {
    const int is_streamed = x->num_rows <= MAX_STREAMED;
    if (is_streamed && kind == QUIRE_Q4) stream_all(w, QUIRE_Q4, x, scratch, y, stride, count);
    else if (is_streamed) stream_all(w, QUIRE_Q8, x, scratch, y, stride, count);
    else if (kind == QUIRE_Q4) multiply_all(w, QUIRE_Q4, x, scratch, y, stride, count);
    else multiply_all(w, QUIRE_Q8, x, scratch, y, stride, count);
}

_Static_assert(MAX_STREAMED * SPREAD <= 4 * SCRATCH_FLOATS, "a group of few rows");
_Static_assert(sizeof(expanded) + TILE * GROUP <= 4 * SCRATCH_FLOATS, "a group and the copy of its inputs");

enum { SAVES_AVX = 0x06, SAVES_AVX512 = 0xe6 }; /* registers that the operating system saves for a program */

static inline int has_avx_vnni(void) {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4);
}

/* Returns whether this machine has all of these cpuid bits, and the operating system saves these registers. */
static int has_features(unsigned basic_c, unsigned extended_b, unsigned extended_c, unsigned saved) {
    unsigned a, b, c, d, low, high;
    basic_c |= bit_OSXSAVE;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & basic_c) != basic_c) return 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & saved) != saved || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    return (b & extended_b) == extended_b && (c & extended_c) == extended_c;
}
