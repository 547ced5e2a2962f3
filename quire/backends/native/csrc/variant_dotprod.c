/* ARM with dot products (ARMv8.2: most servers and phones since 2018, every Apple silicon). */
#if defined(__linux__)
#include <sys/auxv.h>
#endif

#include "neon.h"

enum { TILE = 4 }; /* rows of the input that share a panel's bytes in registers */

/* 32 products for each of 8 rows of a matrix and 4 of the input. The compiler would keep more in registers than there
   are and spill, so the order is written out: 24 accumulators and outputs live, 8 left for bytes. Sums begin at MAGIC,
   the bits of 1.5 * 2^23, so that they are floats already, of which 1.5 * 2^23 is to be taken off: conversions are
   slow. */
#define STEP(lane, first, second) \
    "sdot %[p0].4s, " first ".16b, %[x0].4b[" lane "]\n sdot %[p2].4s, " first ".16b, %[x1].4b[" lane "]\n" \
    "sdot %[p4].4s, " first ".16b, %[x2].4b[" lane "]\n sdot %[p6].4s, " first ".16b, %[x3].4b[" lane "]\n" \
    "sdot %[p1].4s, " second ".16b, %[x0].4b[" lane "]\n sdot %[p3].4s, " second ".16b, %[x1].4b[" lane "]\n" \
    "sdot %[p5].4s, " second ".16b, %[x2].4b[" lane "]\n sdot %[p7].4s, " second ".16b, %[x3].4b[" lane "]\n"
#define LOAD(offset, first, second) "ldp " first ", " second ", [%[codes], #" offset "]\n"
#define INPUTS(offset) \
    "ldr %q[x0], [%[i0], #" offset "]\n ldr %q[x1], [%[i1], #" offset "]\n" \
    "ldr %q[x2], [%[i2], #" offset "]\n ldr %q[x3], [%[i3], #" offset "]\n"
static inline __attribute__((always_inline)) void dot_tile(
    const int8_t *codes, const int8_t *input, size_t stride, int32x4_t magic, int32x4_t p[8]) {
    int8x16_t a, b, c, d, x0, x1, x2, x3;
    __asm__(
        INPUTS("0") "ldp %q[a], %q[b], [%[codes]]\n ldp %q[c], %q[d], [%[codes], #32]\n"
        "mov %[p0].16b, %[magic].16b\n mov %[p1].16b, %[magic].16b\n mov %[p2].16b, %[magic].16b\n"
        "mov %[p3].16b, %[magic].16b\n mov %[p4].16b, %[magic].16b\n mov %[p5].16b, %[magic].16b\n"
        "mov %[p6].16b, %[magic].16b\n mov %[p7].16b, %[magic].16b\n"
        STEP("0", "%[a]", "%[b]") LOAD("64", "%q[a]", "%q[b]") STEP("1", "%[c]", "%[d]") LOAD("96", "%q[c]", "%q[d]")
        STEP("2", "%[a]", "%[b]") LOAD("128", "%q[a]", "%q[b]") STEP("3", "%[c]", "%[d]") LOAD("160", "%q[c]", "%q[d]")
        INPUTS("16")
        STEP("0", "%[a]", "%[b]") LOAD("192", "%q[a]", "%q[b]") STEP("1", "%[c]", "%[d]") LOAD("224", "%q[c]", "%q[d]")
        STEP("2", "%[a]", "%[b]") STEP("3", "%[c]", "%[d]")
        : [p0] "=&w"(p[0]), [p1] "=&w"(p[1]), [p2] "=&w"(p[2]), [p3] "=&w"(p[3]), [p4] "=&w"(p[4]), [p5] "=&w"(p[5]),
          [p6] "=&w"(p[6]), [p7] "=&w"(p[7]), [a] "=&w"(a), [b] "=&w"(b), [c] "=&w"(c), [d] "=&w"(d), [x0] "=&w"(x0),
          [x1] "=&w"(x1), [x2] "=&w"(x2), [x3] "=&w"(x3)
        : [codes] "r"(codes), [i0] "r"(input), [i1] "r"(input + stride), [i2] "r"(input + 2 * stride),
          [i3] "r"(input + 3 * stride), [magic] "w"(magic), "m"(*(const int8_t(*)[256])codes),
          "m"(*(const int8_t(*)[32])input), "m"(*(const int8_t(*)[32])(input + stride)),
          "m"(*(const int8_t(*)[32])(input + 2 * stride)), "m"(*(const int8_t(*)[32])(input + 3 * stride)));
}

/* The refined groups of one row of the input, after all others. */
static inline __attribute__((always_inline)) void refine_row(
    const expanded *w, const quire_input *x, int row, float32x4_t out[2]) {
    const size_t first = (size_t)row * (size_t)x->num_refined;
    for (int r = 0; r < x->num_refined; r++) {
        const int g = x->refined[first + (size_t)r];
        const int8_t *rest = x->rest + (first + (size_t)r) * GROUP;
        int8x16_t codes[16];
        int32x4_t products[2];
        expand_codes((const uint8_t *)(w->codes + 256 * g), QUIRE_Q8, codes);
        dot_group(codes, vld1q_s8(rest), vld1q_s8(rest + 16), products);
        for (int half = 0; half < 2; half++)
            out[half] = add_scaled(out[half], products[half], vld1q_f32(w->scales + 8 * g + 4 * half),
                                   x->rest_scales[first + (size_t)r]);
    }
}

