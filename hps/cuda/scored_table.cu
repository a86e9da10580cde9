// The operations of a table with scores (hps/table/device_table.py). scored_write_kernel: insert,
// assign, accumulate or erase. scored_find_kernel: copy rows and scores, or give row numbers.
//
// A bucket has 128 slots: keys (·,) u64, scores (·,) u64, digests (·,) u8, 0 for an empty slot, and
// rows. Launch: BLOCK threads, a warp per key; scored_write_kernel gets the positions of each key
// of the batch together, in `order` from starts[i] to starts[i + 1], and applies them in their
// order. It holds the bucket's lock meanwhile. One launch at a time. Twin:
// hps/native/twin_scored.py.
#include "row_formats.cuh"

struct ScoredArgs {
  u64* keys;
  u64* scores;
  u8* digests;
  char* rows;
  u32* locks;            // by bucket: 1 while a warp changes it
  u64* size;             // (1,) occupied slots
  const u64* wanted;     // keys (·,) of the batch
  char* batch_rows;      // (·, row) or null
  u64* batch_scores;     // (·,) of the caller, or null: 1 each; of a find: those found
  const u8* accumulate;  // (·,) or null
  const u32* order;      // positions in the batch
  const u32* starts;     // (n + 1,)
  u8* found;             // (·,) of erasures: erased
  i64* numbers;          // of a find, or null: row numbers, -1 for missing keys
  u8* evicted;           // (·,) or null: whether the position evicted a row, or was not admitted
  u64* evicted_keys;
  char* evicted_rows;
  u64* evicted_scores;
  u64 base_score;
  u32 base;      // buckets at first
  u32 segments;  // mask of segments of `base` buckets
  u32 row_bytes;
  u32 n;
  u32 operation;
  u32 rule;
  u32 type;  // of the rows' numbers
  u32 unused;
};

static_assert(sizeof(ScoredArgs) == 184, "must equal device_table.ARGS");

constexpr int SLOTS = 128;
constexpr u32 ALL = 0xffffffffu;
constexpr u32 INSERT = 0, FIND_OR_INSERT = 1, ASSIGN = 2, ACCUMULATE = 3, ERASE = 4;  // Write
constexpr u32 KEEP = 0, BASE = 1, ADD = 2, EPOCH_ADD = 3, GIVEN = 4;                  // ScoreRule
constexpr u64 MOST = ~0ULL, LOW = 0xffffffffULL, MIX = 0xd6e8feb86659fd93ULL;

// hps/native/twin_cache.py's mixed.
__device__ __forceinline__ u64 mixed(u64 x) {
  x ^= x >> 32, x *= MIX;
  x ^= x >> 32, x *= MIX;
  return x ^ x >> 32;
}

// Where a key belongs: the number of the bucket's first slot.
struct Home {
  u64 first;
  u32 half;    // 0, or 64: the slots that are filled first
  u32 digest;  // never 0
};

__device__ __forceinline__ Home home_of(const ScoredArgs& a, u64 key) {
  const u64 x = mixed(key);
  const u64 bucket = (u64)((u32)x & a.segments) * a.base + __umulhi((u32)(x >> 32), a.base);
  return {bucket * SLOTS, (u32)(x >> 31 & 1) * (SLOTS / 2), (u32)(x >> 24) & 127 | 128};
}

// Four digests of a bucket a lane.
__device__ __forceinline__ u32 load_digests(const ScoredArgs& a, u64 first) {
  return __ldcg((const u32*)(a.digests + first) + (threadIdx.x & 31));
}

// The slot of a key, or -1; for all lanes.
__device__ __forceinline__ int search(const ScoredArgs& a, const Home& home, u64 key) {
  const u32 lane = threadIdx.x & 31, digests = load_digests(a, home.first);
  int slot = -1;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const u32 s = 4 * lane + k;
    if ((digests >> 8 * k & 255) == home.digest && __ldcg(a.keys + home.first + s) == key) slot = s;
  }
  const u32 hit = __ballot_sync(ALL, slot >= 0);
  return hit ? __shfl_sync(ALL, slot, __ffs(hit) - 1) : -1;
}

template <int UNIT>
__device__ __forceinline__ void copy_row(char* to, const char* from, u32 row_bytes) {
  typedef typename Unit<UNIT>::type unit;
  for (u32 c = threadIdx.x & 31; c < row_bytes / UNIT; c += 32)
    ((unit*)to)[c] = __ldcg((const unit*)from + c);
}

