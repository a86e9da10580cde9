#include "hps/static_index.hpp"

#include <algorithm>
#include <queue>
#include <utility>
#include <vector>

namespace hps {
namespace {

constexpr std::uint32_t kFree = UINT32_MAX;
constexpr std::uint32_t kPilots = 256;
constexpr std::size_t kRecent = 16;
constexpr std::uint64_t kEvictionsPerSlot = 16;  // more: the search has failed

// The search for pilots of one part: the largest buckets first. A bucket without a pilot that leads
// to free slots takes those of the cheapest other buckets, which are placed again.
class PilotSearch {
 public:
  PilotSearch(const PartKeys& keys, std::uint8_t* pilots)
      : keys_(keys),
        pilots_(pilots),
        starts_(keys.buckets + 1),
        owners_(keys.slots, kFree),
        taken_(keys.slots / 64 + 1) {
    for (std::uint32_t i = 0; i < keys.n; ++i)
      ++starts_[reduce(keys.hashes[i], keys.n_buckets) - keys.first_bucket + 1];
    for (std::uint32_t b = 0; b < keys.buckets; ++b) {
      largest_ = std::max(largest_, starts_[b + 1]);
      starts_[b + 1] += starts_[b];
    }
    slots_.resize(largest_);
    std::fill(recent_, recent_ + kRecent, kFree);
    std::fill(pilots, pilots + keys.buckets, std::uint8_t{0});
  }

  bool run() {
    for (const std::uint32_t bucket : by_size())
      if (!place_all_from(bucket)) return false;
    return true;
  }

  const std::vector<std::uint32_t>& owners() const { return owners_; }

  std::uint32_t slot(std::uint32_t bucket, std::uint32_t key) const {
    return slot_of(keys_.hashes[key], pilots_[bucket], keys_.slots);
  }

  std::uint32_t size(std::uint32_t bucket) const { return starts_[bucket + 1] - starts_[bucket]; }
  std::uint32_t begin(std::uint32_t bucket) const { return starts_[bucket]; }

 private:
  // Buckets with keys, the largest first, then in order.
  std::vector<std::uint32_t> by_size() const {
    std::vector<std::uint32_t> ends(largest_ + 2), order;
    for (std::uint32_t b = 0; b < keys_.buckets; ++b) ++ends[largest_ - size(b) + 1];
    for (std::uint32_t i = 0; i <= largest_; ++i) ends[i + 1] += ends[i];
    order.resize(largest_ == 0 ? 0 : ends[largest_]);
    for (std::uint32_t b = 0; b < keys_.buckets; ++b)
      if (size(b) != 0) order[ends[largest_ - size(b)]++] = b;
    return order;
  }

  bool place_all_from(std::uint32_t first) {
    std::priority_queue<std::pair<std::uint32_t, std::uint32_t>> waiting;
    for (std::uint32_t bucket = first;;) {
      if (!find_free_pilot(bucket)) {
        if (!take_cheapest_pilot(bucket)) return false;
        for (std::uint32_t i = 0; i < size(bucket); ++i)
          if (const std::uint32_t other = owners_[slots_[i]]; other != kFree) {
            remove(other);
            waiting.emplace(size(other), other);
            ++evictions_;
          }
        if (evictions_ > kEvictionsPerSlot * keys_.slots) return false;
      }
      for (std::uint32_t i = 0; i < size(bucket); ++i) {
        owners_[slots_[i]] = bucket;
        taken_[slots_[i] / 64] |= 1ULL << slots_[i] % 64;
      }
      if (waiting.empty()) return true;
      bucket = waiting.top().second;
      waiting.pop();
    }
  }

  void remove(std::uint32_t bucket) {
    for (std::uint32_t key = begin(bucket); key < begin(bucket + 1); ++key) {
      const std::uint32_t at = slot(bucket, key);
      owners_[at] = kFree;
      taken_[at / 64] &= ~(1ULL << at % 64);
    }
  }

  bool are_distinct(std::uint32_t n) const {
    for (std::uint32_t i = 1; i < n; ++i)
      for (std::uint32_t j = 0; j < i; ++j)
        if (slots_[i] == slots_[j]) return false;
    return true;
  }

