/* fp16 as raw bits, in plain C. The variants use instructions for it in their hot loops. */
#ifndef QUIRE_HALF_H
#define QUIRE_HALF_H

#include <stdint.h>
#include <string.h>

static inline float bits_to_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline uint32_t float_to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static inline float half_to_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    if (rest >= 0x7c00) return bits_to_float(sign | 0x7f800000 | (rest & 0x3ff) << 13); /* infinity or NaN */
    /* The product rebiases the exponent and also normalises subnormal numbers. */
    return bits_to_float(sign | float_to_bits(bits_to_float(rest << 13) * 0x1p112f));
}

/* Rounds to nearest, ties to even. Numbers that are too large become the largest finite number, not infinity. */
static inline uint16_t float_to_half(float x) {
    uint32_t bits = float_to_bits(x), sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (bits >= 0x477ff000) return (uint16_t)(sign | 0x7bff);
    if (bits < 0x38800000) { /* below fp16's smallest normal number: the addition rounds */
        uint32_t small = float_to_bits(bits_to_float(bits) + 0.5f);
        return (uint16_t)(sign | (small - 0x3f000000));
    }
    bits += 0xfff + (bits >> 13 & 1);
    return (uint16_t)(sign | ((bits - 0x38000000) >> 13));
}

#endif
