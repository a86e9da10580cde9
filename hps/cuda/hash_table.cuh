// The table's layout and the search that all kernels share; see layout.py and README.md.
//
// A tile is T neighbouring threads of a warp that work on one key together; each of the first four
// reads one slot of a half bucket. Twin: layout.py, twin.py.
#pragma once

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned char u8;
typedef long long i64;

constexpr int WAYS = 8;
constexpr int HALF = 4;
constexpr int BUCKET_BYTES = 128;
constexpr int SLOT_BYTES = 16;
constexpr u32 EMPTY = 1u << 31;
constexpr u32 TOMBSTONE = 1u << 30;
constexpr u32 CLAIMED = 1u << 29;
constexpr u32 ROW_MASK = CLAIMED - 1;
constexpr u32 MEMBERS = 7u << 26;  // hide the row from members, if the table can have some
constexpr u32 NO_ROW = 0xffffffffu;
constexpr int COUNT_BITS = 20;
constexpr int POLICY_BITS = 8;
constexpr int BLOCK = 256;  // threads of a block, in every kernel
// The blocks for which a multiprocessor has threads: 1,536 on sm_86 to sm_89 and from sm_120 on,
// otherwise 2,048.
constexpr int MOST_BLOCKS =
    (__CUDA_ARCH__ > 800 && __CUDA_ARCH__ < 900) || __CUDA_ARCH__ >= 1200 ? 6 : 8;

constexpr int NONE = 0;  // policies, layout.py's Policy.rule
constexpr int LRU = 1;
constexpr int LFU = 2;
constexpr int SCORE = 3;

__device__ __forceinline__ u64 mix(u64 k) {
  k ^= k >> 33;
  k *= 0xff51afd7ed558ccdULL;
  k ^= k >> 33;
  k *= 0xc4ceb9fe1a85ec53ULL;
  return k ^ (k >> 33);
}

// Halves are numbered 2 * bucket + half.
__device__ __forceinline__ u32 home_half(u64 hash, u32 buckets) {
  return __umulhi((u32)(hash >> 32), buckets) * 2 + ((u32)hash & 1);
}

// The first half of the second bucket of a key that has its home in `home`.
__device__ __forceinline__ u32 second_half(u64 hash, u32 buckets, u32 home) {
  u32 b = __umulhi((u32)hash, buckets);
  if (b == home >> 1) b = b + 1 == buckets ? 0 : b + 1;
  return b * 2;
}

// `hidden`: the bits of a word that hide its row from the caller: EMPTY and, where a table can have
// members, the caller's. Returns the bits of row numbers; in an empty slot of a roomy table all of
// them are set.
__device__ __forceinline__ u32 row_mask(u32 hidden) {
  return hidden & MEMBERS ? ROW_MASK & ~MEMBERS : ROW_MASK;
}

// The three fields of a slot, always read as one value; also written as one, unless only the word
// or the score changes.
struct Slot {
  u64 key;
  u32 word, score;
};

__device__ __forceinline__ char* slot_at(char* lines, u32 half, int rank) {
  return lines + (size_t)half * (HALF * SLOT_BYTES) + rank * SLOT_BYTES;
}

__device__ __forceinline__ u32* word_of(char* slot) { return (u32*)(slot + 8); }
__device__ __forceinline__ u32* score_of(char* slot) { return (u32*)(slot + 12); }

__device__ __forceinline__ Slot slot_of(u64 key, u64 rest) {
  Slot slot = {key, (u32)rest, (u32)(rest >> 32)};
  return slot;
}

// A 16-byte load of one thread reads one sector, so key and word are consistent.
__device__ __forceinline__ Slot load_slot(const char* at) {
  u64 key, rest;
  asm volatile("ld.global.cg.v2.u64 {%0, %1}, [%2];" : "=l"(key), "=l"(rest) : "l"(at));
  return slot_of(key, rest);
}

// Like load_slot, with a hint to the second-level cache to keep the line.
__device__ __forceinline__ Slot load_slot_kept(const char* at, u64 policy) {
  u64 key, rest;
  asm volatile("ld.global.cg.L2::cache_hint.v2.u64 {%0, %1}, [%2], %3;"
               : "=l"(key), "=l"(rest)
               : "l"(at), "l"(policy));
  return slot_of(key, rest);
}

__device__ __forceinline__ void store_slot(char* at, const Slot& slot) {
  asm volatile(
      "{.reg .b128 s; mov.b128 s, {%1, %2}; st.relaxed.gpu.global.b128 [%0], s;}" ::"l"(at),
      "l"(slot.key), "l"((u64)slot.score << 32 | slot.word)
      : "memory");
}

__device__ __forceinline__ void store_word(char* slot, u32 word) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(slot + 8), "r"(word) : "memory");
}

