"""Attention of one new token per row over paged keys and values, in one GPU kernel.

Without this kernel, a step gathers the blocks of every row into a dense copy and calls MLX's attention. The kernel
reads the blocks where they are. Its body is one source that compiles as Metal (`mx.fast.metal_kernel`) and as CUDA
(`mx.fast.cuda_kernel`); the two languages differ in a few macros, which `Language` holds.

`kernel_check.py` compares the kernel with gather + SDPA when a model is loaded, and measures where it is faster.
"""

# B rows, H query heads, K KV heads, D size of a query or key, V size of a value, W blocks in the widest block table

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import mlx.core as mx

SIMD_WIDTH = 32  # lanes of a SIMD group (Metal) or warp (CUDA)
TYPES = (mx.float32, mx.float16, mx.bfloat16)
MAX_HEAD_SIZE = 256

KEYS = 4  # keys that a SIMD group reads before it uses them, so that several loads are under way
SIMDGROUPS = 4  # in a thread group: they take turns with the keys of a part
LANE_VALUES = 32  # numbers of queries and sums that a lane holds; more would leave too few registers
MIN_PART = 128  # keys: smaller parts cost more in merging than they gain
MAX_PARTS = 64

# NO_KEYS is the maximum of a softmax over no keys: exp2(NO_KEYS - score) is 0 for every real score, and unlike
# infinity it does not become NaN when it is subtracted from itself.
CONSTANTS = f"""
    #define SIMD_WIDTH {SIMD_WIDTH}
    #define LOG2_E 1.44269504f
    #define NO_KEYS -1e30f
"""

