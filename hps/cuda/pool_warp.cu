// pool_warp_kernel: pool_kernel for tables of one row format and of dim DIM. decode_warp_kernel:
// the same for bags of one key without weights.
//
// Each of LANES = DIM / VALUES lanes has VALUES values of a row, so that a warp works on 32 / LANES
// bags together. It searches up to 32 keys together and copies their rows to shared memory. Launch:
// pool_warp_kernel, LANES threads a bag; decode_warp_kernel, a warp per KEYS bags. Arguments,
// results and reference as for pool_kernel. All numbers here are as measured to be fastest
// (README.md).
#include "pool.cuh"
#include "staged_rows.cuh"

constexpr int POOL_BLOCKS = 5, DECODE_BLOCKS = 6;  // on a multiprocessor: so many registers
constexpr int STAGED = 4096;                       // bytes of values that a warp copies together
constexpr int KEYS = 8;                            // bags of a warp of decode_warp_kernel
constexpr int DECODED = 4;  // values a lane: so the lanes of a row write side by side

__device__ __forceinline__ u32 hidden_of(const PoolPart& p) { return p.hidden; }

// The largest power of two up to both limits.
__device__ __forceinline__ constexpr int power_up_to(int fitting, int most) {
  int power = 1;
  while (2 * power <= fitting && 2 * power <= most) power *= 2;
  return power;
}

// How a warp works on rows: VALUES values of one a lane.
template <u32 FORMAT, int DIM, int VALUES>
struct Shape {
  static constexpr int LANES = DIM / VALUES;
  static constexpr int ROWS = 32 / LANES;                        // that a warp works on together
  static constexpr int BYTES = value_bits(FORMAT) * VALUES / 8;  // of a lane's values
  static constexpr int WORDS = (BYTES + 3) / 4;
  static constexpr int ROW_BYTES = row_bytes(FORMAT, DIM);
  static constexpr int AT_ONCE = power_up_to(STAGED / (ROWS * value_bytes(FORMAT, DIM)), LANES);
  using Staged = StagedRows<ROW_BYTES, LANES, AT_ONCE>;
};

// The keys of a warp that were found, one a lane.
struct WarpRows {
  u32 row;     // or NO_ROW
  u32 missed;  // keys of the warp that were not found
};

// Searches the keys at `key` of the lanes that are `real`, of the first SEARCHED.
template <int SEARCHED, bool KEEP>
__device__ __forceinline__ WarpRows find_rows(const PoolPart& p, const u64* key, bool real) {
  Query q = {0, 0, EMPTY, real};
  if (real) {
    q.key = __ldcs(key);
    q.home = home_half(mix(q.key), p.buckets);
  }
  search_homes<SEARCHED, 0, true, KEEP>(p, q, __ballot_sync(WARP, real));
  search_rest<0, true, KEEP>(p, q);
  const bool found = !(q.word & (EMPTY | TOMBSTONE));
  const u32 missed = __popc(__ballot_sync(WARP, real && !found));
  return {found ? q.word & row_mask(p.hidden) : NO_ROW, missed};
}

// This lane's values of a staged row.
template <u32 FORMAT, int DIM, int VALUES>
struct Stored {
  using S = Shape<FORMAT, DIM, VALUES>;
  u32 of[S::WORDS];
  Scale by;

  __device__ __forceinline__ explicit Stored(const uint4* staged) {
    const char *row = (const char*)staged, *from = row + (threadIdx.x & (S::LANES - 1)) * S::BYTES;
    if constexpr (S::BYTES % 16 == 0) {
#pragma unroll
      for (int k = 0; k < S::WORDS; k += 4) {
        const uint4 some = *(const uint4*)(from + 4 * k);
        of[k] = some.x, of[k + 1] = some.y, of[k + 2] = some.z, of[k + 3] = some.w;
      }
    } else if constexpr (S::BYTES == 8) {
      const uint2 some = *(const uint2*)from;
      of[0] = some.x, of[1] = some.y;
    } else if constexpr (S::BYTES == 4) {
      of[0] = *(const u32*)from;
    } else {
      of[0] = *(const unsigned short*)from;
    }
    if (is_scaled(FORMAT)) by = scale_of(FORMAT, *(const u32*)(row + value_bytes(FORMAT, DIM)));
  }

