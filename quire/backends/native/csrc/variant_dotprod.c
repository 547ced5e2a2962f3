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
    "ldr q28, [%[i0], #" offset "]\n ldr q29, [%[i1], #" offset "]\n" \
    "ldr q30, [%[i2], #" offset "]\n ldr q31, [%[i3], #" offset "]\n"
#define SCALE(low, high, to_low, to_high) \
    "fmla " to_low ".4s, " low ".4s, v14.4s\n fmla " to_high ".4s, " high ".4s, v15.4s\n"
#define ADD(low, high, scale, to_low, to_high) \
    "fmla %[" to_low "].4s, " low ".4s, %[" scale "].s[0]\n fmla %[" to_high "].4s, " high ".4s, %[" scale "].s[0]\n"
static inline __attribute__((always_inline)) void dot_tile(
    const expanded *w, const int8_t *input, size_t stride, const float scales[TILE], float32x4_t out[2 * TILE]) {
    __asm__ volatile(
        INPUTS("0") LOAD("0", "q24", "q25") LOAD("32", "q26", "q27")
        "ldp q16, q17, [%[magics]]\n ldp q18, q19, [%[magics]]\n ldp q20, q21, [%[magics]]\n ldp q22, q23, [%[magics]]\n"
        STEP("0", "v24", "v25") LOAD("64", "q24", "q25") STEP("1", "v26", "v27") LOAD("96", "q26", "q27")
        STEP("2", "v24", "v25") LOAD("128", "q24", "q25") STEP("3", "v26", "v27") LOAD("160", "q26", "q27")
        INPUTS("16") "ldp q14, q15, [%[w], #256]\n"
        STEP("0", "v24", "v25") LOAD("192", "q24", "q25") STEP("1", "v26", "v27") LOAD("224", "q26", "q27")
        STEP("2", "v24", "v25") "ldp q24, q25, [%[w], #288]\n" STEP("3", "v26", "v27")
        "ldp q26, q27, [%[w], #288]\n ldp q28, q29, [%[w], #288]\n ldp q30, q31, [%[w], #288]\n"
        SCALE("v16", "v17", "v24", "v25") SCALE("v18", "v19", "v26", "v27")
        SCALE("v20", "v21", "v28", "v29") SCALE("v22", "v23", "v30", "v31")
        ADD("v24", "v25", "s0", "o0", "o1") ADD("v26", "v27", "s1", "o2", "o3")
        ADD("v28", "v29", "s2", "o4", "o5") ADD("v30", "v31", "s3", "o6", "o7")
        : [o0] "+w"(out[0]), [o1] "+w"(out[1]), [o2] "+w"(out[2]), [o3] "+w"(out[3]), [o4] "+w"(out[4]),
          [o5] "+w"(out[5]), [o6] "+w"(out[6]), [o7] "+w"(out[7])
        : [w] "r"(w), [magics] "r"(MAGICS), [i0] "r"(input), [i1] "r"(input + stride),
          [i2] "r"(input + 2 * stride), [i3] "r"(input + 3 * stride), [s0] "w"(scales[0]), [s1] "w"(scales[1]),
          [s2] "w"(scales[2]), [s3] "w"(scales[3])
        : "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27",
          "v28", "v29", "v30", "v31");
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
    const int groups = x->num_groups;
    const size_t row_bytes = (size_t)groups * GROUP;
    const int8_t *q = x->q + (size_t)row * row_bytes;
    const float *scales = x->scales + (size_t)row * (size_t)groups, *sums = x->sums + (size_t)row * (size_t)groups;
    float32x4_t out[2 * TILE];
    for (int i = 0; i < 2 * TILE; i++) out[i] = vdupq_n_f32(0);
    for (int g = 0; g < groups; g++) {
        const float tile_scales[TILE] = {scales[g], scales[groups + g], scales[2 * groups + g], scales[3 * groups + g]};
        dot_tile(w + g, q + GROUP * g, row_bytes, tile_scales, out);
        if (kind != QUIRE_Q4) continue;
        const float32x4_t low = vld1q_f32(w[g].minima), high = vld1q_f32(w[g].minima + 4);
        for (int m = 0; m < TILE; m++) {
            out[2 * m] = vfmaq_n_f32(out[2 * m], low, sums[m * groups + g]);
            out[2 * m + 1] = vfmaq_n_f32(out[2 * m + 1], high, sums[m * groups + g]);
        }
    }
    float sums_so_far[2 * TILE * 4]; /* a second loop over `out` would make the compiler keep `out` in memory */
    for (int i = 0; i < 2 * TILE; i++) vst1q_f32(sums_so_far + 4 * i, out[i]);
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
