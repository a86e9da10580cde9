// One table of the CPU cache: at most `capacity` rows and tombstones by key. See cache_layout.hpp
// for how they lie in memory and how readers get on beside the writer. NumPy twin:
// hps/native/twin_cache.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "hps/cache_layout.hpp"
#include "hps/cache_read.hpp"
#include "hps/memory.hpp"

namespace hps {

struct CacheCounts {
  std::uint64_t rows, tombstones, evictions;
};

struct HotKey {
  std::int64_t key;
  std::uint8_t score;  // 255 is the hottest
};

// Rows, versions and keys to be written; no rows: tombstones.
struct CacheWrite {
  const std::int64_t* keys;
  const std::uint64_t* versions;
  const std::uint8_t* rows;  // [n][row_bytes], or null
  std::size_t n;
  std::uint64_t oldest_tombstone;  // older tombstones count as not there
  bool resident_only;
};

// Any number of threads may read; those that write take turns.
class CacheTable {
 public:
  // Throws std::invalid_argument when the numbers can't be meant, std::bad_alloc for want of
  // memory.
  CacheTable(std::uint64_t capacity, std::size_t row_bytes, Eviction eviction,
             const ReadKernels& read = *runnable_kernels().front(), const MemoryKind& kind = {});

  // One that lies in `file` already, which may be closed afterwards. Whoever only reads need not be
  // the process that made it. Before anybody else writes, the writer must be dead, and `mend` be
  // called. Throws std::invalid_argument when there is something else in the file.
  CacheTable(std::size_t row_bytes, const ReadKernels& read, int file);

  // Makes good what a writer left that was killed in mid-work, in the same short time however many
  // rows there are; false when there was nothing. A row that was being replaced is dropped.
  bool mend();

  // What a table takes, head room and header included.
  static std::uint64_t bytes_for(std::uint64_t capacity, std::size_t row_bytes);

  bool gather(const std::int64_t* keys, std::size_t n, std::uint8_t* out) const {
    return read_.gather(view_, keys, n, out);
  }
  std::size_t fetch(const std::int64_t* keys, const std::int64_t* missing, std::size_t m,
                    std::uint64_t oldest_tombstone, const CacheAnswer& answer,
                    std::int64_t* left) const {
    return read_.fetch(view_, keys, missing, m, oldest_tombstone, answer, left);
  }

  std::size_t pool(const PoolAsk& ask, std::int64_t* left) const {
    return read_.pool(view_, ask, left);
  }

  // One key after the other: a key's version must be at least the one it has. A key that is not
  // there takes a free row; when the table is full the coldest of a sample makes room. A row
  // inserted counts as a use, a refresh and a tombstone do not.
  void write(const CacheWrite& write);
  void evict(const std::int64_t* keys, std::size_t n);

  // The keys of the n hottest rows, hottest first.
  std::vector<HotKey> top_k(std::size_t n) const;
  CacheCounts counts() const;
  const Header& header() const { return *view_.header; }

 private:
  void look();
  struct Slot {
    std::uint64_t bucket;
    unsigned slot;
  };

  Bucket& bucket(Slot at) const { return view_.buckets[at.bucket]; }
  std::uint64_t home(std::int64_t key) const { return home_of(key, view_.n_buckets); }
  bool find(std::int64_t key, Slot& at) const;
  void write_one(const CacheWrite& write, std::size_t i);
  void replace(Slot at, std::uint64_t version, const std::uint8_t* row);
  void admit(std::int64_t key, std::uint64_t version, const std::uint8_t* row);
  bool find_room(std::uint64_t home, Slot& at, unsigned& step) const;
  std::uint32_t drop(Slot at);
  bool has_free_row() const;
  std::uint32_t take_row(RowKind& before);
  void give_back(std::uint32_t row);
  static RowKind kind_at(std::uint64_t word, unsigned slot);
  void begin(Slot at, std::uint32_t number, RowKind before);
  void end(RowKind before, RowKind after);
  std::uint32_t make_room(RowKind& before);
  std::uint32_t make_room_near(std::uint64_t home, RowKind& before);
  unsigned find_coldest(std::uint64_t number, Slot& coldest, int& worst) const;
  std::uint32_t expel(Slot at, RowKind& before);
  void fill(std::uint32_t number, std::uint64_t version, const std::uint8_t* row);
  void tick();
  unsigned coldness(Slot at, std::uint64_t word) const;
  std::uint8_t first_score(bool is_tombstone) const;

  Memory memory_;
  CacheView view_;
  const ReadKernels& read_;
  std::mutex writer_;
};

}  // namespace hps
