// Memory layout of a CPU cache's table: one block, addressed by offsets only, so that processes can
// share it.
//
//   Header | buckets, a cache line each | versions | rows
//
// In a file, memory of versions and rows may be allocated as rows arrive; row numbers are first
// used in order, so it is that of the first ones.
//
// A row is row_bytes bytes without meaning here. Only pooling interprets them (row_format.hpp), and
// Python, which knows a table's format and dim.
//
// A bucket has four slots, each with a key, a row number and a score, and a word that marks the
// occupied slots; a search touches nothing else. Rows and their versions are numbered and stored
// densely. A key's hash gives its home bucket. A key whose home is full goes to the next bucket of
// the home's probe sequence that has a free slot, and a bit of the home's reach marks that step. So
// a search, also for an absent key, touches only buckets that can hold its key. No key value is
// reserved.
//
// The number of buckets is chosen for 60 % occupancy, which costs 16 / 0.6 bytes per row; a table
// takes 1.13 times the size of its keys, versions and rows of 128 bytes, 1.04 times with rows of
// 512. Then 93 of 100 keys are in their home, 98 within one step. Alternatives measured:
//   - Rows inside their slots avoid the wait for a second page of memory, but must be 91 % full to
//     cost as little; then a sixth of the keys is outside its home, and a batch of 26,624 keys took
//     37 ns per key instead of 29 (4 million rows of 128 bytes).
//   - Buckets of six slots, 90 % full, with separate rows: 37 ns as well.
//   - Blocks of 10 buckets and 25 rows, a page each, avoid the wait at no cost in memory, but took
//     1.0 to 1.2 times as long (5 million rows).
//
// *Reading in parallel to the writer* (a sequence lock per bucket). A bucket's word holds, in one
// atomic value, its sequence number and the state of its slots. There is one writer at a time.
//   - The writer takes a slot out of use (clears occupied, or sets busy to replace a row under the
//     same key) with a new sequence number, then executes a release fence. Only then it changes the
//     slot's key, row number, version and row. Last, it publishes the word with another sequence
//     number (release). A row number is reused only after its former slot was taken out of use.
//   - The reader loads the word (acquire), searches the key among the occupied slots, copies row
//     and version, executes an acquire fence, and loads the word again. If it read a single byte
//     that was written after the slot was taken out of use, the two fences guarantee that it sees
//     the new sequence number, and it discards the copy. An equal number means that the copy is the
//     row that was published with that key. The number has 32 bits: a reader would miss a change
//     only if it slept through exactly 2^32 changes of its bucket.
//   - A reader retries at most kRetries times, then reports the key as missing, which a cache may
//     do at any time. So no reader ever waits for a writer that sleeps or was killed.
// This also holds where loads and stores are reordered (ARM): the acquire fence keeps the copying
// loads before the second load of the word, the release fence keeps the writer's stores after the
// sequence number that announces them, and the word's acquire load pairs with its release store for
// the slot's contents. Nothing else is relied on. Readers write only scores, one byte each, whose
// loss or misplacement is harmless.
//
// *A writer that dies* has at most one row number that is in no slot; the header records it, and
// the slot it left or was to enter. A slot changes by one store of its bucket's word, so the next
// writer can determine which steps were done: CacheTable::repair.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hps {

enum class Eviction : std::uint8_t { kLru = 0, kLfu = 1, kRandom = 2, kFifo = 3 };

constexpr unsigned kSlots = 4;
constexpr unsigned kAllSlots = (1U << kSlots) - 1;
constexpr unsigned kSteps = 16;  // the length of a probe sequence; its first bucket is the home
constexpr unsigned kRetries = 64;
// The share of slots that is occupied in a full table, in percent.
constexpr std::uint64_t kLoadPercent = 60;
constexpr std::uint32_t kNoRow = UINT32_MAX;

struct alignas(64) Bucket {
  std::int64_t keys[kSlots];
  std::uint32_t rows[kSlots];
  std::uint64_t word;
  std::uint8_t scores[kSlots];
  std::uint8_t spare[4];
};
static_assert(sizeof(Bucket) == 64, "a bucket is a cache line");

