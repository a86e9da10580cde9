// Arguments of the kernels that pool rows of the cache: pool.cu, pool_warp.cu.
#pragma once

#include "row_formats.cuh"

// What the sum of a bag is divided by: nothing, the sum of its weights, or the square root of the
// sum of their squares. Equals launch.COMBINERS.
enum Combiner : u32 { SUM, MEAN, SQRTN };

struct PoolPart {
  char* lines;
  const char* rows;
  const char* host_rows;
  const u64* keys;
  const i64* offsets;
  const float* weights;
  char* out;
  u32 buckets;
  u32 stride;
  u32 dim;
  u32 on_device;
  u32 bags;
  u32 hotness;
  u32 first_block;
  u32 now;
  u32 policy;
  u32 combiner;
  u32 half;    // out is float16, else float32
  u32 hidden;  // see row_mask
  u32 format;  // of the rows
  u32 unused;
};

constexpr int PARTS = 32;

struct PoolArgs {
  u32* missing;
  u32* done;    // with result: (1,) the number of blocks that have ended
  u32* result;  // in host memory, or null: receives missing, which is reset to zero
  u32 parts;
  u32 unused;
  PoolPart part[PARTS];
};

static_assert(sizeof(PoolPart) == 112, "must equal launch.POOL_PART");
static_assert(sizeof(PoolArgs) == 32 + PARTS * 112, "must equal launch.POOL_ARGS");

// `total`, from which divide computes the divisor of a bag, after a key of this weight.
__device__ __forceinline__ float add_weight(u32 combiner, float total, float weight) {
  return __fadd_rn(total, combiner == SQRTN ? __fmul_rn(weight, weight) : weight);
}

// Divides the sums of a bag with keys, `total` being the sum of add_weight over its keys, which
// without weights is their number. Each operation is rounded as on the host.
template <int N>
__device__ __forceinline__ void divide(u32 combiner, float total, float (&sums)[N]) {
  if (combiner == SUM) return;
  const float by = combiner == SQRTN ? __fsqrt_rn(total) : total;
#pragma unroll
  for (int v = 0; v < N; v++) sums[v] = by == 0 ? 0 : __fdiv_rn(sums[v], by);
}

__device__ __forceinline__ const PoolPart& part_of_block(const PoolArgs& a) {
  int index = 0;
  while (index + 1 < (int)a.parts && a.part[index + 1].first_block <= blockIdx.x) index++;
  return a.part[index];
}

// Counts keys without a row and, unless that is left to count_kernel, reports them at the end of
// the launch. All threads must call it; of those with the same keys, one is `first`.
__device__ __forceinline__ void report(const PoolArgs& a, u32 missing, bool first) {
  if (missing && first) atomicAdd(a.missing, missing);
  if (!a.result) return;
  __syncthreads();
  if (threadIdx.x) return;
  __threadfence();
  if (atomicAdd(a.done, 1u) == gridDim.x - 1) {
    *a.result = atomicExch(a.missing, 0u);
    *a.done = 0;
  }
}
