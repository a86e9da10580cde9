// A batch goes through in blocks of keys, and a block in four steps, so that the waits for memory
// overlap: ask for the keys' home buckets; look for the keys there and ask for their rows (or for
// the next bucket); look further for those that are not at home; copy the rows. Between a step and
// the next lie the steps of other blocks.
//
// Part of cache_read.cpp and cache_pool.cpp: HPS_ISA names the instruction set this is compiled for
// (CMakeLists.txt).
#pragma once

#include "cache_find.hpp"
#include "hps/cache_layout.hpp"
#include "hps/relaxed.hpp"

#define HPS_FLAT __attribute__((always_inline))

namespace hps {
namespace HPS_ISA {
namespace {

// With rows of 128 bytes blocks of 8 took 1.14 times as long, blocks of 32 as long.
constexpr std::size_t kBlock = 16;
// Of a longer row its first bytes are asked for; the processor sees the rest coming.
constexpr std::size_t kPrefetchBytes = 1024;

// One call's work. RowBytes: known when compiled, or 0.
template <std::size_t RowBytes, bool WithVersions>
struct Reader {
  const CacheView& view;
  Toucher touch;
  // Of two blocks; left as they are, because a short call uses few.
  Found found[2 * kBlock];
  std::uint32_t homes[2 * kBlock];

  explicit Reader(const CacheView& of) : view(of), touch(of) {}

  HPS_INLINE std::size_t row_bytes() const { return RowBytes != 0 ? RowBytes : view.row_bytes; }

  HPS_INLINE Bucket& bucket(std::uint64_t home, unsigned steps) const {
    const auto nearest = static_cast<unsigned>(__builtin_ctz(steps));
    return view.buckets[bucket_at(view.n_buckets, home, nearest)];
  }

  HPS_INLINE const std::uint8_t* row_at(const Found& at) const {
    return view.rows + at.row * row_bytes();
  }

  HPS_INLINE void ask_for_row(const Found& at) const {
    const std::uint8_t* row = row_at(at);
    const std::size_t n = row_bytes() < kPrefetchBytes ? row_bytes() : kPrefetchBytes;
    for (std::size_t i = 0; i < n; i += 64) __builtin_prefetch(row + i);
    if (RowBytes == 0) __builtin_prefetch(row + n - 1);
    if (WithVersions) __builtin_prefetch(view.versions + at.row);
  }

  // The steps; `at` is the block's place in the rings, `key_at` yields its keys.
  template <typename KeyAt>
  HPS_INLINE void ask_for_homes(std::size_t at, std::size_t n, KeyAt key_at) {
    for (std::size_t i = 0; i < n; ++i)
      homes[at + i] = static_cast<std::uint32_t>(home_of(key_at(i), view.n_buckets));
    for (std::size_t i = 0; i < n; ++i) __builtin_prefetch(view.buckets + homes[at + i]);
  }

  template <typename KeyAt>
  HPS_INLINE void look_at_home(std::size_t at, std::size_t n, KeyAt key_at) {
    for (std::size_t i = 0; i < n; ++i) {
      std::uint64_t word;
      Found& result = found[at + i];
      if (__builtin_expect(find_in(view.buckets[homes[at + i]], key_at(i), word, result), 1)) {
        ask_for_row(result);
        continue;
      }
      result.score = nullptr;
      if (const unsigned far = reach(word)) __builtin_prefetch(&bucket(homes[at + i], far));
    }
  }

  template <typename KeyAt>
  HPS_INLINE void look_beyond(std::size_t at, std::size_t n, KeyAt key_at) {
    for (std::size_t i = 0; i < n; ++i) {
      if (__builtin_expect(found[at + i].score != nullptr, 1)) continue;
      find_beyond(key_at(i), homes[at + i], found[at + i]);
    }
  }

  __attribute__((noinline)) void find_beyond(std::int64_t key, std::uint64_t home, Found& result) {
    unsigned steps = reach(load_acquire(view.buckets[home].word));
    for (; steps != 0; steps &= steps - 1) {
      std::uint64_t word;
      if (!find_in(bucket(home, steps), key, word, result)) continue;
      ask_for_row(result);
      return;
    }
  }

