// fetch_kernel: search keys, copy and stamp the found rows, list the missing keys; all tables in
// one launch. sweep_kernel: copy the rows that fetch_kernel deferred.
//
// Per part: keys (n,) i64, optional positions (n,) i64 into them, out (·, dim), versions (·,) u64,
// source (·,) u8 (versions and source may be null for VECTORS); misses (total,) u32 are positions
// in the batch (part.base + i) in no order, miss_count (1,) u32. Launch: BLOCK threads; a tile of T
// threads works on a key; a part begins at a block, so that all keys of a block are of one part.
// Any number of fetches and one writer may run in parallel (README.md). Twin: twin.py
// TwinTable.fetch.
#include "hash_table.cuh"

struct FetchPart {
  char* lines;
  const char* rows;
  const char* host_rows;
  const u64* row_versions;
  const u64* keys;
  const i64* positions;  // null: 0 … n - 1
  char* out;
  u64* versions;
  u8* source;
  u64 oldest_tombstone;
  u32 buckets;
  u32 stride;     // bytes from row to row in the table
  u32 row_bytes;  // … and in out
  u32 on_device;  // rows in device memory
  u32 n;
  u32 base;
  u32 first_block;
  u32 now;
  u32 policy;  // 0: hits are not stamped
  u32 code;
};

constexpr int PARTS = 32;

struct FetchArgs {
  u32* misses;
  u32* miss_count;
  u32* done;       // with result: (1,), the number of blocks that have ended
  u32* result;     // in host memory, or null: receives miss_count, which is reset to zero
  u32* later;      // SWEEP: (total,) rows deferred to sweep_kernel, else NO_ROW
  u64* miss_keys;  // or null: VECTORS writes the missing keys, in the order of misses
  u32 parts;
  unsigned short window;        // sweep_kernel: the window of pinned host memory to read
  unsigned short window_shift;  // a window's bytes: 1 << this
  FetchPart part[PARTS];
};

static_assert(sizeof(FetchPart) == 120, "must equal launch.FETCH_PART");
static_assert(sizeof(FetchArgs) == 56 + PARTS * 120, "must equal launch.FETCH_ARGS");

constexpr int ROWS = 0;     // rows only
constexpr int TIER = 1;     // rows, versions, sources; tombstones end the search
constexpr int NUMBERS = 2;  // row numbers (u32, NO_ROW for a miss) instead of rows
constexpr int VECTORS = 3;  // rows and, if asked for, sources; a tombstone is a miss

// Forms that take several parts, positions in them, and report the number of misses to the host.
__device__ constexpr bool is_batched(int form) { return form == TIER || form == VECTORS; }

template <typename unit>
__device__ __forceinline__ void store(unit* to, unit value) {
  *to = value;
}
template <>
__device__ __forceinline__ void store(uint4* to, uint4 value) {
  __stcs(to, value);  // not read again soon: keeps the second-level cache for lines and rows
}

