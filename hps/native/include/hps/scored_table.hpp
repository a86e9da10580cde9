// The table of hps.table on a CPU: rows with 64-bit scores by key, in buckets. NumPy twin:
// hps/native/twin_scored.py. CacheTable (cache_table.hpp) is the other table here: it has one
// writer, 8-bit scores and versions, and drops rows as a cache may; here every write counts.
//
//   buckets | rows
//
// *Buckets.* A key has one bucket, and may be in any of its 128 slots, as in HierarchicalKV
// (https://github.com/NVIDIA-Merlin/HierarchicalKV): every operation on a key is one bucket's, a
// full bucket evicts the lowest of 128 scores, and a table of random keys loses its first rows
// at a load factor of some 0.7. Smaller buckets of one choice would lose more: a table that is
// offered as many keys as it has slots keeps 96.5 % of them, but 95 % with 64 slots, 90 % with
// 16. A bucket's first line has its word and a bit for each occupied slot; two lines have an
// 8-bit digest of each slot's key. A new key takes the first free slot of its home half, a bit
// of its hash, else of the other half, so up to three quarters full most searches read one of
// the two. Keys and scores follow. A search compares keys only where digests are equal: with the
// key itself, and with one other key in four searches of a full half. The row of a slot has the
// slot's number: there is no list of free rows, and a search can prefetch a row before it has
// the key.
//
// *Doubling.* Bucket b of n becomes buckets b and b + n, by one more bit of the hash: keys move
// to buckets that were empty, and nothing can be evicted. Both arrays are address space for the
// most buckets; the system gives memory to pages as they are first written. So rows and buckets
// keep their addresses, and growth needs memory for the new half alone.
//
// *Threads.* Any number of threads may read and write.
//   - A gate: batches hold it shared; doubling, clear and set_max_buckets alone. A thread that
//     waits to be alone keeps new batches out, so that overlapping ones cannot starve it.
//   - A lock per bucket, for writes: bit 0 of the word. A write changes one key under one lock, so
//     locks are never nested and cannot deadlock. Critical sections are short (a search and a copy
//     of a row); a waiting thread spins, then yields its time slice.
//   - Readers take no lock and write nothing (a sequence lock, as in cache_layout.hpp): a writer
//     makes the word odd, executes a release fence, changes the slot and stores the next even
//     word (release). A reader loads the word (acquire), copies row and score, executes an acquire
//     fence and loads the word again; if it differs, it discards the copy. After kReadTries
//     attempts it takes the lock, which bounds its work. The word has 64 bits and does not repeat.
// One writer at a time, as in CacheTable, would need no bucket locks, but the table's users are
// trainers, whose threads all write; locks striped over buckets would be as many cache lines
// more. The bucket's word is on the line that a write reads anyway.
//
// Rows are copied to a buffer, and to the caller once they are validated: the caller's row of a
// missing key must not change.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>

#include "hps/memory.hpp"

namespace hps {

constexpr unsigned kWays = 128;  // slots of a bucket
constexpr std::uint64_t kMostBuckets = UINT32_MAX;
constexpr unsigned kMostDoublings = 24;

struct alignas(64) ScoredBucket {
  std::uint64_t word;  // odd: locked; else it changes with each write
  std::uint64_t occupied[kWays / 64];
  std::uint64_t spilled;  // bit h: keys of home half h may be in the other half
  std::uint64_t spare[4];
  std::uint64_t digests[kWays / 8];  // a byte per slot
  std::int64_t keys[kWays];
  std::uint64_t scores[kWays];
};
static_assert(sizeof(ScoredBucket) == 35 * 64, "3 lines, 16 of keys, 16 of scores");

// See twin_scored.ScoreRule.
enum class ScoreRule : std::uint8_t { kKeep, kBase, kAdd, kEpochAdd, kGiven };
// See twin_scored.Write.
enum class ScoredWrite : std::uint8_t { kInsert, kFindOrInsert, kAssign, kAccumulate };
// Adds the elements of a row to those of another.
using AddRows = void (*)(std::uint8_t* to, const std::uint8_t* from, std::size_t row_bytes);

struct ScoredBatch {
  ScoredWrite operation;
  const std::int64_t* keys;
  std::size_t n;
  std::uint8_t* rows;  // [n][row_bytes]; written by kFindOrInsert alone; null with kAssign: kept
  const bool* accumulate;  // per key, for kAccumulate
  AddRows add;             // for kAccumulate
  ScoreRule rule;
  std::uint64_t base;
  const std::uint64_t* scores;  // per key, or null: 1 each
};

// Arrays with space for one entry per key, and the number of entries.
struct EvictedRows {
  std::int64_t* keys;
  std::uint64_t* scores;
  std::uint8_t* rows;
  std::size_t n;
};

// Admits many threads, or one alone. One that waits to be alone keeps later ones out.
class Gate {
 public:
  void enter() {
    if (closing_.load(std::memory_order_relaxed)) const std::lock_guard<std::mutex> turn(closer_);
    inside_.lock_shared();
  }
  void leave() { inside_.unlock_shared(); }
  void close() {
    closer_.lock();
    closing_.store(true, std::memory_order_relaxed);
    inside_.lock();
  }
  void open() {
    inside_.unlock();
    closing_.store(false, std::memory_order_relaxed);
    closer_.unlock();
  }
  // Whether a thread is, or waits to be, alone.
  bool is_closed() const { return closing_.load(std::memory_order_relaxed); }

