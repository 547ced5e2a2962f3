/* ARM with dot products (ARMv8.2: most servers and phones since 2018, all Apple silicon). */
#if defined(__linux__)
#include <sys/auxv.h>
#endif

enum { MAX_STREAMED_Q4 = 3 }; /* rows that are multiplied from the packed bytes */
#include "neon.h"

enum { TILE = 4 }; /* rows of the input that share a panel's bytes in registers */

/* A panel whose bytes are read several times. */
typedef struct {
    const int8_t *codes;  /* of a group: 256, for each of 8 rows 32 */
    const float *factors; /* of a group: scales, offsets and, if it has 4 bits, minima of 8 rows; offset: -MAGIC * scale */
    size_t code_stride, factor_stride; /* from group to group, in bytes */
} panel;

enum { MIN_SPREAD = 12 }; /* rows from which on the next panel of 8 bits is prefetched during the products */

/* The products are written out in assembly because the compiler would use more registers than exist, and would store sums
   in each iteration. Conversions are slow and moves cost time, but loads are free. Sums therefore start at MAGIC, the bits
   of 1.5 * 2^23, so that they are already floats. A product with the scale and an addition of -MAGIC * scale remove it
   again, without rounding in between. */
#define DOT_STEP(lane, first, second) \
    "sdot v16.4s, " first ".16b, v28.4b[" lane "]\n sdot v18.4s, " first ".16b, v29.4b[" lane "]\n" \
    "sdot v20.4s, " first ".16b, v30.4b[" lane "]\n sdot v22.4s, " first ".16b, v31.4b[" lane "]\n" \
    "sdot v17.4s, " second ".16b, v28.4b[" lane "]\n sdot v19.4s, " second ".16b, v29.4b[" lane "]\n" \
    "sdot v21.4s, " second ".16b, v30.4b[" lane "]\n sdot v23.4s, " second ".16b, v31.4b[" lane "]\n"
#define LOAD(offset, first, second) "ldp " first ", " second ", [%[codes], #" offset "]\n"
#define INPUTS(offset) \
    "ldr q28, [%[input], #" offset "]\n ldr q29, [x9, #" offset "]\n" \
    "ldr q30, [x10, #" offset "]\n ldr q31, [x11, #" offset "]\n"
#define SCALE(low, high, to_low, to_high) \
    "fmla " to_low ".4s, " low ".4s, v14.4s\n fmla " to_high ".4s, " high ".4s, v15.4s\n"
#define ADD(low, high, scale, to_low, to_high) \
    "fmla " to_low ".4s, " low ".4s, " scale ".s[0]\n fmla " to_high ".4s, " high ".4s, " scale ".s[0]\n"
#define FOUR(from, one, two, three, four) /* a number of each row */ \
    "ldr " one ", [%[" from "]]\n ldr " two ", [%[" from "], x12]\n ldr " three ", [%[" from "], x13]\n" \
    "ldr " four ", [%[" from "], x14]\n add %[" from "], %[" from "], #4\n"

/* Computes 32 products for each of 8 rows of a matrix and 4 rows of the input, scales them and adds them to v0 to v7. */
#define TILE_GROUP \
    INPUTS("0") LOAD("0", "q24", "q25") LOAD("32", "q26", "q27") \
    "ldp q16, q17, [%[magics]]\n ldp q18, q19, [%[magics]]\n ldp q20, q21, [%[magics]]\n ldp q22, q23, [%[magics]]\n" \
    DOT_STEP("0", "v24", "v25") LOAD("64", "q24", "q25") DOT_STEP("1", "v26", "v27") LOAD("96", "q26", "q27") \
    DOT_STEP("2", "v24", "v25") LOAD("128", "q24", "q25") DOT_STEP("3", "v26", "v27") LOAD("160", "q26", "q27") \
    INPUTS("16") "ldp q14, q15, [%[factors]]\n" \
    DOT_STEP("0", "v24", "v25") LOAD("192", "q24", "q25") DOT_STEP("1", "v26", "v27") LOAD("224", "q26", "q27") \
    FOUR("scales", "s8", "s9", "s10", "s11") \
    DOT_STEP("2", "v24", "v25") "ldp q24, q25, [%[factors], #32]\n" DOT_STEP("3", "v26", "v27") \
    "ldp q26, q27, [%[factors], #32]\n ldp q28, q29, [%[factors], #32]\n ldp q30, q31, [%[factors], #32]\n" \
    SCALE("v16", "v17", "v24", "v25") SCALE("v18", "v19", "v26", "v27") \
    SCALE("v20", "v21", "v28", "v29") SCALE("v22", "v23", "v30", "v31") \
    ADD("v24", "v25", "v8", "v0", "v1") ADD("v26", "v27", "v9", "v2", "v3") \
    ADD("v28", "v29", "v10", "v4", "v5") ADD("v30", "v31", "v11", "v6", "v7")