ATTEND = """
    // A thread group computes HEADS query heads of one KV head, for one row and one part of the row's keys.
    // Each SIMD group attends to every SIMDGROUPS-th tile of KEYS keys. Its lanes share a row of D numbers: N each.
    constexpr int N = D / SIMD_WIDTH, NV = DV / SIMD_WIDTH;
    const int num_heads = queries_shape[1], num_kv_heads = keys_shape[2], num_blocks_in_row = tables_shape[1];
    const int row = GROUP.y, part = GROUP.z, num_parts = NUM_GROUPS.z;
    const int heads_per_kv_head = num_heads / num_kv_heads;
    const int groups_per_kv_head = (heads_per_kv_head + HEADS - 1) / HEADS;
    const int kv_head = int(GROUP.x) / groups_per_kv_head;
    const int first_head = int(GROUP.x) % groups_per_kv_head * HEADS;  // of this KV head's

    // The row attends to [start, end). Its tiles are divided evenly: this part has [first_tile, last_tile).
    const int end = lengths[row];
    const int start = window[0] > 0 ? max(end - window[0], 0) : 0;
    const int row_first = start / KEYS, row_last = (end + KEYS - 1) / KEYS;
    const int tiles_per_part = (row_last - row_first + num_parts - 1) / num_parts;
    const int first_tile = row_first + part * tiles_per_part;
    const int last_tile = min(first_tile + tiles_per_part, row_last);

    // Scores are in units of log2, because exp2 is the instruction that GPUs have.
    float query[HEADS][N], sum[HEADS][NV], top[HEADS], total[HEADS];
    #pragma unroll
    for (int h = 0; h < HEADS; ++h) {
        const int head = kv_head * heads_per_kv_head + min(first_head + h, heads_per_kv_head - 1);
        const size_t offset = (size_t(row) * num_heads + head) * D + LANE * N;
        for (int i = 0; i < N; ++i) query[h][i] = static_cast<float>(queries[offset + i]) * scale[0] * LOG2_E;
        for (int i = 0; i < NV; ++i) sum[h][i] = 0;
        top[h] = NO_KEYS;
        total[h] = 0;
        if (HAS_SINKS && part == 0 && SIMDGROUP == 0) {
            top[h] = static_cast<float>(sinks[head]) * LOG2_E;
            total[h] = 1;
        }
    }

    for (int tile = first_tile + SIMDGROUP; tile < last_tile; tile += SIMDGROUPS) {
        // A tile lies in one block. Its keys outside [start, end) are replaced by the nearest inside and get no weight:
        // memory that was never written may hold NaN.
        const int base = tile * KEYS;
        const size_t block = tables[row * num_blocks_in_row + base / BLOCK];
        size_t slot[KEYS];
        float weight[HEADS][KEYS];
        #pragma unroll
        for (int j = 0; j < KEYS; ++j) {
            const int key = min(max(base + j, start), end - 1);
            slot[j] = (block * BLOCK + key % BLOCK) * num_kv_heads + kv_head;
            float k[N];
            LOAD(k, keys + slot[j] * D + LANE * N, N);
            #pragma unroll
            for (int h = 0; h < HEADS; ++h) {
                weight[h][j] = 0;
                for (int i = 0; i < N; ++i) weight[h][j] += query[h][i] * k[i];
            }
        }
        #pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            float new_top = top[h];
            #pragma unroll
            for (int j = 0; j < KEYS; ++j) {
                const float score = SIMD_SUM(weight[h][j]);
                weight[h][j] = base + j < start || base + j >= end ? NO_KEYS : score;
                new_top = max(new_top, weight[h][j]);
            }
            const float decay = EXP2(top[h] - new_top);
            top[h] = new_top;
            total[h] *= decay;
            for (int i = 0; i < NV; ++i) sum[h][i] *= decay;
            #pragma unroll
            for (int j = 0; j < KEYS; ++j) {
                weight[h][j] = EXP2(weight[h][j] - new_top);
                total[h] += weight[h][j];
            }
        }
        #pragma unroll
        for (int j = 0; j < KEYS; ++j) {
            float v[NV];
            LOAD(v, values + slot[j] * DV + LANE * NV, NV);
            #pragma unroll
            for (int h = 0; h < HEADS; ++h)
                for (int i = 0; i < NV; ++i) sum[h][i] += weight[h][j] * v[i];
        }
    }

    // Merge the SIMD groups, one head after the other to need little shared memory.
    SHARED float sums[SIMDGROUPS][DV], tops[SIMDGROUPS], totals[SIMDGROUPS];
    #pragma unroll
    for (int h = 0; h < HEADS; ++h) {
        for (int i = 0; i < NV; ++i) sums[SIMDGROUP][LANE * NV + i] = sum[h][i];
        if (LANE == 0) {
            tops[SIMDGROUP] = top[h];
            totals[SIMDGROUP] = total[h];
        }
        BARRIER;
        float merged_top = NO_KEYS, merged_total = 0;
        for (int s = 0; s < SIMDGROUPS; ++s) merged_top = max(merged_top, tops[s]);
        for (int s = 0; s < SIMDGROUPS; ++s) merged_total += totals[s] * EXP2(tops[s] - merged_top);
        if (first_head + h < heads_per_kv_head) {
            const int head = kv_head * heads_per_kv_head + first_head + h;
            const size_t place = (size_t(row) * num_heads + head) * num_parts + part;
            for (int d = SIMDGROUP * SIMD_WIDTH + LANE; d < DV; d += SIMDGROUPS * SIMD_WIDTH) {
                float merged = 0;
                for (int s = 0; s < SIMDGROUPS; ++s) merged += sums[s][d] * EXP2(tops[s] - merged_top);
                out[place * DV + d] = static_cast<OUT>(merged_total > 0 ? merged / merged_total : 0.0f);
            }
            if (SIMDGROUP == 0 && LANE == 0)
                logsums[place] = merged_total > 0 ? merged_top + LOG2(merged_total) : NO_KEYS;
        }
        BARRIER;
    }
"""

MERGE = """
    // One SIMD group merges the parts of one query head of one row: their mean, weighted by their softmax sums.
    constexpr int NV = DV / SIMD_WIDTH;
    const int num_parts = logsums_shape[2];
    const size_t place = size_t(GROUP.z) * NUM_GROUPS.y + GROUP.y;
    float top = NO_KEYS, total = 0, sum[NV];
    for (int i = 0; i < NV; ++i) sum[i] = 0;
    for (int p = 0; p < num_parts; ++p) top = max(top, logsums[place * num_parts + p]);
    for (int p = 0; p < num_parts; ++p) {
        const float weight = EXP2(logsums[place * num_parts + p] - top);
        total += weight;
        for (int i = 0; i < NV; ++i)
            sum[i] += weight * parts[(place * num_parts + p) * DV + i * SIMD_WIDTH + LANE];
    }
    for (int i = 0; i < NV; ++i) out[place * DV + i * SIMD_WIDTH + LANE] = static_cast<OUT>(sum[i] / total);
"""

