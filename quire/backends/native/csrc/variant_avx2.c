/* x86 with AVX2, FMA and F16C (Intel since 2013, AMD since 2015). variant_avxvnni.c compiles it with AVX-VNNI too. */
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
#if defined(__AVXVNNI__)
    if (kind == QUIRE_Q4) sums = _mm256_dpbusd_avx_epi32(sums, codes, inputs);
    else sums = _mm256_dpbusd_avx_epi32(sums, _mm256_abs_epi8(codes), _mm256_sign_epi8(inputs, codes));
#else
    if (kind == QUIRE_Q4) {
        sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(codes, inputs));
    } else {
        const ints pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(inputs, codes));
        sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
#endif
    __asm__("" : "+x"(sums)); /* otherwise gcc computes all products first, adds them last, and spills */
    return sums;
}

static inline ints dot_refined(const int kind, ints codes, const int8_t *at) {
    return dot_step(kind, _mm256_setzero_si256(), codes, at);
}
static inline ints dot_eight(const int kind, ints codes, const int8_t *at) { return dot_refined(kind, codes, at); }

static inline __m256 eight_scaled(const int kind, __m256i sums, __m256 scales) {
#if !defined(__AVXVNNI__)
    if (kind == QUIRE_Q4) sums = _mm256_madd_epi16(sums, _mm256_set1_epi16(1));
#endif
    (void)kind;
    return _mm256_mul_ps(_mm256_cvtepi32_ps(sums), scales);
}

static inline vec scale_products(const int kind, ints sums, const expanded *group) {
    return eight_scaled(kind, sums, load(group->scales));
}

static inline void expand_starts(const uint8_t *codes, int place, expanded *out) {
    (void)codes;
    (void)place;
    (void)out;
}

static inline const int8_t *prepare_inputs(const int kind, const int8_t *q, size_t count, int8_t *out) {
    (void)kind;
    (void)count;
    (void)out;
    return q;
}

typedef struct { ints at[8]; } unpacked;

static inline __attribute__((always_inline)) unpacked unpack(const uint8_t *w, const int kind) {
    const ints nibble = _mm256_set1_epi8(15);
    unpacked codes;
    for (int step = 0; step < 4; step++) {
        const ints two = load_ints(w + 32 * step);
        codes.at[step] = kind == QUIRE_Q8 ? two : _mm256_and_si256(two, nibble);
        codes.at[step + 4] = kind == QUIRE_Q8 ? load_ints(w + 128 + 32 * step)
                                              : _mm256_and_si256(_mm256_srli_epi16(two, 4), nibble);
    }
    return codes;
}

enum { SPREAD = 0 }; /* the inputs are read as they are */

static inline void spread(const int8_t *q, uint8_t *out) {
    (void)q;
    (void)out;
}

static inline __attribute__((always_inline)) __m256i dot_unpacked(
    const int kind, const unpacked *codes, const int8_t *q, const uint8_t *spread) {
    ints sums = _mm256_setzero_si256();
    (void)spread;
    for (int step = 0; step < 8; step++) sums = dot_step(kind, sums, codes->at[step], q + 4 * step);
    return sums;
}

#include "x86.h"
#include "codebook.h"

#if defined(__AVXVNNI__)
static int is_supported(void) {
    return has_features(bit_FMA | bit_F16C, bit_AVX2, 0, SAVES_AVX) && has_avx_vnni();
}

const quire_variant quire_variant_avxvnni = VARIANT("avx2 vnni", is_supported, multiply_any);
#else
static int is_supported(void) { return has_features(bit_FMA | bit_F16C, bit_AVX2, 0, SAVES_AVX); }

const quire_variant quire_variant_avx2 = VARIANT("avx2", is_supported, multiply_any);
#endif