#define MINIMA \
    "ldp q14, q15, [%[factors], #64]\n" FOUR("sums", "s16", "s17", "s18", "s19") \
    ADD("v14", "v15", "v16", "v0", "v1") ADD("v14", "v15", "v17", "v2", "v3") \
    ADD("v14", "v15", "v18", "v4", "v5") ADD("v14", "v15", "v19", "v6", "v7")

/* All groups of a tile. */
#define ALL_GROUPS(code_stride, factor_stride, minima, prefetch) \
    "movi v0.4s, #0\n movi v1.4s, #0\n movi v2.4s, #0\n movi v3.4s, #0\n movi v4.4s, #0\n movi v5.4s, #0\n" \
    "movi v6.4s, #0\n movi v7.4s, #0\n" \
    "lsl x12, %[groups], #5\n add x9, %[input], x12\n add x10, x9, x12\n add x11, x10, x12\n" \
    "lsl x12, %[groups], #2\n lsl x13, %[groups], #3\n add x14, x12, x13\n mov x15, %[groups]\n" \
    "1:\n" TILE_GROUP minima prefetch \
    "add %[codes], %[codes], #" code_stride "\n add %[factors], %[factors], #" factor_stride "\n" \
    "add %[input], %[input], #32\n add x9, x9, #32\n add x10, x10, #32\n add x11, x11, #32\n" \
    "subs x15, x15, #1\n b.ne 1b\n" \
    "stp q0, q1, [%[out]]\n stp q2, q3, [%[out], #32]\n stp q4, q5, [%[out], #64]\n stp q6, q7, [%[out], #96]\n"
#define PREFETCH "prfm pldl2keep, [%[ahead]]\n prfm pldl2keep, [%[ahead], #64]\n add %[ahead], %[ahead], #128\n"
_Static_assert(sizeof(expanded) == 352, "the assembly has the offsets of its fields");

