/* Code shared by the ARM variants: expanding the bytes of a panel, and products with one row of the input. */
#include <arm_neon.h>

#include "rows.h"
#include "attention.h"
#include "recurrence.h"

#define MAGIC_BITS 0x4b400000 /* bits of MAGIC: adding a small integer to them adds it to the float */

enum { AHEAD = 2048 }; /* prefetch distance in bytes */

typedef struct { /* a group of a panel, expanded: for each of 8 rows 32 codes, a scale and a minimum */
    int8_t codes[256];
    float scales[PANEL], offsets[PANEL], minima[PANEL]; /* offset: -MAGIC * scale */
} expanded;

/* Signed nibbles become bytes times 16, which takes one instruction instead of two. Their scales are divided by 16. */
#define HAS_SIGNED_NIBBLES
#define SIXTEENTH 0.0625f

static inline __attribute__((always_inline)) void expand_codes(const uint8_t *w, int kind, int8x16_t codes[16]) {
    if (kind == QUIRE_Q8) {
        for (int i = 0; i < 16; i++) codes[i] = vld1q_s8((const int8_t *)w + 16 * i);
        return;
    }
    for (int i = 0; i < 8; i++) {
        uint8x16_t two = vld1q_u8(w + 16 * i);
        if (kind == QUIRE_S4) {
            codes[i] = vreinterpretq_s8_u8(vshlq_n_u8(two, 4));
            codes[i + 8] = vreinterpretq_s8_u8(vandq_u8(two, vdupq_n_u8(0xf0)));
            continue;
        }
        codes[i] = vreinterpretq_s8_u8(vandq_u8(two, vdupq_n_u8(15)));
        codes[i + 8] = vreinterpretq_s8_u8(vshrq_n_u8(two, 4));
    }
}

static inline float32x4_t halves(const uint8_t *at) {
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(at)));
}

