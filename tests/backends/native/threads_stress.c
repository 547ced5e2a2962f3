/* Runs many pieces of work on the thread pool of threads.c, with delays at random places, and checks that every unit runs
   exactly once. Usage: threads_stress SEED PIECES

   Plain memory is written by units and read after quire_run, so that the thread sanitizer sees a missing order. */
#define _POSIX_C_SOURCE 200809L
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "inner.h"

enum { MAX_UNITS = 200, MOST_THREADS = 16, OWN_BYTES = 64 };

typedef struct {
    quire_engine *engine;
    uint32_t seed;
    int num_units, num_threads, has_delays;
    atomic_int counts[MAX_UNITS + 1];
    uint32_t written[MAX_UNITS]; /* plain */
} piece;

static uint32_t mix(uint32_t x) {
    x ^= x >> 16, x *= 0x7feb352d, x ^= x >> 15, x *= 0x846ca68b;
    return x ^ x >> 16;
}

static void delay(uint32_t random) {
    const struct timespec pause = {0, (long)(random / 8 % 300) * 1000};
    if (random % 8 == 0) nanosleep(&pause, NULL); /* a thread that loses its core in the middle of a unit */
    else if (random % 8 == 1) sched_yield();
}

static void fail(const char *what, int number) {
    fprintf(stderr, "%s: %d\n", what, number);
    exit(1);
}

static void run_unit(void *context, int unit, int thread) {
    piece *work = context;
    if (unit < 0 || unit >= work->num_units) fail("no such unit", unit);
    if (thread < 0 || thread >= work->num_threads) fail("no such thread", thread);
    atomic_fetch_add_explicit(&work->counts[unit], 1, memory_order_relaxed);
    uint32_t *own = quire_own_memory(work->engine, thread); /* no other thread may use it */
    own[0] = mix(work->seed + (uint32_t)unit);
    if (work->has_delays) delay(own[0]);
    work->written[unit] = own[0];
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    uint32_t random = mix((uint32_t)atoi(argv[1]) + 1);
    quire_engine *engine = quire_open(MOST_THREADS);
    for (int number = 0, last = atoi(argv[2]); number < last; number++) {
        random = mix(random + (uint32_t)number);
        if (number % 64 == 63 && quire_use_threads(engine, 1 + (int)(random % MOST_THREADS))) fail("no threads", number);
        if (quire_reserve_own(engine, OWN_BYTES)) fail("no memory", number);
        static piece work;
        work = (piece){.engine = engine, .seed = random, .num_threads = quire_num_threads(engine)};
        work.num_units = (int)(random / 3 % (random % 3 ? 8 : MAX_UNITS));
        work.has_delays = number / 16 % 2; /* without delays, pieces follow each other as fast as possible */
        quire_run(engine, run_unit, &work, work.num_units);
        for (int unit = 0; unit < work.num_units; unit++) {
            if (atomic_load(&work.counts[unit]) != 1) fail("runs of a unit", atomic_load(&work.counts[unit]));
            if (work.written[unit] != mix(work.seed + (uint32_t)unit)) fail("not written", unit);
        }
        if (work.has_delays) delay(mix(random)); /* workers may fall asleep before the next piece */
    }
    quire_close(engine);
    puts("ok");
    return 0;
}
