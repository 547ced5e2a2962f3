/* ARM with dot products (ARMv8.2: most servers and phones since 2018, all Apple silicon). */
#if defined(__linux__)
#include <sys/auxv.h>
#endif

enum { MAX_STREAMED_Q4 = 3 }; /* rows that are multiplied from the packed bytes */
#include "neon.h"

enum { TILE = 4 }; /* rows of the input that share a panel's bytes in registers */

/* Computes 32 products for each of 8 rows of a matrix and 4 rows of the input, scales them and adds them to `out`. The
   order is written out because the compiler would use more registers than exist, and spill. Conversions are slow and
   moves cost time, but loads are free. Sums therefore start at MAGIC, the bits of 1.5 * 2^23, so that they are already
   floats. A product with the scale and an addition of -MAGIC * scale remove it again, without rounding in between. */
#define STEP(lane, first, second) \
    "sdot v16.4s, " first ".16b, v28.4b[" lane "]\n sdot v18.4s, " first ".16b, v29.4b[" lane "]\n" \
    "sdot v20.4s, " first ".16b, v30.4b[" lane "]\n sdot v22.4s, " first ".16b, v31.4b[" lane "]\n" \
    "sdot v17.4s, " second ".16b, v28.4b[" lane "]\n sdot v19.4s, " second ".16b, v29.4b[" lane "]\n" \
    "sdot v21.4s, " second ".16b, v30.4b[" lane "]\n sdot v23.4s, " second ".16b, v31.4b[" lane "]\n"
#define LOAD(offset, first, second) "ldp " first ", " second ", [%[w], #" offset "]\n"
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
#define MINIMA \
    "ldp q12, q13, [%[w], #320]\n" FOUR("sums", "s16", "s17", "s18", "s19") \
    ADD("v12", "v13", "v16", "v0", "v1") ADD("v12", "v13", "v17", "v2", "v3") \
    ADD("v12", "v13", "v18", "v4", "v5") ADD("v12", "v13", "v19", "v6", "v7")
#define DOT_TILE(minima) \
    "movi v0.4s, #0\n movi v1.4s, #0\n movi v2.4s, #0\n movi v3.4s, #0\n" \
    "movi v4.4s, #0\n movi v5.4s, #0\n movi v6.4s, #0\n movi v7.4s, #0\n" \
    "add x9, %[input], %[bytes]\n add x10, x9, %[bytes]\n add x11, x10, %[bytes]\n" \
    "lsl x12, %[groups], #2\n lsl x13, %[groups], #3\n add x14, x12, x13\n mov x15, %[groups]\n" \
    "1:\n" \
    INPUTS("0") LOAD("0", "q24", "q25") LOAD("32", "q26", "q27") \
    "ldp q16, q17, [%[magics]]\n ldp q18, q19, [%[magics]]\n ldp q20, q21, [%[magics]]\n ldp q22, q23, [%[magics]]\n" \
    STEP("0", "v24", "v25") LOAD("64", "q24", "q25") STEP("1", "v26", "v27") LOAD("96", "q26", "q27") \
    STEP("2", "v24", "v25") LOAD("128", "q24", "q25") STEP("3", "v26", "v27") LOAD("160", "q26", "q27") \
    INPUTS("16") "ldp q14, q15, [%[w], #256]\n" \
    STEP("0", "v24", "v25") LOAD("192", "q24", "q25") STEP("1", "v26", "v27") LOAD("224", "q26", "q27") \
    FOUR("scales", "s8", "s9", "s10", "s11") \
    STEP("2", "v24", "v25") "ldp q24, q25, [%[w], #288]\n" STEP("3", "v26", "v27") \
    "ldp q26, q27, [%[w], #288]\n ldp q28, q29, [%[w], #288]\n ldp q30, q31, [%[w], #288]\n" \
    SCALE("v16", "v17", "v24", "v25") SCALE("v18", "v19", "v26", "v27") \
    SCALE("v20", "v21", "v28", "v29") SCALE("v22", "v23", "v30", "v31") \
    ADD("v24", "v25", "v8", "v0", "v1") ADD("v26", "v27", "v9", "v2", "v3") \
    ADD("v28", "v29", "v10", "v4", "v5") ADD("v30", "v31", "v11", "v6", "v7") \
    minima \
    "add %[w], %[w], #352\n add %[input], %[input], #32\n add x9, x9, #32\n add x10, x10, #32\n add x11, x11, #32\n" \
    "subs x15, x15, #1\n b.ne 1b\n" \
    "stp q0, q1, [%[out]]\n stp q2, q3, [%[out], #32]\n stp q4, q5, [%[out], #64]\n stp q6, q7, [%[out], #96]\n"
