/* Packs weights from the bytes of a file into panels of 8 rows. quire.h describes the layout. */
#include <math.h>
#include <string.h>

#include "half.h"
#include "inner.h"

typedef struct { /* 32 weights of one row: value = scale * code + minimum */
    int8_t codes[GROUP];
    uint16_t scale, minimum;
} group_codes;

static uint16_t load_half(const uint8_t *at) {
    uint16_t half;
    memcpy(&half, at, 2);
    return half;
}

/* Rounds 32 floats to 8 bits. If one is NaN or infinite, the scale of the whole group is NaN. */
static void round_floats(const float *x, group_codes *out) {
    uint32_t peak_bits = 0; /* magnitudes are compared as integers, which compilers vectorise; NaN is above infinity */
    for (int i = 0; i < GROUP; i++) {
        uint32_t bits = float_to_bits(x[i]) & 0x7fffffff;
        peak_bits = bits > peak_bits ? bits : peak_bits;
    }
    const int is_finite = peak_bits < 0x7f800000;
    const float peak = is_finite ? bits_to_float(peak_bits) : NAN;
    out->scale = float_to_half(peak / 127);
    out->minimum = 0;
    float scale = half_to_float(out->scale);
    if (127 * scale < peak && out->scale < 0x7bff) scale = half_to_float(++out->scale); /* must reach the peak */
    if (!is_finite || scale == 0) {
        memset(out->codes, 0, GROUP);
        return;
    }
    for (int i = 0; i < GROUP; i++) {
        float code = rintf(x[i] / scale);
        code = code > 127 ? 127 : code;
        code = code < -127 ? -127 : code;
        out->codes[i] = (int8_t)(int32_t)code;
    }
}

/* Readers of one group of 32 in a block of the file. Those of kinds with nibbles return codes from 0 to 15, those of
   Q8 signed codes. */

static void read_nibbles(const uint8_t *at, group_codes *out) {
    for (int i = 0; i < 16; i++) {
        out->codes[i] = at[i] & 15;
        out->codes[i + 16] = at[i] >> 4;
    }
}

/* ARM multiplies signed bytes, so a minimum of -8 scales is part of the codes. x86 needs unsigned bytes. */
#if defined(__aarch64__)
#define KIND_OF_Q4_0 QUIRE_S4
#else
#define KIND_OF_Q4_0 QUIRE_Q4
#endif

static void read_q4_0(const uint8_t *block, int index, group_codes *out) {
    (void)index;
    out->scale = load_half(block);
    out->minimum = float_to_half(-8 * half_to_float(out->scale));
    read_nibbles(block + 2, out);
    for (int i = 0; i < GROUP && KIND_OF_Q4_0 == QUIRE_S4; i++) out->codes[i] = (int8_t)((out->codes[i] - 8) & 15);
}

static void read_q4_1(const uint8_t *block, int index, group_codes *out) {
    (void)index;
    out->scale = load_half(block);
    out->minimum = load_half(block + 2);
    read_nibbles(block + 4, out);
}

static void read_q8_0(const uint8_t *block, int index, group_codes *out) {
    (void)index;
    out->scale = load_half(block);
    out->minimum = 0;
    memcpy(out->codes, block + 2, GROUP);
}

/* Adds the fifth bits of Q5_0 and Q5_1: bit i of 32 belongs to code i. */
static void add_fifth_bits(const uint8_t *at, group_codes *out) {
    for (int i = 0; i < GROUP; i++) out->codes[i] = (int8_t)(out->codes[i] | (at[i / 8] >> i % 8 & 1) << 4);
}

static void read_q5_0(const uint8_t *block, int index, group_codes *out) {
    (void)index;
    out->scale = load_half(block);
    out->minimum = 0;
    read_nibbles(block + 6, out);
    add_fifth_bits(block + 2, out);
    for (int i = 0; i < GROUP; i++) out->codes[i] = (int8_t)(out->codes[i] - 16);
}

static void read_q5_1(const uint8_t *block, int index, group_codes *out) {
    (void)index;
    const float scale = half_to_float(load_half(block)), minimum = half_to_float(load_half(block + 2));
    float x[GROUP];
    read_nibbles(block + 8, out);
    add_fifth_bits(block + 4, out);
    for (int i = 0; i < GROUP; i++) x[i] = scale * (float)out->codes[i] + minimum;
    round_floats(x, out);
}