# MLX passes thread indices to a Metal kernel if the source contains their names, so they are not in the header.
METAL_PROLOGUE = """
    #define GROUP threadgroup_position_in_grid
    #define NUM_GROUPS threadgroups_per_grid
    #define SIMDGROUP int(simdgroup_index_in_threadgroup)
    #define LANE int(thread_index_in_simdgroup)
    #define SHARED threadgroup
    #define BARRIER threadgroup_barrier(mem_flags::mem_threadgroup)
    #define SIMD_SUM simd_sum
    #define EXP2 fast::exp2
    #define LOG2 fast::log2
    #define LOAD(to, from, n) for (int i = 0; i < n; ++i) to[i] = static_cast<float>((from)[i])
"""

CUDA_HEADER = """
// The numbers of one lane: aligned, so that they are loaded in one or two instructions.
template <typename T, int N>
struct alignas((N & -N) * sizeof(T) < 16 ? (N & -N) * sizeof(T) : 16) LaneRow { T x[N]; };

inline __device__ float sum_of_warp(float x) {
    for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffff, x, distance);
    return x;
}
"""
CUDA_PROLOGUE = """
    #define GROUP blockIdx
    #define NUM_GROUPS gridDim
    #define SIMDGROUP int(threadIdx.x / 32)
    #define LANE int(threadIdx.x % 32)
    #define SHARED __shared__
    #define BARRIER __syncthreads()
    #define SIMD_SUM sum_of_warp
    #define EXP2 exp2f
    #define LOG2 log2f
    #define LOAD(to, from, n) { \\
        const auto lane_row = *reinterpret_cast<const LaneRow<T, n>*>(from); \\
        for (int i = 0; i < n; ++i) to[i] = static_cast<float>(lane_row.x[i]); \\
    }
"""


class Launch(Protocol):
    """A kernel as MLX returns it. The grid is in threads."""

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        template: Sequence[tuple[str, mx.Dtype | int | bool]],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]: ...


@dataclass(frozen=True, slots=True)
class Language:
    """What differs between the GPU languages that MLX compiles."""

    name: str
    compile: Callable[..., object]  # like mx.fast.metal_kernel: returns a `Launch`
    prologue: str  # first lines of the kernels
    header: str  # source before the kernels
    num_groups: int  # thread groups that keep the GPU busy: contexts are divided until there are this many


METAL = Language("metal", mx.fast.metal_kernel, METAL_PROLOGUE, "", num_groups=256)
CUDA = Language("cuda", mx.fast.cuda_kernel, CUDA_PROLOGUE, CUDA_HEADER, num_groups=1024)


def find_language() -> Language:
    """Return the language of this machine's GPU."""
    if mx.metal.is_available():
        return METAL
    if mx.cuda.is_available():
        return CUDA
    raise RuntimeError("the paged-decode kernel needs a GPU, and MLX finds none here (neither Metal nor CUDA)")


class Attention(Protocol):
    """Attention of one token per row: `PagedDecode` or `gather_attention`.

    queries [B, H, D], keys [blocks, block size, K, D], values [blocks, block size, K, V], tables int32 [B, W]: block
    ids, padded with any valid id. lengths int32 [B]: keys of each row, at least 1. With a window, only the last
    `window` keys count. sinks [H]: a logit for each head that takes part in the softmax and has no value.
    Returns [B, H, V] in the type of the queries.
    """

    def __call__(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        tables: mx.array,
        lengths: mx.array,
        *,
        scale: float,
        window: int = 0,
        sinks: mx.array | None = None,
    ) -> mx.array: ...


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes and the type of a model's attention."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int
    block_size: int
    dtype: mx.Dtype

    @property
    def is_supported(self) -> bool:
        """Whether the kernel computes attention of these sizes and this type."""
        sizes_fit = all(
            size % SIMD_WIDTH == 0 and 0 < size <= MAX_HEAD_SIZE for size in (self.head_size, self.value_size)
        )
        heads_fit = self.num_heads > 0 and self.num_heads % self.num_kv_heads == 0
        return sizes_fit and heads_fit and self.block_size % KEYS == 0 and self.dtype in TYPES

    @property
    def token_bytes(self) -> int:
        return self.num_kv_heads * (self.head_size + self.value_size) * self.dtype.size