_Static_assert(sizeof(expanded) == 352, "the assembly has its offsets");
/* Computes the products of 8 rows of a matrix and TILE rows of the input, without the refined groups. */
static inline __attribute__((always_inline)) void dot_tile(
    const expanded *w, const int kind, const quire_input *x, int row, float out[TILE * PANEL]) {
    const size_t groups = (size_t)x->num_groups, first = (size_t)row * groups;
    const int8_t *input = x->q + first * GROUP;
    const float *scales = x->scales + first, *sums = x->sums + first;
#define RUN(code) \
    __asm__ volatile( \
        code \
        : [w] "+r"(w), [input] "+r"(input), [scales] "+r"(scales), [sums] "+r"(sums) \
        : [groups] "r"(groups), [bytes] "r"(groups * GROUP), [magics] "r"(MAGICS), [out] "r"(out) \
        : "x9", "x10", "x11", "x12", "x13", "x14", "x15", "cc", "memory", "v0", "v1", "v2", "v3", "v4", "v5", "v6", \
          "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", \
          "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31")
    if (kind == QUIRE_Q4) RUN(DOT_TILE(MINIMA));
    else RUN(DOT_TILE(""));
#undef RUN
}

/* The same for one row of the input. */
#define ONE(first, second, input, lane) \
    "sdot v16.4s, " first ".16b, " input ".4b[" lane "]\n sdot v17.4s, " second ".16b, " input ".4b[" lane "]\n"
static inline __attribute__((always_inline)) void dot_one(
    const expanded *w, const int8_t *input, float scale, float32x4_t out[2]) {
    __asm__ volatile(
        "ldp q28, q29, [%[input]]\n ldp q16, q17, [%[magics]]\n"
        LOAD("0", "q20", "q21") LOAD("32", "q22", "q23") LOAD("64", "q24", "q25") LOAD("96", "q26", "q27")
        ONE("v20", "v21", "v28", "0") LOAD("128", "q20", "q21") ONE("v22", "v23", "v28", "1") LOAD("160", "q22", "q23")
        ONE("v24", "v25", "v28", "2") LOAD("192", "q24", "q25") ONE("v26", "v27", "v28", "3") LOAD("224", "q26", "q27")
        "ldp q18, q19, [%[w], #288]\n ldp q30, q31, [%[w], #256]\n"
        ONE("v20", "v21", "v29", "0") ONE("v22", "v23", "v29", "1") ONE("v24", "v25", "v29", "2")
        ONE("v26", "v27", "v29", "3")
        "fmla v18.4s, v16.4s, v30.4s\n fmla v19.4s, v17.4s, v31.4s\n"
        "fmla %[low].4s, v18.4s, %[scale].s[0]\n fmla %[high].4s, v19.4s, %[scale].s[0]\n"
        : [low] "+w"(out[0]), [high] "+w"(out[1])
        : [w] "r"(w), [magics] "r"(MAGICS), [input] "r"(input), [scale] "w"(scale)
        : "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29",
          "v30", "v31");
}

/* Sums the refined groups of some input rows separately from the others. */
static inline __attribute__((always_inline)) void refine_row(
    const expanded *w, const quire_input *x, int row, float32x4_t out[2]) {
    const int count = x->num_refined;
    const size_t first = (size_t)row * (size_t)count;
    float32x4_t apart[2] = {vdupq_n_f32(0), vdupq_n_f32(0)};
    for (size_t at = first; at < first + (size_t)count; at++)
        dot_one(w + x->refined[at], x->rest + GROUP * at, x->rest_scales[at], apart);
    for (int half = 0; half < 2; half++) out[half] = vaddq_f32(out[half], apart[half]);
}

