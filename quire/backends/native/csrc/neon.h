/* Code shared by the ARM variants: expanding the bytes of a panel, and products with one row of the input. */
#include <arm_neon.h>

#include "rows.h"
#include "attention.h"

#define MAGIC_BITS 0x4b400000 /* bits of MAGIC: adding a small integer to them adds it to the float */

enum { AHEAD = 2048 }; /* prefetch distance in bytes */

typedef struct { /* a group of a panel, expanded: for each of 8 rows 32 codes, a scale and a minimum */
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

/* Puts two steps of 4 inputs side by side, for instructions that multiply 2 rows of 8. */
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
        for (int i = 0; i < panel_bytes(kind); i += 64) /* prefetch the next panel during the products of this one */
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

/* Computes 32 products for each of 8 rows: the bytes of a panel's group times 32 bytes of one input. */
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

/* Sums the refined groups of one input row separately from the others, from the packed bytes. */
static inline __attribute__((always_inline)) void refine_packed(
    const uint8_t *w, int kind, const quire_input *x, int row, float32x4_t out[2]) {
    const int size = panel_bytes(kind), tail = kind == QUIRE_Q8 ? 256 : 128;
    const size_t first = (size_t)row * (size_t)x->num_refined;
    float32x4_t apart[2] = {vdupq_n_f32(0), vdupq_n_f32(0)};
    for (int r = 0; r < x->num_refined; r++) {
        const uint8_t *at = w + (size_t)x->refined[first + (size_t)r] * (size_t)size;
        const int8_t *rest = x->rest + (first + (size_t)r) * GROUP;
        int8x16_t codes[16];
        int32x4_t products[2];
        expand_codes(at, kind, codes);
        dot_group(codes, vld1q_s8(rest), vld1q_s8(rest + 16), products);
        for (int half = 0; half < 2; half++)
            apart[half] = add_scaled(apart[half], products[half], halves(at + tail + 8 * half),
                                     x->rest_scales[first + (size_t)r]);
    }
    for (int half = 0; half < 2; half++) out[half] = vaddq_f32(out[half], apart[half]);
}

/* One row of the input, from the packed bytes: for a single stream, which is limited by reading the weights. A group of
   4-bit codes is unpacked to v24-v31 and v16-v23 and multiplied by 32 bytes of the input. In refined groups it is also
   multiplied by the rounding error of the input. */
#define UNPACK(packed, low) \
    "and " low ".16b, " packed ".16b, %[mask].16b\n ushr " packed ".16b, " packed ".16b, #4\n"
#define UNPACK_ALL \
    "ldp q16, q17, [%[w]]\n ldp q18, q19, [%[w], #32]\n ldp q20, q21, [%[w], #64]\n ldp q22, q23, [%[w], #96]\n" \
    UNPACK("v16", "v24") UNPACK("v17", "v25") UNPACK("v18", "v26") UNPACK("v19", "v27") \
    UNPACK("v20", "v28") UNPACK("v21", "v29") UNPACK("v22", "v30") UNPACK("v23", "v31")
#define PAIR(low, high, codes_low, codes_high, input, lane) \
    "sdot " low ".4s, " codes_low ".16b, %[" input "].4b[" lane "]\n" \
    "sdot " high ".4s, " codes_high ".16b, %[" input "].4b[" lane "]\n"
#define DOT_LOW(low, high, input) \
    PAIR(low, high, "v24", "v25", input, "0") PAIR(low, high, "v26", "v27", input, "1") \
    PAIR(low, high, "v28", "v29", input, "2") PAIR(low, high, "v30", "v31", input, "3")
#define DOT_HIGH(low, high, input) \
    PAIR(low, high, "v16", "v17", input, "0") PAIR(low, high, "v18", "v19", input, "1") \
    PAIR(low, high, "v20", "v21", input, "2") PAIR(low, high, "v22", "v23", input, "3")
#define SCALED(low, high) /* v16, v17: scales; v20: MAGIC */ \
    "fsub " low ".4s, " low ".4s, v20.4s\n fsub " high ".4s, " high ".4s, v20.4s\n" \
    "fmul " low ".4s, " low ".4s, v16.4s\n fmul " high ".4s, " high ".4s, v17.4s\n"
#define TAIL \
    "ldp q30, q31, [%[w], #128]\n ldr q20, [%[magics]]\n" \
    "fcvtl v16.4s, v30.4h\n fcvtl2 v17.4s, v30.8h\n fcvtl v18.4s, v31.4h\n fcvtl2 v19.4s, v31.8h\n" SCALED("v14", "v15") \
    "fmla %[low].4s, v14.4s, %[scale].s[0]\n fmla %[high].4s, v15.4s, %[scale].s[0]\n" \
    "fmla %[low].4s, v18.4s, %[sum].s[0]\n fmla %[high].4s, v19.4s, %[sum].s[0]\n"
#define STREAM_INPUTS \
    [w] "r"(w), [magics] "r"(MAGICS), [mask] "w"(vdupq_n_u8(15)), [x0] "w"(x[0]), \
        [x1] "w"(x[1]), [scale] "w"(scale), [sum] "w"(sum)
#define STREAM_CLOBBERS \
    "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", \
        "v31"
static const int32_t MAGICS[8] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS,
                                  MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};