class PagedDecode:
    """The kernel, compiled for a shape and type when it is first called with them."""

    def __init__(self, language: Language | None = None) -> None:
        self.language = language or find_language()
        self._attend = self._compile(
            "quire_paged_decode",
            ["queries", "keys", "values", "tables", "lengths", "scale", "window", "sinks"],
            ["out", "logsums"],
            ATTEND,
        )
        self._merge = self._compile("quire_merge_parts", ["parts", "logsums"], ["out"], MERGE)
        self._constants: dict[tuple[float, mx.Dtype], mx.array] = {}

    def _compile(self, name: str, inputs: Sequence[str], outputs: Sequence[str], body: str) -> Launch:
        language = self.language
        kernel = language.compile(
            name=name,
            input_names=inputs,
            output_names=outputs,
            source=CONSTANTS + language.prologue + body,
            header=language.header,
        )
        return cast(Launch, kernel)

    def _constant(self, value: float, dtype: mx.Dtype) -> mx.array:
        """Return an array of one number: kept, because it is needed at every layer of every step."""
        if (array := self._constants.get((value, dtype))) is None:
            array = self._constants[value, dtype] = mx.array([value], dtype)
        return array

    def num_parts(self, num_groups: int, num_keys: int) -> int:
        """Return into how many parts the keys of a row are divided if `num_groups` compute undivided rows."""
        return max(1, min(self.language.num_groups // num_groups, num_keys // MIN_PART, MAX_PARTS))

    def __call__(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        tables: mx.array,
        lengths: mx.array,
        *,
        scale: float,
        window: int = 0,
        sinks: mx.array | None = None,
    ) -> mx.array:
        (num_rows, num_heads, head_size), (_, block_size, num_kv_heads, value_size) = queries.shape, values.shape
        dtype = queries.dtype
        heads = _heads_per_group(num_heads // num_kv_heads, head_size, value_size)
        groups = num_kv_heads * math.ceil(num_heads // num_kv_heads / heads)  # of an undivided row
        num_keys = tables.shape[1] * block_size
        parts = self.num_parts(groups * num_rows, min(num_keys, window) if window else num_keys)
        out_type = dtype if parts == 1 else mx.float32
        out, logsums = self._attend(
            inputs=[
                *(queries, keys, values, tables, lengths),
                *(self._constant(scale, mx.float32), self._constant(window, mx.int32)),
                # MLX compiles a kernel once for its template, whatever the types of its inputs.
                self._constant(0, mx.float32) if sinks is None else sinks.astype(mx.float32),
            ],
            template=[
                *(("T", dtype), ("OUT", out_type), ("D", head_size), ("DV", value_size), ("BLOCK", block_size)),
                *(("HEADS", heads), ("KEYS", KEYS), ("SIMDGROUPS", SIMDGROUPS), ("HAS_SINKS", sinks is not None)),
            ],
            grid=(groups * SIMDGROUPS * SIMD_WIDTH, num_rows, parts),
            threadgroup=(SIMDGROUPS * SIMD_WIDTH, 1, 1),
            output_shapes=[(num_rows, num_heads, parts, value_size), (num_rows, num_heads, parts)],
            output_dtypes=[out_type, mx.float32],
        )
        if parts == 1:
            return out.reshape(num_rows, num_heads, value_size)
        (merged,) = self._merge(
            inputs=[out, logsums],
            template=[("OUT", dtype), ("DV", value_size)],
            grid=(SIMD_WIDTH, num_heads, num_rows),
            threadgroup=(SIMD_WIDTH, 1, 1),
            output_shapes=[(num_rows, num_heads, value_size)],
            output_dtypes=[dtype],
        )
        return merged


def _heads_per_group(heads_per_kv_head: int, head_size: int, value_size: int) -> int:
    """Return how many query heads share one read of a KV head: as many as the registers hold, in equal groups."""
    most = max(1, LANE_VALUES * SIMD_WIDTH // (head_size + value_size))
    return math.ceil(heads_per_kv_head / math.ceil(heads_per_kv_head / most))
