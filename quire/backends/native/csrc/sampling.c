/* Chooses one token for each row of logits: temperature, min-p, top-k, top-p and the draw, as
   quire/backends/torch/sampling.py defines them. Logits are divided by the temperature and turned into weights,
   e^(logit - peak), in float. Weights are summed in double.

   A row is divided into blocks. Each block keeps its largest logit and the sum of its weights. After one pass over all
   weights, only the relevant blocks are read again, and the vocabulary is never sorted. */
#include "sampling.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "inner.h"

enum { LANES = 4, STRIDE = 4 * LANES, BLOCK = 8 * STRIDE, NUM_BINS = 256 };

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

static const float LIGHTEST = 2e-38f; /* tokens with a smaller weight are treated as forbidden */

typedef struct {
    const float *logits;
    const quire_choice *choice;
    int vocab_size, num_blocks;
    float peak, floor; /* divided by the temperature: the largest logit, and the smallest one that is kept */
    float tail[BLOCK]; /* the last block, padded with minus infinity */
    /* The thread's own memory, for B blocks (in whole strides) and P positions. */
    double *sums;      /* [B]: sum of the weights */
    float *largest;    /* [B]: largest logit */
    float *heaviest;   /* [B]: weight of the largest logit */
    float *weights;    /* [P]: undefined if the sum of the block is 0 */
    float *candidates; /* [P]: weights of the tokens that may be drawn */
    int32_t *ids;      /* [P]: ids of those tokens, ascending */
    int32_t *keys;     /* [P] */
} row;

static inline floats load(const float *at) {
    floats x;
    memcpy(&x, at, sizeof x);
    return x;
}

static inline void store(float *at, floats x) { memcpy(at, &x, sizeof x); }

static inline floats fill(float x) { return (floats){x, x, x, x}; }

#if defined(__aarch64__)

static inline floats multiply_add(floats a, floats b, floats c) { return vfmaq_f32(c, a, b); } /* a * b + c */

static inline floats larger_or_nan(floats a, floats b) { return vmaxq_f32(a, b); }

static inline floats larger(floats a, floats b) { return vmaxnmq_f32(a, b); } /* the number, if one is NaN */

/* Multiplies by the inverse and corrects: rounds like a division, in half the time. Infinity gives NaN. */
static inline floats divide(floats x, floats by, floats inverse) {
    const floats guess = x * inverse;
    return multiply_add(vfmsq_f32(x, guess, by), inverse, guess);
}

#else

static inline ints choose(ints mask, ints yes, ints no) { return (mask & yes) | (~mask & no); }

static inline floats multiply_add(floats a, floats b, floats c) { return a * b + c; }

static inline floats larger(floats a, floats b) { return (floats)choose(a > b, (ints)a, (ints)b); } /* b, if a is NaN */

static inline floats larger_or_nan(floats a, floats b) { return (floats)choose((a > b) | (a != a), (ints)a, (ints)b); }

static inline floats divide(floats x, floats by, floats inverse) {
    (void)inverse;
    return x / by;
}

#endif