template <int T>
struct Tile {
  int rank;  // 0 … T - 1
  u32 mask;  // the tile's lanes within the warp
  __device__ __forceinline__ Tile() {
    const int lane = threadIdx.x & 31;
    rank = lane & (T - 1);
    mask = (u32)((1ULL << T) - 1) << (lane & ~(T - 1));
  }
  // The lane of the thread of the tile for which `it` is true, or -1. It may be true for one at
  // most.
  __device__ __forceinline__ int which(bool it) const {
    return __ffs(__ballot_sync(mask, it) & mask) - 1;
  }
};

__device__ __forceinline__ u64 keep_policy() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0,1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ bool holds(const Slot& slot, u64 key, u32 hidden) {
  return slot.key == key && !(slot.word & hidden);
}

// The lane of the tile that holds `key` in `slot`, or -1.
template <int T>
__device__ __forceinline__ int holder(const Slot& slot, u64 key, u32 hidden, const Tile<T>& tile) {
  const bool probes = T <= HALF || tile.rank < HALF;
  return tile.which(probes && holds(slot, key, hidden));
}

// The slot of a key: `lane` of the tile has read it, at `place`; -1: not found.
struct Found {
  Slot slot;
  char* place;
  int lane;
};

// The slot of a half bucket that this thread of the tile reads.
template <int T>
__device__ __forceinline__ Slot load_half(char* lines, u32 half, const Tile<T>& tile) {
  return load_slot(slot_at(lines, half, tile.rank & (HALF - 1)));
}

// Sets `found` if this thread has read the slot of `key`.
template <int T>
__device__ __forceinline__ void pick(Found& found, const Slot& slot, char* lines, u32 half, u64 key,
                                     u32 hidden, const Tile<T>& tile) {
  if (holds(slot, key, hidden)) {
    found.slot = slot;
    found.place = slot_at(lines, half, tile.rank & (HALF - 1));
  }
}

// Finds a key whose home half is already loaded. Loading the other three halves at once takes the
// least time; wide tiles, which bandwidth limits sooner, load the home bucket's other half
// separately.
template <int T>
__device__ __forceinline__ Found look(char* lines, u32 buckets, u64 key, u64 hash, u32 home,
                                      u32 hidden, const Slot& loaded, const Tile<T>& tile) {
  Found found = {{0, EMPTY, 0}, lines, -1};
  pick(found, loaded, lines, home, key, hidden, tile);
  found.lane = holder(found.slot, key, hidden, tile);
  if (found.lane >= 0) return found;
  const u32 second = second_half(hash, buckets, home);
  const Slot a = load_half(lines, home ^ 1, tile);
  if (T > HALF) {
    pick(found, a, lines, home ^ 1, key, hidden, tile);
    found.lane = holder(found.slot, key, hidden, tile);
    if (found.lane >= 0) return found;
  }
  const Slot b = load_half(lines, second, tile);
  const Slot c = load_half(lines, second + 1, tile);
  if (T <= HALF) pick(found, a, lines, home ^ 1, key, hidden, tile);
  pick(found, b, lines, second, key, hidden, tile);
  pick(found, c, lines, second + 1, key, hidden, tile);
  found.lane = holder(found.slot, key, hidden, tile);
  return found;
}

// The eviction rank of a score; the lowest is evicted first. Scores wrap; they are ordered over
// half of their range on either side of `now`.
__device__ __forceinline__ u32 rank_of(u32 score, u32 now) { return (score - now) ^ 1u << 31; }

// Records a hit in the score of its slot. Scores are hints: a stamp that races with a write of the
// slot may be lost or go to the slot's next key. `policy`: LRU | age << POLICY_BITS, where scores
// younger than the age are kept, or LFU.
__device__ __forceinline__ void stamp_slot(char* slot, u32 score, u32 now, u32 policy) {
  if ((policy & ((1u << POLICY_BITS) - 1)) == LRU) {
    if (now - score >= policy >> POLICY_BITS)  // cheaper than a store, which could also lower it
      asm volatile("red.relaxed.gpu.global.max.u32 [%0], %1;" ::"l"(score_of(slot)), "r"(now)
                   : "memory");
  } else if (policy == LFU) {
    constexpr u32 most = (1u << COUNT_BITS) - 1;
    if ((score ^ now) >> COUNT_BITS)
      *(volatile u32*)score_of(slot) = now + 1;
    else if ((score & most) < most)
      atomicAdd(score_of(slot), 1u);
  }
}

// The address of a row: the first `on_device` rows of a table are in device memory, the others in
// pinned host memory; host_rows is that memory's address minus the size of the rows on the device.
template <typename P>
__device__ __forceinline__ char* row_at(const P& p, u32 row, u32 stride) {
  return (char*)(row < p.on_device ? p.rows : p.host_rows) + (size_t)row * stride;
}

template <int UNIT>
struct Unit;
template <>
struct Unit<16> {
  typedef uint4 type;
};
template <>
struct Unit<4> {
  typedef u32 type;
};
template <>
struct Unit<2> {
  typedef unsigned short type;
};
template <>
struct Unit<1> {
  typedef u8 type;
};
