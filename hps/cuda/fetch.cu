// fetch_kernel: search keys, copy and stamp the found rows, list the missing keys; all tables in
// one launch. sweep_kernel: copy the rows that fetch_kernel deferred.
//
// Per part: keys (n,) i64, optional positions (n,) i64 into them, out (·, dim), versions (·,) u64,
// source (·,) u8 (versions and source may be null for VECTORS); misses (total,) u32 are positions
// in the batch (part.base + i) in no order, miss_count (1,) u32. Launch: BLOCK threads, T of
// them a key: a warp works on 32 / T keys together. A part begins at a block, so that all keys of a
// block are of one part. Any number of fetches and one writer may run in parallel (README.md).
// Twin: twin.py TwinTable.fetch.
#include "staged_rows.cuh"

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
  u32 code;    // the source in the low byte; the high half are those of the bits `hidden`
};

constexpr int PARTS = 32;

struct FetchArgs {
  u32* misses;
  u32* miss_count;
  u32* done;    // with result: (1,), the number of blocks that have ended
  u64* result;  // in host memory, or null: receives miss_count, which is reset to zero; see report
  u32* later;   // SWEEP: (total,) rows deferred to sweep_kernel, else NO_ROW
  u64* miss_keys;  // or null: VECTORS writes the missing keys, in the order of misses
  u32 parts;
  unsigned short window;        // sweep_kernel: the window of pinned host memory to read
  unsigned short window_shift;  // a window's bytes: 1 << this
  u32 sequence;                 // of this launch, for `result`
  u32 unused;
  FetchPart part[PARTS];
};

static_assert(sizeof(FetchPart) == 120, "must equal launch.FETCH_PART");
static_assert(sizeof(FetchArgs) == 64 + PARTS * 120, "must equal launch.FETCH_ARGS");

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

// Whether slots and rows of so many 16-byte units are loaded to stay in the second-level cache:
// this is faster for rows of 256 bytes and more, and slower for others.
__device__ constexpr bool is_kept(int units) { return units >= 16; }

__device__ __forceinline__ uint4 load_kept(const uint4* from) {
  uint4 value;
  asm volatile("ld.global.nc.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from), "l"(keep_policy()));
  return value;
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

// The bits of a word that hide its row from this part.
__device__ __forceinline__ u32 hidden_of(const FetchPart& p) { return p.code & 0xffff0000u; }

// A hit counts as a use unless it is a tombstone that the answer does not include.
template <int FORM>
__device__ __forceinline__ bool is_use(const FetchPart& p, u32 word) {
  if (!(word & TOMBSTONE)) return true;
  return FORM == TIER &&
         __ldcg(p.row_versions + (word & row_mask(hidden_of(p)))) >= p.oldest_tombstone;
}

// As measured to be fastest: two 16-byte units a thread of rows from 128 bytes on, two rows at
// once, or four of 512 bytes.
__device__ constexpr int threads_a_row(int units) { return units < 8 ? units : units / 2; }
__device__ constexpr int rows_at_once(int units, int most) {
  return most < 2 ? 1 : units < 32 ? 2 : 4;
}

// Copies the warp's rows, of C 16-byte units: T threads a row, the loads of AT_ONCE rows a thread
// before the first store. `row`: of this lane's key, or NO_ROW; `at`: its place in out.
template <int KEYS, int C>
__device__ __forceinline__ void copy_rows(const FetchPart& p, u32 row, u32 at) {
  constexpr int T = threads_a_row(C), EACH = C / T, STEP = 32 / T;
  constexpr int AT_ONCE = rows_at_once(C, KEYS / STEP);
  const int lane = threadIdx.x & 31, rank = lane % T;
#pragma unroll 1
  for (int first = 0; first < KEYS; first += STEP * AT_ONCE) {
    uint4 value[AT_ONCE][EACH];
    u32 number[AT_ONCE];
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      number[k] = __shfl_sync(WARP, row, first + k * STEP + lane / T);
      if (number[k] != NO_ROW) {
        const uint4* from = (const uint4*)row_at(p, number[k], C * 16) + rank;
#pragma unroll
        for (int m = 0; m < EACH; m++)
          value[k][m] = is_kept(C) ? load_kept(from + m * T) : __ldg(from + m * T);
      }
    }
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      const size_t place = __shfl_sync(WARP, at, first + k * STEP + lane / T);
      if (number[k] != NO_ROW) {
        uint4* to = (uint4*)p.out + place * C + rank;
#pragma unroll
        for (int m = 0; m < EACH; m++) store(to + m * T, value[k][m]);
      }
    }
  }
}

