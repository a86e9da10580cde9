// pool_warp_kernel: pool_kernel for tables of one row format and of 32 * VALUES values, a warp per
// `each` bags.
//
// A warp searches up to 32 keys together and loads ROWS rows, VALUES values a lane, before it adds
// the first one. The scales of all rows are loaded by a lane each. Only with fixed hotness `each`
// may exceed 1. Arguments, results and reference as for pool_kernel.
#include "pool.cuh"
#include "search.cuh"

__device__ __forceinline__ u32 hidden_of(const PoolPart& p) { return p.hidden; }

constexpr int ROWS = 8;

template <int VALUES>
struct Sum {
  float of[VALUES];
  float total;  // of the weights

  __device__ __forceinline__ void clear(float value) {
#pragma unroll
    for (int v = 0; v < VALUES; v++) of[v] = value;
    total = 0;
  }
};

// Writes this lane's values of a bag.
template <int VALUES>
__device__ __forceinline__ void store_sum(const PoolPart& p, u32 bag, Sum<VALUES>& sum) {
  const size_t at = ((size_t)bag * 32 + (threadIdx.x & 31)) * VALUES;
  if (p.mean) {
#pragma unroll
    for (int v = 0; v < VALUES; v++)
      sum.of[v] = sum.total == 0 ? 0 : __fdiv_rn(sum.of[v], sum.total);
  }
  if (p.half) {
    u32 pair[VALUES / 2];
#pragma unroll
    for (int v = 0; v < VALUES; v += 2)
      pair[v / 2] = narrow(sum.of[v]) | (u32)narrow(sum.of[v + 1]) << 16;
    u32* to = (u32*)((unsigned short*)p.out + at);
    if constexpr (VALUES == 4)
      __stcs((uint2*)to, make_uint2(pair[0], pair[1]));
    else
      __stcs(to, pair[0]);
  } else {
    float* to = (float*)p.out + at;
    if constexpr (VALUES == 4)
      __stcs((float4*)to, make_float4(sum.of[0], sum.of[1], sum.of[2], sum.of[3]));
    else
      __stcs((float2*)to, make_float2(sum.of[0], sum.of[1]));
  }
}

// Pools the bags `bag` … `last` - 1. Returns the number of keys without a row.
template <u32 FORMAT, int VALUES>
__device__ __forceinline__ u32 pool_bags(const PoolPart& p, u32 bag, u32 last) {
  constexpr int BYTES = value_bits(FORMAT) * VALUES / 8, WORDS = (BYTES + 3) / 4;
  constexpr bool KEEP = VALUES == 4;  // see is_kept in fetch.cu
  const u32 lane = threadIdx.x & 31;
  const i64 begin = p.offsets ? p.offsets[bag] : (i64)bag * p.hotness;
  const i64 end = p.offsets ? p.offsets[last] : (i64)last * p.hotness;
  Sum<VALUES> sum;
  sum.clear(begin < end ? -0.0f : 0.0f);  // -0 + x is x for either sign of zero
  if (begin >= end)
    for (; bag < last; bag++) store_sum<VALUES>(p, bag, sum);
  const u32 size = p.offsets ? (u32)(end - begin) : p.hotness;
  u32 left = size, missing = 0;  // left: keys of the bag to be added
  for (i64 first = begin; first < end; first += 32) {
    const u32 count = end - first < 32 ? (u32)(end - first) : 32;
    Query q = {0, 0, EMPTY, lane < count};
    float weight = 1;
    if (lane < count) {
      q.key = __ldcs(p.keys + first + lane);
      q.home = home_half(mix(q.key), p.buckets);
      if (p.weights) weight = p.weights[first + lane];
    }
    search_homes<32, 0, true, KEEP>(p, q, count);
    search_rest<0, true, KEEP>(p, q);
    const bool found = !(q.word & (EMPTY | TOMBSTONE));
    const u32 row = found ? q.word & row_mask(p.hidden) : NO_ROW;
    missing += __popc(__ballot_sync(WARP, lane < count && !found));
    u32 tail = 0;
    if (is_scaled(FORMAT) && found)
      load_words<4>(&tail, row_at(p, row, p.stride) + value_bytes(FORMAT, 32 * VALUES));
#pragma unroll 1
    for (u32 from = 0; from < count; from += ROWS) {
      u32 raw[ROWS][WORDS];
#pragma unroll
      for (int k = 0; k < ROWS; k++) {
        const u32 number = __shfl_sync(WARP, row, from + k);
        if (number != NO_ROW) load_words<BYTES>(raw[k], row_at(p, number, p.stride) + lane * BYTES);
      }
#pragma unroll
      for (int k = 0; k < ROWS; k++) {
        const Scale by = scale_of(FORMAT, __shfl_sync(WARP, tail, from + k));
        const float factor = __shfl_sync(WARP, weight, from + k);
        if (from + k >= count) break;
        sum.total += factor;
#pragma unroll
        for (int v = 0; v < VALUES; v++) {
          const float value = value_of(FORMAT, raw[k], v, by);
          sum.of[v] = __fadd_rn(sum.of[v], p.weights ? __fmul_rn(value, factor) : value);
        }
        if (--left) continue;
        store_sum<VALUES>(p, bag++, sum);
        sum.clear(-0.0f);
        left = size;
      }
    }
  }
  return missing;
}

template <u32 FORMAT, int VALUES>
__global__ void __launch_bounds__(BLOCK, 5) pool_warp_kernel(const __grid_constant__ PoolArgs a) {
  int index = 0;
  while (index + 1 < (int)a.parts && a.part[index + 1].first_block <= blockIdx.x) index++;
  const PoolPart& p = a.part[index];
  const u32 warp = (blockIdx.x - p.first_block) * (BLOCK / 32) + threadIdx.x / 32;
  const u32 bag = warp * p.each;
  u32 missing = 0;
  if (bag < p.bags) {
    const u32 last = p.bags - bag < p.each ? p.bags : bag + p.each;
    missing = pool_bags<FORMAT, VALUES>(p, bag, last);
  }
  if (missing && (threadIdx.x & 31) == 0) atomicAdd(a.missing, missing);
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    if (atomicAdd(a.done, 1u) == gridDim.x - 1) {
      *a.result = atomicExch(a.missing, 0u);
      *a.done = 0;
    }
  }
}