  HPS_INLINE void copy(const Found& at, std::uint8_t* out, std::uint64_t& version) const {
    if (WithVersions) version = load(view.versions[at.row]);
    copy_from_shared(out, row_at(at), row_bytes());
  }

  HPS_INLINE static bool is_unchanged(const Found& at) {
    acquire_fence();
    return sequence(load(bucket_of(at).word)) == at.sequence;
  }

  // Copies what was found, whole.
  HPS_INLINE Outcome take(const Found& at, std::int64_t key, std::uint8_t* out,
                          std::uint64_t& version) {
    if (__builtin_expect(at.score != nullptr, 1)) {
      copy(at, out, version);
      if (__builtin_expect(is_unchanged(at), 1)) {
        touch(*at.score);
        return Outcome::kRow;
      }
    }
    return look_again(key, out, version);
  }

  // The slow way for what the steps did not find: there is no such key, it was deleted, or a
  // writer is at it.
  __attribute__((noinline)) Outcome look_again(std::int64_t key, std::uint8_t* out,
                                               std::uint64_t& version) {
    for (unsigned tries = 0; tries < kRetries; ++tries) {
      Found at;
      std::uint64_t word;
      if (!find_occupied(key, word, at)) return Outcome::kMissing;
      const auto slot = static_cast<unsigned>(at.score - bucket_of(at).scores);
      if ((word & busy_bit(slot)) == 0) {
        const bool deleted = is_tombstone(word, slot);
        if (deleted) {
          version = load(view.versions[at.row]);
        } else {
          copy(at, out, version);
        }
        if (is_unchanged(at)) {
          touch(*at.score);
          return deleted ? Outcome::kTombstone : Outcome::kRow;
        }
      }
      pause_a_little();
    }
    return Outcome::kMissing;
  }

  bool find_occupied(std::int64_t key, std::uint64_t& word, Found& result) const {
    const std::uint64_t home = home_of(key, view.n_buckets);
    unsigned steps = reach(load_acquire(view.buckets[home].word)) | 1;
    for (; steps != 0; steps &= steps - 1) {
      Bucket& there = bucket(home, steps);
      word = load_acquire(there.word);
      const unsigned slots = match(there, key) & occupied(word);
      if (slots == 0) continue;
      result = at_slot(there, word, slots);
      return true;
    }
    return false;
  }

  // Calls visit(i, outcome, version) for i in [0, n), in order, until it returns false.
  template <typename KeyAt, typename OutAt, typename Visit>
  HPS_INLINE void look_up(std::size_t n, KeyAt key_at, OutAt out_at, Visit visit) {
    const auto step = [&](std::size_t start, auto work) {
      if (start >= n) return;
      const std::size_t at = start % (2 * kBlock);
      const auto keys = [&](std::size_t i) { return key_at(start + i); };
      if (__builtin_expect(start + kBlock <= n, 1)) {
        work(at, kBlock, keys);
      } else {
        work(at, n - start, keys);
      }
    };
    const auto ask = [&](auto... block) HPS_FLAT { ask_for_homes(block...); };
    const auto look = [&](auto... block) HPS_FLAT { look_at_home(block...); };
    const auto beyond = [&](auto... block) HPS_FLAT { look_beyond(block...); };
    step(0, ask);
    step(0, look);
    step(kBlock, ask);
    step(0, beyond);
    for (std::size_t start = 0; start < n; start += kBlock) {
      step(start + kBlock, look);
      step(start + 2 * kBlock, ask);
      const std::size_t end = start + kBlock < n ? start + kBlock : n;
      for (std::size_t i = start; i < end; ++i) {
        std::uint64_t version = 0;
        const Outcome outcome = take(found[i % (2 * kBlock)], key_at(i), out_at(i), version);
        if (!visit(i, outcome, version)) return;
      }
      step(start + kBlock, beyond);
    }
  }
};

}  // namespace
}  // namespace HPS_ISA
}  // namespace hps
