/* Matrices of 4-bit floats, and of signed nibbles if the variant does not multiply them itself (HAS_SIGNED_NIBBLES): a
   panel's codes are looked up, and multiplied as signed bytes. Included by every variant.

   The bytes of a panel stay in the cache between the two steps, so only the packed ones are read from memory. */
#include "vectors.h"

static inline void look_up_codes(const uint8_t *w, const int8_t *table, uint8_t *out) { /* 128 bytes to 256 */
#if !defined(QUIRE_PORTABLE) && defined(__aarch64__)
    const int8x16_t values = vld1q_s8(table);
    for (int i = 0; i < 128; i += 16) {
        const uint8x16_t two = vld1q_u8(w + i);
        vst1q_s8((int8_t *)out + i, vqtbl1q_s8(values, vandq_u8(two, vdupq_n_u8(15))));
        vst1q_s8((int8_t *)out + 128 + i, vqtbl1q_s8(values, vshrq_n_u8(two, 4)));
    }
#elif !defined(QUIRE_PORTABLE) && defined(__AVX2__)
    const __m256i nibble = _mm256_set1_epi8(15);
    const __m256i values = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)table));
    for (int i = 0; i < 128; i += 32) {
        const __m256i two = _mm256_loadu_si256((const __m256i *)(const void *)(w + i));
        const __m256i low = _mm256_and_si256(two, nibble), high = _mm256_and_si256(_mm256_srli_epi16(two, 4), nibble);
        _mm256_storeu_si256((__m256i *)(void *)(out + i), _mm256_shuffle_epi8(values, low));
        _mm256_storeu_si256((__m256i *)(void *)(out + 128 + i), _mm256_shuffle_epi8(values, high));
    }
#else
    for (int i = 0; i < 128; i++) {
        out[i] = (uint8_t)table[w[i] & 15];
        out[128 + i] = (uint8_t)table[w[i] >> 4];
    }
#endif
}

static void look_up_panel(const uint8_t *w, int kind, int num_groups, uint8_t *out) {
    const int size = panel_bytes(QUIRE_F4);
    for (int g = 0; g < num_groups; g++, w += size, out += panel_bytes(QUIRE_Q8)) {
        for (int line = 0; line < size; line += 64) __builtin_prefetch(w + num_groups * size + line);
        look_up_codes(w, nibble_values(kind), out);
        memcpy(out + 256, w + 128, 16);
    }
}

static inline int is_looked_up(int kind) {
#if defined(HAS_SIGNED_NIBBLES)
    return kind == QUIRE_F4;
#else
    return kind == QUIRE_F4 || kind == QUIRE_S4;
#endif
}

static void multiply_any(
    const uint8_t *w, int kind, const quire_input *x, float *scratch, float *y, size_t stride, int count) {
    enum { ACROSS_PANELS = (int)LANES > (int)PANEL ? (int)LANES / (int)PANEL : 1 };
    if (!is_looked_up(kind)) {
        multiply_panels(w, kind, x, scratch, y, stride, count);
        return;
    }
    const int groups = x->num_groups;
    const size_t size = (size_t)(groups * panel_bytes(QUIRE_F4)), looked_up = (size_t)(groups * panel_bytes(QUIRE_Q8));
    uint8_t *bytes = (uint8_t *)(scratch + (size_t)groups * SCRATCH_FLOATS);
    for (int column = 0; column < count; column += ACROSS_PANELS * PANEL) {
        const int left = count - column < ACROSS_PANELS * PANEL ? count - column : ACROSS_PANELS * PANEL;
        for (int panel = 0; panel * PANEL < left; panel++, w += size)
            look_up_panel(w, kind, groups, bytes + (size_t)panel * looked_up);
        multiply_panels(bytes, QUIRE_Q8, x, scratch, y + column, stride, left);
    }
}
