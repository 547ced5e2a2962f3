/* x86 with the byte products of AVX512-VNNI (Intel servers since 2019, AMD since 2022). */
#include <immintrin.h>

#include "vectors.h"

#define TILE 12 /* rows of the input that share a panel's bytes: the sums and outputs of 12 fit in 32 registers */
#define MAGIC_BITS 0x4b400000 /* bits of MAGIC: adding a small integer to them adds it to the float */

typedef __m512i ints;

typedef struct { /* a group of two panels, expanded: for each of 16 rows 32 codes, a scale and a minimum */
    uint8_t codes[8 * 64];
    float scales[LANES], offsets[LANES]; /* offset: -MAGIC * scale */
    union {
        float minima[LANES];   /* of nibbles */
        int32_t starts[LANES]; /* of signed bytes */
    };
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

/* A step alone: signed codes are made unsigned, and the sums start lower by 128 times the sum of the inputs. */
static inline int32_t start_of_step(const int kind, const int8_t *at) {
    return MAGIC_BITS - (kind == QUIRE_Q8 ? 128 * (at[0] + at[1] + at[2] + at[3]) : 0);
}

static inline ints dot_refined(const int kind, ints codes, const int8_t *at) {
    if (kind == QUIRE_Q8) codes = _mm512_xor_si512(codes, _mm512_set1_epi8(-128));
    return _mm512_dpbusd_epi32(fill_ints(start_of_step(kind, at)), codes, fill_ints(((const four_bytes *)at)->all));
}

static inline __m256i dot_eight(const int kind, __m256i codes, const int8_t *at) {
    if (kind == QUIRE_Q8) codes = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
    const __m256i inputs = _mm256_set1_epi32(((const four_bytes *)at)->all);
    return _mm256_dpbusd_epi32(_mm256_set1_epi32(start_of_step(kind, at)), codes, inputs);
}

/* The offset removes MAGIC again, without rounding in between. */
static inline vec scale_products(const int kind, ints sums, const expanded *group) {
    (void)kind;
    return mul_add(_mm512_castsi512_ps(sums), load(group->scales), load(group->offsets));
}

static inline void expand_starts(const uint8_t *codes, int place, expanded *out) {
    __m256i sums = _mm256_setzero_si256();
    for (int step = 0; step < 8; step++) {
        const __m256i bytes = _mm256_loadu_si256((const __m256i *)(const void *)(codes + 32 * step));
        sums = _mm256_dpbusd_epi32(sums, _mm256_set1_epi8(-128), bytes);
    }
    sums = _mm256_sub_epi32(_mm256_set1_epi32(MAGIC_BITS), sums);
    _mm256_storeu_si256((__m256i *)(void *)(out->starts + PANEL * place), sums);
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

/* A vector holds two steps of 8 rows, so a vector of inputs repeats 4 of them in its first half, and the next 4 in its
   second half. Signed codes are made unsigned here; the sums then start lower by 128 times the sum of the inputs. */
typedef struct { ints at[4]; } unpacked;

static inline __attribute__((always_inline)) unpacked unpack(const uint8_t *w, const int kind) {
    const ints nibble = _mm512_set1_epi8(15), offset = _mm512_set1_epi8(-128);
    unpacked codes;
    for (int i = 0; i < 2; i++) {
        const ints two = load_ints(w + 64 * i);
        if (kind == QUIRE_Q8) {
            codes.at[i] = _mm512_xor_si512(two, offset);
            codes.at[i + 2] = _mm512_xor_si512(load_ints(w + 128 + 64 * i), offset);
        } else {
            codes.at[i] = _mm512_and_si512(two, nibble);
            codes.at[i + 2] = _mm512_and_si512(_mm512_srli_epi16(two, 4), nibble);
        }
    }
    return codes;
}

enum { SPREAD = 5 * 64 }; /* 4 vectors, and 128 times the sum of the inputs */

static inline void spread(const int8_t *q, uint8_t *out) {
    const four_bytes *fours = (const four_bytes *)q;
    for (int i = 0; i < 4; i++) {
        const ints first = fill_ints(fours[2 * i].all);
        _mm512_storeu_si512(out + 64 * i, _mm512_mask_set1_epi32(first, 0xff00, fours[2 * i + 1].all));
    }
    ((four_bytes *)(out + 256))->all = 128 * sum_bytes(q);
}

static inline __attribute__((always_inline)) __m256i dot_unpacked(
    const int kind, const unpacked *codes, const int8_t *q, const uint8_t *spread) {
    int start = MAGIC_BITS;
    (void)q;
    if (kind == QUIRE_Q8) start -= ((const four_bytes *)(spread + 256))->all;
    ints sums = _mm512_zextsi256_si512(_mm256_set1_epi32(start));
    for (int i = 0; i < 4; i++) sums = _mm512_dpbusd_epi32(sums, codes->at[i], load_ints(spread + 64 * i));
    return _mm256_add_epi32(_mm512_castsi512_si256(sums), _mm512_extracti64x4_epi64(sums, 1));
}

static inline __m256 eight_scaled(const int kind, __m256i products, __m256 scales) {
    (void)kind;
    return _mm256_fmadd_ps(_mm256_castsi256_ps(products), scales, _mm256_mul_ps(scales, _mm256_set1_ps(-MAGIC)));
}

#include "x86.h"
#include "codebook.h"

static int is_supported(void) {
    const unsigned extended = bit_AVX2 | bit_AVX512F | bit_AVX512BW | bit_AVX512VL;
    return has_features(bit_FMA | bit_F16C, extended, bit_AVX512VNNI, SAVES_AVX512);
}

const quire_variant quire_variant_avx512 = VARIANT("avx512 vnni", is_supported, multiply_any);
