/* ARM with products of small byte matrices (i8mm: servers since 2022, Apple M2): twice as many products per
   instruction, if there are enough rows. */
#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

enum { MAX_STREAMED_Q4 = 2 }; /* rows that are multiplied from the packed bytes */
#include "neon.h"

enum { TILE = 4 }; /* rows of the input that share a panel's bytes in registers: two pairs */

/* Computes 32 products for each of 8 rows of a matrix and `num_pairs` pairs of input rows. For a pair, sums[j] holds
   rows 2 j and 2 j + 1 of the matrix for the first input row, then for the second. */
static inline __attribute__((always_inline)) void dot_pairs(
    const int8_t *codes, const int8_t *const inputs[TILE], size_t at, int32x4_t sums[2][4], const int num_pairs) {
    for (int p = 0; p < num_pairs; p++)
        for (int j = 0; j < 4; j++) sums[p][j] = vdupq_n_s32(MAGIC_BITS);
    for (int half = 0; half < 2; half++, codes += 128) {
        int8x16_t eights[2][2];
        for (int p = 0; p < num_pairs; p++) {
            const int64x2_t first = vreinterpretq_s64_s8(vld1q_s8(inputs[2 * p] + at + 16 * half));
            const int64x2_t second = vreinterpretq_s64_s8(vld1q_s8(inputs[2 * p + 1] + at + 16 * half));
            eights[p][0] = vreinterpretq_s8_s64(vzip1q_s64(first, second));
            eights[p][1] = vreinterpretq_s8_s64(vzip2q_s64(first, second));
        }
        for (int i = 0; i < 8; i++) {
            const int8x16_t two_rows = vld1q_s8(codes + 16 * i);
            for (int p = 0; p < num_pairs; p++) sums[p][i % 4] = vmmlaq_s32(sums[p][i % 4], eights[p][i / 4], two_rows);
        }
    }
}

/* Extracts four rows of the matrix for one input row: the first or the second halves of two sums. */
static inline __attribute__((always_inline)) float32x4_t four_products(
    int32x4_t low, int32x4_t high, const int is_second) {
    const int64x2_t a = vreinterpretq_s64_s32(low), b = vreinterpretq_s64_s32(high);
    const float32x4_t four = vreinterpretq_f32_s64(is_second ? vzip2q_s64(a, b) : vzip1q_s64(a, b));
    return vsubq_f32(four, vdupq_n_f32(MAGIC));
}

/* Multiplies `num` input rows from `row` on; an odd row is paired with itself. Float operations: see `stream_panels`. */
static inline __attribute__((always_inline)) void multiply_tile(
    const expanded *panel, const uint8_t *w, int kind, const quire_input *x, int row, float *y, size_t stride,
    int count, const int num) {
    const int groups = x->num_groups;
    const float *scales = x->scales + (size_t)row * (size_t)groups, *sums = x->sums + (size_t)row * (size_t)groups;
    const int8_t *inputs[TILE];
    for (int m = 0; m < TILE; m++)
        inputs[m] = x->q + (size_t)(row + (m < num ? m : num - 1)) * (size_t)groups * GROUP;
    float32x4_t out[TILE][2];
    for (int m = 0; m < num; m++) out[m][0] = out[m][1] = vdupq_n_f32(0);
    for (int g = 0; g < groups; g++) {
        int32x4_t pairs[2][4];
        dot_pairs(panel[g].codes, inputs, (size_t)g * GROUP, pairs, (num + 1) / 2);
        for (int half = 0; half < 2; half++) {
            const float32x4_t scale = vld1q_f32(panel[g].scales + 4 * half);
            for (int m = 0; m < num; m++) {
                const float32x4_t products = four_products(pairs[m / 2][2 * half], pairs[m / 2][2 * half + 1], m % 2);
                out[m][half] = vfmaq_n_f32(out[m][half], vmulq_f32(products, scale), scales[m * groups + g]);
            }
            if (kind == QUIRE_Q4) {
                const float32x4_t minimum = vld1q_f32(panel[g].minima + 4 * half);
                for (int m = 0; m < num; m++) out[m][half] = vfmaq_n_f32(out[m][half], minimum, sums[m * groups + g]);
            }
        }
    }
    for (int m = 0; m < num; m++) {
        refine_packed(w, kind, x, row + m, out[m]);
        write_outputs(out[m][0], out[m][1], y + (size_t)(row + m) * stride, count);
    }
}

static inline __attribute__((always_inline)) void multiply(
    const uint8_t *w, const int kind, const quire_input *x, float *scratch, float *y, size_t stride, int count) {
    const int num_rows = x->num_rows;
    const expanded *panel = expand_panel(w, kind, x->num_groups, scratch, 1);
    int row = 0;
    for (; row + TILE <= num_rows; row += TILE) multiply_tile(panel, w, kind, x, row, y, stride, count, TILE);
    if (num_rows - row == 3) multiply_tile(panel, w, kind, x, row, y, stride, count, 3);
    else if (num_rows - row == 2) multiply_tile(panel, w, kind, x, row, y, stride, count, 2);
    else if (num_rows - row == 1) multiply_tile(panel, w, kind, x, row, y, stride, count, 1);
}

static void multiply_panel(
    const uint8_t *w, int kind, const quire_input *x, float *scratch, float *y, size_t stride, int count) {
    if (kind == QUIRE_Q4) multiply(w, QUIRE_Q4, x, scratch, y, stride, count);
    else if (kind == QUIRE_S4) multiply(w, QUIRE_S4, x, scratch, y, stride, count);
    else multiply(w, QUIRE_Q8, x, scratch, y, stride, count);
}

#include "codebook.h"

static int is_supported(void) {
#if defined(__linux__)
    const unsigned long wanted = HWCAP_ASIMDDP | HWCAP_ASIMDHP, i8mm = 1UL << 13; /* HWCAP2_I8MM, not in old headers */
    return (getauxval(AT_HWCAP) & wanted) == wanted && (getauxval(AT_HWCAP2) & i8mm);
#elif defined(__APPLE__)
    int has = 0;
    size_t size = sizeof has;
    return !sysctlbyname("hw.optional.arm.FEAT_I8MM", &has, &size, NULL, 0) && has;
#else
    return 0;
#endif
}

const quire_variant quire_variant_i8mm = VARIANT("neon i8mm", is_supported, multiply_any);
