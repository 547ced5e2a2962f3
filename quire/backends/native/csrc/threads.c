/* A thread pool. Threads spin between the parts of a step and sleep between steps, so an idle engine uses no CPU. */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "inner.h"

enum { SPINS = 20000 }; /* polls before a thread sleeps: about 50 us, longer than any pause within a step */

#if defined(__aarch64__)
#define relax() __asm__ __volatile__("yield" ::: "memory")
#elif defined(__x86_64__)
#define relax() __builtin_ia32_pause()
#else
#define relax() ((void)0)
#endif

typedef struct {
    quire_engine *engine;
    int number;
    pthread_t thread;
    void *memory;
} worker;

struct quire_engine {
    int num_threads; /* including the caller's */
    worker *workers; /* [num_threads]; worker 0 is the caller */
    size_t own_bytes, shared_bytes;
    void *shared;
    quire_task task;
    void *context;
    int num_units;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    _Alignas(64) atomic_uint round; /* incremented for every piece of work */
    _Alignas(64) atomic_int next_unit;
    _Alignas(64) atomic_int num_busy;
    _Alignas(64) atomic_int num_asleep;
    atomic_int is_closing;
};

static void work(quire_engine *engine, int thread) {
    for (;;) {
        int unit = atomic_fetch_add_explicit(&engine->next_unit, 1, memory_order_relaxed);
        if (unit >= engine->num_units) return;
        engine->task(engine->context, unit, thread);
    }
}

/* Waits until the round differs from `seen`. */
static void wait_for_round(quire_engine *engine, unsigned seen) {
    for (int spin = 0; spin < SPINS; spin++) {
        if (atomic_load_explicit(&engine->round, memory_order_acquire) != seen) return;
        relax();
    }
    pthread_mutex_lock(&engine->mutex);
    atomic_fetch_add(&engine->num_asleep, 1);
    while (atomic_load(&engine->round) == seen) pthread_cond_wait(&engine->wake, &engine->mutex);
    atomic_fetch_sub(&engine->num_asleep, 1);
    pthread_mutex_unlock(&engine->mutex);
}

static void *serve(void *argument) {
    worker *self = argument;
    quire_engine *engine = self->engine;
    unsigned seen = 0;
    for (;;) {
        wait_for_round(engine, seen);
        seen++;
        if (atomic_load(&engine->is_closing)) return NULL;
        work(engine, self->number);
        atomic_fetch_sub_explicit(&engine->num_busy, 1, memory_order_release);
    }
}

static void start_round(quire_engine *engine) {
    atomic_store_explicit(&engine->num_busy, engine->num_threads - 1, memory_order_relaxed);
    atomic_fetch_add(&engine->round, 1);
    if (atomic_load(&engine->num_asleep)) {
        pthread_mutex_lock(&engine->mutex); /* held by a worker between its last poll and its sleep */
        pthread_cond_broadcast(&engine->wake);
        pthread_mutex_unlock(&engine->mutex);
    }
}

void quire_run(quire_engine *engine, quire_task task, void *context, int num_units) {
    if (num_units <= 1 || engine->num_threads == 1) {
        for (int unit = 0; unit < num_units; unit++) task(context, unit, 0);
        return;
    }
    engine->task = task;
    engine->context = context;
    engine->num_units = num_units;
    atomic_store_explicit(&engine->next_unit, 0, memory_order_relaxed);
    start_round(engine);
    work(engine, 0);
    for (int spin = 0; atomic_load_explicit(&engine->num_busy, memory_order_acquire); spin++) {
        if (spin < SPINS) relax();
        else sched_yield(); /* the worker we wait for may need this core */
    }
}

static void stop_workers(quire_engine *engine) {
    if (engine->num_threads > 1) {
        atomic_store(&engine->is_closing, 1);
        start_round(engine);
        for (int i = 1; i < engine->num_threads; i++) pthread_join(engine->workers[i].thread, NULL);
    }
    for (int i = 0; i < engine->num_threads; i++) free(engine->workers[i].memory);
    free(engine->workers);
    engine->workers = NULL;
    engine->num_threads = 0;
}

/* Starts as many threads as possible; the caller's always exists. */
static void start_workers(quire_engine *engine, worker *workers, int num_threads) {
    engine->workers = workers;
    engine->own_bytes = 0;
    engine->num_threads = 1;
    atomic_store(&engine->round, 0);
    atomic_store(&engine->is_closing, 0);
    for (int i = 1; i < num_threads; i++) {
        worker *one = &engine->workers[i];
        one->engine = engine;
        one->number = i;
        if (pthread_create(&one->thread, NULL, serve, one)) break;
        engine->num_threads++;
    }
}

quire_engine *quire_open(int num_threads) {
    quire_engine *engine = aligned_alloc(64, (sizeof(quire_engine) + 63) / 64 * 64);
    worker *workers = calloc((size_t)num_threads, sizeof(worker));
    if (!engine || !workers) {
        free(engine);
        free(workers);
        return NULL;
    }
    memset(engine, 0, sizeof *engine);
    pthread_mutex_init(&engine->mutex, NULL);
    pthread_cond_init(&engine->wake, NULL);
    start_workers(engine, workers, num_threads);
    return engine;
}

int quire_use_threads(quire_engine *engine, int num_threads) {
    if (num_threads == engine->num_threads) return 0;
    worker *workers = calloc((size_t)num_threads, sizeof(worker));
    if (!workers) return -1; /* the existing workers continue */
    stop_workers(engine);
    start_workers(engine, workers, num_threads);
    return 0;
}

void quire_close(quire_engine *engine) {
    stop_workers(engine);
    pthread_mutex_destroy(&engine->mutex);
    pthread_cond_destroy(&engine->wake);
    free(engine->shared);
    free(engine);
}

int quire_num_threads(const quire_engine *engine) { return engine->num_threads; }

static void *renew(void *old, size_t num_bytes) {
    free(old);
    return aligned_alloc(64, (num_bytes + 63) / 64 * 64);
}

void *quire_shared_memory(quire_engine *engine, size_t num_bytes) {
    if (engine->shared_bytes < num_bytes) {
        engine->shared = renew(engine->shared, num_bytes);
        engine->shared_bytes = engine->shared ? num_bytes : 0;
    }
    return engine->shared;
}

int quire_reserve_own(quire_engine *engine, size_t num_bytes) {
    if (engine->own_bytes >= num_bytes) return 0;
    engine->own_bytes = 0;
    for (int i = 0; i < engine->num_threads; i++) {
        engine->workers[i].memory = renew(engine->workers[i].memory, num_bytes);
        if (!engine->workers[i].memory) return -1;
    }
    engine->own_bytes = num_bytes;
    return 0;
}

void *quire_own_memory(quire_engine *engine, int thread) { return engine->workers[thread].memory; }
