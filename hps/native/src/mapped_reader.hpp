// A batch is processed as a software pipeline, so that memory latencies overlap. In turns of kBlock
// keys: the positions of the block after the current one are computed, and the hashes of the one
// after that. Between them, key by key: a record is prefetched, a pilot of a later block, and the
// current record used. Prefetches that are issued block by block cost 5 to 10 ns more a key.
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

constexpr std::size_t kBlock = 64;
constexpr std::size_t kAhead = 16;  // from the prefetch of a record to its use
static_assert(kAhead <= kBlock, "positions are known one block ahead");
constexpr std::size_t kKeyBytes = 8;
// Of longer records only the first bytes are prefetched; the hardware prefetcher fetches the rest.
constexpr std::size_t kPrefetchBytes = 1024;

enum class Held : std::uint8_t { kRow, kOverridden, kAbsent };

// The state of one call. RowBytes: the row length if known at compile time, or 0.
template <std::size_t RowBytes>
struct MappedReader {
  const MappedView view;
  const bool has_overridden;
  // Two blocks each, by position modulo their length. Not initialized: a short call uses few.
  std::uint64_t hashes[2 * kBlock];
  std::uint32_t buckets[2 * kBlock];
  std::uint32_t positions[2 * kBlock];

  explicit MappedReader(const MappedView& of)
      : view(of),
        has_overridden(of.overridden != nullptr &&
                       __atomic_load_n(of.overridden, __ATOMIC_ACQUIRE) != 0) {}

  HPS_INLINE std::size_t row_bytes() const { return RowBytes != 0 ? RowBytes : view.row_bytes; }
  HPS_INLINE std::size_t record_bytes() const {
    return RowBytes != 0 && RowBytes % 8 == 0 ? RowBytes + kKeyBytes : view.record_bytes;
  }

  template <typename KeyAt>
  HPS_INLINE void hash_block(std::size_t begin, std::size_t n, KeyAt key_at) {
    if (begin >= n) return;
    const std::size_t m = n - begin < kBlock ? n - begin : kBlock;
    std::uint64_t* hash = hashes + begin % (2 * kBlock);
    std::uint32_t* bucket = buckets + begin % (2 * kBlock);
    for (std::size_t i = 0; i < m; ++i) {
      hash[i] = index_hash(key_at(begin + i), view.index.seed);
      bucket[i] = reduce(hash[i], view.index.n_buckets);
    }
  }

  HPS_INLINE void prefetch_pilots(std::size_t begin, std::size_t n) {
    for (std::size_t i = begin; i < n && i < begin + kBlock; ++i)
      __builtin_prefetch(view.index.pilots + buckets[i % (2 * kBlock)]);
  }

  HPS_INLINE void place_block(std::size_t begin, std::size_t n) {
    if (begin >= n) return;
    const std::size_t m = n - begin < kBlock ? n - begin : kBlock;
    const std::size_t at = begin % (2 * kBlock);
    for (std::size_t i = 0; i < m; ++i)
      positions[at + i] = position(hashes[at + i], buckets[at + i]);
  }

  HPS_INLINE std::uint32_t position(std::uint64_t hash, std::uint32_t bucket) const {
    const IndexPart part = view.index.parts[reduce(hash, view.index.n_parts)];
    const std::uint32_t slot = slot_of(hash, view.index.pilots[bucket], part.slots);
    if (__builtin_expect(slot < part.keys, 1)) return part.start + slot;
    return part.start + beyond(part, slot);
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
    for (std::size_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i);
    __builtin_prefetch(at + bytes - 1);
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
    hash_block(0, n, key_at);
    prefetch_pilots(0, n);
    hash_block(kBlock, n, key_at);
    prefetch_pilots(kBlock, n);
    place_block(0, n);
    if (WithRecords)
      for (std::size_t i = 0; i < n && i < kAhead; ++i) prefetch(positions[i]);
    for (std::size_t begin = 0; begin < n; begin += kBlock) {
      place_block(begin + kBlock, n);
      hash_block(begin + 2 * kBlock, n, key_at);
      const std::size_t end = n - begin < kBlock ? n : begin + kBlock;
      for (std::size_t i = begin; i < end; ++i) {
        if (WithRecords && i + kAhead < n) prefetch(positions[(i + kAhead) % (2 * kBlock)]);
        if (i + 2 * kBlock < n) __builtin_prefetch(view.index.pilots + buckets[i % (2 * kBlock)]);
        if (!use(i, positions[i % (2 * kBlock)])) return;
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
