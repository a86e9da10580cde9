// A batch is processed in chunks. First the positions of a chunk's keys are computed, block by
// block and vectorized; then its records are used one by one, each prefetched some keys before.
// Computing positions between the uses of records, block by block or key by key, took 1.1 to 1.2
// times as long: a miss of a pilot then competes with those of records.
//
// Part of mapped_read.cpp: HPS_ISA names the instruction set this is compiled for (CMakeLists.txt).
#pragma once

#include <cstring>

#include "hps/mapped_read.hpp"

#define HPS_INLINE __attribute__((always_inline)) inline
#define HPS_INLINE_CALLBACK __attribute__((always_inline))

namespace hps {
namespace HPS_ISA {
namespace {

constexpr std::size_t kChunk = 2048;
constexpr std::size_t kBlock = 64;
constexpr std::size_t kAhead = 32;  // from the prefetch of a record to its use
// Prefetches go to the second-level cache: of the first level a processor has some 24 outstanding
// misses, which bound a gather of records of 136 bytes to 25 ns each; this way it took 14 ns.
constexpr int kLocality = 2;
constexpr std::size_t kKeyBytes = 8;
// Of longer records only the first bytes are prefetched; the hardware prefetcher fetches the rest.
constexpr std::size_t kPrefetchBytes = 1024;

enum class Held : std::uint8_t { kRow, kOverridden, kAbsent };

// The state of one call. RowBytes: the row length if known at compile time, or 0.
template <std::size_t RowBytes>
struct MappedReader {
  const MappedView view;
  const bool has_overridden;
  // Not initialized: a short call uses few.
  std::uint32_t positions[kChunk];

  explicit MappedReader(const MappedView& of)
      : view(of),
        has_overridden(of.overridden != nullptr &&
                       __atomic_load_n(of.overridden, __ATOMIC_ACQUIRE) != 0) {}

  HPS_INLINE std::size_t row_bytes() const { return RowBytes != 0 ? RowBytes : view.row_bytes; }
  HPS_INLINE std::size_t record_bytes() const {
    return RowBytes != 0 && RowBytes % 8 == 0 ? RowBytes + kKeyBytes : view.record_bytes;
  }

  // Up to kBlock keys on the way to their positions.
  struct Block {
    std::uint64_t hashes[kBlock];
    std::uint32_t buckets[kBlock], parts[kBlock];
  };

  template <typename KeyAt>
  HPS_INLINE void hash(Block& block, std::size_t begin, std::size_t n, KeyAt key_at) const {
    for (std::size_t i = 0; i < n; ++i) {
      block.hashes[i] = index_hash(key_at(begin + i), view.index.seed);
      block.buckets[i] = reduce(block.hashes[i], view.index.n_buckets);
      block.parts[i] = reduce(block.hashes[i], view.index.n_parts);
    }
    for (std::size_t i = 0; i < n; ++i)
      __builtin_prefetch(view.index.pilots + block.buckets[i], 0, kLocality);
  }

  HPS_INLINE void place(const Block& block, std::size_t n, std::uint32_t* to) const {
    std::uint32_t starts[kBlock], keys[kBlock], slots[kBlock];
    std::uint64_t pilots[kBlock];
    for (std::size_t i = 0; i < n; ++i) {
      const IndexPart& part = view.index.parts[block.parts[i]];
      starts[i] = part.start;
      keys[i] = part.keys;
      slots[i] = part.slots;
      pilots[i] = view.index.pilots[block.buckets[i]];
    }
    std::uint32_t beyond_keys = 0;
    for (std::size_t i = 0; i < n; ++i) {
      slots[i] = slot_of(block.hashes[i], pilots[i], slots[i]);
      to[i] = starts[i] + slots[i];
      beyond_keys |= slots[i] >= keys[i] ? 1 : 0;
    }
    if (beyond_keys == 0) return;
    for (std::size_t i = 0; i < n; ++i)
      if (__builtin_expect(slots[i] >= keys[i], 0))
        to[i] = starts[i] + beyond(view.index.parts[block.parts[i]], slots[i]);
  }

