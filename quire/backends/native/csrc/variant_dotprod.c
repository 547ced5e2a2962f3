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
#define STEP(lane, first, second) \
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
    STEP("0", "v24", "v25") LOAD("64", "q24", "q25") STEP("1", "v26", "v27") LOAD("96", "q26", "q27") \
    STEP("2", "v24", "v25") LOAD("128", "q24", "q25") STEP("3", "v26", "v27") LOAD("160", "q26", "q27") \
    INPUTS("16") "ldp q14, q15, [%[factors]]\n" \
    STEP("0", "v24", "v25") LOAD("192", "q24", "q25") STEP("1", "v26", "v27") LOAD("224", "q26", "q27") \
    FOUR("scales", "s8", "s9", "s10", "s11") \
    STEP("2", "v24", "v25") "ldp q24, q25, [%[factors], #32]\n" STEP("3", "v26", "v27") \
    "ldp q26, q27, [%[factors], #32]\n ldp q28, q29, [%[factors], #32]\n ldp q30, q31, [%[factors], #32]\n" \
    SCALE("v16", "v17", "v24", "v25") SCALE("v18", "v19", "v26", "v27") \
    SCALE("v20", "v21", "v28", "v29") SCALE("v22", "v23", "v30", "v31") \
    ADD("v24", "v25", "v8", "v0", "v1") ADD("v26", "v27", "v9", "v2", "v3") \
    ADD("v28", "v29", "v10", "v4", "v5") ADD("v30", "v31", "v11", "v6", "v7")
#define MINIMA \
    "ldp q14, q15, [%[factors], #64]\n" FOUR("sums", "s16", "s17", "s18", "s19") \
    ADD("v14", "v15", "v16", "v0", "v1") ADD("v14", "v15", "v17", "v2", "v3") \
    ADD("v14", "v15", "v18", "v4", "v5") ADD("v14", "v15", "v19", "v6", "v7")

/* Computes the same for one row of the input, in v18 and v19; x16 and x17 point to codes and factors. */
#define LOAD_ONE(offset, first, second) "ldp " first ", " second ", [x16, #" offset "]\n"
#define ONE(first, second, input, lane) \
    "sdot v16.4s, " first ".16b, " input ".4b[" lane "]\n sdot v17.4s, " second ".16b, " input ".4b[" lane "]\n"
#define ONE_GROUP(input) \
    "ldp q28, q29, [%[" input "]]\n ldp q16, q17, [%[magics]]\n" \
    LOAD_ONE("0", "q20", "q21") LOAD_ONE("32", "q22", "q23") LOAD_ONE("64", "q24", "q25") LOAD_ONE("96", "q26", "q27") \
    ONE("v20", "v21", "v28", "0") LOAD_ONE("128", "q20", "q21") ONE("v22", "v23", "v28", "1") \
    LOAD_ONE("160", "q22", "q23") ONE("v24", "v25", "v28", "2") LOAD_ONE("192", "q24", "q25") \
    ONE("v26", "v27", "v28", "3") LOAD_ONE("224", "q26", "q27") "ldp q18, q19, [x17, #32]\n ldp q30, q31, [x17]\n" \
    ONE("v20", "v21", "v29", "0") ONE("v22", "v23", "v29", "1") ONE("v24", "v25", "v29", "2") \
    ONE("v26", "v27", "v29", "3") \
    "fmla v18.4s, v16.4s, v30.4s\n fmla v19.4s, v17.4s, v31.4s\n"

/* The refined groups of a tile, row by row, with a row's sums in v12 and v13. The address of the next group is computed
   one group early to hide the latency. */