/* Computes scale and minimum of group `index` of the 8 groups in a Q4_K or Q5_K block: factors of 6 bits. */
static void read_k_scales(const uint8_t *block, int index, float *scale, float *minimum) {
    const uint8_t *packed = block + 4;
    int factor, low;
    if (index < 4) {
        factor = packed[index] & 63;
        low = packed[index + 4] & 63;
    } else {
        factor = (packed[index + 4] & 15) | packed[index - 4] >> 6 << 4;
        low = packed[index + 4] >> 4 | packed[index] >> 6 << 4;
    }
    *scale = half_to_float(load_half(block)) * (float)factor;
    *minimum = half_to_float(load_half(block + 2)) * (float)low;
}

static void read_q4_k(const uint8_t *block, int index, group_codes *out) {
    const uint8_t *codes = block + 16 + index / 2 * 32;
    float scale, minimum;
    read_k_scales(block, index, &scale, &minimum);
    for (int i = 0; i < GROUP; i++) out->codes[i] = index % 2 ? codes[i] >> 4 : codes[i] & 15;
    out->scale = float_to_half(scale);
    out->minimum = float_to_half(-minimum);
}

static void read_q5_k(const uint8_t *block, int index, group_codes *out) {
    const uint8_t *high = block + 16, *codes = block + 48 + index / 2 * 32;
    const int shift = index % 2 * 4;
    float scale, minimum, x[GROUP];
    read_k_scales(block, index, &scale, &minimum);
    for (int i = 0; i < GROUP; i++) {
        int code = (codes[i] >> shift & 15) | (high[i] >> index & 1) << 4;
        x[i] = scale * (float)code - minimum;
    }
    round_floats(x, out);
}

/* Q2_K: 16 subgroups of 16, each with a factor and a minimum of 4 bits. Codes have 2 bits. */
static void read_q2_k(const uint8_t *block, int index, group_codes *out) {
    const uint8_t *codes = block + 16 + index / 4 * 32;
    const int shift = index % 4 * 2;
    float x[GROUP];
    for (int half = 0; half < 2; half++) {
        const int factors = block[2 * index + half];
        const float scale = half_to_float(load_half(block + 80)) * (float)(factors & 15);
        const float minimum = half_to_float(load_half(block + 82)) * (float)(factors >> 4);
        for (int i = 16 * half; i < 16 * half + 16; i++) x[i] = scale * (float)(codes[i] >> shift & 3) - minimum;
    }
    round_floats(x, out);
}

/* Q3_K: 16 subgroups of 16 with signed factors of 6 bits: 4 bits in 8 bytes, 2 bits in 4 bytes. A third bit of a code
   that is not set subtracts 4. */
static void read_q3_k(const uint8_t *block, int index, group_codes *out) {
    const uint8_t *high = block, *codes = block + 32 + index / 4 * 32, *low_bits = block + 96, *high_bits = block + 104;
    const int shift = index % 4 * 2;
    float x[GROUP];
    for (int half = 0; half < 2; half++) {
        const int sub = 2 * index + half;
        const int low = low_bits[sub % 8] >> sub / 8 * 4 & 15, top = high_bits[sub % 4] >> sub / 4 * 2 & 3;
        const float scale = half_to_float(load_half(block + 108)) * (float)((low | top << 4) - 32);
        for (int i = 16 * half; i < 16 * half + 16; i++) {
            int code = (codes[i] >> shift & 3) - (high[i] >> index & 1 ? 0 : 4);
            x[i] = scale * (float)code;
        }
    }
    round_floats(x, out);
}

/* Q6_K: 16 subgroups of 16 with factors of 8 bits. Codes have 4 low bits and 2 high bits, less 32. */
static void read_q6_k(const uint8_t *block, int index, group_codes *out) {
    const int part = index / 4, row = index % 4;
    const uint8_t *low = block + 64 * part + 32 * (row % 2), *high = block + 128 + 32 * part;
    const int shift = row / 2 * 4;
    float x[GROUP];
    for (int half = 0; half < 2; half++) {
        const int8_t factor = (int8_t)block[192 + 2 * index + half];
        const float scale = half_to_float(load_half(block + 208)) * (float)factor;
        for (int i = 16 * half; i < 16 * half + 16; i++) {
            int code = ((low[i] >> shift & 15) | (high[i] >> 2 * row & 3) << 4) - 32;
            x[i] = scale * (float)code;
        }
    }
    round_floats(x, out);
}

static const int8_t IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

static void look_up(const int8_t *values, group_codes *out) {
    for (int i = 0; i < GROUP; i++) out->codes[i] = values[out->codes[i]];
}

static void read_iq4_nl(const uint8_t *block, int index, group_codes *out) {
    (void)index;
    out->scale = load_half(block);
    out->minimum = 0;
    read_nibbles(block + 2, out);
    look_up(IQ4_VALUES, out);
}