// The same for rows of any size.
template <int KEYS, int UNIT>
__device__ __forceinline__ void copy_any_rows(const FetchPart& p, u32 row, u32 at) {
  typedef typename Unit<UNIT>::type unit;
  const int lane = threadIdx.x & 31, units = p.row_bytes / UNIT;
  const int shift = units > 4 ? 3 : units > 2 ? 2 : units - 1;  // 1 << shift threads a row
  const int rank = lane & ((1 << shift) - 1);
#pragma unroll 1
  for (int first = 0; first < KEYS; first += 32 >> shift) {
    const u32 number = __shfl_sync(WARP, row, first + (lane >> shift));
    const size_t place = __shfl_sync(WARP, at, first + (lane >> shift));
    if (number == NO_ROW) continue;
    const unit* from = (const unit*)row_at(p, number, p.stride);
    unit* to = (unit*)(p.out + place * p.row_bytes);
    for (int c = rank; c < units; c += 1 << shift) store(to + c, __ldg(from + c));
  }
}

// The same for rows of WORDS 4-byte words, an odd number: those of scaled formats. The warp's rows
// are neighbours in out, so that threads compose 16 bytes of it at a time.
template <int KEYS, int WORDS>
__device__ __forceinline__ void copy_words(const FetchPart& p, u32 row, u32 at) {
  if (p.positions || (size_t)p.out & 15) return copy_any_rows<KEYS, 4>(p, row, at);
  using Staged = StagedRows<4 * WORDS, 32, KEYS>;
  __shared__ Staged all[BLOCK / 32];
  Staged& staged = all[threadIdx.x / 32];
  uint4* const to = (uint4*)(p.out + (size_t)__shfl_sync(WARP, at, 0) * (4 * WORDS));
  const u32 there = __ballot_sync(WARP, row != NO_ROW);
  staged.template load<false, 32>(p, row, 0, KEYS);
  wait_for_copies();
  const u32* const from = (const u32*)staged.of;
#pragma unroll 1
  for (int unit = threadIdx.x & 31; unit < KEYS * WORDS / 4; unit += 32) {
    u32 value[4];
    bool real[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int slot = (4 * unit + j) / WORDS;
      value[j] = from[4 * unit + j + slot * (4 * Staged::UNITS - WORDS)];
      real[j] = there >> slot & 1;
    }
    if (real[0] && real[3]) {
      store(to + unit, make_uint4(value[0], value[1], value[2], value[3]));
      continue;
    }
#pragma unroll
    for (int j = 0; j < 4; j++)
      if (real[j]) ((u32*)(to + unit))[j] = value[j];
  }
}

// UNITS: the units of every row, 16 bytes or 4 each, or 0 if rows differ or have another size.
template <int KEYS, int UNIT, int UNITS>
__device__ __forceinline__ void copy(const FetchPart& p, u32 row, u32 at) {
  if constexpr (UNITS > 0 && UNIT == 4)
    copy_words<KEYS, UNITS>(p, row, at);
  else if constexpr (UNITS > 0)
    copy_rows<KEYS, UNITS>(p, row, at);
  else
    copy_any_rows<KEYS, UNIT>(p, row, at);
}

// Writes what is to be known of this lane's key but its row. Returns the row to copy, or NO_ROW,
// and sets `miss`.
template <int FORM, bool SWEEP>
__device__ __forceinline__ u32 answer(const FetchArgs& a, const FetchPart& p, const Query& q, u32 i,
                                      u32 at, bool& miss) {
  const u32 number = q.word & row_mask(hidden_of(p));
  u32 row = q.word & (EMPTY | TOMBSTONE) ? NO_ROW : number;
  miss = row == NO_ROW;
  if (FORM == NUMBERS) ((u32*)p.out)[at] = row;
  if (FORM == TIER && !(q.word & EMPTY)) {
    // Bypasses the first-level cache, which may hold this sector as it was before the version was
    // written.
    const u64 version = __ldcg(p.row_versions + number);
    if (row == NO_ROW) miss = version < p.oldest_tombstone;
    if (!miss) p.versions[at] = version;
    if (row != NO_ROW) p.source[at] = (u8)p.code;
  }
  if (FORM == VECTORS && p.source && row != NO_ROW) p.source[at] = (u8)p.code;
  if (SWEEP) {
    const bool later = row != NO_ROW && window_of(a, p, row);
    a.later[p.base + i] = later ? row : NO_ROW;
    if (later) row = NO_ROW;
  }
  return row;
}