#define REFINED_GROUPS(address) \
    "cbz %[num_refined], 4f\n mov x15, %[num_refined]\n lsl x14, x15, #2\n ldrsw x17, [%[refined]]\n" address \
    "2:\n" \
    "cmp x14, #1\n cset x9, ne\n add %[refined], %[refined], x9, lsl #2\n ldrsw x10, [%[refined]]\n" \
    ONE_GROUP("rest") \
    "ldr s29, [%[rest_scales]], #4\n add %[rest], %[rest], #32\n mov x17, x10\n" address \
    ADD("v18", "v19", "v29", "v12", "v13") \
    "subs x15, x15, #1\n b.ne 3f\n" \
    "stp q12, q13, [%[apart]], #32\n movi v12.4s, #0\n movi v13.4s, #0\n mov x15, %[num_refined]\n" \
    "3:\n subs x14, x14, #1\n b.ne 2b\n" \
    "4:\n"

/* All groups of a tile. */
#define ALL_GROUPS(code_stride, factor_stride, minima, address, prefetch) \
    "movi v0.4s, #0\n movi v1.4s, #0\n movi v2.4s, #0\n movi v3.4s, #0\n movi v4.4s, #0\n movi v5.4s, #0\n" \
    "movi v6.4s, #0\n movi v7.4s, #0\n movi v12.4s, #0\n movi v13.4s, #0\n" \
    "lsl x12, %[groups], #5\n add x9, %[input], x12\n add x10, x9, x12\n add x11, x10, x12\n" \
    "lsl x12, %[groups], #2\n lsl x13, %[groups], #3\n add x14, x12, x13\n mov x15, %[groups]\n" \
    "1:\n" TILE_GROUP minima prefetch \
    "add %[codes], %[codes], #" code_stride "\n add %[factors], %[factors], #" factor_stride "\n" \
    "add %[input], %[input], #32\n add x9, x9, #32\n add x10, x10, #32\n add x11, x11, #32\n" \
    "subs x15, x15, #1\n b.ne 1b\n" REFINED_GROUPS(address) \
    "stp q0, q1, [%[out]]\n stp q2, q3, [%[out], #32]\n stp q4, q5, [%[out], #64]\n stp q6, q7, [%[out], #96]\n"
#define Q4_ADDRESS "mov w16, #352\n madd x16, x17, x16, %[first_codes]\n add x17, x16, #256\n"
#define Q8_ADDRESS "mov w16, #272\n madd x16, x17, x16, %[first_codes]\n add x17, %[first_factors], x17, lsl #6\n"
#define PREFETCH "prfm pldl2keep, [%[ahead]]\n prfm pldl2keep, [%[ahead], #64]\n add %[ahead], %[ahead], #128\n"
_Static_assert(sizeof(expanded) == 352, "the assembly has the offsets of its fields");

/* Computes the products of TILE rows of the input, from `row` on, in `out`, and behind them those of their refined
   groups. `ahead`: bytes to prefetch, of 8-bit codes. */
static inline __attribute__((always_inline)) void dot_tile(
    const panel *w, const int kind, const quire_input *x, int row, const uint8_t *ahead, float out[2 * TILE * PANEL]) {
    const size_t groups = (size_t)x->num_groups, num_refined = (size_t)x->num_refined;
    const size_t first = (size_t)row * groups, first_rest = (size_t)row * num_refined;
    const int8_t *codes = w->codes, *input = x->q + first * GROUP, *rest = x->rest + first_rest * GROUP;
    const float *factors = w->factors, *scales = x->scales + first, *sums = x->sums + first;
    const float *rest_scales = x->rest_scales + first_rest;
    const int32_t *refined = x->refined + first_rest;
    float *apart = out + TILE * PANEL;
#define RUN(code) \
    __asm__ volatile( \
        code \
        : [codes] "+&r"(codes), [input] "+&r"(input), [scales] "+&r"(scales), [sums] "+&r"(sums), \
          [factors] "+&r"(factors), [refined] "+&r"(refined), [rest] "+&r"(rest), \
          [rest_scales] "+&r"(rest_scales), [apart] "+&r"(apart), \
          [ahead] "+&r"(ahead) /* not shared with inputs of the same value */ \
        : [groups] "r"(groups), [magics] "r"(MAGICS), [out] "r"(out), [first_codes] "r"(w->codes), \
          [first_factors] "r"(w->factors), [num_refined] "r"(num_refined) \
        : "x9", "x10", "x11", "x12", "x13", "x14", "x15", "x16", "x17", "cc", "memory", "v0", "v1", "v2", "v3", "v4", \
          "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15", "v16", "v17", "v18", "v19", "v20", \
          "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31")
    if (kind == QUIRE_Q4) RUN(ALL_GROUPS("352", "352", MINIMA, Q4_ADDRESS, ""));
    else RUN(ALL_GROUPS("272", "64", "", Q8_ADDRESS, PREFETCH));
#undef RUN
}

