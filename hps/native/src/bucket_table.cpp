#include "hps/bucket_table.hpp"

#include <cstring>

namespace hps {
namespace {

// How many keys ahead a key's first bucket is asked for: a bucket is two cache lines away in main
// memory, and this many such waits overlap.
constexpr std::size_t kAhead = 8;

inline std::int64_t find_in(const BucketTable& table, std::int64_t key, std::size_t bucket) {
  const std::size_t from = bucket * table.ways;
  for (std::size_t slot = from; slot < from + table.ways; ++slot)
    if (table.keys[slot] == key && table.states[slot] != kEmpty)
      return static_cast<std::int64_t>(slot);
  return -1;
}

inline void prefetch_bucket(const BucketTable& table, std::size_t bucket) {
  const std::size_t from = bucket * table.ways;
  __builtin_prefetch(table.keys + from);
  __builtin_prefetch(table.keys + from + table.ways / 2);
  __builtin_prefetch(table.states + from);
}

// Calls visit(i, slot of the i-th key or -1) for i in [0, n); key_at(i) yields the key.
template <typename KeyAt, typename Visit>
inline void probe(const BucketTable& table, std::size_t n, KeyAt key_at, Visit visit) {
  TwoBuckets ahead[kAhead];
  const std::size_t warm = n < kAhead ? n : kAhead;
  for (std::size_t i = 0; i < warm; ++i) {
    ahead[i] = buckets_of(key_at(i), table.buckets);
    prefetch_bucket(table, ahead[i].first);
  }
  for (std::size_t i = 0; i < n; ++i) {
    const TwoBuckets at = ahead[i % kAhead];
    if (i + kAhead < n) {
      ahead[i % kAhead] = buckets_of(key_at(i + kAhead), table.buckets);
      prefetch_bucket(table, ahead[i % kAhead].first);
    }
    visit(i, find_slot(table, key_at(i), at));
  }
}

}  // namespace

std::int64_t find_slot(const BucketTable& table, std::int64_t key, TwoBuckets at) {
  const std::int64_t slot = find_in(table, key, at.first);
  return slot >= 0 ? slot : find_in(table, key, at.second);
}

void cache_find(const BucketTable& table, const std::int64_t* keys, std::size_t n,
                std::int64_t* slots) {
  probe(
      table, n, [&](std::size_t i) { return keys[i]; },
      [&](std::size_t i, std::int64_t slot) { slots[i] = slot; });
}

std::size_t cache_fetch(const BucketTable& table, const CacheRows& rows, const std::int64_t* keys,
                        const std::int64_t* missing, std::size_t m, const CacheAnswer& answer,
                        std::int64_t* left) {
  std::size_t unanswered = 0;
  probe(
      table, m, [&](std::size_t i) { return keys[missing[i]]; },
      [&](std::size_t i, std::int64_t slot) {
        const std::int64_t at = missing[i];
        if (slot < 0 ||
            (table.states[slot] == kTombstone && rows.versions[slot] < rows.oldest_tombstone)) {
          left[unanswered++] = at;
          return;
        }
        // Most hits find the stamp up to date; not writing keeps the line clean.
        if (rows.stamps[slot] != rows.clock) rows.stamps[slot] = rows.clock;
        answer.versions[at] = rows.versions[slot];
        if (table.states[slot] == kTombstone) return;
        std::memcpy(answer.out + static_cast<std::size_t>(at) * rows.row_bytes,
                    rows.rows + static_cast<std::size_t>(slot) * rows.row_bytes, rows.row_bytes);
        answer.source[at] = answer.code;
      });
  return unanswered;
}

}  // namespace hps