 private:
  std::atomic<bool> closing_{false};
  std::mutex closer_;
  std::shared_mutex inside_;
};

// Thread-safe. Batches apply to their keys in order, each key atomically.
class ScoredTable {
 public:
  // Throws std::invalid_argument if a size is out of range, std::bad_alloc if the system refuses
  // address space for `max_buckets`.
  ScoredTable(std::uint64_t buckets, std::uint64_t max_buckets, std::size_t row_bytes);

  // The bytes of `buckets` with their rows.
  static std::uint64_t bytes_for(std::uint64_t buckets, std::size_t row_bytes);

  // Sets found[i], and copies the row and score of each key found; `rows` and `scores` may be null.
  void find(const std::int64_t* keys, std::size_t n, std::uint8_t* rows, std::uint64_t* scores,
            bool* found) const;
  // Writes the number of each key's row, or -1.
  void find_rows(const std::int64_t* keys, std::size_t n, std::int64_t* numbers) const;
  // Copies keys, scores and, unless null, rows of the occupied slots in [first, first + n); returns
  // their number. The arrays have space for n.
  std::size_t export_slots(std::uint64_t first, std::uint64_t n, std::int64_t* keys,
                           std::uint64_t* scores, std::uint8_t* rows) const;

  // Sets found[i] to whether the table had the key before; appends to `evicted` unless it is null.
  void write(const ScoredBatch& batch, bool* found, EvictedRows* evicted);
  // Erases keys; with `scores`, those with the score. Sets erased[i].
  void erase(const std::int64_t* keys, std::size_t n, const std::uint64_t* scores, bool* erased);

  void clear();
  // Doubles up to `buckets`. Throws std::invalid_argument if that needs more than max_buckets.
  void reserve(std::uint64_t buckets);
  // Throws std::invalid_argument if it is less than buckets, std::bad_alloc. Moves the arrays if
  // they lack address space; `rows` keeps the former ones valid.
  void set_max_buckets(std::uint64_t max_buckets);

  std::uint64_t size() const { return size_.load(std::memory_order_relaxed); }
  std::uint64_t buckets() const { return buckets_.load(std::memory_order_relaxed); }
  std::uint64_t max_buckets() const { return max_buckets_.load(std::memory_order_relaxed); }
  std::size_t row_bytes() const { return row_bytes_; }
  bool is_closed() const { return gate_.is_closed(); }
  // The array of rows by number, and how many it has.
  std::pair<std::shared_ptr<Memory>, std::uint64_t> rows() const;

 private:
  struct Probe {
    ScoredBucket* bucket;
    std::uint64_t number;  // of its first row
    unsigned home;         // the half of the bucket where the key is placed if it has a free slot
    std::uint8_t digest;
  };

  Probe probe_of(std::int64_t key) const;
  std::uint8_t* row_at(std::uint64_t number) const { return rows_ + number * row_bytes_; }
  // Calls use(i, probe) for every key in order, and prefetches what it will access.
  template <bool Writes, typename Use>
  void for_each_key(const std::int64_t* keys, std::size_t n, bool with_scores, bool with_rows,
                    const Use& use) const;
  unsigned read(const Probe& probe, std::int64_t key, std::uint8_t* row,
                std::uint64_t* score) const;
  void change(const ScoredBatch& batch, std::size_t i, const Probe& probe, unsigned slot,
              std::uint8_t* buffer);
  bool place(const ScoredBatch& batch, std::size_t i, const Probe& probe, EvictedRows* evicted);
  void split();
  void allocate(std::uint64_t max_buckets);

  const std::size_t row_bytes_;
  const std::uint64_t base_;  // the first number of buckets
  mutable Gate gate_;
  // Changed with the gate closed; read with it entered, and the counts by anybody.
  std::atomic<std::uint64_t> buckets_, max_buckets_;
  std::uint64_t allocated_ = 0;  // buckets that the arrays have address space for
  std::shared_ptr<Memory> bucket_memory_, row_memory_;
  ScoredBucket* table_ = nullptr;
  std::uint8_t* rows_ = nullptr;

  alignas(64) std::atomic<std::uint64_t> size_{0};
};

}  // namespace hps
