/* Vectors of floats as wide as this variant's registers, with the operations that norms and attention need. */
#ifndef QUIRE_VECTORS_H
#define QUIRE_VECTORS_H

#include "half.h"
#include "inner.h"

#if defined(QUIRE_PORTABLE)
/* Plain C below. */
#elif defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__AVX2__)
#include <immintrin.h>
#endif

#define MAGIC 12582912.0f /* 1.5 * 2^23: a small integer added to it is in its lowest bits */

static inline int sum_bytes(const int8_t *at) { /* of 32 */
    int sum = 0;
    for (int i = 0; i < 32; i++) sum += at[i];
    return sum;
}

/* `round_bytes` below rounds 32 numbers, |x * factor| <= 127, and returns their sum. `store_halves` rounds to fp16 as
   float_to_half does. */

#if !defined(QUIRE_PORTABLE) && defined(__aarch64__)

enum { LANES = 4 };
#define HAS_HALF_ARITHMETIC 1 /* all ARM variants require it */
typedef float32x4_t vec;
static inline vec load(const float *at) { return vld1q_f32(at); }
static inline void store(float *at, vec x) { vst1q_f32(at, x); }
static inline vec fill(float x) { return vdupq_n_f32(x); }
static inline vec add(vec a, vec b) { return vaddq_f32(a, b); }
static inline vec sub(vec a, vec b) { return vsubq_f32(a, b); }
static inline vec mul(vec a, vec b) { return vmulq_f32(a, b); }
static inline vec reciprocal(vec a) { /* for a >= 1; a division takes several times as long */
    vec guess = vrecpeq_f32(a);
    guess = vmulq_f32(guess, vrecpsq_f32(a, guess));
    return vmulq_f32(guess, vrecpsq_f32(a, guess));
}
static inline vec mul_add(vec a, vec b, vec c) { return vfmaq_f32(c, a, b); }          /* a * b + c */
static inline vec mul_add_one(vec a, float b, vec c) { return vfmaq_n_f32(c, a, b); } /* the same with a scalar b */
static inline vec highest(vec a, vec b) { return vmaxq_f32(a, b); }
static inline vec lowest(vec a, vec b) { return vminq_f32(a, b); }
static inline vec size(vec a) { return vabsq_f32(a); }
static inline vec load_halves(const uint16_t *at) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at))); }
static inline void store_halves(uint16_t *at, vec x) {
    x = vminq_f32(vmaxq_f32(x, vdupq_n_f32(-65504.0f)), vdupq_n_f32(65504.0f));
    vst1_u16(at, vreinterpret_u16_f16(vcvt_f16_f32(x)));
}
static inline vec raise(vec y, vec shifted) { /* y * 2^n, given n + MAGIC */
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(y), vshlq_n_s32(vreinterpretq_s32_f32(shifted), 23)));
}
static inline int round_bytes(int8_t *at, const float *x, float factor) {
    for (int i = 0; i < 32; i += 16) { /* the lowest byte of n + MAGIC is n */
        int16x8_t words[2];
        for (int j = 0; j < 2; j++) {
            const float *from = x + i + 8 * j;
            vec low = vfmaq_n_f32(vdupq_n_f32(MAGIC), vld1q_f32(from), factor);
            vec high = vfmaq_n_f32(vdupq_n_f32(MAGIC), vld1q_f32(from + 4), factor);
            words[j] = vuzp1q_s16(vreinterpretq_s16_f32(low), vreinterpretq_s16_f32(high));
        }
        vst1q_s8(at + i, vuzp1q_s8(vreinterpretq_s8_s16(words[0]), vreinterpretq_s8_s16(words[1])));
    }
    return sum_bytes(at);
}
static inline float total(vec x) { return vaddvq_f32(x); } /* always in the same order */
static inline float peak(vec x) { return vmaxvq_f32(x); }

#elif !defined(QUIRE_PORTABLE) && defined(__AVX2__)

