// pool_kernel: pool the rows of each bag of keys straight from the cache; all tables in one launch.
// pool_rows_kernel: the same for rows that were fetched; see there.
//
// Per part: keys (n,) i64; offsets (bags + 1,) i64, or null and `hotness` keys a bag; optional
// weights (n,) f32; out (bags, dim). Sums in float32, one by one in the order of the keys, each
// operation rounded: bitwise equal to the host's kernels (except for a NaN's payload). A bag
// whose divisor is 0, and an empty bag, is zero. Keys without a row are counted in `missing`: the
// outs are undefined then.
// Launch: BLOCK threads; a tile of T threads works on a bag, UNIT values each at a time; a part
// begins at a block. Any number of fetches and one writer may run in parallel (README.md).
// Reference: hps/lookup/pooling.py.
#include "pool.cuh"

template <int UNIT>
struct Values {
  float of[UNIT];
};

// Loads UNIT values of a row of `dim`; UNIT is 4 only if all rows have a multiple of 4.
template <u32 FORMAT, int UNIT>
__device__ __forceinline__ Values<UNIT> load_stored(const char* row, u32 at, u32 dim) {
  constexpr int BITS = value_bits(FORMAT) * UNIT;
  Scale by = {1, 0};
  if constexpr (is_scaled(FORMAT)) {
    constexpr int ALIGN = UNIT == 1 ? 1 : FORMAT == INT4 ? 2 : 4;
    by = scale_of(FORMAT, load_tail<ALIGN>(row + value_bytes(FORMAT, dim)));
  }
  u32 raw[(BITS + 31) / 32];
  if constexpr (BITS < 8) {  // half a byte
    load_words<1>(raw, row + at / 2);
    raw[0] = raw[0] >> 4 * (at & 1) & 15;
  } else {
    load_words<BITS / 8>(raw, row + at * (BITS / 8));
  }
  Values<UNIT> values;
#pragma unroll
  for (int k = 0; k < UNIT; k++) values.of[k] = value_of(FORMAT, raw, k, by);
  return values;
}

template <int UNIT>
__device__ __forceinline__ Values<UNIT> load_values(const char* row, u32 at, u32 dim, u32 format) {
  switch (format) {
    case FLOAT32:
      return load_stored<FLOAT32, UNIT>(row, at, dim);
    case FLOAT16:
      return load_stored<FLOAT16, UNIT>(row, at, dim);
    case BFLOAT16:
      return load_stored<BFLOAT16, UNIT>(row, at, dim);
    case FLOAT8:
      return load_stored<FLOAT8, UNIT>(row, at, dim);
    case INT8:
      return load_stored<INT8, UNIT>(row, at, dim);
    default:
      return load_stored<INT4, UNIT>(row, at, dim);
  }
}

template <int UNIT>
__device__ __forceinline__ void store_values(char* row, u32 at, bool half,
                                             const Values<UNIT>& values) {
#pragma unroll
  for (int k = 0; k < UNIT; k++) {
    if (half)
      ((unsigned short*)row)[at * UNIT + k] = narrow(values.of[k]);
    else
      ((float*)row)[at * UNIT + k] = values.of[k];
  }
}

template <int UNIT>
__device__ __forceinline__ Values<UNIT> all(float value) {
  Values<UNIT> values;
#pragma unroll
  for (int v = 0; v < UNIT; v++) values.of[v] = value;
  return values;
}

// Sums the values `at` over the keys begin … end of a bag. Returns the number of keys without a
// row.
template <int T, int UNIT>
__device__ __forceinline__ u32 sum_bag(const PoolPart& p, i64 begin, i64 end, u32 at, bool real,
                                       Values<UNIT>& sum, float& total, const Tile<T>& tile) {
  u32 missing = 0;
  u64 key = p.keys[begin], hash = mix(key);
  u32 home = home_half(hash, p.buckets);
  Slot half = load_half(p.lines, home, tile);
  for (i64 k = begin; k < end; k++) {
    const Found found = look(p.lines, p.buckets, key, hash, home, p.hidden, half, tile);
    if (k + 1 < end) {  // loads the next key's slots in parallel to this key's row
      key = p.keys[k + 1], hash = mix(key);
      home = home_half(hash, p.buckets);
      half = load_half(p.lines, home, tile);
    }
    const u32 word =
        found.lane < 0 ? TOMBSTONE : __shfl_sync(tile.mask, found.slot.word, found.lane);
    if (word & TOMBSTONE) {
      missing++;
      continue;
    }
    const float weight = p.weights ? p.weights[k] : 1.0f;
    total = add_weight(p.combiner, total, weight);
    if (real) {
      const char* from = row_at(p, word & row_mask(p.hidden), p.stride);
      const Values<UNIT> row = load_values<UNIT>(from, at, p.dim, p.format);
#pragma unroll
      for (int v = 0; v < UNIT; v++)
        sum.of[v] = __fadd_rn(sum.of[v], p.weights ? __fmul_rn(row.of[v], weight) : row.of[v]);
    }
    if (p.policy && (threadIdx.x & 31) == found.lane)
      stamp_slot(found.place, found.slot.score, p.now, p.policy);
  }
  return missing;
}