/* Computes the products of TILE rows of the input, from `row` on. `ahead`: bytes to prefetch, of 8-bit codes. */
static inline __attribute__((always_inline)) void dot_tile(
    const panel *w, const int kind, const quire_input *x, int row, const uint8_t *ahead, float out[TILE * PANEL]) {
    const size_t groups = (size_t)x->num_groups, first = (size_t)row * groups;
    const int8_t *codes = w->codes, *input = x->q + first * GROUP;
    const float *factors = w->factors, *scales = x->scales + first, *sums = x->sums + first;
#define RUN(code) \
    __asm__ volatile( \
        code \
        : [codes] "+&r"(codes), [input] "+&r"(input), [scales] "+&r"(scales), [sums] "+&r"(sums), \
          [factors] "+&r"(factors), [ahead] "+&r"(ahead) /* not shared with inputs of the same value */ \
        : [groups] "r"(groups), [magics] "r"(MAGICS), [out] "r"(out) \
        : "x9", "x10", "x11", "x12", "x13", "x14", "x15", "cc", "memory", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", \
          "v8", "v9", "v10", "v11", "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", \
          "v26", "v27", "v28", "v29", "v30", "v31")
    if (kind == QUIRE_Q4) RUN(ALL_GROUPS("352", "352", MINIMA, ""));
    else if (kind == QUIRE_S4) RUN(ALL_GROUPS("352", "352", "", ""));
    else RUN(ALL_GROUPS("272", "64", "", PREFETCH));
#undef RUN
}

/* Computes 4 products of a refined step for each of 8 rows of the matrix, and adds them to `low` and `high`. x16 and x17
   are its group and step. */
#define REFINE(from, address, factors, offsets, low, high) \
    "ldp w16, w17, [%[" from "], #8]\n ldr q4, [%[" from "]], #16\n" address "add x17, x16, x17, lsl #5\n" \
    "mov v10.16b, %[magic].16b\n mov v11.16b, %[magic].16b\n" \
    "ldp q8, q9, [x17]\n ldp q14, q15, [" factors "]\n ldp q16, q17, [" offsets "]\n" \
    "sdot v10.4s, v8.16b, v4.4b[0]\n sdot v11.4s, v9.16b, v4.4b[0]\n" \
    "fmla v16.4s, v10.4s, v14.4s\n fmla v17.4s, v11.4s, v15.4s\n" \
    "fmla %[" low "].4s, v16.4s, v4.s[1]\n fmla %[" high "].4s, v17.4s, v4.s[1]\n"
#define FOUR_REFINED(address, factors, offsets) \
    "1:\n" \
    REFINE("a", address, factors, offsets, "a_low", "a_high") REFINE("b", address, factors, offsets, "b_low", "b_high") \
    REFINE("c", address, factors, offsets, "c_low", "c_high") REFINE("d", address, factors, offsets, "d_low", "d_high") \
    "subs %[left], %[left], #1\n b.ne 1b\n"
#define EXPANDED_ADDRESS "umaddl x16, w16, %w[stride], %[codes]\n"
#define Q8_ADDRESS "add x15, %[factors], x16, lsl #6\n umaddl x16, w16, %w[stride], %[codes]\n"
_Static_assert(sizeof(quire_refined) == 16, "the assembly has the offsets of its fields");

/* Sums the refined steps of a tile separately from the others. */
static inline __attribute__((always_inline)) void refine_tile(
    const panel *w, const int kind, const quire_input *x, int row, float32x4_t out[TILE][2]) {
    const size_t count = (size_t)x->num_refined;
    const quire_refined *a = x->refined + (size_t)row * count, *b = a + count, *c = b + count, *d = c + count;
    size_t left = count;
    for (int m = 0; m < TILE; m++) out[m][0] = out[m][1] = vdupq_n_f32(0);
    if (!count) return;
#define RUN(code) \
    __asm__ volatile( \
        code \
        : [a] "+&r"(a), [b] "+&r"(b), [c] "+&r"(c), [d] "+&r"(d), [left] "+&r"(left), [a_low] "+w"(out[0][0]), \
          [a_high] "+w"(out[0][1]), [b_low] "+w"(out[1][0]), [b_high] "+w"(out[1][1]), [c_low] "+w"(out[2][0]), \
          [c_high] "+w"(out[2][1]), [d_low] "+w"(out[3][0]), [d_high] "+w"(out[3][1]) \
        : [codes] "r"(w->codes), [factors] "r"(w->factors), [stride] "r"(w->code_stride), \
          [magic] "w"(vdupq_n_s32(MAGIC_BITS)) \
        : "x15", "x16", "x17", "cc", "memory", "v4", "v8", "v9", "v10", "v11", "v14", "v15", "v16", "v17")
    if (kind != QUIRE_Q8) RUN(FOUR_REFINED(EXPANDED_ADDRESS, "x16, #256", "x16, #288"));
    else RUN(FOUR_REFINED(Q8_ADDRESS, "x15", "x15, #32"));
#undef RUN
}

/* The same for one row. */
static inline __attribute__((always_inline)) void refine_row(
    const panel *w, const quire_input *x, int row, float32x4_t out[2]) {
    const quire_refined *one = x->refined + (size_t)row * (size_t)x->num_refined, *end = one + x->num_refined;
    out[0] = out[1] = vdupq_n_f32(0);
    for (; one < end; one++) {
        const size_t group = (size_t)one->group;
        const int8_t *at = w->codes + group * w->code_stride + one->step * PANEL * STEP;
        const float *factors = w->factors + group * w->factor_stride / sizeof *factors;
        for (int half = 0; half < 2; half++, at += 16, factors += 4) {
            const float32x4_t products = dot_step(vld1q_s8(at), one->q);
            const float32x4_t scaled = vfmaq_f32(vld1q_f32(factors + PANEL), products, vld1q_f32(factors));
            out[half] = vfmaq_n_f32(out[half], scaled, one->scale);
        }
    }
}

static inline __attribute__((always_inline)) void multiply_tile(
    const panel *w, const int kind, const quire_input *x, int row, const uint8_t *ahead, float *y, size_t stride,
    int count) {
    float sums[TILE * PANEL];
    float32x4_t apart[TILE][2];
    dot_tile(w, kind, x, row, ahead, sums);
    refine_tile(w, kind, x, row, apart);
    for (int m = 0; m < TILE; m++) {
        const float *sum = sums + PANEL * m;
        write_outputs(vaddq_f32(vld1q_f32(sum), apart[m][0]), vaddq_f32(vld1q_f32(sum + 4), apart[m][1]),
                      y + (size_t)(row + m) * stride, count);
    }
}

/* Multiplies one row of the input, with the same operations as in a tile. */
static inline __attribute__((always_inline)) void multiply_row(
    const panel *w, const int kind, const quire_input *x, int row, float *y, size_t stride, int count) {
    const size_t first = (size_t)row * (size_t)x->num_groups, last = first + (size_t)x->num_groups;
    const int8_t *at = w->codes;
    const float *factors = w->factors;
    float32x4_t out[2] = {vdupq_n_f32(0), vdupq_n_f32(0)};
    for (size_t g = first; g < last; g++) {
        int8x16_t codes[16];
        int32x4_t products[2];
        for (int i = 0; i < 16; i++) codes[i] = vld1q_s8(at + 16 * i);
        dot_group(codes, vld1q_s8(x->q + g * GROUP), vld1q_s8(x->q + g * GROUP + 16), products);
        for (int half = 0; half < 2; half++) {
            out[half] = add_scaled(out[half], products[half], vld1q_f32(factors + 4 * half), x->scales[g]);
            if (kind == QUIRE_Q4) out[half] = vfmaq_n_f32(out[half], vld1q_f32(factors + 16 + 4 * half), x->sums[g]);
        }
        at += w->code_stride;
        factors += w->factor_stride / sizeof *factors;
    }
    float32x4_t apart[2];
    refine_row(w, x, row, apart);
    write_outputs(vaddq_f32(out[0], apart[0]), vaddq_f32(out[1], apart[1]), y + (size_t)row * stride, count);
}

/* Expands the bytes of a panel; those of 8 bits stay where they are. */
static inline __attribute__((always_inline)) panel prepare_panel(
    const uint8_t *w, const int kind, const quire_input *x, float *scratch) {
    const int groups = x->num_groups;
    if (kind != QUIRE_Q8) {
        const expanded *all = expand_panel(w, kind, groups, scratch, 0);
        return (panel){all->codes, all->scales, sizeof *all, sizeof *all};
    }
    const size_t size = (size_t)panel_bytes(QUIRE_Q8);
    float *factors = scratch;
    for (int g = 0; g < groups; g++, factors += 2 * PANEL) {
        for (int half = 0; half < 2; half++) {
            const float32x4_t scales = halves(w + (size_t)g * size + 256 + 8 * half);
            vst1q_f32(factors + 4 * half, scales);
            vst1q_f32(factors + PANEL + 4 * half, vmulq_n_f32(scales, -MAGIC));
        }
        for (size_t i = 0; i < size && x->num_rows < MIN_SPREAD; i += 64)
            __builtin_prefetch(w + (size_t)(groups + g) * size + i);
    }
    return (panel){(const int8_t *)w, scratch, size, 2 * PANEL * sizeof *factors};
}

static inline __attribute__((always_inline)) void multiply(
    const uint8_t *w, const int kind, const quire_input *x, float *scratch, float *y, size_t stride, int count) {
    enum { SPREAD = MIN_SPREAD / TILE }; /* tiles whose prefetches together cover a panel */
    const int num_rows = x->num_rows;
    const size_t groups = (size_t)x->num_groups, share = 128 * groups;
    const panel all = prepare_panel(w, kind, x, scratch);
    const uint8_t *next = w + groups * (size_t)panel_bytes(kind);
    __asm__ volatile("" ::: "memory"); /* the panel must be written: the compiler does not see that assembly reads it */
    int row = 0;
    for (; row + TILE <= num_rows; row += TILE)
        multiply_tile(&all, kind, x, row, next + (size_t)(row / TILE % SPREAD) * share, y, stride, count);
    for (; row < num_rows; row++) multiply_row(&all, kind, x, row, y, stride, count);
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
    const unsigned long wanted = HWCAP_ASIMDDP | HWCAP_ASIMDHP;
    return (getauxval(AT_HWCAP) & wanted) == wanted;
#else
    return 1; /* Apple silicon */
#endif
}

const quire_variant quire_variant_dotprod = VARIANT("neon dotprod", is_supported, multiply_any);