template <typename T>
__device__ __forceinline__ void add_numbers(char* to, const char* from, u32 row_bytes) {
  for (u32 c = threadIdx.x & 31; c < row_bytes / sizeof(T); c += 32)
    ((T*)to)[c] = __ldcg((const T*)to + c) + ((const T*)from)[c];
}

__device__ __forceinline__ void add_halves(char* to, const char* from, u32 row_bytes) {
  typedef unsigned short half;
  for (u32 c = threadIdx.x & 31; c < row_bytes / 2; c += 32)
    ((half*)to)[c] = narrow(__fadd_rn(widen(__ldcg((const half*)to + c)), widen(((half*)from)[c])));
}

// Adds a row; `type` as in device_table.TYPES. Unsigned integers wrap like signed ones.
__device__ __forceinline__ void add_row(char* to, const char* from, u32 row_bytes, u32 type) {
  switch (type) {
    case 0:
      return add_numbers<float>(to, from, row_bytes);
    case 1:
      return add_numbers<double>(to, from, row_bytes);
    case 2:
      return add_halves(to, from, row_bytes);
    case 3:
      return add_numbers<u8>(to, from, row_bytes);
    case 4:
      return add_numbers<unsigned short>(to, from, row_bytes);
    case 5:
      return add_numbers<u32>(to, from, row_bytes);
    default:
      return add_numbers<u64>(to, from, row_bytes);
  }
}

__device__ __forceinline__ u64 first_score(const ScoredArgs& a, u64 given) {
  if (a.rule == EPOCH_ADD) return a.base_score | (given & LOW);
  return a.rule == ADD || a.rule == GIVEN ? given : a.base_score;
}

__device__ __forceinline__ u64 next_score(const ScoredArgs& a, u64 given, u64 former) {
  if (a.rule == KEEP) return former;
  if (a.rule == ADD) return former + given < former ? MOST : former + given;
  if (a.rule == EPOCH_ADD) return a.base_score | min((former & LOW) + (given & LOW), LOW);
  return first_score(a, given);
}

// The first free slot of the home half, else of the other; -1 if there is none.
__device__ __forceinline__ int free_slot(const ScoredArgs& a, const Home& home) {
  const u32 lane = threadIdx.x & 31, digests = load_digests(a, home.first);
  u32 best = SLOTS;
#pragma unroll
  for (int k = 0; k < 4; k++)
    if (!(digests >> 8 * k & 255)) best = min(best, 4 * lane + k ^ home.half);
  best = __reduce_min_sync(ALL, best);
  return best == SLOTS ? -1 : (int)(best ^ home.half);
}

// The slot with the lowest score, the first of equal ones, of a full bucket.
__device__ __forceinline__ int lowest_slot(const ScoredArgs& a, const Home& home, u64& lowest) {
  const u32 lane = threadIdx.x & 31;
  int slot = 4 * lane;
  lowest = __ldcg(a.scores + home.first + slot);
#pragma unroll
  for (int k = 1; k < 4; k++) {
    const u64 score = __ldcg(a.scores + home.first + 4 * lane + k);
    if (score < lowest) lowest = score, slot = 4 * lane + k;
  }
#pragma unroll
  for (int step = 16; step; step /= 2) {
    const u64 score = __shfl_xor_sync(ALL, lowest, step);
    const int other = __shfl_xor_sync(ALL, slot, step);
    if (score < lowest || (score == lowest && other < slot)) lowest = score, slot = other;
  }
  return slot;
}

template <int UNIT>
__device__ __forceinline__ void report_evicted(const ScoredArgs& a, u32 at, u64 key,
                                               const char* row, u64 score) {
  if (!a.evicted) return;
  if ((threadIdx.x & 31) == 0)
    a.evicted[at] = 1, a.evicted_keys[at] = key, a.evicted_scores[at] = score;
  copy_row<UNIT>(a.evicted_rows + (size_t)at * a.row_bytes, row, a.row_bytes);
}