/* Scales of 4 rows, for codes as `expand_codes` returns them. */
static inline __attribute__((always_inline)) float32x4_t four_scales(const uint8_t *at, int kind) {
    return kind == QUIRE_S4 ? vmulq_n_f32(halves(at), SIXTEENTH) : halves(at);
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
            const float32x4_t scales = four_scales(tail + 8 * half, kind);
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
#define DOT_STEP(step, input, lane) \
    sums[0] = vdotq_laneq_s32(sums[0], codes[2 * step], input, lane); \
    sums[1] = vdotq_laneq_s32(sums[1], codes[2 * step + 1], input, lane);
    DOT_STEP(0, low, 0) DOT_STEP(1, low, 1) DOT_STEP(2, low, 2) DOT_STEP(3, low, 3)
    DOT_STEP(4, high, 0) DOT_STEP(5, high, 1) DOT_STEP(6, high, 2) DOT_STEP(7, high, 3)
#undef DOT_STEP
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

/* Returns the products of a step of 4 inputs with 4 rows, plus MAGIC. Conversions from integers are slow. */
static inline __attribute__((always_inline)) float32x4_t dot_step(int8x16_t codes, const int8_t *input) {
    const int8x8_t four = vreinterpret_s8_s32(vld1_dup_s32((const int32_t *)(const void *)input));
    return vreinterpretq_f32_s32(vdotq_lane_s32(vdupq_n_s32(MAGIC_BITS), codes, four, 0));
}

/* Sums the refined steps of one input row separately from the others, from the packed bytes. */
static inline __attribute__((always_inline)) void refine_packed(
    const uint8_t *w, int kind, const quire_input *x, int row, float32x4_t out[2]) {
    const int size = panel_bytes(kind), tail = kind == QUIRE_Q8 ? 256 : 128;
    const quire_refined *one = x->refined + (size_t)row * (size_t)x->num_refined, *end = one + x->num_refined;
    float32x4_t apart[2] = {vdupq_n_f32(0), vdupq_n_f32(0)};
    for (; one < end; one++) {
        const int is_high = kind != QUIRE_Q8 && one->step >= STEPS / 2;
        const uint8_t *at = w + one->group * size, *codes = at + 32 * (is_high ? one->step - STEPS / 2 : one->step);
        const int8x16_t shift = vdupq_n_s8((kind == QUIRE_S4 ? 4 : 0) - (is_high ? 4 : 0)); /* to the left */
        for (int half = 0; half < 2; half++) {
            uint8x16_t bytes = vld1q_u8(codes + 16 * half);
            if (kind != QUIRE_Q8) bytes = vandq_u8(vshlq_u8(bytes, shift), vdupq_n_u8(kind == QUIRE_Q4 ? 15 : 0xf0));
            const float32x4_t products = dot_step(vreinterpretq_s8_u8(bytes), one->q);
            const float32x4_t scales = four_scales(at + tail + 8 * half, kind);
            const float32x4_t scaled = vmulq_f32(vsubq_f32(products, vdupq_n_f32(MAGIC)), scales);
            apart[half] = vfmaq_n_f32(apart[half], scaled, one->scale);
        }
    }
    for (int half = 0; half < 2; half++) out[half] = vaddq_f32(out[half], apart[half]);
}

/* A few rows of the input, from the packed bytes: for a single stream and for experts that few rows chose. Two groups of
   4-bit codes are unpacked and multiplied at a time, or one group with two rows. The order is written out because a group
   has more instructions than the processor looks ahead: one after the other, each would wait for its own results. */
#define LOAD_CODES(w, offset, one, two) "ldp q" one ", q" two ", [%[" w "], #" offset "]\n"
/* Low nibbles go to other registers, high nibbles stay in place. */
#define UNPACK(one, two, low_one, low_two) \
    "and v" low_one ".16b, v" one ".16b, %[mask].16b\n and v" low_two ".16b, v" two ".16b, %[mask].16b\n" \
    "ushr v" one ".16b, v" one ".16b, #4\n ushr v" two ".16b, v" two ".16b, #4\n"
#define UNPACK_SIGNED(one, two, low_one, low_two) /* times 16; the mask is 0xf0 */ \
    "shl v" low_one ".16b, v" one ".16b, #4\n shl v" low_two ".16b, v" two ".16b, #4\n" \
    "and v" one ".16b, v" one ".16b, %[mask].16b\n and v" two ".16b, v" two ".16b, %[mask].16b\n"
#define LOAD_SCALES(w, offset, one, two) "ldr q" one ", [%[" w "], #" offset "]\n"
#define DOT(low, high, one, two, low_one, low_two, first, second, lane) /* sums of rows 0 to 3, and 4 to 7 */ \
    "sdot v" low ".4s, v" low_one ".16b, v" first ".4b[" lane "]\n" \
    "sdot v" high ".4s, v" low_two ".16b, v" first ".4b[" lane "]\n" \
    "sdot v" low ".4s, v" one ".16b, v" second ".4b[" lane "]\n" \
    "sdot v" high ".4s, v" two ".16b, v" second ".4b[" lane "]\n"
#define WIDEN(halves, low, high) "fcvtl v" low ".4s, v" halves ".4h\n fcvtl2 v" high ".4s, v" halves ".8h\n"
#define WITHOUT_MAGIC(low, high, magic) \
    "fsub v" low ".4s, v" low ".4s, v" magic ".4s\n fsub v" high ".4s, v" high ".4s, v" magic ".4s\n"
#define SCALED(low, high, by_low, by_high) \
    "fmul v" low ".4s, v" low ".4s, v" by_low ".4s\n fmul v" high ".4s, v" high ".4s, v" by_high ".4s\n"
#define ADD_TO(out_low, out_high, low, high, factors, lane) \
    "fmla %[" out_low "].4s, v" low ".4s, v" factors ".s[" lane "]\n" \
    "fmla %[" out_high "].4s, v" high ".4s, v" factors ".s[" lane "]\n"
#define STREAM_CLOBBERS \
    "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", \
        "v25", "v26", "v27", "v28", "v29", "v30", "v31", "memory"
static const int32_t MAGICS[8] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS,
                                  MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};