// The fields of a bucket's word. A slot is readable if it holds a row that is not being written;
// most searches need no other bit. The key of an occupied slot is in the table, whether its row is
// readable, a tombstone (neither readable nor busy) or busy.
constexpr std::uint64_t readable_bit(unsigned slot) { return 1ULL << slot; }
constexpr std::uint64_t occupied_bit(unsigned slot) { return 1ULL << (4 + slot); }
constexpr std::uint64_t busy_bit(unsigned slot) { return 1ULL << (8 + slot); }
// A key whose home is this bucket is in the bucket at this step, from 1 to kSteps - 1.
constexpr std::uint64_t reach_bit(unsigned step) { return 1ULL << (16 + step); }
constexpr std::uint64_t kNextSequence = 1ULL << 32;
static inline unsigned readable(std::uint64_t word) { return word & kAllSlots; }
static inline unsigned occupied(std::uint64_t word) { return (word >> 4) & kAllSlots; }
// One bit per step; bit 0 is never set.
static inline unsigned reach(std::uint64_t word) { return (word >> 16) & 0xFFFF; }
static inline std::uint32_t sequence(std::uint64_t word) {
  return static_cast<std::uint32_t>(word >> 32);
}
// For an occupied slot, in the writer's view.
static inline bool is_tombstone(std::uint64_t word, unsigned slot) {
  return (word & readable_bit(slot)) == 0;
}

struct Header {
  // Set when the table is made.
  std::uint64_t magic;
  std::uint32_t layout;
  Eviction eviction;
  // Advances once per 1/64 of the capacity admitted; readers stamp scores with it. On a cache line
  // that seldom changes.
  std::uint8_t clock;
  std::uint64_t capacity;  // rows and tombstones, < 2^32 - 1
  std::uint64_t buckets;   // 1 .. 2^32 - 2
  std::uint64_t row_bytes;
  std::uint64_t buckets_at, versions_at, rows_at, bytes;  // offsets from the header

  // Changed by the writer.
  alignas(64) std::uint64_t held;  // rows, and from bit 32 on tombstones
  std::uint64_t evictions;         // rows dropped to make room
  std::uint64_t admitted;          // rows since the last tick
  std::uint64_t hand;              // the bucket at which the next search for a victim begins
  std::uint64_t swept;             // the bucket at which the next sweep of scores begins
  std::uint32_t fresh_row;         // this row and those after it were never used
  std::uint32_t free_row;          // head of the list of released rows, linked by their versions
  std::uint64_t backed_rows;       // rows before this one have memory

  // The writer's change in progress, for the repair after its death. pending_row: the row number
  // that has left its slot or is about to enter one, + 1, and from bit 40 on what it was (RowKind);
  // 0: none. pending_slot: that slot, bucket * kSlots + slot + 1. held_before: `held` before.
  std::uint64_t pending_row;
  std::uint64_t pending_slot;
  std::uint64_t held_before;
};

enum class RowKind : std::uint64_t { kNone = 0, kRow = 1, kTombstone = 2 };
// The contribution of one row or tombstone to `held`.
constexpr std::uint64_t held_as(RowKind kind) {
  return kind == RowKind::kRow ? 1 : kind == RowKind::kTombstone ? 1ULL << 32 : 0;
}

// Addresses of a table's parts in this process.
struct CacheView {
  Header* header;
  Bucket* buckets;
  std::uint64_t* versions;
  std::uint8_t* rows;
  std::uint64_t n_buckets;
  std::size_t row_bytes;
};

// A hash of which all bits depend on all bits of the key: a mixer of murmur3's form with Degski's
// constant. Not the partition hash: a node that holds the keys of one partition must use all of its
// buckets.
static inline std::uint64_t mixed(std::int64_t key) {
  std::uint64_t x = static_cast<std::uint64_t>(key);
  x ^= x >> 32;
  x *= 0xD6E8FEB86659FD93ULL;
  x ^= x >> 32;
  x *= 0xD6E8FEB86659FD93ULL;
  x ^= x >> 32;
  return x;
}

// The home bucket of `key`: a multiplication instead of a division.
static inline std::uint64_t home_of(std::int64_t key, std::uint64_t n_buckets) {
  return ((mixed(key) >> 32) * n_buckets) >> 32;
}

// The bucket at a step of the probe sequence that begins at `home`: home + 0, 1, 3, 6, 10 ...
// Neighbours first, because they share a page; farther apart later, so that full buckets do not
// cluster (with linear probing two of 200,000 keys found 16 buckets full). Tables of up to kSteps
// buckets are probed linearly.
static inline std::uint64_t bucket_at(std::uint64_t n_buckets, std::uint64_t home, unsigned step) {
  const std::uint64_t at = home + (n_buckets <= kSteps ? step : step * (step + 1) / 2);
  return __builtin_expect(at < n_buckets, 1) ? at : at % n_buckets;
}

}  // namespace hps