/* TILE rows of the input from `row` on. */
static inline __attribute__((always_inline)) void multiply_tile(
    const expanded *w, int kind, const quire_input *x, int row, float *y, size_t stride, int count) {
    const int groups = w->num_groups;
    const size_t row_bytes = (size_t)groups * GROUP;
    const int8_t *q = x->q + (size_t)row * row_bytes;
    const float *scales = x->scales + (size_t)row * (size_t)groups, *sums = x->sums + (size_t)row * (size_t)groups;
    const int32x4_t magic = vdupq_n_s32(MAGIC_BITS);
    const float32x4_t taken = vdupq_n_f32(MAGIC);
    float32x4_t out[TILE][2];
    for (int m = 0; m < TILE; m++) out[m][0] = out[m][1] = vdupq_n_f32(0);
    for (int g = 0; g < groups; g++) {
        int32x4_t products[2 * TILE];
        dot_tile(w->codes + 256 * g, q + 32 * g, row_bytes, magic, products);
        for (int half = 0; half < 2; half++) {
            const float32x4_t scale = vld1q_f32(w->scales + 8 * g + 4 * half);
            for (int m = 0; m < TILE; m++) {
                const float32x4_t whole = vsubq_f32(vreinterpretq_f32_s32(products[2 * m + half]), taken);
                out[m][half] = vfmaq_f32(out[m][half], whole, vmulq_n_f32(scale, scales[m * groups + g]));
            }
            if (kind == QUIRE_Q4) {
                const float32x4_t minimum = vld1q_f32(w->minima + 8 * g + 4 * half);
                for (int m = 0; m < TILE; m++) out[m][half] = vfmaq_n_f32(out[m][half], minimum, sums[m * groups + g]);
            }
        }
    }
    float sums_so_far[TILE][PANEL]; /* by way of memory: a loop over registers would keep them in memory all along */
    for (int m = 0; m < TILE; m++)
        for (int half = 0; half < 2; half++) vst1q_f32(sums_so_far[m] + 4 * half, out[m][half]);
    for (int m = 0; m < TILE; m++) {
        float32x4_t sum[2] = {vld1q_f32(sums_so_far[m]), vld1q_f32(sums_so_far[m] + 4)};
        refine_row(w, x, row + m, sum);
        write_outputs(sum[0], sum[1], y + (size_t)(row + m) * stride, count);
    }
}

/* One row of the input, with the same operations on it as a tile has. */
static inline __attribute__((always_inline)) void multiply_row(
    const expanded *w, int kind, const quire_input *x, int row, float *y, size_t stride, int count) {
    const int groups = w->num_groups;
    const int8_t *q = x->q + (size_t)row * (size_t)groups * GROUP;
    const float *scales = x->scales + (size_t)row * (size_t)groups, *sums = x->sums + (size_t)row * (size_t)groups;
    float32x4_t out[2] = {vdupq_n_f32(0), vdupq_n_f32(0)};
    for (int g = 0; g < groups; g++) {
        int8x16_t codes[16];
        int32x4_t products[2];
        expand_codes((const uint8_t *)(w->codes + 256 * g), QUIRE_Q8, codes);
        dot_group(codes, vld1q_s8(q + 32 * g), vld1q_s8(q + 32 * g + 16), products);
        for (int half = 0; half < 2; half++) {
            out[half] = add_scaled(out[half], products[half], vld1q_f32(w->scales + 8 * g + 4 * half), scales[g]);
            if (kind == QUIRE_Q4) out[half] = vfmaq_n_f32(out[half], vld1q_f32(w->minima + 8 * g + 4 * half), sums[g]);
        }
    }
    refine_row(w, x, row, out);
    write_outputs(out[0], out[1], y + (size_t)row * stride, count);
}

static inline __attribute__((always_inline)) void multiply(
    const uint8_t *w, const int kind, const quire_input *x, float *scratch, float *y, size_t stride, int count) {
    const int num_rows = x->num_rows;
    if (num_rows < 3) {
        for (int row = 0; row < num_rows; row++) stream(w, kind, x, row, y + (size_t)row * stride, count);
        return;
    }
    const expanded panel = expand_panel(w, kind, x->num_groups, scratch, 0);
    int row = 0;
    for (; row + TILE <= num_rows; row += TILE) multiply_tile(&panel, kind, x, row, y, stride, count);
    for (; row < num_rows; row++) multiply_row(&panel, kind, x, row, y, stride, count);
}

static void multiply_panel(
    const uint8_t *w, int kind, const quire_input *x, float *scratch, float *y, size_t stride, int count) {
    if (kind == QUIRE_Q4) multiply(w, QUIRE_Q4, x, scratch, y, stride, count);
    else multiply(w, QUIRE_Q8, x, scratch, y, stride, count);
}

static int is_supported(void) {
#if defined(__linux__)
    const unsigned long wanted = HWCAP_ASIMDDP | HWCAP_ASIMDHP;
    return (getauxval(AT_HWCAP) & wanted) == wanted;
#else
    return 1; /* Apple silicon */
#endif
}

const quire_variant quire_variant_dotprod = VARIANT("neon dotprod", is_supported, multiply_panel);
