// The table's layout and the probe that all kernels share; see layout.py and README.md.
//
// A tile is T neighbouring threads of a warp that work on one key together: each loads 8 / T pieces
// of 16 bytes of a bucket's line. Twin: layout.py, twin.py.
#pragma once

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned char u8;
typedef long long i64;

constexpr int WAYS = 10;
constexpr int BUCKET_BYTES = 128;
constexpr int WORDS_AT = 80;
constexpr int STAMPS_AT = 120;
constexpr int STAMP_BITS = 6;
constexpr int AGES = 1 << STAMP_BITS;
constexpr u32 EMPTY = 1u << 31;
constexpr u32 TOMBSTONE = 1u << 30;
constexpr u32 CLAIMED = EMPTY | TOMBSTONE;
constexpr u32 ROW_MASK = TOMBSTONE - 1;
constexpr u32 NO_ROW = 0xffffffffu;
constexpr int PREFER = 9;
constexpr int MARGIN = 2;
constexpr int BLOCK = 256;  // threads of a block, in every kernel

__device__ __forceinline__ u64 mix(u64 k) {
  k ^= k >> 33;
  k *= 0xff51afd7ed558ccdULL;
  k ^= k >> 33;
  k *= 0xc4ceb9fe1a85ec53ULL;
  return k ^ (k >> 33);
}

__device__ __forceinline__ u32 first_bucket(u64 hash, u32 buckets) {
  return __umulhi((u32)(hash >> 32), buckets);
}

__device__ __forceinline__ u32 second_bucket(u64 hash, u32 buckets, u32 first) {
  u32 b = __umulhi((u32)hash, buckets);
  if (b == first) b = b + 1 == buckets ? 0 : b + 1;
  return b;
}

__device__ __forceinline__ char* line_at(char* lines, u32 bucket) {
  return lines + (size_t)bucket * BUCKET_BYTES;
}

__device__ __forceinline__ u32* word_at(char* line, int slot) {
  return (u32*)(line + WORDS_AT) + slot;
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
  // The value of the tile's thread `source`.
  template <typename V>
  __device__ __forceinline__ V from(V value, int source) const {
    return __shfl_sync(mask, value, source, T);
  }
};

template <int T>
struct Line {
  static constexpr int PIECES = 8 / T;
  ulonglong2 piece[PIECES];

  // Plain loads through the second-level cache.
  __device__ __forceinline__ void load(const char* line, const Tile<T>& tile) {
#pragma unroll
    for (int p = 0; p < PIECES; p++) piece[p] = __ldcg((const ulonglong2*)line + tile.rank + p * T);
  }

  // The same, asking the second-level cache to keep the line.
  __device__ __forceinline__ void load_kept(const char* line, const Tile<T>& tile, u64 policy) {
#pragma unroll
    for (int p = 0; p < PIECES; p++)
      asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v2.u64 {%0,%1},[%2],%3;"
                   : "=l"(piece[p].x), "=l"(piece[p].y)
                   : "l"((const ulonglong2*)line + tile.rank + p * T), "l"(policy));
  }

  // The slot that carries `key`, or -1. The same for all threads of the tile.
  __device__ __forceinline__ int find(u64 key, const Tile<T>& tile) const {
    int slot = -1;
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      const int at = tile.rank + p * T;
      if (at < 5) {
        if (piece[p].x == key) slot = at * 2;
        if (piece[p].y == key) slot = at * 2 + 1;
      }
    }
    const u32 votes = __ballot_sync(tile.mask, slot >= 0) & tile.mask;
    if (!votes) return -1;
    return __shfl_sync(tile.mask, slot, __ffs(votes) - 1);
  }

  // The word of `slot` (>= 0, the same for all threads of the tile).
  __device__ __forceinline__ u32 word(int slot, const Tile<T>& tile) const {
    const int at = 5 + (slot >> 2);
    const ulonglong2 held = T == 2 && at == 5 ? piece[PIECES - 2] : piece[PIECES - 1];
    const u64 pair = slot & 2 ? held.y : held.x;
    const u32 word = slot & 1 ? (u32)(pair >> 32) : (u32)pair;
    return tile.from(word, at & (T - 1));
  }

  // The stamps; only in the tile's last thread.
  __device__ __forceinline__ u64 stamps() const { return piece[PIECES - 1].y; }
};

// Sets one stamp while others set theirs in the same line.
__device__ __forceinline__ void set_stamp(char* line, int slot, u32 stamp) {
  u64* stamps = (u64*)(line + STAMPS_AT);
  const int shift = slot * STAMP_BITS;
  const u64 change = ((__ldcg(stamps) >> shift) ^ stamp) & (AGES - 1);
  if (change) atomicXor(stamps, change << shift);
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
