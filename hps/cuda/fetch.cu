// fetch_kernel: probe, copy the rows found, stamp them, list the keys that are missing; all tables
// at once.
//
// Per part: keys (n,) i64, optional positions (n,) i64 into them, out (·, dim), versions (·,) u64,
// source (·,) u8; misses (total,) u32 are positions in the batch (part.base + i) in no order,
// miss_count (1,) u32. Launch: BLOCK threads; a tile of T threads works on U keys; a part begins
// with a whole block, so that a block needs to look up its part once. Runs beside any number of
// fetches and one writer (README.md). Twin: twin.py TwinTable.fetch.
#include "hash_table.cuh"

struct FetchPart {
  char* lines;
  const char* rows;
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
  u32 n;
  u32 base;
  u32 first_block;
  u32 now;
  u32 code;
};

constexpr int PARTS = 32;

struct FetchArgs {
  u32* misses;
  u32* miss_count;
  u32* done;    // with result: (1,), blocks that have ended
  u32* result;  // in host memory, or null: gets miss_count, which is zero again afterwards
  u32 parts;
  u32 unused;
  FetchPart part[PARTS];
};

static_assert(sizeof(FetchPart) == 104, "as launch.py has it");
static_assert(sizeof(FetchArgs) == 40 + PARTS * 104, "as launch.py has it");

constexpr int ROWS = 0;     // rows only
constexpr int TIER = 1;     // rows, versions, sources; tombstones end the search
constexpr int NUMBERS = 2;  // row numbers (u32, NO_ROW for a miss) instead of rows

template <typename unit>
__device__ __forceinline__ void store(unit* to, unit value) {
  *to = value;
}
template <>
__device__ __forceinline__ void store(uint4* to, uint4 value) {
  __stcs(to, value);  // not read again soon: leave the second-level cache to lines and rows
}

// MOVES > 0: every thread of the tile makes that many moves, all loads before the first store.
template <int T, int UNIT, int MOVES>
__device__ __forceinline__ void copy_row(const FetchPart& p, size_t row, size_t i,
                                         const Tile<T>& tile) {
  typedef typename Unit<UNIT>::type unit;
  const u32 bytes = MOVES ? MOVES * T * UNIT : p.row_bytes;
  const unit* from = (const unit*)(p.rows + row * (MOVES ? bytes : p.stride)) + tile.rank;
  unit* to = (unit*)(p.out + i * bytes) + tile.rank;
  if (MOVES) {
    unit value[MOVES ? MOVES : 1];
#pragma unroll
    for (int m = 0; m < MOVES; m++) value[m] = __ldg(from + m * T);
#pragma unroll
    for (int m = 0; m < MOVES; m++) store(to + m * T, value[m]);
  } else {
#pragma unroll 1
    for (int c = tile.rank; c < (int)bytes / UNIT; c += T, from += T, to += T)
      store(to, __ldg(from));
  }
}

// Appends the positions of missing keys: one atomic addition a block, if any misses. All threads
// call it.
__device__ __forceinline__ void list_miss(const FetchArgs& a, bool miss, u32 position) {
  __shared__ u32 counted, start;
  if (!__syncthreads_or(miss)) return;
  if (threadIdx.x == 0) counted = 0;
  __syncthreads();
  u32 at = 0;
  if (miss) at = atomicAdd(&counted, 1u);
  __syncthreads();
  if (threadIdx.x == 0) start = atomicAdd(a.miss_count, counted);
  __syncthreads();
  if (miss) a.misses[start + at] = position;
}

// Brings one stamp up to date. An exclusive or of the difference leaves the line's other stamps
// alone, whoever sets them meanwhile; two readers that stamp the same slot at once may undo each
// other until the next hit.
__device__ __forceinline__ void stamp_slot(char* line, u64 stamps, int slot, u32 now) {
  const int shift = slot * STAMP_BITS;
  const u64 change = ((stamps >> shift) ^ now) & (AGES - 1);
  if (change)
    asm volatile("red.relaxed.gpu.global.xor.b64 [%0], %1;" ::"l"(line + STAMPS_AT),
                 "l"(change << shift)
                 : "memory");
}

#ifdef HPS_SLOW_READS
// For the race test: for some keys the line is read in two steps, keys and words far apart in time,
// in either order, and the row later still.
__device__ bool is_slow(u64 hash) { return ((hash >> 20) & 63) == 0; }

template <int T>
__device__ void dawdle(Line<T>& line, const char* at, u64 hash, u64 policy, const Tile<T>& tile) {
  if (!is_slow(hash)) return;
  Line<T> early, late;
  early.load_kept(at, tile, policy);
  __nanosleep(HPS_SLOW_READS);
  late.load_kept(at, tile, policy);
  const bool keys_first = (hash >> 26) & 1;
#pragma unroll
  for (int p = 0; p < Line<T>::PIECES; p++)
    line.piece[p] = (tile.rank + p * T < 5) == keys_first ? early.piece[p] : late.piece[p];
}
#endif