  __device__ __forceinline__ float value(int k) const { return value_of(FORMAT, of, k, by); }
};

// Writes this lane's values of a bag.
template <int DIM, int VALUES>
__device__ __forceinline__ void store_values(const PoolPart& p, u32 bag, const float* of) {
  const size_t at = (size_t)bag * DIM + (threadIdx.x & (DIM / VALUES - 1)) * VALUES;
#pragma unroll
  for (int v = 0; v < VALUES; v += 4) {
    if (p.half) {
      const u32 one = narrow(of[v]) | (u32)narrow(of[v + 1]) << 16;
      const u32 two = narrow(of[v + 2]) | (u32)narrow(of[v + 3]) << 16;
      __stcs((uint2*)((unsigned short*)p.out + at + v), make_uint2(one, two));
    } else {
      __stcs((float4*)((float*)p.out + at + v),
             make_float4(of[v], of[v + 1], of[v + 2], of[v + 3]));
    }
  }
}

template <u32 FORMAT, int DIM>
using DecodedRows = StagedRows<row_bytes(FORMAT, DIM), 32, KEYS>;

// The sum of a bag as far as it is known; each of the bag's lanes has some of the values.
template <int VALUES>
struct Sum {
  float of[VALUES], total;  // total: see divide
};

// Rows that a warp copies: `count` of each bag, of the keys from `from` on; `some` keys are of this
// lane's bag, with a weight a lane.
struct Batch {
  int from, count, some;
  float weight;
};

template <bool WEIGHTED, u32 FORMAT, int DIM, int VALUES>
__device__ __forceinline__ void add_rows(const typename Shape<FORMAT, DIM, VALUES>::Staged& staged,
                                         const Batch& batch, u32 combiner, Sum<VALUES>& sum) {
  using S = Shape<FORMAT, DIM, VALUES>;
  const int own = (threadIdx.x & 31) / S::LANES;
  wait_for_copies();
#pragma unroll 4
  for (int k = 0; k < batch.count; k++) {
    const float factor = WEIGHTED ? __shfl_sync(WARP, batch.weight, batch.from + k, S::LANES) : 1;
    const Stored<FORMAT, DIM, VALUES> stored(staged.of[k * S::ROWS + own]);
    if (batch.from + k >= batch.some) continue;
    if (WEIGHTED) sum.total = add_weight(combiner, sum.total, factor);
#pragma unroll
    for (int v = 0; v < VALUES; v++) {
      const float value = stored.value(v);
      sum.of[v] = __fadd_rn(sum.of[v], WEIGHTED ? __fmul_rn(value, factor) : value);
    }
  }
  __syncwarp();
}

