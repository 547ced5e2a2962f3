/* Attention in fp16 arithmetic, for ARM. It computes twice as many numbers per instruction and does not convert the
   cached values, which there costs as much as a product. Sums of more than CHUNK products are fp32.

   The order of operations is that of attention.h, and as there a result does not depend on the batch. Scores are in
   units of log2, so that weights are powers of two. Weights are at most 2^-5, so that 32 of them times any fp16 values
   stay within fp16. */
enum { CHUNK = 32, HALF_LANES = 8, SPAN = 32 }; /* SPAN: keys, or dimensions, held in registers at a time */
#define LOG2_E 1.44269504f
#define HEADROOM 5.0f /* log2(CHUNK) */

/* to [heads, stride] = to * shrink + a [heads, a stride] times b [count, b stride], for `vectors` of 8 columns. Without
   `shrink`, `to` is overwritten. */
static inline __attribute__((always_inline)) void multiply_halves(
    const float16_t *a, int a_stride, const float16_t *b, int b_stride, int count, float *to, int to_stride,
    const float *shrink, ptrdiff_t ahead, const int num_heads, const int vectors) {
    float16x8_t sums[MAX_HEADS][4];
    for (int h = 0; h < num_heads; h++)
        for (int j = 0; j < vectors; j++) sums[h][j] = vdupq_n_f16(0);
    for (int i = 0; i < count; i++, b += b_stride) {
        float16x8_t row[4];
        __builtin_prefetch((const char *)b + ahead);
        for (int j = 0; j < vectors; j++) row[j] = vld1q_f16(b + HALF_LANES * j);
        for (int h = 0; h < num_heads; h++)
            for (int j = 0; j < vectors; j++) sums[h][j] = vfmaq_n_f16(sums[h][j], row[j], a[h * a_stride + i]);
    }
    for (int h = 0; h < num_heads; h++)
        for (int j = 0; j < vectors; j++) {
            float *at = to + h * to_stride + HALF_LANES * j;
            float32x4_t low = vcvt_f32_f16(vget_low_f16(sums[h][j])), high = vcvt_high_f32_f16(sums[h][j]);
            if (shrink) {
                low = vfmaq_n_f32(low, vld1q_f32(at), shrink[h]);
                high = vfmaq_n_f32(high, vld1q_f32(at + 4), shrink[h]);
            }
            vst1q_f32(at, low);
            vst1q_f32(at + 4, high);
        }
}

/* The same for all columns, SPAN at a time, and any count. The first CHUNK applies `shrink`. */
static inline __attribute__((always_inline)) void multiply_columns(
    const float16_t *a, int a_stride, const float16_t *b, int b_stride, int count, int columns, float *to, int to_stride,
    const float *shrink, ptrdiff_t ahead, const int num_heads) {
    static const float ONES[MAX_HEADS] = {1, 1, 1, 1};
    for (int column = 0; column < columns; column += SPAN) {
        const int left = (columns - column) / HALF_LANES;
        for (int i = 0; i < count; i += CHUNK) {
            const int some = count - i < CHUNK ? count - i : CHUNK;
            const float16_t *rows = b + (size_t)i * (size_t)b_stride + column;
            const float *by = i ? ONES : shrink;
            if (left >= 4) {
                multiply_halves(a + i, a_stride, rows, b_stride, some, to + column, to_stride, by, ahead, num_heads, 4);
                continue;
            }
            for (int j = 0; j < left; j++)
                multiply_halves(a + i, a_stride, rows + HALF_LANES * j, b_stride, some, to + column + HALF_LANES * j,
                                to_stride, by, ahead, num_heads, 1);
        }
    }
}

/* Turns scores into weights and updates a head's peak and sum. Returns the factor for the older weights. */
static inline float soften_halves(
    const attention_shape *shape, float *scores, const block_view *block, float *peak_so_far, float *sum,
    float16_t *weights) {
    const int stride = shape->score_stride;
    if (shape->cap != 0)
        for (int i = block->first; i < block->last; i++)
            scores[i] = shape->cap * LOG2_E * tanhf(scores[i] / (shape->cap * LOG2_E));
    for (int i = 0; i < block->first; i++) scores[i] = -INFINITY;
    for (int i = block->last; i < stride; i++) scores[i] = -INFINITY;
    float32x4_t highs = vdupq_n_f32(*peak_so_far), sums = vdupq_n_f32(0);
    for (int i = 0; i < stride; i += 4) highs = vmaxq_f32(highs, vld1q_f32(scores + i));
    const float high = vmaxvq_f32(highs);
    const float32x4_t top = vdupq_n_f32(high + HEADROOM), floor = vdupq_n_f32(-126.0f);
    for (int i = 0; i < stride; i += 8) {
        const float32x4_t low = power_of_two(vmaxq_f32(vsubq_f32(vld1q_f32(scores + i), top), floor));
        const float32x4_t next = power_of_two(vmaxq_f32(vsubq_f32(vld1q_f32(scores + i + 4), top), floor));
        vst1q_f16(weights + i, vcvt_high_f16_f32(vcvt_f16_f32(low), next));
        sums = vaddq_f32(sums, vaddq_f32(low, next));
    }
    const float32x4_t fall = vmaxq_f32(vdupq_n_f32(*peak_so_far - high), floor);
    const float shrink = high == *peak_so_far ? 1 : vgetq_lane_f32(power_of_two(fall), 0);
    *sum = *sum * shrink + vaddvq_f32(sums);
    *peak_so_far = high;
    return shrink;
}

static inline __attribute__((always_inline)) void take_halves(
    const attention_shape *shape, const float16_t *q, const block_view *block, float *scores, head_state *state, float *mix,
    const int num_heads) {
    const int stride = shape->score_stride, size = shape->head_size, first = block->first;
    float16_t *weights = (float16_t *)(scores + MAX_HEADS * stride);
    float shrink[MAX_HEADS];
    multiply_columns(q, size, block->keys, shape->key_stride, size, ceil_div(block->last, HALF_LANES) * HALF_LANES,
                     scores, stride, NULL, block->ahead, num_heads);
    for (int h = 0; h < num_heads; h++)
        shrink[h] = soften_halves(
            shape, scores + h * stride, block, &state->peaks[h], &state->sums[h], weights + h * stride);
    const float16_t *values = (const float16_t *)block->values + (size_t)first * (size_t)shape->head_stride;
    multiply_columns(weights + first, stride, values, shape->head_stride, block->last - first, shape->head_stride, mix,
                     shape->head_stride, shrink, block->ahead, num_heads);
}
