// The compiled half of the CPU cache. A table is an array of buckets of `ways` slots; a key lives
// in one of two buckets, both told by its hash. Keys, states, stamps, versions and rows lie in
// arrays of their own, indexed by slot = bucket * ways + way, so that probing touches keys and
// states only.
//
// Nothing here locks: the caller keeps the writer and the readers apart (readers write stamps).
// NumPy twins: hps/native/twin_cache.py.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hps/partition_hash.hpp"

namespace hps {

enum SlotState : std::uint8_t { kEmpty = 0, kRow = 1, kTombstone = 2 };

struct BucketTable {
  std::int64_t* keys;       // [buckets * ways]
  std::uint8_t* states;     // SlotState
  std::uint32_t* stamps;    // when last used; 0 in an empty slot
  std::uint64_t* versions;  // [buckets * ways]
  std::uint8_t* rows;       // [buckets * ways][row_bytes]
  std::size_t row_bytes;
  std::size_t buckets;  // 1 .. 2^32 - 2
  std::size_t ways;
};

struct TwoBuckets {
  std::size_t first, second;
};

// The hash is multiplied once more, so that a node which holds only the keys of one partition still
// uses all of its buckets; each half of it picks a bucket by multiplication, for any number of
// them.
inline TwoBuckets buckets_of(std::int64_t key, std::size_t buckets) {
  const std::uint64_t h = partition_hash(static_cast<std::uint64_t>(key)) * 0x9E3779B97F4A7C15ULL;
  return {static_cast<std::size_t>(((h >> 32) * buckets) >> 32),
          static_cast<std::size_t>(((h & 0xFFFFFFFFULL) * buckets) >> 32)};
}

// The slot that holds `key`, or -1.
std::int64_t find_slot(const BucketTable& table, std::int64_t key, TwoBuckets at);

// slots[i] = find_slot(keys[i]).
void cache_find(const BucketTable& table, const std::int64_t* keys, std::size_t n,
                std::int64_t* slots);

// Where a fetch writes, indexed by the key's position.
struct CacheAnswer {
  std::uint8_t* out;
  std::uint64_t* versions;
  std::uint8_t* source;
  std::uint8_t code;
};

// Answers keys[missing[0..m)], stamping hits with `clock`; tombstones older than `oldest_tombstone`
// count as not there. Writes the positions it could not answer to left, in order, and returns their
// number.
std::size_t cache_fetch(const BucketTable& table, const std::int64_t* keys,
                        const std::int64_t* missing, std::size_t m, std::uint32_t clock,
                        std::uint64_t oldest_tombstone, const CacheAnswer& answer,
                        std::int64_t* left);

// Copies the row of every key, in order, to out, [n][row_bytes], and stamps it with `clock`; false
// when a key has none (out is then partly written).
bool cache_gather(const BucketTable& table, const std::int64_t* keys, std::size_t n,
                  std::uint32_t clock, std::uint8_t* out);

// What made room for others.
struct Displaced {
  std::size_t rows = 0, tombstones = 0;
};

// Gives each of keys[0..n), which are not resident, a slot, one after the other: in the bucket with
// more room, else the one with the older stamp; there the slot with the oldest stamp. rows is
// [n][row_bytes], or null: tombstones.
Displaced cache_admit(const BucketTable& table, const std::int64_t* keys,
                      const std::uint64_t* versions, const std::uint8_t* rows, std::size_t n,
                      std::uint32_t stamp);

}  // namespace hps
