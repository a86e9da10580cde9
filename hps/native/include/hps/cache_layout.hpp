// The memory of a CPU cache's table: one block, addressed by offsets only, so that it may lie in
// memory shared by processes.
//
//   Header | buckets, a cache line each | versions | rows
//
// A row is row_bytes bytes; what they mean nobody here knows. Only pooling does (Element in
// cache_pool.cpp), and Python, where an array's dtype and dim give the bytes. Rows of int8 with a
// scale each would be rows of dim + 4 bytes here and an Element more there.
//
// A bucket has four slots, each with a key, the number of its row and a score, and a word that says
// which slots are occupied: all that a search touches. Rows and their versions are numbered and lie
// densely. A key's home bucket is told by its hash; a key that finds its home full goes to the next
// bucket of its home's sequence that has room, and the home's reach has a bit per step at which
// such keys lie, so that a search, also one in vain, touches no bucket that can't hold its key. A
// key value is never special.
//
// Buckets are made to be 60 % full, which costs 16 / 0.6 bytes a row; a table takes 1.13 times its
// keys, versions and rows of 128 bytes, 1.04 times with rows of 512. 93 of 100 keys are at home
// then, 98 within one step. Rows in the place of their slots, which would spare the waits for a
// second page of memory, must be 91 % full to cost as little; a sixth of the keys is elsewhere
// then, and a batch of 26,624 keys took 37 ns a key instead of 29 (4 million rows of 128 bytes).
// Buckets of six slots 90 % full, apart from rows, took 37 as well.
// Blocks of 10 buckets and 25 rows, a page each, spare the wait too and cost no more; they took 1.0
// to 1.2 times as long (5 million rows).
//
// *How a row is read beside the writer.* A bucket's word holds, in one atomic piece, its sequence
// number and who occupies it. There is one writer at a time.
//   - The writer takes a slot out of use (occupied off, or busy on while a row is replaced under
//     the same key) with a new sequence number; a release fence; only then it touches the slot's
//     key, row number, version and row; at last it publishes the word with another sequence number
//     (release). A row number is used again only after the slot that had it was taken out of use.
//   - The reader loads the word (acquire), looks for the key among the occupied slots, copies row
//     and version, an acquire fence, and loads the word again. Had it read a single byte that was
//     written after the slot was taken out of use, then by the two fences it sees the new sequence
//     number, and throws the copy away. An equal number means that the copy is the row that was
//     published with that key. The number has 32 bits: to be fooled a reader would have to sleep
//     through exactly 2^32 changes of its bucket.
//   - A reader tries again at most kRetries times, then reports the key as missing, which a cache
//     may do at any time. So no reader ever waits for a writer that sleeps or was killed.
// This holds where loads and stores are reordered, too (ARM): an acquire fence keeps the copying
// loads before the second look at the word, a release fence the writer's stores behind the sequence
// number that announces them, and the word's acquire load pairs with its release store for what
// lies in the slot. Nothing else is relied on. Readers write nothing but scores, one byte each,
// whose loss or misplacement is harmless.
//
// *A writer that dies* has at most one row number in its hand, and the header says which, and which
// slot it was at. A slot changes in one store of its bucket's word, so whoever takes over can tell
// which steps were done: CacheTable::mend.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hps {

enum class Eviction : std::uint8_t { kLru = 0, kLfu = 1, kRandom = 2, kFifo = 3 };

constexpr unsigned kSlots = 4;
constexpr unsigned kAllSlots = (1U << kSlots) - 1;
constexpr unsigned kSteps = 16;  // a key is in one of so many buckets, its home the first
constexpr unsigned kRetries = 64;
// Buckets are made for this share of their slots to be used, in percent.
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

