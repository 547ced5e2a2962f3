/* x86 with AVX2, FMA and F16C (Intel since 2013, AMD since 2015). */
#include <immintrin.h>

#include "inner.h"

#define TILE 6 /* rows of the input that share a panel's bytes: the sums and outputs of 6 fit in 16 registers */

static inline __m256i start_products(const uint8_t *at, const int kind) {
    (void)at;
    (void)kind;
    return _mm256_setzero_si256();
}

/* No pair of products exceeds 16 bits, because no input is -128. Nibbles are small enough for 8 steps of them
   (8 * 2 * 15 * 127 < 2^15). For signed bytes the sign is moved to the input: |-128| is 128 as an unsigned byte, so the
   product is correct. */
static inline __m256i dot_step(const int kind, __m256i sums, __m256i codes, __m256i inputs) {
    if (kind == QUIRE_Q4) {
        sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(codes, inputs));
    } else {
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(inputs, codes));
        sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    __asm__("" : "+x"(sums)); /* otherwise gcc computes all products first, adds them last, and spills */
    return sums;
}

static inline __m256i finish_products(const int kind, __m256i sums) {
    return kind == QUIRE_Q4 ? _mm256_madd_epi16(sums, _mm256_set1_epi16(1)) : sums;
}

static inline const int8_t *prepare_inputs(const int kind, const int8_t *q, size_t count, int8_t *out) {
    (void)kind;
    (void)count;
    (void)out;
    return q;
}

#include "x86.h"

static int is_supported(void) { return has_features(bit_FMA | bit_F16C, bit_AVX2, 0, SAVES_AVX); }

const quire_variant quire_variant_avx2 = VARIANT("avx2", is_supported, multiply_panel, NULL);
