// A minimal perfect hash function over a fixed set of keys: it gives every key of the set its own
// position in [0, keys), and any other key some position.
//
// After PtrHash (Groot Koerkamp, "PtrHash: Minimal Perfect Hashing at RAM Throughput", 2025). A
// key's 64-bit hash selects a bucket of some three keys; the bucket's pilot, a byte, selects the
// slots of its keys, in 1 % more slots than keys. The slots behind the last position are mapped to
// the free slots before it. The buckets form parts, which are built independently. Unlike there, a
// part has as many slots as its own keys need. NumPy twin: hps/native/twin_mapped.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hps {

// A part of the keys. Its positions are [start, start + keys).
struct IndexPart {
  std::uint32_t start, keys, slots;
  std::uint32_t remap;  // the first of its slots - keys entries in the remap array
};

struct StaticIndex {
  const IndexPart* parts;
  const std::uint8_t* pilots;
  const std::uint32_t* remap;  // positions in the part
  std::uint64_t seed;
  std::uint32_t n_parts, n_buckets;
};

// A bijection, so different keys have different hashes: the mixer of `home_of`.
static inline std::uint64_t index_hash(std::int64_t key, std::uint64_t seed) {
  std::uint64_t x = static_cast<std::uint64_t>(key) ^ seed;
  x ^= x >> 32;
  x *= 0xD6E8FEB86659FD93ULL;
  x ^= x >> 32;
  x *= 0xD6E8FEB86659FD93ULL;
  return x ^ (x >> 32);
}

// The bucket, or the part, of a hash. Both ascend with it.
static inline std::uint32_t reduce(std::uint64_t hash, std::uint32_t n) {
  return static_cast<std::uint32_t>(((hash >> 32) * n) >> 32);
}

// The slot of a hash in its part.
static inline std::uint32_t slot_of(std::uint64_t hash, std::uint64_t pilot, std::uint32_t slots) {
  const std::uint64_t x = (hash ^ (pilot * 0x9E3779B97F4A7C15ULL)) * 0x9FB21C651E98DF25ULL;
  return static_cast<std::uint32_t>(((x >> 32) * slots) >> 32);
}

// The input of one part: its hashes, ascending and distinct, and the numbers of its buckets.
struct PartKeys {
  const std::uint64_t* hashes;
  std::uint32_t n;
  std::uint32_t first_bucket, buckets;  // of the part
  std::uint32_t n_buckets;              // of all parts
  std::uint32_t slots;                  // at least n
};

// Writes a pilot per bucket, each key's position in the part, and the remap array of slots - n
// entries. Returns false if no pilots were found; another seed has others. Throws std::bad_alloc.
bool build_part(const PartKeys& keys, std::uint8_t* pilots, std::uint32_t* positions,
                std::uint32_t* remap);

}  // namespace hps
