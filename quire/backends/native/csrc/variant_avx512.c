/* x86 with the byte products of AVX512-VNNI (Intel servers since 2019, AMD since 2022), on 256 bits: a panel has 8
   rows, and some machines lower their clock for wider vectors. */
#include <immintrin.h>

#include "inner.h"

#define TILE 8 /* rows of the input that share a panel's bytes; `prepare_inputs` has room for 10 */

/* The instruction multiplies unsigned bytes by signed ones. Nibbles are unsigned. For signed bytes the inputs are made
   unsigned by adding 128; the sums then start at minus 128 times the sum of the bytes. */
static inline __m256i start_products(const uint8_t *at, const int kind) {
    const __m256i zero = _mm256_setzero_si256(), offset = _mm256_set1_epi8(-128);
    if (kind == QUIRE_Q4) return zero;
    __m256i sums[2] = {zero, zero};
    for (int step = 0; step < 8; step++) {
        const __m256i codes = _mm256_loadu_si256((const __m256i *)(at + 32 * step));
        sums[step % 2] = _mm256_dpbusd_epi32(sums[step % 2], offset, codes);
    }
    return _mm256_sub_epi32(zero, _mm256_add_epi32(sums[0], sums[1]));
}

static inline __m256i dot_step(const int kind, __m256i sums, __m256i codes, __m256i inputs) {
    return kind == QUIRE_Q4 ? _mm256_dpbusd_epi32(sums, codes, inputs) : _mm256_dpbusd_epi32(sums, inputs, codes);
}

static inline __m256i finish_products(const int kind, __m256i sums) {
    (void)kind;
    return sums;
}

static inline const int8_t *prepare_inputs(const int kind, const int8_t *q, size_t count, int8_t *out) {
    if (kind == QUIRE_Q4) return q;
    const __m256i offset = _mm256_set1_epi8(-128);
    for (size_t i = 0; i < count; i += GROUP) {
        const __m256i bytes = _mm256_loadu_si256((const __m256i *)(q + i));
        _mm256_storeu_si256((__m256i *)(out + i), _mm256_xor_si256(bytes, offset));
    }
    return out;
}

#include "x86.h"

static int is_supported(void) {
    const unsigned extended = bit_AVX2 | bit_AVX512F | bit_AVX512BW | bit_AVX512VL;
    return has_features(bit_FMA | bit_F16C, extended, bit_AVX512VNNI, SAVES_AVX512);
}

const quire_variant quire_variant_avx512 = VARIANT("avx512 vnni", is_supported, multiply_panel, NULL);
