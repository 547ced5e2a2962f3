/* A thread pool that does not need its threads to run at the same time.

   A piece of work consists of units, and any thread may claim the next one. The caller claims units too, and waits only
   for units that another thread has claimed. If another process takes the core of a thread before the thread claims a
   unit, nothing is delayed.

   Threads that wait poll for a while and then sleep, so an idle engine uses no CPU. On a quiet machine they poll longer
   than any pause within a step. On a busy machine a thread often waits for one that does not run: it sleeps soon, so that
   the other may use the core. A thread that sleeps runs soon after it is woken, because it has used less than its share of
   CPU time; one that polls or yields uses up its share. */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#include "inner.h"

enum { POLLS = 64 }; /* between two looks at the clock */
enum { QUIET_SPIN_NS = 50000, BUSY_SPIN_NS = 5000 };
/* The machine counts as busy while threads of this process lose their core more often than every 10 ms. */
enum { LOOK_NS = 40000000, MAX_LOST = 4 };

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
    /* The piece of work. Written by the caller while no unit is claimed; read only between the claim and the end of a
       unit. */
    quire_task task;
    void *context;
    int num_units;
    pthread_mutex_t mutex;
    pthread_cond_t wake, done;
    int64_t next_look_ns; /* the counts below are read once per LOOK_NS, by a thread that is about to sleep */
    long num_lost;
    atomic_int spin_ns;
    _Alignas(64) atomic_int num_unclaimed; /* units; the next one is num_units - num_unclaimed */
    _Alignas(64) atomic_int num_unfinished;
    _Alignas(64) atomic_int has_sleepers; /* a worker may be asleep */
    atomic_int is_caller_asleep;
    atomic_int is_closing;
};

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Polls for at most spin_ns until the counter is zero, or is not. Returns whether that happened. */
static int poll_counter(quire_engine *engine, atomic_int *counter, int is_zero) {
    for (int64_t end = 0;;) {
        for (int i = 0; i < POLLS; i++) {
            if ((atomic_load_explicit(counter, memory_order_acquire) == 0) == is_zero) return 1;
            relax();
        }
        const int64_t now = now_ns();
        if (!end) end = now + atomic_load_explicit(&engine->spin_ns, memory_order_relaxed);
        if (now >= end) return 0;
    }
}

/* Sets how long threads poll, from how often other processes took a core from them. Called with the mutex held. */
static void look_around(quire_engine *engine) {
    const int64_t now = now_ns();
    struct rusage usage;
    if (now < engine->next_look_ns || getrusage(RUSAGE_SELF, &usage)) return;
    const int64_t passed = now - engine->next_look_ns + LOOK_NS;
    const int is_busy = (int64_t)(usage.ru_nivcsw - engine->num_lost) * LOOK_NS > MAX_LOST * passed;
    atomic_store_explicit(&engine->spin_ns, is_busy ? BUSY_SPIN_NS : QUIET_SPIN_NS, memory_order_relaxed);
    engine->num_lost = usage.ru_nivcsw;
    engine->next_look_ns = now + LOOK_NS;
}

/* Claims units and runs them until none is left. Returns how many it ran.

   A claim is valid whatever happened since the counter was read: it takes a unit of the current piece of work, which
   cannot end before that unit is finished. */
static int work(quire_engine *engine, int thread) {
    int count = 0, left = atomic_load_explicit(&engine->num_unclaimed, memory_order_acquire);
    while (left > 0) {
        if (!atomic_compare_exchange_weak_explicit(
                &engine->num_unclaimed, &left, left - 1, memory_order_acquire, memory_order_acquire))
            continue;
        engine->task(engine->context, engine->num_units - left, thread);
        count++;
        left = atomic_load_explicit(&engine->num_unclaimed, memory_order_acquire);
    }
    return count;
}

static void sleep_until_work(quire_engine *engine) {
    pthread_mutex_lock(&engine->mutex);
    look_around(engine);
    for (;;) {
        atomic_store(&engine->has_sleepers, 1); /* before the counter is read: see wake_workers */
        if (atomic_load(&engine->num_unclaimed) || atomic_load(&engine->is_closing)) break;
        pthread_cond_wait(&engine->wake, &engine->mutex);
    }
    pthread_mutex_unlock(&engine->mutex);
}

/* Called after num_unclaimed or is_closing was written. A worker that did not see that write has announced its sleep. */
static void wake_workers(quire_engine *engine) {
    if (!atomic_load(&engine->has_sleepers)) return;
    pthread_mutex_lock(&engine->mutex); /* held by a worker between its announcement and its sleep */
    atomic_store(&engine->has_sleepers, 0);
    pthread_cond_broadcast(&engine->wake);
    pthread_mutex_unlock(&engine->mutex);
}

static void *serve(void *argument) {
    worker *self = argument;
    quire_engine *engine = self->engine;
    while (!atomic_load(&engine->is_closing)) {
        if (!poll_counter(engine, &engine->num_unclaimed, 0)) sleep_until_work(engine);
        const int count = work(engine, self->number);
        if (!count || atomic_fetch_sub(&engine->num_unfinished, count) > count) continue;
        if (atomic_load(&engine->is_caller_asleep)) {
            pthread_mutex_lock(&engine->mutex);
            pthread_cond_signal(&engine->done);
            pthread_mutex_unlock(&engine->mutex);
        }
    }
    return NULL;
}

static void wait_for_units(quire_engine *engine) {
    if (poll_counter(engine, &engine->num_unfinished, 1)) return;
    pthread_mutex_lock(&engine->mutex);
    look_around(engine);
    atomic_store(&engine->is_caller_asleep, 1);
    while (atomic_load(&engine->num_unfinished)) pthread_cond_wait(&engine->done, &engine->mutex);
    atomic_store(&engine->is_caller_asleep, 0);
    pthread_mutex_unlock(&engine->mutex);
}

void quire_run(quire_engine *engine, quire_task task, void *context, int num_units) {
    if (num_units <= 1 || engine->num_threads == 1) {
        for (int unit = 0; unit < num_units; unit++) task(context, unit, 0);
        return;
    }
    engine->task = task;
    engine->context = context;
    engine->num_units = num_units;
    atomic_store_explicit(&engine->num_unfinished, num_units, memory_order_relaxed);
    atomic_store(&engine->num_unclaimed, num_units);
    wake_workers(engine);
    const int count = work(engine, 0);
    if (atomic_fetch_sub(&engine->num_unfinished, count) > count) wait_for_units(engine);
}

static void stop_workers(quire_engine *engine) {
    if (engine->num_threads > 1) {
        atomic_store(&engine->is_closing, 1);
        wake_workers(engine);
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
    pthread_cond_init(&engine->done, NULL);
    atomic_store(&engine->spin_ns, QUIET_SPIN_NS);
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
    pthread_cond_destroy(&engine->done);
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