template <int T, bool KEEP>
__device__ __forceinline__ void load_line(Line<T>& line, const char* at, const Tile<T>& tile,
                                          u64 policy) {
  if (KEEP)
    line.load_kept(at, tile, policy);
  else
    line.load(at, tile);
}

// Writes what the word found says about key i. Returns whether the key is answered.
template <int T, int UNIT, int MOVES, int FORM>
__device__ __forceinline__ bool answer(const FetchPart& p, u32 word, size_t i,
                                       const Tile<T>& tile) {
  const size_t row = word & ROW_MASK;
  if (FORM == NUMBERS) {
    if (word & CLAIMED) return false;
    if (tile.rank == 0) ((u32*)p.out)[i] = word;
    return true;
  }
  if (FORM == TIER) {
    const u64 version = p.row_versions[row];
    if (word & TOMBSTONE && version < p.oldest_tombstone) return false;
    if (tile.rank == 0) {
      p.versions[i] = version;
      if (!(word & TOMBSTONE)) p.source[i] = (u8)p.code;
    }
  }
  if (word & TOMBSTONE) return FORM == TIER;
  copy_row<T, UNIT, MOVES>(p, row, i, tile);
  return true;
}

// Looks for key i of the part; the same for all threads of the tile.
template <int T, int UNIT, int MOVES, int FORM, bool STAMP, bool KEEP>
__device__ __forceinline__ bool fetch_one(const FetchPart& p, u32 i, const Tile<T>& tile) {
  u64 policy = 0;
  if (KEEP) asm("createpolicy.fractional.L2::evict_last.b64 %0,1.0;" : "=l"(policy));
  const size_t at = FORM == TIER && p.positions ? (size_t)p.positions[i] : i;
  const u64 key = p.keys[at], hash = mix(key);
  u32 bucket = first_bucket(hash, p.buckets);
  Line<T> line;
  load_line<T, KEEP>(line, line_at(p.lines, bucket), tile, policy);
#ifdef HPS_SLOW_READS
  asm("createpolicy.fractional.L2::evict_last.b64 %0,1.0;" : "=l"(policy));
  dawdle<T>(line, line_at(p.lines, bucket), hash, policy, tile);
#endif
  int slot = line.find(key, tile);
  u32 word = slot < 0 ? EMPTY : line.word(slot, tile);
  if (word & EMPTY) {
    bucket = second_bucket(hash, p.buckets, bucket);
    load_line<T, KEEP>(line, line_at(p.lines, bucket), tile, policy);
    slot = line.find(key, tile);
    if (slot >= 0) word = line.word(slot, tile);
  }
#ifdef HPS_SLOW_READS
  if (is_slow(hash)) __nanosleep(HPS_SLOW_READS);
#endif
  const bool found = !(word & EMPTY) && answer<T, UNIT, MOVES, FORM>(p, word, at, tile);
  if (STAMP && found && tile.rank == T - 1)
    stamp_slot(line_at(p.lines, bucket), line.stamps(), slot, p.now);
  if (FORM == NUMBERS && !found && tile.rank == 0) ((u32*)p.out)[at] = NO_ROW;
  return found;
}

// Registers: 32 fill the multiprocessor with threads; more are worth it where loads of a row are
// batched.
template <int T, int UNIT, int MOVES, int FORM, bool STAMP, bool KEEP>
__global__ void __launch_bounds__(BLOCK, FORM == TIER || MOVES > 1 ? 6 : 8)
    fetch_kernel(const __grid_constant__ FetchArgs a) {
  int index = 0;
  if (FORM == TIER)
    while (index + 1 < (int)a.parts && a.part[index + 1].first_block <= blockIdx.x) index++;
  const FetchPart& p = a.part[index];
  const Tile<T> tile;
  const u32 i = (blockIdx.x - p.first_block) * (BLOCK / T) + threadIdx.x / T;
  bool miss = false;
  if (i < p.n) miss = !fetch_one<T, UNIT, MOVES, FORM, STAMP, KEEP>(p, i, tile) && tile.rank == 0;
  if (FORM != NUMBERS) list_miss(a, miss, p.base + i);
  if (FORM == TIER && a.result && threadIdx.x == 0) {
    __threadfence();
    if (atomicAdd(a.done, 1u) == gridDim.x - 1) {
      *a.result = atomicExch(a.miss_count, 0u);
      *a.done = 0;
    }
  }
}