/* Sums the lanes, always in the same order: halves of the vector are added until one number remains. */
static inline float total_eight(__m256 x) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

static inline float peak_eight(__m256 x) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

#if defined(__AVX512F__)

enum { LANES = 16 };
typedef __m512 vec;
static inline vec load(const float *at) { return _mm512_loadu_ps(at); }
static inline void store(float *at, vec x) { _mm512_storeu_ps(at, x); }
static inline vec fill(float x) { return _mm512_set1_ps(x); }
static inline vec add(vec a, vec b) { return _mm512_add_ps(a, b); }
static inline vec sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
static inline vec mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
static inline vec reciprocal(vec a) { return _mm512_div_ps(_mm512_set1_ps(1.0f), a); }
static inline vec mul_add(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
static inline vec mul_add_one(vec a, float b, vec c) { return _mm512_fmadd_ps(a, _mm512_set1_ps(b), c); }
static inline vec highest(vec a, vec b) { return _mm512_max_ps(a, b); }
static inline vec lowest(vec a, vec b) { return _mm512_min_ps(a, b); }
static inline vec size(vec a) { return _mm512_abs_ps(a); }
static inline vec load_halves(const uint16_t *at) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)at));
}
static inline void store_halves(uint16_t *at, vec x) { /* x is the last operand, so that NaN is kept */
    x = lowest(fill(65504.0f), highest(fill(-65504.0f), x));
    _mm256_storeu_si256((__m256i *)(void *)at, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
static inline vec raise(vec y, vec shifted) {
    __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(y), exponent));
}
static inline int round_bytes(int8_t *at, const float *x, float factor) {
    const __m512i low = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), _mm512_set1_ps(factor)));
    const __m512i high = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + 16), _mm512_set1_ps(factor)));
    _mm_storeu_si128((__m128i *)(void *)at, _mm512_cvtsepi32_epi8(low));
    _mm_storeu_si128((__m128i *)(void *)(at + 16), _mm512_cvtsepi32_epi8(high));
    return _mm512_reduce_add_epi32(_mm512_add_epi32(low, high));
}
static inline __m256 upper(vec x) { return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)); }
static inline float total(vec x) { return total_eight(_mm256_add_ps(_mm512_castps512_ps256(x), upper(x))); }
static inline float peak(vec x) { return peak_eight(_mm256_max_ps(_mm512_castps512_ps256(x), upper(x))); }

#else

enum { LANES = 8 };
typedef __m256 vec;
static inline vec load(const float *at) { return _mm256_loadu_ps(at); }
static inline void store(float *at, vec x) { _mm256_storeu_ps(at, x); }
static inline vec fill(float x) { return _mm256_set1_ps(x); }
static inline vec add(vec a, vec b) { return _mm256_add_ps(a, b); }
static inline vec sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
static inline vec mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
static inline vec reciprocal(vec a) { return _mm256_div_ps(_mm256_set1_ps(1.0f), a); }
static inline vec mul_add(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
static inline vec mul_add_one(vec a, float b, vec c) { return _mm256_fmadd_ps(a, _mm256_set1_ps(b), c); }
static inline vec highest(vec a, vec b) { return _mm256_max_ps(a, b); }
static inline vec lowest(vec a, vec b) { return _mm256_min_ps(a, b); }
static inline vec size(vec a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
static inline vec load_halves(const uint16_t *at) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)at));
}
static inline void store_halves(uint16_t *at, vec x) { /* x is the last operand, so that NaN is kept */
    x = lowest(fill(65504.0f), highest(fill(-65504.0f), x));
    _mm_storeu_si128((__m128i *)(void *)at, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
static inline vec raise(vec y, vec shifted) {
    __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y), exponent));
}
static inline int round_bytes(int8_t *at, const float *x, float factor) {
    __m256i sums = _mm256_setzero_si256();
    for (int i = 0; i < 32; i += 8) {
        __m256i whole = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), _mm256_set1_ps(factor)));
        __m128i narrow = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
        _mm_storel_epi64((__m128i *)(void *)(at + i), _mm_packs_epi16(narrow, narrow));
        sums = _mm256_add_epi32(sums, whole);
    }
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
static inline float total(vec x) { return total_eight(x); }
static inline float peak(vec x) { return peak_eight(x); }