// Fetches the keys from `first` on of the part.
template <int KEYS, int UNIT, int UNITS, int FORM, bool STAMP, bool SWEEP>
__device__ __forceinline__ void fetch_keys(const FetchArgs& a, const FetchPart& p, u32 first) {
  const u32 lane = threadIdx.x & 31, i = first + lane;
  const bool real = lane < KEYS && i < p.n;
  u32 at = i;
  Query q = {0, 0, EMPTY, real};
  if (real) {
    if (is_batched(FORM) && p.positions) at = (u32)p.positions[i];
    q.key = __ldcs(p.keys + at);
    q.home = home_half(mix(q.key), p.buckets);
  }
  constexpr bool KEEP = is_kept(UNIT == 16 ? UNITS : 0);
  search_homes<KEYS, FORM, STAMP, KEEP>(p, q, __ballot_sync(WARP, real));
  search_rest<FORM, STAMP, KEEP>(p, q);
#ifdef HPS_SLOW_READS
  if (is_slow(mix(q.key))) __nanosleep(HPS_SLOW_READS);
#endif
  bool miss = false;
  u32 row = NO_ROW;
  if (real) row = answer<FORM, SWEEP>(a, p, q, i, at, miss);
  if (FORM == NUMBERS) return;
  list_miss<FORM>(a, p, miss, i);
  copy<KEYS, UNIT, UNITS>(p, row, at);
}

__device__ __forceinline__ const FetchPart& part_of_block(const FetchArgs& a) {
  int index = 0;
  while (index + 1 < (int)a.parts && a.part[index + 1].first_block <= blockIdx.x) index++;
  return a.part[index];
}

// The first key of this warp within its part.
template <int KEYS>
__device__ __forceinline__ u32 first_key(const FetchPart& p) {
  return ((blockIdx.x - p.first_block) * (BLOCK / 32) + threadIdx.x / 32) * KEYS;
}

// Blocks of a multiprocessor: as many as leave enough registers. Odd units are those of copy_words.
__device__ constexpr int resident_blocks(int units, int form) {
  return units == 32 ? 4 : units & 1 || is_batched(form) ? 6 : MOST_BLOCKS;
}

// Reports the number of misses and, above it, the launch's sequence number to the host, which may
// poll `result`: the launch then reads and writes nothing any more.
__device__ __forceinline__ void report(u64* result, u32 missed, u32 sequence) {
  __threadfence_system();
  *(volatile u64*)result = (u64)sequence << 32 | missed;
}

template <int T, int UNIT, int UNITS, int FORM, bool STAMP, bool SWEEP>
__global__ void __launch_bounds__(BLOCK, resident_blocks(UNITS, FORM))
    fetch_kernel(const __grid_constant__ FetchArgs a) {
  const FetchPart& p = is_batched(FORM) ? part_of_block(a) : a.part[0];
  const u32 first = first_key<32 / T>(p);
  if (first < p.n) fetch_keys<32 / T, UNIT, UNITS, FORM, STAMP, SWEEP>(a, p, first);
  if (is_batched(FORM) && a.result) {
    __syncthreads();
    if (threadIdx.x) return;
    __threadfence();
    if (atomicAdd(a.done, 1u) == gridDim.x - 1) {
      *a.done = 0;
      report(a.result, atomicExch(a.miss_count, 0u), a.sequence);
    }
  }
}

// Copies the deferred rows of one window. They do not change meanwhile, because the fetch ends with
// its last launch. Launched like fetch_kernel.
template <int T, int UNIT, int UNITS>
__global__ void __launch_bounds__(BLOCK) sweep_kernel(const __grid_constant__ FetchArgs a) {
  const FetchPart& p = part_of_block(a);
  const u32 lane = threadIdx.x & 31, first = first_key<32 / T>(p), i = first + lane;
  if (first >= p.n) return;
  u32 row = NO_ROW, at = i;
  if (lane < 32 / T && i < p.n) {
    row = a.later[p.base + i];
    if (row != NO_ROW && window_of(a, p, row) != a.window) row = NO_ROW;
    if (p.positions) at = (u32)p.positions[i];
  }
#ifdef HPS_SLOW_READS
  if (is_slow(mix(row))) __nanosleep(HPS_SLOW_READS);
#endif
  copy<32 / T, UNIT, UNITS>(p, row, at);
}

// Reports the number of misses of a fetch without `result`, launched behind it with one block, and
// resets it to zero.
struct CountArgs {
  u32* miss_count;
  u64* result;  // in host memory
  u32 sequence;
  u32 unused;
};

static_assert(sizeof(CountArgs) == 24, "must equal launch.COUNT_ARGS");

__global__ void __launch_bounds__(BLOCK) count_kernel(const __grid_constant__ CountArgs a) {
  if (threadIdx.x) return;
  const u32 missed = *a.miss_count;
  *a.miss_count = 0;
  report(a.result, missed, a.sequence);
}
