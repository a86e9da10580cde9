#include "hps/bucket_table.hpp"

#include <cstring>

namespace hps {
namespace {

// How many keys ahead a key's buckets are asked for: a bucket is two cache lines away in main
// memory, and this many such waits overlap.
constexpr std::size_t kAhead = 16;
// How many keys are found before the first of their rows is read: the waits for rows overlap too.
// Of a long row its first bytes are asked for, the processor sees the rest coming.
constexpr std::size_t kBlock = 32;
constexpr std::size_t kPrefetchBytes = 256;

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

inline void prefetch_ages(const BucketTable& table, TwoBuckets at) {
  __builtin_prefetch(table.stamps + at.first * table.ways);
  __builtin_prefetch(table.states + at.first * table.ways);
  __builtin_prefetch(table.stamps + at.second * table.ways);
  __builtin_prefetch(table.states + at.second * table.ways);
}

// Calls visit(i, buckets of the i-th key) for i in [0, n); key_at(i) yields the key, and
// prefetch(buckets) is called kAhead keys before.
template <typename KeyAt, typename Prefetch, typename Visit>
inline void walk(const BucketTable& table, std::size_t n, KeyAt key_at, Prefetch prefetch,
                 Visit visit) {
  TwoBuckets ahead[kAhead];
  const std::size_t warm = n < kAhead ? n : kAhead;
  for (std::size_t i = 0; i < warm; ++i) {
    ahead[i] = buckets_of(key_at(i), table.buckets);
    prefetch(ahead[i]);
  }
  for (std::size_t i = 0; i < n; ++i) {
    const TwoBuckets at = ahead[i % kAhead];
    if (i + kAhead < n) {
      ahead[i % kAhead] = buckets_of(key_at(i + kAhead), table.buckets);
      prefetch(ahead[i % kAhead]);
    }
    visit(i, at);
  }
}

inline void prefetch_row(const BucketTable& table, std::size_t slot) {
  __builtin_prefetch(table.stamps + slot);
  const std::uint8_t* row = table.rows + slot * table.row_bytes;
  for (std::size_t at = 0; at < table.row_bytes && at < kPrefetchBytes; at += 64)
    __builtin_prefetch(row + at);
}

// Calls visit(i, slot of the i-th key or -1) for i in [0, n), in order; key_at(i) yields the key.
template <typename KeyAt, typename Visit>
inline void look_up(const BucketTable& table, std::size_t n, KeyAt key_at, Visit visit) {
  std::int64_t slots[kBlock];
  walk(
      table, n, key_at,
      [&](TwoBuckets at) {
        prefetch_bucket(table, at.first);
        prefetch_bucket(table, at.second);
      },
      [&](std::size_t i, TwoBuckets at) {
        const std::int64_t slot = find_slot(table, key_at(i), at);
        slots[i % kBlock] = slot;
        if (slot >= 0) prefetch_row(table, static_cast<std::size_t>(slot));
        if (i % kBlock == kBlock - 1 || i + 1 == n)
          for (std::size_t j = i - i % kBlock; j <= i; ++j) visit(j, slots[j % kBlock]);
      });
}

// Most hits find the stamp up to date; not writing keeps the line clean.
inline void stamp_slot(const BucketTable& table, std::int64_t slot, std::uint32_t clock) {
  if (table.stamps[slot] != clock) table.stamps[slot] = clock;
}

// A bucket as a place for a new key.
struct Place {
  std::size_t room, slot;  // empty slots; the slot with the oldest stamp
  std::uint32_t oldest;
};

inline Place place_in(const BucketTable& table, std::size_t bucket) {
  const std::size_t from = bucket * table.ways;
  Place place{0, from, table.stamps[from]};
  for (std::size_t slot = from; slot < from + table.ways; ++slot) {
    place.room += table.states[slot] == kEmpty;
    if (table.stamps[slot] < place.oldest) {
      place.oldest = table.stamps[slot];
      place.slot = slot;
    }
  }
  return place;
}

}  // namespace

std::int64_t find_slot(const BucketTable& table, std::int64_t key, TwoBuckets at) {
  const std::int64_t slot = find_in(table, key, at.first);
  return slot >= 0 ? slot : find_in(table, key, at.second);
}

void cache_find(const BucketTable& table, const std::int64_t* keys, std::size_t n,
                std::int64_t* slots) {
  walk(
      table, n, [&](std::size_t i) { return keys[i]; },
      [&](TwoBuckets at) { prefetch_bucket(table, at.first); },
      [&](std::size_t i, TwoBuckets at) { slots[i] = find_slot(table, keys[i], at); });
}

std::size_t cache_fetch(const BucketTable& table, const std::int64_t* keys,
                        const std::int64_t* missing, std::size_t m, std::uint32_t clock,
                        std::uint64_t oldest_tombstone, const CacheAnswer& answer,
                        std::int64_t* left) {
  std::size_t unanswered = 0;
  look_up(
      table, m, [&](std::size_t i) { return keys[missing[i]]; },
      [&](std::size_t i, std::int64_t slot) {
        const std::int64_t at = missing[i];
        if (slot < 0 ||
            (table.states[slot] == kTombstone && table.versions[slot] < oldest_tombstone)) {
          left[unanswered++] = at;
          return;
        }
        stamp_slot(table, slot, clock);
        answer.versions[at] = table.versions[slot];
        if (table.states[slot] == kTombstone) return;
        std::memcpy(answer.out + static_cast<std::size_t>(at) * table.row_bytes,
                    table.rows + static_cast<std::size_t>(slot) * table.row_bytes, table.row_bytes);
        answer.source[at] = answer.code;
      });
  return unanswered;
}

bool cache_gather(const BucketTable& table, const std::int64_t* keys, std::size_t n,
                  std::uint32_t clock, std::uint8_t* out) {
  bool all = true;
  // In short runs, so that little is read in vain when a key is not there.
  for (std::size_t start = 0; all && start < n; start += 4 * kBlock) {
    const std::size_t run = n - start < 4 * kBlock ? n - start : 4 * kBlock;
    look_up(
        table, run, [&](std::size_t i) { return keys[start + i]; },
        [&](std::size_t i, std::int64_t slot) {
          all = all && slot >= 0 && table.states[slot] == kRow;
          if (!all) return;
          stamp_slot(table, slot, clock);
          std::memcpy(out + (start + i) * table.row_bytes,
                      table.rows + static_cast<std::size_t>(slot) * table.row_bytes,
                      table.row_bytes);
        });
  }
  return all;
}

Displaced cache_admit(const BucketTable& table, const std::int64_t* keys,
                      const std::uint64_t* versions, const std::uint8_t* rows, std::size_t n,
                      std::uint32_t stamp) {
  Displaced displaced;
  walk(
      table, n, [&](std::size_t i) { return keys[i]; },
      [&](TwoBuckets at) { prefetch_ages(table, at); },
      [&](std::size_t i, TwoBuckets at) {
        const Place first = place_in(table, at.first), second = place_in(table, at.second);
        const bool take_second =
            second.room > first.room || (second.room == first.room && second.oldest < first.oldest);
        const std::size_t slot = take_second ? second.slot : first.slot;
        displaced.rows += table.states[slot] == kRow;
        displaced.tombstones += table.states[slot] == kTombstone;
        table.keys[slot] = keys[i];
        table.versions[slot] = versions[i];
        table.stamps[slot] = stamp;
        table.states[slot] = rows == nullptr ? kTombstone : kRow;
        if (rows != nullptr)
          std::memcpy(table.rows + slot * table.row_bytes, rows + i * table.row_bytes,
                      table.row_bytes);
      });
  return displaced;
}

}  // namespace hps