static inline int32_t bits_of(float x) {
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* Maps floats to integers in the same order, and back. For floats that are not negative these are their bits. */
static inline int32_t key_of(float x) { return bits_of(x) ^ ((bits_of(x) >> 31) & INT32_MAX); }

static inline float float_of(int32_t key) {
    float x;
    key ^= (key >> 31) & INT32_MAX;
    memcpy(&x, &key, sizeof x);
    return x;
}

static const float *block_of(const row *row, int block) {
    return block == row->num_blocks - 1 ? row->tail : row->logits + (size_t)block * BLOCK;
}

/* Returns the largest logit of a block, or NaN if one of them is NaN. */
static float largest_of(const float *x) {
    floats even = fill(-INFINITY), odd = even; /* two independent chains */
    for (int i = 0; i < BLOCK; i += 2 * LANES) {
        even = larger_or_nan(load(x + i), even);
        odd = larger_or_nan(load(x + i + LANES), odd);
    }
    even = larger_or_nan(even, odd);
    float result = even[0];
    for (int lane = 1; lane < LANES && !isnan(result); lane++) result = even[lane] <= result ? result : even[lane];
    return result;
}

/* Returns whether any value of a stride is at least `least`. */
static inline int reaches(const float *x, float least) {
    uint64_t bits[2];
    ints mask = {0};
    for (int i = 0; i < STRIDE; i += LANES) mask |= load(x + i) >= fill(least);
    memcpy(bits, &mask, sizeof bits);
    return (bits[0] | bits[1]) != 0;
}

/* Returns the largest logit, or NaN if one of them is NaN. */
static float scan(row *row) {
    float peak = -INFINITY;
    for (int block = 0; block < row->num_blocks; block++) {
        const float largest = largest_of(block_of(row, block));
        row->largest[block] = largest;
        peak = largest <= peak ? peak : largest;
        if (isnan(peak)) break;
    }
    for (int block = row->num_blocks; block % STRIDE; block++) row->largest[block] = -INFINITY;
    return peak;
}

static int first_of(const row *row, float peak) {
    int block = 0, i = 0;
    while (row->largest[block] != peak) block++;
    const float *x = block_of(row, block);
    while (x[i] != peak) i++;
    return block * BLOCK + i;
}

/* Returns the largest key such that it and all larger keys reach the goal: by their number, or by the sum of the
   weights whose bits they are. Returns the smallest key if they never do. Reorders the keys: each round keeps those of
   one bin. */
static int32_t find_threshold(int32_t *keys, int count, double goal, int is_by_weight) {
    for (;;) {
        int32_t low = INT32_MAX, high = INT32_MIN;
        for (int i = 0; i < count; i++) {
            low = keys[i] < low ? keys[i] : low;
            high = keys[i] > high ? keys[i] : high;
        }
        if (low >= high) return low;
        double bins[NUM_BINS] = {0};
        int shift = 0, bin = NUM_BINS - 1, left = 0;
        while (((uint32_t)high - (uint32_t)low) >> shift >= NUM_BINS) shift++;
        for (int i = 0; i < count; i++) {
            bins[((uint32_t)keys[i] - (uint32_t)low) >> shift] += is_by_weight ? float_of(keys[i]) : 1.0f;
        }
        for (; bin > 0 && bins[bin] < goal; bin--) goal -= bins[bin];
        for (int i = 0; i < count; i++) {
            const int32_t key = keys[i];
            keys[left] = key;
            left += ((uint32_t)key - (uint32_t)low) >> shift == (uint32_t)bin;
        }
        count = left;
    }
}

/* Returns the k-th largest logit. It is at least the k-th largest of the blocks' maxima. */
static float find_largest(const row *row, int k) {
    int32_t *keys = row->keys;
    float least = -INFINITY;
    if (k <= row->num_blocks) {
        for (int block = 0; block < row->num_blocks; block++) keys[block] = key_of(row->largest[block]);
        least = float_of(find_threshold(keys, row->num_blocks, k, 0));
    }
    int count = 0;
    for (int block = 0; block < row->num_blocks; block++) {
        if (row->largest[block] < least) continue;
        const float *x = block_of(row, block), *end = x + BLOCK;
        for (; x < end; x += STRIDE) {
            if (!reaches(x, least)) continue;
            for (int i = 0; i < STRIDE; i++) {
                keys[count] = key_of(x[i]);
                count += x[i] >= least;
            }
        }
    }
    return float_of(find_threshold(keys, count, k, 0));
}

/* e^x for x <= 0, to 1.3 ulp; below LIGHTEST for x < -87 and for NaN. Terms are added in pairs to shorten the chain. */
static inline floats exponential(floats x) {
    const floats magic = fill(12582912.0f); /* 1.5 * 2^23: adding it leaves an integer in the low bits */
    x = larger(x, fill(-87.0f));
    const floats shifted = multiply_add(x, fill(1.44269504f), magic), n = shifted - magic;
    floats r = multiply_add(n, fill(-0.693359375f), x); /* x - n log 2, in two parts */
    r = multiply_add(n, fill(2.12194440e-4f), r);
    const floats square = r * r;
    floats y = multiply_add(square, fill(1.3814539e-3f), multiply_add(r, fill(8.368745e-3f), fill(4.166839e-2f)));
    y = multiply_add(square, y, multiply_add(r, fill(1.6666521e-1f), fill(4.9999994e-1f)));
    y = multiply_add(square, y, r + 1.0f);
    return (floats)((ints)y + ((ints)shifted << 23)); /* times 2^n */
}

/* Computes weights of whole strides, four vectors at a time to fill the pipelines. */
static void weigh(const row *row, const float *restrict x, int count, float *restrict weights) {
    const floats temperature = fill(row->choice->temperature), inverse = 1.0f / temperature, peak = fill(row->peak);
    for (int i = 0; i < count; i += STRIDE) {
        floats y[4];
        for (int j = 0; j < 4; j++) y[j] = exponential(divide(load(x + i + j * LANES), temperature, inverse) - peak);
        for (int j = 0; j < 4; j++) store(weights + i + j * LANES, y[j]);
    }
}

static double sum_of(const float *weights) {
    double sums[LANES] = {0};
    for (int i = 0; i < BLOCK; i += LANES) {
        for (int lane = 0; lane < LANES; lane++) sums[lane] += weights[i + lane];
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

/* Sets the weights and returns their sum. */
static double weigh_row(row *row) {
    const float temperature = row->choice->temperature;
    double total = 0;
    weigh(row, row->largest, ceil_div(row->num_blocks, STRIDE) * STRIDE, row->heaviest);
    for (int block = 0; block < row->num_blocks; block++) {
        const float *x = block_of(row, block);
        float *weights = row->weights + (size_t)block * BLOCK;
        const float largest = row->largest[block];
        if (largest == -INFINITY || largest / temperature < row->floor) {
            row->sums[block] = row->heaviest[block] = 0;
            continue;
        }
        weigh(row, x, BLOCK, weights);
        if (row->floor > -INFINITY) {
            for (int i = 0; i < BLOCK; i++) weights[i] = x[i] / temperature < row->floor ? 0 : weights[i];
        }
        total += row->sums[block] = sum_of(weights);
    }
    return total;
}

/* Collects all tokens with at least this weight as candidates and returns their number. */
static int gather(row *row, float least, double *mass) {
    int count = 0;
    double sum = 0;
    for (int block = 0; block < row->num_blocks; block++) {
        if (row->heaviest[block] < least * 0.99999f) continue; /* a smaller logit may have a weight one ulp larger */
        const int before = count;
        for (int first = block * BLOCK; first < (block + 1) * BLOCK; first += STRIDE) {
            if (!reaches(row->weights + first, least)) continue;
            for (int i = first; i < first + STRIDE; i++) {
                row->candidates[count] = row->weights[i];
                row->ids[count] = i;
                count += row->weights[i] >= least;
            }
        }
        for (int i = before; i < count; i++) sum += row->candidates[i];
    }
    *mass = sum;
    return count;
}

/* Lowers the least weight of candidates until they reach top_p of the total, so that few unneeded ones are kept. */
static int draw_top_p(row *row, double total) {
    const double goal = row->choice->top_p * total;
    double mass = 0, kept = 0, sum = 0;
    float least = (float)total;
    int count = 0, last = 0;
    while (mass < goal && least > LIGHTEST) {
        least = least / 8 > LIGHTEST ? least / 8 : LIGHTEST;
        count = gather(row, least, &mass);
    }
    memcpy(row->keys, row->candidates, (size_t)count * sizeof(float));
    const float threshold = float_of(find_threshold(row->keys, count, goal, 1));
    for (int i = 0; i < count; i++) kept += row->candidates[i] < threshold ? 0 : row->candidates[i];
    const double target = row->choice->draw * kept;
    for (int i = 0; i < count && sum <= target; i++) {
        if (row->candidates[i] < threshold) continue;
        sum += row->candidates[i];
        last = i;
    }
    return row->ids[last];
}

static int draw_any(const row *row, double total) {
    const double target = row->choice->draw * total;
    double sum = 0, next = 0;
    int block = 0, last = 0;
    for (int i = 0; i < row->num_blocks && next <= target; i++) { /* find the block where the sum passes the target */
        if (row->heaviest[i] < LIGHTEST) continue;
        block = i;
        sum = next;
        next += row->sums[i];
    }
    const float *weights = row->weights + (size_t)block * BLOCK;
    for (int i = 0; i < BLOCK && sum <= target; i++) {
        if (weights[i] < LIGHTEST) continue;
        sum += weights[i];
        last = i;
    }
    return block * BLOCK + last;
}

static int choose_token(row *row, float peak) {
    const quire_choice *choice = row->choice;
    row->peak = peak / choice->temperature;
    if (choice->temperature == 0 || isinf(row->peak)) return first_of(row, peak);
    row->floor = choice->min_p > 0 ? row->peak + logf(choice->min_p) : -INFINITY;
    if (choice->top_k) {
        const float floor = find_largest(row, choice->top_k) / choice->temperature;
        if (floor > row->floor) row->floor = floor;
    }
    const double total = weigh_row(row);
    return choice->top_p < 1 ? draw_top_p(row, total) : draw_any(row, total);
}

/* Returns how many logits are larger. */
static int rank_of(const row *row, float logit) {
    int rank = 0;
    for (int block = 0; block < row->num_blocks; block++) {
        if (!(row->largest[block] > logit)) continue;
        const float *x = block_of(row, block);
        for (int i = 0; i < BLOCK; i++) rank += x[i] > logit;
    }
    return rank;
}

static int compare(const void *a, const void *b) {
    const uint64_t one = *(const uint64_t *)a, other = *(const uint64_t *)b;
    return (one > other) - (one < other);
}

/* Lists the tokens of the k largest logits, largest first, equal ones by id. */
static void list_largest(const row *row, int k, int32_t *tokens) {
    const float least = find_largest(row, k);
    uint64_t *order = (uint64_t *)(void *)row->weights; /* reuses the memory of weights and candidates */
    int count = 0;
    for (int block = 0; block < row->num_blocks; block++) {
        if (row->largest[block] < least) continue;
        const float *x = block_of(row, block);
        for (int i = 0; i < BLOCK && block * BLOCK + i < row->vocab_size; i++) {
            if (x[i] < least) continue;
            const uint32_t descending = (uint32_t)INT32_MAX - (uint32_t)key_of(x[i] + 0.0f); /* + 0: -0 becomes 0 */
            order[count++] = (uint64_t)descending << 32 | (uint32_t)(block * BLOCK + i);
        }
    }
    qsort(order, (size_t)count, sizeof *order, compare);
    for (int i = 0; i < k; i++) tokens[i] = (int32_t)(order[i] & UINT32_MAX);
}

static size_t own_bytes(int num_blocks) {
    const size_t blocks = (size_t)ceil_div(num_blocks, STRIDE) * STRIDE, places = (size_t)num_blocks * BLOCK;
    return blocks * (sizeof(double) + 2 * sizeof(float)) + places * (2 * sizeof(float) + 2 * sizeof(int32_t));
}

/* Sets all fields except the choice, the peak and the floor. */
static void lay_out(row *row, const float *logits, int vocab_size, void *memory) {
    row->logits = logits;
    row->vocab_size = vocab_size;
    row->num_blocks = ceil_div(vocab_size, BLOCK);
    const int first = (row->num_blocks - 1) * BLOCK;
    for (int i = 0; i < BLOCK; i++) row->tail[i] = first + i < vocab_size ? logits[first + i] : -INFINITY;
    const size_t blocks = (size_t)ceil_div(row->num_blocks, STRIDE) * STRIDE, places = (size_t)row->num_blocks * BLOCK;
    row->sums = memory;
    row->largest = (float *)(row->sums + blocks);
    row->heaviest = row->largest + blocks;
    row->weights = row->heaviest + blocks;
    row->candidates = row->weights + places;
    row->ids = (int32_t *)(row->candidates + places);
    row->keys = row->ids + places;
}

typedef struct {
    quire_engine *engine;
    const quire_sampling *sampling;
    const quire_ranking *ranking;
} work;

/* Returns whether no logit is NaN and the largest is finite. */
static int is_row_sound(const float *logits, int vocab_size) {
    float peak = -INFINITY;
    int i = 0;
    for (; i + BLOCK <= vocab_size; i += BLOCK) {
        const float largest = largest_of(logits + i);
        if (isnan(largest)) return 0;
        peak = largest <= peak ? peak : largest;
    }
    for (; i < vocab_size; i++) {
        if (isnan(logits[i])) return 0;
        peak = logits[i] <= peak ? peak : logits[i];
    }
    return isfinite(peak);
}

/* Sets each of 64 logits whose bit is not set to minus infinity, lowest bit first. */
static void forbid_word(float *logits, uint64_t bits) {
    const ints each = {1, 2, 4, 8}, never = (ints)fill(-INFINITY);
    for (int i = 0; i < 64; i += LANES, bits >>= LANES) {
        const ints is_forbidden = (each & (int32_t)(bits & 15)) == 0;
        store(logits + i, (floats)(((ints)load(logits + i) & ~is_forbidden) | (never & is_forbidden)));
    }
}

/* Masks are nearly empty or nearly full: most words are all zeros or all ones. */
static void forbid(float *logits, const uint8_t *mask, int vocab_size) {
    int first = 0;
    for (; first + 64 <= vocab_size; first += 64) {
        uint64_t bits = 0;
        for (int i = 0; i < 8; i++) bits |= (uint64_t)mask[first / 8 + i] << 8 * i;
        if (~bits) forbid_word(logits + first, bits);
    }
    for (; first < vocab_size; first++) {
        if (!(mask[first / 8] >> first % 8 & 1)) logits[first] = -INFINITY;
    }
}

static void sample_row(void *context, int unit, int thread) {
    const work *work = context;
    const quire_sampling *args = work->sampling;
    row row = {.choice = args->choices + unit};
    float *logits = args->logits + (size_t)unit * (size_t)args->vocab_size;
    const uint8_t *mask = args->masks[unit];
    if (mask) {
        args->was_sound[unit] = (uint8_t)is_row_sound(logits, args->vocab_size);
        forbid(logits, mask, args->vocab_size);
    }
    lay_out(&row, logits, args->vocab_size, quire_own_memory(work->engine, thread));
    const float peak = scan(&row);
    const int is_sound = isfinite(peak);
    args->is_sound[unit] = (uint8_t)is_sound;
    if (!mask) args->was_sound[unit] = (uint8_t)is_sound;
    args->tokens[unit] = is_sound ? choose_token(&row, peak) : 0;
}

static void rank_row(void *context, int unit, int thread) {
    static const quire_choice as_they_are = {.temperature = 1, .top_p = 1};
    const work *work = context;
    const quire_ranking *args = work->ranking;
    const int num_top = args->num_top;
    const float *logits = args->logits + (size_t)unit * (size_t)args->vocab_size;
    int32_t *tokens = args->top_tokens + (size_t)unit * (size_t)num_top;
    float *logprobs = args->top_logprobs + (size_t)unit * (size_t)num_top, total = NAN;
    row row = {.choice = &as_they_are, .floor = -INFINITY};
    lay_out(&row, logits, args->vocab_size, quire_own_memory(work->engine, thread));
    row.peak = scan(&row);
    const int is_sound = isfinite(row.peak);
    if (is_sound) total = (float)log(weigh_row(&row));
    if (is_sound && num_top) list_largest(&row, num_top, tokens);
    for (int i = 0; i < num_top; i++) {
        if (!is_sound) tokens[i] = i; /* logits with NaN have no order */
        logprobs[i] = logits[tokens[i]] - row.peak - total;
    }
    args->logprobs[unit] = logits[args->chosen[unit]] - row.peak - total;
    args->ranks[unit] = is_sound ? rank_of(&row, logits[args->chosen[unit]]) : 0;
}

int quire_sample(quire_engine *engine, const quire_sampling *args) {
    if (quire_reserve_own(engine, own_bytes(ceil_div(args->vocab_size, BLOCK)))) return -1;
    work work = {engine, args, NULL};
    quire_run(engine, sample_row, &work, args->num_rows);
    return 0;
}

int quire_rank(quire_engine *engine, const quire_ranking *args) {
    if (quire_reserve_own(engine, own_bytes(ceil_div(args->vocab_size, BLOCK)))) return -1;
    work work = {engine, NULL, args};
    quire_run(engine, rank_row, &work, args->num_rows);
    return 0;
}