/* Codes of groups a (in v16 to v23) and b (v24 to v31), inputs in v8 to v11, sums in v12 to v15. */
#define DOT_TWO_GROUPS(UNPACK, LOAD_TAIL) \
    "ldp q8, q9, [%[q]]\n ldp q10, q11, [%[q], #32]\n ldp q14, q15, [%[magics]]\n ldp q12, q13, [%[magics]]\n" \
    LOAD_CODES("a", "0", "16", "17") LOAD_CODES("b", "0", "24", "25") \
    LOAD_CODES("a", "32", "20", "21") LOAD_CODES("b", "32", "28", "29") \
    UNPACK("16", "17", "18", "19") UNPACK("24", "25", "26", "27") \
    DOT("14", "15", "16", "17", "18", "19", "8", "9", "0") UNPACK("20", "21", "22", "23") LOAD_CODES("a", "64", "16", "17") \
    DOT("12", "13", "24", "25", "26", "27", "10", "11", "0") UNPACK("28", "29", "30", "31") LOAD_CODES("b", "64", "24", "25") \
    DOT("14", "15", "20", "21", "22", "23", "8", "9", "1") UNPACK("16", "17", "18", "19") LOAD_CODES("a", "96", "20", "21") \
    DOT("12", "13", "28", "29", "30", "31", "10", "11", "1") UNPACK("24", "25", "26", "27") LOAD_CODES("b", "96", "28", "29") \
    DOT("14", "15", "16", "17", "18", "19", "8", "9", "2") UNPACK("20", "21", "22", "23") LOAD_TAIL("a", "128", "16", "17") \
    DOT("12", "13", "24", "25", "26", "27", "10", "11", "2") UNPACK("28", "29", "30", "31") LOAD_TAIL("b", "128", "24", "25") \
    WIDEN("16", "18", "19") DOT("14", "15", "20", "21", "22", "23", "8", "9", "3") \
    WIDEN("24", "26", "27") DOT("12", "13", "28", "29", "30", "31", "10", "11", "3") \
    "ldr q8, [%[magics]]\n ldr d9, [%[scales]]\n"

#define SCALE_TWO_GROUPS \
    WITHOUT_MAGIC("14", "15", "8") SCALED("14", "15", "18", "19") WITHOUT_MAGIC("12", "13", "8") \
    SCALED("12", "13", "26", "27") ADD_TO("low", "high", "14", "15", "9", "0")

static inline __attribute__((always_inline)) void stream_two_groups(
    const uint8_t *w, const int kind, const int8_t *q, const float *scales, const float *sums, float32x4_t out[2]) {
    register float32x4_t low __asm__("v0") = out[0], high __asm__("v1") = out[1]; /* else the compiler copies them */
    const uint8_t *second = w + panel_bytes(kind);
    if (kind == QUIRE_S4)
        __asm__ volatile(
            DOT_TWO_GROUPS(UNPACK_SIGNED, LOAD_SCALES) "fmul v9.2s, v9.2s, %[sixteenth].s[0]\n"
            SCALE_TWO_GROUPS ADD_TO("low", "high", "12", "13", "9", "1")
            : [low] "+w"(low), [high] "+w"(high)
            : [a] "r"(w), [b] "r"(second), [q] "r"(q), [scales] "r"(scales), [magics] "r"(MAGICS),
              [mask] "w"(vdupq_n_u8(0xf0)), [sixteenth] "w"(vdupq_n_f32(SIXTEENTH))
            : STREAM_CLOBBERS);
    else
        __asm__ volatile(
            DOT_TWO_GROUPS(UNPACK, LOAD_CODES) "ldr d10, [%[sums]]\n" WIDEN("17", "20", "21") WIDEN("25", "28", "29")
            SCALE_TWO_GROUPS ADD_TO("low", "high", "20", "21", "10", "0") ADD_TO("low", "high", "12", "13", "9", "1")
            ADD_TO("low", "high", "28", "29", "10", "1")
            : [low] "+w"(low), [high] "+w"(high)
            : [a] "r"(w), [b] "r"(second), [q] "r"(q), [scales] "r"(scales), [sums] "r"(sums), [magics] "r"(MAGICS),
              [mask] "w"(vdupq_n_u8(15))
            : STREAM_CLOBBERS);
    out[0] = low, out[1] = high;
}

#define DOT_BOTH(one, two, low_one, low_two, lane) \
    DOT("14", "15", one, two, low_one, low_two, "8", "9", lane) \
    DOT("12", "13", one, two, low_one, low_two, "10", "11", lane)