// Inserts a key that the bucket does not have. Returns its slot, or -1 if it is not admitted.
template <int UNIT>
__device__ __forceinline__ int insert(const ScoredArgs& a, const Home& home, u64 key, u32 at,
                                      u64 given) {
  const u64 score = first_score(a, given);
  const char* row = a.batch_rows + (size_t)at * a.row_bytes;
  int slot = free_slot(a, home);
  const bool full = slot < 0;
  if (full) {
    u64 lowest;
    slot = lowest_slot(a, home, lowest);
    if (score < lowest && a.rule != ADD) {
      report_evicted<UNIT>(a, at, key, row, score);
      return -1;
    }
    const u64 number = home.first + slot;
    report_evicted<UNIT>(a, at, __ldcg(a.keys + number), a.rows + number * a.row_bytes, lowest);
    __syncwarp();
  }
  const u64 number = home.first + slot;
  copy_row<UNIT>(a.rows + number * a.row_bytes, row, a.row_bytes);
  if ((threadIdx.x & 31) == 0) {
    a.keys[number] = key, a.scores[number] = score, a.digests[number] = (u8)home.digest;
    if (!full) atomicAdd(a.size, 1ULL);
  }
  return slot;
}

// Erases the row in `slot` unless it has another score than the caller's. Returns whether it did.
__device__ __forceinline__ bool erase(const ScoredArgs& a, const Home& home, int slot, u32 at) {
  if (slot < 0) return false;
  const u64 number = home.first + slot;
  if (a.batch_scores && __ldcg(a.scores + number) != a.batch_scores[at]) return false;
  if ((threadIdx.x & 31) == 0) a.digests[number] = 0, atomicAdd(a.size, MOST);
  return true;
}

// Applies the operation to the key at a position of the batch. Returns the key's slot after it.
template <int UNIT>
__device__ __forceinline__ int apply(const ScoredArgs& a, const Home& home, u64 key, int slot,
                                     u32 at) {
  const bool lead = (threadIdx.x & 31) == 0, adds = a.operation == ACCUMULATE;
  if (a.operation == ERASE) {
    const bool erased = erase(a, home, slot, at);
    if (lead) a.found[at] = erased;
    return erased ? -1 : slot;
  }
  if (lead) a.found[at] = slot >= 0;
  if (adds && (a.accumulate[at] != 0) != (slot >= 0)) return slot;
  const u64 given = a.batch_scores ? a.batch_scores[at] : 1;
  if (slot < 0) return a.operation == ASSIGN ? -1 : insert<UNIT>(a, home, key, at, given);
  const u64 number = home.first + slot;
  char *row = a.rows + number * a.row_bytes, *own = a.batch_rows + (size_t)at * a.row_bytes;
  if (a.operation == FIND_OR_INSERT)
    copy_row<UNIT>(own, row, a.row_bytes);
  else if (adds)
    add_row(row, own, a.row_bytes, a.type);
  else if (a.batch_rows)
    copy_row<UNIT>(row, own, a.row_bytes);
  if (lead) a.scores[number] = next_score(a, given, __ldcg(a.scores + number));
  return slot;
}

template <int UNIT>
__global__ void __launch_bounds__(BLOCK) scored_write_kernel(const __grid_constant__ ScoredArgs a) {
  const u32 group = (blockIdx.x * BLOCK + threadIdx.x) / 32;
  if (group >= a.n) return;
  const u32 begin = a.starts[group], end = a.starts[group + 1];
  const u64 key = a.wanted[a.order[begin]];
  const Home home = home_of(a, key);
  u32* const lock = a.locks + home.first / SLOTS;
  if ((threadIdx.x & 31) == 0) {
    while (atomicCAS(lock, 0u, 1u)) __nanosleep(100);
    __threadfence();
  }
  __syncwarp();
  int slot = search(a, home, key);
  for (u32 i = begin; i < end; i++) {
    slot = apply<UNIT>(a, home, key, slot, a.order[i]);
    __syncwarp();
  }
  __threadfence();
  __syncwarp();
  if ((threadIdx.x & 31) == 0) atomicExch(lock, 0u);
}

template <int UNIT>
__global__ void __launch_bounds__(BLOCK) scored_find_kernel(const __grid_constant__ ScoredArgs a) {
  const u32 i = (blockIdx.x * BLOCK + threadIdx.x) / 32;
  if (i >= a.n) return;
  const u64 key = a.wanted[i];
  const Home home = home_of(a, key);
  const int slot = search(a, home, key);
  const u64 number = home.first + slot;
  if ((threadIdx.x & 31) == 0) {
    if (a.found) a.found[i] = slot >= 0;
    if (a.numbers) a.numbers[i] = slot < 0 ? -1 : (i64)number;
    if (a.batch_scores && slot >= 0) a.batch_scores[i] = a.scores[number];
  }
  if (a.batch_rows && slot >= 0)
    copy_row<UNIT>(a.batch_rows + (size_t)i * a.row_bytes, a.rows + number * a.row_bytes,
                   a.row_bytes);
}
