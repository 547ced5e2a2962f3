/* What the ARM variants share: bytes of a panel expanded, and one row of the input. */
#include <arm_neon.h>

#include "rows.h"
#include "attention.h"

#define MAGIC_BITS 0x4b400000 /* of MAGIC: a small whole number added to them is added to the float */

enum { AHEAD = 2048 }; /* bytes of a matrix that are asked for before they are needed */

typedef struct { /* a group of a panel, ready for products: for each of 8 rows 32 codes, their scale and minimum */
    int8_t codes[256];
    float scales[PANEL], offsets[PANEL], minima[PANEL]; /* offset: -MAGIC * scale */
} expanded;

static inline __attribute__((always_inline)) void expand_codes(const uint8_t *w, int kind, int8x16_t codes[16]) {
    if (kind == QUIRE_Q8) {
        for (int i = 0; i < 16; i++) codes[i] = vld1q_s8((const int8_t *)w + 16 * i);
        return;
    }
    for (int i = 0; i < 8; i++) {
        uint8x16_t two = vld1q_u8(w + 16 * i);
        codes[i] = vreinterpretq_s8_u8(vandq_u8(two, vdupq_n_u8(15)));
        codes[i + 8] = vreinterpretq_s8_u8(vshrq_n_u8(two, 4));
    }
}

static inline float32x4_t halves(const uint8_t *at) {
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(at)));
}

/* Two steps of 4 inputs side by side, for instructions that multiply 2 rows of 8. */
static inline __attribute__((always_inline)) void pair_steps(int8x16_t codes[16]) {
    for (int i = 0; i < 16; i += 4) { /* two steps of rows 0 to 3 and 4 to 7 */
        int32x4_t steps[4];
        for (int j = 0; j < 4; j++) steps[j] = vreinterpretq_s32_s8(codes[i + j]);
        codes[i] = vreinterpretq_s8_s32(vzip1q_s32(steps[0], steps[2]));
        codes[i + 1] = vreinterpretq_s8_s32(vzip2q_s32(steps[0], steps[2]));
        codes[i + 2] = vreinterpretq_s8_s32(vzip1q_s32(steps[1], steps[3]));
        codes[i + 3] = vreinterpretq_s8_s32(vzip2q_s32(steps[1], steps[3]));
    }
}

static inline __attribute__((always_inline)) const expanded *expand_panel(
    const uint8_t *w, int kind, int num_groups, float *scratch, const int in_pairs) {
    expanded *out = (expanded *)scratch;
    for (int g = 0; g < num_groups; g++, w += panel_bytes(kind), out++) {
        const uint8_t *tail = w + (kind == QUIRE_Q8 ? 256 : 128);
        int8x16_t bytes[16];
        expand_codes(w, kind, bytes);
        if (in_pairs) pair_steps(bytes);
        for (int i = 0; i < panel_bytes(kind); i += 64) /* the next panel, while products are made with this one */
            __builtin_prefetch(w + (size_t)num_groups * (size_t)panel_bytes(kind) + i);
        for (int i = 0; i < 16; i++) vst1q_s8(out->codes + 16 * i, bytes[i]);
        for (int half = 0; half < 2; half++) {
            const float32x4_t scales = halves(tail + 8 * half);
            vst1q_f32(out->scales + 4 * half, scales);
            vst1q_f32(out->offsets + 4 * half, vmulq_n_f32(scales, -MAGIC));
            if (kind == QUIRE_Q4) vst1q_f32(out->minima + 4 * half, halves(tail + 16 + 8 * half));
        }
    }
    return (const expanded *)scratch;
}

/* 32 products for each of 8 rows: bytes of a panel's group and 32 bytes of one input. */
static inline __attribute__((always_inline)) void dot_group(
    const int8x16_t codes[16], int8x16_t low, int8x16_t high, int32x4_t sums[2]) {
    sums[0] = sums[1] = vdupq_n_s32(0);
#define STEP(step, input, lane) \
    sums[0] = vdotq_laneq_s32(sums[0], codes[2 * step], input, lane); \
    sums[1] = vdotq_laneq_s32(sums[1], codes[2 * step + 1], input, lane);
    STEP(0, low, 0) STEP(1, low, 1) STEP(2, low, 2) STEP(3, low, 3)
    STEP(4, high, 0) STEP(5, high, 1) STEP(6, high, 2) STEP(7, high, 3)
#undef STEP
}

static inline __attribute__((always_inline)) float32x4_t add_scaled(
    float32x4_t sum, int32x4_t products, float32x4_t scales, float scale) {
    return vfmaq_n_f32(sum, vmulq_f32(vcvtq_f32_s32(products), scales), scale);
}

static inline void write_outputs(float32x4_t low, float32x4_t high, float *y, int count) {
    if (count == PANEL) {
        vst1q_f32(y, low);
        vst1q_f32(y + 4, high);
        return;
    }
    float out[PANEL];
    vst1q_f32(out, low);
    vst1q_f32(out + 4, high);
    memcpy(y, out, (size_t)count * sizeof *y);
}

/* The refined groups of one row of the input, after all others, from the packed bytes. */
static inline __attribute__((always_inline)) void refine_packed(
    const uint8_t *w, int kind, const quire_input *x, int row, float32x4_t out[2]) {
    const int size = panel_bytes(kind), tail = kind == QUIRE_Q8 ? 256 : 128;
    const size_t first = (size_t)row * (size_t)x->num_refined;
    for (int r = 0; r < x->num_refined; r++) {
        const uint8_t *at = w + (size_t)x->refined[first + (size_t)r] * (size_t)size;
        const int8_t *rest = x->rest + (first + (size_t)r) * GROUP;
        int8x16_t codes[16];
        int32x4_t products[2];
        expand_codes(at, kind, codes);
        dot_group(codes, vld1q_s8(rest), vld1q_s8(rest + 16), products);
        for (int half = 0; half < 2; half++)
            out[half] = add_scaled(out[half], products[half], halves(at + tail + 8 * half),
                                   x->rest_scales[first + (size_t)r]);
    }
}

/* One row of the input, from the packed bytes: for a single stream, where reading the weights is all there is. */
static inline __attribute__((always_inline)) void stream(
    const uint8_t *w, int kind, const quire_input *x, int row, float *y, int count) {
    const int groups = x->num_groups, size = panel_bytes(kind), tail = kind == QUIRE_Q8 ? 256 : 128;
    const int8_t *q = x->q + (size_t)row * (size_t)groups * GROUP;
    const float *scales = x->scales + (size_t)row * (size_t)groups, *sums = x->sums + (size_t)row * (size_t)groups;
    float32x4_t out[2] = {vdupq_n_f32(0), vdupq_n_f32(0)};
    for (int g = 0; g < groups; g++) {
        const uint8_t *at = w + (size_t)g * (size_t)size;
        int8x16_t codes[16];
        int32x4_t products[2];
        for (int i = 0; i < size; i += 64) __builtin_prefetch(at + AHEAD + i);
        expand_codes(at, kind, codes);
        dot_group(codes, vld1q_s8(q + 32 * g), vld1q_s8(q + 32 * g + 16), products);
        for (int half = 0; half < 2; half++) {
            out[half] = add_scaled(out[half], products[half], halves(at + tail + 8 * half), scales[g]);
            if (kind == QUIRE_Q4) out[half] = vfmaq_n_f32(out[half], halves(at + tail + 16 + 8 * half), sums[g]);
        }
    }
    refine_packed(w, kind, x, row, out);
    write_outputs(out[0], out[1], y, count);
}
