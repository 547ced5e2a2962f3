/* x86 with AVX2, FMA and F16C (Intel since 2013, AMD since 2015). */
#include <immintrin.h>

#include "vectors.h"

#define TILE 6 /* rows of the input that share a panel's bytes: the sums and outputs of 6 fit in 16 registers */

typedef __m256i ints;

typedef struct { /* a group of a panel, expanded: for each of 8 rows 32 codes, a scale and a minimum */
    uint8_t codes[8 * 32];
    float scales[LANES], offsets[LANES], minima[LANES];
} expanded;

static inline ints load_ints(const void *at) { return _mm256_loadu_si256((const __m256i *)at); }
static inline ints four_inputs(const int8_t *at) {
    int32_t four;
    memcpy(&four, at, 4);
    return _mm256_set1_epi32(four);
}

static inline ints start_products(const expanded *group, const int kind) {
    (void)group;
    (void)kind;
    return _mm256_setzero_si256();
}

/* No pair of products exceeds 16 bits, because no input is -128. Nibbles are small enough for 8 steps of them
   (8 * 2 * 15 * 127 < 2^15). For signed bytes the sign is moved to the input: |-128| is 128 as an unsigned byte, so the
   product is correct. */
static inline ints dot_step(const int kind, ints sums, ints codes, const int8_t *at) {
    const ints inputs = four_inputs(at);
    if (kind == QUIRE_Q4) {
        sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(codes, inputs));
    } else {
        const ints pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(inputs, codes));
        sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    __asm__("" : "+x"(sums)); /* otherwise gcc computes all products first, adds them last, and spills */
    return sums;
}

static inline vec scale_products(const int kind, ints sums, const expanded *group) {
    if (kind == QUIRE_Q4) sums = _mm256_madd_epi16(sums, _mm256_set1_epi16(1));
    return mul(_mm256_cvtepi32_ps(sums), load(group->scales));
}

static inline void expand_bytes(const uint8_t *w, size_t size, const int kind, expanded *out) {
    const ints nibble = _mm256_set1_epi8(15);
    (void)size;
    if (kind == QUIRE_Q8) {
        memcpy(out->codes, w, sizeof out->codes);
        return;
    }
    for (int step = 0; step < 4; step++) {
        const ints two = load_ints(w + 32 * step), high = _mm256_and_si256(_mm256_srli_epi16(two, 4), nibble);
        _mm256_storeu_si256((__m256i *)(out->codes + 32 * step), _mm256_and_si256(two, nibble));
        _mm256_storeu_si256((__m256i *)(out->codes + 32 * (step + 4)), high);
    }
}

static inline const int8_t *prepare_inputs(const int kind, const int8_t *q, size_t count, int8_t *out) {
    (void)kind;
    (void)count;
    (void)out;
    return q;
}

#include "x86.h"

static int is_supported(void) { return has_features(bit_FMA | bit_F16C, bit_AVX2, 0, SAVES_AVX); }

const quire_variant quire_variant_avx2 = VARIANT("avx2", is_supported, multiply_panels);
