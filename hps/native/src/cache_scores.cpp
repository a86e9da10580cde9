// Scores: which rows are hot, and which are evicted.
#include <algorithm>

#include "hps/cache_table.hpp"
#include "hps/relaxed.hpp"

namespace hps {
namespace {

constexpr std::uint64_t kTicksPerTurnover = 64;
// A tick sweeps one of so many parts of the buckets, so each score is swept every 16 ticks.
constexpr std::uint64_t kSweepShare = 16;
// A stamp is one byte: a sweep limits its age to this, before the byte wraps around.
constexpr std::uint8_t kOldest = 200;
// The initial age of a tombstone: older than any row can be, but young enough for a sweep to limit
// it before the byte wraps around: 255 - kSweepShare.
constexpr std::uint8_t kTombstoneAge = 239;
// LFU: the initial score of a row, and the amount that a sweep subtracts: the score falls by 16 per
// turnover, which halves the use count.
constexpr std::uint8_t kFirstUses = 32;
constexpr std::uint8_t kDecay = 4;

}  // namespace

// The slot with the highest coldness is evicted first. Under FIFO stamps are never renewed.
unsigned CacheTable::coldness(Slot at, std::uint64_t word) const {
  const Header& header = *view_.header;
  const std::uint8_t score = load(bucket(at).scores[at.slot]);
  switch (header.eviction) {
    case Eviction::kLfu:
      return UINT8_MAX - score;
    case Eviction::kRandom: {
      if (is_tombstone(word, at.slot)) return UINT8_MAX;
      const auto seed =
          static_cast<std::int64_t>((header.evictions << 32) + at.bucket * kSlots + at.slot);
      return static_cast<unsigned>(home_of(seed, UINT8_MAX));
    }
    default:
      return static_cast<std::uint8_t>(header.clock - score);
  }
}

std::uint8_t CacheTable::initial_score(bool is_tombstone) const {
  const std::uint8_t clock = view_.header->clock;
  if (view_.header->eviction == Eviction::kLfu) return is_tombstone ? 0 : kFirstUses;
  return is_tombstone ? static_cast<std::uint8_t>(clock - kTombstoneAge) : clock;
}

// Counts an admission; periodically advances the clock and sweeps a part of the scores.
void CacheTable::tick() {
  Header& header = *view_.header;
  if (++header.admitted * kTicksPerTurnover < header.capacity) return;
  header.admitted = 0;
  store(header.clock, static_cast<std::uint8_t>(header.clock + 1));
  const std::uint64_t buckets = (view_.n_buckets + kSweepShare - 1) / kSweepShare;
  const std::uint64_t end = std::min(view_.n_buckets, header.swept + buckets);
  for (std::uint64_t number = header.swept; number < end; ++number) {
    for (std::uint8_t& score : view_.buckets[number].scores) {
      const std::uint8_t now = load(score);
      if (header.eviction == Eviction::kLfu)
        store(score, static_cast<std::uint8_t>(now < kDecay ? 0 : now - kDecay));
      else if (static_cast<std::uint8_t>(header.clock - now) > kOldest)
        store(score, static_cast<std::uint8_t>(header.clock - kOldest));
    }
  }
  header.swept = end < view_.n_buckets ? end : 0;
}

std::vector<HotKey> CacheTable::top_k(std::size_t n) const {
  std::vector<HotKey> hot;
  const std::uint8_t clock = load(view_.header->clock);
  for (std::uint64_t number = 0; number < view_.n_buckets; ++number) {
    const Bucket& bucket = view_.buckets[number];
    const std::uint64_t word = load_acquire(bucket.word);
    for (unsigned slots = readable(word); slots != 0; slots &= slots - 1) {
      const auto slot = static_cast<unsigned>(__builtin_ctz(slots));
      const std::uint8_t score = load(bucket.scores[slot]);
      const bool counted = view_.header->eviction == Eviction::kLfu;
      const auto age = static_cast<std::uint8_t>(clock - score);
      hot.push_back(
          {load(bucket.keys[slot]), counted ? score : static_cast<std::uint8_t>(UINT8_MAX - age)});
    }
  }
  const auto hotter = [](const HotKey& a, const HotKey& b) {
    return a.score != b.score ? a.score > b.score : a.key < b.key;
  };
  const std::size_t kept = std::min(n, hot.size());
  // A partial sort takes four times as long where most rows are kept, as for a warm-up.
  const auto end = hot.begin() + static_cast<std::ptrdiff_t>(kept);
  if (kept < hot.size()) std::nth_element(hot.begin(), end, hot.end(), hotter);
  hot.resize(kept);
  std::sort(hot.begin(), hot.end(), hotter);
  return hot;
}

}  // namespace hps