#endif

#else

enum { LANES = 4 };
typedef struct { float at[LANES]; } vec;
#define EACH(expression) \
    do { \
        vec out; \
        for (int i = 0; i < LANES; i++) out.at[i] = (expression); \
        return out; \
    } while (0)
static inline vec load(const float *at) { EACH(at[i]); }
static inline void store(float *at, vec x) { memcpy(at, x.at, sizeof x.at); }
static inline vec fill(float x) { EACH(x); }
static inline vec add(vec a, vec b) { EACH(a.at[i] + b.at[i]); }
static inline vec sub(vec a, vec b) { EACH(a.at[i] - b.at[i]); }
static inline vec mul(vec a, vec b) { EACH(a.at[i] * b.at[i]); }
static inline vec reciprocal(vec a) { EACH(1.0f / a.at[i]); }
static inline vec mul_add(vec a, vec b, vec c) { EACH(a.at[i] * b.at[i] + c.at[i]); }
static inline vec mul_add_one(vec a, float b, vec c) { EACH(a.at[i] * b + c.at[i]); }
static inline vec highest(vec a, vec b) { EACH(a.at[i] > b.at[i] ? a.at[i] : b.at[i]); }
static inline vec lowest(vec a, vec b) { EACH(a.at[i] < b.at[i] ? a.at[i] : b.at[i]); }
static inline vec size(vec a) { EACH(a.at[i] < 0 ? -a.at[i] : a.at[i]); }
static inline vec load_halves(const uint16_t *at) { EACH(half_to_float(at[i])); }
static inline void store_halves(uint16_t *at, vec x) {
    for (int i = 0; i < LANES; i++) at[i] = float_to_half(x.at[i]);
}
static inline vec raise(vec y, vec shifted) {
    EACH(bits_to_float(float_to_bits(y.at[i]) + (float_to_bits(shifted.at[i]) << 23)));
}
static inline int round_bytes(int8_t *at, const float *x, float factor) {
    for (int i = 0; i < 32; i++) at[i] = (int8_t)((x[i] * factor + MAGIC) - MAGIC);
    return sum_bytes(at);
}
#undef EACH

/* Sums the lanes, always in the same order. */
static inline float total(vec x) {
    float lanes[LANES], sum = 0;
    store(lanes, x);
    for (int i = 0; i < LANES; i++) sum += lanes[i];
    return sum;
}

static inline float peak(vec x) {
    float lanes[LANES];
    store(lanes, x);
    for (int i = 1; i < LANES; i++) lanes[0] = lanes[0] > lanes[i] ? lanes[0] : lanes[i];
    return lanes[0];
}

#endif

#if !defined(HAS_HALF_ARITHMETIC)
#define HAS_HALF_ARITHMETIC 0
#endif

/* 2^x for |x| <= 127, with a relative error of about 3e-7. Terms are added in pairs to shorten the chain. */
static inline vec power_of_two(vec x) {
    const vec shifted = add(x, fill(MAGIC)), r = sub(x, sub(shifted, fill(MAGIC))), square = mul(r, r);
    const vec low = mul_add(r, fill(0.6931472f), fill(1.0f)), middle = mul_add(r, fill(0.05550357f), fill(0.24022107f));
    const vec high = mul_add(r, fill(0.00133909f), fill(0.00967603f));
    return raise(mul_add(mul_add(high, square, middle), square, low), shifted);
}

/* e^x, or e^-87 below -87, which is negligible beside 1. */
static inline vec exponential(vec x) {
    x = lowest(fill(88.0f), highest(fill(-87.0f), x)); /* x is the last operand, so that NaN is kept on x86 too */
    return power_of_two(mul(x, fill(1.44269504f)));
}

#endif