template <int T, int UNIT>
__device__ __forceinline__ u32 pool_bag(const PoolPart& p, u32 bag, const Tile<T>& tile) {
  const i64 begin = p.offsets ? p.offsets[bag] : (i64)bag * p.hotness;
  const i64 end = p.offsets ? p.offsets[bag + 1] : begin + p.hotness;
  const u32 units = p.dim / UNIT;
  char* row = p.out + (size_t)bag * p.dim * (p.half ? 2 : 4);
  u32 missing = 0;
  for (u32 first = 0; first < units; first += T) {
    const u32 at = first + tile.rank;
    Values<UNIT> sum = all<UNIT>(-0.0f);  // -0 + x is x for either sign of zero
    float total = 0;
    if (begin < end) missing = sum_bag<T, UNIT>(p, begin, end, at, at < units, sum, total, tile);
    divide(p.combiner, total, sum.of);
    if (begin >= end) sum = all<UNIT>(0);
    if (at < units) store_values<UNIT>(row, at, p.half, sum);
  }
  return missing;
}

template <int T, int UNIT>
__global__ void __launch_bounds__(BLOCK) pool_kernel(const __grid_constant__ PoolArgs a) {
  const PoolPart& p = part_of_block(a);
  const Tile<T> tile;
  const u32 bag = (blockIdx.x - p.first_block) * (BLOCK / T) + threadIdx.x / T;
  const u32 missing = bag < p.bags ? pool_bag<T, UNIT>(p, bag, tile) : 0;
  report(a, missing, tile.rank == 0);
}

// pool_rows_kernel: pool bags of fetched rows, all features in one launch.
//
// Per part: stored rows, row_bytes each, and source (n,) u8, one per key; fallback (dim,), of out's
// type, replaces rows whose source is 0; offsets, hotness, weights, combiner, out, launch and
// reference as for pool_kernel.
struct BagsPart {
  const char* rows;
  const u8* source;
  const char* fallback;
  const i64* offsets;
  const float* weights;
  char* out;
  u32 dim;
  u32 bags;
  u32 hotness;
  u32 first_block;
  u32 combiner;
  u32 half;    // out and fallback are float16, else float32
  u32 format;  // of the rows
  u32 row_bytes;
};

struct BagsArgs {
  u32 parts;
  u32 unused;
  BagsPart part[PARTS];
};

static_assert(sizeof(BagsPart) == 80, "must equal launch.BAGS_PART");
static_assert(sizeof(BagsArgs) == 8 + PARTS * 80, "must equal launch.BAGS_ARGS");

template <int UNIT>
__device__ __forceinline__ void pool_unit(const BagsPart& p, u32 bag, u32 at) {
  const i64 begin = p.offsets ? p.offsets[bag] : (i64)bag * p.hotness;
  const i64 end = p.offsets ? p.offsets[bag + 1] : begin + p.hotness;
  const size_t out_bytes = (size_t)p.dim * (p.half ? 2 : 4);
  Values<UNIT> sum = all<UNIT>(begin < end ? -0.0f : 0.0f);
  float total = 0;
  for (i64 k = begin; k < end; k++) {
    const float weight = p.weights ? p.weights[k] : 1.0f;
    total = add_weight(p.combiner, total, weight);
    const bool held = p.source[k];
    const char* from = held ? p.rows + k * (size_t)p.row_bytes : p.fallback;
    const u32 format = held ? p.format : p.half ? FLOAT16 : FLOAT32;
    const Values<UNIT> row = load_values<UNIT>(from, at, p.dim, format);
#pragma unroll
    for (int v = 0; v < UNIT; v++)
      sum.of[v] = __fadd_rn(sum.of[v], p.weights ? __fmul_rn(row.of[v], weight) : row.of[v]);
  }
  divide(p.combiner, total, sum.of);
  store_values<UNIT>(p.out + bag * out_bytes, at, p.half, sum);
}

template <int T, int UNIT>
__global__ void __launch_bounds__(BLOCK) pool_rows_kernel(const __grid_constant__ BagsArgs a) {
  int index = 0;
  while (index + 1 < (int)a.parts && a.part[index + 1].first_block <= blockIdx.x) index++;
  const BagsPart& p = a.part[index];
  const Tile<T> tile;
  const u32 bag = (blockIdx.x - p.first_block) * (BLOCK / T) + threadIdx.x / T;
  if (bag >= p.bags) return;
  for (u32 at = tile.rank; at < p.dim / UNIT; at += T) pool_unit<UNIT>(p, bag, at);
}