static inline __attribute__((always_inline)) void multiply_tile(
    const panel *w, const int kind, const quire_input *x, int row, const uint8_t *ahead, float *y, size_t stride,
    int count) {
    float sums[2 * TILE * PANEL];
    if (!x->num_refined) memset(sums + TILE * PANEL, 0, TILE * PANEL * sizeof *sums);
    dot_tile(w, kind, x, row, ahead, sums);
    for (int m = 0; m < TILE; m++) {
        const float *sum = sums + PANEL * m, *apart = sum + TILE * PANEL;
        write_outputs(vaddq_f32(vld1q_f32(sum), vld1q_f32(apart)), vaddq_f32(vld1q_f32(sum + 4), vld1q_f32(apart + 4)),
                      y + (size_t)(row + m) * stride, count);
    }
}

/* Computes a group's products with one row of the input, and adds them to `out`. */
static inline __attribute__((always_inline)) void dot_one(
    const panel *w, int group, const int8_t *input, float scale, float32x4_t out[2]) {
    const int8_t *codes = w->codes + (size_t)group * w->code_stride;
    const float *factors = (const float *)((const char *)w->factors + (size_t)group * w->factor_stride);
    __asm__ volatile(
        "mov x16, %[codes]\n mov x17, %[factors]\n" ONE_GROUP("input")
        "fmla %[low].4s, v18.4s, %[scale].s[0]\n fmla %[high].4s, v19.4s, %[scale].s[0]\n"
        : [low] "+w"(out[0]), [high] "+w"(out[1])
        : [codes] "r"(codes), [factors] "r"(factors), [magics] "r"(MAGICS), [input] "r"(input), [scale] "w"(scale)
        : "x16", "x17", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29",
          "v30", "v31");
}

/* Multiplies one row of the input, with the same operations as in a tile. */
static inline __attribute__((always_inline)) void multiply_row(
    const panel *w, const int kind, const quire_input *x, int row, float *y, size_t stride, int count) {
    const int groups = x->num_groups;
    const size_t first = (size_t)row * (size_t)groups, first_rest = (size_t)row * (size_t)x->num_refined;
    float32x4_t out[2] = {vdupq_n_f32(0), vdupq_n_f32(0)}, apart[2] = {vdupq_n_f32(0), vdupq_n_f32(0)};
    for (int g = 0; g < groups; g++) {
        dot_one(w, g, x->q + (first + (size_t)g) * GROUP, x->scales[first + (size_t)g], out);
        if (kind != QUIRE_Q4) continue;
        const float *minima = ((const expanded *)(const void *)w->codes)[g].minima;
        for (int half = 0; half < 2; half++)
            out[half] = vfmaq_n_f32(out[half], vld1q_f32(minima + 4 * half), x->sums[first + (size_t)g]);
    }
    for (size_t at = first_rest; at < first_rest + (size_t)x->num_refined; at++)
        dot_one(w, x->refined[at], x->rest + GROUP * at, x->rest_scales[at], apart);
    write_outputs(vaddq_f32(out[0], apart[0]), vaddq_f32(out[1], apart[1]), y + (size_t)row * stride, count);
}

/* Expands the bytes of a panel; those of 8 bits stay where they are. */
static inline __attribute__((always_inline)) panel prepare_panel(
    const uint8_t *w, const int kind, const quire_input *x, float *scratch) {
    const int groups = x->num_groups;
    if (kind == QUIRE_Q4) {
        const expanded *all = expand_panel(w, QUIRE_Q4, groups, scratch, 0);
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