/* IQ4_XS: 8 groups of 32 with signed factors of 6 bits: 2 bits in 2 bytes, 4 bits in 4 bytes. */
static void read_iq4_xs(const uint8_t *block, int index, group_codes *out) {
    const int top = load_half(block + 2) >> 2 * index & 3, low = block[4 + index / 2] >> index % 2 * 4 & 15;
    out->scale = float_to_half(half_to_float(load_half(block)) * (float)((low | top << 4) - 32));
    out->minimum = 0;
    read_nibbles(block + 8 + 16 * index, out);
    look_up(IQ4_VALUES, out);
}

/* MXFP4: one power of two, 2^(e - 127), and 4-bit floats. As the values are doubled, the scale is halved. Powers that
   fp16 does not hold, below 2^-24 and above 2^15, occur in no sensible file: they become 0, or fp16's largest number. The
   last one is NaN. */
static void read_mxfp4(const uint8_t *block, int index, group_codes *out) {
    (void)index;
    read_nibbles(block + 1, out);
    out->scale = float_to_half(block[0] == 255 ? NAN : ldexpf(1, block[0] - 128));
    out->minimum = 0;
}

/* TQ1_0 and TQ2_0 hold -1, 0 and 1 as 0, 1 and 2 with one scale for 256: a Q4 group with the minimum -scale. */
static void set_ternary_scale(uint16_t scale, group_codes *out) {
    out->scale = scale;
    out->minimum = scale ^ 0x8000;
}

/* TQ1_0: 5 digits of base 3 in a byte, as a fraction of 256: 160 codes in 32 bytes, 80 in 16, the last 16 in 4. */
static void read_tq1_0(const uint8_t *block, int index, group_codes *out) {
    static const uint8_t POWERS[5] = {1, 3, 9, 27, 81};
    for (int i = 0; i < GROUP; i++) {
        const int at = index * GROUP + i, start = at < 160 ? 0 : at < 240 ? 160 : 240;
        const int first = at < 160 ? 0 : at < 240 ? 32 : 48, width = at < 160 ? 32 : at < 240 ? 16 : 4;
        const uint8_t digits = (uint8_t)(block[first + (at - start) % width] * POWERS[(at - start) / width]);
        out->codes[i] = (int8_t)(digits * 3 >> 8);
    }
    set_ternary_scale(load_half(block + 52), out);
}

static void read_tq2_0(const uint8_t *block, int index, group_codes *out) {
    const uint8_t *codes = block + index / 4 * 32;
    for (int i = 0; i < GROUP; i++) out->codes[i] = codes[i] >> index % 4 * 2 & 3;
    set_ternary_scale(load_half(block + 64), out);
}

typedef struct {
    int block_bytes, block_weights, kind;
    void (*read)(const uint8_t *block, int index, group_codes *out); /* NULL: plain floats */
} source_format;

static const source_format FORMATS[] = {
    [SOURCE_Q4_0] = {18, 32, KIND_OF_Q4_0, read_q4_0},  [SOURCE_Q4_1] = {20, 32, QUIRE_Q4, read_q4_1},
    [SOURCE_Q4_K] = {144, 256, QUIRE_Q4, read_q4_k},    [SOURCE_Q8_0] = {34, 32, QUIRE_Q8, read_q8_0},
    [SOURCE_F32] = {4, 1, QUIRE_Q8, NULL},              [SOURCE_F16] = {2, 1, QUIRE_Q8, NULL},
    [SOURCE_BF16] = {2, 1, QUIRE_Q8, NULL},             [SOURCE_Q5_0] = {22, 32, QUIRE_Q8, read_q5_0},
    [SOURCE_Q5_1] = {24, 32, QUIRE_Q8, read_q5_1},      [SOURCE_Q2_K] = {84, 256, QUIRE_Q8, read_q2_k},
    [SOURCE_Q3_K] = {110, 256, QUIRE_Q8, read_q3_k},    [SOURCE_Q5_K] = {176, 256, QUIRE_Q8, read_q5_k},
    [SOURCE_Q6_K] = {210, 256, QUIRE_Q8, read_q6_k},    [SOURCE_IQ4_NL] = {18, 32, QUIRE_Q8, read_iq4_nl},
    [SOURCE_IQ4_XS] = {136, 256, QUIRE_Q8, read_iq4_xs}, [SOURCE_MXFP4] = {17, 32, QUIRE_F4, read_mxfp4},
    [SOURCE_TQ1_0] = {54, 256, QUIRE_Q4, read_tq1_0},   [SOURCE_TQ2_0] = {66, 256, QUIRE_Q4, read_tq2_0},
};

