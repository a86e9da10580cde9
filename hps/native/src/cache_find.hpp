// Search in one bucket. Part of cache_read.cpp and cache_pool.cpp, compiled once per HPS_ISA.
#pragma once

#include "hps/cache_layout.hpp"
#include "hps/relaxed.hpp"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#define HPS_INLINE __attribute__((always_inline)) inline

namespace hps {
namespace HPS_ISA {
namespace {

// One bit per slot whose key equals `key`, occupied or not.
HPS_INLINE unsigned match(const Bucket& bucket, std::int64_t key) {
#if defined(HPS_TSAN)
  unsigned found = 0;
  for (unsigned slot = 0; slot < kSlots; ++slot)
    found |= static_cast<unsigned>(load(bucket.keys[slot]) == key) << slot;
  return found;
#elif defined(__AVX2__)
  const __m256i equal = _mm256_cmpeq_epi64(
      _mm256_load_si256(reinterpret_cast<const __m256i*>(bucket.keys)), _mm256_set1_epi64x(key));
  return static_cast<unsigned>(_mm256_movemask_pd(_mm256_castsi256_pd(equal)));
#elif defined(__SSE2__)
  const __m128i wanted = _mm_set1_epi64x(key);
  const auto* pairs = reinterpret_cast<const __m128i*>(bucket.keys);
  const auto equal = [&](const __m128i* pair) {
    const __m128i words = _mm_cmpeq_epi32(_mm_load_si128(pair), wanted);
    const __m128i both = _mm_and_si128(words, _mm_shuffle_epi32(words, 0xB1));
    return static_cast<unsigned>(_mm_movemask_pd(_mm_castsi128_pd(both)));
  };
  return equal(pairs) | equal(pairs + 1) << 2;
#else
  unsigned found = 0;
  for (unsigned slot = 0; slot < kSlots; ++slot)
    found |= static_cast<unsigned>(bucket.keys[slot] == key) << slot;
  return found;
#endif
}

enum class Outcome { kMissing, kRow, kTombstone };

// The location of a key's row, valid for a sequence number of its bucket. A null score: the key has
// no readable row.
struct Found {
  std::uint8_t* score;  // its address also identifies bucket and slot
  const std::uint8_t* row;
  const std::uint64_t* version;
  std::uint32_t sequence;
};

HPS_INLINE Bucket& bucket_of(const Found& found) {
  return *reinterpret_cast<Bucket*>(reinterpret_cast<std::uintptr_t>(found.score) &
                                    ~std::uintptr_t{63});
}

// Whether a hit raises an LFU score, at random with probability 1 / 2^(score / 16).
HPS_INLINE bool raises(std::uint8_t score, std::uint64_t& random) {
  random ^= random << 13;
  random ^= random >> 7;
  random ^= random << 17;
  return (random & ((1ULL << (score / 16)) - 1)) == 0;
}

// Records the use of a slot. Most hits find an up-to-date stamp and write nothing, which keeps the
// cache line clean.
struct Toucher {
  Eviction eviction;
  std::uint8_t clock;
  std::uint64_t random = 0;

  explicit Toucher(const CacheView& view)
      : eviction(view.header->eviction), clock(load(view.header->clock)) {
    if (eviction != Eviction::kLfu) return;
    static thread_local std::uint64_t calls = 0;
    random = ++calls * 0x9E3779B97F4A7C15ULL;
  }

  HPS_INLINE void operator()(std::uint8_t& score) {
    if (eviction == Eviction::kLru) {
      if (load(score) != clock) store(score, clock);
    } else if (eviction == Eviction::kLfu) {
      const std::uint8_t now = load(score);
      if (now != UINT8_MAX && raises(now, random)) store(score, static_cast<std::uint8_t>(now + 1));
    }
  }
};

}  // namespace
}  // namespace HPS_ISA
}  // namespace hps