// Pools the bags of a warp, `bag` being that of this lane; there may be none. Returns the number of
// the warp's keys without a row. While rows are copied, the next keys are searched.
template <bool WEIGHTED, u32 FORMAT, int DIM, int VALUES>
__device__ __forceinline__ u32 pool_bags(const PoolPart& p, u32 bag,
                                         typename Shape<FORMAT, DIM, VALUES>::Staged& staged) {
  using S = Shape<FORMAT, DIM, VALUES>;
  const u32 rank = threadIdx.x & (S::LANES - 1);
  i64 begin = 0;
  u32 n = 0, most = p.hotness, missing = 0;
  if (p.offsets) {
    if (bag < p.bags) begin = p.offsets[bag], n = (u32)(p.offsets[bag + 1] - begin);
    most = __reduce_max_sync(WARP, n);
  } else if (bag < p.bags) {
    begin = (i64)bag * most, n = most;
  }
  Sum<VALUES> sum;
  sum.total = WEIGHTED ? 0 : (float)n;
#pragma unroll
  for (int v = 0; v < VALUES; v++) sum.of[v] = n ? -0.0f : 0.0f;  // -0 + x is x
  Batch batch = {0, 0, 0, 0};
  for (u32 done = 0;; done += S::LANES) {
    const int some = n > done ? min(n - done, S::LANES) : 0;
    WarpRows rows = {NO_ROW, 0};
    if (done < most) rows = find_rows<32, false>(p, p.keys + begin + done + rank, (int)rank < some);
    missing += rows.missed;
    if (done) add_rows<WEIGHTED, FORMAT, DIM>(staged, batch, p.combiner, sum);
    if (done >= most) break;
    batch.some = some;
    if (WEIGHTED && (int)rank < some) batch.weight = p.weights ? p.weights[begin + done + rank] : 1;
    const int end = min(most - done, S::LANES);
#pragma unroll 1
    for (batch.from = 0;; batch.from += S::AT_ONCE) {
      batch.count = min(end - batch.from, S::AT_ONCE);
      staged.template load<false, 2>(p, rows.row, batch.from, batch.count);
      if (S::AT_ONCE == S::LANES || batch.from + S::AT_ONCE >= end) break;
      add_rows<WEIGHTED, FORMAT, DIM>(staged, batch, p.combiner, sum);
    }
  }
  if (bag >= p.bags) return missing;
  if (n) divide(p.combiner, sum.total, sum.of);
  store_values<DIM, VALUES>(p, bag, sum.of);
  return missing;
}

// Writes the vectors of the keys from `first` on, at most KEYS.
template <u32 FORMAT, int DIM>
__device__ __forceinline__ u32 decode_keys(const PoolPart& p, u32 first,
                                           DecodedRows<FORMAT, DIM>& staged) {
  using S = Shape<FORMAT, DIM, DECODED>;
  const u32 lane = threadIdx.x & 31, i = first + lane;
  const WarpRows rows = find_rows<KEYS, true>(p, p.keys + i, lane < KEYS && i < p.bags);
  staged.template load<true, 32>(p, rows.row, 0, KEYS);
  wait_for_copies();
#pragma unroll
  for (u32 k = 0; k < KEYS; k += S::ROWS) {
    const u32 own = k + lane / S::LANES;
    const Stored<FORMAT, DIM, DECODED> stored(staged.of[own]);
    float value[DECODED];
#pragma unroll
    for (int v = 0; v < DECODED; v++) value[v] = stored.value(v);
    if (first + own < p.bags) store_values<DIM, DECODED>(p, first + own, value);
  }
  return rows.missed;
}

template <u32 FORMAT, int DIM, int VALUES, bool WEIGHTED>
__global__ void __launch_bounds__(BLOCK, POOL_BLOCKS)
    pool_warp_kernel(const __grid_constant__ PoolArgs a) {
  using S = Shape<FORMAT, DIM, VALUES>;
  __shared__ typename S::Staged staged[BLOCK / 32];
  const PoolPart& p = part_of_block(a);
  const u32 bag = ((blockIdx.x - p.first_block) * BLOCK + threadIdx.x) / S::LANES;
  const u32 missing = pool_bags<WEIGHTED, FORMAT, DIM, VALUES>(p, bag, staged[threadIdx.x / 32]);
  report(a, missing, threadIdx.x % 32 == 0);
}

template <u32 FORMAT, int DIM>
__global__ void __launch_bounds__(BLOCK, DECODE_BLOCKS)
    decode_warp_kernel(const __grid_constant__ PoolArgs a) {
  __shared__ DecodedRows<FORMAT, DIM> staged[BLOCK / 32];
  const PoolPart& p = part_of_block(a);
  const u32 warp = (blockIdx.x - p.first_block) * (BLOCK / 32) + threadIdx.x / 32;
  const u32 missing = decode_keys<FORMAT, DIM>(p, warp * KEYS, staged[threadIdx.x / 32]);
  report(a, missing, threadIdx.x % 32 == 0);
}
