// Python binding of CacheTable and the functions that belong to it.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "bindings_table.hpp"

namespace {

hps::Eviction eviction_named(const std::string& name) {
  if (name == "lru") return hps::Eviction::kLru;
  if (name == "lfu") return hps::Eviction::kLfu;
  if (name == "random") return hps::Eviction::kRandom;
  if (name == "fifo") return hps::Eviction::kFifo;
  throw std::invalid_argument("eviction must be lru, lfu, random or fifo, not " + name);
}

hps::Pages pages_named(const std::string& name) {
  if (name == "try") return hps::Pages::kTry;
  if (name == "transparent") return hps::Pages::kTransparent;
  if (name == "reserved") return hps::Pages::kReserved;
  if (name == "off") return hps::Pages::kSmall;
  throw std::invalid_argument("huge_pages must be try, transparent, reserved or off, not " + name);
}

CacheTable* attach(int file, const ReadOnlyRows& like, std::uint8_t code,
                   const FormatCode& format) {
  return new CacheTable(file, like, code, *hps::runnable_kernels().front(), format);
}

void py_copy_rows(const ReadOnlyRows& rows, const Keys& numbers, Rows out) {
  const std::size_t n = numbers.shape(0), bytes = rows.shape(1) * rows.itemsize();
  if (out.dtype() != rows.dtype() || out.shape(1) != rows.shape(1) || out.shape(0) != n)
    throw std::invalid_argument("out must have the rows' dtype and dim, and one entry per number");
  bool fit = true;
  for (std::size_t i = 0; i < n; ++i)
    fit &= static_cast<std::uint64_t>(numbers.data()[i]) < rows.shape(0);
  if (!fit) throw std::invalid_argument("numbers must be row numbers of rows");
  without_gil(n, [&] {
    hps::runnable_kernels().front()->copy_rows(static_cast<const std::uint8_t*>(rows.data()), bytes,
                                               numbers.data(), n,
                                               static_cast<std::uint8_t*>(out.data()));
  });
}

}  // namespace

void bind_cache(nb::module_& m) {
  nb::class_<RowTable>(m, "RowTable")
      .def_prop_rw("threads", &RowTable::threads, &RowTable::set_threads)
      .def("gather", &RowTable::gather, nb::arg("keys").noconvert(), nb::arg("out").noconvert())
      .def("pool_bags", &pool_bags, nb::arg("keys").noconvert(),
           nb::arg("offsets").noconvert().none(), nb::arg("weights").noconvert().none(),
           nb::arg("divisors").noconvert().none(), nb::arg("out").noconvert(),
           nb::arg("supplied").noconvert().none() = nb::none());
  nb::class_<CacheTable, RowTable>(m, "CacheTable")
      .def(
          "__init__",
          [](CacheTable* self, std::uint64_t capacity, const ReadOnlyRows& like,
             const std::string& eviction, std::uint8_t code,
             const std::optional<std::string>& kernels, int file, const std::string& huge_pages,
             int numa_node, bool on_demand, const FormatCode& format) {
            new (self)
                CacheTable(capacity, like, eviction_named(eviction), code, kernels_named(kernels),
                           {file, pages_named(huge_pages), numa_node, on_demand}, format);
          },
          nb::arg("capacity"), nb::arg("like").noconvert(), nb::arg("eviction"), nb::arg("code"),
          nb::arg("kernels") = nb::none(), nb::arg("file") = -1, nb::arg("huge_pages") = "try",
          nb::arg("numa_node") = -1, nb::arg("on_demand") = false, nb::arg("format") = nb::none())
      .def_static("attach", &attach, nb::arg("file"), nb::arg("like").noconvert(), nb::arg("code"),
                  nb::arg("format") = nb::none(), nb::rv_policy::take_ownership)
      .def("repair", &CacheTable::repair)
      .def("fetch", &CacheTable::fetch, nb::arg("keys").noconvert(), nb::arg("missing").noconvert(),
           nb::arg("oldest_tombstone"), nb::arg("out").noconvert(), nb::arg("versions").noconvert(),
           nb::arg("source").noconvert())
      .def("write", &CacheTable::write, nb::arg("keys").noconvert(),
           nb::arg("rows").noconvert().none(), nb::arg("versions").noconvert(),
           nb::arg("oldest_tombstone"), nb::arg("resident_only"))
      .def("evict", &CacheTable::evict, nb::arg("keys").noconvert())
      .def("expire", &CacheTable::expire, nb::arg("oldest"), nb::arg("first"), nb::arg("n"))
      .def("top_k", &CacheTable::top_k, nb::arg("n"))
      .def_prop_ro("rows", &CacheTable::rows)
      .def_prop_ro("tombstones", &CacheTable::tombstones)
      .def_prop_ro("evictions", &CacheTable::evictions)
      .def_prop_ro("capacity", &CacheTable::capacity)
      .def_prop_ro("buckets", &CacheTable::buckets)
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
