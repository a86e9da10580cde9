// Python bindings of MappedTable and LayeredTable, and of the function that builds its index.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings_layered.hpp"

namespace {

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
  check_mapped(n <= slots && buckets > 0 && hashes.shape(0) < UINT32_MAX,
               "slots must be at least the keys");
  for (std::uint32_t i = 0; i < n; ++i) {
    const std::uint32_t bucket = hps::reduce(hashes.data()[i], n_buckets);
    check_mapped(bucket >= first_bucket && bucket - first_bucket < buckets &&
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
  check_mapped(
      keys.shape(0) == n && rows.shape(0) == n && records.shape(0) == n && bytes >= 8 + row_bytes,
      "keys, rows and records must have one entry per position");
  for (std::size_t i = 0; i < n; ++i)
    check_mapped(positions.data()[i] < n, "positions must be those of records");
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
      .def(nb::init<int, const ReadOnlyRows&, const std::vector<std::uint64_t>&, const IndexParts&,
                    std::uint64_t, std::uint64_t, std::uint8_t, nb::object,
                    const std::optional<std::string>&, const FormatCode&>(),
           nb::arg("file"), nb::arg("like").noconvert(), nb::arg("sections"),
           nb::arg("parts").noconvert(), nb::arg("remap_entries"), nb::arg("version"),
           nb::arg("code"), nb::arg("bitmap").none() = nb::none(), nb::arg("kernels") = nb::none(),
           nb::arg("format") = nb::none())
      .def("fetch", &MappedTable::fetch, nb::arg("keys").noconvert(),
           nb::arg("missing").noconvert(), nb::arg("out").noconvert(),
           nb::arg("versions").noconvert(), nb::arg("source").noconvert())
      .def("positions", &MappedTable::positions, nb::arg("keys").noconvert())
      .def("keys_at", &MappedTable::keys_at, nb::arg("positions").noconvert())
      .def("copy_records", &MappedTable::copy_records, nb::arg("positions").noconvert(),
           nb::arg("out").noconvert())
      .def("populate", &MappedTable::populate, nb::arg("keys").noconvert())
      .def("load", &MappedTable::load, nb::arg("begin"), nb::arg("end"))
      .def("resident", &MappedTable::resident, nb::arg("begin"), nb::arg("end"))
      .def("override_keys", &MappedTable::override_keys, nb::arg("keys").noconvert())
      .def("clear_overrides", &MappedTable::clear_overrides)
      .def_prop_ro("overridden", &MappedTable::overridden)
      .def_prop_ro("rows", &MappedTable::rows)
      .def_prop_ro("dim", &MappedTable::dim)
      .def_prop_ro("is_damaged", &MappedTable::is_damaged);
  nb::class_<LayeredTable, RowTable>(m, "LayeredTable")
      .def(nb::init<nb::object, nb::object, std::uint8_t>(), nb::arg("mapped"),
           nb::arg("cache").none(), nb::arg("code"))
      .def("fetch", &LayeredTable::fetch, nb::arg("keys").noconvert(),
           nb::arg("missing").noconvert(), nb::arg("oldest_tombstone"), nb::arg("out").noconvert(),
           nb::arg("versions").noconvert(), nb::arg("source").noconvert())
      .def_prop_ro("tombstones", &LayeredTable::tombstones)
      .def_prop_ro("dim", &LayeredTable::dim);
  m.def("bitmap_words", &hps::MappedTable::bitmap_words, nb::arg("rows"));
  m.def("index_hashes", &py_index_hashes, nb::arg("keys").noconvert(), nb::arg("seed"));
  m.def("build_index_part", &py_build_index_part, nb::arg("hashes").noconvert(),
        nb::arg("first_bucket"), nb::arg("buckets"), nb::arg("n_buckets"), nb::arg("slots"));
  m.def("place_records", &py_place_records, nb::arg("positions").noconvert(),
        nb::arg("keys").noconvert(), nb::arg("rows").noconvert(), nb::arg("records").noconvert());
}
