/* Vectors of floats as wide as this variant's registers: the few operations that norms and attention are made of. */
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

#if !defined(QUIRE_PORTABLE) && defined(__aarch64__)

enum { LANES = 4 };
#define HAS_HALF_ARITHMETIC 1 /* the variants that exist here need it */
typedef float32x4_t vec;
static inline vec load(const float *at) { return vld1q_f32(at); }
static inline void store(float *at, vec x) { vst1q_f32(at, x); }
static inline vec fill(float x) { return vdupq_n_f32(x); }
static inline vec add(vec a, vec b) { return vaddq_f32(a, b); }
static inline vec sub(vec a, vec b) { return vsubq_f32(a, b); }
static inline vec mul(vec a, vec b) { return vmulq_f32(a, b); }
static inline vec reciprocal(vec a) { /* of what is at least 1: division takes several times as long */
    vec guess = vrecpeq_f32(a);
    guess = vmulq_f32(guess, vrecpsq_f32(a, guess));
    return vmulq_f32(guess, vrecpsq_f32(a, guess));
}
static inline vec mul_add(vec a, vec b, vec c) { return vfmaq_f32(c, a, b); }          /* a * b + c */
static inline vec mul_add_one(vec a, float b, vec c) { return vfmaq_n_f32(c, a, b); } /* the same, b for all */
static inline vec highest(vec a, vec b) { return vmaxq_f32(a, b); }
static inline vec lowest(vec a, vec b) { return vminq_f32(a, b); }
static inline vec size(vec a) { return vabsq_f32(a); }
static inline vec load_halves(const uint16_t *at) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at))); }
static inline vec power_of_two(vec n) { /* n whole, in [-126, 127] */
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23));
}
static inline void store_bytes(int8_t *at, vec x) { /* whole numbers in [-127, 127] */
    int16x4_t narrow = vmovn_s32(vcvtq_s32_f32(x));
    int8x8_t bytes = vmovn_s16(vcombine_s16(narrow, narrow));
    vst1_lane_s32((int32_t *)(void *)at, vreinterpret_s32_s8(bytes), 0);
}

#elif !defined(QUIRE_PORTABLE) && defined(__AVX2__)

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
static inline vec power_of_two(vec n) {
    __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
static inline void store_bytes(int8_t *at, vec x) {
    __m256i whole = _mm256_cvtps_epi32(x);
    __m128i narrow = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64((__m128i *)(void *)at, _mm_packs_epi16(narrow, narrow));
}

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
static inline vec power_of_two(vec n) { EACH(bits_to_float((uint32_t)((int32_t)n.at[i] + 127) << 23)); }
static inline void store_bytes(int8_t *at, vec x) {
    for (int i = 0; i < LANES; i++) at[i] = (int8_t)x.at[i];
}
#undef EACH

#endif

#if !defined(HAS_HALF_ARITHMETIC)
#define HAS_HALF_ARITHMETIC 0
#endif

/* Over the lanes, always in the same order. */
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

static inline vec round_whole(vec x) { /* of |x| < 2^22, to the nearest */
    const vec magic = fill(12582912.0f);
    return sub(add(x, magic), magic);
}

/* e^x to about 1e-7 of its size; e^-87 below -87: beside 1 that is nothing. */
static inline vec exponential(vec x) {
    x = lowest(fill(88.0f), highest(fill(-87.0f), x)); /* x last: then what is no number stays so on x86, too */
    vec n = round_whole(mul(x, fill(1.44269504f)));
    vec r = mul_add(n, fill(-0.693359375f), x);
    r = mul_add(n, fill(2.12194440e-4f), r);
    vec y = fill(1.9875691500e-4f);
    y = mul_add(y, r, fill(1.3981999507e-3f));
    y = mul_add(y, r, fill(8.3334519073e-3f));
    y = mul_add(y, r, fill(4.1665795894e-2f));
    y = mul_add(y, r, fill(1.6666665459e-1f));
    y = mul_add(y, r, fill(5.0000001201e-1f));
    y = add(mul_add(mul(y, r), r, r), fill(1.0f));
    return mul(y, power_of_two(n));
}

#endif
