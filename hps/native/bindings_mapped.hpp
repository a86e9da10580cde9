// The Python class MappedTable, for the files that bind functions of mapped tables.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings_table.hpp"
#include "hps/mapped_table.hpp"

using IndexParts =
    nb::ndarray<nb::ro, const std::uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

inline void check_mapped(bool fits, const char* what) {
  if (!fits) throw std::invalid_argument(what);
}

inline const hps::MappedKernels& mapped_kernels_named(const std::optional<std::string>& name) {
  for (const hps::MappedKernels* kernels : hps::runnable_mapped_kernels())
    if (!name || *name == kernels->name) return *kernels;
  throw std::invalid_argument("this machine can't run the kernels " + *name);
}

template <typename T>
nb::object array_or_none(std::unique_ptr<T[]> data, std::size_t size) {
  if (size == 0) return nb::none();
  return nb::cast(as_numpy(std::move(data), size));
}

// The parts of an index, which must cover `rows` positions: no search may leave the records.
inline std::vector<hps::IndexPart> checked_parts(const IndexParts& array, std::uint64_t rows,
                                                 std::uint64_t remap_entries) {
  check_mapped(array.shape(0) > 0 && array.shape(1) == 4, "parts must be (parts, 4)");
  std::vector<hps::IndexPart> parts(array.shape(0));
  std::uint64_t start = 0, remap = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const std::uint32_t* from = array.data() + 4 * i;
    hps::IndexPart& part = parts[i];
    part = {from[0], from[1], from[2], from[3]};
    check_mapped(part.start == start && part.keys <= part.slots && part.remap == remap,
                 "parts must cover the rows");
    start += part.keys;
    remap += part.slots - part.keys;
    // A search in an empty part must find a record too.
    if (part.keys == 0) part = {0, 1, 1, 0};
  }
  check_mapped(start == rows && remap == remap_entries, "parts must cover the rows");
  return parts;
}

class MappedTable final : public RowTable {
 public:
  MappedTable(int file, const ReadOnlyRows& like, const std::vector<std::uint64_t>& sections,
              const IndexParts& parts, std::uint64_t remap_entries, std::uint64_t version,
              std::uint8_t code, nb::object bitmap, const std::optional<std::string>& kernels,
              const FormatCode& format)
      : RowTable(like, code, format), version_(version) {
    check_mapped(sections.size() == 8, "sections must have 8 entries");
    const hps::MappedSections at{sections[0], sections[1], sections[2], sections[3],
                                 sections[4], sections[5], sections[6], sections[7]};
    const std::size_t row_bytes = dim_ * like.itemsize();
    check_mapped(at.rows < UINT32_MAX && at.record_bytes >= row_bytes + 8 &&
                     at.records + at.rows * at.record_bytes <= at.bytes &&
                     at.pilots + at.n_buckets <= at.bytes && at.n_buckets < UINT32_MAX &&
                     at.remap + remap_entries * 4 <= at.bytes,
                 "sections must lie in the file");
    std::uint64_t* words = nullptr;
    if (!bitmap.is_none()) {
      try {
        bitmap_.emplace(bitmap.ptr(), true);
      } catch (const std::invalid_argument&) {
        bitmap_.emplace(bitmap.ptr(), false);
        read_only_ = true;
      }
      check_mapped(bitmap_->has(1, sizeof(long) == 8 ? "L" : "Q") &&
                       bitmap_->size(0) >= hps::MappedTable::bitmap_words(at.rows),
                   "bitmap must be uint64 (mapped_bitmap_words(rows),)");
      words = reinterpret_cast<std::uint64_t*>(bitmap_->bytes());
    }
    table_.emplace(file, at, checked_parts(parts, at.rows, remap_entries), row_bytes, words,
                   mapped_kernels_named(kernels));
  }

  ~MappedTable() override {
    const WithoutGil released;  // unmapping a file of 500 MB takes 20 ms and more
    table_.reset();
  }

