// pool_warp_kernel: pool_kernel for tables of one row format and of 32 * VALUES values, a warp per
// `each` bags. decode_warp_kernel: the same for bags of one key without weights.
//
// A warp searches up to 32 keys together and loads some rows, VALUES values a lane, before it adds
// or writes the first one. The scales of all rows are loaded by a lane each. Only with fixed
// hotness `each` may exceed 1. Arguments, results and reference as for pool_kernel.
#include "pool.cuh"
#include "search.cuh"

__device__ __forceinline__ u32 hidden_of(const PoolPart& p) { return p.hidden; }

template <u32 FORMAT, int VALUES>
struct Shape {
  static constexpr int BYTES = value_bits(FORMAT) * VALUES / 8;  // of a lane's values
  static constexpr int WORDS = (BYTES + 3) / 4;
  static constexpr int AT_ONCE = BYTES > 8 ? 4 : 8;  // rows loaded before the first is used
  static constexpr bool KEEP = VALUES == 4;          // see is_kept in fetch.cu
};

// The keys of a warp that were found, one a lane.
struct WarpRows {
  u32 row;     // or NO_ROW
  u32 tail;    // the last four bytes of the row, if its format is scaled
  u32 missed;  // keys of the warp that were not found
};

// Searches `count` keys.
template <u32 FORMAT, int VALUES>
__device__ __forceinline__ WarpRows find_rows(const PoolPart& p, const u64* keys, u32 count) {
  constexpr bool KEEP = Shape<FORMAT, VALUES>::KEEP;
  const u32 lane = threadIdx.x & 31;
  Query q = {0, 0, EMPTY, lane < count};
  if (lane < count) {
    q.key = __ldcs(keys + lane);
    q.home = home_half(mix(q.key), p.buckets);
  }
  search_homes<32, 0, true, KEEP>(p, q, count);
  search_rest<0, true, KEEP>(p, q);
  const bool found = !(q.word & (EMPTY | TOMBSTONE));
  WarpRows rows = {found ? q.word & row_mask(p.hidden) : NO_ROW, 0, 0};
  rows.missed = __popc(__ballot_sync(WARP, lane < count && !found));
  if (is_scaled(FORMAT) && found)
    load_words<4>(&rows.tail, row_at(p, rows.row, p.stride) + value_bytes(FORMAT, 32 * VALUES));
  return rows;
}

// This lane's values of AT_ONCE rows as they are stored, of the warp's keys from `from` on.
template <u32 FORMAT, int VALUES>
struct RawRows {
  using S = Shape<FORMAT, VALUES>;
  u32 of[S::AT_ONCE][S::WORDS];

  __device__ __forceinline__ void load(const PoolPart& p, const WarpRows& rows, u32 from,
                                       u32 count) {
#pragma unroll
    for (int k = 0; k < S::AT_ONCE; k++) {
      const u32 number = __shfl_sync(WARP, rows.row, from + k);
      if (k < count && number != NO_ROW)
        load_words<S::BYTES>(of[k], row_at(p, number, p.stride) + (threadIdx.x & 31) * S::BYTES);
    }
  }
};

// Writes this lane's values of a bag.
template <int VALUES>
__device__ __forceinline__ void store_values(const PoolPart& p, u32 bag, const float* of) {
  const size_t at = ((size_t)bag * 32 + (threadIdx.x & 31)) * VALUES;
  if (p.half) {
    u32 pair[VALUES / 2];
#pragma unroll
    for (int v = 0; v < VALUES; v += 2) pair[v / 2] = narrow(of[v]) | (u32)narrow(of[v + 1]) << 16;
    u32* to = (u32*)((unsigned short*)p.out + at);
    if constexpr (VALUES == 4)
      __stcs((uint2*)to, make_uint2(pair[0], pair[1]));
    else
      __stcs(to, pair[0]);
  } else {
    float* to = (float*)p.out + at;
    if constexpr (VALUES == 4)
      __stcs((float4*)to, make_float4(of[0], of[1], of[2], of[3]));
    else
      __stcs((float2*)to, make_float2(of[0], of[1]));
  }
}

