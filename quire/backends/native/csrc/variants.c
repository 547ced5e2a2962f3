/* Chooses the best variant of the hot loops that this machine can run. */
#include <stdatomic.h>
#include <string.h>

#include "half.h"
#include "inner.h"

#if defined(__aarch64__)
#if defined(QUIRE_HAS_DOTPROD)
extern const quire_variant quire_variant_dotprod;
#endif
#if defined(QUIRE_HAS_I8MM)
extern const quire_variant quire_variant_i8mm;
#endif
#elif defined(__x86_64__)
#if defined(QUIRE_HAS_AVX512)
extern const quire_variant quire_variant_avx512;
#endif
#if defined(QUIRE_HAS_AVXVNNI)
extern const quire_variant quire_variant_avxvnni;
#endif
#if defined(QUIRE_HAS_AVX2)
extern const quire_variant quire_variant_avx2;
#endif
#endif
extern const quire_variant quire_variant_portable;

static const quire_variant *const VARIANTS[] = { /* best first */
#if defined(__aarch64__)
#if defined(QUIRE_HAS_I8MM)
    &quire_variant_i8mm,
#endif
#if defined(QUIRE_HAS_DOTPROD)
    &quire_variant_dotprod,
#endif
#elif defined(__x86_64__)
#if defined(QUIRE_HAS_AVX512)
    &quire_variant_avx512,
#endif
#if defined(QUIRE_HAS_AVXVNNI)
    &quire_variant_avxvnni,
#endif
#if defined(QUIRE_HAS_AVX2)
    &quire_variant_avx2,
#endif
#endif
    &quire_variant_portable,
};
enum { NUM_VARIANTS = sizeof VARIANTS / sizeof *VARIANTS };

/* A small problem with fixed random numbers and one group of extreme values. Scales are 1 or 1/2, so a float holds
   every sum exactly and the order of additions does not matter: a result is correct to the bit or wrong. */
enum { CHECK_ROWS = 5, CHECK_GROUPS = 3, CHECK_REFINED = 4, CHECK_PANELS = 3, CHECK_COLUMNS = 21 };

typedef struct {
    uint32_t seed;
    uint8_t w[CHECK_PANELS * CHECK_GROUPS * 272];
    int8_t q[CHECK_ROWS * CHECK_GROUPS * GROUP];
    float scales[CHECK_ROWS * CHECK_GROUPS], sums[CHECK_ROWS * CHECK_GROUPS];
    quire_refined refined[CHECK_ROWS * CHECK_REFINED];
} small_problem;

static int next_random(small_problem *problem, int limit) {
    problem->seed = problem->seed * 1664525 + 1013904223;
    return (int)(problem->seed >> 16) % limit;
}

static float next_scale(small_problem *problem) { return next_random(problem, 2) ? 1.0f : 0.5f; }

static void fill_problem(small_problem *problem, int kind) {
    const int size = panel_bytes(kind), tail = kind == QUIRE_Q8 ? 256 : 128;
    for (int i = 0; i < CHECK_PANELS * CHECK_GROUPS * size; i++) problem->w[i] = (uint8_t)next_random(problem, 256);
    memset(problem->w, kind == QUIRE_Q8 ? 0x80 : 0xff, (size_t)tail);
    for (int g = 0; g < CHECK_PANELS * CHECK_GROUPS; g++)
        for (int at = g * size + tail; at < (g + 1) * size; at += 2) {
            const uint16_t half = float_to_half(next_scale(problem));
            memcpy(problem->w + at, &half, 2);
        }
    for (size_t i = 0; i < sizeof problem->q; i++) problem->q[i] = (int8_t)(next_random(problem, 255) - 127);
    memset(problem->q, 127, GROUP);
    for (int i = 0; i < CHECK_ROWS * CHECK_GROUPS; i++) {
        problem->scales[i] = next_scale(problem);
        problem->sums[i] = next_scale(problem);
    }
    for (int i = 0; i < CHECK_ROWS * CHECK_REFINED; i++) {
        const int step = i % CHECK_REFINED * 5 + i / CHECK_REFINED; /* steps of all groups */
        quire_refined *one = &problem->refined[i];
        *one = (quire_refined){.scale = next_scale(problem), .group = step / STEPS, .step = step % STEPS};
        for (int j = 0; j < STEP; j++) one->q[j] = (int8_t)(next_random(problem, 255) - 127);
    }
}

/* Returns whether a variant computes the same as the portable one. Some variants were written on machines that cannot
   run them, and a wrong product makes a model's output useless, so each is tested before it is chosen. */
int quire_check_variant(const quire_variant *variant) {
    small_problem problem = {.seed = 6};
    quire_input input = {
        .num_groups = CHECK_GROUPS, .num_refined = CHECK_REFINED, .num_copies = 1, .q = problem.q,
        .scales = problem.scales, .sums = problem.sums, .refined = problem.refined};
    for (int test = 0; test < 2 * NUM_KINDS; test++) { /* all kinds; all rows and one row */
        const int kind = test % NUM_KINDS;
        float scratch[CHECK_GROUPS * (SCRATCH_FLOATS + LOOKED_UP_FLOATS)];
        float computed[CHECK_ROWS * CHECK_COLUMNS], right[CHECK_ROWS * CHECK_COLUMNS];
        fill_problem(&problem, kind);
        input.num_rows = test < NUM_KINDS ? CHECK_ROWS : 1;
        variant->panels(problem.w, kind, &input, scratch, computed, CHECK_COLUMNS, CHECK_COLUMNS);
        quire_variant_portable.panels(problem.w, kind, &input, scratch, right, CHECK_COLUMNS, CHECK_COLUMNS);
        for (int i = 0; i < input.num_rows * CHECK_COLUMNS; i++)
            if (computed[i] != right[i]) return 0;
    }
    return 1;
}

static const quire_variant *_Atomic chosen;

const quire_variant *quire_variant_now(void) {
    const quire_variant *now = atomic_load(&chosen);
    if (now) return now;
    for (int i = 0; i < NUM_VARIANTS; i++) {
        if (VARIANTS[i]->is_supported() && quire_check_variant(VARIANTS[i])) {
            atomic_store(&chosen, VARIANTS[i]);
            return VARIANTS[i];
        }
    }
    return &quire_variant_portable;
}

const char *quire_kernels(void) { return quire_variant_now()->name; }

int quire_choose_kernels(const char *name) {
    for (int i = 0; i < NUM_VARIANTS; i++) {
        if (!strcmp(VARIANTS[i]->name, name) && VARIANTS[i]->is_supported()) {
            atomic_store(&chosen, VARIANTS[i]);
            return 0;
        }
    }
    return -1;
}

const char *quire_list_kernels(void) {
    static char names[256];
    names[0] = 0;
    for (int i = 0; i < NUM_VARIANTS; i++) {
        if (!VARIANTS[i]->is_supported()) continue;
        if (names[0]) strncat(names, ",", sizeof names - strlen(names) - 1);
        strncat(names, VARIANTS[i]->name, sizeof names - strlen(names) - 1);
    }
    return names;
}

int quire_abi(void) { return QUIRE_ABI; }
