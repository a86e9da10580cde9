// One table of the CPU cache: at most `capacity` rows and tombstones by key. cache_layout.hpp
// describes the memory layout and the protocol between readers and writer. NumPy twin:
// hps/native/twin_cache.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "hps/cache_layout.hpp"
#include "hps/cache_read.hpp"
#include "hps/memory.hpp"
#include "hps/row_reader.hpp"

namespace hps {

struct CacheCounts {
  std::uint64_t rows, tombstones, evictions;
};

struct HotKey {
  std::int64_t key;
  std::uint8_t score;  // 255 is the hottest
};

// A batch to write: keys, versions and rows; without rows, tombstones.
struct CacheWrite {
  const std::int64_t* keys;
  const std::uint64_t* versions;
  const std::uint8_t* rows;  // [n][row_bytes], or null
  std::size_t n;
  std::uint64_t oldest_tombstone;  // older tombstones count as absent
  bool resident_only;
};

// Any number of threads may read in parallel; writers are serialized.
class CacheTable final : public RowReader {
 public:
  // Throws std::invalid_argument if capacity or row_bytes is out of range, std::bad_alloc if memory
  // is exhausted.
  CacheTable(std::uint64_t capacity, std::size_t row_bytes, Eviction eviction,
             const ReadKernels& read = *runnable_kernels().front(), const MemoryKind& kind = {});

  // Attaches to the existing table in `file`, which may be closed afterwards. Any process may read.
  // Before another process writes, the former writer must be dead, and `repair` must be called.
  // Throws std::invalid_argument if the file holds something else.
  CacheTable(std::size_t row_bytes, const ReadKernels& read, int file);

  // Completes or reverts the change of a writer that was killed during it, in constant time.
  // Returns false if there was none. A row that was being replaced is dropped.
  bool repair();

  // The bytes of a full table, including header and free slots.
  static std::uint64_t bytes_for(std::uint64_t capacity, std::size_t row_bytes);

  // Reads: see ReadKernels.
  bool gather(const std::int64_t* keys, std::size_t n, std::uint8_t* out) const override {
    return read_.gather(view_, keys, n, out);
  }
  std::size_t gather_each(const std::int64_t* keys, const std::uint32_t* places, std::size_t n,
                          const EachOutput& output) const override {
    return read_.gather_each(view_, keys, places, n, output);
  }
  std::size_t fetch(const std::int64_t* keys, const std::int64_t* missing, std::size_t m,
                    std::uint64_t oldest_tombstone, const FetchOutput& output,
                    std::int64_t* left) const {
    return read_.fetch(view_, keys, missing, m, oldest_tombstone, output, left);
  }
  std::size_t pool(const PoolRequest& request, std::int64_t* left) const override {
    return read_.pool(view_, request, left);
  }

  std::size_t row_bytes() const override { return view_.row_bytes; }

  // Writes key by key; a key whose version is below the one held is skipped. An absent key takes a
  // free row; in a full table the coldest row of a sample is evicted for it. An inserted row counts
  // as a use, a refreshed row and a tombstone do not.
  void write(const CacheWrite& write);
  void evict(const std::int64_t* keys, std::size_t n);
  // Evicts the rows with versions below `oldest` in `n` buckets from `first` on; returns their
  // number. Tombstones stay.
  std::size_t expire(std::uint64_t oldest, std::uint64_t first, std::uint64_t n);

  // The keys of the n hottest rows, hottest first.
  std::vector<HotKey> top_k(std::size_t n) const;
  CacheCounts counts() const;
  const Header& header() const { return *view_.header; }
  // Bytes that are allocated, or will be as the table's memory is touched.
  std::uint64_t bytes() const;

 private:
  void map_view();
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
  bool find_free_slot(std::uint64_t home, Slot& at, unsigned& step) const;
  std::uint32_t clear_slot(Slot at);
  void free_slot(Slot at);
  bool has_free_row() const;
  bool back_more_rows();
  std::uint32_t allocate_row(RowKind& before);
  void release_row(std::uint32_t row);
  static RowKind kind_at(std::uint64_t word, unsigned slot);
  void begin_change(Slot at, std::uint32_t number, RowKind before);
  void end_change(RowKind before, RowKind after);
  std::uint32_t evict_coldest(RowKind& before);
  std::uint32_t evict_coldest_near(std::uint64_t home, RowKind& before);
  unsigned find_coldest(std::uint64_t number, Slot& coldest, int& worst) const;
  std::uint32_t evict_slot(Slot at, RowKind& before);
  void write_row(std::uint32_t number, std::uint64_t version, const std::uint8_t* row);
  void tick();
  unsigned coldness(Slot at, std::uint64_t word) const;
  std::uint8_t initial_score(bool is_tombstone) const;

  Memory memory_;
  CacheView view_;
  const ReadKernels& read_;
  std::mutex writer_;
  bool is_out_of_memory_ = false;  // no more rows can be backed
};

}  // namespace hps
