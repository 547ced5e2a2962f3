// Runs a Metal or CUDA kernel on the CPU, to test its source where there is no GPU.
//
// Every thread of a thread group is a fiber with a stack of its own. A fiber runs until it waits for others: in a
// reduction over its SIMD group or at a barrier of the thread group. Thread groups run one after the other, so static
// variables serve as their shared memory. Address spaces do not exist here: `device` and `constant` are empty macros.
// If threads wait for others that have returned, as when a reduction is called by only some lanes, the program aborts.
#pragma once

#ifdef __APPLE__
#define _XOPEN_SOURCE 700  // for ucontext.h
#endif

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

using uint = unsigned;
struct uint3 {
    uint x, y, z;
};

// Written out, because not every C++ compiler has these types.
struct float16_t {
    uint16_t bits = 0;
    float16_t() = default;
    explicit float16_t(float x) {
        const uint16_t sign = signbit(x) ? 0x8000 : 0;
        if (!(fabsf(x) < 65520)) {  // the first number that rounds to infinity
            bits = sign | (isnan(x) ? 0x7e00 : 0x7c00);
            return;
        }
        int exponent;
        frexpf(fabsf(x), &exponent);
        if (exponent < -13 || x == 0) exponent = -13;  // subnormal
        const int mantissa = int(nearbyintf(ldexpf(fabsf(x), 11 - exponent)));  // ties to even
        bits = uint16_t(sign | (((exponent + 14) << 10) + mantissa - 1024));
    }
    explicit operator float() const {
        const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
        float x = exponent ? ldexpf(float(1024 + mantissa), exponent - 25) : ldexpf(float(mantissa), -24);
        if (exponent == 31) x = mantissa ? NAN : INFINITY;
        return bits & 0x8000 ? -x : x;
    }
};

struct bfloat16_t {
    uint16_t bits = 0;
    bfloat16_t() = default;
    explicit bfloat16_t(float x) {
        uint32_t word;
        memcpy(&word, &x, sizeof word);
        bits = uint16_t((word + 0x7fff + ((word >> 16) & 1)) >> 16);  // to nearest, ties to even
    }
    explicit operator float() const {
        const uint32_t word = uint32_t(bits) << 16;
        float x;
        memcpy(&x, &word, sizeof x);
        return x;
    }
};

namespace gpu_on_cpu {

constexpr int NUM_LANES = 32;
constexpr int MAX_THREADS = 1024;  // of a thread group
constexpr size_t STACK_BYTES = 64 * 1024;

struct Barrier {
    int size = 0, arrived = 0;
    long generation = 0;
};

struct Simdgroup {
    Barrier barrier;
    float slots[2][NUM_LANES];  // two, because a lane may be one reduction ahead of the others
};

struct Fiber {
    ucontext_t context;
    char* stack;
    int index;
    long num_reductions;
    bool is_done;
};

inline ucontext_t scheduler;
inline Fiber fibers[MAX_THREADS];
inline Simdgroup simdgroups[MAX_THREADS / NUM_LANES];
inline int num_threads;
inline Barrier group_barrier;
inline Fiber* current;
inline uint3 group, num_groups;
inline void (*thread_of_kernel)();
inline bool has_progress;

inline void wait(Barrier& barrier) {
    const long generation = barrier.generation;
    has_progress = true;
    if (++barrier.arrived == barrier.size) {
        barrier.arrived = 0;
        ++barrier.generation;
        return;
    }
    while (barrier.generation == generation) swapcontext(&current->context, &scheduler);
}

// Gives x to the lanes of the SIMD group and returns the numbers of all.
inline const float* exchange(float x) {
    Simdgroup& own = simdgroups[current->index / NUM_LANES];
    float* slots = own.slots[current->num_reductions++ % 2];
    slots[current->index % NUM_LANES] = x;
    wait(own.barrier);
    return slots;
}

inline void run_fiber() {
    thread_of_kernel();
    current->is_done = true;
    has_progress = true;
    swapcontext(&current->context, &scheduler);
}

inline void run_group() {
    for (Fiber* fiber = fibers; fiber < fibers + num_threads; ++fiber) {
        getcontext(&fiber->context);
        fiber->context.uc_stack.ss_sp = fiber->stack;
        fiber->context.uc_stack.ss_size = STACK_BYTES;
        fiber->is_done = false;
        fiber->num_reductions = 0;
        makecontext(&fiber->context, run_fiber, 0);
    }
    for (int num_done = 0; num_done < num_threads;) {
        has_progress = false;
        for (Fiber* fiber = fibers; fiber < fibers + num_threads; ++fiber) {
            if (fiber->is_done) continue;
            current = fiber;
            swapcontext(&scheduler, &fiber->context);
            num_done += fiber->is_done;
        }
        if (!has_progress) {
            fprintf(stderr, "threads wait for others that never come\n");
            abort();
        }
    }
}

// Runs `thread` once for each thread of each thread group.
inline void launch(const uint* groups, int threads_per_group, void (*thread)()) {
    thread_of_kernel = thread;
    num_groups = {groups[0], groups[1], groups[2]};
    num_threads = threads_per_group;
    group_barrier = Barrier{num_threads};
    for (int i = 0; i < num_threads; ++i) {
        fibers[i].index = i;
        fibers[i].stack = static_cast<char*>(malloc(STACK_BYTES));
        simdgroups[i / NUM_LANES].barrier = Barrier{NUM_LANES};
    }
    for (group.z = 0; group.z < num_groups.z; ++group.z)
        for (group.y = 0; group.y < num_groups.y; ++group.y)
            for (group.x = 0; group.x < num_groups.x; ++group.x) run_group();
    for (int i = 0; i < num_threads; ++i) free(fibers[i].stack);
}

}  // namespace gpu_on_cpu

// Keywords and functions of Metal
namespace metal {
inline int max(int a, int b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline float max(float a, float b) { return a > b ? a : b; }
namespace fast {
inline float exp2(float x) { return exp2f(x); }
inline float log2(float x) { return log2f(x); }
}  // namespace fast
enum class mem_flags { mem_threadgroup };
inline void threadgroup_barrier(mem_flags) { gpu_on_cpu::wait(gpu_on_cpu::group_barrier); }
inline float simd_sum(float x) {
    const float* lanes = gpu_on_cpu::exchange(x);
    float sum = 0;
    for (int i = 0; i < gpu_on_cpu::NUM_LANES; ++i) sum += lanes[i];
    return sum;
}
}  // namespace metal
using namespace metal;

#define device
#define constant
#define threadgroup static

// Keywords and functions of CUDA
#define __device__
#define __shared__ static
#define blockIdx gpu_on_cpu::group
#define gridDim gpu_on_cpu::num_groups
#define threadIdx (uint3{uint(gpu_on_cpu::current->index), 0, 0})
#define __syncthreads() gpu_on_cpu::wait(gpu_on_cpu::group_barrier)
inline float __shfl_xor_sync(uint, float x, int distance) {
    return gpu_on_cpu::exchange(x)[gpu_on_cpu::current->index % gpu_on_cpu::NUM_LANES ^ distance];
}