static inline __attribute__((always_inline)) void stream_four_bits(
    const uint8_t *w, const int8x16_t x[2], float scale, float sum, float32x4_t out[2]) {
    __asm__ volatile(
        UNPACK_ALL "ldp q14, q15, [%[magics]]\n" DOT_LOW("v14", "v15", "x0") DOT_HIGH("v14", "v15", "x1") TAIL
        : [low] "+w"(out[0]), [high] "+w"(out[1])
        : STREAM_INPUTS
        : STREAM_CLOBBERS);
}

static inline __attribute__((always_inline)) void stream_refined_four_bits(
    const uint8_t *w, const int8x16_t x[2], float scale, float sum, float32x4_t out[2], const int8x16_t rest[2],
    float rest_scale, float32x4_t apart[2]) {
    __asm__ volatile(
        UNPACK_ALL "ldp q14, q15, [%[magics]]\n ldp q12, q13, [%[magics]]\n" DOT_LOW("v14", "v15", "x0")
        DOT_LOW("v12", "v13", "r0") DOT_HIGH("v14", "v15", "x1") DOT_HIGH("v12", "v13", "r1") TAIL SCALED("v12", "v13")
        "fmla %[apart_low].4s, v12.4s, %[rest_scale].s[0]\n fmla %[apart_high].4s, v13.4s, %[rest_scale].s[0]\n"
        : [low] "+w"(out[0]), [high] "+w"(out[1]), [apart_low] "+w"(apart[0]), [apart_high] "+w"(apart[1])
        : STREAM_INPUTS, [r0] "w"(rest[0]), [r1] "w"(rest[1]), [rest_scale] "w"(rest_scale)
        : STREAM_CLOBBERS, "v12", "v13");
}

static inline __attribute__((always_inline)) void stream_eight_bits(
    const uint8_t *w, const int8x16_t x[2], float scale, float32x4_t out[2]) {
    int8x16_t codes[16];
    int32x4_t products[2];
    expand_codes(w, QUIRE_Q8, codes);
    dot_group(codes, x[0], x[1], products);
    for (int half = 0; half < 2; half++)
        out[half] = add_scaled(out[half], products[half], halves(w + 256 + 8 * half), scale);
}

static inline __attribute__((always_inline)) void stream_one(
    const uint8_t *w, int kind, const quire_input *x, int row, float *y, int count) {
    const int groups = x->num_groups, num_refined = x->num_refined, size = panel_bytes(kind);
    const size_t first = (size_t)row * (size_t)groups, first_rest = (size_t)row * (size_t)num_refined;
    const float *scales = x->scales + first, *sums = x->sums + first, *rest_scales = x->rest_scales + first_rest;
    const int32_t *refined = x->refined + first_rest;
    const int8_t *q = x->q + first * GROUP, *left = x->rest + first_rest * GROUP;
    float32x4_t out[2] = {vdupq_n_f32(0), vdupq_n_f32(0)}, apart[2] = {vdupq_n_f32(0), vdupq_n_f32(0)};
    for (int g = 0, r = 0; g < groups; g++, w += size, q += GROUP) {
        const int8x16_t input[2] = {vld1q_s8(q), vld1q_s8(q + 16)};
        const int is_refined = r < num_refined && refined[r] == g;
        for (int line = 0; line < size; line += 64) __builtin_prefetch(w + AHEAD + line);
        if (kind == QUIRE_Q8) stream_eight_bits(w, input, scales[g], out);
        else if (!is_refined) stream_four_bits(w, input, scales[g], sums[g], out);
        if (!is_refined) continue;
        const int8x16_t rest[2] = {vld1q_s8(left + GROUP * r), vld1q_s8(left + GROUP * r + 16)};
        if (kind == QUIRE_Q8) stream_eight_bits(w, rest, rest_scales[r], apart);
        else stream_refined_four_bits(w, input, scales[g], sums[g], out, rest, rest_scales[r], apart);
        r++;
    }
    write_outputs(vaddq_f32(out[0], apart[0]), vaddq_f32(out[1], apart[1]), y, count);
}

static void stream_panels(const uint8_t *w, int kind, const quire_input *x, float *y, size_t stride, int count) {
    const size_t panel = (size_t)panel_bytes(kind) * (size_t)x->num_groups;
    for (int column = 0; column < count; column += PANEL, w += panel)
        for (int row = 0; row < x->num_rows; row++) {
            const int left = count - column < PANEL ? count - column : PANEL;
            float *to = y + (size_t)row * stride + column;
            if (kind == QUIRE_Q4) stream_one(w, QUIRE_Q4, x, row, to, left);
            else stream_one(w, QUIRE_Q8, x, row, to, left);
        }
}

enum { MAX_STREAMED = 2 }; /* with more rows, expanding a panel pays */

static void multiply_panel( /* the variant's: all rows of the input, one panel */
    const uint8_t *w, int kind, const quire_input *x, float *scratch, float *y, size_t stride, int count);

static void multiply_panels(
    const uint8_t *w, int kind, const quire_input *x, float *scratch, float *y, size_t stride, int count) {
    if (x->num_rows <= MAX_STREAMED) {
        stream_panels(w, kind, x, y, stride, count);
        return;
    }
    const size_t size = (size_t)panel_bytes(kind) * (size_t)x->num_groups;
    for (int column = 0; column < count; column += PANEL, w += size)
        multiply_panel(w, kind, x, scratch, y + column, stride, count - column < PANEL ? count - column : PANEL);
}
