#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "bindings.hpp"
#include "hps/cache_table.hpp"

namespace {

template <typename T>
using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ReadOnlyRows = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

hps::Eviction eviction_named(const std::string& name) {
  if (name == "lru") return hps::Eviction::kLru;
  if (name == "lfu") return hps::Eviction::kLfu;
  if (name == "random") return hps::Eviction::kRandom;
  if (name == "fifo") return hps::Eviction::kFifo;
  throw std::invalid_argument("eviction must be lru, lfu, random or fifo, not " + name);
}

const hps::ReadKernels& kernels_named(const std::optional<std::string>& name) {
  for (const hps::ReadKernels* kernels : hps::runnable_kernels())
    if (!name || *name == kernels->name) return *kernels;
  throw std::invalid_argument("this machine can't run the kernels " + *name);
}

class CacheTable {
 public:
  CacheTable(std::uint64_t capacity, const ReadOnlyRows& like, const std::string& eviction,
             std::uint8_t code, const std::optional<std::string>& kernels)
      : dtype_(like.dtype()),
        dim_(like.shape(1)),
        code_(code),
        table_(capacity, like.shape(1) * like.itemsize(), eviction_named(eviction),
               kernels_named(kernels)) {}

  nb::object fetch(Keys keys, Keys missing, std::uint64_t oldest_tombstone, Rows out,
                   Array<std::uint64_t> versions, Array<std::uint8_t> source) const {
    const std::size_t n = keys.shape(0), m = missing.shape(0);
    check_rows(out, n);
    if (versions.shape(0) != n || source.shape(0) != n)
      throw std::invalid_argument("versions and source must have one entry per key");
    for (std::size_t i = 0; i < m; ++i)
      if (static_cast<std::uint64_t>(missing.data()[i]) >= n)
        throw std::invalid_argument("missing must hold positions of keys");

    const hps::CacheAnswer answer{static_cast<std::uint8_t*>(out.data()), versions.data(),
                                  source.data(), code_};
    std::unique_ptr<std::int64_t[]> left(new std::int64_t[m]);
    std::size_t unanswered = 0;
    without_gil(m, [&] {
      unanswered =
          table_.fetch(keys.data(), missing.data(), m, oldest_tombstone, answer, left.get());
    });
    if (unanswered == 0) return nb::none();
    return nb::cast(own(std::move(left), unanswered));
  }

  bool gather(Keys keys, Rows out) const {
    const std::size_t n = keys.shape(0);
    check_rows(out, n);
    bool all = false;
    without_gil(
        n, [&] { all = table_.gather(keys.data(), n, static_cast<std::uint8_t*>(out.data())); });
    return all;
  }

  void write(Keys keys, std::optional<ReadOnlyRows> rows, Array<const std::uint64_t> versions,
             std::uint64_t oldest_tombstone, bool resident_only) {
    const std::size_t n = keys.shape(0);
    if (versions.shape(0) != n) throw std::invalid_argument("versions must have one entry per key");
    if (rows) check_rows(*rows, n);
    const std::uint8_t* from = rows ? static_cast<const std::uint8_t*>(rows->data()) : nullptr;
    // Another writer may have to be waited for: never with the GIL.
    nb::gil_scoped_release release;
    table_.write({keys.data(), versions.data(), from, n, oldest_tombstone, resident_only});
  }

  void evict(Keys keys) {
    nb::gil_scoped_release release;
    table_.evict(keys.data(), keys.shape(0));
  }

  nb::object top_k(std::size_t n) const {
    std::vector<hps::HotKey> hot;
    {
      nb::gil_scoped_release release;
      hot = table_.top_k(n);
    }
    std::unique_ptr<std::int64_t[]> keys(new std::int64_t[hot.size()]);
    std::unique_ptr<std::uint8_t[]> scores(new std::uint8_t[hot.size()]);
    for (std::size_t i = 0; i < hot.size(); ++i) {
      keys[i] = hot[i].key;
      scores[i] = hot[i].score;
    }
    return nb::make_tuple(own(std::move(keys), hot.size()), own(std::move(scores), hot.size()));
  }

