/* x86 with the byte products of AVX512-VNNI (Intel servers since 2019, AMD since 2022). */
#include <immintrin.h>

#include "vectors.h"

#define TILE 12 /* rows of the input that share a panel's bytes: the sums and outputs of 12 fit in 32 registers */
#define MAGIC_BITS 0x4b400000 /* bits of MAGIC: adding a small integer to them adds it to the float */

typedef __m512i ints;

typedef struct { /* a group of two panels, expanded: for each of 16 rows 32 codes, a scale and a minimum */
    uint8_t codes[8 * 64];
    float scales[LANES], offsets[LANES], minima[LANES]; /* offset: -MAGIC * scale */
    int32_t starts[LANES];
} expanded;

static inline ints load_ints(const void *at) { return _mm512_loadu_si512(at); }
static inline ints fill_ints(int32_t x) { return _mm512_set1_epi32(x); }

/* The sums start at MAGIC, so they are floats without a conversion. The instruction multiplies unsigned bytes by signed
   ones. Nibbles are unsigned. For signed bytes the inputs are made unsigned by adding 128, and the sums start lower by
   128 times the sum of the bytes. */
static inline ints start_products(const expanded *group, const int kind) {
    return kind == QUIRE_Q4 ? fill_ints(MAGIC_BITS) : load_ints(group->starts);
}

typedef struct __attribute__((packed, may_alias)) { int32_t all; } four_bytes;

static inline ints dot_step(const int kind, ints sums, ints codes, const int8_t *at) {
    const four_bytes *inputs = (const four_bytes *)at;
    if (kind == QUIRE_Q8) return _mm512_dpbusd_epi32(sums, fill_ints(inputs->all), codes);
    /* written out because gcc would repeat the inputs in an instruction of their own */
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(codes), "m"(inputs->all));
    return sums;
}

/* The offset removes MAGIC again, without rounding in between. */
static inline vec scale_products(const int kind, ints sums, const expanded *group) {
    (void)kind;
    return mul_add(_mm512_castsi512_ps(sums), load(group->scales), load(group->offsets));
}

static inline ints load_two(const uint8_t *w, size_t size) {
    const __m256i low = _mm256_loadu_si256((const __m256i *)w), high = _mm256_loadu_si256((const __m256i *)(w + size));
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

static inline void expand_bytes(const uint8_t *w, size_t size, const int kind, expanded *out) {
    const ints nibble = _mm512_set1_epi8(15), offset = _mm512_set1_epi8(-128);
    if (kind == QUIRE_Q4) {
        for (int step = 0; step < 4; step++) {
            const ints two = load_two(w + 32 * step, size);
            _mm512_storeu_si512(out->codes + 64 * step, _mm512_and_si512(two, nibble));
            _mm512_storeu_si512(out->codes + 64 * (step + 4), _mm512_and_si512(_mm512_srli_epi16(two, 4), nibble));
        }
        return;
    }
    ints sums = _mm512_setzero_si512();
    for (int step = 0; step < 8; step++) {
        const ints codes = load_two(w + 32 * step, size);
        sums = _mm512_dpbusd_epi32(sums, offset, codes);
        _mm512_storeu_si512(out->codes + 64 * step, codes);
    }
    _mm512_storeu_si512(out->starts, _mm512_sub_epi32(fill_ints(MAGIC_BITS), sums));
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

const quire_variant quire_variant_avx512 = VARIANT("avx512 vnni", is_supported, multiply_panels);