  // Computes the positions of n keys from `begin` on, at most kChunk.
  template <typename KeyAt>
  HPS_INLINE void place_chunk(std::size_t begin, std::size_t n, KeyAt key_at) {
    Block blocks[2];
    hash(blocks[0], begin, n < kBlock ? n : kBlock, key_at);
    for (std::size_t at = 0, turn = 0; at < n; at += kBlock, turn ^= 1) {
      const std::size_t after = at + kBlock;
      if (after < n)
        hash(blocks[turn ^ 1], begin + after, n - after < kBlock ? n - after : kBlock, key_at);
      place(blocks[turn], n - at < kBlock ? n - at : kBlock, positions + at);
    }
  }

  // A damaged entry must not lead out of the records.
  HPS_INLINE std::uint32_t beyond(const IndexPart& part, std::uint32_t slot) const {
    const std::uint32_t at = view.index.remap[part.remap + slot - part.keys];
    return at < part.keys ? at : 0;
  }

  HPS_INLINE const std::uint8_t* record(std::size_t position) const {
    return view.records + position * record_bytes();
  }

  HPS_INLINE void prefetch(std::uint32_t position) const {
    const std::uint8_t* at = record(position);
    const std::size_t bytes = record_bytes() < kPrefetchBytes ? record_bytes() : kPrefetchBytes;
    for (std::size_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, kLocality);
    // Records begin at multiples of 8 bytes.
    if (bytes % 64 != 8) __builtin_prefetch(at + bytes - 1, 0, kLocality);
    if (has_overridden) __builtin_prefetch(view.overridden + 1 + position / 64);
  }

  HPS_INLINE Held held(std::uint32_t position, std::int64_t key) const {
    std::int64_t found;
    std::memcpy(&found, record(position), sizeof found);
    if (__builtin_expect(found != key, 0)) return Held::kAbsent;
    if (__builtin_expect(has_overridden, 0) && is_overridden(position)) return Held::kOverridden;
    return Held::kRow;
  }

  HPS_INLINE bool is_overridden(std::uint32_t position) const {
    const std::uint64_t* word = view.overridden + 1 + position / 64;
    return __atomic_load_n(word, __ATOMIC_ACQUIRE) >> position % 64 & 1;
  }

  // Calls use(i, position) for i in [0, n), in order, until it returns false; with `WithRecords`
  // the records are prefetched.
  template <bool WithRecords, typename KeyAt, typename Use>
  HPS_INLINE void locate(std::size_t n, KeyAt key_at, Use use) {
    for (std::size_t begin = 0; begin < n; begin += kChunk) {
      const std::size_t m = n - begin < kChunk ? n - begin : kChunk;
      place_chunk(begin, m, key_at);
      if (WithRecords)
        for (std::size_t i = 0; i < m && i < kAhead; ++i) prefetch(positions[i]);
      for (std::size_t i = 0; i < m; ++i) {
        if (WithRecords && i + kAhead < m) prefetch(positions[i + kAhead]);
        if (!use(begin + i, positions[i])) return;
      }
    }
  }

  // Calls visit(i, held, row) for i in [0, n), in order, until it returns false.
  template <typename KeyAt, typename Visit>
  HPS_INLINE void look_up(std::size_t n, KeyAt key_at, Visit visit) {
    if (view.rows == 0) {
      for (std::size_t i = 0; i < n; ++i)
        if (!visit(i, Held::kAbsent, nullptr)) return;
      return;
    }
    locate<true>(n, key_at, [&](std::size_t i, std::uint32_t position) HPS_INLINE_CALLBACK {
      return visit(i, held(position, key_at(i)), record(position) + kKeyBytes);
    });
  }
};

}  // namespace
}  // namespace HPS_ISA
}  // namespace hps
