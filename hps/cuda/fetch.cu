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
  u32 parts;
  u32 unused;
  FetchPart part[PARTS];
};

static_assert(sizeof(FetchPart) == 104, "as launch.py has it");
static_assert(sizeof(FetchArgs) == 24 + PARTS * 104, "as launch.py has it");

constexpr int ROWS = 0;     // rows only
constexpr int TIER = 1;     // rows, versions, sources; tombstones end the search
constexpr int NUMBERS = 2;  // row numbers (u32, NO_ROW for a miss) instead of rows

__device__ __forceinline__ void copy_row(uint4* to, const uint4* from) { __stcs(to, __ldg(from)); }
__device__ __forceinline__ void copy_row(u32* to, const u32* from) { *to = __ldg(from); }
__device__ __forceinline__ void copy_row(unsigned short* to, const unsigned short* from) {
  *to = __ldg(from);
}

// Appends the positions of missing keys, one atomic addition a warp. All 32 lanes must call it.
__device__ __forceinline__ void list_miss(const FetchArgs& a, bool miss, u32 position) {
  const u32 votes = __ballot_sync(0xffffffffu, miss);
  if (!votes) return;
  const int lane = threadIdx.x & 31, leader = __ffs(votes) - 1;
  u32 start = 0;
  if (lane == leader) start = atomicAdd(a.miss_count, (u32)__popc(votes));
  start = __shfl_sync(0xffffffffu, start, leader);
  if (miss) a.misses[start + __popc(votes & ((1u << lane) - 1))] = position;
}

template <int T, bool KEEP>
__device__ __forceinline__ void load_line(Line<T>& line, const char* at, const Tile<T>& tile,
                                          u64 policy) {
  if (KEEP)
    line.load_kept(at, tile, policy);
  else
    line.load(at, tile);
}

// Writes what the word found says about key i. Returns whether the key is answered.
template <int T, int UNIT, int FORM>
__device__ __forceinline__ bool answer(const FetchPart& p, u32 word, size_t i,
                                       const Tile<T>& tile) {
  typedef typename Unit<UNIT>::type unit;
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
  const unit* from = (const unit*)(p.rows + row * p.stride);
  unit* to = (unit*)(p.out + i * p.row_bytes);
  const int units = p.row_bytes / UNIT;
  for (int c = tile.rank; c < units; c += T) copy_row(to + c, from + c);
  return true;
}

template <int T, int U, int UNIT, int FORM, bool STAMP, bool KEEP>
__global__ void __launch_bounds__(BLOCK) fetch_kernel(const __grid_constant__ FetchArgs a) {
  int index = 0;
  if (FORM == TIER)
    while (index + 1 < (int)a.parts && a.part[index + 1].first_block <= blockIdx.x) index++;
  const FetchPart& p = a.part[index];
  const Tile<T> tile;
  const u32 start = ((blockIdx.x - p.first_block) * (BLOCK / T) + threadIdx.x / T) * U;
  u64 policy = 0;
  if (KEEP) asm("createpolicy.fractional.L2::evict_last.b64 %0,1.0;" : "=l"(policy));

  u64 key[U], hash[U];
  size_t at[U];
  u32 bucket[U];
  Line<T> line[U];
#pragma unroll
  for (int u = 0; u < U; u++) {
    const u32 i = min(start + u, p.n - 1);
    at[u] = FORM == TIER && p.positions ? (size_t)p.positions[i] : i;
    key[u] = p.keys[at[u]];
    hash[u] = mix(key[u]);
    bucket[u] = first_bucket(hash[u], p.buckets);
  }
#pragma unroll
  for (int u = 0; u < U; u++)
    load_line<T, KEEP>(line[u], line_at(p.lines, bucket[u]), tile, policy);
#pragma unroll
  for (int u = 0; u < U; u++) {
    const bool asked = start + u < p.n;
    bool found = false;
    if (asked) {
      int slot = line[u].find(key[u], tile);
      u32 word = slot < 0 ? EMPTY : line[u].word(slot, tile);
      if (word & EMPTY) {
        bucket[u] = second_bucket(hash[u], p.buckets, bucket[u]);
        load_line<T, KEEP>(line[u], line_at(p.lines, bucket[u]), tile, policy);
        slot = line[u].find(key[u], tile);
        if (slot >= 0) word = line[u].word(slot, tile);
      }
      if (!(word & EMPTY)) {
        found = answer<T, UNIT, FORM>(p, word, at[u], tile);
        if (STAMP && found && tile.rank == T - 1) {
          const u64 stamps = line[u].stamps();
          const int shift = slot * STAMP_BITS;
          if (((stamps >> shift) & (AGES - 1)) != p.now)
            *(volatile u64*)(line_at(p.lines, bucket[u]) + STAMPS_AT) =
                (stamps & ~((u64)(AGES - 1) << shift)) | ((u64)p.now << shift);
        }
      }
      if (FORM == NUMBERS && !found && tile.rank == 0) ((u32*)p.out)[at[u]] = NO_ROW;
    }
    if (FORM != NUMBERS) list_miss(a, asked && !found && tile.rank == 0, p.base + start + u);
  }
}
