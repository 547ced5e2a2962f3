/* Packs weights from the bytes of a file into panels of 8 rows. quire.h describes the layout. */
#include <math.h>
#include <string.h>

#include "half.h"
#include "inner.h"

typedef struct { /* 32 weights of one row: value = scale * code + minimum */
    int8_t codes[GROUP];
    uint16_t scale, minimum;
} group_codes;

static const int SOURCE_BYTES[] = {18, 20, 144, 34, 128, 64, 64}; /* bytes of a block in the file */
static const int SOURCE_WEIGHTS[] = {32, 32, 256, 32, 32, 32, 32};

int quire_source_kind(int source) { return source <= SOURCE_Q4_K ? QUIRE_Q4 : QUIRE_Q8; }

size_t quire_packed_bytes(int kind, int rows, int cols) {
    return (size_t)ceil_div(rows, PANEL) * (size_t)ceil_div(cols, GROUP) * (size_t)panel_bytes(kind);
}

static uint16_t load_half(const uint8_t *at) {
    uint16_t half;
    memcpy(&half, at, 2);
    return half;
}

static void read_nibbles(const uint8_t *at, group_codes *out) {
    for (int i = 0; i < 16; i++) {
        out->codes[i] = at[i] & 15;
        out->codes[i + 16] = at[i] >> 4;
    }
}

/* Reads group `index` of the 8 groups in a Q4_K block, whose scales have 6 bits each. */
static void read_q4_k(const uint8_t *block, int index, group_codes *out) {
    const uint8_t *packed = block + 4, *codes = block + 16 + index / 2 * 32;
    int scale, minimum;
    if (index < 4) {
        scale = packed[index] & 63;
        minimum = packed[index + 4] & 63;
    } else {
        scale = (packed[index + 4] & 15) | packed[index - 4] >> 6 << 4;
        minimum = packed[index + 4] >> 4 | packed[index] >> 6 << 4;
    }
    for (int i = 0; i < GROUP; i++) out->codes[i] = index % 2 ? codes[i] >> 4 : codes[i] & 15;
    out->scale = float_to_half(half_to_float(load_half(block)) * (float)scale);
    out->minimum = float_to_half(-half_to_float(load_half(block + 2)) * (float)minimum);
}

static void round_floats(const float *x, group_codes *out) {
    float peak = 0, nothing = 0;
    for (int i = 0; i < GROUP; i++) {
        peak = fabsf(x[i]) > peak ? fabsf(x[i]) : peak;
        nothing += x[i] - x[i]; /* not 0 if one is NaN or infinite: then the scale of the whole group is NaN */
    }
    out->scale = nothing == 0 ? float_to_half(peak / 127) : float_to_half(NAN);
    out->minimum = 0;
    float scale = half_to_float(out->scale);
    if (127 * scale < peak && out->scale < 0x7bff) scale = half_to_float(++out->scale); /* must reach the peak */
    for (int i = 0; i < GROUP; i++) {
        float code = scale > 0 ? rintf(x[i] / scale) : 0;
        out->codes[i] = (int8_t)(code > 127 ? 127 : code < -127 ? -127 : code == code ? code : 0);
    }
}

static float read_float(int source, const uint8_t *data, size_t index) {
    float x;
    if (source == SOURCE_F32) {
        memcpy(&x, data + 4 * index, 4);
        return x;
    }
    uint16_t bits = load_half(data + 2 * index);
    return source == SOURCE_F16 ? half_to_float(bits) : bits_to_float((uint32_t)bits << 16);
}

static void read_group(int source, const uint8_t *row, int group, int cols, group_codes *out) {
    if (source >= SOURCE_F32) {
        float x[GROUP] = {0};
        for (int i = 0; i < GROUP && group * GROUP + i < cols; i++) {
            x[i] = read_float(source, row, (size_t)group * GROUP + (size_t)i);
        }
        round_floats(x, out);
        return;
    }
    const int per_block = SOURCE_WEIGHTS[source] / GROUP;
    const uint8_t *block = row + (size_t)(group / per_block) * (size_t)SOURCE_BYTES[source];
    if (source == SOURCE_Q4_K) {
        read_q4_k(block, group % per_block, out);
    } else if (source == SOURCE_Q8_0) {
        out->scale = load_half(block);
        out->minimum = 0;
        memcpy(out->codes, block + 2, GROUP);
    } else if (source == SOURCE_Q4_1) {
        out->scale = load_half(block);
        out->minimum = load_half(block + 2);
        read_nibbles(block + 4, out);
    } else {
        out->scale = load_half(block);
        out->minimum = float_to_half(-8 * half_to_float(out->scale));
        read_nibbles(block + 2, out);
    }
}

static void write_group(int kind, int row, const group_codes *codes, uint8_t *out) {
    for (int i = 0; i < GROUP; i++) {
        int step = i / 4, place = row * 4 + i % 4;
        if (kind == QUIRE_Q8) {
            out[step * 32 + place] = (uint8_t)codes->codes[i];
        } else if (step < 4) {
            out[step * 32 + place] |= (uint8_t)codes->codes[i];
        } else {
            out[(step - 4) * 32 + place] |= (uint8_t)(codes->codes[i] << 4);
        }
    }
    uint8_t *scales = out + (kind == QUIRE_Q8 ? 256 : 128);
    memcpy(scales + 2 * row, &codes->scale, 2);
    if (kind == QUIRE_Q4) memcpy(scales + 16 + 2 * row, &codes->minimum, 2);
}

void quire_pack(int source, const uint8_t *data, int rows, int cols, uint8_t *out) {
    const int kind = quire_source_kind(source), num_groups = ceil_div(cols, GROUP);
    const size_t size = (size_t)panel_bytes(kind);
    const size_t row_bytes = source >= SOURCE_F32 ? (size_t)cols * (source == SOURCE_F32 ? 4 : 2)
                                                  : (size_t)(cols / SOURCE_WEIGHTS[source] * SOURCE_BYTES[source]);
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
            out[i] = half_to_float(load_half(group + 128 + 2 * place)) * (float)code +
                     half_to_float(load_half(group + 144 + 2 * place));
        }
    }
}