static inline void add_to(float *sum, float32x4_t x) { vst1q_f32(sum, vaddq_f32(vld1q_f32(sum), x)); }

static inline __attribute__((always_inline)) void refine_tile(
    const expanded *w, const quire_input *x, int row, float sums[2 * TILE * 4]) {
    const int count = x->num_refined;
    const size_t first = (size_t)row * (size_t)count;
    const int32_t *refined = x->refined + first;
    const int8_t *rest = x->rest + first * GROUP;
    const float *scales = x->rest_scales + first;
    float32x4_t a[2], b[2], c[2], d[2]; /* the compiler would keep an array of them in memory */
    a[0] = a[1] = b[0] = b[1] = c[0] = c[1] = d[0] = d[1] = vdupq_n_f32(0);
    if (count == 0) return;
    const expanded *at[TILE] = {w + refined[0], w + refined[count], w + refined[2 * count], w + refined[3 * count]};
    for (int r = 0; r < count; r++) { /* the addresses of the next groups are computed early to hide the latency */
        const int s = r + count, t = s + count, u = t + count, next = r + 1 < count ? r + 1 : r;
        const expanded *then[TILE] = {w + refined[next], w + refined[next + count], w + refined[next + 2 * count],
                                      w + refined[next + 3 * count]};
        dot_one(at[0], rest + GROUP * r, scales[r], a);
        dot_one(at[1], rest + GROUP * s, scales[s], b);
        dot_one(at[2], rest + GROUP * t, scales[t], c);
        dot_one(at[3], rest + GROUP * u, scales[u], d);
        for (int m = 0; m < TILE; m++) at[m] = then[m];
    }
    for (int half = 0; half < 2; half++) {
        add_to(sums + 4 * half, a[half]), add_to(sums + 8 + 4 * half, b[half]);
        add_to(sums + 16 + 4 * half, c[half]), add_to(sums + 24 + 4 * half, d[half]);
    }
}

/* Multiplies TILE rows of the input, starting at `row`. */
static inline __attribute__((always_inline)) void multiply_tile(
    const expanded *w, int kind, const quire_input *x, int row, float *y, size_t stride, int count) {
    float sums_so_far[TILE * PANEL];
    dot_tile(w, kind, x, row, sums_so_far);
    refine_tile(w, x, row, sums_so_far);
    for (int m = 0; m < TILE; m++) {
        const float *sum = sums_so_far + PANEL * m;
        write_outputs(vld1q_f32(sum), vld1q_f32(sum + 4), y + (size_t)(row + m) * stride, count);
    }
}

/* Multiplies one row of the input, with the same operations as in a tile. */
static inline __attribute__((always_inline)) void multiply_row(
    const expanded *w, int kind, const quire_input *x, int row, float *y, size_t stride, int count) {
    const int groups = x->num_groups;
    const size_t first = (size_t)row * (size_t)groups;
    float32x4_t out[2] = {vdupq_n_f32(0), vdupq_n_f32(0)};
    for (int g = 0; g < groups; g++) {
        dot_one(w + g, x->q + (first + (size_t)g) * GROUP, x->scales[first + (size_t)g], out);
        if (kind != QUIRE_Q4) continue;
        for (int half = 0; half < 2; half++)
            out[half] = vfmaq_n_f32(out[half], vld1q_f32(w[g].minima + 4 * half), x->sums[first + (size_t)g]);
    }
    refine_row(w, x, row, out);
    write_outputs(out[0], out[1], y + (size_t)row * stride, count);
}

static inline __attribute__((always_inline)) void multiply(
    const uint8_t *w, const int kind, const quire_input *x, float *scratch, float *y, size_t stride, int count) {
    const int num_rows = x->num_rows;
    const expanded *panel = expand_panel(w, kind, x->num_groups, scratch, 0);
    __asm__ volatile("" ::: "memory"); /* the panel must be written: the compiler does not see that assembly reads it */
    int row = 0;
    for (; row + TILE <= num_rows; row += TILE) multiply_tile(panel, kind, x, row, y, stride, count);
    for (; row < num_rows; row++) multiply_row(panel, kind, x, row, y, stride, count);
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