  const hps::RowReader& reader() const override { return *table_; }
  const hps::MappedTable& table() const { return *table_; }

  nb::tuple fetch(Keys keys, Keys missing, Rows out, Array<std::uint64_t> versions,
                  Array<std::uint8_t> source) const {
    const std::size_t m = missing.shape(0);
    std::unique_ptr<std::int64_t[]> overridden(new std::int64_t[m]), absent(new std::int64_t[m]);
    const hps::LeftKeys left =
        fetch_rows(keys, missing, out, versions, source, code_, overridden.get(), absent.get());
    require_whole();
    return nb::make_tuple(array_or_none(std::move(overridden), left.n_overridden),
                          array_or_none(std::move(absent), left.n_absent));
  }

  // Fetches rows with the source `code`; writes the positions of other keys to `overridden` and
  // `absent`, which must have an entry per missing key.
  hps::LeftKeys fetch_rows(const Keys& keys, const Keys& missing, const Rows& out,
                           const Array<std::uint64_t>& versions, const Array<std::uint8_t>& source,
                           std::uint8_t code, std::int64_t* overridden,
                           std::int64_t* absent) const {
    const std::size_t n = keys.shape(0), m = missing.shape(0);
    check_rows(out, n);
    check_mapped(versions.shape(0) == n && source.shape(0) == n,
                 "versions and source must have one entry per key");
    for (std::size_t i = 0; i < m; ++i)
      check_mapped(static_cast<std::uint64_t>(missing.data()[i]) < n,
                   "missing must hold positions of keys");
    const hps::FetchOutput output{static_cast<std::uint8_t*>(out.data()), versions.data(),
                                  source.data(), code};
    hps::LeftKeys all{overridden, absent, 0, 0};
    if (is_cold(keys.data(), missing.data(), m)) read_pages(keys.data(), missing.data(), m);
    without_gil(m, [&] {
      const std::vector<hps::LeftKeys> left =
          fetch_by_pieces(keys.data(), missing.data(), m, output, overridden, absent);
      for (const hps::LeftKeys& each : left) {
        std::memmove(overridden + all.n_overridden, each.overridden, each.n_overridden * 8);
        std::memmove(absent + all.n_absent, each.absent, each.n_absent * 8);
        all.n_overridden += each.n_overridden;
        all.n_absent += each.n_absent;
      }
    });
    return all;
  }

  auto positions(Keys keys) const {
    const std::size_t n = keys.shape(0);
    std::unique_ptr<std::int64_t[]> found(new std::int64_t[n]);
    read(n, [&] { table_->read().find(table_->view(), keys.data(), n, found.get()); });
    return as_numpy(std::move(found), n);
  }

  void copy_records(Keys positions, Rows out) const {
    const std::size_t n = positions.shape(0);
    check_rows(out, n);
    check_positions(positions);
    read(n, [&] {
      table_->read().copy(table_->view(), positions.data(), n,
                          static_cast<std::uint8_t*>(out.data()));
    });
  }

  auto keys_at(Keys positions) const {
    const std::size_t n = positions.shape(0);
    check_positions(positions);
    std::unique_ptr<std::int64_t[]> keys(new std::int64_t[n]);
    read(n, [&] {
      for (std::size_t i = 0; i < n; ++i)
        std::memcpy(&keys[i],
                    table_->view().records + positions.data()[i] * table_->view().record_bytes, 8);
    });
    return as_numpy(std::move(keys), n);
  }

  // Reads the pages of the keys' records side by side; nothing in a table that is in memory.
  std::size_t populate(Keys keys) {
    const std::size_t n = table_->view().rows == 0 ? 0 : keys.shape(0);
    std::unique_ptr<std::int64_t[]> at(new std::int64_t[n]);
    std::size_t pages = 0;
    const WithoutGil released;
    table_->read().guess(table_->view(), keys.data(), n, at.get());
    pages = table_->populate(at.get(), n);
    return pages;
  }