#define DOT_TWO_ROWS(UNPACK, LOAD_TAIL, WIDEN_MINIMA) \
    LOAD_CODES("w", "0", "16", "17") LOAD_CODES("w", "32", "20", "21") LOAD_CODES("w", "64", "24", "25") \
    LOAD_CODES("w", "96", "28", "29") \
    "ldp q8, q9, [%[q]]\n ldp q10, q11, [%[r]]\n ldp q14, q15, [%[magics]]\n ldp q12, q13, [%[magics]]\n" \
    UNPACK("16", "17", "18", "19") UNPACK("20", "21", "22", "23") DOT_BOTH("16", "17", "18", "19", "0") \
    UNPACK("24", "25", "26", "27") LOAD_TAIL("w", "128", "16", "17") DOT_BOTH("20", "21", "22", "23", "1") \
    UNPACK("28", "29", "30", "31") WIDEN("16", "18", "19") DOT_BOTH("24", "25", "26", "27", "2") \
    WIDEN_MINIMA DOT_BOTH("28", "29", "30", "31", "3") \
    "ldr q8, [%[magics]]\n ldr s9, [%[q_scale]]\n ldr s10, [%[r_scale]]\n" \
    WITHOUT_MAGIC("14", "15", "8") WITHOUT_MAGIC("12", "13", "8") SCALED("14", "15", "18", "19") \
    SCALED("12", "13", "18", "19")
#define ADD_TWO_ROWS \
    ADD_TO("low", "high", "14", "15", "9", "0") ADD_TO("second_low", "second_high", "12", "13", "10", "0")

static inline __attribute__((always_inline)) void stream_two_rows(
    const uint8_t *w, const int kind, const int8_t *q, const int8_t *r, const float *q_scale, const float *r_scale,
    const float *q_sum, const float *r_sum, float32x4_t out[4]) {
    if (kind == QUIRE_S4)
        __asm__ volatile(
            DOT_TWO_ROWS(UNPACK_SIGNED, LOAD_SCALES, "")
            "fmul s9, s9, %[sixteenth].s[0]\n fmul s10, s10, %[sixteenth].s[0]\n" ADD_TWO_ROWS
            : [low] "+w"(out[0]), [high] "+w"(out[1]), [second_low] "+w"(out[2]), [second_high] "+w"(out[3])
            : [w] "r"(w), [q] "r"(q), [r] "r"(r), [magics] "r"(MAGICS), [q_scale] "r"(q_scale), [r_scale] "r"(r_scale),
              [mask] "w"(vdupq_n_u8(0xf0)), [sixteenth] "w"(vdupq_n_f32(SIXTEENTH))
            : STREAM_CLOBBERS);
    else
        __asm__ volatile(
            DOT_TWO_ROWS(UNPACK, LOAD_CODES, WIDEN("17", "20", "21")) "ldr s11, [%[q_sum]]\n ldr s16, [%[r_sum]]\n"
            ADD_TWO_ROWS
            ADD_TO("low", "high", "20", "21", "11", "0") ADD_TO("second_low", "second_high", "20", "21", "16", "0")
            : [low] "+w"(out[0]), [high] "+w"(out[1]), [second_low] "+w"(out[2]), [second_high] "+w"(out[3])
            : [w] "r"(w), [q] "r"(q), [r] "r"(r), [magics] "r"(MAGICS), [q_scale] "r"(q_scale), [r_scale] "r"(r_scale),
              [q_sum] "r"(q_sum), [r_sum] "r"(r_sum), [mask] "w"(vdupq_n_u8(15))
            : STREAM_CLOBBERS);
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

/* One group of 4-bit codes: the last one of an odd number. */
static inline __attribute__((always_inline)) void stream_four_bits(
    const uint8_t *w, const int kind, const int8_t *q, float scale, float sum, float32x4_t out[2]) {
    int8x16_t codes[16];
    int32x4_t products[2];
    expand_codes(w, kind, codes);
    dot_group(codes, vld1q_s8(q), vld1q_s8(q + 16), products);
    for (int half = 0; half < 2; half++) {
        out[half] = add_scaled(out[half], products[half], four_scales(w + 128 + 8 * half, kind), scale);
        if (kind == QUIRE_Q4) out[half] = vfmaq_n_f32(out[half], halves(w + 144 + 8 * half), sum);
    }
}

static inline __attribute__((always_inline)) void prefetch_lines(const uint8_t *w, int num_bytes) {
    for (int line = 0; line < num_bytes; line += 64) __builtin_prefetch(w + AHEAD + line);
}

static inline __attribute__((always_inline)) void stream_four_bit_row(
    const uint8_t *w, const int kind, const quire_input *x, int row, float *y, int count) {
    const int groups = x->num_groups, size = panel_bytes(kind);
    const size_t first = (size_t)row * (size_t)groups;
    const float *scales = x->scales + first, *sums = x->sums + first;
    const int8_t *q = x->q + first * GROUP;
    const uint8_t *at = w;
    float32x4_t out[2] = {vdupq_n_f32(0), vdupq_n_f32(0)};
    int g = 0;
    for (; g + 2 <= groups; g += 2, at += 2 * size, q += 2 * GROUP) {
        prefetch_lines(at, 2 * size);
        stream_two_groups(at, kind, q, scales + g, sums + g, out);
    }
    if (g < groups) stream_four_bits(at, kind, q, scales[g], sums[g], out);
    refine_packed(w, kind, x, row, out);
    write_outputs(out[0], out[1], y, count);
}

static inline __attribute__((always_inline)) void stream_four_bit_rows(
    const uint8_t *w, const int kind, const quire_input *x, int row, float *y, size_t stride, int count) {
    const int groups = x->num_groups, size = panel_bytes(kind);
    const size_t first = (size_t)row * (size_t)groups, second = first + (size_t)groups;
    const uint8_t *at = w;
    float32x4_t out[4] = {vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0)};
    for (size_t g = 0; g < (size_t)groups; g++, at += size) {
        prefetch_lines(at, size);
        stream_two_rows(at, kind, x->q + (first + g) * GROUP, x->q + (second + g) * GROUP, x->scales + first + g,
                        x->scales + second + g, x->sums + first + g, x->sums + second + g, out);
    }
    for (int m = 0; m < 2; m++) {
        refine_packed(w, kind, x, row + m, out + 2 * m);
        write_outputs(out[2 * m], out[2 * m + 1], y + (size_t)(row + m) * stride, count);
    }
}