  // Leaves the slots of the first pilot that leads to free ones in slots_.
  bool find_free_pilot(std::uint32_t bucket) {
    const std::uint32_t n = size(bucket);
    const std::uint64_t* hashes = keys_.hashes + begin(bucket);
    for (std::uint32_t pilot = 0; pilot < kPilots; ++pilot) {
      std::uint32_t i = 0;
      for (; i < n; ++i) {
        const std::uint32_t at = slot_of(hashes[i], pilot, keys_.slots);
        if (taken_[at / 64] >> at % 64 & 1) break;
        slots_[i] = at;
      }
      if (i < n || !are_distinct(n)) continue;
      pilots_[bucket] = static_cast<std::uint8_t>(pilot);
      return true;
    }
    return false;
  }

  // Leaves the slots of the pilot whose buckets are the smallest in slots_.
  bool take_cheapest_pilot(std::uint32_t bucket) {
    const std::uint32_t n = size(bucket);
    recent_[turn_++ % kRecent] = bucket;
    random_ = random_ * 6364136223846793005ULL + 1442695040888963407ULL;
    std::uint64_t best = UINT64_MAX;
    for (std::uint32_t i = 0; i < kPilots && best > 1; ++i) {
      const auto pilot = static_cast<std::uint8_t>((random_ >> 56) + i);
      const std::uint64_t cost = cost_of(bucket, n, pilot);
      if (cost >= best) continue;
      best = cost;
      pilots_[bucket] = pilot;
    }
    if (best == UINT64_MAX) return false;
    for (std::uint32_t i = 0; i < n; ++i) slots_[i] = slot(bucket, begin(bucket) + i);
    return true;
  }

  // The sum of squares of the sizes of the buckets that a pilot would evict.
  std::uint64_t cost_of(std::uint32_t bucket, std::uint32_t n, std::uint8_t pilot) {
    std::uint64_t cost = 0;
    for (std::uint32_t i = 0; i < n; ++i) {
      slots_[i] = slot_of(keys_.hashes[begin(bucket) + i], pilot, keys_.slots);
      const std::uint32_t other = owners_[slots_[i]];
      if (other == kFree) continue;
      if (std::find(recent_, recent_ + kRecent, other) != recent_ + kRecent) return UINT64_MAX;
      cost += static_cast<std::uint64_t>(size(other)) * size(other);
    }
    return are_distinct(n) ? cost : UINT64_MAX;
  }

  const PartKeys& keys_;
  std::uint8_t* pilots_;
  std::vector<std::uint32_t> starts_;  // of the buckets' keys
  std::vector<std::uint32_t> owners_;  // the bucket that has the slot
  std::vector<std::uint64_t> taken_;   // a bit per slot
  std::vector<std::uint32_t> slots_;   // of the bucket that is being placed
  std::uint32_t largest_ = 0;
  std::uint32_t recent_[kRecent];
  std::size_t turn_ = 0;
  std::uint64_t random_ = 0, evictions_ = 0;
};

}  // namespace

bool build_part(const PartKeys& keys, std::uint8_t* pilots, std::uint32_t* positions,
                std::uint32_t* remap) {
  PilotSearch search(keys, pilots);
  if (!search.run()) return false;
  const std::vector<std::uint32_t>& owners = search.owners();
  std::uint32_t free_slot = 0;
  for (std::uint32_t slot = keys.n; slot < keys.slots; ++slot) {
    remap[slot - keys.n] = 0;
    if (owners[slot] == kFree) continue;
    while (owners[free_slot] != kFree) ++free_slot;
    remap[slot - keys.n] = free_slot++;
  }
  for (std::uint32_t bucket = 0; bucket < keys.buckets; ++bucket)
    for (std::uint32_t key = search.begin(bucket); key < search.begin(bucket + 1); ++key) {
      const std::uint32_t slot = search.slot(bucket, key);
      positions[key] = slot < keys.n ? slot : remap[slot - keys.n];
    }
  return true;
}

}  // namespace hps
