// A batch is processed as a software pipeline, so that memory latencies overlap. Each key passes
// four steps: prefetch its home bucket; search the key there and prefetch its row (or the next
// bucket); search further if it is not in its home; copy the row. Between two steps of a key lie
// the steps of other keys.
//
// Part of cache_read.cpp and cache_pool.cpp: HPS_ISA names the instruction set this is compiled for
// (CMakeLists.txt).
#pragma once

#include "cache_find.hpp"
#include "hps/cache_layout.hpp"
#include "hps/relaxed.hpp"

#define HPS_INLINE_CALLBACK __attribute__((always_inline))

namespace hps {
namespace HPS_ISA {
namespace {

// The prefetch distance in keys, from the prefetch of a row to its copy, and from the prefetch of a
// bucket to the search in it; 12 and 31 took about as long. Processing each step for sixteen keys
// at a time took 1.1 times as long.
constexpr std::size_t kAhead = 24;
constexpr std::size_t kRing = 64;
static_assert(kRing > 2 * kAhead, "a ring entry must not be reused before its row is copied");
// Of longer rows only the first bytes are prefetched; the hardware prefetcher fetches the rest.
constexpr std::size_t kPrefetchBytes = 1024;

// Prefetches go to the second-level cache. A processor has 10 to 24 outstanding misses of the first
// level, and some have three times as many of the second. On such a one (Zen 4) gathers of rows of
// 32 to 256 bytes took 1.6 to 1.9 times as long if prefetched to the first level, and rows of 512
// bytes 1.35 times; on one without more misses of the second, 0.94 to 0.99 times.
constexpr int kLocality = 2;

HPS_INLINE void prefetch_row(const std::uint8_t* row, std::size_t bytes) {
  const std::size_t n = bytes < kPrefetchBytes ? bytes : kPrefetchBytes;
  for (std::size_t i = 0; i < n; i += 64) __builtin_prefetch(row + i, 0, kLocality);
}

// The state of one call. RowBytes: the row length if known at compile time, or 0.
template <std::size_t RowBytes, bool WithVersions>
struct Reader {
  const CacheView view;
  Toucher touch;
  // Indexed by position modulo kRing. Not initialized, because a short call uses few.
  Found found[kRing];
  std::uint32_t homes[kRing];

  explicit Reader(const CacheView& of) : view(of), touch(of) {}

  HPS_INLINE std::size_t row_bytes() const { return RowBytes != 0 ? RowBytes : view.row_bytes; }

  HPS_INLINE Bucket& bucket(std::uint64_t home, unsigned steps) const {
    const auto nearest = static_cast<unsigned>(__builtin_ctz(steps));
    return view.buckets[bucket_at(view.n_buckets, home, nearest)];
  }

  HPS_INLINE Found found_in_slot(Bucket& target, std::uint64_t word, unsigned slots) const {
    const auto slot = static_cast<unsigned>(__builtin_ctz(slots));
    const std::uint32_t number = load(target.rows[slot]);
    return {target.scores + slot, view.rows + number * row_bytes(), view.versions + number,
            sequence(word)};
  }

  // Finds a readable row.
  HPS_INLINE bool find_in(Bucket& target, std::int64_t key, std::uint64_t& word,
                          Found& result) const {
    word = load_acquire(target.word);
    const unsigned slots = match(target, key) & readable(word);
    if (__builtin_expect(slots == 0, 0)) return false;
    result = found_in_slot(target, word, slots);
    return true;
  }

  HPS_INLINE void prefetch_found(const Found& at) const {
    prefetch_row(at.row, row_bytes());
    // A row may begin anywhere in a line, unless its length is a power of two. Rows of 68 or 132
    // bytes begin at multiples of four, so that their last four bytes lie in one line.
    constexpr bool kCovered = (RowBytes & (RowBytes - 1)) == 0 || RowBytes % 64 == 4;
    if ((RowBytes == 0 || !kCovered) && row_bytes() < kPrefetchBytes)
      __builtin_prefetch(at.row + row_bytes() - 1, 0, 2);
    if (WithVersions) __builtin_prefetch(at.version);
  }

  HPS_INLINE void prefetch_home(std::size_t i, std::int64_t key) {
    homes[i % kRing] = static_cast<std::uint32_t>(home_of(key, view.n_buckets));
    __builtin_prefetch(view.buckets + homes[i % kRing], 0, kLocality);
  }

  HPS_INLINE void search_home(std::size_t i, std::int64_t key) {
    std::uint64_t word;
    Found& result = found[i % kRing];
    if (__builtin_expect(find_in(view.buckets[homes[i % kRing]], key, word, result), 1)) {
      prefetch_found(result);
      return;
    }
    result.score = nullptr;
    if (const unsigned far = reach(word)) __builtin_prefetch(&bucket(homes[i % kRing], far));
  }