  // Reads the file from `begin` to `end` into memory.
  void load(std::uint64_t begin, std::uint64_t end) const {
    const WithoutGil released;
    table_->load(begin, end);
  }

  double resident(std::uint64_t begin, std::uint64_t end) const {
    const WithoutGil released;
    return table_->resident(begin, end);
  }

  std::size_t override_keys(Keys keys) {
    check_writable();
    std::size_t absent = 0;
    read(keys.shape(0), [&] { absent = table_->override_keys(keys.data(), keys.shape(0)); });
    return absent;
  }

  void clear_overrides() {
    check_writable();
    const WithoutGil released;
    table_->clear_overrides();
  }

  std::uint64_t overridden() const { return table_->n_overridden(); }
  std::uint64_t rows() const { return table_->view().rows; }
  bool is_damaged() const { return table_->is_damaged(); }

 private:
  // Rows of a damaged table are not to be used: zeros may stand in their place.
  template <typename Work>
  void read(std::size_t n, Work work) const {
    without_gil(n, work);
    require_whole();
  }

  void require_whole() const {
    if (table_->is_damaged())
      throw std::runtime_error(
          "the mapped file could not be read: it was cut short, or its disk failed");
  }

  std::vector<hps::LeftKeys> fetch_by_pieces(const std::int64_t* keys, const std::int64_t* missing,
                                             std::size_t m, const hps::FetchOutput& output,
                                             std::int64_t* overridden, std::int64_t* absent) const {
    const bool several = threads_ > 1 && m >= 2 * kPieceKeys;
    const std::size_t length = several ? kPieceKeys : std::max<std::size_t>(m, 1);
    std::vector<hps::LeftKeys> left((m + length - 1) / length);
    hps::parallel_for(left.size(), threads_, [&](std::size_t piece) {
      const std::size_t at = piece * length;
      left[piece] = {overridden + at, absent + at, 0, 0};
      table_->read().fetch(table_->view(), keys, missing + at, std::min(length, m - at), version_,
                           output, left[piece]);
    });
    return left;
  }

  // Checks the pages of a few of the keys: one costs some 0.3 us.
  bool is_cold(const std::int64_t* keys, const std::int64_t* missing, std::size_t m) const {
    constexpr std::size_t kMost = 16, kLeastKeys = 8, kKeysPerCheck = 64;
    if (m < kLeastKeys || table_->view().rows == 0) return false;
    const std::size_t n = std::clamp<std::size_t>(m / kKeysPerCheck, 1, kMost);
    std::int64_t sampled[kMost], at[kMost];
    for (std::size_t i = 0; i < n; ++i) sampled[i] = keys[missing[(2 * i + 1) * m / (2 * n)]];
    table_->read().guess(table_->view(), sampled, n, at);
    return !table_->is_resident(at, n);
  }

  // Reads the pages of the keys' records side by side, where a fetch would wait for one by one.
  void read_pages(const std::int64_t* keys, const std::int64_t* missing, std::size_t m) const {
    std::unique_ptr<std::int64_t[]> wanted(new std::int64_t[m]), at(new std::int64_t[m]);
    const WithoutGil released;
    for (std::size_t i = 0; i < m; ++i) wanted[i] = keys[missing[i]];
    table_->read().guess(table_->view(), wanted.get(), m, at.get());
    table_->populate(at.get(), m);
  }

  void check_writable() const {
    check_mapped(bitmap_.has_value() && !read_only_, "the table has no bitmap that can be written");
  }

  void check_positions(const Keys& positions) const {
    bool fit = true;
    for (std::size_t i = 0; i < positions.shape(0); ++i)
      fit &= static_cast<std::uint64_t>(positions.data()[i]) < rows();
    check_mapped(fit, "positions must be those of records");
  }

  std::uint64_t version_;
  std::optional<Buffer> bitmap_;
  bool read_only_ = false;
  std::optional<hps::MappedTable> table_;
};