  std::uint64_t rows() const { return table_.counts().rows; }
  std::uint64_t tombstones() const { return table_.counts().tombstones; }
  std::uint64_t evictions() const { return table_.counts().evictions; }
  std::uint64_t capacity() const { return table_.header().capacity; }
  std::uint64_t bytes() const { return table_.header().bytes; }

 private:
  template <typename Array>
  void check_rows(const Array& rows, std::size_t n) const {
    if (rows.dtype() != dtype_ || rows.shape(1) != dim_)
      throw std::invalid_argument("rows must have the table's dtype and dim");
    if (rows.shape(0) != n) throw std::invalid_argument("rows must have one entry per key");
  }

  nb::dlpack::dtype dtype_;
  std::size_t dim_;
  std::uint8_t code_;
  hps::CacheTable table_;
};

void py_copy_rows(const ReadOnlyRows& rows, const Keys& numbers, Rows out) {
  const std::size_t n = numbers.shape(0), bytes = rows.shape(1) * rows.itemsize();
  if (out.dtype() != rows.dtype() || out.shape(1) != rows.shape(1) || out.shape(0) != n)
    throw std::invalid_argument("out must have the rows' dtype and dim, and one entry per number");
  bool fit = true;
  for (std::size_t i = 0; i < n; ++i)
    fit &= static_cast<std::uint64_t>(numbers.data()[i]) < rows.shape(0);
  if (!fit) throw std::invalid_argument("numbers must be those of rows");
  without_gil(n, [&] {
    hps::runnable_kernels().front()->copy_rows(static_cast<const std::uint8_t*>(rows.data()), bytes,
                                               numbers.data(), n,
                                               static_cast<std::uint8_t*>(out.data()));
  });
}

}  // namespace

void bind_cache(nb::module_& m) {
  nb::class_<CacheTable>(m, "CacheTable")
      .def(nb::init<std::uint64_t, const ReadOnlyRows&, const std::string&, std::uint8_t,
                    const std::optional<std::string>&>(),
           nb::arg("capacity"), nb::arg("like").noconvert(), nb::arg("eviction"), nb::arg("code"),
           nb::arg("kernels") = nb::none())
      .def("fetch", &CacheTable::fetch, nb::arg("keys").noconvert(), nb::arg("missing").noconvert(),
           nb::arg("oldest_tombstone"), nb::arg("out").noconvert(), nb::arg("versions").noconvert(),
           nb::arg("source").noconvert())
      .def("gather", &CacheTable::gather, nb::arg("keys").noconvert(), nb::arg("out").noconvert())
      .def("write", &CacheTable::write, nb::arg("keys").noconvert(),
           nb::arg("rows").noconvert().none(), nb::arg("versions").noconvert(),
           nb::arg("oldest_tombstone"), nb::arg("resident_only"))
      .def("evict", &CacheTable::evict, nb::arg("keys").noconvert())
      .def("top_k", &CacheTable::top_k, nb::arg("n"))
      .def_prop_ro("rows", &CacheTable::rows)
      .def_prop_ro("tombstones", &CacheTable::tombstones)
      .def_prop_ro("evictions", &CacheTable::evictions)
      .def_prop_ro("capacity", &CacheTable::capacity)
      .def_prop_ro("bytes", &CacheTable::bytes);
  m.def("cache_bytes", &hps::CacheTable::bytes_for, nb::arg("capacity"), nb::arg("row_bytes"));
  m.def("copy_rows", &py_copy_rows, nb::arg("rows").noconvert(), nb::arg("numbers").noconvert(),
        nb::arg("out").noconvert());
  m.def("cache_kernels", [] {
    nb::list names;
    for (const hps::ReadKernels* kernels : hps::runnable_kernels()) names.append(kernels->name);
    return names;
  });
}
