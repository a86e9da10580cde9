// Python binding of MappedTable, and of the function that builds its index.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "bindings_table.hpp"
#include "hps/mapped_table.hpp"

namespace {

using Parts = nb::ndarray<nb::ro, const std::uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void check(bool fits, const char* what) {
  if (!fits) throw std::invalid_argument(what);
}

const hps::MappedKernels& mapped_kernels_named(const std::optional<std::string>& name) {
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
std::vector<hps::IndexPart> checked_parts(const Parts& array, std::uint64_t rows,
                                          std::uint64_t remap_entries) {
  check(array.shape(0) > 0 && array.shape(1) == 4, "parts must be (parts, 4)");
  std::vector<hps::IndexPart> parts(array.shape(0));
  std::uint64_t start = 0, remap = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const std::uint32_t* from = array.data() + 4 * i;
    hps::IndexPart& part = parts[i];
    part = {from[0], from[1], from[2], from[3]};
    check(part.start == start && part.keys <= part.slots && part.remap == remap,
          "parts must cover the rows");
    start += part.keys;
    remap += part.slots - part.keys;
    // A search in an empty part must find a record too.
    if (part.keys == 0) part = {0, 1, 1, 0};
  }
  check(start == rows && remap == remap_entries, "parts must cover the rows");
  return parts;
}

class MappedTable final : public RowTable {
 public:
  MappedTable(int file, const ReadOnlyRows& like, const std::vector<std::uint64_t>& sections,
              const Parts& parts, std::uint64_t remap_entries, std::uint64_t version,
              std::uint8_t code, nb::object bitmap, const std::optional<std::string>& kernels)
      : RowTable(like, code), version_(version) {
    check(sections.size() == 8, "sections must have 8 entries");
    const hps::MappedSections at{sections[0], sections[1], sections[2], sections[3],
                                 sections[4], sections[5], sections[6], sections[7]};
    const std::size_t row_bytes = dim_ * like.itemsize();
    check(at.rows < UINT32_MAX && at.record_bytes >= row_bytes + 8 &&
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
      check(bitmap_->has(1, sizeof(long) == 8 ? "L" : "Q") &&
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

  nb::tuple fetch(Keys keys, Keys missing, Rows out, Array<std::uint64_t> versions,
                  Array<std::uint8_t> source) const {
    const std::size_t n = keys.shape(0), m = missing.shape(0);
    check_rows(out, n);
    check(versions.shape(0) == n && source.shape(0) == n,
          "versions and source must have one entry per key");
    for (std::size_t i = 0; i < m; ++i)
      check(static_cast<std::uint64_t>(missing.data()[i]) < n,
            "missing must hold positions of keys");
    const hps::FetchOutput output{static_cast<std::uint8_t*>(out.data()), versions.data(),
                                  source.data(), code_};
    std::unique_ptr<std::int64_t[]> overridden(new std::int64_t[m]), absent(new std::int64_t[m]);
    std::size_t n_overridden = 0, n_absent = 0;
    if (is_cold(keys.data(), missing.data(), m)) read_pages(keys.data(), missing.data(), m);
    read(m, [&] {
      const std::vector<hps::LeftKeys> left =
          fetch_by_pieces(keys.data(), missing.data(), m, output, overridden.get(), absent.get());
      for (const hps::LeftKeys& each : left) {
        std::memmove(overridden.get() + n_overridden, each.overridden, each.n_overridden * 8);
        std::memmove(absent.get() + n_absent, each.absent, each.n_absent * 8);
        n_overridden += each.n_overridden;
        n_absent += each.n_absent;
      }
    });
    return nb::make_tuple(array_or_none(std::move(overridden), n_overridden),
                          array_or_none(std::move(absent), n_absent));
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
    check(bitmap_.has_value() && !read_only_, "the table has no bitmap that can be written");
  }

  void check_positions(const Keys& positions) const {
    bool fit = true;
    for (std::size_t i = 0; i < positions.shape(0); ++i)
      fit &= static_cast<std::uint64_t>(positions.data()[i]) < rows();
    check(fit, "positions must be those of records");
  }

  std::uint64_t version_;
  std::optional<Buffer> bitmap_;
  bool read_only_ = false;
  std::optional<hps::MappedTable> table_;
};

auto py_index_hashes(const Keys& keys, std::uint64_t seed) {
  const std::size_t n = keys.shape(0);
  std::unique_ptr<std::uint64_t[]> hashes(new std::uint64_t[n]);
  without_gil(n, [&] {
    for (std::size_t i = 0; i < n; ++i) hashes[i] = hps::index_hash(keys.data()[i], seed);
  });
  return as_numpy(std::move(hashes), n);
}

nb::object py_build_index_part(const Array<const std::uint64_t>& hashes, std::uint32_t first_bucket,
                               std::uint32_t buckets, std::uint32_t n_buckets,
                               std::uint32_t slots) {
  const auto n = static_cast<std::uint32_t>(hashes.shape(0));
  check(n <= slots && buckets > 0 && hashes.shape(0) < UINT32_MAX,
        "slots must be at least the keys");
  for (std::uint32_t i = 0; i < n; ++i) {
    const std::uint32_t bucket = hps::reduce(hashes.data()[i], n_buckets);
    check(bucket >= first_bucket && bucket - first_bucket < buckets &&
              (i == 0 || hashes.data()[i - 1] < hashes.data()[i]),
          "hashes must ascend and belong to the part");
  }
  std::unique_ptr<std::uint8_t[]> pilots(new std::uint8_t[buckets]);
  std::unique_ptr<std::uint32_t[]> positions(new std::uint32_t[n]),
      remap(new std::uint32_t[slots - n]);
  bool built = false;
  without_gil(n, [&] {
    built = hps::build_part({hashes.data(), n, first_bucket, buckets, n_buckets, slots},
                            pilots.get(), positions.get(), remap.get());
  });
  if (!built) return nb::none();
  return nb::make_tuple(as_numpy(std::move(pilots), buckets), as_numpy(std::move(positions), n),
                        as_numpy(std::move(remap), slots - n));
}

// Writes record positions[i], of `records` (n, record bytes), from key and row i.
void py_place_records(
    const Array<const std::uint32_t>& positions, const Keys& keys, const ReadOnlyRows& rows,
    const nb::ndarray<std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>& records) {
  const std::size_t n = positions.shape(0), bytes = records.shape(1);
  const std::size_t row_bytes = rows.shape(1) * rows.itemsize();
  check(keys.shape(0) == n && rows.shape(0) == n && records.shape(0) == n && bytes >= 8 + row_bytes,
        "keys, rows and records must have one entry per position");
  for (std::size_t i = 0; i < n; ++i)
    check(positions.data()[i] < n, "positions must be those of records");
  without_gil(n, [&] {
    for (std::size_t i = 0; i < n; ++i) {
      std::uint8_t* to = records.data() + positions.data()[i] * bytes;
      std::memcpy(to, keys.data() + i, 8);
      std::memcpy(to + 8, static_cast<const std::uint8_t*>(rows.data()) + i * row_bytes, row_bytes);
    }
  });
}

}  // namespace

void bind_mapped(nb::module_& m) {
  nb::class_<MappedTable, RowTable>(m, "MappedTable")
      .def(nb::init<int, const ReadOnlyRows&, const std::vector<std::uint64_t>&, const Parts&,
                    std::uint64_t, std::uint64_t, std::uint8_t, nb::object,
                    const std::optional<std::string>&>(),
           nb::arg("file"), nb::arg("like").noconvert(), nb::arg("sections"),
           nb::arg("parts").noconvert(), nb::arg("remap_entries"), nb::arg("version"),
           nb::arg("code"), nb::arg("bitmap").none() = nb::none(), nb::arg("kernels") = nb::none())
      .def("fetch", &MappedTable::fetch, nb::arg("keys").noconvert(),
           nb::arg("missing").noconvert(), nb::arg("out").noconvert(),
           nb::arg("versions").noconvert(), nb::arg("source").noconvert())
      .def("positions", &MappedTable::positions, nb::arg("keys").noconvert())
      .def("copy_records", &MappedTable::copy_records, nb::arg("positions").noconvert(),
           nb::arg("out").noconvert())
      .def("populate", &MappedTable::populate, nb::arg("keys").noconvert())
      .def("resident", &MappedTable::resident, nb::arg("begin"), nb::arg("end"))
      .def("override_keys", &MappedTable::override_keys, nb::arg("keys").noconvert())
      .def("clear_overrides", &MappedTable::clear_overrides)
      .def_prop_ro("overridden", &MappedTable::overridden)
      .def_prop_ro("rows", &MappedTable::rows)
      .def_prop_ro("dim", &MappedTable::dim)
      .def_prop_ro("is_damaged", &MappedTable::is_damaged);
  m.def("bitmap_words", &hps::MappedTable::bitmap_words, nb::arg("rows"));
  m.def("index_hashes", &py_index_hashes, nb::arg("keys").noconvert(), nb::arg("seed"));
  m.def("build_index_part", &py_build_index_part, nb::arg("hashes").noconvert(),
        nb::arg("first_bucket"), nb::arg("buckets"), nb::arg("n_buckets"), nb::arg("slots"));
  m.def("place_records", &py_place_records, nb::arg("positions").noconvert(),
        nb::arg("keys").noconvert(), nb::arg("rows").noconvert(), nb::arg("records").noconvert());
}
