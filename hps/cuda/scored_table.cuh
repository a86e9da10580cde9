// What the kernels of a table with scores share (hps/table/device_table.py).
//
// A bucket has 128 slots: keys (·,) u64, scores (·,) u64, digests (·,) u8, 0 for an empty slot, and
// rows, those of slots from `device_slots` on in pinned host memory. Each part of 16 slots has a
// floor: no row there has a lower score. A part with an empty slot has the floor 0, so filling one
// needs no access; a full bucket's floors are raised by the evictions that find them too low. So an
// eviction reads 8 floors and the scores of some parts, not 128 scores. Twin:
// hps/native/twin_scored.py.
#pragma once

#include "row_formats.cuh"

struct ScoredArgs {
  u64* keys;
  u64* scores;
  u8* digests;
  char* rows;
  char* host_rows;
  u64* floors;           // (8 * buckets,)
  u32* heads;            // by bucket: its list's first position + 1; 0 between batches
  u64* size;             // (SHARDS,) whose sum is the number of occupied slots
  u32* counters;         // (COUNTERS,), 0 before a batch: see below
  u32* next_counters;    // those of the next batch, to be set to 0
  const u64* wanted;     // keys (n,) of the batch
  char* batch_rows;      // (n, row) or null
  u64* batch_scores;     // (n,) of the caller, or null: 1 each; of a find: those found
  const u8* accumulate;  // (n,) or null
  u32* next;             // (n,) the next position of a bucket's list + 1, or 0
  u32* touched;          // (n,) the batch's buckets
  u32* sorted;           // (n,) positions of long lists
  u8* found;             // (n,) or null; of erasures: erased
  i64* numbers;          // (n,) of a find, or null: row numbers, -1 for missing keys
  u8* evicted;           // (n,) or null: whether a row was evicted or not admitted at a position
  u64* evicted_keys;     // (n,), and so on: that row
  char* evicted_rows;
  u64* evicted_scores;
  u64 base_score;
  u32 base;      // buckets at first
  u32 segments;  // mask of segments of `base` buckets
  u32 row_bytes;
  u32 n;
  u32 operation;
  u32 rule;
  u32 device_slots;  // of a bucket: a multiple of 16
  u32 unused;
};

static_assert(sizeof(ScoredArgs) == 224, "must equal device_table.ARGS");

constexpr int SLOTS = 128, PART = 16, PARTS = SLOTS / PART, FIND_TILE = 4;
constexpr u32 SHARDS = 64, ALL = 0xffffffffu;  // of sums: adding to one address is slow
constexpr u32 TOUCHED = 0, SORTED = 1, EVICTED = 32, COUNTERS = EVICTED + SHARDS;
constexpr u32 INSERT = 0, FIND_OR_INSERT = 1, ASSIGN = 2, ACCUMULATE = 3, ERASE = 4;  // Write
constexpr u32 KEEP = 0, BASE = 1, ADD = 2, EPOCH_ADD = 3, GIVEN = 4;                  // ScoreRule
constexpr u64 MOST = ~0ULL, LOW = 0xffffffffULL, MIX = 0xd6e8feb86659fd93ULL;

// hps/native/twin_cache.py's mixed.
__device__ __forceinline__ u64 mixed(u64 x) {
  x ^= x >> 32, x *= MIX;
  x ^= x >> 32, x *= MIX;
  return x ^ x >> 32;
}

// Where a key belongs.
struct Home {
  u64 bucket;
  u32 half;    // 0, or 64: the slots that are filled first. 0 where some rows are in host memory
  u32 digest;  // 1 to 255
};

template <typename Args>
__device__ __forceinline__ Home home_of(const Args& a, u64 key) {
  const u64 x = mixed(key);
  const u32 digest = (u32)(x >> 23) & 255;
  return {(u64)((u32)x & a.segments) * a.base + __umulhi((u32)(x >> 32), a.base),
          a.device_slots < SLOTS ? 0 : (u32)(x >> 31 & 1) * (SLOTS / 2), digest ? digest : 1};
}

// The row of a slot, by the slot's number.
__device__ __forceinline__ char* row_at(char* rows, char* host_rows, u32 device_slots,
                                        u32 row_bytes, u64 number) {
  if (device_slots == SLOTS) return rows + number * row_bytes;
  const u64 bucket = number / SLOTS;
  const u32 slot = number % SLOTS;
  return slot < device_slots
             ? rows + (bucket * device_slots + slot) * row_bytes
             : host_rows + (bucket * (SLOTS - device_slots) + slot - device_slots) * row_bytes;
}

template <bool HOST>
__device__ __forceinline__ char* row_of(const ScoredArgs& a, u64 number) {
  return row_at(a.rows, a.host_rows, HOST ? a.device_slots : SLOTS, a.row_bytes, number);
}

// Moves of a row by T threads, four of each thread on their way at once.
template <int UNIT, int T, typename Move>
__device__ __forceinline__ void move_row(u32 row_bytes, Move move) {
  for (u32 c = threadIdx.x % T; c < row_bytes / UNIT; c += 4 * T) move(c, row_bytes / UNIT);
}

template <int UNIT, int T>
__device__ __forceinline__ void copy_row(char* to, const char* from, u32 row_bytes) {
  typedef typename Unit<UNIT>::type unit;
  move_row<UNIT, T>(row_bytes, [=](u32 c, u32 units) {
    unit moved[4];
#pragma unroll
    for (int k = 0; k < 4; k++)
      if (c + k * T < units) moved[k] = __ldcg((const unit*)from + c + k * T);
#pragma unroll
    for (int k = 0; k < 4; k++)
      if (c + k * T < units) ((unit*)to)[c + k * T] = moved[k];
  });
}

// A bit for each of 16 bytes that equals `byte`.
__device__ __forceinline__ u32 equal_bytes(const u32 (&words)[4], u32 byte) {
  u32 equal = 0;
#pragma unroll
  for (int w = 0; w < 4; w++) {
    const u32 x = words[w] ^ byte * 0x01010101u;
    const u32 zero = ~((x & 0x7f7f7f7fu) + 0x7f7f7f7fu | x | 0x7f7f7f7fu) >> 7;
    equal |= (zero * 0x01020408u >> 24 & 15) << 4 * w;
  }
  return equal;
}

// Four words of digests, from slot `first` on.
__device__ __forceinline__ void load_digests(const ScoredArgs& a, u64 first, u32 (&words)[4]) {
  const uint4 loaded = __ldcg((const uint4*)(a.digests + first));
  words[0] = loaded.x, words[1] = loaded.y, words[2] = loaded.z, words[3] = loaded.w;
}

// The slot of a key among the thread's 16 from number `first` on, or -1.
__device__ __forceinline__ int slot_of(const ScoredArgs& a, u64 first, const u32 (&words)[4],
                                       const Home& home, u64 key) {
  int slot = -1;
  for (u32 same = equal_bytes(words, home.digest); same; same &= same - 1) {
    const int s = __ffs(same) - 1;
    if (__ldcg(a.keys + first + s) == key) slot = s;
  }
  return slot;
}
