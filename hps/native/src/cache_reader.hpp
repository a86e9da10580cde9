// A batch goes through key by key, in four steps, so that the waits for memory overlap: ask for the
// key's home bucket; look for the key there and ask for its row (or for the next bucket); look
// further if it is not at home; copy the row. Between a step of a key and its next one lie the
// steps of some other keys.
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

// So many keys lie between asking for a row and copying it, and as many between asking for its
// bucket and looking into it; 12 and 31 took about as long. A step for sixteen keys at a time, then
// the next step for them, took 1.1 times as long.
constexpr std::size_t kAhead = 24;
constexpr std::size_t kRing = 64;
static_assert(kRing > 2 * kAhead, "no key may take the place of one that is not yet copied");
// Of a longer row its first bytes are asked for; the processor sees the rest coming.
constexpr std::size_t kPrefetchBytes = 1024;

// A processor waits for few lines of the first-level cache at a time, 10 to 16, but some for three
// times as many of the second: rows of 512 bytes asked for to the first took 1.35 times as long on
// one and 0.94 to 0.99 times on another that waits for no more of the second; of 128 bytes as long
// on the one, 0.94 times on the other.
constexpr std::size_t kToFirstLevel = 256;

HPS_INLINE void prefetch_row(const std::uint8_t* row, std::size_t bytes) {
  const std::size_t n = bytes < kPrefetchBytes ? bytes : kPrefetchBytes;
  if (bytes <= kToFirstLevel) {
    for (std::size_t i = 0; i < n; i += 64) __builtin_prefetch(row + i);
  } else {
    for (std::size_t i = 0; i < n; i += 64) __builtin_prefetch(row + i, 0, 2);
  }
}

// One call's work. RowBytes: known when compiled, or 0.
template <std::size_t RowBytes, bool WithVersions>
struct Reader {
  const CacheView view;
  Toucher touch;
  // By position modulo kRing; left as they are, because a short call uses few.
  Found found[kRing];
  std::uint32_t homes[kRing];

  explicit Reader(const CacheView& of) : view(of), touch(of) {}

  HPS_INLINE std::size_t row_bytes() const { return RowBytes != 0 ? RowBytes : view.row_bytes; }

  HPS_INLINE Bucket& bucket(std::uint64_t home, unsigned steps) const {
    const auto nearest = static_cast<unsigned>(__builtin_ctz(steps));
    return view.buckets[bucket_at(view.n_buckets, home, nearest)];
  }

  HPS_INLINE Found at_slot(Bucket& there, std::uint64_t word, unsigned slots) const {
    const auto slot = static_cast<unsigned>(__builtin_ctz(slots));
    const std::uint32_t number = load(there.rows[slot]);
    return {there.scores + slot, view.rows + number * row_bytes(), view.versions + number,
            sequence(word)};
  }

  // Finds a readable row.
  HPS_INLINE bool find_in(Bucket& there, std::int64_t key, std::uint64_t& word,
                          Found& result) const {
    word = load_acquire(there.word);
    const unsigned slots = match(there, key) & readable(word);
    if (__builtin_expect(slots == 0, 0)) return false;
    result = at_slot(there, word, slots);
    return true;
  }

  HPS_INLINE void ask_for_row(const Found& at) const {
    prefetch_row(at.row, row_bytes());
    // A row may begin anywhere in a line.
    if (RowBytes == 0 && row_bytes() < kPrefetchBytes)
      __builtin_prefetch(at.row + row_bytes() - 1, 0, 2);
    if (WithVersions) __builtin_prefetch(at.version);
  }

  HPS_INLINE void ask_for_home(std::size_t i, std::int64_t key) {
    homes[i % kRing] = static_cast<std::uint32_t>(home_of(key, view.n_buckets));
    __builtin_prefetch(view.buckets + homes[i % kRing]);
  }

  HPS_INLINE void look_at_home(std::size_t i, std::int64_t key) {
    std::uint64_t word;
    Found& result = found[i % kRing];
    if (__builtin_expect(find_in(view.buckets[homes[i % kRing]], key, word, result), 1)) {
      ask_for_row(result);
      return;
    }
    result.score = nullptr;
    if (const unsigned far = reach(word)) __builtin_prefetch(&bucket(homes[i % kRing], far));
  }

  HPS_INLINE void look_beyond(std::size_t i, std::int64_t key) {
    Found& result = found[i % kRing];
    if (__builtin_expect(result.score == nullptr, 0)) find_beyond(key, homes[i % kRing], result);
  }

  __attribute__((noinline)) void find_beyond(std::int64_t key, std::uint32_t home, Found& result) {
    unsigned steps = reach(load_acquire(view.buckets[home].word));
    for (; steps != 0; steps &= steps - 1) {
      std::uint64_t word;
      if (!find_in(bucket(home, steps), key, word, result)) continue;
      ask_for_row(result);
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
          version = load(*at.version);
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
    const auto home = static_cast<std::uint32_t>(home_of(key, view.n_buckets));
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
    find_all(n, key_at, [&](std::size_t i, const Found& at) HPS_FLAT {
      std::uint64_t version = 0;
      const Outcome outcome = take(at, key_at(i), out_at(i), version);
      return visit(i, outcome, version);
    });
  }

  // Calls use(i, found) for i in [0, n), in order, until it returns false.
  template <typename KeyAt, typename Use>
  HPS_INLINE void find_all(std::size_t n, KeyAt key_at, Use use) {
    std::size_t i = 0;
    for (; i < n && i < 2 * kAhead; ++i) ask_for_home(i, key_at(i));
    for (i = 0; i < n && i < kAhead; ++i) look_at_home(i, key_at(i));
    for (i = 0; i < n && i < kAhead / 2; ++i) look_beyond(i, key_at(i));
    for (i = 0; i < n; ++i) {
      if (i + 2 * kAhead < n) ask_for_home(i + 2 * kAhead, key_at(i + 2 * kAhead));
      if (i + kAhead < n) look_at_home(i + kAhead, key_at(i + kAhead));
      if (i + kAhead / 2 < n) look_beyond(i + kAhead / 2, key_at(i + kAhead / 2));
      if (!use(i, found[i % kRing])) return;
    }
  }
};

}  // namespace
}  // namespace HPS_ISA
}  // namespace hps