// Pools the bags `bag` … `last` - 1. Returns the number of keys without a row.
template <u32 FORMAT, int VALUES>
__device__ __forceinline__ u32 pool_bags(const PoolPart& p, u32 bag, u32 last) {
  constexpr u32 AT_ONCE = Shape<FORMAT, VALUES>::AT_ONCE;
  const i64 begin = p.offsets ? p.offsets[bag] : (i64)bag * p.hotness;
  const u32 n = (u32)((p.offsets ? p.offsets[last] : (i64)last * p.hotness) - begin);
  float sum[VALUES], total = 0;
#pragma unroll
  for (int v = 0; v < VALUES; v++) sum[v] = n ? -0.0f : 0.0f;  // -0 + x is x
  if (!n)
    for (; bag < last; bag++) store_values<VALUES>(p, bag, sum);
  const u32 size = p.offsets ? n : p.hotness;
  u32 left = size, missing = 0;  // left: keys of the bag to be added
  for (u32 first = 0; first < n; first += 32) {
    const u32 count = min(n - first, 32u);
    const WarpRows rows = find_rows<FORMAT, VALUES>(p, p.keys + begin + first, count);
    missing += rows.missed;
    float weight = 1;
    if (p.weights && (threadIdx.x & 31) < count)
      weight = p.weights[begin + first + (threadIdx.x & 31)];
#pragma unroll 1
    for (u32 from = 0, some; from < count; from += some) {
      some = min(min(AT_ONCE, left), count - from);
      RawRows<FORMAT, VALUES> raw;
      raw.load(p, rows, from, some);
#pragma unroll
      for (int k = 0; k < AT_ONCE; k++) {
        if (k >= some) break;
        const Scale by = scale_of(FORMAT, __shfl_sync(WARP, rows.tail, from + k));
        const float factor = __shfl_sync(WARP, weight, from + k);
        total += factor;
#pragma unroll
        for (int v = 0; v < VALUES; v++) {
          const float value = value_of(FORMAT, raw.of[k], v, by);
          sum[v] = __fadd_rn(sum[v], p.weights ? __fmul_rn(value, factor) : value);
        }
      }
      left -= some;
      if (left) continue;
      if (p.mean) {
#pragma unroll
        for (int v = 0; v < VALUES; v++) sum[v] = total == 0 ? 0 : __fdiv_rn(sum[v], total);
      }
      store_values<VALUES>(p, bag++, sum);
#pragma unroll
      for (int v = 0; v < VALUES; v++) sum[v] = -0.0f;
      left = size, total = 0;
    }
  }
  return missing;
}

// Writes the vectors of the keys `first` … `first` + `count` - 1, at most 32.
template <u32 FORMAT, int VALUES>
__device__ __forceinline__ u32 decode_keys(const PoolPart& p, u32 first, u32 count) {
  constexpr u32 AT_ONCE = Shape<FORMAT, VALUES>::AT_ONCE;
  const WarpRows rows = find_rows<FORMAT, VALUES>(p, p.keys + first, count);
#pragma unroll 1
  for (u32 from = 0; from < count; from += AT_ONCE) {
    RawRows<FORMAT, VALUES> raw;
    raw.load(p, rows, from, count - from);
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      if (from + k >= count) break;
      const Scale by = scale_of(FORMAT, __shfl_sync(WARP, rows.tail, from + k));
      float value[VALUES];
#pragma unroll
      for (int v = 0; v < VALUES; v++) value[v] = value_of(FORMAT, raw.of[k], v, by);
      store_values<VALUES>(p, first + from + k, value);
    }
  }
  return rows.missed;
}

// The number of the warp among those of its part.
__device__ __forceinline__ u32 warp_of(const PoolPart& p) {
  return (blockIdx.x - p.first_block) * (BLOCK / 32) + threadIdx.x / 32;
}

__device__ __forceinline__ const PoolPart& part_of_block(const PoolArgs& a) {
  int index = 0;
  while (index + 1 < (int)a.parts && a.part[index + 1].first_block <= blockIdx.x) index++;
  return a.part[index];
}

// Reports the keys without a row; all threads must call it, with their warp's number.
__device__ __forceinline__ void report(const PoolArgs& a, u32 missing) {
  if (missing && (threadIdx.x & 31) == 0) atomicAdd(a.missing, missing);
  __syncthreads();
  if (threadIdx.x) return;
  __threadfence();
  if (atomicAdd(a.done, 1u) == gridDim.x - 1) {
    *a.result = atomicExch(a.missing, 0u);
    *a.done = 0;
  }
}

template <u32 FORMAT, int VALUES>
__global__ void __launch_bounds__(BLOCK, 4) pool_warp_kernel(const __grid_constant__ PoolArgs a) {
  const PoolPart& p = part_of_block(a);
  const u32 bag = warp_of(p) * p.each;
  u32 missing = 0;
  if (bag < p.bags)
    missing = pool_bags<FORMAT, VALUES>(p, bag, p.bags - bag < p.each ? p.bags : bag + p.each);
  report(a, missing);
}

template <u32 FORMAT, int VALUES>
__global__ void __launch_bounds__(BLOCK, 5) decode_warp_kernel(const __grid_constant__ PoolArgs a) {
  const PoolPart& p = part_of_block(a);
  const u32 first = warp_of(p) * p.each;
  u32 missing = 0;
  if (first < p.bags) missing = decode_keys<FORMAT, VALUES>(p, first, min(p.bags - first, p.each));
  report(a, missing);
}