// The parts of a bucket's word. A slot is readable when it holds a row and is not being written to;
// that is all that most searches must know. The key of an occupied slot is in the table, be its row
// readable, a tombstone (neither readable nor busy) or busy.
constexpr std::uint64_t readable_bit(unsigned slot) { return 1ULL << slot; }
constexpr std::uint64_t occupied_bit(unsigned slot) { return 1ULL << (4 + slot); }
constexpr std::uint64_t busy_bit(unsigned slot) { return 1ULL << (8 + slot); }
// A key whose home is here lies at this step, from 1 to kSteps - 1.
constexpr std::uint64_t reach_bit(unsigned step) { return 1ULL << (16 + step); }
constexpr std::uint64_t kNextSequence = 1ULL << 32;
static inline unsigned readable(std::uint64_t word) { return word & kAllSlots; }
static inline unsigned occupied(std::uint64_t word) { return (word >> 4) & kAllSlots; }
// A bit per step; that of 0 is never set.
static inline unsigned reach(std::uint64_t word) { return (word >> 16) & 0xFFFF; }
static inline std::uint32_t sequence(std::uint64_t word) {
  return static_cast<std::uint32_t>(word >> 32);
}
// Of an occupied slot, as the writer sees it.
static inline bool is_tombstone(std::uint64_t word, unsigned slot) {
  return (word & readable_bit(slot)) == 0;
}

struct Header {
  // Set when the table is made.
  std::uint64_t magic;
  std::uint32_t layout;
  Eviction eviction;
  // Ticks once per 1/64 of the capacity admitted; readers stamp with it. On a line that seldom
  // changes.
  std::uint8_t clock;
  std::uint64_t capacity;  // rows and tombstones, < 2^32 - 1
  std::uint64_t buckets;   // 1 .. 2^32 - 2
  std::uint64_t row_bytes;
  std::uint64_t buckets_at, versions_at, rows_at, bytes;  // offsets from the header

  // Changed by the writer.
  alignas(64) std::uint64_t held;  // rows, and from bit 32 on tombstones
  std::uint64_t evictions;         // rows dropped to make room
  std::uint64_t admitted;          // rows since the last tick
  std::uint64_t hand;              // the bucket at which the next victim is looked for
  std::uint64_t swept;             // the bucket at which the next sweep of scores begins
  std::uint32_t fresh_row;         // this row and those after it were never used
  std::uint32_t free_row;          // head of the list of rows given back, linked by their versions

  // What the writer is at, for whoever takes over from one that died: the row number that has left
  // its slot or is to get into one, + 1, and from bit 40 on what it was (RowKind); 0: nothing. Then
  // that slot, bucket * kSlots + slot + 1, and `held` as it was before.
  std::uint64_t at_hand;
  std::uint64_t writing;
  std::uint64_t held_before;
};

enum class RowKind : std::uint64_t { kNone = 0, kRow = 1, kTombstone = 2 };
// What one of a kind adds to `held`.
constexpr std::uint64_t held_as(RowKind kind) {
  return kind == RowKind::kRow ? 1 : kind == RowKind::kTombstone ? 1ULL << 32 : 0;
}

// Where the parts of a table lie in this process.
struct CacheView {
  Header* header;
  Bucket* buckets;
  std::uint64_t* versions;
  std::uint8_t* rows;
  std::uint64_t n_buckets;
  std::size_t row_bytes;
};

// The home bucket of `key`: a mixer by murmur3's pattern with Degski's constant, then a
// multiplication instead of a division. Not the partition hash: a node that holds the keys of one
// partition must use all of its buckets.
static inline std::uint64_t home_of(std::int64_t key, std::uint64_t n_buckets) {
  std::uint64_t x = static_cast<std::uint64_t>(key);
  x ^= x >> 32;
  x *= 0xD6E8FEB86659FD93ULL;
  x ^= x >> 32;
  x *= 0xD6E8FEB86659FD93ULL;
  x ^= x >> 32;
  return ((x >> 32) * n_buckets) >> 32;
}

// The bucket at a step of the sequence that begins at `home`: home + 0, 1, 3, 6, 10 ... Neighbours
// first, because they share a page; wider apart later, lest full buckets gather (one by one, two of
// 200,000 keys found 16 buckets full). Few buckets are gone through one by one.
static inline std::uint64_t bucket_at(std::uint64_t n_buckets, std::uint64_t home, unsigned step) {
  const std::uint64_t at = home + (n_buckets <= kSteps ? step : step * (step + 1) / 2);
  return __builtin_expect(at < n_buckets, 1) ? at : at % n_buckets;
}

}  // namespace hps