  HPS_INLINE void search_beyond_home(std::size_t i, std::int64_t key) {
    Found& result = found[i % kRing];
    if (__builtin_expect(result.score == nullptr, 0))
      find_beyond_home(key, homes[i % kRing], result);
  }

  __attribute__((noinline)) void find_beyond_home(std::int64_t key, std::uint32_t home,
                                                  Found& result) {
    unsigned steps = reach(load_acquire(view.buckets[home].word));
    for (; steps != 0; steps &= steps - 1) {
      std::uint64_t word;
      if (!find_in(bucket(home, steps), key, word, result)) continue;
      prefetch_found(result);
      return;
    }
  }

  HPS_INLINE void copy(const Found& at, std::uint8_t* out, std::uint64_t& version) const {
    if (WithVersions) version = load(*at.version);
    copy_from_shared(out, at.row, row_bytes());
  }

  HPS_INLINE static bool is_unchanged(const Found& at) {
    acquire_fence();
    return sequence(load(bucket_of(at).word)) == at.sequence;
  }

  // Copies the found row, and retries if it changed during the copy.
  HPS_INLINE Outcome copy_validated(const Found& at, std::int64_t key, std::uint8_t* out,
                                    std::uint64_t& version) {
    if (__builtin_expect(at.score != nullptr, 1)) {
      copy(at, out, version);
      if (__builtin_expect(is_unchanged(at), 1)) {
        touch(*at.score);
        return Outcome::kRow;
      }
    }
    return retry(key, out, version);
  }

  // Slow path for keys that the pipeline did not find: the key is absent or deleted, or its row is
  // being written.
  __attribute__((noinline)) Outcome retry(std::int64_t key, std::uint8_t* out,
                                          std::uint64_t& version) {
    for (unsigned tries = 0; tries < kRetries; ++tries) {
      Found at;
      std::uint64_t word;
      if (!find_occupied(key, word, at)) return Outcome::kMissing;
      const auto slot = static_cast<unsigned>(at.score - bucket_of(at).scores);
      if ((word & busy_bit(slot)) == 0) {
        const bool deleted = is_tombstone(word, slot);
        if (deleted) {
          version = load(*at.version);
        } else {
          copy(at, out, version);
        }
        if (is_unchanged(at)) {
          touch(*at.score);
          return deleted ? Outcome::kTombstone : Outcome::kRow;
        }
      }
      cpu_relax();
    }
    return Outcome::kMissing;
  }

  bool find_occupied(std::int64_t key, std::uint64_t& word, Found& result) const {
    const auto home = static_cast<std::uint32_t>(home_of(key, view.n_buckets));
    unsigned steps = reach(load_acquire(view.buckets[home].word)) | 1;
    for (; steps != 0; steps &= steps - 1) {
      Bucket& target = bucket(home, steps);
      word = load_acquire(target.word);
      const unsigned slots = match(target, key) & occupied(word);
      if (slots == 0) continue;
      result = found_in_slot(target, word, slots);
      return true;
    }
    return false;
  }

  // Calls visit(i, outcome, version) for i in [0, n), in order, until it returns false.
  template <typename KeyAt, typename OutAt, typename Visit>
  HPS_INLINE void look_up(std::size_t n, KeyAt key_at, OutAt out_at, Visit visit) {
    find_all(n, key_at, [&](std::size_t i, const Found& at) HPS_INLINE_CALLBACK {
      std::uint64_t version = 0;
      const Outcome outcome = copy_validated(at, key_at(i), out_at(i), version);
      return visit(i, outcome, version);
    });
  }

  // Calls use(i, found) for i in [0, n), in order, until it returns false.
  template <typename KeyAt, typename Use>
  HPS_INLINE void find_all(std::size_t n, KeyAt key_at, Use use) {
    std::size_t i = 0;
    for (; i < n && i < 2 * kAhead; ++i) prefetch_home(i, key_at(i));
    for (i = 0; i < n && i < kAhead; ++i) search_home(i, key_at(i));
    for (i = 0; i < n && i < kAhead / 2; ++i) search_beyond_home(i, key_at(i));
    for (i = 0; i < n; ++i) {
      if (i + 2 * kAhead < n) prefetch_home(i + 2 * kAhead, key_at(i + 2 * kAhead));
      if (i + kAhead < n) search_home(i + kAhead, key_at(i + kAhead));
      if (i + kAhead / 2 < n) search_beyond_home(i + kAhead / 2, key_at(i + kAhead / 2));
      if (!use(i, found[i % kRing])) return;
    }
  }
};

}  // namespace
}  // namespace HPS_ISA
}  // namespace hps