static void stream_eight_bit_row(const uint8_t *w, const quire_input *x, int row, float *y, int count) {
    const int groups = x->num_groups, size = panel_bytes(QUIRE_Q8);
    const size_t first = (size_t)row * (size_t)groups;
    const int8_t *q = x->q + first * GROUP;
    const uint8_t *at = w;
    float32x4_t out[2] = {vdupq_n_f32(0), vdupq_n_f32(0)};
    for (int g = 0; g < groups; g++, at += size, q += GROUP) {
        const int8x16_t input[2] = {vld1q_s8(q), vld1q_s8(q + 16)};
        prefetch_lines(at, size);
        stream_eight_bits(at, input, x->scales[first + (size_t)g], out);
    }
    refine_packed(w, QUIRE_Q8, x, row, out);
    write_outputs(out[0], out[1], y, count);
}

static inline __attribute__((always_inline)) void stream_panels(
    const uint8_t *w, const int kind, const quire_input *x, float *y, size_t stride, int count) {
    const size_t panel = (size_t)panel_bytes(kind) * (size_t)x->num_groups;
    for (int column = 0; column < count; column += PANEL, w += panel) {
        const int left = count - column < PANEL ? count - column : PANEL;
        int row = 0;
        for (; kind != QUIRE_Q8 && row + 2 <= x->num_rows; row += 2)
            stream_four_bit_rows(w, kind, x, row, y + column, stride, left);
        for (; row < x->num_rows; row++) {
            float *to = y + (size_t)row * stride + column;
            if (kind == QUIRE_Q8) stream_eight_bit_row(w, x, row, to, left);
            else stream_four_bit_row(w, kind, x, row, to, left);
        }
    }
}

enum { MAX_STREAMED_Q8 = 2 }; /* with more rows, expanding a panel pays */

static void multiply_panel( /* the variant's: all rows of the input, one panel */
    const uint8_t *w, int kind, const quire_input *x, float *scratch, float *y, size_t stride, int count);

static void multiply_panels(
    const uint8_t *w, int kind, const quire_input *x, float *scratch, float *y, size_t stride, int count) {
    if (x->num_rows <= (kind == QUIRE_Q8 ? MAX_STREAMED_Q8 : MAX_STREAMED_Q4)) {
        if (kind == QUIRE_Q4) stream_panels(w, QUIRE_Q4, x, y, stride, count);
        else if (kind == QUIRE_S4) stream_panels(w, QUIRE_S4, x, y, stride, count);
        else stream_panels(w, QUIRE_Q8, x, y, stride, count);
        return;
    }
    const size_t size = (size_t)panel_bytes(kind) * (size_t)x->num_groups;
    for (int column = 0; column < count; column += PANEL, w += size)
        multiply_panel(w, kind, x, scratch, y + column, stride, count - column < PANEL ? count - column : PANEL);
}
