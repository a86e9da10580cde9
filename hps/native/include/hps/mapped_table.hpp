// One table of a model version, in a read-only file that is mapped into memory. mapped_format.py
// describes the file. NumPy twin: hps/native/twin_mapped.py.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "hps/bus_errors.hpp"
#include "hps/mapped_read.hpp"
#include "hps/row_reader.hpp"

namespace hps {

// Where a file's sections lie; the caller has checked it against the file's length.
struct MappedSections {
  std::uint64_t rows, record_bytes, seed, n_buckets;
  std::uint64_t records, pilots, remap, bytes;  // offsets, and the bytes to be mapped
};

// Any number of threads may call every method.
class MappedTable final : public RowReader {
 public:
  // Maps `file`, which may be closed afterwards. `parts` cover all rows. `overridden`: see
  // MappedView; outlives the table. Throws std::bad_alloc if the file cannot be mapped.
  MappedTable(int file, const MappedSections& sections, std::vector<IndexPart> parts,
              std::size_t row_bytes, std::uint64_t* overridden, const MappedKernels& read);
  ~MappedTable() override;
  MappedTable(const MappedTable&) = delete;
  MappedTable& operator=(const MappedTable&) = delete;

  const MappedView& view() const { return view_; }
  const MappedKernels& read() const { return read_; }

  // Reads of a damaged table find no row.
  bool gather(const std::int64_t* keys, std::size_t n, std::uint8_t* out) const override {
    return read_.gather(view_, keys, n, out, nullptr) == 0 && !is_damaged();
  }
  // Gathers the rows there are; writes the numbers of the other keys to left (n,), ascending, and
  // returns how many these are.
  std::size_t gather_known(const std::int64_t* keys, std::size_t n, std::uint8_t* out,
                           std::uint32_t* left) const;
  std::size_t gather_each(const std::int64_t* keys, const std::uint32_t* places, std::size_t n,
                          const EachOutput& output) const override;
  std::size_t pool(const PoolRequest& request, std::int64_t* left) const override;
  std::size_t row_bytes() const override { return view_.row_bytes; }

  // True once a page could not be read. Answers since then are not to be trusted.
  bool is_damaged() const { return damaged_.load(std::memory_order_seq_cst); }

  // Marks the records of `keys` as overridden; returns the number of keys that the table has not.
  std::size_t override_keys(const std::int64_t* keys, std::size_t n);
  void clear_overrides();
  std::uint64_t n_overridden() const;
  // The words of `overridden` for a table of `rows`.
  static std::size_t bitmap_words(std::uint64_t rows) { return 1 + (rows + 63) / 64; }

  // Reads the pages of the records at `positions` that are not in memory, side by side, and waits
  // for them. Returns their number.
  std::size_t populate(const std::int64_t* positions, std::size_t n) const;
  // Reads the file from `begin` to `end` into memory, and waits for it.
  void load(std::uint64_t begin, std::uint64_t end) const;
  // False if the first page of one of these records is not in memory.
  bool is_resident(const std::int64_t* positions, std::size_t n) const;
  // The share of the mapped pages in [begin, end) that are in memory; 1 for an empty range.
  double resident(std::uint64_t begin, std::uint64_t end) const;

 private:
  std::uint8_t* data_;
  std::size_t bytes_;
  std::vector<IndexPart> parts_;
  std::uint64_t* overridden_;
  MappedView view_;
  const MappedKernels& read_;
  std::atomic<bool> damaged_{false};
  std::optional<BusErrorGuard> guard_;
};

}  // namespace hps
