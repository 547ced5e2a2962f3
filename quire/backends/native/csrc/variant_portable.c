/* Plain C for any machine. The other variants are checked against it. */
#define QUIRE_PORTABLE
#include "rows.h"
#include "attention.h"
#include "recurrence.h"

static inline float scale_at(const uint8_t *group, int at) {
    uint16_t half;
    memcpy(&half, group + at, 2);
    return half_to_float(half);
}

static void dot_group(const uint8_t *group, int kind, const int8_t *q, int32_t sums[PANEL]) {
    for (int row = 0; row < PANEL; row++) sums[row] = 0;
    for (int step = 0; step < 8; step++)
        for (int row = 0; row < PANEL; row++)
            for (int i = 0; i < 4; i++) {
                const int place = row * 4 + i;
                int code;
                if (kind == QUIRE_Q8) code = (int8_t)group[step * 32 + place];
                else code = step < 4 ? group[step * 32 + place] & 15 : group[(step - 4) * 32 + place] >> 4;
                sums[row] += code * q[step * 4 + i];
            }
}

static void multiply_panel(
    const uint8_t *w, int kind, const quire_input *x, float *scratch, float *y, size_t stride, int count) {
    (void)scratch;
    const int groups = x->num_groups, size = panel_bytes(kind), tail = kind == QUIRE_Q8 ? 256 : 128;
    int32_t products[PANEL];
    for (int m = 0; m < x->num_rows; m++) {
        const size_t first = (size_t)m * (size_t)groups, first_rest = (size_t)m * (size_t)x->num_refined;
        float out[PANEL] = {0};
        for (int g = 0; g < groups; g++) {
            const uint8_t *group = w + (size_t)g * (size_t)size;
            dot_group(group, kind, x->q + (first + (size_t)g) * GROUP, products);
            for (int row = 0; row < PANEL; row++) {
                out[row] += (float)products[row] * (scale_at(group, tail + 2 * row) * x->scales[first + (size_t)g]);
                if (kind == QUIRE_Q4) out[row] += scale_at(group, tail + 16 + 2 * row) * x->sums[first + (size_t)g];
            }
        }
        for (int r = 0; r < x->num_refined; r++) {
            const uint8_t *group = w + (size_t)x->refined[first_rest + (size_t)r] * (size_t)size;
            dot_group(group, kind, x->rest + (first_rest + (size_t)r) * GROUP, products);
            const float scale = x->rest_scales[first_rest + (size_t)r];
            for (int row = 0; row < PANEL; row++)
                out[row] += (float)products[row] * (scale_at(group, tail + 2 * row) * scale);
        }
        memcpy(y + (size_t)m * stride, out, (size_t)count * sizeof *y);
    }
}

static void multiply_panels(
    const uint8_t *w, int kind, const quire_input *x, float *scratch, float *y, size_t stride, int count) {
    const size_t size = (size_t)panel_bytes(kind) * (size_t)x->num_groups;
    for (int column = 0; column < count; column += PANEL, w += size)
        multiply_panel(w, kind, x, scratch, y + column, stride, count - column < PANEL ? count - column : PANEL);
}

#include "codebook.h"

static int is_supported(void) { return 1; }

const quire_variant quire_variant_portable = VARIANT("portable", is_supported, multiply_any);
