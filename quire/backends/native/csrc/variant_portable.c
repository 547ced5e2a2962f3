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

/* Adds the products of a step with 4 inputs. */
static void dot_step(const uint8_t *group, int kind, int step, const int8_t *q, int32_t sums[PANEL]) {
    for (int row = 0; row < PANEL; row++)
        for (int i = 0; i < STEP; i++) {
            const int place = row * STEP + i;
            int code;
            if (kind == QUIRE_Q8) code = (int8_t)group[step * 32 + place];
            else code = step < 4 ? group[step * 32 + place] & 15 : group[(step - 4) * 32 + place] >> 4;
            sums[row] += code * q[i];
        }
}

static void multiply_panel(
    const uint8_t *w, int kind, const quire_input *x, float *scratch, float *y, size_t stride, int count) {
    (void)scratch;
    const int groups = x->num_groups, size = panel_bytes(kind), tail = kind == QUIRE_Q8 ? 256 : 128;
    for (int m = 0; m < x->num_rows; m++) {
        const size_t first = (size_t)m * (size_t)groups, first_refined = (size_t)m * (size_t)x->num_refined;
        float out[PANEL] = {0};
        for (int g = 0; g < groups; g++) {
            const uint8_t *group = w + (size_t)g * (size_t)size;
            const int8_t *q = x->q + (first + (size_t)g) * GROUP;
            int32_t products[PANEL] = {0};
            for (int step = 0; step < STEPS; step++) dot_step(group, kind, step, q + STEP * step, products);
            for (int row = 0; row < PANEL; row++) {
                out[row] += (float)products[row] * (scale_at(group, tail + 2 * row) * x->scales[first + (size_t)g]);
                if (kind == QUIRE_Q4) out[row] += scale_at(group, tail + 16 + 2 * row) * x->sums[first + (size_t)g];
            }
        }
        for (size_t r = first_refined; r < first_refined + (size_t)x->num_refined; r++) {
            const quire_refined *one = &x->refined[r];
            const uint8_t *group = w + (size_t)one->group * (size_t)size;
            int32_t products[PANEL] = {0};
            dot_step(group, kind, one->step, one->q, products);
            for (int row = 0; row < PANEL; row++)
                out[row] += (float)products[row] * (scale_at(group, tail + 2 * row) * one->scale);
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