int quire_source_kind(int source) { return FORMATS[source].kind; }

size_t quire_packed_bytes(int kind, int rows, int cols) {
    return (size_t)ceil_div(rows, PANEL) * (size_t)ceil_div(cols, GROUP) * (size_t)panel_bytes(kind);
}

/* Reads up to 32 plain floats. Each type has its own loop, so that compilers vectorise it. */
static void read_floats(int source, const uint8_t *at, int count, float *x) {
    uint16_t halves[GROUP] = {0};
    if (source == SOURCE_F32) {
        memcpy(x, at, 4 * (size_t)count);
        return;
    }
    memcpy(halves, at, 2 * (size_t)count);
    if (source == SOURCE_F16) {
        for (int i = 0; i < GROUP; i++) x[i] = half_to_float(halves[i]);
    } else {
        for (int i = 0; i < GROUP; i++) x[i] = bits_to_float((uint32_t)halves[i] << 16);
    }
}

static void read_group(int source, const uint8_t *row, int group, int cols, group_codes *out) {
    const source_format *format = &FORMATS[source];
    if (format->read == NULL) {
        const int first = group * GROUP, count = cols - first < GROUP ? cols - first : GROUP;
        float x[GROUP] = {0};
        read_floats(source, row + (size_t)first * (size_t)format->block_bytes, count, x);
        round_floats(x, out);
        return;
    }
    const int per_block = format->block_weights / GROUP;
    format->read(row + (size_t)(group / per_block) * (size_t)format->block_bytes, group % per_block, out);
}

static void write_group(int kind, int row, const group_codes *codes, uint8_t *out) {
    uint8_t *at = out + row * 4, *scales = out + (kind == QUIRE_Q8 ? 256 : 128);
    if (kind == QUIRE_Q8) {
        for (int step = 0; step < 8; step++) memcpy(at + step * 32, codes->codes + step * 4, 4);
    } else {
        uint8_t pairs[16];
        for (int i = 0; i < 16; i++) pairs[i] = (uint8_t)(codes->codes[i] | codes->codes[i + 16] << 4);
        for (int step = 0; step < 4; step++) memcpy(at + step * 32, pairs + step * 4, 4);
        if (kind == QUIRE_Q4) memcpy(scales + 16 + 2 * row, &codes->minimum, 2);
    }
    memcpy(scales + 2 * row, &codes->scale, 2);
}

void quire_pack(int source, const uint8_t *data, int rows, int cols, uint8_t *out) {
    const int kind = quire_source_kind(source), num_groups = ceil_div(cols, GROUP);
    const size_t size = (size_t)panel_bytes(kind);
    const size_t row_bytes = (size_t)(cols / FORMATS[source].block_weights) * (size_t)FORMATS[source].block_bytes;
    memset(out, 0, quire_packed_bytes(kind, rows, cols));
    for (int row = 0; row < rows; row++) {
        uint8_t *panel = out + (size_t)(row / PANEL) * (size_t)num_groups * size;
        for (int group = 0; group < num_groups; group++) {
            group_codes codes;
            read_group(source, data + (size_t)row * row_bytes, group, cols, &codes);
            write_group(kind, row % PANEL, &codes, panel + (size_t)group * size);
        }
    }
}

void quire_unpack(const quire_matrix *matrix, int row, float *out) {
    const int num_groups = ceil_div(matrix->cols, GROUP), place = row % PANEL;
    const size_t size = (size_t)panel_bytes(matrix->kind);
    const uint8_t *panel = matrix->data + (size_t)(row / PANEL) * (size_t)num_groups * size;
    for (int i = 0; i < matrix->cols; i++) {
        const uint8_t *group = panel + (size_t)(i / GROUP) * size;
        int step = i % GROUP / 4, at = place * 4 + i % 4;
        if (matrix->kind == QUIRE_Q8) {
            out[i] = half_to_float(load_half(group + 256 + 2 * place)) * (float)(int8_t)group[step * 32 + at];
        } else {
            int code = step < 4 ? group[step * 32 + at] & 15 : group[(step - 4) * 32 + at] >> 4;
            const float scale = half_to_float(load_half(group + 128 + 2 * place));
            if (matrix->kind != QUIRE_Q4) out[i] = scale * (float)nibble_values(matrix->kind)[code];
            else out[i] = scale * (float)code + half_to_float(load_half(group + 144 + 2 * place));
        }
    }
}