template <typename unit>
__device__ __forceinline__ unit load(const unit* from) {
  return __ldg(from);
}
template <>
__device__ __forceinline__ uint4 load(const uint4* from) {
  uint4 value;
  asm volatile("ld.global.nc.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from), "l"(keep_policy()));
  return value;
}

// MOVES > 0: every thread of the tile moves so many units, all loads before the first store.
template <int T, int UNIT, int MOVES>
__device__ __forceinline__ void copy_row(const FetchPart& p, u32 row, size_t i,
                                         const Tile<T>& tile) {
  typedef typename Unit<UNIT>::type unit;
  const u32 bytes = MOVES ? MOVES * T * UNIT : p.row_bytes;
  const unit* from = (const unit*)row_at(p, row, MOVES ? bytes : p.stride) + tile.rank;
  unit* to = (unit*)(p.out + i * bytes) + tile.rank;
  if (MOVES) {
    unit value[MOVES ? MOVES : 1];
#pragma unroll
    for (int m = 0; m < MOVES; m++) value[m] = load(from + m * T);
#pragma unroll
    for (int m = 0; m < MOVES; m++) store(to + m * T, value[m]);
  } else {
#pragma unroll 1
    for (int c = tile.rank; c < (int)bytes / UNIT; c += T, from += T, to += T)
      store(to, load(from));
  }
}

// Appends the positions (and keys) of missing keys, with one atomic addition per warp that has any.
// All threads of the warp must call it. (One addition per block makes every warp wait for the
// block's slowest key: 2 to 3 % slower with rows up to 128 bytes, no faster with longer ones.)
template <int FORM>
__device__ __forceinline__ void list_miss(const FetchArgs& a, const FetchPart& p, bool miss,
                                          u32 i) {
  const u32 missing = __ballot_sync(0xffffffffu, miss);
  if (!missing) return;
  const int lane = threadIdx.x & 31, first = __ffs(missing) - 1;
  u32 start = 0;
  if (lane == first) start = atomicAdd(a.miss_count, (u32)__popc(missing));
  start = __shfl_sync(0xffffffffu, start, first);
  if (!miss) return;
  const u32 place = start + __popc(missing & ((1u << lane) - 1));
  a.misses[place] = p.base + i;
  if (FORM == VECTORS && a.miss_keys)
    a.miss_keys[place] = p.keys[p.positions ? (size_t)p.positions[i] : i];
}

#ifdef HPS_SLOW_READS
// For the race test: delays some keys between the reads of slot and row.
__device__ bool is_slow(u64 hash) { return ((hash >> 20) & 63) == 0; }
#endif

// The window that holds a row; rows in device memory count as in the first. Batches that read much
// of a large pinned memory are read window by window, because a device reads only a limited range
// of it at full speed (README.md).
__device__ __forceinline__ u32 window_of(const FetchArgs& a, const FetchPart& p, u32 row) {
  return row < p.on_device ? 0 : (u32)(((u64)(row - p.on_device) * p.stride) >> a.window_shift);
}

// Writes the result for key i from the found slot's word. Returns whether the key is resolved.
template <int T, int UNIT, int MOVES, int FORM, bool SWEEP>
__device__ __forceinline__ bool answer(const FetchArgs& a, const FetchPart& p, u32 word, size_t i,
                                       u32& later, const Tile<T>& tile) {
  const u32 row = word & ROW_MASK;
  if (FORM == NUMBERS) {
    if (word & TOMBSTONE) return false;
    if (tile.rank == 0) ((u32*)p.out)[i] = row;
    return true;
  }
  if (FORM == TIER) {
    // Bypasses the first-level cache, which may hold this sector as it was before the version was
    // written.
    const u64 version = __ldcg(p.row_versions + row);
    if (word & TOMBSTONE && version < p.oldest_tombstone) return false;
    if (tile.rank == 0) {
      p.versions[i] = version;
      if (!(word & TOMBSTONE)) p.source[i] = (u8)p.code;
    }
  }
  if (word & TOMBSTONE) return FORM == TIER;
  if (FORM == VECTORS && p.source && tile.rank == 0) p.source[i] = (u8)p.code;
  if (SWEEP && window_of(a, p, row))
    later = row;
  else
    copy_row<T, UNIT, MOVES>(p, row, i, tile);
  return true;
}

// Fetches key i of the part; i must be the same for all threads of the tile.
template <int T, int UNIT, int MOVES, int FORM, bool STAMP, bool SWEEP>
__device__ __forceinline__ bool fetch_one(const FetchArgs& a, const FetchPart& p, u32 i,
                                          const Tile<T>& tile) {
  const u64 policy = keep_policy();
  const size_t at = is_batched(FORM) && p.positions ? (size_t)p.positions[i] : i;
  const u64 key = p.keys[at], hash = mix(key);
  const u32 home = home_half(hash, p.buckets);
  const Half<T> half = load_half<T, true>(p.lines, home, tile, policy);
  constexpr bool WIDE = T > HALF || MOVES * T * UNIT >= 256;
  const Found found = look<T, true, WIDE>(p.lines, p.buckets, key, hash, home, half, tile, policy);
  bool hit = false;
  u32 later = NO_ROW;
  if (found.lane >= 0) {
#ifdef HPS_SLOW_READS
    if (is_slow(hash)) __nanosleep(HPS_SLOW_READS);
#endif
    const u32 word = __shfl_sync(tile.mask, found.slot.word, found.lane);
    hit = answer<T, UNIT, MOVES, FORM, SWEEP>(a, p, word, at, later, tile);
    if (STAMP && hit && (threadIdx.x & 31) == found.lane)
      stamp_slot(found.place, found.slot.score, p.now, p.policy);
  }
  if (SWEEP && tile.rank == 0) a.later[p.base + i] = later;
  if (FORM == NUMBERS && !hit && tile.rank == 0) ((u32*)p.out)[at] = NO_ROW;
  return hit;
}

__device__ __forceinline__ const FetchPart& part_of_block(const FetchArgs& a) {
  int index = 0;
  while (index + 1 < (int)a.parts && a.part[index + 1].first_block <= blockIdx.x) index++;
  return a.part[index];
}

// 32 registers allow full occupancy of the multiprocessor; versions and sources need more.
template <int T, int UNIT, int MOVES, int FORM, bool STAMP, bool SWEEP>
__global__ void __launch_bounds__(BLOCK, FORM == TIER ? 6 : 8)
    fetch_kernel(const __grid_constant__ FetchArgs a) {
  const FetchPart& p = is_batched(FORM) ? part_of_block(a) : a.part[0];
  const Tile<T> tile;
  const u32 i = (blockIdx.x - p.first_block) * (BLOCK / T) + threadIdx.x / T;
  bool miss = false;
  if (i < p.n)
    miss = !fetch_one<T, UNIT, MOVES, FORM, STAMP, SWEEP>(a, p, i, tile) && tile.rank == 0;
  if (FORM != NUMBERS) list_miss<FORM>(a, p, miss, i);
  if (is_batched(FORM) && a.result) {
    __syncthreads();
    if (threadIdx.x) return;
    __threadfence();
    if (atomicAdd(a.done, 1u) == gridDim.x - 1) {
      *a.result = atomicExch(a.miss_count, 0u);
      *a.done = 0;
    }
  }
}

// Copies the deferred rows of one window. They do not change meanwhile, because the fetch ends with
// its last launch. Launched like fetch_kernel.
template <int T, int UNIT, int MOVES>
__global__ void __launch_bounds__(BLOCK) sweep_kernel(const __grid_constant__ FetchArgs a) {
  const FetchPart& p = part_of_block(a);
  const Tile<T> tile;
  const u32 i = (blockIdx.x - p.first_block) * (BLOCK / T) + threadIdx.x / T;
  if (i >= p.n) return;
  const u32 row = a.later[p.base + i];
  if (row == NO_ROW || window_of(a, p, row) != a.window) return;
#ifdef HPS_SLOW_READS
  if (is_slow(mix(row))) __nanosleep(HPS_SLOW_READS);
#endif
  copy_row<T, UNIT, MOVES>(p, row, p.positions ? (size_t)p.positions[i] : i, tile);
}
